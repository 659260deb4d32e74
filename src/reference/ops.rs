//! The page `docs/ops.md`, of the declarations of ops.

use super::declared::{declared, wrapped};
use ir::dim::{Dim, IndexMap};
use ir::op::{
    Arity, Attention, AttentionGrad, Binary, Channel, Collective, Compare, DType, Op, OpKind, Real, Reduce, Reshard, Routing, Scalar, Scoring, Unary,
};
use std::fmt::Write;

const SOURCE: &str = include_str!("../../ir/src/op.rs");
const FACTS: &str = include_str!("../../ir/src/op/facts.rs");

/// An op of each variant and name.
fn examples() -> Vec<Op> {
    let d = Dim(0);
    let attention = || Attention { at: d, keys: d, d, values: d, scale: Real(1.0), scoring: Scoring::default() };
    let routing = Routing { experts: d, choice: d };
    let mut ops = vec![
        Op::Input(0),
        Op::Param(0),
        Op::State(0, 0),
        Op::Table(0),
        Op::Const(Real(0.0)),
        Op::Iota(d),
        Op::Uniform { key: 0 },
        Op::Scalar(Scalar::Step),
        Op::Select,
        Op::Add,
        Op::Cast,
        Op::StopGradient,
        Op::Cut,
        Op::Expand,
        Op::View { from: vec![], to: vec![] },
        Op::Slice { from: d, to: None, at: 0 },
        Op::Pad { from: None, to: d, at: 0 },
        Op::Concat { from: vec![], to: d },
        Op::Shard { from: d, to: d, index: IndexMap::whole(1) },
        Op::Recv { hops: 1, channel: Channel(0) },
        Op::Send { hops: 1, channel: Channel(0) },
        Op::Limit { most: 0 },
        Op::dot(vec![]),
        Op::grouped_dot(d, d, vec![]),
        Op::ArgMax { over: d },
        Op::Cumsum { over: d, reverse: false },
        Op::Gather { dim: d },
        Op::Scatter { dim: d },
        Op::Dispatch(routing),
        Op::Combine(routing),
        Op::Attention(attention()),
        Op::AttentionLse(attention()),
    ];
    ops.extend(Unary::ALL.iter().map(|f| Op::Unary(*f)));
    ops.extend(Binary::ALL.iter().map(|f| Op::Binary(*f)));
    ops.extend(Compare::ALL.iter().map(|f| Op::Compare(*f)));
    ops.extend(Reduce::ALL.iter().map(|kind| Op::Reduce { kind: *kind, over: vec![] }));
    ops.extend(AttentionGrad::ALL.iter().map(|of| Op::AttentionGrad(attention(), *of)));
    ops.extend(Reshard::ALL.iter().map(|kind| Op::Reshard { kind: *kind, subs: vec![] }));
    let sum = Reduce::Sum;
    let kinds = [Collective::AllReduce(sum), Collective::ReduceScatter(sum), Collective::AllGather, Collective::AllToAll, Collective::Shift];
    ops.extend(kinds.map(|kind| Op::Collective { kind, subs: vec![], stages: None, part: None }));
    ops
}

/// The variant of an op, as the source calls it.
fn variant(op: &Op) -> String {
    let text = format!("{op:?}");
    text[..text.find(|c: char| !c.is_alphanumeric()).unwrap_or(text.len())].to_string()
}

fn operands(op: &Op) -> String {
    match op.arity() {
        Arity::Exactly(0) => "No operands".into(),
        Arity::Exactly(1) => "One operand".into(),
        Arity::Exactly(2) => "Two operands".into(),
        Arity::Exactly(3) => "Three operands".into(),
        Arity::Exactly(n) => format!("{n} operands"),
        Arity::Any => "One operand or more".into(),
    }
}

pub fn page() -> String {
    let ops = declared(SOURCE, "pub enum Op");
    let examples = examples();
    let mut out = String::from(
        "# Ops\n\nThe operations of graphs and of kernels' bodies, made of their declarations in\n[`ir/src/op.rs`](../ir/src/op.rs). For those who read dumps or change the compiler.\n\n\
         - [Text forms](ir.md) says how a node is written; [sharding](sharding.md#the-algebra-of-ops) how each can be split.\n\
         - The interpreter ([`ir/src/eval.rs`](../ir/src/eval.rs)) is the definition of each. Dims go by name: an operand that\n  lacks a dim of the result is broadcast along it.\n",
    );
    let mut shown = 0;
    for kind in declared(FACTS, "pub enum OpKind").members {
        let of_kind = |o: &&Op| format!("{:?}", o.kind()) == kind.name;
        if !examples.iter().any(|o| of_kind(&o)) {
            continue;
        }
        let _ = write!(out, "\n## {}\n\n{}\n", kind.name, wrapped(&kind.says, 0));
        for member in &ops.members {
            let own: Vec<&Op> = examples.iter().filter(of_kind).filter(|o| variant(o) == member.name).collect();
            let Some(first) = own.first() else { continue };
            shown += 1;
            let mut names: Vec<&str> = own.iter().map(|o| o.name()).collect();
            names.dedup();
            let names: Vec<String> = names.iter().map(|n| format!("`{n}`")).collect();
            let list = match member.name.as_str() {
                name @ ("Unary" | "Binary" | "Compare" | "Reduce" | "Reshard" | "AttentionGrad") => declared(SOURCE, name).members,
                _ => vec![],
            };
            let heading = if names.len() > 4 { member.name.clone() } else { names.join(", ") };
            let _ = write!(out, "\n### {heading}\n\n{}\n", wrapped(&format!("{}. {}", operands(first), member.says), 0));
            if !member.members.is_empty() {
                out.push('\n');
            }
            for field in &member.members {
                let _ = writeln!(out, "- {}", wrapped(&format!("`{}`: {}", field.name, field.says), 2));
            }
            if !list.is_empty() {
                let _ = write!(out, "\n| op | is |\n|---|---|\n");
                for (name, op) in list.iter().zip(&own) {
                    let _ = writeln!(out, "| `{}` | {} |", op.name(), name.says.replace('\n', " ").replace('|', "\\|"));
                }
            }
        }
    }
    assert_eq!(shown, ops.members.len(), "an op has no example here");
    let _ = write!(out, "\n## Dtypes\n\n| dtype | bytes | is |\n|---|---|---|\n");
    let numbers = declared(include_str!("../../ir/src/op/numbers.rs"), "pub enum DType");
    for (dtype, said) in [DType::F32, DType::Bf16, DType::F16, DType::I32, DType::Bool].iter().zip(&numbers.members) {
        let _ = writeln!(out, "| `{}` | {} | {} |", dtype.name(), dtype.bytes(), said.says.replace('\n', " "));
    }
    out
}

/// Kinds without an op would have no section.
#[test]
fn every_kind_of_op_has_one() {
    let kinds: Vec<OpKind> = examples().iter().map(Op::kind).collect();
    let missing: Vec<_> =
        declared(FACTS, "pub enum OpKind").members.into_iter().filter(|k| !kinds.iter().any(|o| format!("{o:?}") == k.name)).collect();
    assert!(missing.is_empty(), "{}", missing.iter().map(|k| &*k.name).collect::<Vec<_>>().join(", "));
}
