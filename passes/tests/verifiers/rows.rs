//! Rows of the sharding algebra: those of each op's table hold on numbers, whether a compile uses them or not, and
//! others are refused.

use super::meaning::{ODD, model, sharded};
use ir::algebra::{Loop, LoopKind, algebra};
use ir::graph::Body;
use ir::module::Module;
use ir::op::Op;
use ir::options::Options;
use std::collections::{BTreeMap, BTreeSet};
use verify::algebra::{Row, holds};

/// Ops of every kind: dense, with experts, with two stacks, with windows and states.
fn modules() -> Vec<Module> {
    let options = Options { global_batch: 2, pad_vocab_to: 4, ..Options::default() };
    let small = |name: &str, defines: &[(&str, &str)]| sharded(name, &model(name), defines, &options);
    vec![
        small("gpt2", &[("hidden", "4"), ("heads", "2"), ("layers", "1"), ("seq", "4"), ("vocab", "6")]),
        small("llama", &[("hidden", "8"), ("heads", "4"), ("kv_heads", "2"), ("layers", "1"), ("seq", "4"), ("vocab", "6"), ("ffn", "6")]),
        small("mixtral", &[("hidden", "8"), ("heads", "2"), ("kv_heads", "1"), ("layers", "1"), ("seq", "4"), ("vocab", "6"), ("experts", "4")]),
        small("t5", &[("encoder_layers", "1"), ("decoder_layers", "1"), ("hidden", "8"), ("heads", "2"), ("vocab", "8")]),
        sharded("odd", ODD, &[], &options),
    ]
}

fn nodes(module: &Module) -> (&Body, Vec<ir::graph::Value>) {
    let body = &module.training.whole.graph().body;
    let ops = body.values().filter(|v| !body[*v].op.is_source() && !matches!(body[*v].op, Op::Reshard { .. }));
    (body, ops.collect())
}

#[test]
fn every_row_of_the_table_holds() {
    let mut ops = BTreeSet::new();
    for module in &modules() {
        let (body, values) = nodes(module);
        for v in values {
            let table = algebra(body, v);
            let loops = table.loops.iter().filter(|l| l.kind != LoopKind::Block).map(Row::Split);
            let slots = if table.joint { vec![Row::Linear(&table.linear)] } else { table.linear.chunks(1).map(Row::Linear).collect() };
            let claimed: Vec<Row> = loops.chain(slots).collect();
            for row in claimed {
                holds(body, v, row).unwrap_or_else(|e| panic!("{} {row:?}: {e}", body[v].op.name()));
            }
            ops.insert(body[v].op.name());
        }
    }
    let special = ["attention", "attention_dk", "combine", "cumsum", "dispatch", "dot", "gather", "reduce_max", "scatter", "select", "view"];
    assert!(special.iter().all(|op| ops.contains(op)), "{ops:?}");
}

/// Whatever the table does not say, numbers deny; but for what is true as it happens, which is listed.
#[test]
fn rows_that_the_table_does_not_have_are_refused() {
    let (mut accepted, mut refused) = (BTreeMap::<String, BTreeSet<&str>>::new(), 0);
    for module in &modules() {
        let (body, values) = nodes(module);
        for v in values {
            let table = algebra(body, v);
            let mut loops: Vec<(String, Loop)> = vec![];
            for l in table.loops.iter().filter(|l| l.kind != LoopKind::Ring) {
                for kind in [LoopKind::Map, LoopKind::Sum, LoopKind::Max].into_iter().filter(|k| *k != l.kind) {
                    // A dim that no operand has cannot be summed, and one that the result lacks cannot be mapped.
                    if kind == LoopKind::Map && l.out.is_some() || kind != LoopKind::Map && l.args.iter().any(Option::is_some) {
                        let out = l.out.filter(|_| kind == LoopKind::Map);
                        loops.push((format!("{:?} as {kind:?}", l.kind).to_lowercase(), Loop { kind, args: l.args.clone(), out }));
                    }
                }
            }
            let slots: Vec<usize> = (0..body[v].args.len()).collect();
            let alone = |slot: &usize| if table.joint { slots.len() > 1 } else { !table.linear.contains(slot) };
            let linear = slots.chunks(1).filter(|slot| alone(&slot[0])).map(|slot| ("linear", Row::Linear(slot)));
            let wrong = loops.iter().map(|(what, l)| (what.as_str(), Row::Split(l))).chain(linear);
            for (what, row) in wrong {
                match holds(body, v, row) {
                    Err(_) => refused += 1,
                    Ok(()) => {
                        accepted.entry(what.to_string()).or_default().insert(body[v].op.name());
                    }
                }
            }
        }
    }
    // These are true although the table does not say so: attention is linear in values and in the gradient of its
    // result, and its gradients are sums over pairs.
    let named = |ops: &[&'static str]| ops.iter().copied().collect::<BTreeSet<_>>();
    let expected = [
        ("block as map", named(&["attention_dbias", "attention_dk", "attention_dv", "dispatch"])),
        ("block as sum", named(&["attention_dq", "combine"])),
        ("linear", named(&["attention", "attention_dv", "cast"])),
    ];
    assert_eq!(accepted, expected.map(|(what, ops)| (what.to_string(), ops)).into());
    assert!(refused > 1000, "{refused}");
}
