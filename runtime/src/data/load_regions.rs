//! Which elements of its inputs a rank loads: of the whole batch, the part of its place in the mesh.

use crate::host::{TensorSlice, sizes};
use ir::mesh::Axis;
use ir::program::{Action, InputEntry, Job};
use std::ops::Range;

/// The elements of each input of a job that a rank loads, as indices of the whole tensor.
pub struct LoadRegions(pub Vec<Regions>);

/// Elements of a tensor, row-major: ranges in order with gaps between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Regions {
    ranges: Vec<Range<u64>>,
    /// Elements before each range.
    before: Vec<u64>,
}

impl Regions {
    fn new(mut all: Vec<Range<u64>>) -> Regions {
        all.retain(|r| !r.is_empty());
        all.sort_by_key(|r| r.start);
        let mut ranges: Vec<Range<u64>> = vec![];
        for range in all {
            match ranges.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                Some(_) | None => ranges.push(range),
            }
        }
        let mut count = 0;
        let mut add = |elements: u64| {
            count += elements;
            count - elements
        };
        let before = ranges.iter().map(|r| add(r.end - r.start)).collect();
        Regions { ranges, before }
    }

    /// Where an element is among those that are wanted.
    pub fn find(&self, element: u64) -> Option<usize> {
        let k = self.ranges.partition_point(|r| r.start <= element).checked_sub(1)?;
        self.ranges[k].contains(&element).then(|| (self.before[k] + element - self.ranges[k].start) as usize)
    }

    /// The same, line by line of so many elements: the line, and columns of it.
    pub fn lines(&self, width: u64) -> impl Iterator<Item = (u64, Range<usize>)> + '_ {
        self.ranges.iter().flat_map(move |range| {
            (range.start / width..range.end.div_ceil(width)).map(move |line| {
                let column = |element: u64| (element.clamp(line * width, (line + 1) * width) - line * width) as usize;
                (line, column(range.start)..column(range.end))
            })
        })
    }
}

impl LoadRegions {
    /// What the program of a rank loads, in any of its phases.
    pub fn of_rank(job: &Job, rank: u64) -> LoadRegions {
        let stage = &job.stages[job.mesh.stage(rank) as usize];
        let program = &job.programs[stage.program as usize];
        let mut wanted = vec![vec![]; job.inputs.len()];
        let mut coords = job.mesh.coords(rank);
        let schedule = &stage.schedule;
        for call in schedule.train.iter().chain(&schedule.update).chain(&schedule.eval) {
            for axis in job.mesh.of(Axis::Microbatch) {
                coords[axis.0 as usize] = u64::from(call.microbatch);
            }
            for (_, command) in program.commands(call) {
                if let Action::Load { input, index, .. } = &command.action {
                    let part = TensorSlice::new(&job.inputs[*input as usize].dims, index, &coords);
                    part.runs(|run| wanted[*input as usize].extend(run.global.map(|at| at..at + run.len)));
                }
            }
        }
        LoadRegions(wanted.into_iter().map(Regions::new).collect())
    }

    /// All of all inputs.
    pub fn all(inputs: &[InputEntry]) -> LoadRegions {
        let all = |input: &InputEntry| 0..sizes(&input.dims).iter().product();
        LoadRegions(inputs.iter().map(|input| Regions::new(vec![all(input)])).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_joined_and_found_again() {
        let regions = Regions::new(vec![8..10, 2..4, 4..6, 9..9]);
        assert_eq!(regions.ranges, [2..6, 8..10]);
        assert_eq!([1, 2, 5, 6, 8, 9, 10].map(|e| regions.find(e)), [None, Some(0), Some(3), None, Some(4), Some(5), None]);
        assert_eq!(regions.lines(5).collect::<Vec<_>>(), [(0, 2..5), (1, 0..1), (1, 3..5)]);
    }
}
