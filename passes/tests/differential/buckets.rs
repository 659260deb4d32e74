//! Where parameters lie that ranks share out: SEMANTICS, data parallel and ZeRO.

use crate::harness::{Case, compiled};
use crate::models::{LLAMA, MIXTRAL, case};
use ir::mesh::Axis;
use ir::program::{Action, BodyKind, Bucket, Collective, Content, Job};

fn job(model: (&str, &[(&str, &str)]), words: &str) -> Job {
    compiled(model.0, model.1, &case(words)).job
}

fn lcm(a: u64, b: u64) -> u64 {
    (1..).map(|k| a * k).find(|n| n % b == 0).expect("two numbers have a common multiple")
}

/// The number of ranks that share a bucket, from the sizes of its states' buffers.
fn ranks(job: &Job, k: usize) -> u64 {
    let program = &job.programs[0];
    let slot = (job.stages[0].params.len() + k) as u32;
    let state = program.buffers.iter().find(|b| matches!(b.content, Content::State { slot: s, .. } if s == slot)).expect("a state");
    program.buckets[k].size / state.elements()
}

#[test]
fn parameters_begin_at_multiples_of_64_and_buckets_end_at_one_of_128_and_their_ranks() {
    for (words, d) in [("dp2 zero1 m2", 2), ("dp3 zero1", 3), ("dp3 cp2 zero2 m2", 6), ("dp5 zero1", 5)] {
        let job = job(LLAMA, words);
        for (k, bucket) in job.programs[0].buckets.iter().enumerate() {
            assert_eq!(ranks(&job, k), d, "{words}");
            assert!(bucket.size.is_multiple_of(lcm(d, 128)), "{words}: {} elements", bucket.size);
            assert!(bucket.pieces.iter().all(|p| p.at.is_multiple_of(64)), "{words}: {:?}", bucket.pieces);
            // Gaps are no larger than the alignment needs.
            let mut end = 0;
            for p in &bucket.pieces {
                assert!(p.at - end < 64, "{words}");
                end = p.at + p.elements();
            }
            assert!(bucket.size - end < lcm(d, 128), "{words}");
        }
    }
}

fn layout(job: &Job, bucket: &Bucket) -> String {
    let name = |slot: u32| &job.params[job.stages[0].params[slot as usize] as usize].name;
    let pieces: Vec<String> = bucket.pieces.iter().map(|p| format!("{} @{}", name(p.slot), p.at)).collect();
    format!("{} of {}", pieces.join(", "), bucket.size)
}

const TWO: &str = r#"
model two(batch, wide = 100, narrow = 30) {
  input x: f32[batch, wide];
  param first: [wide, narrow] ~ normal(0.1);
  param second: [narrow, wide] ~ normal(0.1);
  param scale: [wide] ~ normal(0.1);
  let y = x * scale;
  let h = dot(y, first, over: wide);
  loss mean(dot(h, second, over: narrow) * x);
}
plan { dp: batch; }
"#;

/// Parameters are in reverse order of use. 100 x 30 elements are no multiple of 64.
#[test]
fn buckets_hold_parameters_in_reverse_order_of_use() {
    let job = job((TWO, &[]), "dp3 zero1");
    let found: Vec<String> = job.programs[0].buckets.iter().map(|b| layout(&job, b)).collect();
    assert_eq!(found, ["second @0, first @3008, scale @6016 of 6144"]);
}

/// A rank's part of 2048 elements ends within `second`, that of the next one within `first`.
#[test]
fn parts_ignore_the_borders_of_parameters() {
    let job = job((TWO, &[]), "dp3 zero1");
    let program = &job.programs[0];
    let bucket = &program.buckets[0];
    let part = bucket.size / 3;
    let cuts = |n: u64| bucket.pieces.iter().any(|p| p.at < n && n < p.at + p.elements());
    assert!(cuts(part) && cuts(2 * part));
    // AdamW has two states, of which a rank keeps a third of the bucket each.
    let states = program.buffers.iter().filter(|b| matches!(b.content, Content::State { .. }));
    assert_eq!(states.map(|b| b.elements()).collect::<Vec<_>>(), [2048, 2048]);
}

#[test]
fn experts_are_shared_out_over_ranks_with_the_same_experts() {
    let job = job(MIXTRAL, "dp4 ep2 zero1");
    let mut found: Vec<u64> = (0..job.programs[0].buckets.len()).map(|k| ranks(&job, k)).collect();
    found.sort_unstable();
    found.dedup();
    assert_eq!(found, [2, 4]);
}

/// Nothing is copied: sums are scattered within the bucket they were accumulated in, and new parameters gathered within theirs.
#[test]
fn collectives_of_buckets_are_in_place() {
    for words in ["dp2 zero1 m2", "dp2 zero1", "dp2 tp2 sp zero1 m2", "bf16 dp2 cp2 zero1 m2", "dp2 pp2 v2 zero1 m2", "dp2 zero2 m2"] {
        let job = job(LLAMA, words);
        for program in &job.programs {
            let mut found = 0;
            for body in &program.bodies {
                for command in &body.commands {
                    let Action::Collective { kind, group, src, dst, .. } = &command.action else { continue };
                    let over_data = program.groups[group.index()].subs.iter().any(|u| job.mesh[*u].axis == Axis::Dp);
                    let moves = matches!(kind, Collective::ReduceScatter(_) | Collective::AllGather);
                    if over_data && moves {
                        found += 1;
                        assert_eq!(src.buffer, dst.buffer, "{words}: {} for {}", kind.name(), command.origin.scope);
                    }
                }
                // The bodies after the microbatches do not copy gradients together.
                let once = matches!(body.kind, BodyKind::Reduce | BodyKind::Update);
                let launches = body.commands.iter().filter(|c| matches!(c.action, Action::Launch { .. })).count();
                assert!(!once || launches < 24, "{words}: {launches} launches in {}", body.name);
            }
            assert!(found >= 4, "{words}: {found}");
        }
    }
}

/// Without `--sp` norms' weights are sums over data-parallel ranks; with it over tensor-parallel ones too. Either way they are one sum per step.
#[test]
fn small_gradients_are_one_sum_per_step() {
    for (words, axes) in [("dp2 tp2 zero1 m2", "dp"), ("dp2 tp2 sp zero1 m2", "dp*tp")] {
        let job = job(LLAMA, words);
        let program = &job.programs[0];
        let norms = |b: &&Bucket| b.pieces.iter().all(|p| p.index.len() == 1);
        assert_eq!(program.buckets.iter().filter(norms).count(), 1, "{words}");
        let scatters = program.bodies.iter().flat_map(|b| &b.commands).filter_map(|c| match &c.action {
            Action::Collective { kind: Collective::ReduceScatter(_), group, .. } if c.origin.phase == ir::graph::Phase::Update => {
                Some(job.mesh.describe(&program.groups[group.index()].subs))
            }
            _ => None,
        });
        assert_eq!(scatters.filter(|a| a == axes).count(), if axes == "dp" { 2 } else { 1 }, "{words}");
    }
}

#[test]
fn a_bucket_of_parameters_is_full_with_as_many_elements_as_asked_for() {
    let buckets = |size| {
        let case = Case { bucket_size: size, ..case("dp2 zero1 m2") };
        compiled(LLAMA.0, LLAMA.1, &case).job.programs[0].buckets.len()
    };
    let params = job(LLAMA, "dp2 zero1 m2").params.len();
    assert_eq!((buckets(None), buckets(Some(1))), (2, params));
    assert!((3..params).contains(&buckets(Some(2000))));
}
