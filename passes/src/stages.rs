//! Which pipeline stage computes each value.
//!
//! A node of a layer runs on the layer's stage. Other nodes follow their operands (a head after the last layer) or, if they
//! have none, their users (an embedding before the first). What depends on data alone or on parameters alone is
//! *loose*: every stage that uses it computes it for itself.

use ir::graph::{Body, Phase};
use ir::op::Op;

/// Which stage holds each layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub stages: u32,
    pub of_layer: Vec<u32>,
}

impl Layout {
    /// As even as possible; the first stages hold one more where it does not divide. None if there are fewer layers than stages.
    pub fn even(layers: u32, stages: u32) -> Option<Layout> {
        if stages > 1 && layers < stages {
            return None;
        }
        let (each, extra) = (layers / stages, layers % stages);
        let sizes: Vec<u32> = (0..stages).map(|s| each + u32::from(s < extra)).collect();
        Some(Layout::from_sizes(&sizes))
    }

    /// The given number of layers on each stage.
    pub fn from_sizes(sizes: &[u32]) -> Layout {
        let of_layer = sizes.iter().enumerate().flat_map(|(s, n)| std::iter::repeat_n(s as u32, *n as usize)).collect();
        Layout { stages: sizes.len() as u32, of_layer }
    }
}

/// For each value of the forward and backward pass, its stage; none if it is loose (or of the update).
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
            Phase::Backward | Phase::Update => of.max().unwrap_or(layout.stages - 1),
        };
        stage[v.index()] = Some(found);
    }
    stage
}
