use super::*;
use crate::fixture::{self, Split};
use ir::program::{Action, Collective, Content, GroupId};

fn step(job: &Job) -> Result<StepResult, Error> {
    run_step(job, &fixture::params(), &States::new(), &fixture::inputs(), 1, 0.25, 0)
}

const SPLITS: [Split; 7] = [
    Split { microbatches: 1, pp: 1, dp: 1, tp: 1 },
    Split { microbatches: 4, pp: 1, dp: 1, tp: 1 },
    Split { microbatches: 2, pp: 1, dp: 2, tp: 1 },
    Split { microbatches: 1, pp: 1, dp: 1, tp: 2 },
    Split { microbatches: 2, pp: 1, dp: 4, tp: 1 },
    Split { microbatches: 1, pp: 2, dp: 1, tp: 1 },
    Split { microbatches: 1, pp: 2, dp: 2, tp: 2 },
];

#[test]
fn every_split_gives_exactly_the_same_step() {
    let (loss, norm, w, v) = fixture::expected(0.25);
    for split in &SPLITS {
        let result = step(&fixture::job(split)).unwrap();
        assert_eq!(result.reports["loss"], loss);
        assert_eq!(result.reports["grad_norm"], norm);
        assert_eq!(result.params["w"].data, w);
        assert_eq!(result.states[&("w".to_owned(), 0)].data, v);
        assert!(result.updated);
    }
}

#[test]
fn every_interleaving_of_streams_gives_exactly_the_same_step() {
    for split in &SPLITS {
        let job = fixture::streamed(fixture::job(split));
        let ordered = step(&job).unwrap();
        for seed in 0..20 {
            let settings = Settings { step: 1, steps: 1, evaluations: 0, learning_rate: 0.25, seed: 0, interleaving: Interleaving::Random(seed) };
            let result = run_step_with(&job, &fixture::params(), &States::new(), &fixture::inputs(), &settings).unwrap();
            assert_eq!((result.reports, result.params), (ordered.reports.clone(), ordered.params.clone()));
        }
    }
}

#[test]
fn a_missing_wait_shows_in_some_interleaving() {
    let mut job = fixture::streamed(fixture::job(&SPLITS[3]));
    let forward = &mut job.programs[0].bodies[1].commands;
    let k = forward.iter().position(|c| c.stream != ir::program::Stream::Compute && matches!(c.action, Action::Wait { .. })).unwrap();
    forward.remove(k);
    let ordered = step(&job).unwrap();
    let differs = |seed| {
        let settings = Settings { step: 1, steps: 1, evaluations: 0, learning_rate: 0.25, seed: 0, interleaving: Interleaving::Random(seed) };
        run_step_with(&job, &fixture::params(), &States::new(), &fixture::inputs(), &settings).map_or(true, |r| r.reports != ordered.reports)
    };
    assert!((0..20).any(differs));
}

#[test]
fn a_forward_pass_alone_reports_the_loss() {
    for split in &SPLITS {
        let reports = run_eval(&fixture::job(split), &fixture::params(), &fixture::inputs(), 0).unwrap();
        assert_eq!(reports["loss"], fixture::expected(0.0).0);
        assert!(!reports.contains_key("grad_norm"));
    }
}

#[test]
fn a_second_step_continues_from_the_states_of_the_first() {
    let job = fixture::job(&SPLITS[3]);
    let first = step(&job).unwrap();
    let second = run_step(&job, &first.params, &first.states, &fixture::inputs(), 2, 0.0, 0).unwrap();
    assert_eq!(second.params, first.params);
    assert_ne!(second.states, first.states);
}

#[test]
fn more_sends_than_the_guarantee_without_a_receive_are_a_deadlock() {
    let mut job = fixture::job(&Split { microbatches: 2, pp: 2, dp: 1, tp: 1 });
    // The last stage sends twice before it receives, and so does the first.
    job.stages[1].schedule.train[1..5].rotate_left(2);
    assert_eq!(
        step(&job).unwrap_err().to_string(),
        "deadlock: rank 0 waits for rank 1 at forward microbatch 1 command 3 (send of 4 f32 to rank 1, channel 0 for linear); \
         rank 1 waits for rank 0 at backward microbatch 1 command 0 (send of 4 f32 to rank 0, channel 0 for linear)"
    );
}

#[test]
fn a_missing_collective_is_a_deadlock_that_names_both_sides() {
    let mut job = fixture::job(&Split { microbatches: 1, pp: 2, dp: 1, tp: 1 });
    let reduce = &mut job.programs[1].bodies[3].commands;
    reduce.remove(2);
    let error = step(&job).unwrap_err().to_string();
    assert!(error.contains("all_reduce"), "{error}");
}

#[test]
fn members_that_disagree_are_named() {
    let mut job = fixture::job(&Split { microbatches: 1, pp: 2, dp: 1, tp: 1 });
    for command in &mut job.programs[1].bodies[3].commands {
        if let Action::Collective { kind, group: GroupId(2), .. } = &mut command.action {
            *kind = Collective::AllReduce(ir::op::Reduce::Max);
        }
    }
    let error = step(&job).unwrap_err().to_string();
    assert!(error.contains("rank 0 issues all_reduce sum of 1 f32, rank 1 issues all_reduce max of 1 f32"), "{error}");
}

#[test]
fn replicas_that_differ_are_named() {
    let mut job = fixture::job(&Split { microbatches: 1, pp: 1, dp: 2, tp: 1 });
    // Without the sum of gradients, each rank trains alone.
    job.programs[0].bodies[3].commands.retain(|c| !matches!(c.action, Action::Collective { count: 4, .. }));
    let error = step(&job).unwrap_err();
    assert!(matches!(&error, Error::Reports { name, .. } if name == "grad_norm"), "{error}");
    job.programs[0].bodies[3].commands.retain(|c| !matches!(c.action, Action::Report { report: 1, .. }));
    let error = step(&job).unwrap_err();
    assert!(matches!(&error, Error::Replicas { name, first_rank: 0, second_rank: 1, .. } if name == "w"), "{error}");
}

#[test]
fn memory_that_was_not_written_is_nan() {
    let mut job = fixture::job(&SPLITS[0]);
    job.programs[0].bodies[0].commands.clear();
    let result = step(&job).unwrap();
    assert!(result.reports["loss"].is_nan());
    assert!(!result.updated);
    assert_eq!(result.params, fixture::params());
}

#[test]
fn a_tensor_of_another_shape_is_refused_by_name() {
    let mut params = fixture::params();
    params.get_mut("w").unwrap().sizes = vec![4];
    let error = run_step(&fixture::job(&SPLITS[0]), &params, &States::new(), &fixture::inputs(), 1, 0.25, 0).unwrap_err();
    assert_eq!(error.to_string(), "`w` has sizes [4], the job says [3]");
}

#[test]
fn a_place_outside_of_its_buffer_is_refused() {
    let mut job = fixture::job(&SPLITS[0]);
    job.programs[0].arena_bytes[0] -= 64;
    assert_eq!(step(&job).unwrap_err().to_string(), "program 0, buffer `norm`: offset 256 and 4 bytes lie outside of the persistent arena's 256");
    let mut job = fixture::job(&SPLITS[0]);
    for buffer in &mut job.programs[0].buffers {
        if let Content::Param { slot, .. } = &mut buffer.content {
            *slot = 9;
        }
    }
    assert_eq!(step(&job).unwrap_err().to_string(), "stage 0: buffer `w`: there is no slot 9");
}

#[test]
fn terms_of_one_name_add_up_beside_the_whole_loss() {
    let mut job = fixture::job(&SPLITS[0]);
    job.reports.extend(["aux", "aux", "loss"].map(str::to_owned));
    let values = [Some(3.0), None, Some(1.0), Some(0.5), Some(1.5)];
    assert_eq!(named(&job, &values), [("aux".to_owned(), 1.5), ("loss".to_owned(), 3.0)].into());
}
