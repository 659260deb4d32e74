use super::*;
use ir::graph::{Origin, Phase};
use ir::op::{DType, Real};
use ir::program::{Action, Arena, BodyId, BodyKind, Buffer, BufferId, Command, Content, ProgramBody, Slots, Stream};

/// A program whose bodies fill buffers: `(name, end of its temporary buffers, stashes it touches)`, stashes first.
/// Stashes have 64 bytes.
fn program(bodies: &[(&str, u64, &[u32])], stashes: u32) -> Program {
    let buffer = |arena, offset, bytes: u64| Buffer {
        name: String::new(),
        dtype: DType::F32,
        dims: vec![("d".into(), bytes / 4)],
        arena,
        offset,
        content: Content::Activation,
        origin: None,
    };
    let mut buffers: Vec<Buffer> = (0..stashes).map(|k| buffer(Arena::Stash, u64::from(k) * 64, 64)).collect();
    let fill = |k: u32| Command {
        stream: Stream::Compute,
        action: Action::Fill { buffer: BufferId(k), value: Real(0.0) },
        predicate: None,
        origin: Origin::new(Phase::Forward),
        reason: None,
    };
    let mut all = vec![];
    for (name, end, touched) in bodies {
        let mut commands: Vec<Command> = touched.iter().map(|k| fill(*k)).collect();
        if *end > 0 {
            commands.push(fill(buffers.len() as u32));
            buffers.push(buffer(Arena::Temporary, 0, *end));
        }
        all.push(ProgramBody { name: name.to_string(), kind: BodyKind::Forward(0), commands, cuts: vec![] });
    }
    let arena_bytes = [0, u64::from(stashes) * 64, bodies.iter().map(|b| b.1).max().unwrap_or(0), 0, 0, 0, 0];
    let stashes = vec![Stash { bytes: 64, ..Stash::default() }; stashes as usize];
    Program { buffers, arena_bytes, stashes, groups: vec![], copied: Default::default(), buckets: vec![], bodies: all }
}

fn calls(bodies: &[u32]) -> Vec<Call> {
    bodies.iter().map(|body| Call::whole(BodyId(*body), 0)).collect()
}

/// The offsets of stashes, and the bytes of the whole arena.
fn placed(program: &Program, counts: &[u32], [train, update, eval]: [&[u32]; 3]) -> (Vec<u64>, u64) {
    let slots = counts.iter().map(|count| Slots { count: *count, at: 0 }).collect();
    let mut schedule = CallSchedule { slots, train: calls(train), update: calls(update), eval: calls(eval), ..CallSchedule::default() };
    place(program, &mut schedule);
    (schedule.slots.iter().map(|s| s.at).collect(), schedule.arena_bytes(program)[Arena::Temporary as usize])
}

#[test]
fn other_phases_have_their_temporary_buffers_where_a_stash_is() {
    let program = program(&[("prologue", 320, &[]), ("forward", 128, &[0]), ("backward", 64, &[0]), ("update", 256, &[]), ("eval", 192, &[])], 1);
    assert_eq!(placed(&program, &[3], [&[0, 1, 2], &[3], &[4]]), (vec![128], 320));
    // The arena is as large as the phase that needs most.
    assert_eq!(placed(&program, &[4], [&[0, 1, 2], &[3], &[4]]), (vec![128], 384));
}

#[test]
fn stashes_of_a_time_lie_beside_each_other_and_others_do_not() {
    let program = program(&[("forward", 64, &[0, 1]), ("backward", 128, &[0]), ("weight", 0, &[2]), ("eval", 0, &[3])], 4);
    // Stash 1 is done before `forward` has its temporary buffer, stash 2 comes later.
    assert_eq!(placed(&program, &[2, 1, 1, 1], [&[0, 1, 2], &[], &[3]]), (vec![64, 0, 0, 0], 192));
}

#[test]
fn temporary_buffers_lie_where_a_stash_was_of_use() {
    let program = program(&[("forward", 64, &[0, 1]), ("backward", 256, &[1, 0])], 2);
    assert_eq!(placed(&program, &[1, 1], [&[0, 1], &[], &[]]), (vec![64, 128], 256));
}

/// With two microbatches in flight one of them is in use when the other has been.
#[test]
fn what_is_kept_for_one_microbatch_at_a_time_is_a_stash_for_each_buffer() {
    let lists = [&[0, 1, 0, 1][..], &[0, 0, 1, 1]].map(|bodies| {
        let mut seen = [0, 0];
        let call = |b: &u32| {
            seen[*b as usize] += 1;
            Call::whole(BodyId(*b), seen[*b as usize] - 1)
        };
        CallSchedule { train: bodies.iter().map(call).collect(), ..CallSchedule::default() }
    });
    for (schedules, stashes) in [(&lists[..1], vec![64, 64]), (&lists[..], vec![128])] {
        let mut program = program(&[("forward", 0, &[0, 1]), ("backward", 0, &[1, 0])], 2);
        assert_eq!(lay_out(&mut program, &schedules.iter().collect::<Vec<_>>()), vec![false; stashes.len()]);
        assert_eq!(program.stashes.iter().map(|s| s.bytes).collect::<Vec<_>>(), stashes);
    }
}

#[test]
fn a_stash_in_use_is_safe_from_calls_that_do_not_touch_it() {
    let program = program(&[("forward", 64, &[0]), ("other", 512, &[]), ("backward", 64, &[0])], 1);
    assert_eq!(placed(&program, &[1], [&[0, 1, 2], &[], &[]]), (vec![512], 576));
}
