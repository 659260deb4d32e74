//! The lemma of the module's documentation, against all ranks played one by one.

use crate::job::ProgramPhase;
use crate::job::exchange::{Events, ExchangeSimulation};
use ir::mesh::{Axis, Mesh, SubAxis};
use ir::op::{Collective, DType, Reduce};
use ir::program::{Action, BufferAddress, BufferId, Call, CallSchedule, Channel, Command, Group, GroupId, Job, Program};
use ir::random::mix;
use std::collections::{HashMap, VecDeque};

const STAGES: u64 = 3;

/// Three stages of four ranks that only communicate; in some jobs something is out of order.
fn communicating(seed: u64) -> Job {
    let mut state = seed;
    let mut draw = |n: u64| {
        state = mix(state);
        state % n
    };
    let mut job = super::job();
    job.mesh = Mesh::new(1, STAGES, 2, 1, 2);
    job.in_flight = 1 + draw(2) as u32;
    let blank = job.programs[0].bodies[1].commands[0].clone();
    let place = BufferAddress::start(BufferId(0));
    let subs: Vec<SubAxis> = job.mesh.of(Axis::Dp).chain(job.mesh.of(Axis::Tp)).collect();
    let mut lists: Vec<Vec<Command>> = vec![vec![]; STAGES as usize];
    let mut groups: Vec<Vec<Group>> = vec![vec![]; STAGES as usize];
    for _ in 0..8 {
        let command = |action: Action| Command { action, ..blank.clone() };
        let (kind, s) = (draw(3), draw(STAGES));
        if kind == 0 {
            let hops = if s == 0 {
                1 + draw(2) as i64
            } else if s == 1 {
                [-1, 1][draw(2) as usize]
            } else {
                -1 - draw(2) as i64
            };
            let (count, channel) = (1 + draw(2), Channel(draw(2) as u32));
            lists[s as usize].push(command(Action::Send { hops, channel, dtype: DType::F32, count, src: place.clone() }));
            let to = s.wrapping_add_signed(hops) as usize;
            lists[to].push(command(Action::Recv { hops: -hops, channel, dtype: DType::F32, count, dst: place.clone() }));
            continue;
        }
        let mine: Vec<SubAxis> = subs.iter().copied().filter(|_| draw(2) == 0).collect();
        let list = draw(1 << STAGES) | 1 << s;
        let stages: Vec<u64> = (0..STAGES).filter(|t| list >> t & 1 == 1 && kind == 2 || *t == s).collect();
        let group = Group { subs: mine, stages: if kind == 1 { None } else { Some(stages.clone()) } };
        for t in stages.iter().map(|t| *t as usize) {
            groups[t].push(group.clone());
            let kind = Collective::AllReduce(Reduce::Sum);
            let group = GroupId(groups[t].len() as u32 - 1);
            lists[t].push(command(Action::Collective { kind, group, dtype: DType::F32, count: 1, src: place.clone(), dst: place.clone() }));
        }
    }
    let victim = &mut lists[draw(STAGES) as usize];
    let at = draw(8) as usize;
    match draw(4) {
        0 if at + 1 < victim.len() => victim.swap(at, at + 1),
        1 if at < victim.len() => drop(victim.remove(at)),
        2 if at < victim.len() => victim.insert(at, victim[at].clone()),
        _ => {}
    }
    job.programs = lists
        .into_iter()
        .zip(groups)
        .map(|(commands, groups)| {
            let mut program = job.programs[0].clone();
            program.bodies.truncate(1);
            program.bodies[0].commands = commands;
            Program { groups, ..program }
        })
        .collect();
    job.stages = (0..STAGES as u32)
        .map(|program| {
            let schedule = CallSchedule { train: vec![Call::whole(ir::program::BodyId(0), 0)], ..CallSchedule::default() };
            ir::program::Stage { program, params: vec![], schedule }
        })
        .collect();
    job
}

/// Whether all ranks come to the end of training and leave no message.
fn all_ranks_finish(job: &Job) -> bool {
    let mesh = &job.mesh;
    let ranks: Vec<(&Program, &[Command])> = (0..mesh.world())
        .map(|r| {
            let program = &job.programs[mesh.stage(r) as usize];
            (program, program.bodies[0].commands.as_slice())
        })
        .collect();
    let mut at = vec![0usize; ranks.len()];
    let mut mail: HashMap<(u64, u64, Channel), VecDeque<u64>> = HashMap::new();
    let peer = |r: u64, hops: i64| {
        let mut coords = mesh.coords(r);
        mesh.of(Axis::Pp).for_each(|u| coords[u.0 as usize] = coords[u.0 as usize].wrapping_add_signed(hops));
        mesh.rank(&coords)
    };
    loop {
        let mut moved = false;
        for r in 0..mesh.world() {
            let Some(command) = ranks[r as usize].1.get(at[r as usize]) else { continue };
            let go: Vec<u64> = match &command.action {
                Action::Send { hops, channel, count, .. } => {
                    let letters = mail.entry((r, peer(r, *hops), *channel)).or_default();
                    if letters.len() < job.in_flight as usize {
                        letters.push_back(*count);
                        vec![r]
                    } else {
                        vec![]
                    }
                }
                Action::Recv { hops, channel, count, .. } => match mail.entry((peer(r, *hops), r, *channel)).or_default().pop_front() {
                    Some(sent) if sent != *count => return false,
                    Some(_) => vec![r],
                    None => vec![],
                },
                Action::Collective { group, .. } => {
                    let members = ranks[r as usize].0.groups[group.index()].members(mesh, r);
                    let come = |m: &u64| match ranks[*m as usize].1.get(at[*m as usize]).map(|c| &c.action) {
                        Some(Action::Collective { group, .. }) => ranks[*m as usize].0.groups[group.index()].members(mesh, *m) == members,
                        _ => false,
                    };
                    if members.iter().all(come) { members } else { vec![] }
                }
                other => panic!("{other:?}"),
            };
            moved |= !go.is_empty();
            go.iter().for_each(|r| at[*r as usize] += 1);
        }
        if !moved {
            return at.iter().zip(&ranks).all(|(k, r)| *k == r.1.len()) && mail.values().all(VecDeque::is_empty);
        }
    }
}

#[test]
fn one_rank_of_each_stage_tells_whether_all_finish() {
    let mut finished = 0;
    for seed in 0..2000 {
        let job = communicating(seed);
        let events: Vec<Events> = job.programs.iter().map(Events::new).collect();
        let played = ExchangeSimulation::new(&job, &events.iter().collect::<Vec<_>>()).run(ProgramPhase::Train);
        assert_eq!(played.is_ok(), all_ranks_finish(&job), "seed {seed}: {played:?}");
        finished += u32::from(played.is_ok());
    }
    assert!((400..1600).contains(&finished), "{finished} of 2000 finish");
}
