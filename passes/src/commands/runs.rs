//! When commands of a phase run, where calls are side by side: a run of calls ([`Program::runs`]) has a moment for
//! each command and for the end of each call, and runs of the same calls are of one kind.

use ir::program::{BodyId, Call, Program};
use std::collections::BTreeMap;
use std::ops::Range;

/// Calls in runs.
pub struct CallRuns<'a> {
    program: &'a Program,
    calls: &'a [Call],
    /// All runs, in the order of their calls.
    pub list: Vec<CallRun>,
    /// Per call, its run and the moment in that run at which it begins.
    of_call: Vec<(usize, usize)>,
    /// The calls of a body's parts, by the run's first call, the body and the microbatch.
    parts: BTreeMap<(usize, BodyId, u32), Vec<usize>>,
    /// The first run of each kind, sorted by the calls.
    pub kinds: Vec<usize>,
}

/// Consecutive calls; between any two of them some body is under way.
pub struct CallRun {
    /// Indices of its calls, in the list of all calls.
    pub calls: Range<usize>,
    /// Index into [`CallRuns::kinds`]: runs of one kind call the same parts of bodies.
    pub kind: usize,
    /// The number of its moments.
    pub moments: usize,
}

impl<'a> CallRuns<'a> {
    /// Cuts a list of calls into runs, and numbers their kinds.
    pub fn of(program: &'a Program, calls: &'a [Call]) -> CallRuns<'a> {
        let mut out = CallRuns { program, calls, list: vec![], of_call: vec![], parts: BTreeMap::new(), kinds: vec![] };
        let mut first: BTreeMap<Vec<(usize, u32)>, usize> = BTreeMap::new();
        let called = |run: &Range<usize>| -> Vec<(usize, u32)> { calls[run.clone()].iter().map(|c| (c.body.index(), c.part)).collect() };
        for (r, run) in program.runs(calls).into_iter().enumerate() {
            first.entry(called(&run)).or_insert(r);
            let mut moments = 0;
            for (c, call) in run.clone().map(|c| (c, &calls[c])) {
                out.of_call.push((r, moments));
                out.parts.entry((run.start, call.body, call.microbatch)).or_default().push(c);
                moments += program.bodies[call.body.index()].part(call.part).len() + 1;
            }
            out.list.push(CallRun { calls: run, kind: 0, moments });
        }
        let numbers: BTreeMap<&Vec<(usize, u32)>, usize> = first.keys().zip(0..).collect();
        out.list.iter_mut().for_each(|run| run.kind = numbers[&called(&run.calls)]);
        out.kinds = first.values().copied().collect();
        out
    }

    /// The run of a call.
    pub fn run(&self, call: usize) -> usize {
        self.of_call[call].0
    }

    /// When a command of a body runs, one of whose parts is called there; one past the last command is the end.
    pub fn moment(&self, call: usize, command: usize) -> usize {
        let Call { body, microbatch, .. } = self.calls[call];
        let run = &self.list[self.run(call)];
        let end = self.program.bodies[body.index()].commands.len();
        let part = self.program.bodies[body.index()].part_of(command.min(end.saturating_sub(1)));
        let parts = self.parts[&(run.calls.start, body, microbatch)].as_slice();
        let c = parts[part as usize];
        let begin = self.program.bodies[body.index()].part(part).start;
        ir::fault!("runs.moment.body", command, self.of_call[c].1 + command - begin)
    }

    /// The bodies that a run calls: each call of one by its last part.
    pub fn bodies(&self, run: usize) -> impl Iterator<Item = (usize, usize)> {
        let last = |c: &usize| self.calls[*c].part + 1 == self.program.bodies[self.calls[*c].body.index()].parts();
        self.list[run].calls.clone().filter(last).map(|c| (c, self.calls[c].body.index()))
    }

    /// The parts that a run calls: when each begins, its body and its first command.
    pub fn parts(&self, run: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        self.list[run].calls.clone().map(|c| {
            let Call { body, part, .. } = self.calls[c];
            (self.of_call[c].1, body.index(), self.program.bodies[body.index()].part(part).start)
        })
    }
}
