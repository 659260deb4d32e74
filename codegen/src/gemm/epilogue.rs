//! The pointwise ops that follow a product, at one vector of the result, or a vector of runs of neighbouring columns.

use super::product::{Product, Tensor};
use crate::CompileError;
use crate::build::{Builder, IntBinary, Lane};
use crate::loops::accumulated;
use crate::pointwise::{self, Sources};
use ir::dim::Dim;
use ir::graph::Value;
use ir::kernel::Kernel;
use ir::op::Op;
use std::collections::BTreeMap;

/// A vector of the result inside a block of it.
pub struct ResultVector<B: Builder> {
    pub row: B::Index,
    pub column: i64,
    /// The lanes that are columns, unless all are.
    pub mask: Option<B::Vector>,
}

impl<B: Builder> Clone for ResultVector<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Builder> Copy for ResultVector<B> {}

/// Inputs of the ops after the product: the value and the tensor of each.
pub fn inputs(kernel: &Kernel, product: &Product) -> BTreeMap<Value, Tensor> {
    let later = kernel.body.values().filter(|v| *v != product.dot);
    let input = |a: &Value| if let Op::Input(i) = kernel.body[*a].op { Some((*a, i as Tensor)) } else { None };
    later.flat_map(|v| kernel.body[v].args.iter().filter_map(input)).collect()
}

/// What follows the product in a block of its rows and columns.
pub struct Epilogue<'a, B: Builder> {
    pub b: &'a B,
    pub kernel: &'a Kernel,
    pub product: &'a Product,
    pub scalars: B::Pointer,
    /// The block's first element of every tensor of the kernel.
    pub tensors: Vec<B::Pointer>,
    /// The block's first row and column in the product, and which repetition of the product it is.
    pub row: B::Index,
    pub column: B::Index,
    pub outer: B::Index,
    /// Where each lane's run of columns begins, if lanes do not have one column each. Runs are aligned
    /// ([`Builder::gather_run`]).
    pub runs: Option<B::Vector>,
}

/// What memory has at a vector of the result: of inputs, and of outputs that are added to, by position.
pub struct Memory<B: Builder> {
    inputs: BTreeMap<Value, Vec<B::Vector>>,
    outputs: BTreeMap<usize, Vec<B::Vector>>,
}

impl<B: Builder> Memory<B> {
    /// Nothing has been read yet.
    pub fn unread() -> Self {
        Memory { inputs: BTreeMap::new(), outputs: BTreeMap::new() }
    }
}

impl<B: Builder> Epilogue<'_, B> {
    /// Reads all that [`Epilogue::write`] needs, for one column or a run of `count`: what is read before anything is
    /// stored is not waited for one by one.
    pub fn read_all(&self, vector: ResultVector<B>, count: usize) -> Memory<B> {
        let (kernel, lane) = (self.kernel, |v: Value| pointwise::stored(self.kernel.body[v].ty.dtype));
        let inputs = inputs(kernel, self.product).into_iter().map(|(v, tensor)| (v, self.read(vector, tensor, lane(v), count)));
        let added = kernel.outputs.iter().enumerate().filter(|(_, o)| o.accumulate);
        let outputs = added.map(|(k, o)| (k, self.read(vector, kernel.inputs.len() + k, lane(o.value), count)));
        Memory { inputs: inputs.collect(), outputs: outputs.collect() }
    }

    /// Computes the ops after the product and stores the outputs. There is one sum, or one for each column of a run.
    /// What has not been read is read where it is needed.
    ///
    /// # Errors
    /// An op is not supported.
    pub fn write(&self, vector: ResultVector<B>, sums: &[B::Vector], memory: Memory<B>) -> Result<(), CompileError> {
        let (b, kernel) = (self.b, self.kernel);
        let dot = self.product.dot;
        let rounded =
            sums.iter().map(|sum| ir::fault!("gemm.epilogue.rounded", *sum, pointwise::rounded(b, kernel.body[dot].ty.dtype, *sum))).collect();
        let mut known = memory.inputs;
        known.insert(dot, rounded);
        // All values are computed before any store, as an output may share the memory of an input.
        let values = kernel.outputs.iter().map(|o| self.value(o.value, vector, sums.len(), &mut known)).collect::<Result<Vec<_>, _>>()?;
        for ((position, output), mut values) in kernel.outputs.iter().enumerate().zip(values) {
            let dtype = kernel.body[output.value].ty.dtype;
            let lane = pointwise::stored(dtype);
            let tensor = kernel.inputs.len() + position;
            if output.accumulate {
                let read = memory.outputs.get(&position).cloned();
                let old = read.unwrap_or_else(|| self.read(vector, tensor, lane, values.len()));
                values = old.iter().zip(values).map(|(old, value)| accumulated(b, dtype, *old, value)).collect();
            }
            let place = self.place(vector, tensor, lane);
            match (self.product.n.strides[tensor], self.runs) {
                (1, None) => b.store(place, values[0], lane, vector.mask),
                (1, Some(_)) => b.scatter_run(place, self.offsets(1, lane), &values, lane),
                (stride, _) => {
                    let stride = ir::fault!("gemm.epilogue.stride", 1, stride);
                    for (k, value) in (0..).zip(values) {
                        let place = b.at_const(place, k * stride * lane.bytes());
                        b.scatter(place, self.offsets(stride, lane), value, lane, vector.mask);
                    }
                }
            }
        }
        Ok(())
    }

    /// One vector of a value, or `count` for runs.
    fn value(
        &self,
        v: Value,
        vector: ResultVector<B>,
        count: usize,
        known: &mut BTreeMap<Value, Vec<B::Vector>>,
    ) -> Result<Vec<B::Vector>, CompileError> {
        if let Some(values) = known.get(&v) {
            return Ok(values.clone());
        }
        let (b, kernel) = (self.b, self.kernel);
        let node = &kernel.body[v];
        let values = match &node.op {
            Op::Input(i) => self.read(vector, *i as usize, pointwise::stored(node.ty.dtype), count),
            op if op.is_source() => {
                let sources = Sources { b, body: &kernel.body, scalars: self.scalars, scalar_count: kernel.scalars.len() };
                let at = |k| ResultVector { column: vector.column + k, ..vector };
                (0..count as i64).map(|k| sources.value(v, &mut |dim| self.local_index(at(k), dim))).collect::<Result<_, _>>()?
            }
            _ => {
                let args = node.args.iter().map(|a| self.value(*a, vector, count, known)).collect::<Result<Vec<_>, _>>()?;
                let column = |k: usize| args.iter().map(|a| a[k]).collect::<Vec<_>>();
                (0..count).map(|k| pointwise::apply(b, &kernel.body, v, &column(k))).collect::<Result<_, _>>()?
            }
        };
        known.insert(v, values.clone());
        Ok(values)
    }

    /// The column of each lane in a vector, or where its run begins.
    fn lanes(&self) -> B::Vector {
        self.runs.unwrap_or_else(|| self.b.lane_numbers())
    }

    /// The local index along a dim of the result in each lane.
    fn local_index(&self, vector: ResultVector<B>, dim: Dim) -> B::Vector {
        let (b, product, dims) = (self.b, self.product, &self.kernel.body.dims);
        if let Some((inner, size)) = product.m.digit(dims, dim) {
            let row = b.index_add(self.row, vector.row);
            return b.splat(b.index_rem(b.index_div(row, b.index(inner)), b.index(size)));
        }
        if let Some((inner, size)) = product.n.digit(dims, dim) {
            let first = ir::fault!("gemm.epilogue.column", b.index(vector.column), b.index_add(self.column, b.index(vector.column)));
            let column = b.int2(IntBinary::Add, b.splat(first), self.lanes());
            return b.int2(IntBinary::Rem, b.int2(IntBinary::Div, column, b.i64(inner)), b.i64(size));
        }
        // Repetitions are numbered with the last axis fastest.
        let mut inner_axes = 1;
        for axis in product.outer.iter().rev() {
            if let Some((inner, size)) = axis.digit(dims, dim) {
                let outer = b.index_div(self.outer, b.index(inner * inner_axes));
                return b.splat(b.index_rem(outer, b.index(size)));
            }
            inner_axes *= ir::fault!("gemm.epilogue.outer", 1, axis.size);
        }
        b.i64(0)
    }

    fn place(&self, vector: ResultVector<B>, tensor: usize, lane: Lane) -> B::Pointer {
        let (b, product) = (self.b, self.product);
        let row = b.index_mul(vector.row, b.index(product.m.strides[tensor] * lane.bytes()));
        let start = b.at(self.tensors[tensor], row);
        b.at_const(start, vector.column * product.n.strides[tensor] * lane.bytes())
    }

    fn offsets(&self, stride: i64, lane: Lane) -> B::Vector {
        let b = self.b;
        b.int2(IntBinary::Mul, self.lanes(), b.i64(stride * lane.bytes()))
    }

    fn read(&self, vector: ResultVector<B>, tensor: usize, lane: Lane, count: usize) -> Vec<B::Vector> {
        let b = self.b;
        let place = self.place(vector, tensor, lane);
        match (self.product.n.strides[tensor], self.runs) {
            (0, _) => vec![b.load_splat(place, lane); count],
            (1, None) => vec![b.load(place, lane, vector.mask)],
            (1, Some(_)) => b.gather_run(place, self.offsets(1, lane), lane, count, None),
            (stride, _) => {
                let at = |k: i64| b.at_const(place, k * stride * lane.bytes());
                (0..count as i64).map(|k| b.gather(at(k), self.offsets(stride, lane), lane, vector.mask)).collect()
            }
        }
    }
}
