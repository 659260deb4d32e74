//! Which virtual stage of the pipeline computes each value.
//!
//! A node of a layer runs on the layer's virtual stage. Other nodes follow their operands (a head after the last layer) or, if they
//! have none, their users (an embedding before the first). What depends on data alone or on parameters alone is
//! *loose*: every stage that uses it computes it for itself.

use crate::layout::Part;
use crate::schedule::Placement;
use ir::graph::{Body, Phase, Value};
use ir::op::Op;

/// Which virtual stage holds each layer, and which stage each virtual stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub stages: u32,
    /// Virtual stages of a stage.
    pub chunks: u32,
    pub placement: Placement,
    /// The virtual stages of what comes before all layers, and of what comes after.
    pub embedding: u32,
    pub loss: u32,
    /// Virtual stage by layer.
    pub of_layer: Vec<u32>,
}

impl Layout {
    /// What each virtual stage holds. Unless a part has the embedding or the loss, it is with the first or the last layer.
    pub fn from_parts(parts: &[Part], stages: u32, placement: Placement) -> Layout {
        let of_layer: Vec<u32> = parts.iter().enumerate().flat_map(|(g, p)| std::iter::repeat_n(g as u32, p.layers as usize)).collect();
        let with = |has: fn(&Part) -> bool, layer: Option<&u32>| parts.iter().position(has).map(|g| g as u32).or(layer.copied());
        let embedding = with(|p| p.embedding, of_layer.first()).unwrap_or(0);
        let loss = with(|p| p.loss, of_layer.last()).unwrap_or(parts.len() as u32 - 1);
        Layout { stages, chunks: parts.len() as u32 / stages, placement, embedding, loss, of_layer }
    }

    pub fn virtual_stages(&self) -> u32 {
        self.stages * self.chunks
    }

    /// The stage of a virtual stage.
    pub fn stage(&self, virtual_stage: u32) -> u32 {
        self.placement.place(virtual_stage, self.stages).0
    }

    /// The number of a virtual stage on its stage.
    pub fn chunk(&self, virtual_stage: u32) -> u32 {
        self.placement.place(virtual_stage, self.stages).1
    }
}

/// For each value of the forward and backward pass, its virtual stage; none if it is loose (or of the update).
pub fn assign(body: &Body, layout: &Layout) -> Vec<Option<u32>> {
    let (mut data, mut params) = (vec![false; body.nodes.len()], vec![false; body.nodes.len()]);
    let mut stage: Vec<Option<u32>> = vec![None; body.nodes.len()];
    let mut open = vec![];
    let ends = Ends::new(body);
    for v in body.values().filter(|v| body[*v].origin.phase != Phase::Update) {
        let node = &body[v];
        data[v.index()] = matches!(node.op, Op::Input(_) | Op::Uniform { .. }) || node.args.iter().any(|a| data[a.index()]);
        params[v.index()] = matches!(node.op, Op::Param(_)) || node.args.iter().any(|a| params[a.index()]);
        if !data[v.index()] || !params[v.index()] {
            continue;
        }
        if let Some(l) = node.origin.layer {
            stage[v.index()] = Some(layout.of_layer[l as usize]);
            continue;
        }
        let of = |phase: Phase| node.args.iter().filter(move |a| body[**a].origin.phase == phase).filter_map(|a| stage[a.index()]);
        let found = match node.origin.phase {
            // What follows the last layer goes on to the stage of the loss, but what follows only earlier ones stays with them.
            Phase::Forward => of(Phase::Forward).max().map(|s| if ends.is_end(v) && Some(&s) == layout.of_layer.last() { layout.loss } else { s }),
            Phase::Backward | Phase::Update => {
                let after = of(Phase::Backward).min();
                let after = after.map(|s| if ends.is_end(v) && Some(&s) == layout.of_layer.first() { layout.embedding } else { s });
                after.or(of(Phase::Forward).max())
            }
        };
        match found {
            Some(s) => stage[v.index()] = Some(s),
            None => open.push(v),
        }
    }
    let users = body.users();
    for v in open.into_iter().rev() {
        let phase = body[v].origin.phase;
        let of = users[v.index()].iter().filter(|(c, _)| body[*c].origin.phase == phase).filter_map(|(c, _)| stage[c.index()]);
        // The forward pass goes up the stages, the backward pass down (it begins so where a loss is linear: its gradient is data).
        let found = match phase {
            Phase::Forward => of.min().map_or(0, |s| if Some(&s) == layout.of_layer.first() { layout.embedding.min(s) } else { s }),
            Phase::Backward | Phase::Update => of.max().unwrap_or(layout.loss),
        };
        stage[v.index()] = Some(found);
    }
    stage
}

/// What comes after all layers: of the forward pass heads and losses, of the backward pass the gradients of embeddings.
struct Ends {
    /// A layer of the same phase comes before, or is it.
    after: Vec<bool>,
    /// A layer of the same phase follows.
    before: Vec<bool>,
}

impl Ends {
    fn new(body: &Body) -> Ends {
        let n = body.nodes.len();
        let (mut after, mut before) = (vec![false; n], vec![false; n]);
        let phase = |v: Value| body[v].origin.phase;
        for v in body.values() {
            after[v.index()] = body[v].origin.layer.is_some() || body[v].args.iter().any(|a| phase(*a) == phase(v) && after[a.index()]);
        }
        for v in body.values().rev() {
            for a in body[v].args.iter().filter(|a| phase(**a) == phase(v)) {
                before[a.index()] |= body[v].origin.layer.is_some() || before[v.index()];
            }
        }
        Ends { after, before }
    }

    fn is_end(&self, v: Value) -> bool {
        self.after[v.index()] && !self.before[v.index()]
    }
}
