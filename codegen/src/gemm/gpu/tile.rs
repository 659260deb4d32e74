//! What a block computes at a time.

use crate::build::asm::Factor;
use crate::gemm::product::Product;
use crate::layout::div_ceil;
use ir::tiles::TileSize;

/// A tile of a product, and how it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileConfig {
    pub size: TileSize,
    pub rows: i64,
    pub columns: i64,
    /// Contracted elements of a stage; the tables have those of 16 bits, of tf32 a stage has half as many.
    pub depth: i64,
    /// Stages in shared memory: one is computed with while the others are filled.
    pub stages: i64,
    /// Warps that multiply it, along rows and along columns.
    pub warps: [i64; 2],
    /// Teams of so many warps, which have a tile each at a time: while one stores, another multiplies.
    pub teams: i64,
    /// Blocks that a multiprocessor must have room for at a time.
    pub blocks: u32,
}

impl TileConfig {
    pub const fn new(size: TileSize, [depth, stages]: [i64; 2], warps: [i64; 2], blocks: u32) -> TileConfig {
        TileConfig { size, rows: size.rows as i64, columns: size.columns as i64, depth, stages, warps, teams: 1, blocks }
    }

    /// The tile of a table with as many bytes a stage, of elements of this type.
    pub fn of(self, factor: Factor) -> TileConfig {
        TileConfig { depth: 2 * self.depth / factor.bytes(), ..self }
    }

    /// Half of the rows for each of two teams, with so many stages.
    pub fn in_turns(self, stages: i64) -> TileConfig {
        let [along_rows, along_columns] = self.warps;
        TileConfig { rows: self.rows / 2, stages, warps: [along_rows / 2, along_columns], teams: 2, ..self }
    }

    /// Threads that multiply a tile.
    pub fn threads(&self) -> i64 {
        32 * self.warps[0] * self.warps[1]
    }

    /// Threads that multiply tiles.
    pub fn all_threads(&self) -> i64 {
        self.teams * self.threads()
    }

    /// Tiles of one repetition of the product, along rows and along columns.
    pub fn grid(&self, product: &Product) -> [i64; 2] {
        [div_ceil(product.m.size, self.rows), div_ceil(product.n.size, self.columns)]
    }

    /// Tiles of the whole product.
    pub fn count(&self, product: &Product) -> i64 {
        let [rows, columns] = self.grid(product);
        product.repeats() * rows * columns
    }
}
