//! Steps as they are predicted, and memory as it is said to be in use.

use ir::program::{Action, Arena, Buffer, Job, Program, ProgramPhase, Space, Stream};
use passes::commands::best_fit::ALIGN;
use passes::report::footprint::{Footprint, owners};
use passes::report::in_use::InUse;
use simulate::Options;
use simulate::machine::Machine;
use simulate::step::{Step, predict};
use simulate::timeline::{BINS, TimeSpan, Timeline, call};
use std::collections::BTreeSet;

/// Plays the step on machines of both kinds: whatever it is, it comes to its end, its parts add up to it, and so does
/// what is drawn of it.
pub fn played(job: &Job) -> Result<(), String> {
    for machine in ["a100-80g-dgx", "cpu"] {
        let machine = Machine::named(machine).expect("a machine");
        let step = predict(job, &machine, Options::default()).map_err(|e| format!("simulated on {}: {e}", machine.name))?;
        let spent: Vec<f64> = step.stages.iter().map(|s| s.named().iter().map(|n| n.1).sum()).collect();
        let path: f64 = step.path.iter().map(|p| p.1).sum();
        if let Some(sum) = spent.iter().chain([&path]).find(|sum| (**sum - step.seconds).abs() > 1e-6 * step.seconds) {
            return Err(format!("simulated on {}: parts add up to {sum} of {} s (steady: {})", machine.name, step.seconds, step.steady));
        }
        drawn(job, &machine, &step).map_err(|e| format!("drawn on {}: {e}", machine.name))?;
    }
    Ok(())
}

fn drawn(job: &Job, machine: &Machine, step: &Step) -> Result<(), String> {
    let (mut told, mut moved) = (0u64, 0.0);
    let line = Timeline::of(job, machine, Options::default(), step, &mut |slice| {
        let program = &job.programs[job.stages[slice.stage].program as usize];
        told += 1;
        match &program.bodies[call(job, slice).body.index()].commands[slice.last as usize].action {
            Action::Collective { .. } | Action::Recv { .. } | Action::Copy { .. } => moved += slice.end - slice.start,
            Action::Load { .. } if !machine.is_cpu() => moved += slice.end - slice.start,
            _ => {}
        }
    })
    .map_err(|e| e.to_string())?;
    let length = |spans: &[TimeSpan]| spans.iter().map(|s| s.end - s.start).sum::<f64>();
    for (stage, (drawn, spent)) in line.stages.iter().zip(&step.stages).enumerate() {
        let more = told as f64 * line.joined + 1e-6 * step.seconds;
        let computed = length(&drawn.computes);
        if computed < spent.kernels - 1e-6 * step.seconds || computed > spent.kernels + more {
            return Err(format!("stage {stage} computes for {computed} s, and {} s are drawn", spent.kernels));
        }
        let calls: BTreeSet<u32> = drawn.computes.iter().map(|s| s.what).collect();
        if calls.iter().any(|k| *k as usize >= drawn.calls.len()) {
            return Err(format!("stage {stage} has no such call"));
        }
        if let Some(s) = drawn.exchanges.iter().find(|s| s.end < s.start || line.exchanges.get(s.what as usize).is_none()) {
            return Err(format!("stage {stage} exchanges {s:?}"));
        }
    }
    let counted = line.links.iter().flat_map(|l| &l.busy).sum::<f64>() * step.seconds / BINS as f64 * job.stages.len() as f64;
    if (counted - moved).abs() > 1e-6 * step.seconds {
        return Err(format!("links are in use for {moved} s, and {counted} s are counted"));
    }
    let busy = line.links.iter().flat_map(|l| &l.busy).copied().fold(0.0, f64::max);
    // Several streams of a rank may use a link at once, as for copies both ways.
    if busy > Stream::ALL.len() as f64 {
        return Err(format!("a link is in use {busy} times over"));
    }
    Ok(())
}

/// Whatever a command touches is in use then. The most is what the peak of the stage is said to be, but for slots of
/// stashes: of those the peak has all.
pub fn in_use(job: &Job) -> Result<(), String> {
    for stage in 0..job.stages.len() {
        for space in Space::ALL {
            let used = InUse::of(job, stage, space);
            let totals = used.totals();
            let lasting: u64 = used.lasting.iter().sum();
            touched(job, stage, space, &used, &totals).map_err(|e| format!("memory of stage {stage}, {}: {e}", space.name()))?;
            let most = lasting + totals.iter().max().copied().unwrap_or(0);
            let planned = Footprint::of(job, stage).of_space(space);
            // The plan does not align the end of the last buffer.
            if most >= planned + ALIGN {
                return Err(format!("stage {stage} plans {planned} bytes of {}, and {most} are in use", space.name()));
            }
            let slots = &job.stages[stage].schedule.slots;
            let peak: u64 = owners(job, stage).iter().map(|o| o.bytes).sum();
            let trains = job.stages[stage].schedule.eval.is_empty();
            if space == Space::Device && (most > peak || trains && slots.iter().all(|s| s.count == 1) && most != peak) {
                return Err(format!("the peak of stage {stage} is {peak} bytes, and {most} are in use"));
            }
            let points: Vec<usize> = (0..totals.len()).step_by(1 + totals.len() / 50).collect();
            for (at, by_owner) in points.iter().zip(used.by_owner(&points)) {
                let sum: u64 = by_owner.iter().sum();
                if sum != lasting + totals[*at] {
                    return Err(format!("owners of stage {stage} have {sum} bytes of {} in use", lasting + totals[*at]));
                }
            }
        }
    }
    Ok(())
}

fn touched(job: &Job, stage: usize, space: Space, used: &InUse, totals: &[u64]) -> Result<(), String> {
    let stage = &job.stages[stage];
    let program: &Program = &job.programs[stage.program as usize];
    let is_here = |arena: Arena| arena == space.temporary() || arena == space.stash();
    for phase in [ProgramPhase::Train, ProgramPhase::Update] {
        for (c, call) in stage.schedule.calls(phase).iter().enumerate() {
            let body = &program.bodies[call.body.index()];
            for at in body.part(call.part) {
                let buffers: BTreeSet<u32> = body.commands[at].buffers().into_iter().map(|b| b.0).collect();
                let here = buffers.iter().map(|b| &program.buffers[*b as usize]).filter(|b| is_here(b.arena));
                let bytes: u64 = here.map(Buffer::bytes).sum();
                let moment = used.moment(phase, c, at);
                if totals.get(moment).is_none_or(|total| *total < bytes) {
                    return Err(format!("command {at} of {} touches {bytes} bytes, and {:?} are in use", body.name, totals.get(moment)));
                }
            }
        }
    }
    Ok(())
}
