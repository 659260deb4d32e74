//! What partitioning costs: the collectives of one layer, and of what is outside of layers, held to those of Megatron.

use crate::harness::{Case, compiled};
use crate::models::{LLAMA, case};
use ir::graph::{Phase, Value};
use ir::local::Chunk;
use ir::mesh::Axis;
use ir::op::{Collective, DType, Op, Reshard};
use ir::options::MoeBuffer;
use ir::program::{Action, Arena, BodyKind, Content};
use ir::sharded::Sharded;
use runtime::host::TensorSlice;

pub const GPT2: (&str, &[(&str, &str)]) =
    (include_str!("../../../models/gpt2.mdl"), &[("vocab", "32"), ("hidden", "32"), ("heads", "4"), ("ffn", "64"), ("layers", "3"), ("seq", "16")]);

pub const WIDE_LLAMA: &[(&str, &str)] =
    &[("vocab", "32"), ("hidden", "32"), ("heads", "8"), ("kv_heads", "4"), ("head_dim", "4"), ("ffn", "48"), ("layers", "3"), ("seq", "16")];

/// Attention and MLP side by side, on one norm.
const PARALLEL: &str = r#"
model parallel(batch, hidden = 32, heads = 4, head_dim = 8, ffn = 64, layers = 3, seq = 16) {
  input x0: f32[batch, seq, hidden];
  fn self_attention(x) {
    dim keys = seq;
    let q = linear(x, hidden, [heads, head_dim]) as q;
    let k = linear(x, hidden, [heads, head_dim]) as k;
    let v = linear(x, hidden, [heads, head_dim]) as v;
    let y = attention(q, view(k, seq -> keys), view(v, seq -> keys), head_dim, keys, mask: causal(seq, keys));
    return linear(y, [heads, head_dim], hidden) as o;
  }
  param scale: [hidden] ~ normal(0.02);
  let x = x0 * scale;
  repeat layers {
    let n = layer_norm(x, over: hidden) as norm;
    x = x + self_attention(n) as attn + mlp(n, hidden, ffn, bias: false) as mlp;
  }
  loss mean(x * x);
}
plan { dp: batch; tp: heads, ffn; sp: seq; pp: layers; }
"#;

/// A collective over an axis: kind, and elements of the whole value.
fn over(axis: Axis, s: &Sharded, v: Value) -> Option<(Reshard, u64)> {
    let Op::Reshard { kind, subs } = &s.graph.body[v].op else { return None };
    let here = s.mesh.of(axis).any(|u| subs.contains(&u));
    let moves = !matches!(kind, Reshard::Slice | Reshard::Mask);
    (here && moves).then(|| (*kind, s.graph.body.elements(v)))
}

/// `2 AR (4)`: how many of each kind, and their volume, 1 being (t-1)/t of one `[batch, seq, hidden]`.
fn summary(s: &Sharded, axis: Axis, phase: Phase, layer: u32) -> String {
    let keep = |v: &Value| s.graph.body[*v].origin.phase == phase && s.graph.body[*v].origin.layer == Some(layer);
    let size = |name: &str| s.graph.body.dims.ids().find(|d| s.graph.body.dims.name(*d) == name).map_or(1, |d| s.graph.body.dims.size(d));
    let unit = (size("batch") * size("seq") * size("hidden")) as f64;
    let found: Vec<(Reshard, u64)> = s.graph.body.values().filter(keep).filter_map(|v| over(axis, s, v)).collect();
    let mut out = vec![];
    for (kind, short) in [(Reshard::AllReduce, "AR"), (Reshard::AllGather, "AG"), (Reshard::ReduceScatter, "RS"), (Reshard::AllToAll, "A2A")] {
        let n = found.iter().filter(|f| f.0 == kind).count();
        if n > 0 {
            out.push(format!("{n} {short}"));
        }
    }
    let volume: f64 = found.iter().map(|(kind, n)| *n as f64 / unit * if *kind == Reshard::AllReduce { 2.0 } else { 1.0 }).sum();
    match phase {
        _ if out.is_empty() => "-".into(),
        // Volumes of parameters would have another unit.
        Phase::Update => out.join(" "),
        Phase::Forward | Phase::Backward => format!("{} ({})", out.join(" "), (volume * 100.0).round() / 100.0),
    }
}

/// Forward / backward / step of the middle one of three layers, over tp.
fn layer(text: &str, defines: &[(&str, &str)], words: &str) -> String {
    layer_over(Axis::Tp, text, defines, words)
}

fn layer_over(axis: Axis, text: &str, defines: &[(&str, &str)], words: &str) -> String {
    let s = compiled(text, defines, &case(words)).sharded;
    [Phase::Forward, Phase::Backward, Phase::Update].map(|phase| summary(&s, axis, phase, 1)).join(" / ")
}

/// The collectives outside of layers in a phase, with the dims of what they move.
fn outside(text: &str, defines: &[(&str, &str)], words: &str, phase: Phase) -> Vec<String> {
    let s = compiled(text, defines, &case(words)).sharded;
    let body = &s.graph.body;
    let there = body.values().filter(|v| body[*v].origin.phase == phase && body[*v].origin.layer.is_none());
    there
        .filter_map(|v| {
            let (kind, _) = over(Axis::Tp, &s, v)?;
            let dims: Vec<&str> = body.dims_of(v).iter().map(|d| body.dims.name(*d)).collect();
            Some(format!("{} [{}]", kind.name(), dims.join(", ")))
        })
        .collect()
}

#[test]
fn a_gpt_layer_on_tp_reduces_twice_each_way() {
    assert_eq!(layer(GPT2.0, GPT2.1, "tp2"), "2 AR (4) / 2 AR (4) / -");
}

/// Norm weights and row biases, whose gradients are sums over the parts of the sequence: two of each norm, one of each block.
#[test]
fn a_gpt_layer_on_tp_with_sp_gathers_and_scatters_twice_and_gathers_again_for_weights() {
    assert_eq!(layer(GPT2.0, GPT2.1, "tp2 sp"), "2 AG 2 RS (4) / 4 AG 2 RS (6) / 6 AR");
}

#[test]
fn a_llama_layer_on_tp_reduces_twice_each_way() {
    assert_eq!(layer(LLAMA.0, WIDE_LLAMA, "tp2"), "2 AR (4) / 2 AR (4) / -");
}

#[test]
fn a_llama_layer_on_tp_with_sp_is_as_a_gpt_layer() {
    assert_eq!(layer(LLAMA.0, WIDE_LLAMA, "tp2 sp"), "2 AG 2 RS (4) / 4 AG 2 RS (6) / 2 AR");
}

#[test]
fn kv_heads_that_tp_shares_cost_two_small_sums_per_step() {
    assert_eq!(layer(LLAMA.0, WIDE_LLAMA, "tp8"), "2 AR (4) / 2 AR (4) / 2 AR");
}

#[test]
fn kv_heads_that_tp_shares_cost_no_more_with_sp() {
    assert_eq!(layer(LLAMA.0, WIDE_LLAMA, "tp8 sp"), "2 AG 2 RS (4) / 4 AG 2 RS (6) / 4 AR");
}

#[test]
fn a_parallel_block_costs_half() {
    assert_eq!(layer(PARALLEL, &[], "tp2"), "1 AR (2) / 1 AR (2) / -");
    assert_eq!(layer(PARALLEL, &[], "tp2 sp"), "1 AG 1 RS (2) / 2 AG 1 RS (3) / 2 AR");
}

/// Every parameter's gradient is summed once per step.
#[test]
fn context_parallelism_gathers_keys_and_values() {
    assert_eq!(layer_over(Axis::Cp, GPT2.0, GPT2.1, "cp2 gather"), "2 AG (2) / 2 AG 2 RS (4) / 16 AR");
}

/// Of the middle layer in a chunk: the messages that a ring passes on, and their elements, by element type.
fn shifts(words: &str, chunk: Chunk) -> Vec<(DType, usize, u64)> {
    let compiled = compiled(GPT2.0, GPT2.1, &case(words));
    let local = &compiled.locals[0];
    let body = &local.body;
    let shift = |v: &Value| matches!(body[*v].op, Op::Collective { kind: Collective::Shift, .. });
    let here: Vec<Value> = body.values().filter(|v| shift(v) && local.chunks[v.index()] == chunk && body[*v].origin.layer == Some(1)).collect();
    let of = |dtype: DType| here.iter().copied().filter(move |v| body[*v].ty.dtype == dtype).collect::<Vec<_>>();
    [DType::F32, DType::I32].map(|t| (t, of(t).len(), of(t).iter().map(|v| body.elements(*v)).sum())).to_vec()
}

/// A rank has keys and values of 4 of 16 positions, 32 numbers each. They go 3 steps forward and 3 backward; their gradients go 4.
#[test]
fn a_ring_passes_keys_and_values_on() {
    assert_eq!(shifts("cp4", Chunk::Forward(0)), [(DType::F32, 3, 3 * 2 * 4 * 32), (DType::I32, 3, 3 * 4)]);
    assert_eq!(shifts("cp4", Chunk::Backward(0)), [(DType::F32, 7, 7 * 2 * 4 * 32), (DType::I32, 3, 3 * 4)]);
}

#[test]
fn what_a_ring_passes_on_forward_does_not_wait_for_attention() {
    let compiled = compiled(GPT2.0, GPT2.1, &case("cp4"));
    let local = &compiled.locals[0];
    let body = &local.body;
    let mut follows = vec![None; body.nodes.len()];
    for v in body.values() {
        let of = body[v].args.iter().filter_map(|a| follows[a.index()]).max();
        let layer = if matches!(body[v].op, Op::Attention(_)) { body[v].origin.layer } else { None };
        follows[v.index()] = of.max(layer);
        if matches!(body[v].op, Op::Collective { kind: Collective::Shift, .. }) && local.chunks[v.index()] == Chunk::Forward(0) {
            assert!(of < body[v].origin.layer, "{v}");
        }
    }
}

/// The positions of the tokens that each context-parallel rank loads.
fn positions(words: &str) -> Vec<Vec<u64>> {
    let job = compiled(GPT2.0, GPT2.1, &case(words)).job;
    let commands = job.programs[0].bodies.iter().flat_map(|b| &b.commands);
    let (input, index) = commands
        .filter_map(|c| match &c.action {
            Action::Load { input, index, .. } => Some((*input, index.clone())),
            _ => None,
        })
        .next()
        .expect("the model has an input");
    let extents = &job.inputs[input as usize].dims;
    let of = |rank| {
        let mut out = vec![];
        TensorSlice::new(extents, &index, &job.mesh.coords(rank)).runs(|run| out.extend(run.global.into_iter().flat_map(|g| g..g + run.len)));
        out
    };
    (0..job.mesh.world()).map(of).collect()
}

#[test]
fn a_context_parallel_rank_has_one_chunk_from_the_front_and_one_from_the_back() {
    assert_eq!(positions("cp2"), [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]);
    assert_eq!(positions("cp4 gather"), [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]);
    // All-to-all splits heads instead, so positions stay in order.
    assert_eq!(positions("cp2 ulysses"), [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]);
}

#[test]
fn positions_that_make_no_zig_zag_stay_in_order_with_a_warning() {
    let warnings = |seq: &str| {
        let defines = [GPT2.1, &[("seq", seq)]].concat();
        let found = compiled(GPT2.0, &defines, &case("cp4")).warnings;
        found.into_iter().filter(|w| w.code == "W0205").flat_map(|w| w.help).map(|h| h.to_string()).collect::<Vec<_>>()
    };
    let help = "a zig-zag of chunks would balance it, but seq = 12 does not divide by 2 * cp = 8";
    assert_eq!(warnings("12"), [help]);
    assert!(warnings("16").is_empty());
}

/// Four each way, and a number per position and head for the softmax's backward pass.
#[test]
fn ulysses_exchanges_positions_for_heads() {
    assert_eq!(layer_over(Axis::Cp, GPT2.0, GPT2.1, "cp2 ulysses"), "4 A2A (4) / 5 A2A (4.13) / 16 AR");
}

/// Of the two sums of a layer, the backward pass needs that of the attention block; the other one makes the input of the next layer, which is kept.
#[test]
fn full_recomputation_of_single_layers_repeats_one_sum() {
    assert_eq!(layer(GPT2.0, GPT2.1, "tp2 full1"), "2 AR (4) / 3 AR (6) / -");
    assert_eq!(layer(LLAMA.0, WIDE_LLAMA, "tp2 full1"), "2 AR (4) / 3 AR (6) / -");
}

#[test]
fn full_recomputation_of_units_repeats_both_sums_within_a_unit() {
    assert_eq!(layer(GPT2.0, GPT2.1, "tp2 full3"), "2 AR (4) / 4 AR (8) / -");
}

/// The gathers of recomputed inputs are those that weight gradients need anyway.
#[test]
fn full_recomputation_with_sp_repeats_no_gather() {
    assert_eq!(layer(GPT2.0, GPT2.1, "tp2 sp full1"), "2 AG 2 RS (4) / 4 AG 3 RS (7) / 6 AR");
    assert_eq!(layer(GPT2.0, GPT2.1, "tp2 sp full3"), "2 AG 2 RS (4) / 4 AG 4 RS (8) / 6 AR");
}

#[test]
fn selective_recomputation_communicates_nothing() {
    assert_eq!(layer(GPT2.0, GPT2.1, "tp2 sp selective"), "2 AG 2 RS (4) / 4 AG 2 RS (6) / 6 AR");
}

pub const EXPERTS: &str = r#"
model routed(batch, hidden = 32, experts = 8, picks = 2, expert_ffn = 32, layers = 3, seq = 16) {
  input x0: f32[batch, seq, hidden];
  param scale: [hidden] ~ normal(0.02);
  let x = x0 * scale;
  repeat layers {
    let h = rms_norm(x, over: hidden) as norm;
    let score, chosen = top_k(softmax(linear(h, hidden, experts) as router, over: experts), over: experts, k: picks);
    x = x + experts_mlp(h, chosen, score, [batch, seq], picks, experts, hidden, expert_ffn) as experts;
  }
  loss mean(x * x);
}
plan { dp: batch; sp: seq; cp: seq; ep: experts; etp: expert_ffn; pp: layers; }
"#;

/// The kinds of collectives over an axis in the middle layer, forward / backward.
fn kinds(axis: Axis, words: &str) -> String {
    let counts = layer_over(axis, EXPERTS, &[], words);
    let phases: Vec<&str> = counts.split(" / ").take(2).map(|p| p.split_once(" (").map_or(p, |s| s.0)).collect();
    phases.join(" / ")
}

/// Rows go to their experts and back; within an expert, as a feed-forward block with sequence parallelism.
#[test]
fn experts_on_both_axes_exchange_rows_and_gather_and_scatter_them() {
    assert_eq!(kinds(Axis::Ep, "dp2 tp2 sp ep2"), "2 A2A / 2 A2A");
    assert_eq!(kinds(Axis::Etp, "dp2 tp2 sp ep2"), "1 AG 1 RS / 2 AG 1 RS");
}

#[test]
fn whole_experts_on_all_ranks_exchange_rows_alone() {
    assert_eq!(kinds(Axis::Dp, "dp2 tp2 sp ep4 etp1"), "2 A2A / 2 A2A");
    assert_eq!(kinds(Axis::Tp, "dp2 tp2 sp ep4 etp1"), "2 A2A / 2 A2A");
}

/// In the middle layer of a rank: elements of all-to-alls of rows and of tables, and multiplications in products of rows with experts' matrices.
fn of_experts(words: &str, buffer: MoeBuffer) -> (Vec<u64>, Vec<u64>, u64) {
    let compiled = compiled(EXPERTS, &[], &Case { moe_buffer: buffer, ..case(words) });
    let body = &compiled.locals[0].body;
    let layer = |v: &Value| body[*v].origin.layer == Some(1);
    let exchanges = |t: DType| {
        let of = |v: &Value| matches!(body[*v].op, Op::Collective { kind: Collective::AllToAll, .. }) && body[*v].ty.dtype == t;
        body.values().filter(layer).filter(of).map(|v| body.elements(v)).collect()
    };
    let products = body.values().filter(layer).filter_map(|v| match &body[v].op {
        Op::GroupedDot { rows, experts, over, .. } => {
            let mut dims = [&over[..], &[*rows], body.dims_of(v)].concat();
            dims.sort_unstable();
            dims.dedup();
            dims.retain(|d| d != experts);
            Some(body.dims.elements(&dims))
        }
        _ => None,
    });
    (exchanges(DType::F32), exchanges(DType::I32), products.sum())
}

/// A rank has T = 16 tokens with k = 2 choices of h = 32 numbers, and f = 32 of an expert. Two exchanges each way; three products forward, six backward.
#[test]
fn rows_cost_what_choices_say_and_not_what_experts_say() {
    let (t, k, h, f) = (16, 2, 32, 32);
    let balanced = MoeBuffer::Factor(1.0);
    assert_eq!(of_experts("dp2 ep2", balanced), (vec![t * k * h; 4], vec![8], 9 * t * k * h * f));
    assert_eq!(of_experts("dp4 ep4", balanced), (vec![t * k * h; 4], vec![8], 9 * t * k * h * f));
    // Without experts on other ranks, the room equals the number of rows.
    assert_eq!(of_experts("", MoeBuffer::Whole), (vec![], vec![], 9 * t * k * h * f));
    // With room for any choice, each rank may send all of its rows.
    assert_eq!(of_experts("dp2 ep2", MoeBuffer::Whole), (vec![2 * t * k * h; 4], vec![8], 2 * 9 * t * k * h * f));
}

#[test]
fn embedding_head_and_cross_entropy_forward() {
    assert_eq!(
        outside(GPT2.0, GPT2.1, "tp2", Phase::Forward),
        ["all_reduce [batch, seq, hidden]", "all_reduce [batch, seq]", "all_reduce [batch, seq]"]
    );
}

#[test]
fn embedding_head_and_cross_entropy_backward() {
    assert_eq!(outside(GPT2.0, GPT2.1, "tp2", Phase::Backward), ["all_reduce [batch, seq, hidden]"]);
}

#[test]
fn embedding_head_and_cross_entropy_with_sp() {
    assert_eq!(
        outside(GPT2.0, GPT2.1, "tp2 sp", Phase::Forward),
        [
            "reduce_scatter [batch, seq, hidden]",
            "all_gather [batch, seq, hidden]",
            "all_reduce [batch, seq]",
            "all_reduce [batch, seq]",
            "reduce_scatter [batch, seq]",
        ]
    );
    assert_eq!(
        outside(GPT2.0, GPT2.1, "tp2 sp", Phase::Backward),
        ["reduce_scatter [batch, seq, hidden]", "all_gather [batch, seq, hidden]", "all_gather [batch, seq, hidden]",]
    );
}

#[test]
fn the_loss_and_the_gradient_norm_are_one_sum_each() {
    assert_eq!(outside(GPT2.0, GPT2.1, "tp2", Phase::Update), ["all_reduce []", "all_reduce []"]);
}

/// As [`layer_over`] dp, of a Llama layer's nine parameters: two norms, four matrices of attention, three of the MLP.
fn shared_out(words: &str) -> String {
    let counts = layer_over(Axis::Dp, LLAMA.0, WIDE_LLAMA, words);
    // The volumes are left out, as they are of weights, not of activations.
    counts.split(" / ").map(|phase| phase.split(" (").next().unwrap_or(phase)).collect::<Vec<_>>().join(" / ")
}

#[test]
fn gradients_are_reduced_once_per_step_unless_they_are_shared_out() {
    assert_eq!(shared_out("dp2 m2"), "- / - / 9 AR");
    assert_eq!(shared_out("dp2 zero1 m2"), "- / - / 9 AR");
}

#[test]
fn parameters_shared_out_are_gathered_in_both_passes_and_their_gradients_scattered() {
    assert_eq!(shared_out("dp2 zero3 m2"), "9 AG / 9 AG 9 RS / -");
}

/// Bytes per parameter that a rank keeps for parameters, AdamW's states and gradients, the numbers of other dims than parameters' left out.
fn bytes_per_parameter(words: &str) -> f64 {
    let job = compiled(LLAMA.0, WIDE_LLAMA, &case(words)).job;
    let elements: u64 = job.params.iter().map(|p| p.dims.iter().map(|d| d.size).product::<u64>()).sum();
    let kept = job.programs[0].buffers.iter().filter(|b| b.arena == Arena::Persistent && !b.dims.is_empty());
    let kept = kept.filter(|b| !matches!(b.content, Content::Table { .. }));
    // Padding that aligns parameters in buckets counts as parameters.
    let buckets = &job.programs[0].buckets;
    let aligned: u64 = buckets.iter().map(|b| b.size).sum();
    let pieces: u64 = buckets.iter().flat_map(|b| &b.pieces).map(|p| p.elements()).sum();
    let elements = elements - pieces + aligned;
    kept.map(|b| b.bytes()).sum::<u64>() as f64 / elements as f64
}

/// SEMANTICS. In f32: 4 for the parameter, 4 for its gradient, 8 for its states. In 16 bits, shared out: 2 for the copy that the model computes with;
/// the weights themselves are one more state.
#[test]
fn what_ranks_share_out_they_keep_a_part_of() {
    assert_eq!(bytes_per_parameter("dp4 m2"), 16.0);
    assert_eq!(bytes_per_parameter("dp4 zero1 m2"), 8.0 + 8.0 / 4.0);
    assert_eq!(bytes_per_parameter("dp4 zero2 m2"), 4.0 + 12.0 / 4.0);
    assert_eq!(bytes_per_parameter("dp2 cp2 zero1 m2"), 8.0 + 8.0 / 4.0);
    assert_eq!(bytes_per_parameter("dp4 zero3 m2"), 16.0 / 4.0);
    assert_eq!(bytes_per_parameter("dp2 cp2 zero3 m2"), 16.0 / 4.0);
    assert_eq!(bytes_per_parameter("dp4 zero1 bf16 m2"), 6.0 + 12.0 / 4.0);
    assert_eq!(bytes_per_parameter("dp4 zero2 bf16 m2"), 2.0 + 16.0 / 4.0);
}

/// The collectives of a step outside of its microbatches, scalars apart: kind and axes.
fn per_step(words: &str, bucket_size: Option<u64>) -> Vec<String> {
    let case = Case { bucket_size, ..case(words) };
    let job = compiled(LLAMA.0, WIDE_LLAMA, &case).job;
    let program = &job.programs[0];
    let once = program.bodies.iter().filter(|b| matches!(b.kind, BodyKind::Reduce | BodyKind::Update));
    let found = once.flat_map(|b| &b.commands).filter_map(|c| match &c.action {
        Action::Collective { kind, group, count, .. } if *count > 1 => {
            Some(format!("{} over {}", kind.name(), job.mesh.describe(&program.groups[group.index()].subs)))
        }
        _ => None,
    });
    found.collect()
}

#[test]
fn gradients_are_one_sum_per_step_and_place_of_rest() {
    assert_eq!(per_step("dp2 m2", None), ["all_reduce over dp"]);
    // Matrices are split over tp. Norms are not, and have an all-reduce of their own.
    assert_eq!(per_step("dp2 tp2 m2", None), ["all_reduce over dp", "all_reduce over dp"]);
    // The norms' gradients are complete before the embedding's.
    assert_eq!(per_step("dp2 tp2 sp m2", None), ["all_reduce over dp*tp", "all_reduce over dp"]);
}

#[test]
fn shared_out_optimizer_states_cost_a_scatter_and_a_gather_per_step() {
    // Weights decay and norms do not, so they are in two buckets, since a bucket's update is one expression.
    let (scatters, gathers) = (["reduce_scatter over dp"; 2], ["all_gather over dp"; 2]);
    assert_eq!(per_step("dp2 zero1 m2", None), [scatters, gathers].concat());
    assert_eq!(per_step("dp2 zero2 m2", None), gathers);
    // With sp the norms' gradients are summed over tp, too, so tp ranks shard them as well.
    let all = ["reduce_scatter over dp", "reduce_scatter over dp*tp", "all_gather over dp", "all_gather over dp*tp"];
    assert_eq!(per_step("dp2 tp2 sp zero1 m2", None), all);
    assert_eq!(per_step("dp2 zero3 m2", None), [""; 0]);
}

#[test]
fn a_bucket_is_full_with_as_many_elements_as_asked_for() {
    let params = compiled(LLAMA.0, WIDE_LLAMA, &case("dp2 m2")).job.params.len();
    assert_eq!(per_step("dp2 m2", Some(1)).len(), params);
    assert!((2..params).contains(&per_step("dp2 m2", Some(2000)).len()));
}
