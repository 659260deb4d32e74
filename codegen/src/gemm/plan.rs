//! In which blocks and tiles a CPU computes a product.

use crate::CompileError;
use crate::build::Builder;
use crate::build::llvm::{Index, Llvm};
use crate::gemm::product::{ExpertDim, Product};
use crate::layout::div_ceil;
use crate::target::Target;
use ir::kernel::Kernel;

/// The factor whose copy outlives a tile: the tiles that share it follow one another.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum KeptFactor {
    A,
    B,
}

/// A product and the blocks in which a CPU computes it.
pub struct GemmPlan {
    product: Product,
    pub blocks: BlockSizes,
}

impl std::ops::Deref for GemmPlan {
    type Target = Product;

    fn deref(&self) -> &Product {
        &self.product
    }
}

/// Sizes, in elements, of what registers and caches hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockSizes {
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
    /// In how many nearly equal parts columns and rows are divided into tiles.
    pub column_tiles: i64,
    pub row_tiles: i64,
    /// Row panels and column panels of one tile at most.
    pub tile_rows: i64,
    pub tile_columns: i64,
    /// Most consecutive tiles of rows that are computed together.
    pub run: i64,
    /// In how many parts along its line ([`GemmPlan::line`]) threads get a tile. Parts that one thread has of a tile,
    /// it computes together.
    pub parts: i64,
    /// Copies of `A` and `B` in the order the micro-kernel reads them.
    pub pack_a: bool,
    pub pack_b: bool,
}

/// One way to divide a product into tiles.
struct Tiling {
    column_tiles: i64,
    row_tiles: i64,
    tile_rows: i64,
    tile_columns: i64,
    run: i64,
}

/// The contracted elements that one pass over a tile covers at most. Few more than one pass takes are not worth a
/// second one, in which sums are stored and loaded again; of many, each pass covers less, so that its tile has the
/// more columns (see [`BlockSizes::deepest`]).
const MAX_DEPTH: i64 = 1024;
/// Rows of a micro-kernel at most, whatever the registers.
const TALLEST: i64 = 28;
/// Below this many rows a copy of `B` is not read often enough to pay.
const FEW_ROWS: i64 = 40;
/// With `B` in place a block is this deep, so that its rows stay in the first-level cache's reach.
const IN_PLACE_DEPTH: i64 = 128;
/// Tiles to aim for: enough to share between the threads of a rank.
const TILES: i64 = 8;
/// Parts of tiles to aim for: enough for more threads, and for any number of them to get shares that are nearly
/// equal.
const PARTS: i64 = 128;
/// A block is not made for fewer contracted elements than this because experts are many.
const SMALL_SHARE: i64 = 256;
/// A tile, or a part of one, of less work than this is not worth a call.
const MIN_TILE_FLOPS: i64 = 4_000_000;

/// Panels before number `border` have one size, those from it on another.
#[derive(Clone, Copy)]
pub struct PanelSizes {
    pub before: i64,
    pub border: i64,
    pub after: i64,
}

impl PanelSizes {
    /// The size of a panel.
    pub fn size<'c>(&self, b: &Llvm<'c>, panel: Index<'c>) -> Index<'c> {
        b.index_select(b.index_less(panel, b.index(self.border)), b.index(self.before), b.index(self.after))
    }

    /// The first row, or column, of a panel.
    pub fn start<'c>(&self, b: &Llvm<'c>, panel: Index<'c>) -> Index<'c> {
        let longer = b.index_mul(b.index_min(panel, b.index(self.border)), b.index(self.before - self.after));
        b.index_add(b.index_mul(panel, b.index(self.after)), longer)
    }

    /// The size of the larger ones.
    pub fn largest(&self) -> i64 {
        if self.border > 0 { self.before.max(self.after) } else { self.after }
    }
}

impl GemmPlan {
    /// Finds product and blocks of a kernel of family `Gemm`.
    ///
    /// # Errors
    /// Those of [`Product::new`]; factors are to be rounded to tf32.
    pub fn new(kernel: &Kernel, target: &Target) -> Result<GemmPlan, CompileError> {
        let product = Product::new(kernel)?;
        if product.tf32 {
            return Err(CompileError::unsupported("products of tf32 on CPUs"));
        }
        let Product { a, b, m, n, k, .. } = &product;
        let (a, b, of_rows) = (*a, *b, product.owns(ExpertDim::Rows));
        // The micro-kernel reads f32, so a 16-bit factor must be copied, which converts it.
        let is_half = |tensor: usize| kernel.inputs[tensor].ty.dtype.is_half();
        let is_transposed = k.strides[a] != 1 && m.strides[a] == 1 && k.size > 1;
        let pack_a = is_half(a) || is_transposed || k.strides[a] == 1 && rows_collide(target, 4 * m.strides[a], m.size.min(micro(target, n.size).1));
        let repeats = product.repeats();
        let mut blocks = match &product.experts {
            None => BlockSizes::new(target, [m.size, n.size, k.size], m.size, repeats, pack_a),
            // Block sizes assume that each expert has an equal part of the rows; it may have more or fewer.
            Some(x) if of_rows => {
                BlockSizes::new(target, [m.size, n.size, k.size], div_ceil(m.size, x.axis.size), repeats, pack_a).of_any_rows(m.size)
            }
            Some(x) => {
                let share = div_ceil(k.size, x.axis.size).max(SMALL_SHARE).min(k.size);
                BlockSizes::new(target, [m.size, n.size, share], m.size, repeats, pack_a)
            }
        };
        blocks.pack_b |= n.strides[b] != 1 || is_half(b);
        let mut plan = GemmPlan { product, blocks };
        plan.blocks.parts = plan.parts();
        Ok(plan)
    }

    /// The factor whose copy outlives a tile: the tiles of a line share it.
    pub fn kept(&self) -> KeptFactor {
        if self.blocks.pack_a && self.passes() == Some(1) && !self.owns(ExpertDim::Rows) { KeptFactor::A } else { KeptFactor::B }
    }

    /// Tiles, whole ones, of a line, which follow one another.
    fn whole_of_line(&self) -> i64 {
        match self.kept() {
            KeptFactor::A => self.blocks.column_tiles,
            KeptFactor::B => self.blocks.row_tiles,
        }
    }

    /// Parts of tiles, in rows and in columns.
    pub fn divisions(&self) -> [i64; 2] {
        let BlockSizes { row_tiles, column_tiles, parts, .. } = self.blocks;
        match self.kept() {
            KeptFactor::A => [row_tiles, column_tiles * parts],
            KeptFactor::B => [row_tiles * parts, column_tiles],
        }
    }

    /// Parts of tiles of a line.
    pub fn line(&self) -> i64 {
        self.whole_of_line() * self.blocks.parts
    }

    /// Parts of a line that are computed together at most.
    pub fn together(&self) -> i64 {
        let run = if self.kept() == KeptFactor::A { 1 } else { self.blocks.run };
        run * self.blocks.parts
    }

    /// The number of parts of a tile.
    fn parts(&self) -> i64 {
        let b = &self.blocks;
        let tiles = self.tiles();
        // Experts that own contracted elements count as repetitions of the product, but share its elements.
        let shares = self.experts.as_ref().filter(|_| self.owns(ExpertDim::Contracted)).map_or(1, |x| x.axis.size);
        let work = 2 * self.m.size * self.n.size * self.k.size * self.repeats() / shares / MIN_TILE_FLOPS;
        let panels = if self.kept() == KeptFactor::A { b.column_panels } else { b.panels };
        (PARTS.min(work) / tiles).min(panels / self.whole_of_line()).max(1)
    }

    /// The panels of rows (0) or columns (1).
    pub fn panels(&self, factor: usize) -> PanelSizes {
        let b = &self.blocks;
        let last = self.n.size - (b.column_panels - 1) * b.width;
        [
            PanelSizes { before: b.height + 1, border: b.tall, after: b.height },
            PanelSizes { before: b.width, border: b.column_panels - 1, after: last },
        ][factor]
    }

    /// Parts of tiles: what threads get.
    pub fn tiles(&self) -> i64 {
        self.repeats() * self.divisions().iter().product::<i64>()
    }

    /// Blocks of contracted elements of a tile, if that does not depend on who owns them.
    pub fn passes(&self) -> Option<i64> {
        let all = self.blocks.depths * self.outer_k.iter().map(|x| x.size).product::<i64>();
        (!self.owns(ExpertDim::Contracted)).then_some(all)
    }
}

impl BlockSizes {
    /// Blocks for one product of m, n, k, `repeats` times; about `users` rows use the same `B`.
    fn new(target: &Target, [m, n, k]: [i64; 3], users: i64, repeats: i64, pack_a: bool) -> BlockSizes {
        let (vectors, tallest) = micro(target, n);
        let panels = div_ceil(m, tallest);
        let lanes = target.lanes() as i64;
        let width = vectors * lanes;
        let column_panels = div_ceil(n, width);

        let pack_b = users >= FEW_ROWS;
        let deepest = if pack_b { BlockSizes::deepest(target, k, pack_a) } else { IN_PLACE_DEPTH };
        let depths = div_ceil(k, deepest);
        let depth = if depths == 1 { k } else { div_ceil(div_ceil(k, depths), 16) * 16 };
        let depths = div_ceil(k, depth);

        // A tile has so few columns that its block of `B` stays in the L2 cache, beside what streams through.
        let resident = (i64::from(target.l2_bytes) / 2 / (4 * depth * width)).clamp(1, 16);
        let resident = column_panels.min(resident);
        let rows_within = |elements: i64| (i64::from(target.l2_bytes) / (4 * elements * height_of(m, panels))).max(4);
        // `most_rows` is the number of row panels whose copies of `A` and waiting sums stay in the L2 cache too.
        let most_rows = |columns: i64| {
            let copied = if pack_a { rows_within(depth) } else { panels };
            let waiting = if depths > 1 { rows_within(columns * width) } else { panels };
            panels.min(copied).min(waiting)
        };
        // The number of tiles is a power of two, as that of threads mostly is.
        let wanted = 1 << (2 * m * n * k * repeats / MIN_TILE_FLOPS).clamp(1, TILES).ilog2();
        let tiling = |column_tiles: i64, row_tiles: i64| {
            let (tile_rows, tile_columns) = (div_ceil(panels, row_tiles), div_ceil(column_panels, column_tiles));
            // With one pass, the copy of `B` or `A` outlives a tile anyway, so tiles need not be computed together.
            let run = if depths > 1 { ((most_rows(tile_columns) + tile_rows / 2) / tile_rows).max(1) } else { 1 };
            let tiles = repeats * column_tiles * row_tiles;
            // A thread goes through consecutive tiles and copies the kept factor anew where a line of tiles begins.
            let fast = if pack_a && depths == 1 { column_tiles } else { row_tiles };
            let lines = tiles / fast;
            let borders = (1..wanted.min(tiles)).map(|thread| thread * tiles / wanted.min(tiles));
            let parts = lines + borders.filter(|tile| tile % fast != 0).count() as i64;
            // The kept factor is copied once for each group of tiles of a line that are computed together.
            let kept = |elements: i64| if depths > 1 { parts * elements * div_ceil(tiles, parts * run) / lines } else { parts * elements / lines };
            let (copies_a, copies_b) = if pack_a && depths == 1 { (kept(m), row_tiles * n) } else { (column_tiles * m, kept(n)) };
            // Costs are for each contracted element, in vector multiply-adds. Copying an element costs about one,
            // reading it in place a quarter.
            let copies = if pack_a { copies_a } else { copies_a / 4 } + copies_b;
            let idle = m * n / lanes * (div_ceil(tiles, wanted) * wanted - tiles) / tiles;
            (copies + idle, Tiling { column_tiles, row_tiles, tile_rows, tile_columns, run })
        };
        let fewest = div_ceil(column_panels, resident);
        let (_, tiling) = (fewest..=column_panels.min(2 * fewest + TILES))
            .flat_map(|columns| {
                let fewest = div_ceil(panels, most_rows(div_ceil(column_panels, columns)));
                (fewest..=panels.min(2 * fewest + TILES)).map(move |rows| (columns, rows))
            })
            .map(|(columns, rows)| tiling(columns, rows))
            .min_by_key(|(cost, _)| *cost)
            .expect("invariant: one tile of all columns that fit");
        let Tiling { column_tiles, row_tiles, tile_rows, tile_columns, run } = tiling;
        let (height, tall) = (m / panels, m % panels);
        BlockSizes {
            panels,
            height,
            tall,
            vectors,
            width,
            column_panels,
            depth,
            depths,
            column_tiles,
            row_tiles,
            tile_rows,
            tile_columns,
            run,
            parts: 1,
            pack_a,
            pack_b,
        }
    }

    /// Contracted elements of a pass at most. A copy of `A` serves the columns of a tile, one of `B` its rows, and
    /// sums are stored once per pass; as the block of `B` fills the second-level cache, a tile has the fewer columns
    /// the deeper it is.
    fn deepest(target: &Target, k: i64, pack_a: bool) -> i64 {
        let l2 = i64::from(target.l2_bytes);
        if k <= MAX_DEPTH { MAX_DEPTH } else { (if pack_a { l2 / 4096 } else { l2 / 2048 }).clamp(256, MAX_DEPTH) }
    }

    /// Row panels that are computed together at most.
    pub fn most_panels(&self) -> i64 {
        self.run * self.tile_rows
    }

    /// Sums of a row of a tile and a little more, so that rows do not share places of a cache.
    pub fn partial_stride(&self) -> i64 {
        self.tile_columns * self.width + 16
    }

    /// The same tiles with row panels of any height up to the one at which these are full.
    fn of_any_rows(self, m: i64) -> BlockSizes {
        let tallest = height_of(m, self.panels);
        let panels = div_ceil(m, tallest);
        BlockSizes { panels, height: tallest, tall: 0, row_tiles: div_ceil(panels, self.tile_rows), ..self }
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

/// Vectors per row, and rows at most, of the micro-kernel for so many columns: accumulators, one row of `B` and one
/// broadcast element share the register file.
fn micro(target: &Target, columns: i64) -> (i64, i64) {
    let vectors = if columns <= target.lanes() as i64 { 1 } else { 2 };
    (vectors, ((i64::from(target.registers) - vectors - 1) / vectors).min(TALLEST))
}

/// Whether so many rows, read together, would drive one another out of the first-level cache, because they begin so
/// many bytes apart that they share its places. A few rows too many do no harm: no line is needed for long.
fn rows_collide(target: &Target, bytes_apart: i64, rows: i64) -> bool {
    let way = i64::from(target.l1_way_bytes);
    let places = (1..=way).find(|n| n * bytes_apart % way == 0).unwrap_or(way);
    2 * div_ceil(rows, places) > 3 * i64::from(target.l1_ways)
}

/// The greatest height of a row panel.
fn height_of(m: i64, panels: i64) -> i64 {
    div_ceil(m, panels)
}
