//! Commands in words, for errors and profiles.

use super::calls::peer;
use crate::comm::{Position, ranks};
use ir::graph::Origin;
use ir::program::{Action, Command, Job, KernelId, Program};
use std::fmt;

/// The command at a position, for people: the body, the microbatch, what it does and for which part of the model.
pub fn describe(job: &Job, rank: u64, at: Position) -> String {
    let stage = &job.stages[job.mesh.stage(rank) as usize];
    let program = &job.programs[stage.program as usize];
    let Some(call) = stage.schedule.calls(at.phase).get(at.call as usize) else {
        return format!("end of {}", at.phase.name());
    };
    let body = &program.bodies[call.body.index()];
    let place = format!("{} microbatch {} command {}", body.name, call.microbatch, at.command);
    match body.commands.get(at.command as usize) {
        None => place,
        Some(command) => format!("{place} ({}{})", action(job, program, rank, &command.action), From(job, command)),
    }
}

/// ` for layers.3.attn at models/gpt2.mdl:12:3` where known.
struct From<'a>(&'a Job, &'a Command);

impl fmt::Display for From<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let origin = &self.1.origin;
        if !origin.scope.is_empty() {
            write!(f, " for {}", origin.scope)?;
        }
        if let Some(span) = origin.span {
            write!(f, " at {}", self.0.place(span))?;
        }
        Ok(())
    }
}

/// Where an op of a launched kernel stands in the model's text. Lines that compute the same share a kernel, which has
/// the places of one of them: none for the others.
pub fn place_of_op(job: &Job, kernel: KernelId, launch: &Command, op: &Origin) -> Option<String> {
    let of_text = launch.origin.span?;
    let is_own = job.kernels[kernel.index()].body.nodes.iter().any(|n| n.origin.span == Some(of_text));
    op.span.filter(|_| is_own).map(|span| job.place(span))
}

fn action(job: &Job, program: &Program, rank: u64, action: &Action) -> String {
    match action {
        Action::Launch { kernel, .. } => {
            let kernel = &job.kernels[kernel.index()];
            let ops = kernel.body.nodes.iter().filter(|n| !n.op.is_source()).map(|n| n.op.name());
            let mut named: Vec<&str> = vec![];
            for op in ops {
                if !named.contains(&op) {
                    named.push(op);
                }
            }
            format!("kernel of {}", named.join(", "))
        }
        Action::Collective { kind, group, dtype, count, .. } => {
            let members = program.groups[group.index()].members(&job.mesh, rank);
            format!("{} over {}", crate::comm::Terms { kind: *kind, dtype: *dtype, count: *count }, ranks(&members))
        }
        Action::Send { hops, channel, dtype, count, .. } => {
            format!("send of {count} {} to rank {}, {channel}", dtype.name(), peer(job, rank, *hops))
        }
        Action::Recv { hops, channel, dtype, count, .. } => {
            format!("recv of {count} {} from rank {}, {channel}", dtype.name(), peer(job, rank, *hops))
        }
        Action::Copy { dtype, count, src, dst } => {
            let [from, to] = [src, dst].map(|p| program.buffers[p.buffer.index()].arena.whereabouts());
            format!("copy of {count} {} from {from} to {to}", dtype.name())
        }
        Action::Fill { buffer, .. } => format!("fill of {}", program.buffers[buffer.index()].name),
        Action::Load { input, .. } => format!("load of input {}", job.inputs[*input as usize].name),
        Action::Report { report, .. } => format!("report of {}", job.reports[*report as usize]),
        Action::Limit { most, .. } => format!("limit of {most}"),
        Action::Record { event } => format!("record of event {event}"),
        Action::Wait { event } => format!("wait for event {event}"),
    }
}
