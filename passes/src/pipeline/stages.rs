//! Which virtual stage of the pipeline computes each value.
//!
//! A node of a layer runs on the layer's virtual stage. Other nodes of the forward pass follow their operands (a head after the last layer)
//! or, if they have none, their users (an embedding before the first); those of the backward pass are where what they are the gradient of
//! is, if that shows, or follow their operands. So values only ever go up the virtual stages in the forward pass, and down in the
//! backward pass. What depends on data alone or on parameters alone is *loose*: every stage that uses it computes it for itself.

use ir::graph::{Body, Phase, Users, Value};
use ir::op::{Op, Reshard};
use ir::pipeline::Layout;
use std::collections::BTreeSet;

/// For each value of the forward and backward pass, its virtual stage; none if it is loose (or of the update), or each stage that uses it makes it
/// from what it is a part of, or from its parts.
pub fn assign(body: &Body, layout: &Layout) -> Vec<Option<u32>> {
    let has_stage = staged(body);
    let of_phase = |phase: Phase| body.values().filter(|v| body[*v].origin.phase == phase && has_stage[v.index()]).collect::<Vec<Value>>();
    let mut assigning = StageAssigner {
        body,
        layout,
        users: body.users(),
        ends: PipelineEnds::new(body),
        stage: vec![None; body.nodes.len()],
        of_phase: [of_phase(Phase::Forward), of_phase(Phase::Backward)],
    };
    assigning.forward();
    assigning.backward();
    assigning.made_where_used();
    assigning.stage
}

/// Which values of the forward and backward pass are not loose: they depend on data and on parameters.
fn staged(body: &Body) -> Vec<bool> {
    let (mut data, mut params) = (vec![false; body.nodes.len()], vec![false; body.nodes.len()]);
    for v in body.values() {
        let node = &body[v];
        data[v.index()] = matches!(node.op, Op::Input(_) | Op::Uniform { .. }) || node.args.iter().any(|a| data[a.index()]);
        params[v.index()] = matches!(node.op, Op::Param(_)) || node.args.iter().any(|a| params[a.index()]);
    }
    let staged = |v: Value| body[v].origin.phase != Phase::Update && data[v.index()] && ir::fault!("stages.loose.data", true, params[v.index()]);
    body.values().map(staged).collect()
}

struct StageAssigner<'a> {
    body: &'a Body,
    layout: &'a Layout,
    users: Users,
    ends: PipelineEnds,
    stage: Vec<Option<u32>>,
    /// The values of the forward and of the backward pass that are not loose.
    of_phase: [Vec<Value>; 2],
}

impl StageAssigner<'_> {
    /// The virtual stage of a value's layer.
    fn of_layer(&self, v: Value) -> Option<u32> {
        layer(self.body, v).map(|l| self.layout.of_layer[l as usize])
    }

    /// The stages of operands of a phase.
    fn args(&self, v: Value, phase: Phase) -> impl Iterator<Item = u32> {
        self.body[v].args.iter().filter(move |a| self.body[**a].origin.phase == phase).filter_map(|a| self.stage[a.index()])
    }

    /// The stages of users of a phase.
    fn uses(&self, v: Value, phase: Phase) -> impl Iterator<Item = u32> {
        self.users[v.index()].iter().filter(move |(c, _)| self.body[*c].origin.phase == phase).filter_map(|(c, _)| self.stage[c.index()])
    }

    fn forward(&mut self) {
        let (first, last) = (self.layout.of_layer.first(), self.layout.of_layer.last());
        let values = std::mem::take(&mut self.of_phase[0]);
        for v in &values {
            // A value that depends on the last layer goes to the stage of the loss; one that depends only on earlier
            // layers stays with them.
            let end = |s: u32| if self.ends.is_end(*v) && Some(&s) == last { self.layout.loss } else { s };
            self.stage[v.index()] =
                ir::fault!("stages.forward.layer", None, self.of_layer(*v)).or_else(|| self.args(*v, Phase::Forward).max().map(end));
        }
        for v in values.iter().rev().filter(|v| self.stage[v.index()].is_none()).copied().collect::<Vec<_>>() {
            let begin = |s: u32| if Some(&s) == first { self.layout.embedding.min(s) } else { s };
            self.stage[v.index()] = Some(self.uses(v, Phase::Forward).min().map_or(0, begin));
        }
    }

    fn backward(&mut self) {
        let (first, last) = (self.layout.of_layer.first(), self.layout.of_layer.last());
        let values = std::mem::take(&mut self.of_phase[1]);
        let floor = self.floors(&values);
        let head = self.heads(&values, &floor);
        for v in &values {
            let above = self.args(*v, Phase::Backward).min();
            let above = above.map(|s| if self.ends.is_end(*v) && Some(&s) == first { self.layout.embedding } else { s });
            let floor = floor[v.index()].map(|s| if head[v.index()] && Some(&s) == last { self.layout.loss } else { s });
            // A sum is taken as soon as all its terms are available, so that one value is relayed instead of many.
            let sums = self.body[*v].op == Op::Add || matches!(self.body[*v].op, Op::Reshard { .. });
            self.stage[v.index()] = self.of_layer(*v).or(match (above, floor) {
                (Some(above), Some(floor)) if sums => Some(above.max(floor)),
                (above, floor) => floor.or(above),
            });
        }
        for v in values.iter().rev() {
            let uses = self.uses(*v, Phase::Backward).max();
            // A value without operands and users in the backward pass, as for a linear loss, is on the stage of the
            // loss.
            let own = self.stage[v.index()].or(if uses.is_none() { Some(self.layout.loss) } else { None });
            self.stage[v.index()] = self.of_layer(*v).or(own.max(uses));
        }
    }

    /// For each of the values of the backward pass, the lowest virtual stage that it may be on: the pass goes down the stages, so that a value is not
    /// below what it is computed from in the forward pass, nor below what is computed from it. None if it leads to gradients of parameters
    /// alone.
    ///
    /// A value outside of layers is there: a gradient on the way from a decoder to its encoder is where the encoder's end is.
    fn floors(&self, values: &[Value]) -> Vec<Option<u32>> {
        let mut floor: Vec<Option<u32>> = vec![None; self.body.nodes.len()];
        for v in values.iter().rev() {
            let args = self.body[*v].args.iter().map(|a| resharded(self.body, *a));
            let args = args.filter(|a| self.body[*a].origin.phase == Phase::Forward).filter_map(|a| self.stage[a.index()]);
            let after = self.users[v.index()].iter().filter_map(|(c, _)| floor[c.index()]);
            floor[v.index()] = self.of_layer(*v).or_else(|| args.chain(after).max());
        }
        floor
    }

    /// For each value, whether it is of the backward pass of what comes after all layers: before it is no layer of that pass, nor before what is
    /// computed from it until the next layer, unless that leads to gradients of parameters alone.
    fn heads(&self, values: &[Value], floor: &[Option<u32>]) -> Vec<bool> {
        let mut head = vec![false; self.body.nodes.len()];
        for v in values.iter().rev() {
            let mut users = self.users[v.index()].iter().filter(|(c, _)| floor[c.index()].is_some());
            head[v.index()] = !self.ends.after[v.index()] && users.all(|(c, _)| self.of_layer(*c).is_some() || head[c.index()]);
        }
        head
    }

    /// What a rank has of a value by its stage's other ranks, or as a part of its own, every stage that uses it makes for itself: the value
    /// travels. Sums over ranks are taken once.
    fn made_where_used(&mut self) {
        let body = self.body;
        let mut uses: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); body.nodes.len()];
        for v in body.values().rev() {
            let Some(own) = self.stage[v.index()] else { continue };
            let mut places = BTreeSet::from([own]);
            let sums = matches!(body[v].op, Op::Reshard { kind: Reshard::AllReduce | Reshard::ReduceScatter, .. });
            let moves = matches!(body[v].op, Op::Reshard { .. }) && !(sums && body[body[v].args[0]].origin.phase == body[v].origin.phase);
            let once = self.users[v.index()].iter().any(|(c, _)| body[*c].origin.phase == Phase::Update);
            if moves && !once && uses[v.index()].iter().any(|g| self.layout.stage(*g) != self.layout.stage(own)) {
                places = std::mem::take(&mut uses[v.index()]);
                self.stage[v.index()] = places.first().copied().filter(|_| places.len() == 1);
            }
            for a in &body[v].args {
                uses[a.index()].extend(&places);
            }
        }
    }
}

/// The layer of a value. A reshard belongs to none: it stands with its operand, or where it is used.
fn layer(body: &Body, v: Value) -> Option<u32> {
    match body[v].op {
        Op::Reshard { .. } => None,
        _ => body[v].origin.layer,
    }
}

/// What a value is resharded from.
fn resharded(body: &Body, v: Value) -> Value {
    match body[v].op {
        Op::Reshard { .. } => resharded(body, body[v].args[0]),
        _ => v,
    }
}

/// What comes after all layers: of the forward pass heads and losses, of the backward pass the gradients of embeddings.
struct PipelineEnds {
    /// A layer of the same phase comes before, or is it.
    after: Vec<bool>,
    /// A layer of the same phase follows.
    before: Vec<bool>,
}

impl PipelineEnds {
    fn new(body: &Body) -> PipelineEnds {
        let n = body.nodes.len();
        let (mut after, mut before) = (vec![false; n], vec![false; n]);
        let phase = |v: Value| body[v].origin.phase;
        for v in body.values() {
            after[v.index()] = layer(body, v).is_some() || body[v].args.iter().any(|a| phase(*a) == phase(v) && after[a.index()]);
        }
        for v in body.values().rev() {
            for a in body[v].args.iter().filter(|a| phase(**a) == phase(v)) {
                before[a.index()] |= layer(body, v).is_some() || before[v.index()];
            }
        }
        PipelineEnds { after, before }
    }

    fn is_end(&self, v: Value) -> bool {
        self.after[v.index()] && !self.before[v.index()]
    }
}
