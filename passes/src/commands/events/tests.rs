use super::*;
use ir::graph::{Origin, Phase};
use ir::op::{DType, Reduce};
use ir::program::Group;
use ir::program::{Buffer, BufferAddress, BufferId, Collective, Content, GroupId};

fn buffer(name: &str, arena: Arena, offset: u64) -> Buffer {
    Buffer { name: name.into(), dtype: DType::F32, dims: vec![("d".into(), 16)], arena, offset, content: Content::Activation, origin: None }
}

fn command(stream: Stream, src: u32, dst: u32) -> Command {
    let [src, dst] = [src, dst].map(|b| BufferAddress::start(BufferId(b)));
    let action = Action::Collective { kind: Collective::AllReduce(Reduce::Sum), group: GroupId(0), dtype: DType::F32, count: 16, src, dst };
    Command { stream, action, predicate: None, origin: Origin::new(Phase::Forward), reason: None }
}

/// Two streams write to a microbatch's slot, each after what the other one wrote to an earlier slot. Waiting for the
/// last command of either is enough; waiting for none is not.
#[test]
fn of_two_waits_that_imply_each_other_one_is_kept() {
    const X: u32 = 0;
    const Y: u32 = 1;
    const SHARED: u32 = 2;
    let buffers = vec![buffer("x", Arena::Stash, 0), buffer("y", Arena::Stash, 64), buffer("shared", Arena::Persistent, 0)];
    let body = |name: &str, commands| ProgramBody { name: name.into(), kind: ir::program::BodyKind::Forward(0), commands, cuts: vec![] };
    let pass = body("pass", vec![command(Stream::Tensor, SHARED, X), command(Stream::Data, SHARED, Y), command(Stream::Data, Y, SHARED)]);
    let late = body("late", vec![command(Stream::Compute, X, Y)]);
    let groups = vec![Group { subs: vec![], stages: None }];
    let arena_bytes = [64, 128, 0, 0, 0, 0, 0];
    let mut program = Program {
        buffers,
        arena_bytes,
        stashes: vec![Stash { bytes: 128, ..Stash::default() }],
        groups,
        copied: Default::default(),
        buckets: vec![],
        bodies: vec![pass, late],
    };
    let call = |body, microbatch| Call::whole(BodyId(body), microbatch);
    let schedule =
        CallSchedule { slots: vec![Slots { count: 2, at: 0 }], train: vec![call(0, 0), call(0, 1), call(1, 0)], ..CallSchedule::default() };
    of_program(&Mesh::new(2, 1, 1, 1, 1), &[], &mut program, &[&schedule], middle);
    let waits = program.bodies[1].commands.iter().filter(|c| matches!(c.action, Action::Wait { .. })).count();
    assert_eq!(waits, 1);
}

/// Replaying a phase only once gives the same waits as replaying it again, for random programs. Some bodies have
/// parts, stashes have different numbers of slots, and even microbatches may come first.
#[test]
fn phases_that_are_played_once_ask_for_the_waits_of_all() {
    let mut state = 88172645463325252u64;
    let mut below = |n: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) % n
    };
    let (mut waits, mut skipped) = (0, 0);
    for _ in 0..400 {
        let mut at = [0u64; Arena::ALL.len()];
        let buffers: Vec<Buffer> = (0..10)
            .map(|k| {
                let arena = [Arena::Stash, Arena::Stash, Arena::Persistent, Arena::Temporary][below(4) as usize];
                let offset = at[arena as usize];
                at[arena as usize] += 32 * (1 + below(2));
                buffer(&format!("b{k}"), arena, offset)
            })
            .collect();
        let bytes = at.map(|bytes| bytes + 64);
        let names = ["first", "forward", "backward", "last", "update", "evaluate"];
        let bodies = names.map(|name| {
            let mut one = || command(Stream::ALL[below(STREAMS as u64) as usize], below(10) as u32, below(10) as u32);
            let commands = (0..4).map(|_| one()).collect();
            let cuts = if matches!(name, "forward" | "backward") && below(2) == 0 { vec![2] } else { vec![] };
            ProgramBody { name: name.into(), kind: ir::program::BodyKind::Forward(0), commands, cuts }
        });
        // Stashes share the arena, as stashes with disjoint lifetimes do.
        let slots: Vec<u32> = (0..1 + below(3)).map(|_| 1 + below(4) as u32).collect();
        let stash = Stash { bytes: bytes[Arena::Stash as usize], ..Stash::default() };
        let mut program = Program {
            buffers,
            arena_bytes: bytes,
            stashes: slots.iter().map(|_| stash).collect(),
            groups: vec![Group { subs: vec![], stages: None }],
            copied: Default::default(),
            buckets: vec![],
            bodies: bodies.to_vec(),
        };
        let parts = |body: u32, microbatch: u32| {
            let parts = if bodies[body as usize].cuts.is_empty() { 1 } else { 2 };
            (0..parts).map(move |part| Call { body: BodyId(body), microbatch, part })
        };
        // A forward and a backward pass, some microbatches apart, alternate by part; the first and the last body run
        // once.
        let (all, apart, odd) = (60u32, 1 + below(3) as u32, below(2) as u32);
        let turn = |k: u32| {
            if odd == 0 {
                k
            } else if k < all / 2 {
                2 * k
            } else {
                2 * (k - all / 2) + 1
            }
        };
        let mut train: Vec<Call> = parts(0, 0).collect();
        for k in 0..all + apart {
            let forward: Vec<Call> = if k < all { parts(1, turn(k)).collect() } else { vec![] };
            let backward: Vec<Call> = k.checked_sub(apart).map(|b| parts(2, turn(b)).collect()).unwrap_or_default();
            let longest = forward.len().max(backward.len());
            (0..longest).for_each(|p| train.extend(forward.get(p).into_iter().chain(backward.get(p))));
        }
        train.extend(parts(3, 0));
        let counts: Vec<u64> = slots.iter().map(|n| u64::from(*n)).collect();
        skipped += middle(&train, &counts).len();
        let schedule = CallSchedule {
            slots: slots.iter().map(|count| Slots { count: *count, at: 0 }).collect(),
            train,
            update: parts(4, 0).collect(),
            eval: (0..all).flat_map(|m| parts(5, m)).collect(),
            ..CallSchedule::default()
        };
        let mut other = program.clone();
        of_program(&Mesh::new(2, 1, 1, 1, 1), &[], &mut program, &[&schedule], middle);
        of_program(&Mesh::new(2, 1, 1, 1, 1), &[], &mut other, &[&schedule], |calls, _| calls.len()..calls.len());
        assert_eq!(program.bodies, other.bodies);
        waits += program.bodies.iter().flat_map(|b| &b.commands).filter(|c| matches!(c.action, Action::Wait { .. })).count();
    }
    assert!(waits > 2000 && skipped > 400 * 30, "{waits} waits, {skipped} calls");
}

/// If even microbatches come first, the slot of odd ones is touched late, and the middle begins after that.
#[test]
fn a_middle_begins_once_all_slots_were_touched() {
    let call = |microbatch| Call::whole(BodyId(0), microbatch);
    let even_first: Vec<Call> = (0..40).map(|k| call(2 * k)).chain((0..40).map(|k| call(2 * k + 1))).collect();
    let in_turn: Vec<Call> = (0..80).map(call).collect();
    assert_eq!(middle(&in_turn, &[2, 1]), 6..80);
    assert_eq!(middle(&even_first, &[2, 1]), 41..80);
    // Another body is called once.
    let with_last: Vec<Call> = in_turn.into_iter().chain([Call::whole(BodyId(1), 0)]).collect();
    assert_eq!(middle(&with_last, &[3]), 7..80);
}
