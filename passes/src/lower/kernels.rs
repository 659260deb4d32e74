//! Builds the kernel of a group: its own small body over its own dims, with operands, scalars and outputs in order.

use crate::local::role::{Role, role};
use crate::lower::view::View;
use ir::dim::{Base, Dim, DimInfo, Dims, IndexMap, Order};
use ir::graph::{Body, Node, Value};
use ir::kernel::{Family, Kernel, Operand, Output};
use ir::op::{DType, Op, Scalar};
use ir::program::{BufferAddress, Space};
use std::collections::HashMap;

/// A kernel with the places and scalars that a launch passes to it.
pub struct Launch {
    /// The kernel, over dims of its own.
    pub kernel: Kernel,
    /// Where operands lie: first the kernel's inputs, then its outputs.
    pub args: Vec<BufferAddress>,
    /// Scalars to pass at each launch, in the kernel's order.
    pub scalars: Vec<Scalar>,
}

/// Where a result goes.
pub struct Target {
    /// The value of the graph that is stored.
    pub value: Value,
    /// Where it is stored: a view with all of the value's dims.
    pub view: View,
    /// Whether the value is added to what lies there; if not, it replaces that.
    pub accumulate: bool,
}

/// Builds the device's kernel that computes `nodes` of `body`. `view` tells where operands from outside lie.
pub fn build(body: &Body, nodes: &[Value], family: &Family, targets: Vec<Target>, view: &dyn Fn(Value) -> View) -> Launch {
    let mut k = KernelBuilder {
        body,
        family,
        out: Body { dims: Dims::default(), nodes: vec![] },
        dims: HashMap::new(),
        values: HashMap::new(),
        inputs: vec![],
        args: vec![],
        slots: HashMap::new(),
        scalars: vec![],
        dtypes: vec![],
    };
    for v in nodes {
        let args: Vec<Value> = body[*v].args.iter().map(|a| k.operand(*a, view)).collect();
        k.node(*v, args);
    }
    let mut outputs = vec![];
    for t in targets {
        let value = match k.values.get(&t.value) {
            Some(v) => *v,
            // A value from outside, or one that is made in place, is copied.
            None => {
                let x = k.operand(t.value, view);
                let ty = k.out[x].ty.clone();
                k.out.push(Op::Expand, [x], ty, body[t.value].origin.clone())
            }
        };
        let strides = body.dims_of(t.value).iter().map(|d| t.view.stride(*d).expect("invariant: a target has the value's dims")).collect();
        outputs.push(Output { value, strides, accumulate: t.accumulate });
        k.args.push(t.view.place);
    }
    if k.out.nodes.iter().any(|n| matches!(n.op, Op::Uniform { .. })) {
        k.scalars.extend(ir::fault!("kernels.uniform.scalars", [Scalar::Step, Scalar::Seed], [Scalar::Seed, Scalar::Step]));
        k.dtypes.extend([DType::I32, DType::I32]);
    }
    let family = match family {
        Family::Loops { grid } => Family::Loops { grid: grid.iter().map(|d| k.dims[d]).collect() },
        other => other.clone(),
    };
    let KernelBuilder { out, inputs, args, scalars, dtypes, .. } = k;
    Launch { kernel: Kernel { on: Space::Device, family, body: out, inputs, scalars: dtypes, outputs }, args, scalars }
}

/// A kernel that copies a value to another layout of the same dims.
pub fn copy(body: &Body, from: Value, from_view: &View, to: View, accumulate: bool) -> Launch {
    let family = Family::Loops { grid: body.dims_of(from).to_vec() };
    let view = from_view.clone();
    build(body, &[], &family, vec![Target { value: from, view: to, accumulate }], &move |_| view.clone())
}

/// Whether kernels of a family make constants, indices and the like for themselves.
pub fn makes_sources(family: &Family) -> bool {
    match family {
        Family::Loops { .. } | Family::Gemm | Family::Scatter => true,
        Family::Attention | Family::AttentionGrad => false,
    }
}

struct KernelBuilder<'a> {
    body: &'a Body,
    family: &'a Family,
    out: Body,
    dims: HashMap<Dim, Dim>,
    values: HashMap<Value, Value>,
    inputs: Vec<Operand>,
    args: Vec<BufferAddress>,
    /// The input slot of an operand at a place.
    slots: HashMap<(Operand, BufferAddress), u32>,
    scalars: Vec<Scalar>,
    dtypes: Vec<DType>,
}

impl KernelBuilder<'_> {
    fn dim(&mut self, d: Dim) -> Dim {
        if let Some(k) = self.dims.get(&d) {
            return *k;
        }
        let info = &self.body.dims[d];
        // The index map is set where an op asks for global indices.
        let k = self.out.dims.add(DimInfo { index: IndexMap::whole(info.size), order: Order::Plain, copy_of: None, ..info.clone() });
        self.dims.insert(d, k);
        k
    }

    /// A dim whose global indices matter.
    fn indexed(&mut self, d: Dim) -> Dim {
        let k = self.dim(d);
        let mut index = self.body.dims[d].index.clone();
        if let Base::Coords(form) = &index.base {
            index.base = ir::fault!("kernels.index.base", Base::Zero, Base::Slot(self.scalar(Scalar::Linear(form.clone()), DType::I32)));
        }
        self.out.dims[k].index = index;
        self.out.dims[k].order = ir::fault!("kernels.index.order", Order::Plain, self.body.dims[d].order);
        k
    }

    fn scalar(&mut self, scalar: Scalar, dtype: DType) -> u32 {
        if let Some(k) = self.scalars.iter().position(|s| ir::fault!("kernels.scalar.first", !self.scalars.is_empty(), *s == scalar)) {
            return k as u32;
        }
        self.scalars.push(scalar);
        self.dtypes.push(dtype);
        self.scalars.len() as u32 - 1
    }

    fn operand(&mut self, v: Value, view: &dyn Fn(Value) -> View) -> Value {
        if let Some(w) = self.values.get(&v) {
            return *w;
        }
        if role(self.body, v) == Role::Inline && makes_sources(self.family) {
            return self.node(v, vec![]);
        }
        let view = view(v);
        let mut ty = self.body[v].ty.clone();
        let strides: Vec<u64> = ty.dims.iter().map(|d| view.stride(*d).expect("invariant: a view has the value's dims")).collect();
        ty.dims = ty.dims.iter().map(|d| self.dim(*d)).collect();
        let operand = Operand { unaligned: !view.place.is_aligned(ty.dtype.bytes()), ty: ty.clone(), strides };
        let next = self.inputs.len() as u32;
        let slot = *self
            .slots
            .entry((operand.clone(), ir::fault!("kernels.operand.place", BufferAddress::start(view.place.buffer), view.place.clone())))
            .or_insert(next);
        if slot == next {
            self.inputs.push(operand);
            self.args.push(view.place);
        }
        let w = self.out.push(Op::Input(slot), [], ty, self.body[v].origin.clone());
        self.values.insert(v, w);
        w
    }

    fn node(&mut self, v: Value, args: Vec<Value>) -> Value {
        let node = &self.body[v];
        let op = self.op(v);
        let mut ty = node.ty.clone();
        ty.dims = ty.dims.iter().map(|d| self.dim(*d)).collect();
        self.out.nodes.push(Node { op, args, ty, origin: node.origin.clone() });
        let w = Value(self.out.nodes.len() as u32 - 1);
        self.values.insert(v, w);
        w
    }

    fn op(&mut self, v: Value) -> Op {
        let node = &self.body[v];
        match &node.op {
            Op::Iota(d) => Op::Iota(self.indexed(*d)),
            Op::Uniform { key } => {
                for d in &node.ty.dims {
                    self.indexed(*d);
                }
                Op::Uniform { key: *key }
            }
            Op::Scalar(s) => Op::Scalar(Scalar::Slot(self.scalar(s.clone(), node.ty.dtype))),
            Op::ArgMax { over } => Op::ArgMax { over: self.indexed(*over) },
            Op::Gather { dim } => Op::Gather { dim: self.indexed(*dim) },
            Op::Scatter { dim } => Op::Scatter { dim: self.indexed(*dim) },
            op => op.map_dims(&mut |d| self.dim(d)),
        }
    }
}
