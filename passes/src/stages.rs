//! Which virtual stage of the pipeline computes each value.
//!
//! A node of a layer runs on the layer's virtual stage. Other nodes follow their operands (a head after the last layer) or, if they
//! have none, their users (an embedding before the first). What depends on data alone or on parameters alone is
//! *loose*: every stage that uses it computes it for itself.

use crate::schedule::Placement;
use ir::graph::{Body, Phase};
use ir::op::Op;

/// Which virtual stage holds each layer, and which stage each virtual stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub stages: u32,
    /// Virtual stages of a stage.
    pub chunks: u32,
    pub placement: Placement,
    /// Virtual stage by layer.
    pub of_layer: Vec<u32>,
}

impl Layout {
    /// The given number of layers on each virtual stage.
    pub fn from_sizes(sizes: &[u32], stages: u32, placement: Placement) -> Layout {
        let of_layer = sizes.iter().enumerate().flat_map(|(g, n)| std::iter::repeat_n(g as u32, *n as usize)).collect();
        Layout { stages, chunks: sizes.len() as u32 / stages, placement, of_layer }
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
            Phase::Forward => of(Phase::Forward).max(),
            Phase::Backward | Phase::Update => of(Phase::Backward).min().or(of(Phase::Forward).max()),
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
            Phase::Forward => of.min().unwrap_or(0),
            Phase::Backward | Phase::Update => of.max().unwrap_or(layout.virtual_stages() - 1),
        };
        stage[v.index()] = Some(found);
    }
    stage
}
