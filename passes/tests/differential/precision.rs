//! What is computed, kept and exchanged in 16 bits, and what is not.

use crate::harness::compiled;
use crate::models::{DEEPSEEK, GPT2, LLAMA, MIXTRAL, case};
use ir::graph::{Phase, Value};
use ir::local::Chunk;
use ir::op::{DType, Op, Reshard};
use std::collections::BTreeSet;

#[test]
fn gradients_are_sums_in_f32_that_were_never_rounded() {
    for model in [GPT2, LLAMA] {
        let graph = compiled(model.0, model.1, &case("bf16 m2")).graph;
        for (p, g) in &graph.grads {
            let body = &graph.body;
            let terms = if body[*g].op == Op::Add { body[*g].args.clone() } else { vec![*g] };
            for mut v in terms {
                while let Op::View { .. } = body[v].op {
                    v = body[v].args[0];
                }
                let name = &graph.params[*p as usize].name;
                assert_eq!(body[v].ty.dtype, DType::F32, "{name}");
                assert!(matches!(body[v].op, Op::Dot { .. } | Op::Reduce { .. } | Op::Scatter { .. }), "{name}: {}", body[v].op.name());
                assert_eq!(body[body[v].args[0]].ty.dtype, DType::Bf16, "{name}");
            }
        }
    }
}

#[test]
fn activations_cross_ranks_in_sixteen_bits_and_gradients_in_f32() {
    for words in ["bf16 tp2 dp2 m2", "bf16 tp2 dp2 sp m2"] {
        let s = compiled(GPT2.0, GPT2.1, &case(words)).sharded;
        let (mut activations, mut gradients) = (0, 0);
        for node in &s.graph.body.nodes {
            let Op::Reshard { kind, .. } = &node.op else { continue };
            if matches!(kind, Reshard::Slice | Reshard::Mask) {
                continue;
            }
            if node.origin.phase == Phase::Update {
                assert_eq!(node.ty.dtype, DType::F32);
                gradients += 1;
            } else if node.origin.layer.is_some() && node.ty.dims.len() >= 3 {
                assert_eq!(node.ty.dtype, DType::Bf16, "{words}: {}", node.origin.scope);
                activations += 1;
            }
        }
        assert!(activations >= 4 * 4 && gradients > 0, "{words}: {activations} and {gradients}");
    }
}

#[test]
fn the_copies_of_weights_are_made_once_a_step() {
    for words in ["bf16 m4", "f16 pp2 m4", "bf16 tp2 dp2 m2"] {
        for local in compiled(GPT2.0, GPT2.1, &case(words)).locals {
            let mut copies = vec![];
            for v in local.body.values() {
                let node = &local.body[v];
                if node.op == Op::Cast && matches!(local.body[node.args[0]].op, Op::Param(_)) {
                    assert_eq!(local.chunks[v.index()], Chunk::PrologueReduce, "{words}: {}", node.origin.scope);
                    copies.push(local.body[node.args[0]].op.clone());
                }
            }
            let found = copies.len();
            copies.sort_by_key(|op| format!("{op:?}"));
            copies.dedup();
            assert_eq!((found, found), (copies.len(), local.params.len()), "{words}");
        }
    }
}

/// Logits, probabilities, what is chosen by, and losses of balance, in the graph that a rank runs. What scales rows is rounded once.
#[test]
fn routers_stay_in_f32() {
    for (model, losses) in [(MIXTRAL, 1), (DEEPSEEK, 0)] {
        for words in ["bf16 m1", "f16 m1", "bf16 dp2 tp2 sp ep4 etp1 m1", "bf16 cp2 ep2 full1 m1"] {
            let c = compiled(model.0, model.1, &case(words));
            let (local, body) = (&c.locals[0], &c.locals[0].body);
            // Collectives over ranks of the router's sums run in the reduce chunk.
            let forward = |v: Value| match local.chunks[v.index()] {
                Chunk::Forward(_) => body[v].origin.phase == Phase::Forward,
                Chunk::Reduce => matches!(body[v].op, Op::Collective { .. }),
                _ => false,
            };
            let is_router = |v: Value| match body[v].op {
                Op::Param(slot) => c.job.params[local.stages[0].1[slot as usize] as usize].name.ends_with("moe.router.w"),
                _ => false,
            };
            let uses = |v: Value, of: &dyn Fn(Value) -> bool| body[v].args.iter().any(|a| of(*a));
            // `weights` are the casts of a router's 16-bit copies back to f32.
            let weights: BTreeSet<Value> = body.values().filter(|v| body[*v].op == Op::Cast && uses(*v, &is_router)).collect();
            let logits = body.values().filter(|v| forward(*v) && uses(*v, &|a| weights.contains(&a)));
            let mut routed: BTreeSet<Value> = logits.collect();
            assert_eq!(
                (weights.len(), routed.len()),
                (c.job.params.iter().filter(|p| p.name.ends_with("router.w")).count(), weights.len()),
                "{words}"
            );
            let mut rounded = vec![];
            for v in body.values().filter(|v| forward(*v)) {
                if !uses(v, &|a| routed.contains(&a)) || !body[v].ty.dtype.is_float() {
                    continue;
                }
                if body[v].op == Op::Cast && body[v].ty.dtype.is_half() {
                    rounded.push(body[v].ty.dims.iter().map(|d| body.dims.name(*d)).collect::<Vec<_>>());
                } else {
                    routed.insert(v);
                }
            }
            assert!(routed.iter().all(|v| body[*v].ty.dtype == DType::F32), "{words}");
            assert!(rounded.iter().all(|dims| dims.last() == Some(&"top_k")), "{words}: {rounded:?}");
            assert_eq!(rounded.len(), weights.len(), "{words}");
            assert_eq!(local.reports.iter().filter(|(_, v)| routed.contains(v)).count(), losses, "{words}");
        }
    }
}
