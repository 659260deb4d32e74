//! Mutants of compiled programs: what changes a result, or can hang, is refused before it runs.
//!
//! The oracle is the reference device, in list order and in some of the orders that events allow: a mutant that the verifiers accept
//! must compute, to the last bit, what the original does.

use crate::generate::triple;
use crate::harness::{Case, Ranges, Runner, compiled, models, options};
use crate::models::{GPT2, LLAMA, case};
use crate::random::number;
use crate::verdicts::Verdicts;
use frontend::Models;
use ir::dim::Base;
use ir::op::Reduce;
use ir::options::{MoeBuffer, RowChoice};
use ir::program::{Action, Arena, BufferAddress, BufferId, Call, CallSchedule, Collective, GroupId, Job, KernelId, ProgramBody, Stream};
use ir::random::mix;
use passes::compile::{Compiled, compile};

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = mix(self.0);
        ((self.0 >> 11) % n.max(1) as u64) as usize
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        from.get(self.below(from.len()))
    }
}

fn samples() -> Vec<(Compiled, Case, Ranges)> {
    let mut out = vec![];
    for (model, words) in
        [(GPT2, "dp2 tp2 pp2 sp m3"), (GPT2, "dp2 m2"), (LLAMA, "cp2 tp2 m2"), (LLAMA, "tp4 pp2 m2 gpipe"), (GPT2, "dp2 cp2 pp2 m2")]
    {
        let c = case(words);
        out.push((compiled(model.0, model.1, &c), c, Ranges::new()));
    }
    for seed in 0..8 {
        let mut random = triple(seed);
        random.case.rows = RowChoice::Rules;
        // A step that a limit stops has no results to compare.
        random.case.moe_buffer = MoeBuffer::Whole;
        let Models { training, evaluation, .. } = models(&random.text, &[], &random.case).unwrap_or_else(|e| panic!("{e}"));
        let sample = compile(training, evaluation, &options(&random.case)).ok().map(|c| (c, random.case, random.ranges));
        // NaN is equal to nothing, so such samples are left out.
        out.extend(sample.filter(|(c, case, ranges)| Runner::new(c, case, ranges).outcomes(&c.job).is_ok()));
    }
    out
}

/// A command of one of the programs that `keep` wants.
fn command<'a>(dice: &mut Rng, job: &'a mut Job, keep: impl Fn(&Action) -> bool) -> Option<(&'a mut ProgramBody, usize)> {
    let mut all = vec![];
    for (p, program) in job.programs.iter().enumerate() {
        for (b, body) in program.bodies.iter().enumerate() {
            all.extend((0..body.commands.len()).filter(|k| keep(&body.commands[*k].action)).map(|k| (p, b, k)));
        }
    }
    let (p, b, k) = *dice.pick(&all)?;
    Some((&mut job.programs[p].bodies[b], k))
}

fn collective(action: &Action) -> bool {
    matches!(action, Action::Collective { .. })
}

fn communicates(action: &Action) -> bool {
    matches!(action, Action::Collective { .. } | Action::Send { .. } | Action::Recv { .. })
}

fn event(action: &Action) -> bool {
    matches!(action, Action::Record { .. } | Action::Wait { .. })
}

/// Whether the offset depends on the rank or the microbatch.
fn in_parts(action: &Action) -> bool {
    let mut own = action.clone();
    let splits = |index: &[ir::dim::IndexMap]| index.iter().any(|m| matches!(m.base, Base::Coords(_)));
    places(&mut own).iter().any(|p| !p.coords.is_empty()) || matches!(action, Action::Load { index, .. } if splits(index))
}

/// The places of a command.
fn places(action: &mut Action) -> Vec<&mut BufferAddress> {
    match action {
        Action::Launch { args, .. } => args.iter_mut().collect(),
        Action::Collective { src, dst, .. } | Action::Copy { src, dst, .. } => vec![src, dst],
        Action::Send { src, .. } | Action::Report { src, .. } | Action::Limit { src, .. } => vec![src],
        Action::Recv { dst, .. } => vec![dst],
        Action::Fill { .. } | Action::Load { .. } | Action::Record { .. } | Action::Wait { .. } => vec![],
    }
}

fn schedule<'a>(dice: &mut Rng, job: &'a mut Job) -> &'a mut CallSchedule {
    let s = dice.below(job.stages.len());
    &mut job.stages[s].schedule
}

fn calls<'a>(dice: &mut Rng, job: &'a mut Job) -> &'a mut Vec<Call> {
    let s = schedule(dice, job);
    &mut s.train
}

type Mutate = fn(&mut Rng, &mut Job) -> Option<()>;

/// What is done to a program, by name.
const KINDS: &[(&str, Mutate)] = &[
    ("drop a command", |d, job| {
        let (body, k) = command(d, job, |a| !event(a))?;
        body.commands.remove(k);
        Some(())
    }),
    ("drop a communication", |d, job| {
        let (body, k) = command(d, job, communicates)?;
        body.commands.remove(k);
        Some(())
    }),
    ("repeat a communication", |d, job| {
        let (body, k) = command(d, job, communicates)?;
        let again = body.commands[k].clone();
        body.commands.insert(k, again);
        Some(())
    }),
    ("exchange two communications", |d, job| {
        let (body, k) = command(d, job, communicates)?;
        let others: Vec<usize> = (0..body.commands.len()).filter(|j| *j != k && communicates(&body.commands[*j].action)).collect();
        let j = *d.pick(&others)?;
        body.commands.swap(j, k);
        Some(())
    }),
    ("exchange neighbours", |d, job| {
        let (body, k) = command(d, job, |_| true)?;
        let next = (k + 1 < body.commands.len()).then_some(k + 1)?;
        body.commands.swap(k, next);
        Some(())
    }),
    ("swap a group", |d, job| {
        let groups: Vec<usize> = job.programs.iter().map(|p| p.groups.len()).collect();
        let program = d.below(job.programs.len());
        let to = GroupId(d.below(groups[program]) as u32);
        let bodies = &mut job.programs[program].bodies;
        let mut all: Vec<&mut Action> = bodies.iter_mut().flat_map(|b| &mut b.commands).map(|c| &mut c.action).filter(|a| collective(a)).collect();
        let k = d.below(all.len());
        if let Action::Collective { group, .. } = all.get_mut(k)? {
            *group = to;
        }
        Some(())
    }),
    ("another reduction or collective", |d, job| {
        let (body, k) = command(d, job, collective)?;
        if let Action::Collective { kind, .. } = &mut body.commands[k].action {
            *kind = match kind {
                Collective::AllReduce(Reduce::Sum) => Collective::AllReduce(Reduce::Max),
                Collective::AllReduce(_) => Collective::AllReduce(Reduce::Sum),
                Collective::ReduceScatter(r) => Collective::AllReduce(*r),
                _ => return None,
            };
        }
        Some(())
    }),
    ("shift a place", |d, job| {
        let (body, k) = command(d, job, |a| !places(&mut a.clone()).is_empty())?;
        let mut all = places(&mut body.commands[k].action);
        let n = d.below(all.len());
        let place = all.get_mut(n)?;
        place.offset = if d.below(2) == 0 { place.offset + 1 } else { place.offset.saturating_sub(1) };
        Some(())
    }),
    ("shift a shard", |d, job| {
        let (body, k) = command(d, job, in_parts)?;
        let mut all: Vec<&mut BufferAddress> = places(&mut body.commands[k].action).into_iter().filter(|p| !p.coords.is_empty()).collect();
        if let Some(n) = (!all.is_empty()).then(|| d.below(all.len())) {
            match d.below(2) {
                0 => drop(all[n].coords.pop()),
                _ => all[n].coords[0].1 *= 2,
            }
            return Some(());
        }
        if let Action::Load { index, .. } = &mut body.commands[k].action {
            let form = index.iter_mut().find_map(|m| if let Base::Coords(form) = &mut m.base { Some(form) } else { None })?;
            form.reverse();
            form[0].1 *= 2;
            return Some(());
        }
        None
    }),
    ("another buffer", |d, job| {
        let p = d.below(job.programs.len());
        let buffers = job.programs[p].buffers.len();
        let b = d.below(job.programs[p].bodies.len());
        let body = &mut job.programs[p].bodies[b];
        let k = d.below(body.commands.len());
        let mut all = places(&mut body.commands.get_mut(k)?.action);
        let n = d.below(all.len());
        all.get_mut(n)?.buffer = BufferId(d.below(buffers) as u32);
        Some(())
    }),
    ("exchange operands", |d, job| {
        let (body, k) = command(d, job, |a| matches!(a, Action::Launch { args, .. } if args.len() > 2))?;
        if let Action::Launch { args, .. } = &mut body.commands[k].action {
            let (i, j) = (d.below(args.len()), d.below(args.len()));
            args.swap(i, j);
        }
        Some(())
    }),
    ("another kernel", |d, job| {
        let n = job.kernels.len();
        let to = KernelId(d.below(n) as u32);
        let (body, k) = command(d, job, |a| matches!(a, Action::Launch { .. }))?;
        if let Action::Launch { kernel, .. } = &mut body.commands[k].action {
            *kernel = to;
        }
        Some(())
    }),
    ("drop an event", |d, job| {
        let (body, k) = command(d, job, event)?;
        body.commands.remove(k);
        Some(())
    }),
    ("wait for another event", |d, job| {
        let (body, k) = command(d, job, event)?;
        if let Action::Wait { event } | Action::Record { event } = &mut body.commands[k].action {
            *event ^= 1;
        }
        Some(())
    }),
    ("another stream", |d, job| {
        let (body, k) = command(d, job, |_| true)?;
        body.commands[k].stream = *d.pick(&Stream::ALL)?;
        Some(())
    }),
    ("shrink a buffer", |d, job| {
        let p = d.below(job.programs.len());
        let n = d.below(job.programs[p].buffers.len());
        let buffer = &mut job.programs[p].buffers[n];
        let dim = buffer.dims.iter_mut().find(|x| x.1 > 1)?;
        dim.1 -= 1;
        Some(())
    }),
    ("move a buffer", |d, job| {
        let p = d.below(job.programs.len());
        let all = &mut job.programs[p].buffers;
        let (i, j) = (d.below(all.len()), d.below(all.len()));
        if all[i].arena != all[j].arena {
            return None;
        }
        all[i].offset = all[j].offset;
        Some(())
    }),
    ("another arena", |d, job| {
        let p = d.below(job.programs.len());
        let n = d.below(job.programs[p].buffers.len());
        let to = *d.pick(&Arena::ALL)?;
        job.programs[p].buffers[n].arena = to;
        Some(())
    }),
    ("exchange calls", |d, job| {
        let calls = calls(d, job);
        let (i, j) = (d.below(calls.len()), d.below(calls.len()));
        calls.swap(i, j);
        Some(())
    }),
    ("drop a call", |d, job| {
        let calls = calls(d, job);
        let k = d.below(calls.len());
        calls.remove(k);
        Some(())
    }),
    ("a call for another microbatch", |d, job| {
        let m = job.microbatches as usize;
        let calls = calls(d, job);
        let k = d.below(calls.len());
        calls[k].microbatch = d.below(m) as u32;
        Some(())
    }),
    ("fewer slots", |d, job| {
        let s = schedule(d, job);
        let k = d.below(s.slots.len().max(1));
        let slots = s.slots.get_mut(k)?;
        slots.count = slots.count.checked_sub(1).filter(|n| *n > 0)?;
        Some(())
    }),
    ("move a stash", |d, job| {
        let s = schedule(d, job);
        let (i, j) = (d.below(s.slots.len().max(1)), d.below(s.slots.len().max(1)));
        let to = if i == j { 0 } else { s.slots.get(j)?.at };
        s.slots.get_mut(i)?.at = to;
        Some(())
    }),
];

/// 600 mutants, or `MUTANTS`, from number `MUTANTS_FIRST` on.
#[test]
fn what_changes_a_result_or_can_hang_is_refused() {
    let samples = samples();
    let runners: Vec<(Runner, _)> = samples
        .iter()
        .map(|(c, case, ranges)| {
            let runner = Runner::new(c, case, ranges);
            let want = runner.outcomes(&c.job).expect("the original runs");
            (runner, want)
        })
        .collect();
    let mut verdicts = Verdicts::default();
    let first = number("MUTANTS_FIRST", 0);
    for seed in first..first + number("MUTANTS", 600) {
        let mut dice = Rng(mix(seed));
        let n = dice.below(samples.len());
        let (name, mutate) = KINDS[seed as usize % KINDS.len()];
        let mut mutant = samples[n].0.clone();
        if mutate(&mut dice, &mut mutant.job).is_none() || mutant.job == samples[n].0.job {
            continue;
        }
        verdicts.judge((seed, name), || mutant.verify(), || Some(runners[n].0.outcomes(&mutant.job)), &runners[n].1);
    }
    verdicts.end(1);
}
