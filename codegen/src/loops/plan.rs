//! What a kernel of loops does at each grid point, and in which order.

use super::runs;
use crate::abi::CACHED;
use crate::layout::{self, div_ceil, tensors};
use crate::target::{Arch, Target};
use ir::dim::Dim;
use ir::graph::{Body, Value};
use ir::kernel::Kernel;
use ir::op::{Op, Reduce};
use std::collections::BTreeSet;

/// One loop nest at a grid point. Values that need a nest of their own are computed by earlier steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// `Reduce`, `ArgMax` and `Dot` over the same dims with the same dims left.
    Reduce { values: Vec<Value>, over: Vec<Dim>, left: Vec<Dim> },
    /// A running sum: `along` in order, for each point of the other dims.
    Cumsum { value: Value, along: Dim, reverse: bool, others: Vec<Dim> },
    /// Outputs, by position, with the same dims.
    Store { outputs: Vec<usize>, dims: Vec<Dim> },
}

/// The order of a kernel's work.
#[derive(Clone, Debug)]
pub struct LoopPlan {
    /// The dim that lanes run along, if any; the last of the grid if it belongs to the grid.
    pub vector: Option<Dim>,
    /// Grid dims other than `vector` and `shared`, outermost first.
    pub grid: Vec<Dim>,
    /// A short grid dim along which nothing that is read lies, as the halves of a rotation: an item computes all of
    /// its points, which share what they read.
    pub shared: Option<Dim>,
    pub vector_in_grid: bool,
    pub steps: Vec<Step>,
    /// Vectors of grid points computed together: more than one for reductions across rows, or one for each element of
    /// the runs.
    pub wide: i64,
    /// Neighbours along `vector` that a lane has at a time, if it has several: 16 bytes of the widest elements, or
    /// less.
    pub run: Option<i64>,
    /// Elements of `vector` that one item covers, if it belongs to the grid: a multiple of the lanes.
    pub segment: i64,
    pub segments: i64,
    /// Items: grid points, or segments of them. A tile is this many items in a row.
    pub items: i64,
    pub tile_items: i64,
    pub team: Option<Team>,
}

/// Workers that compute a tile together, as a block of a GPU does: each takes its share of a dim that is summed over,
/// then all join the sums of all, in order, and store what they have of that dim, the first member what is of none.
/// Where few results are sums of much, such as gradients of biases and of norms' weights, or few rows are normalised,
/// there are too few tiles for a GPU's warps otherwise. And where rows are read twice, to be added up and to be
/// normalised, those of all warps that run at a time may be more than the cache holds: of teams there are fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Team {
    pub members: i64,
    pub dim: Dim,
    /// Elements of the dim that a member takes.
    pub share: i64,
}

/// Members of a team, at most, whose registers a block has room for, and elements that each takes along the dim, at
/// least.
const MEMBERS: i64 = 16;
const SHARE: i64 = 16;
/// Warps beyond which a GPU has enough of them without teams: eight on each of 132 multiprocessors.
const ENOUGH: i64 = 8 * 132;
/// Warps that such a GPU runs at a time, at most.
const RUNNING: i64 = 64 * 132;

/// Points of a grid dim that an item computes at once, at most.
const SHARED: u64 = 4;

/// How work is cut: elements along the vector dim that one item covers at most, and element operations that make a
/// tile worth a call. A GPU has thousands of warps to keep busy.
fn cuts(target: &Target) -> (i64, i64) {
    match target.arch {
        Arch::X86_64 => (4096, 1 << 20),
        Arch::Nvptx => (512, 1 << 12),
    }
}
/// How many of `vectors` vectors of grid points have their reductions run together, so that memory is read in longer
/// pieces.
fn abreast(vectors: i64, target: &Target) -> i64 {
    match target.arch {
        Arch::X86_64 if vectors % 8 == 0 => 8,
        Arch::X86_64 | Arch::Nvptx => 4,
    }
}

impl LoopPlan {
    pub fn new(kernel: &Kernel, grid: &[Dim], target: &Target) -> LoopPlan {
        let body = &kernel.body;
        // Lanes run along the dim of a running sum on GPUs only.
        let running = running(kernel);
        let vector = vector_dim(kernel, |d| target.arch == Arch::Nvptx || !running.contains(&d));
        let vector_in_grid = vector.is_some_and(|d| grid.contains(&d));
        let first = &kernel.outputs[0];
        let mut others: Vec<Dim> = grid.iter().copied().filter(|d| Some(*d) != vector).collect();
        others.sort_by_key(|d| std::cmp::Reverse(layout::stride(&body[first.value].ty, &first.strides, *d)));

        let lanes = target.lanes() as i64;
        let (longest_segment, tile_work) = cuts(target);
        let steps = steps(kernel, grid);
        let inner: i64 = steps.iter().map(|s| s.dims().iter().map(|d| body.dims.size(*d) as i64).product::<i64>()).sum();
        let shared = shared(kernel, &others, &steps);
        others.retain(|d| Some(*d) != shared);
        let work = (inner * body.nodes.len() as i64).max(1);
        let points: i64 = others.iter().map(|d| body.dims.size(*d) as i64).product();
        let vectors = vector.filter(|_| vector_in_grid).map(|d| div_ceil(body.dims.size(d) as i64, lanes));
        let run = vector.filter(|_| target.arch == Arch::Nvptx).and_then(|d| runs::width(kernel, d, &steps, lanes));
        let unit = |d: Dim| if Some(d) == vector { lanes * run.unwrap_or(1) } else { 1 };
        let few = target.arch == Arch::Nvptx && points * vectors.unwrap_or(1) < ENOUGH;
        let members = match (target.arch, vector_in_grid) {
            (Arch::Nvptx, _) if few => MEMBERS,
            (Arch::Nvptx, false) => {
                let times = div_ceil(RUNNING * read_again(kernel, grid, &steps), CACHED) as u64;
                times.next_power_of_two().min(MEMBERS as u64) as i64
            }
            _ => 0,
        };
        let team = team(body, &steps, &unit, members);
        // Members of a team share a vector of columns, of which each lane has one element.
        let run = run.filter(|_| team.is_none() || !vector_in_grid);
        let wide = match vector {
            Some(_) if vector_in_grid && run.is_some() => run.unwrap_or(1),
            Some(d) if vector_in_grid && team.is_none() && reduces_to_points(&steps) => abreast(body.dims.size(d) as i64 / lanes, target),
            _ => 1,
        };
        // A warp's share is limited so that there are enough warps to keep a GPU busy.
        let share = |count: i64| if target.arch == Arch::Nvptx { (count / ENOUGH).max(1) } else { i64::MAX };
        let (segment, segments) = match vector {
            Some(d) if vector_in_grid => {
                let size = body.dims.size(d) as i64;
                let unit = lanes * wide;
                let longest = (div_ceil((tile_work / work).min(share(points * size)), unit) * unit).clamp(unit, longest_segment.max(unit));
                let longest = if team.is_some() { unit } else { longest };
                let segment = div_ceil(div_ceil(size, div_ceil(size, longest)), unit) * unit;
                (segment, div_ceil(size, segment))
            }
            _ => (1, 1),
        };
        let items = points * segments;
        let tile_items = if team.is_some() { 1 } else { (tile_work / (work * segment)).min(share(items)).clamp(1, items.max(1)) };
        LoopPlan { vector, grid: others, shared, vector_in_grid, steps, wide, run, segment, segments, items, tile_items, team }
    }

    /// Outputs of one number per grid point.
    pub fn single_outputs(&self) -> Vec<usize> {
        let stores = self.steps.iter().filter_map(|s| match s {
            Step::Store { outputs, dims } if dims.is_empty() => Some(outputs.iter().copied()),
            Step::Store { .. } | Step::Reduce { .. } | Step::Cumsum { .. } => None,
        });
        stores.flatten().collect()
    }

    pub fn tiles(&self) -> i64 {
        div_ceil(self.items, self.tile_items)
    }
}

impl Step {
    /// The dims that the nest loops over.
    pub fn dims(&self) -> Vec<Dim> {
        match self {
            Step::Reduce { over, left, .. } => left.iter().chain(over).copied().collect(),
            Step::Cumsum { along, others, .. } => others.iter().chain([along]).copied().collect(),
            Step::Store { dims, .. } => dims.clone(),
        }
    }
}

/// The team for a kernel of sums of floats over one list of dims, and of nothing else but what follows from these at
/// each grid point or along a dim of which each member has its share, of up to so many members. A share is of whole
/// units of the dim.
fn team(body: &Body, steps: &[Step], unit: &dyn Fn(Dim) -> i64, most: i64) -> Option<Team> {
    let most = most.checked_ilog2()?;
    let (mut dims, mut stored): (Option<&[Dim]>, Vec<&[Dim]>) = (None, vec![]);
    for step in steps {
        match step {
            Step::Reduce { values, over, left } if left.is_empty() && dims.is_none_or(|d| d == over) => {
                let sums = values.iter().all(|v| match &body[*v].op {
                    Op::Reduce { kind: Reduce::Sum, .. } => body[body[*v].args[0]].ty.dtype.is_float(),
                    op => matches!(op, Op::Dot { .. }),
                });
                dims = Some(over).filter(|_| sums).map(Vec::as_slice);
                dims?;
            }
            Step::Store { dims, .. } if dims.is_empty() => {}
            Step::Store { dims, .. } => stored.push(dims),
            Step::Reduce { .. } | Step::Cumsum { .. } => return None,
        }
    }
    let share = |d: &Dim| {
        let size = body.dims.size(*d) as i64;
        let whole = |m: &i64| size % (m * unit(*d)) == 0 && size / m >= SHARE;
        let members = (1..=most).rev().map(|k| 1 << k).find(whole)?;
        Some(Team { members, dim: *d, share: size / members })
    };
    let in_all = |d: &&Dim| stored.iter().all(|dims| dims.contains(d));
    dims?.iter().filter(in_all).filter_map(share).max_by_key(|t| t.members)
}

/// Of these grid dims the one whose points can share all that is read, if nothing else is done at a grid point than to
/// store there.
fn shared(kernel: &Kernel, grid: &[Dim], steps: &[Step]) -> Option<Dim> {
    let stores = steps.iter().all(|s| matches!(s, Step::Store { dims, .. } if dims.is_empty()));
    let short = |d: &&Dim| (2..=SHARED).contains(&kernel.body.dims.size(**d)) && kernel.inputs.iter().all(|i| !i.ty.has(**d));
    grid.iter().find(short).copied().filter(|_| stores)
}

/// Bytes of a grid point's operands that are read by a nest that reduces, and again by one that stores.
fn read_again(kernel: &Kernel, grid: &[Dim], steps: &[Step]) -> i64 {
    let reduces = steps.iter().any(|s| matches!(s, Step::Reduce { .. }));
    if !reduces || !steps.iter().any(|s| matches!(s, Step::Store { dims, .. } if !dims.is_empty())) {
        return 0;
    }
    let inner = |dims: &[Dim]| dims.iter().filter(|d| !grid.contains(d)).map(|d| kernel.body.dims.size(*d)).product::<u64>();
    let of_points = kernel.inputs.iter().filter(|i| i.ty.dims.iter().any(|d| grid.contains(d)));
    of_points.map(|i| (inner(&i.ty.dims) * i.ty.dtype.bytes()) as i64).sum()
}

/// Whether there are reductions, and all leave one number per grid point.
fn reduces_to_points(steps: &[Step]) -> bool {
    let reductions = steps.iter().filter(|s| !matches!(s, Step::Store { .. }));
    let mut points = reductions.map(|s| matches!(s, Step::Reduce { left, .. } if left.is_empty())).peekable();
    points.peek().is_some() && points.all(|p| p)
}

/// The dims of running sums.
pub fn running(kernel: &Kernel) -> BTreeSet<Dim> {
    kernel.body.nodes.iter().filter_map(|n| if let Op::Cumsum { over, .. } = n.op { Some(over) } else { None }).collect()
}

/// Of the dims that `allowed` admits, the one along which the fewest elements must be collected one by one; the
/// longest on ties.
pub fn vector_dim(kernel: &Kernel, allowed: impl Fn(Dim) -> bool) -> Option<Dim> {
    let body = &kernel.body;
    let used: BTreeSet<Dim> = body.nodes.iter().flat_map(|n| n.ty.dims.iter().copied()).collect();
    let arguments = tensors(kernel);
    let cost = |dim: Dim| -> u64 {
        let strided = arguments.iter().filter(|(ty, strides)| layout::stride(ty, strides, dim) > 1);
        strided.map(|(ty, _)| body.dims.elements(&ty.dims)).sum()
    };
    let candidates = used.into_iter().filter(|d| body.dims.size(*d) > 1 && allowed(*d));
    candidates.min_by_key(|d| (cost(*d), std::cmp::Reverse(body.dims.size(*d))))
}

/// Whether an op's result is found by a nest of its own.
pub fn needs_nest(op: &Op) -> bool {
    matches!(op, Op::Reduce { .. } | Op::Dot { .. } | Op::ArgMax { .. } | Op::Cumsum { .. })
}

/// How many nests must run one after the other before a value is known.
fn levels(body: &Body) -> Vec<usize> {
    let mut levels: Vec<usize> = Vec::with_capacity(body.nodes.len());
    for node in &body.nodes {
        let below = node.args.iter().map(|a| levels[a.index()]).max().unwrap_or(0);
        levels.push(below + usize::from(needs_nest(&node.op)));
    }
    levels
}

fn steps(kernel: &Kernel, grid: &[Dim]) -> Vec<Step> {
    let body = &kernel.body;
    let inner = |dims: &[Dim]| dims.iter().copied().filter(|d| !grid.contains(d)).collect::<Vec<_>>();
    let live = live(kernel);
    let levels = levels(body);
    let mut steps: Vec<(usize, Step)> = Vec::new();
    for v in body.values().filter(|v| live[v.index()]) {
        let level = levels[v.index()];
        let left = inner(body.dims_of(v));
        let over = match &body[v].op {
            Op::Reduce { over, .. } | Op::Dot { over, .. } => over.clone(),
            Op::ArgMax { over } => vec![*over],
            Op::Cumsum { over, reverse } => {
                let others = left.iter().copied().filter(|d| d != over).collect();
                steps.push((level, Step::Cumsum { value: v, along: *over, reverse: *reverse, others }));
                continue;
            }
            _ => continue,
        };
        let same = |step: &&mut (usize, Step)| match &step.1 {
            Step::Reduce { over: o, left: l, .. } => step.0 == level && *o == over && *l == left,
            Step::Cumsum { .. } | Step::Store { .. } => false,
        };
        match steps.iter_mut().find(same) {
            Some((_, Step::Reduce { values, .. })) => values.push(v),
            _ => steps.push((level, Step::Reduce { values: vec![v], over, left })),
        }
    }
    steps.sort_by_key(|s| s.0);
    let mut steps: Vec<Step> = steps.into_iter().map(|s| s.1).collect();
    // An output may share the memory of an input, so nests with more dims, which read it more often, come first.
    let mut stores: Vec<(Vec<Dim>, Vec<usize>)> = Vec::new();
    for (position, output) in kernel.outputs.iter().enumerate() {
        let mut dims = inner(body.dims_of(output.value));
        dims.sort_by_key(|d| std::cmp::Reverse(layout::stride(&body[output.value].ty, &output.strides, *d)));
        let mut key = dims.clone();
        key.sort();
        let found = stores.iter_mut().find(|(d, _)| {
            let mut other = d.clone();
            other.sort();
            other == key
        });
        match found {
            Some((_, outputs)) => outputs.push(position),
            None => stores.push((dims, vec![position])),
        }
    }
    stores.sort_by_key(|(dims, _)| std::cmp::Reverse(dims.len()));
    steps.extend(stores.into_iter().map(|(dims, outputs)| Step::Store { outputs, dims }));
    steps
}

/// Values that an output depends on.
fn live(kernel: &Kernel) -> Vec<bool> {
    let mut live = vec![false; kernel.body.nodes.len()];
    for output in &kernel.outputs {
        live[output.value.index()] = true;
    }
    for v in kernel.body.values().rev() {
        if live[v.index()] {
            for a in &kernel.body[v].args {
                live[a.index()] = true;
            }
        }
    }
    live
}
