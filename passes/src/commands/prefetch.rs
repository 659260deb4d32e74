//! Issues copies from the host's memory to the device before earlier commands than those that want them, so that each
//! is done in time: of activations that have waited there, and of parameters that rest there. (Prefetching, as
//! ZeRO-Infinity does it, Rajbhandari et al. 2021, section 6.2.)
//!
//! Each comes as late as it can on a nominal machine ([`crate::commands::cost_model`]), if nothing is to wait for it;
//! where the bus takes longer than all kernels of a pass, these are taken to be as slow, as they will wait.

use crate::commands::cost_model::CostModel;
use crate::commands::effects::memory_effects;
use crate::commands::list_schedule::PRICE;
use crate::commands::spills::returns;
use ir::kernel::Kernel;
use ir::mesh::Mesh;
use ir::program::{Action, BodyKind, Buffer, BufferId, Command, Job, Program, Space};
use std::collections::BTreeMap;

/// Moves the copies of all passes.
pub fn issue(mut job: Job) -> Job {
    let Job { mesh, kernels, programs, .. } = &mut job;
    let costs = CostModel::new(mesh, kernels);
    for program in programs {
        for body in 0..program.bodies.len() {
            if !matches!(program.bodies[body].kind, BodyKind::Reduce | BodyKind::Update) {
                program.bodies[body].commands = issued(mesh, kernels, &costs, program, &program.bodies[body].commands);
            }
        }
    }
    job
}

/// The commands of a pass with its copies ahead.
fn issued(mesh: &Mesh, kernels: &[Kernel], costs: &CostModel, program: &Program, commands: &[Command]) -> Vec<Command> {
    let returns = returns(program, commands);
    // A copy with a predicate has to stay behind the command that writes the predicate.
    let moves: Vec<bool> =
        commands.iter().zip(&returns).map(|(c, returns)| *returns && ir::fault!("prefetch.bool.ahead", true, c.predicate.is_none())).collect();
    let (moved, others): (Vec<usize>, Vec<usize>) = (0..commands.len()).partition(|k| moves[*k]);
    if moved.is_empty() {
        return commands.to_vec();
    }
    let others: Vec<Command> = others.into_iter().map(|k| commands[k].clone()).collect();
    let of_all = others.iter().enumerate().rev();
    let first: BTreeMap<BufferId, usize> =
        of_all.flat_map(|(k, c)| memory_effects(mesh, kernels, program, c).into_iter().map(move |t| (t.buffer, k))).collect();
    let wanted = |k: usize| {
        let Action::Copy { dst, .. } = &commands[k].action else { unreachable!("invariant: copies alone return") };
        (first.get(&dst.buffer).copied().unwrap_or(others.len()), commands[k].clone())
    };
    let mut copies: Vec<(usize, Command)> = moved.into_iter().map(wanted).collect();
    copies.sort_by_key(|c| c.0);
    ahead(costs, program, &others, &mut copies);
    let mut copies = copies.into_iter().peekable();
    let mut out = Vec::with_capacity(commands.len());
    for (k, command) in others.into_iter().enumerate() {
        while let Some((_, copy)) = copies.next_if(|c| ir::fault!("prefetch.copy.late", c.0 < k, c.0 <= k)) {
            out.push(copy);
        }
        out.push(command);
    }
    out.extend(copies.map(|c| c.1));
    out
}

/// Issues copies ahead of the commands that need them, so that each is done in time, one after the other, and no
/// sooner than necessary. At a time, the bytes that wait for their command are at most what a new order of commands
/// may cost, or two copies.
fn ahead(costs: &CostModel, program: &Program, commands: &[Command], copies: &mut [(usize, Command)]) {
    // Commands with a predicate count nothing, since most steps skip them.
    let of_kernel = |c: &Command| match c.action {
        Action::Launch { .. } if c.predicate.is_none() => costs.time(program, &c.action),
        _ => 0,
    };
    // An exchange starts as soon as its operand is there.
    let of_exchange = |c: &Command| match c.action {
        Action::Collective { .. } | Action::Send { .. } => costs.time(program, &c.action),
        _ => 0,
    };
    let bus: u128 = copies.iter().map(|(_, c)| u128::from(costs.time(program, &c.action))).sum();
    let (mut begins, mut busy) = (vec![], 0u128);
    for command in commands {
        begins.push(busy);
        busy += u128::from(of_kernel(command));
    }
    // If the bus takes longer than all kernels, the kernels are stretched to its pace.
    begins.iter_mut().for_each(|t| *t = t.saturating_mul(bus.max(busy)) / busy.max(1));
    let wanted: Vec<usize> = copies.iter().map(|c| c.0).collect();
    let mut next = u128::MAX;
    for (before, copy) in copies.iter_mut().rev() {
        let begin = begins.get(*before).map_or(u128::MAX, |t| t.saturating_sub(u128::from(of_exchange(&commands[*before]))));
        next = begin.min(next).saturating_sub(u128::from(costs.time(program, &copy.action)));
        *before = begins.partition_point(|t| *t <= next).saturating_sub(1).min(*before);
    }
    let bytes: Vec<u64> = copies.iter().map(|(_, c)| costs.sent(program, &c.action)).collect();
    let lasting = program.buffers.iter().filter(|b| b.arena == Space::Device.lasting()).map(Buffer::bytes);
    let most = (lasting.fold(0, u64::saturating_add) / PRICE).max(bytes.iter().max().copied().unwrap_or(0).saturating_mul(2));
    let (mut first, mut waiting) = (0, 0u64);
    for k in 0..copies.len() {
        copies[k].0 = copies[k].0.max(copies[k.max(1) - 1].0);
        waiting = waiting.saturating_add(bytes[k]);
        while waiting > most && first < k {
            copies[k].0 = copies[k].0.max(wanted[first]);
            waiting -= bytes[first];
            first += 1;
        }
    }
}
