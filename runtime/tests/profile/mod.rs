//! What a profile says of a run, against the job that ran.

use crate::bench::{Bench, run};
use crate::fixture::{self, Split};
use ir::program::ProgramPhase;
use ir::program::{Action, Job, Stream};
use runtime::comm::Position;
use runtime::executor::CommandOrder;
use runtime::launch::RunOptions;
use runtime::profile::breakdown::Breakdown;
use runtime::profile::exchanges::{Exchanged, exchanges};
use runtime::profile::{Profile, Ran, table, trace};
use std::collections::BTreeMap;

fn profile(bench: &Bench, order: CommandOrder) -> Profile {
    let options = RunOptions { profile: Some(2), order, ..bench.options() };
    run(&bench.artifact, &options, &mut |_| {}).unwrap().profile.unwrap()
}

/// Where a rank is in a step, by stream, in the order of issue.
fn positions(job: &Job, rank: u64) -> BTreeMap<Stream, Vec<Position>> {
    let stage = &job.stages[job.mesh.stage(rank) as usize];
    let mut out: BTreeMap<Stream, Vec<Position>> = BTreeMap::new();
    for phase in [ProgramPhase::Train, ProgramPhase::Update] {
        for (k, call) in (0..).zip(stage.schedule.calls(phase)) {
            for (c, command) in job.programs[stage.program as usize].commands(call) {
                out.entry(command.stream).or_default().push(Position { phase, call: k, command: c as u32 });
            }
        }
    }
    out
}

/// The commands of all ranks in a step that `keep` wants.
fn count(job: &Job, keep: impl Fn(&Action) -> bool) -> usize {
    let of_rank = |rank| positions(job, rank).into_values().flatten().filter(|at| keep(action(job, rank, *at))).count();
    (0..job.mesh.world()).map(of_rank).sum()
}

fn action(job: &Job, rank: u64, at: Position) -> &Action {
    let stage = &job.stages[job.mesh.stage(rank) as usize];
    let call = stage.schedule.calls(at.phase)[at.call as usize];
    &job.programs[stage.program as usize].bodies[call.body.index()].commands[at.command as usize].action
}

const SPLIT: Split = Split { microbatches: 2, pp: 2, dp: 1, tp: 2 };

#[test]
fn every_command_of_every_stream_is_noted_once_a_step_and_none_overlaps_the_next() {
    let bench = Bench::native(&fixture::streamed(fixture::job(&SPLIT)), &SPLIT);
    let (job, profile) = (&bench.artifact.job, profile(&bench, CommandOrder::Streams));
    assert_eq!(profile.ranks.len(), 4);
    for (rank, recorded) in (0..).zip(&profile.ranks) {
        assert_eq!(recorded.steps.iter().map(|s| s.step).collect::<Vec<_>>(), [3, 4]);
        let mut streams: BTreeMap<Stream, Vec<_>> = BTreeMap::new();
        let stage = &job.stages[job.mesh.stage(rank) as usize];
        for ran in &recorded.ran {
            let call = stage.schedule.calls(ran.at.phase)[ran.at.call as usize];
            let command = &job.programs[stage.program as usize].bodies[call.body.index()].commands[ran.at.command as usize];
            streams.entry(command.stream).or_default().push(ran);
        }
        for (stream, expected) in positions(job, rank) {
            let ran = &streams[&stream];
            assert_eq!(ran.iter().map(|r| r.at).collect::<Vec<_>>(), expected.repeat(2), "rank {rank}, {stream:?}");
            assert!(ran.windows(2).all(|pair| pair[0].start + pair[0].time <= pair[1].start), "rank {rank}, {stream:?}");
        }
        let within = |at: u64| recorded.steps.iter().any(|s| (s.start..=s.end).contains(&at));
        assert!(streams[&Stream::Compute].iter().all(|r| within(r.start) && within(r.start + r.time)), "rank {rank}");
    }
}

#[test]
fn the_trace_has_a_process_per_rank_a_track_per_stream_and_an_arrow_per_message() {
    let bench = Bench::native(&fixture::streamed(fixture::job(&SPLIT)), &SPLIT);
    let (job, profile) = (&bench.artifact.job, profile(&bench, CommandOrder::Streams));
    let mut text = vec![];
    trace::write(job, &profile, &mut text).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let of = |key: &str, value: &str| events.iter().filter(|e| e[key] == value).collect::<Vec<_>>();
    let named = |what: &str| of("name", what).into_iter().map(|e| (e["pid"].as_u64().unwrap(), e["args"]["name"].as_str().unwrap()));
    assert_eq!(
        named("process_name").collect::<Vec<_>>(),
        [(0, "rank 0 (stage 0)"), (1, "rank 1 (stage 0)"), (2, "rank 2 (stage 1)"), (3, "rank 3 (stage 1)")]
    );
    for rank in 0..4 {
        let tracks: Vec<_> = named("thread_name").filter(|t| t.0 == rank).map(|t| t.1).collect();
        let streams = positions(job, rank).into_keys().map(Stream::name);
        assert_eq!(tracks, ["steps"].into_iter().chain(streams).collect::<Vec<_>>());
    }
    assert_eq!(of("cat", "kernel").len(), 2 * count(job, |a| matches!(a, Action::Launch { .. })));
    let exchanges = |a: &Action| matches!(a, Action::Collective { .. } | Action::Send { .. } | Action::Recv { .. });
    assert_eq!(of("cat", "communication").len(), 2 * count(job, exchanges));
    let product = events.iter().find(|e| e["name"] == "dot 1x4x2" || e["name"] == "dot 4x1x2").unwrap();
    assert_eq!((&product["args"]["body"], &product["args"]["flops"], &product["args"]["bytes"]), (&"forward".into(), &16.into(), &56.into()));
    let arrows = of("cat", "message");
    assert_eq!(arrows.len(), 2 * 2 * count(job, |a| matches!(a, Action::Send { .. })));
    for pair in arrows.chunks(2) {
        let [from, to] = pair else { unreachable!() };
        assert_eq!((&from["ph"], &to["ph"], &from["id"]), (&"s".into(), &"f".into(), &to["id"]));
        assert!(from["ts"].as_f64() < to["ts"].as_f64() && from["pid"] != to["pid"]);
    }
}

#[test]
fn the_table_has_all_calls_and_its_shares_are_the_whole_step() {
    let bench = Bench::native(&fixture::streamed(fixture::job(&SPLIT)), &SPLIT);
    let (job, profile) = (&bench.artifact.job, profile(&bench, CommandOrder::Streams));
    let table = table::Table::new(job, &profile);
    let launches: usize = table.rows.iter().filter(|r| r.symbol.is_some()).map(|r| r.times.len()).sum();
    assert_eq!(launches, 2 * count(job, |a| matches!(a, Action::Launch { .. })));
    assert!(table.rows.windows(2).all(|pair| pair[0].total() >= pair[1].total()));
    for (rank, (whole, waited)) in table.ranks.iter().enumerate() {
        assert!(*waited > 0 && waited < whole, "rank {rank}");
    }
    let own: u64 = table.rows.iter().filter(|r| r.stream == Stream::Compute).map(table::Row::total).sum();
    let (whole, waited) = table.ranks.iter().fold((0, 0), |sum, r| (sum.0 + r.0, sum.1 + r.1));
    assert!(own + waited <= whole, "{own} {waited} {whole}");
    let text = table::text(&Breakdown::new(job, &profile));
    for part in [
        "steps 3 to 4, 4 ranks",
        "GFLOP/s in f32",
        " bound ",
        "memory",
        "dot ",
        "waiting for communication",
        "100.0 %",
        "beside it",
        "send by 1 stage",
    ] {
        assert!(text.contains(part), "no `{part}` in\n{text}");
    }
}

#[test]
fn in_list_order_and_on_other_devices_all_is_on_the_ranks_own_threads_and_ceilings_are_unknown() {
    let bench = Bench::new(&SPLIT);
    let profile = profile(&bench, CommandOrder::List);
    assert_eq!(profile.ceilings, None);
    let text = table::text(&Breakdown::new(&bench.artifact.job, &profile));
    assert!(!text.contains("ceilings") && !text.contains("beside it") && text.contains("send by 1 stage"), "{text}");
}

#[test]
fn exchanges_are_found_once_with_all_who_take_part() {
    let bench = Bench::native(&fixture::streamed(fixture::job(&SPLIT)), &SPLIT);
    let job = &bench.artifact.job;
    for order in [CommandOrder::List, CommandOrder::Streams] {
        let profile = profile(&bench, order);
        let found = exchanges(job, &profile);
        let (messages, collectives): (Vec<_>, Vec<_>) = found.iter().partition(|e| e.kind.is_none());
        assert_eq!(messages.len(), 2 * count(job, |a| matches!(a, Action::Recv { .. })));
        // Each member's command is part of one exchange in each of the two steps; groups of one rank have none.
        let of_rank = |rank: u64| {
            let groups = &job.programs[job.stages[job.mesh.stage(rank) as usize].program as usize].groups;
            let members =
                move |a: &Action| if let Action::Collective { group, .. } = a { groups[group.index()].members(&job.mesh, rank).len() } else { 0 };
            positions(job, rank).into_values().flatten().filter(|at| members(action(job, rank, *at)) > 1).count()
        };
        let parts: usize = collectives.iter().map(|e| e.ranks.len()).sum();
        assert!(parts > 0 && parts == 2 * (0..4).map(of_rank).sum::<usize>(), "{collectives:?}");
        for e in &found {
            let longest = |rank: u64| profile.ranks[rank as usize].ran.iter().map(|r| r.time).max().unwrap_or(0) as f64 / 1e9;
            let most = e.ranks.iter().map(|r| longest(*r)).fold(0.0, f64::max);
            let of_message = (1..=2).contains(&e.seconds.len());
            assert!(e.bytes > 0 && e.seconds.iter().all(|s| (0.0..=most).contains(s)), "{e:?}");
            assert!(if e.kind.is_none() { of_message && e.rank == e.ranks[1] } else { e.seconds.len() == 1 }, "{e:?}");
        }
    }
}

/// Who comes early waits for the last; a message is copied in whoever waits for it.
#[test]
fn what_early_members_wait_is_no_time_of_an_exchange() {
    let job = fixture::streamed(fixture::job(&SPLIT));
    let mut profile = Profile::new(4, CommandOrder::Streams, None);
    let first = |rank: u64, is: &dyn Fn(&Action) -> bool| {
        let all = positions(&job, rank).into_values().flatten();
        all.into_iter().find(|at| is(action(&job, rank, *at))).unwrap()
    };
    let sum = |a: &Action| matches!(a, Action::Collective { group, .. } if job.programs[0].groups[group.index()].stages.is_none());
    // Ranks 0 and 1 are a group of a stage: rank 0 comes at 1 us and goes on at 8, rank 1 comes at 5 and goes on at
    // 10.
    profile.ranks[0].ran.push(Ran { at: first(0, &sum), start: 1_000, time: 7_000 });
    profile.ranks[1].ran.push(Ran { at: first(1, &sum), start: 5_000, time: 5_000 });
    // Rank 2 waits for what rank 0 sends, and rank 3 comes when rank 1 has sent.
    let (sends, receives) = (|a: &Action| matches!(a, Action::Send { .. }), |a: &Action| matches!(a, Action::Recv { .. }));
    for (sender, received) in [(0, 15_000), (1, 30_000)] {
        profile.ranks[sender].ran.push(Ran { at: first(sender as u64, &sends), start: 20_000, time: 4_000 });
        let at = first(sender as u64 + 2, &receives);
        profile.ranks[sender + 2].ran.push(Ran { at, start: received, time: 11_000 });
    }
    let found = exchanges(&job, &profile);
    let of = |ranks: [u64; 2]| found.iter().find(|e| e.ranks == ranks).unwrap_or_else(|| panic!("{ranks:?}: {found:?}"));
    let micro = |e: &Exchanged| e.seconds.iter().map(|s| (s * 1e6).round()).collect::<Vec<_>>();
    assert_eq!(found.len(), 3);
    assert_eq!((micro(of([0, 1])), micro(of([0, 2])), micro(of([1, 3]))), (vec![4.0], vec![4.0], vec![4.0, 11.0]));
}
