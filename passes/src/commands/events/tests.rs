use super::*;
use ir::graph::{Origin, Phase};
use ir::op::{DType, Reduce};
use ir::program::Group;
use ir::program::{Buffer, BufferId, Collective, Content, GroupId, Place};

fn buffer(name: &str, arena: Arena, offset: u64) -> Buffer {
    Buffer { name: name.into(), dtype: DType::F32, dims: vec![("d".into(), 16)], arena, offset, content: Content::Activation, origin: None }
}

fn command(stream: Stream, src: u32, dst: u32) -> Command {
    let [src, dst] = [src, dst].map(|b| Place::start(BufferId(b)));
    let action = Action::Collective { kind: Collective::AllReduce(Reduce::Sum), group: GroupId(0), dtype: DType::F32, count: 16, src, dst };
    Command { stream, action, predicate: None, origin: Origin::new(Phase::Forward), reason: None }
}

/// Two streams leave something in a microbatch's slot, and by then each has come after what the other one left in an earlier slot. To wait for the
/// last of either is enough, to wait for none is not.
#[test]
fn of_two_waits_that_imply_each_other_one_is_kept() {
    const X: u32 = 0;
    const Y: u32 = 1;
    const SHARED: u32 = 2;
    let buffers = vec![buffer("x", Arena::Stash, 0), buffer("y", Arena::Stash, 64), buffer("shared", Arena::Persistent, 0)];
    let body = |name: &str, commands| Body { name: name.into(), kind: ir::program::BodyKind::Forward(0), commands, cuts: vec![] };
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
    of_program(&Mesh::new(2, 1, 1, 1, 1), &[], &mut program, &[&schedule]);
    let waits = program.bodies[1].commands.iter().filter(|c| matches!(c.action, Action::Wait { .. })).count();
    assert_eq!(waits, 1);
}
