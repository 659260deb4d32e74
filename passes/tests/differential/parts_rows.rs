//! Mutants of what is stored as rows of experts: tables, exchanges, products and sums that are not those of the routing are refused.

use crate::generate::{Triple, triple};
use crate::harness::{Case, Ranges};
use crate::models::{DEEPSEEK, MIXTRAL, case};
use crate::parts::{Mutate, Rng, Sample, judge, replace, sample};
use ir::dim::{Base, DimInfo};
use ir::graph::{Node, Type, Value};
use ir::local::Local;
use ir::mesh::SubAxis;
use ir::op::{Binary, Collective, Compare, DType, Op, Real, Reduce};
use ir::options::{MoeBuffer, RowChoice, Zero};

/// An expert takes one row of each sequence.
const LIMITED: &str = r#"
model limited(batch, hidden = 8, experts = 4, picks = 2, expert_ffn = 8, layers = 2, seq = 4) {
  input x0: f32[batch, seq, hidden];
  param scale: [hidden] ~ normal(0.02);
  let x = x0 * scale;
  repeat layers {
    let score, chosen = top_k(softmax(linear(x, hidden, experts) as router, over: experts), over: experts, k: picks);
    x = x + experts_mlp(x, chosen, score, [batch, seq], picks, experts, hidden, expert_ffn, capacity: 1, counted: seq) as experts;
  }
  loss mean(x * x);
}
plan { dp: batch; sp: seq; ep: experts; etp: expert_ffn; pp: layers; }
"#;

fn samples() -> Vec<Sample> {
    let of = |model: (&str, &[(&str, &str)]), more: &[(&str, &str)], case: &Case| {
        let defines: Vec<(&str, &str)> = model.1.iter().chain(more).copied().collect();
        sample(model.0, &defines, case, &Ranges::new()).unwrap_or_else(|| panic!("{case:?}"))
    };
    let mut out: Vec<Sample> = ["dp2 tp2 sp ep4 etp1", "dp2 tp2 sp ep2", "tp2 sp etp1 b2"].map(|words| of(MIXTRAL, &[], &case(words))).into();
    out.extend(["dp2 tp2 ep2 m2", "dp2 tp2 sp ep2 pp2 m2", "dp2 cp2 ep2 pp2 m2"].map(|words| of(MIXTRAL, &[], &case(words))));
    out.extend(["dp2 tp2 sp ep2 m2", "cp2 ep2"].map(|words| of(DEEPSEEK, &[], &case(words))));
    out.push(of(MIXTRAL, &[], &Case { moe_buffer: MoeBuffer::Factor(1.25), ..case("dp2 ep2 b4") }));
    out.push(of(MIXTRAL, &[("seq", "16")], &Case { moe_passes: 3, ..case("dp2 ep2") }));
    out.extend(["dp2 ep2", "dp2 tp2 sp ep4 etp1 b2", "cp2 tp2 sp ep2 m2"].map(|words| of((LIMITED, &[]), &[], &case(words))));
    let experts = |t: &Triple| t.text.contains("experts_mlp(") && t.case.ep > 1;
    for mut random in (0..).map(triple).filter(experts).take(5) {
        random.case.zero = Zero::None;
        out.extend(sample(&random.text, &[], &random.case, &random.ranges));
    }
    for rows in (0..3).map(RowChoice::Random) {
        out.extend(sample(MIXTRAL.0, MIXTRAL.1, &Case { rows, ..case("dp2 tp2 sp ep2") }, &Ranges::new()));
    }
    // Samples without grouped dots have no rows to change.
    out.retain(|s| s.stages.iter().any(|l| l.body.nodes.iter().any(|n| matches!(n.op, Op::GroupedDot { .. }))));
    out
}

/// A node of rows, that holds no dense value by itself, which `keep` wants.
fn node(d: &mut Rng, l: &Local, keep: impl Fn(&Local, Value) -> bool) -> Option<Value> {
    let all: Vec<Value> = l.body.values().filter(|v| l.source[v.index()].is_none() && keep(l, *v)).collect();
    d.pick(&all)
}

fn is(l: &Local, v: Value, keep: impl Fn(&Op) -> bool) -> bool {
    keep(&l.body[v].op)
}

/// Another value of the same type and size, from before `v`.
fn like(d: &mut Rng, l: &Local, v: Value, old: Value) -> Option<Value> {
    let alike = |w: &Value| w.0 < v.0 && *w != old && l.body[*w].ty == l.body[old].ty && l.chunks[w.index()] <= l.chunks[v.index()];
    let all: Vec<Value> = l.body.values().filter(alike).collect();
    d.pick(&all)
}

/// Ops that follow each other between an operand and its user.
fn insert(l: &mut Local, user: Value, ops: &[(Op, Type)]) {
    let moved = |v: Value| if v < user { v } else { Value(v.0 + ops.len() as u32) };
    for n in &mut l.body.nodes {
        n.args.iter_mut().for_each(|a| *a = moved(*a));
    }
    l.reports.iter_mut().for_each(|r| r.1 = moved(r.1));
    for u in &mut l.updates {
        std::iter::once(&mut u.new).chain(&mut u.states).for_each(|v| *v = moved(*v));
    }
    l.host = l.host.iter().map(|v| moved(*v)).collect();
    for (k, (op, ty)) in ops.iter().enumerate() {
        let at = user.index() + k;
        let arg = if k == 0 { l.body.nodes[at].args[0] } else { Value(at as u32 - 1) };
        let origin = l.body.nodes[at].origin.clone();
        l.body.nodes.insert(at, Node { op: op.clone(), args: vec![arg], ty: ty.clone(), origin });
        l.chunks.insert(at, l.chunks[at]);
        l.accumulate.insert(at, false);
        l.source.insert(at, None);
        l.reasons.insert(at, None);
    }
    l.body.nodes[user.index() + ops.len()].args[0] = Value(user.0 + ops.len() as u32 - 1);
}

const ONE_HOME: &str = "the rows of one home alone";

const KINDS: &[(&str, Mutate)] = &[
    ("another table", |d, l| {
        let v = node(d, l, |l, v| l.body[v].args.iter().any(|a| l.body[*a].ty.dtype == DType::I32))?;
        let tables: Vec<usize> = (0..l.body[v].args.len()).filter(|k| l.body[l.body[v].args[*k]].ty.dtype == DType::I32).collect();
        let k = d.pick(&tables)?;
        l.body[v].args[k] = like(d, l, v, l.body[v].args[k])?;
        Some(())
    }),
    ("another operand", |d, l| {
        let v = node(d, l, |l, v| !l.body[v].args.is_empty())?;
        let k = d.below(l.body[v].args.len());
        l.body[v].args[k] = like(d, l, v, l.body[v].args[k])?;
        Some(())
    }),
    ("other ends, or another table of slots", |d, l| {
        let wants = |op: &Op| matches!(op, Op::GroupedDot { .. } | Op::Gather { .. } | Op::Scatter { .. });
        let all: Vec<Value> = l.body.values().filter(|v| is(l, *v, wants)).collect();
        let v = d.pick(&all)?;
        let k = l.body[v].args.len() - 1;
        l.body[v].args[k] = like(d, l, v, l.body[v].args[k])?;
        Some(())
    }),
    ("exchange operands", |d, l| {
        let v = node(d, l, |l, v| l.body[v].args.len() > 1)?;
        let args = &mut l.body[v].args;
        let (i, j) = (d.below(args.len()), d.below(args.len()));
        args.swap(i, j);
        Some(())
    }),
    ("drop an exchange", |d, l| {
        let same = |k: &Collective| matches!(k, Collective::AllToAll | Collective::AllReduce(_) | Collective::Shift);
        let v = node(d, l, |l, v| is(l, v, |op| matches!(op, Op::Collective { kind, .. } if same(kind))))?;
        let arg = l.body[v].args[0];
        replace(l, v, arg);
        Some(())
    }),
    ("another group of ranks", |d, l| {
        let v = node(d, l, |l, v| is(l, v, |op| matches!(op, Op::Collective { .. })))?;
        let all: Vec<SubAxis> = l.mesh.ids().collect();
        let (to, n) = (d.pick(&all)?, d.below(8));
        let Op::Collective { subs, stages: None, .. } = &mut l.body[v].op else { return None };
        let k = n % subs.len().max(1);
        *subs.get_mut(k)? = to;
        Some(())
    }),
    ("another part of a gathered table", |d, l| {
        let v = node(d, l, |l, v| is(l, v, |op| matches!(op, Op::Shard { .. })))?;
        let Op::Shard { index, .. } = &mut l.body[v].op else { return None };
        match &mut index.base {
            Base::Coords(form) if d.below(2) == 0 => {
                let all: Vec<SubAxis> = l.mesh.ids().collect();
                form[0].0 = d.pick(&all)?;
            }
            other => *other = Base::Zero,
        }
        Some(())
    }),
    ("another number", |d, l| {
        let v = node(d, l, |l, v| is(l, v, |op| matches!(op, Op::Const(_))))?;
        let by = [1.0, -1.0][d.below(2)];
        if let Op::Const(c) = &mut l.body[v].op {
            *c = Real(c.0 + by);
        }
        Some(())
    }),
    ("another comparison", |d, l| {
        let v = node(d, l, |l, v| is(l, v, |op| matches!(op, Op::Compare(_))))?;
        l.body[v].op = Op::Compare(d.pick(Compare::ALL)?);
        Some(())
    }),
    ("sums from the other end", |d, l| {
        let v = node(d, l, |l, v| is(l, v, |op| matches!(op, Op::Cumsum { .. })))?;
        if let Op::Cumsum { reverse, .. } = &mut l.body[v].op {
            *reverse = !*reverse;
        }
        Some(())
    }),
    ("another piece", |d, l| {
        let v = node(d, l, |l, v| is(l, v, |op| matches!(op, Op::Slice { .. })))?;
        if let Op::Slice { at, .. } = &mut l.body[v].op {
            *at = if *at == 0 { 1 } else { *at - 1 };
        }
        Some(())
    }),
    ("another function", |d, l| {
        let v = node(d, l, |l, v| is(l, v, |op| matches!(op, Op::Binary(_) | Op::Unary(_) | Op::Reduce { .. } | Op::Add)))?;
        l.body[v].op = match &l.body[v].op {
            Op::Binary(_) => Op::Binary(d.pick(&[Binary::Mul, Binary::Div, Binary::Max, Binary::Min, Binary::And, Binary::Or])?),
            Op::Unary(_) => Op::Unary(d.pick(ir::op::Unary::ALL)?),
            Op::Reduce { over, .. } => Op::Reduce { kind: d.pick(Reduce::ALL)?, over: over.clone() },
            _ => Op::Binary(Binary::Max),
        };
        Some(())
    }),
    ("dims of a view in another order", |d, l| {
        let v = node(d, l, |l, v| is(l, v, |op| matches!(op, Op::View { from, to } if from.len() > 1 || to.len() > 1)))?;
        if let Op::View { from, to } = &mut l.body[v].op {
            if from.len() > 1 { from.reverse() } else { to.reverse() }
        }
        Some(())
    }),
    ("dims in another order before a view", |d, l| {
        let v = node(d, l, |l, v| is(l, v, |op| *op == Op::Expand) && l.body.dims_of(v).len() > 1)?;
        let (n, size) = (l.body.dims_of(v).len(), |k: usize| l.body.dims.size(l.body.dims_of(v)[k]));
        let (i, j) = (d.below(n), d.below(n));
        if size(i) == 1 || size(j) == 1 {
            return None;
        }
        l.body[v].ty.dims.swap(i, j);
        Some(())
    }),
    (ONE_HOME, |d, l| {
        let largest = |op: &Op| matches!(op, Op::Collective { kind: Collective::AllReduce(Reduce::Max), .. });
        let v = node(d, l, |l, v| is(l, v, largest) && l.body[v].ty == Type::scalar(DType::I32))?;
        let Op::Collective { subs, .. } = l.body[v].op.clone() else { return None };
        let homes = subs.iter().map(|u| l.mesh[*u].size).product();
        let home = l.body.dims.add(DimInfo::new("home", homes));
        let gather = Op::Collective { kind: Collective::AllGather, subs, stages: None, part: Some(home) };
        let slice = Op::Slice { from: home, to: None, at: 0 };
        insert(l, v, &[(gather, Type::new(DType::I32, [home])), (slice, Type::scalar(DType::I32))]);
        Some(())
    }),
    ("no limit, or a greater one", |d, l| {
        let v = node(d, l, |l, v| is(l, v, |op| matches!(op, Op::Limit { .. })))?;
        match d.below(2) {
            0 => l.body[v].op = Op::Expand,
            _ => l.body[v].op = Op::Limit { most: 1 << 20 },
        }
        Some(())
    }),
];

#[test]
fn rows_that_are_not_those_of_the_routing_are_refused() {
    let refused = judge(&samples(), KINDS);
    assert!(refused > 0, "no mutant is made");
}

/// Another home may have more rows: a pass that is left out by this one's loses them.
#[test]
fn the_rows_of_one_home_leave_out_no_pass_of_all() {
    let case = Case { moe_buffer: MoeBuffer::Factor(0.5), moe_passes: 4, ..case("dp2 ep2") };
    let sample = sample(MIXTRAL.0, &[MIXTRAL.1, &[("seq", "16")]].concat(), &case, &Ranges::new()).expect("it compiles");
    let (_, mutate) = KINDS.iter().find(|k| k.0 == ONE_HOME).expect("it is one of them");
    let mut stages = sample.stages.clone();
    assert!(sample.holds(&stages) && mutate(&mut Rng(1), &mut stages[0]).is_some());
    assert!(!sample.holds(&stages), "it is taken for the most rows of all homes");
}
