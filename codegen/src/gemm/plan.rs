//! From a kernel with one `Dot` or `GroupedDot` to a matrix product: axes, tiles, blocks.

use crate::CompileError;
use crate::layout::{self, Axis, div_ceil, tensors};
use crate::target::Target;
use ir::dim::Dim;
use ir::graph::{Type, Value};
use ir::kernel::Kernel;
use ir::op::{DType, Op};

/// A factor of the product, by position in [`Plan::tensors`].
pub type Tensor = usize;

/// One matrix product `C[m, n] = sum over k of A[m, k] * B[k, n]`, repeated over `outer`, then pointwise ops on `C`.
pub struct Plan {
    pub dot: Value,
    /// Positions of the two factors among the kernel's inputs. `a` is broadcast, `b` is read by vectors.
    pub a: Tensor,
    pub b: Tensor,
    pub m: Axis,
    pub n: Axis,
    pub k: Axis,
    /// Directions of the result that are not part of the matrix product proper: batch dims, and rows or columns that no single stride walks.
    pub outer: Vec<Axis>,
    /// Contracted directions beside `k`, because no single stride walks both.
    pub outer_k: Vec<Axis>,
    pub experts: Option<Experts>,
    pub blocks: Blocks,
}

/// What is known at run time only of a `GroupedDot`: which part of a direction is each expert's.
pub struct Experts {
    /// The tensor that says where the part of each expert ends.
    pub ends: Tensor,
    /// Along it `b` (of rows) or the result (of contracted elements) differ. It is the outermost of `outer` in the latter case.
    pub axis: Axis,
    pub own: Own,
}

/// The direction of which experts have parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// `m`: a tile of rows multiplies those of each expert with the expert's `b`; rows of nobody are 0.
    Rows,
    /// `k`: the product is repeated for each expert, over its contracted elements.
    Contracted,
}

/// Sizes, in elements, of what registers and caches hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Rows of the micro-kernel at most; the `tall` first panels have `height` + 1 rows, the others `height`.
    pub panels: i64,
    pub height: i64,
    pub tall: i64,
    /// Vectors per row of the micro-kernel.
    pub vectors: i64,
    /// Columns of a column panel.
    pub width: i64,
    pub column_panels: i64,
    /// Contracted elements of a block, and blocks. All but the last are full.
    pub depth: i64,
    pub depths: i64,
    /// Row panels and column panels of one tile.
    pub tile_rows: i64,
    pub tile_columns: i64,
    /// Copies of `A` and `B` in the order the micro-kernel reads them.
    pub pack_a: bool,
    pub pack_b: bool,
}

/// The contracted elements that one pass over a tile covers at most: an accumulator is stored and loaded once per pass.
const MAX_DEPTH: i64 = 1024;
/// Below this many rows a copy of `B` is not read often enough to pay.
const FEW_ROWS: i64 = 40;
/// With `B` in place a block is this deep, so that its rows stay in the first-level cache's reach.
const IN_PLACE_DEPTH: i64 = 128;
/// Tiles to aim for: enough to share between the threads of a rank.
const TILES: i64 = 8;
/// A block is not made for fewer contracted elements than this because experts are many.
const SMALL_SHARE: i64 = 256;
/// A tile of less work than this is not worth claiming.
const MIN_TILE_FLOPS: i64 = 4_000_000;

impl Plan {
    /// Finds axes and blocks for a kernel of family `Gemm`.
    ///
    /// # Errors
    /// The kernel's factors are not inputs or not floats, which is not supported yet.
    pub fn new(kernel: &Kernel, target: &Target) -> Result<Plan, CompileError> {
        let body = &kernel.body;
        let (dot, over, grouped) = body
            .values()
            .find_map(|v| match &body[v].op {
                Op::Dot { over } => Some((v, over.clone(), None)),
                Op::GroupedDot { rows, experts, over } => Some((v, over.clone(), Some((*rows, *experts)))),
                _ => None,
            })
            .ok_or_else(|| CompileError::unsupported("a matrix product without `dot`"))?;
        let factor = |slot: usize| match body[body[dot].args[slot]].op {
            Op::Input(i) if body[body[dot].args[slot]].ty.dtype.is_float() => Ok(i as usize),
            _ => Err(CompileError::unsupported("a factor of `dot` that is not a float input")),
        };
        let (mut a, mut b) = (factor(0)?, factor(1)?);
        let tensors: Vec<(&Type, &[u64])> = tensors(kernel);
        let single = |d: Dim| Axis {
            dims: vec![d],
            size: body.dims.size(d) as i64,
            strides: tensors.iter().map(|(ty, strides)| layout::stride(ty, strides, d)).collect(),
        };
        let experts = match grouped {
            None => None,
            Some((rows, experts)) => {
                let Op::Input(ends) = body[body[dot].args[2]].op else {
                    return Err(CompileError::unsupported("ends of a `grouped_dot` that are no input"));
                };
                let own = if over.contains(&rows) { Own::Contracted } else { Own::Rows };
                Some(Experts { ends: ends as usize, axis: single(experts), own })
            }
        };
        // Neither the experts nor the rows that they share are merged with other dims; what ends depend on is repeated.
        let of_rows = experts.as_ref().is_some_and(|x| x.own == Own::Rows);
        let apart = |d: &Dim| grouped.is_some_and(|(rows, experts)| *d == experts || *d == rows);
        let part = |d: &Dim| !apart(d) && experts.as_ref().is_some_and(|x| tensors[x.ends].0.has(*d));
        let result = &kernel.outputs[0];
        let result_type = &body[result.value].ty;
        // Dims of the result, outermost first by their strides in memory.
        let mut order = body[dot].ty.dims.clone();
        order.sort_by_key(|d| std::cmp::Reverse(layout::stride(result_type, &result.strides, *d)));
        let has = |tensor: usize, d: &Dim| tensors[tensor].0.has(*d);
        // The last direction of the result is the one that vectors run along: it must come from `b`.
        let last = order.iter().rev().find(|d| body.dims.size(**d) != 1 && has(a, d) != has(b, d));
        if last.is_some_and(|d| has(a, d)) && !of_rows {
            std::mem::swap(&mut a, &mut b);
        }
        let only =
            |own: usize, other: usize| order.iter().copied().filter(|d| has(own, d) && !has(other, d) && !apart(d) && !part(d)).collect::<Vec<_>>();
        let (rows, columns) = (only(a, b), only(b, a));
        let both: Vec<Dim> = order.iter().copied().filter(|d| has(a, d) && has(b, d) || part(d)).collect();
        let mut over: Vec<Dim> = over.into_iter().filter(|d| !apart(d)).collect();
        over.sort_by_key(|d| std::cmp::Reverse(layout::stride(tensors[b].0, tensors[b].1, *d)));

        let mut outer = layout::merge(&body.dims, &both, &tensors);
        match &experts {
            Some(Experts { own: Own::Rows, .. }) => outer.extend(layout::merge(&body.dims, &rows, &tensors)),
            Some(Experts { own: Own::Contracted, axis, .. }) => outer.insert(0, axis.clone()),
            None => {}
        }
        let mut split = |dims: &[Dim]| {
            let mut axes = layout::merge(&body.dims, dims, &tensors);
            let inner = axes.pop().unwrap_or_else(|| Axis::unit(tensors.len()));
            outer.extend(axes);
            inner
        };
        let m = match grouped {
            Some((of, _)) if of_rows => single(of),
            _ => split(&rows),
        };
        let n = split(&columns);
        let mut outer_k = layout::merge(&body.dims, &over, &tensors);
        let k = match grouped {
            Some((of, _)) if !of_rows => single(of),
            _ => outer_k.pop().unwrap_or_else(|| Axis::unit(tensors.len())),
        };
        // The micro-kernel reads f32: the copy of a 16-bit factor is where it becomes that.
        let is_half = |tensor: usize| tensors[tensor].0.dtype.is_half();
        let pack_a = is_half(a) || k.strides[a] != 1 && m.strides[a] == 1 && k.size > 1;
        let repeats = outer.iter().map(|x| x.size).product();
        let mut blocks = match &experts {
            None => Blocks::new(target, [m.size, n.size, k.size], m.size, repeats, pack_a),
            // An expert has its part of the rows, or more, or less.
            Some(x) if of_rows => Blocks::new(target, [m.size, n.size, k.size], div_ceil(m.size, x.axis.size), repeats, pack_a).of_any_rows(m.size),
            Some(x) => {
                let share = div_ceil(k.size, x.axis.size).max(SMALL_SHARE).min(k.size);
                Blocks::new(target, [m.size, n.size, share], m.size, repeats, pack_a)
            }
        };
        blocks.pack_b |= n.strides[b] != 1 || is_half(b);
        Ok(Plan { dot, a, b, m, n, k, outer, outer_k, experts, blocks })
    }

    /// Whether the kernel stores the product itself, as f32, and nothing else.
    pub fn is_plain(&self, kernel: &Kernel) -> bool {
        kernel.outputs.len() == 1 && kernel.outputs[0].value == self.dot && kernel.body[self.dot].ty.dtype == DType::F32
    }

    pub fn tiles(&self) -> i64 {
        let b = &self.blocks;
        self.repeats() * b.row_tiles() * b.column_tiles()
    }

    /// Blocks of contracted elements of a tile, if that does not depend on who owns them.
    pub fn passes(&self) -> Option<i64> {
        let all = self.blocks.depths * self.outer_k.iter().map(|x| x.size).product::<i64>();
        (!self.owns(Own::Contracted)).then_some(all)
    }

    /// How often the product is repeated.
    pub fn repeats(&self) -> i64 {
        self.outer.iter().map(|x| x.size).product::<i64>()
    }

    pub fn owns(&self, own: Own) -> bool {
        self.experts.as_ref().is_some_and(|x| x.own == own)
    }
}

impl Blocks {
    /// Blocks for one product of m, n, k, `repeats` times; about `users` rows use the same `B`.
    fn new(target: &Target, [m, n, k]: [i64; 3], users: i64, repeats: i64, pack_a: bool) -> Blocks {
        let lanes = target.lanes() as i64;
        let vectors = if n <= lanes { 1 } else { 2 };
        // Accumulators, one row of B and one broadcast element share the register file.
        let tallest = (i64::from(target.registers) - vectors - 1) / vectors;
        let tallest = tallest.min(28);
        let panels = div_ceil(m, tallest);
        let width = vectors * lanes;
        let column_panels = div_ceil(n, width);

        let pack_b = users >= FEW_ROWS;
        let deepest = if pack_b { MAX_DEPTH } else { IN_PLACE_DEPTH };
        let depths = div_ceil(k, deepest);
        let depth = if depths == 1 { k } else { div_ceil(div_ceil(k, depths), 16) * 16 };
        let depths = div_ceil(k, depth);

        // Columns of a tile: its block of B stays in the second-level cache.
        let resident = (i64::from(target.l2_bytes) * 6 / 10 / (4 * depth * width)).clamp(1, 16);
        let mut tile_columns = column_panels.min(resident);
        let mut tile_rows = panels;
        if pack_a {
            tile_rows = panels.min((i64::from(target.l2_bytes) / (4 * depth * (height_of(m, panels)))).max(4));
        }
        let tiles = |rows: i64, columns: i64| repeats * div_ceil(panels, rows) * div_ceil(column_panels, columns);
        let flops = |rows: i64, columns: i64| 2 * rows * height_of(m, panels) * columns * width * k;
        // Fewer columns per tile, down to four panels, then fewer rows, until there are enough tiles.
        while tiles(tile_rows, tile_columns) < TILES && flops(tile_rows, tile_columns) > 2 * MIN_TILE_FLOPS {
            if tile_columns > 4 {
                tile_columns = div_ceil(tile_columns, 2);
            } else if tile_rows > 8 {
                tile_rows = div_ceil(tile_rows, 2);
            } else {
                break;
            }
        }
        // Equal shares.
        let tile_columns = div_ceil(column_panels, div_ceil(column_panels, tile_columns));
        let tile_rows = div_ceil(panels, div_ceil(panels, tile_rows));
        Blocks { panels, height: m / panels, tall: m % panels, vectors, width, column_panels, depth, depths, tile_rows, tile_columns, pack_a, pack_b }
    }

    /// The same tiles with row panels of any height up to the one at which these are full.
    fn of_any_rows(self, m: i64) -> Blocks {
        let tallest = height_of(m, self.panels);
        Blocks { panels: div_ceil(m, tallest), height: tallest, tall: 0, ..self }
    }

    pub fn row_tiles(&self) -> i64 {
        div_ceil(self.panels, self.tile_rows)
    }

    pub fn column_tiles(&self) -> i64 {
        div_ceil(self.column_panels, self.tile_columns)
    }

    /// The greatest height of a row panel.
    pub fn tallest(&self) -> i64 {
        self.height + i64::from(self.tall > 0)
    }

    /// Elements of a packed column panel. Transposing copies write whole squares of lanes.
    pub fn packed_b(&self) -> i64 {
        div_ceil(self.depth, 16) * 16 * self.width
    }

    /// Elements of a packed row panel: rows of vectors that overlap, and one vector beyond.
    pub fn packed_a(&self) -> i64 {
        div_ceil(self.depth, 16) * 16 * self.tallest() + 32
    }
}

/// The greatest height of a row panel.
fn height_of(m: i64, panels: i64) -> i64 {
    div_ceil(m, panels)
}

/// Checks that every value between the product and the outputs is one that the epilogue can compute.
///
/// # Errors
/// Names the first op that it cannot.
pub fn check_epilogue(kernel: &Kernel) -> Result<(), CompileError> {
    for v in kernel.body.values() {
        match &kernel.body[v].op {
            Op::Pad { .. } | Op::Concat { .. } | Op::Gather { .. } => {
                return Err(CompileError::unsupported(format!("`{}` beside a matrix product", kernel.body[v].op.name())));
            }
            _ => {}
        }
    }
    Ok(())
}
