//! Copies of blocks of the factors in the order in which the micro-kernel reads them.

use crate::build::llvm::{CacheLevel, Index, Llvm, Pointer, Vector, Visibility};
use crate::build::{Builder, IntBinary, Lane};
use inkwell::values::FunctionValue;

/// Panels to copy: each of `items` rows (or columns) by a run-time number of contracted elements, to
/// `out[panel][k][item]`.
pub struct PackedPanel {
    pub name: String,
    pub items: i64,
    /// Elements from one `k` to the next in the copy, and from one panel to the next.
    pub out_stride: i64,
    pub out_panel: i64,
    /// Strides in the source, in elements.
    pub item_stride: i64,
    pub k_stride: i64,
    /// Elements in the source; in the copy they are f32.
    pub lane: Lane,
    /// Panels may have fewer items: the function also takes their number, and copies nothing, or any of them, in
    /// place of the others.
    pub bounded: bool,
}

impl PackedPanel {
    /// Bytes of elements in the source.
    fn bytes(&self, elements: i64) -> i64 {
        self.lane.bytes() * elements
    }
}

/// A function `(from, to, k, panels)`, or `(from, to, k, 1, items)` if `bounded`, that copies adjacent panels. It may
/// write up to one vector beyond each row of the copy, in ascending order.
pub fn function<'c>(b: &Llvm<'c>, panel: &PackedPanel) -> FunctionValue<'c> {
    let function = b.function(&panel.name, 2, if panel.bounded { 3 } else { 2 }, Visibility::Local);
    if panel.item_stride == 1 {
        copy_rows(b, function, panel);
    } else if panel.k_stride == 1 {
        transpose(b, function, panel);
    } else {
        collect(b, function, panel);
    }
    b.finish_function();
    function
}

/// The vectors that cover `items`: position of the first lane, and lanes in use.
fn vectors(b: &Llvm, items: i64) -> Vec<(i64, i64)> {
    let lanes = b.lanes() as i64;
    (0..items).step_by(b.lanes()).map(|first| (first, (items - first).min(lanes))).collect()
}

/// The lanes from item `first` on that are in use, unless all are.
fn mask_of<'c>(b: &Llvm<'c>, function: FunctionValue<'c>, panel: &PackedPanel, [first, used]: [i64; 2]) -> Option<Vector<'c>> {
    if panel.bounded {
        return Some(b.mask_below(b.index_sub(items(b, function), b.index(first))));
    }
    (used < b.lanes() as i64).then(|| b.mask_first(used as usize))
}

/// The number of items of a bounded panel.
fn items<'c>(b: &Llvm<'c>, function: FunctionValue<'c>) -> Index<'c> {
    b.index_parameter(function, 4)
}

/// Rows of the source fetched ahead of the copy: enough to be under way while memory answers.
const AHEAD: i64 = 32;

/// Items are neighbours in memory: whole vectors move. All panels of one `k` together, since they share memory pages.
fn copy_rows<'c>(b: &Llvm<'c>, function: FunctionValue<'c>, panel: &PackedPanel) {
    let (from, to) = (b.pointer_parameter(function, 0), b.pointer_parameter(function, 1));
    let (count, panels) = (b.index_parameter(function, 2), b.index_parameter(function, 3));
    b.for_each(b.index(0), count, 1, &mut |k| {
        let source = b.at(from, b.index_mul(k, b.index(panel.bytes(panel.k_stride))));
        let target = b.at(to, b.index_mul(k, b.index(4 * ir::fault!("gemm.copy.stride", panel.items, panel.out_stride))));
        b.for_each(b.index(0), panels, 1, &mut |number| {
            let source = b.at(source, b.index_mul(number, b.index(panel.bytes(panel.items))));
            let target = b.at(target, b.index_mul(number, b.index(4 * panel.out_panel)));
            for (first, used) in vectors(b, panel.items) {
                b.prefetch(b.at_const(source, panel.bytes(first + AHEAD * panel.k_stride)), CacheLevel::Second);
                copy_vector(b, [source, target], first, panel.lane, mask_of(b, function, panel, [first, used]));
            }
        });
    });
}

/// Copies the items from number `first` on that are in the mask, of a contracted element at `from`.
pub fn copy_vector<'c>(b: &Llvm<'c>, [from, to]: [Pointer<'c>; 2], first: i64, lane: Lane, mask: Option<Vector<'c>>) {
    let value = b.load(b.at_const(from, lane.bytes() * first), lane, mask);
    b.store(b.at_const(to, 4 * first), value, Lane::F32, None);
}

/// One panel after the other: `body` gets where each begins, in the source and in the copy.
fn each_panel<'c>(b: &Llvm<'c>, function: FunctionValue<'c>, panel: &PackedPanel, body: &mut dyn FnMut(Pointer<'c>, Pointer<'c>)) {
    let (from, to) = (b.pointer_parameter(function, 0), b.pointer_parameter(function, 1));
    b.for_each(b.index(0), b.index_parameter(function, 3), 1, &mut |number| {
        let source = b.at(from, b.index_mul(number, b.index(panel.bytes(panel.items * panel.item_stride))));
        body(source, b.at(to, b.index_mul(number, b.index(4 * panel.out_panel))));
    });
}

/// The contracted elements are neighbours: squares of lanes are transposed in registers.
fn transpose<'c>(b: &Llvm<'c>, function: FunctionValue<'c>, panel: &PackedPanel) {
    let count = b.index_parameter(function, 2);
    let lanes = b.lanes() as i64;
    let square = |from: Pointer<'c>, to: Pointer<'c>, k: Index<'c>, mask: Option<Vector<'c>>| {
        let columns: Vec<(i64, Vec<Vector>)> = vectors(b, panel.items)
            .into_iter()
            .map(|(first, used)| {
                let rows: Vec<Vector> = (0..lanes)
                    .map(|row| match row < used {
                        true => {
                            let start = match panel.bounded {
                                true => {
                                    let item = b.index_min(b.index(first + row), b.index_sub(items(b, function), b.index(1)));
                                    b.at(from, b.index_mul(item, b.index(panel.bytes(panel.item_stride))))
                                }
                                false => b.at_const(from, panel.bytes((first + row) * panel.item_stride)),
                            };
                            let place = b.at(start, b.index_mul(k, b.index(panel.bytes(1))));
                            // The next panel's elements at the same position are prefetched.
                            b.prefetch(b.at_const(place, panel.bytes(panel.items * panel.item_stride)), CacheLevel::Second);
                            b.load(place, panel.lane, mask)
                        }
                        false => b.f32(0.0),
                    })
                    .collect();
                (first, b.transpose(&rows))
            })
            .collect();
        // Rows are stored in ascending order, since a vector may reach into the next row.
        let target = b.at(to, b.index_mul(k, b.index(4 * panel.out_stride)));
        for row in 0..lanes {
            for (first, values) in &columns {
                b.store(b.at_const(target, 4 * (row * panel.out_stride + first)), values[row as usize], Lane::F32, None);
            }
        }
    };
    let whole = b.index_mul(b.index_div(count, b.index(lanes)), b.index(lanes));
    each_panel(b, function, panel, &mut |from, to| {
        b.for_each(b.index(0), whole, lanes, &mut |k| square(from, to, k, None));
        let count = ir::fault!("gemm.copy.rest", whole, count);
        b.for_each(whole, count, lanes, &mut |k| square(from, to, k, Some(b.mask_below(b.index_sub(count, k)))));
    });
}

/// Neither direction is dense: element by element.
fn collect<'c>(b: &Llvm<'c>, function: FunctionValue<'c>, panel: &PackedPanel) {
    let count = b.index_parameter(function, 2);
    let offsets = b.int2(IntBinary::Mul, b.lane_numbers(), b.i64(panel.bytes(panel.item_stride)));
    each_panel(b, function, panel, &mut |from, to| {
        b.for_each(b.index(0), count, 1, &mut |k| {
            let source = b.at(from, b.index_mul(k, b.index(panel.bytes(panel.k_stride))));
            let target = b.at(to, b.index_mul(k, b.index(4 * panel.out_stride)));
            for (first, used) in vectors(b, panel.items) {
                let start = b.at_const(source, panel.bytes(first * ir::fault!("gemm.copy.collected", 1, panel.item_stride)));
                let value = b.gather(start, offsets, panel.lane, mask_of(b, function, panel, [first, used]));
                b.store(b.at_const(target, 4 * first), value, Lane::F32, None);
            }
        });
    });
}
