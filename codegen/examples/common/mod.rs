//! What the benchmarks of kernels share: products, attention, and the peak of a core.

// Each example uses only a part of this module.
#![allow(dead_code)]

use ir::dim::{Dim, DimInfo};
use ir::graph::{Body, Origin, Phase, Type, Value};
use ir::kernel::{Family, Kernel, Operand, Output, dense};
use ir::op::{Attention, AttentionGrad, Binary, Compare, DType, Op, Real, Scoring, Unary};
use std::error::Error;

/// Which factors are stored with their contracted dim outermost (a) or innermost (b).
#[derive(Clone, Copy)]
pub struct Layout {
    pub name: &'static str,
    pub a_transposed: bool,
    pub b_transposed: bool,
}

/// `[m, k] [k, n] -> [m, n]`, in place of the result or added to it.
pub fn product([m, k, n]: [u64; 3], layout: Layout, accumulate: bool) -> Kernel {
    let mut body = Body::default();
    let [m, k, n] = [("m", m), ("k", k), ("n", n)].map(|(name, size)| body.dims.add(DimInfo::new(name, size)));
    let operand = |body: &Body, dims: [Dim; 2]| {
        let ty = Type::new(DType::F32, dims);
        Operand { strides: dense(&body.dims, &ty), ty, unaligned: false }
    };
    let inputs =
        vec![operand(&body, if layout.a_transposed { [k, m] } else { [m, k] }), operand(&body, if layout.b_transposed { [n, k] } else { [k, n] })];
    let origin = || Origin::new(Phase::Forward);
    let args: Vec<_> = (0..2).map(|i| body.push(Op::Input(i), [], inputs[i as usize].ty.clone(), origin())).collect();
    let value = body.push(Op::dot(vec![k]), args, Type::new(DType::F32, [m, n]), origin());
    let outputs = vec![Output { value, strides: dense(&body.dims, &body[value].ty), accumulate }];
    Kernel { on: ir::program::Space::Device, family: Family::Gemm, body, inputs, scalars: vec![], outputs }
}

struct BenchDraft {
    body: Body,
    inputs: Vec<Operand>,
}

impl BenchDraft {
    fn input(&mut self, dtype: DType, dims: &[Dim]) -> Value {
        let ty = Type::new(dtype, dims);
        self.inputs.push(Operand { strides: dense(&self.body.dims, &ty), ty: ty.clone(), unaligned: false });
        self.body.push(Op::Input(self.inputs.len() as u32 - 1), [], ty, Origin::new(Phase::Forward))
    }

    fn kernel(mut self, family: Family, results: Vec<(Op, Vec<Value>, Type)>) -> Kernel {
        let mut outputs = vec![];
        for (op, args, ty) in results {
            let strides = dense(&self.body.dims, &ty);
            outputs.push(Output { value: self.body.push(op, args, ty, Origin::new(Phase::Forward)), strides, accumulate: false });
        }
        Kernel { on: ir::program::Space::Device, family, body: self.body, inputs: self.inputs, scalars: vec![], outputs }
    }
}

/// Sizes of attention, written `BATCHxHEADSxSEQxD`, or `BATCHxHEADS/KVxSEQxD` where heads of queries share those of
/// keys.
#[derive(Clone, Copy)]
pub struct Heads {
    pub batch: u64,
    pub kv: u64,
    /// Heads of queries for each of keys.
    pub group: u64,
    pub seq: u64,
    pub d: u64,
}

impl Heads {
    /// # Errors
    /// The text is something else.
    pub fn parse(text: &str) -> Result<Heads, Box<dyn Error>> {
        let sizes = |text: &str, between: char| text.split(between).map(str::parse).collect::<Result<Vec<u64>, _>>();
        let [batch, heads, seq, d] = text.split('x').collect::<Vec<_>>()[..] else { return Err("sizes are written BATCHxHEADSxSEQxD".into()) };
        let (heads, kv) = match sizes(heads, '/')?[..] {
            [heads] => (heads, heads),
            [heads, kv] if kv > 0 && heads % kv == 0 => (heads, kv),
            _ => return Err("heads are written HEADS or HEADS/KV".into()),
        };
        Ok(Heads { batch: batch.parse()?, kv, group: heads / kv, seq: seq.parse()?, d: d.parse()? })
    }

    /// Operations of so many products of queries and keys that the mask leaves.
    pub fn flops(&self, products: f64) -> f64 {
        products * (self.batch * self.kv * self.group * self.seq * self.seq * self.d) as f64
    }
}

/// What an attention's program of scores says beside the causal mask.
#[derive(Clone, Copy, PartialEq)]
pub enum Scores {
    Causal,
    /// Documents of 256 positions.
    Documents,
    /// Documents of the same mean, whose borders are anywhere.
    Ragged,
    /// A slope for each head, times how far back a key is.
    Alibi,
    /// A soft cap.
    Capped,
    /// A tenth of the probabilities is dropped.
    Dropped,
    /// Not causal: a bool of each key says that it is there, of the first half.
    Padded,
}

impl Scores {
    pub fn parse(word: &str) -> Result<Scores, String> {
        let all = [
            ("causal", Scores::Causal),
            ("documents", Scores::Documents),
            ("ragged", Scores::Ragged),
            ("alibi", Scores::Alibi),
            ("capped", Scores::Capped),
            ("dropped", Scores::Dropped),
            ("padded", Scores::Padded),
        ];
        all.into_iter().find(|(name, _)| *name == word).map(|(_, s)| s).ok_or_else(|| format!("`{word}` is no program of scores"))
    }

    /// The program, and the operands that it takes beside the positions.
    fn program(self, [batch, at, keys, kv, group]: [Dim; 5]) -> (Scoring, Vec<Type>) {
        let mut s = Scoring::causal(None);
        match self {
            Scores::Causal => (s, vec![]),
            Scores::Documents | Scores::Ragged => {
                let [q, k] = [3, 4].map(|n| s.step(Op::Input(n), DType::I32, &[]));
                let same = s.step(Op::Compare(Compare::Eq), DType::Bool, &[q, k]);
                s.seen = s.seen.map(|seen| s.step(Op::Binary(Binary::And), DType::Bool, &[seen, same]));
                (s, [at, keys].map(|d| Type::new(DType::I32, [batch, d])).to_vec())
            }
            Scores::Alibi => {
                let back = s.step(Op::Binary(Binary::Sub), DType::I32, &[1, 0]);
                let far = s.step(Op::Cast, DType::F32, &[back]);
                let slope = s.step(Op::Input(3), DType::F32, &[]);
                let bias = s.step(Op::Binary(Binary::Mul), DType::F32, &[slope, far]);
                let score = s.step(Op::Input(0), DType::F32, &[]);
                s.score = Some(s.step(Op::Add, DType::F32, &[score, bias]));
                (s, vec![Type::new(DType::F32, [kv, group])])
            }
            Scores::Dropped => {
                let row = s.step(Op::Input(3), DType::I32, &[]);
                let bits = s.step(Op::Binary(Binary::Mix), DType::I32, &[row, 1]);
                let limit = s.step(Op::Const(Real(f64::from((0.1 * 2f64.powi(32) - 2f64.powi(31)) as i32))), DType::I32, &[]);
                let kept = s.step(Op::Compare(Compare::Ge), DType::Bool, &[bits, limit]);
                let [some, none] = [1.0 / 0.9, 0.0].map(|x| s.step(Op::Const(Real(x)), DType::F32, &[]));
                s.weight = Some(s.step(Op::Select, DType::F32, &[kept, some, none]));
                (s, vec![Type::new(DType::I32, [batch, kv, group, at])])
            }
            Scores::Padded => {
                s.seen = Some(s.step(Op::Input(3), DType::Bool, &[]));
                (s, vec![Type::new(DType::Bool, [batch, keys])])
            }
            Scores::Capped => {
                let score = s.step(Op::Input(0), DType::F32, &[]);
                let cap = s.step(Op::Const(Real(50.0)), DType::F32, &[]);
                let part = s.step(Op::Binary(Binary::Div), DType::F32, &[score, cap]);
                let bent = s.step(Op::Unary(Unary::Tanh), DType::F32, &[part]);
                s.score = Some(s.step(Op::Binary(Binary::Mul), DType::F32, &[bent, cap]));
                (s, vec![])
            }
        }
    }

    /// The bits of an operand's elements, in words: floats all `x`, positions in order, documents in a row.
    pub fn fill(self, kernel: &Kernel, ty: &Type, x: f32) -> Vec<u32> {
        let n = kernel.body.dims.elements(&ty.dims) as u32;
        if ty.dtype.is_float() {
            return vec![x.to_bits(); n as usize];
        }
        let along = kernel.body.dims.size(*ty.dims.last().expect("positions and documents are of a dim")) as u32;
        if ty.dtype == DType::Bool {
            let there = |i: u32| u8::from(i % along < along / 2);
            return (0..n.div_ceil(4)).map(|word| u32::from_le_bytes([0, 1, 2, 3].map(|byte| there(4 * word + byte)))).collect();
        }
        let at = (0..n).map(|i| i % along);
        match (self, ty.dims.len()) {
            (Scores::Documents, 2) => at.map(|i| i / 256).collect(),
            // The borders are multiples of the golden section, so that lengths vary.
            (Scores::Ragged, 2) => {
                let borders: Vec<u32> = (1..along / 256).map(|k| (f64::from(along) * (f64::from(k) * 0.618_034).fract()) as u32).collect();
                at.map(|i| borders.iter().filter(|b| **b <= i).count() as u32).collect()
            }
            _ => at.collect(),
        }
    }
}

/// Causal attention: forward with its logarithms, or all three gradients.
pub fn attention(heads: Heads, family: Family, scores: Scores) -> Kernel {
    let mut m = BenchDraft { body: Body::default(), inputs: vec![] };
    let sizes = [("b", heads.batch), ("at", heads.seq), ("keys", heads.seq), ("kv", heads.kv), ("group", heads.group), ("d", heads.d)];
    let [batch, at, keys, kv, group, d] = sizes.map(|(n, s)| m.body.dims.add(DimInfo::new(n, s)));
    let (scoring, more) = scores.program([batch, at, keys, kv, group]);
    let a = Attention { at, keys, d, values: d, scale: Real(0.125), scoring };
    let further = |m: &mut BenchDraft| {
        let positions = [at, keys].map(|d| Type::new(DType::I32, [d]));
        positions.iter().chain(&more).map(|ty| m.input(ty.dtype, &ty.dims)).collect::<Vec<Value>>()
    };
    let q = m.input(DType::F32, &[batch, at, kv, group, d]);
    let [k, v] = [0, 1].map(|_| m.input(DType::F32, &[batch, keys, kv, d]));
    let (q_ty, k_ty, row) = (m.body[q].ty.clone(), m.body[k].ty.clone(), Type::new(DType::F32, [batch, at, kv, group]));
    if family == Family::Attention {
        let places = further(&mut m);
        let out = (Op::Attention(a.clone()), [&[q, k, v], &places[..]].concat(), q_ty);
        return m.kernel(family, vec![out, (Op::AttentionLse(a), [&[q, k], &places[..]].concat(), row)]);
    }
    let [lse, delta] = [0, 1].map(|_| m.input(DType::F32, &row.dims));
    let dout = m.input(DType::F32, &q_ty.dims);
    let places = further(&mut m);
    let args = [&[q, k, v, lse, delta, dout], &places[..]].concat();
    let grads = [(AttentionGrad::Q, q_ty), (AttentionGrad::K, k_ty.clone()), (AttentionGrad::V, k_ty)];
    m.kernel(family, grads.map(|(which, ty)| (Op::AttentionGrad(a.clone(), which), args.clone(), ty)).to_vec())
}

/// Seconds that this thread has run.
pub fn thread_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

const ROUNDS: u64 = 40_000;

/// Operations of one call of [`peak`].
pub const PEAK_FLOPS: f64 = 2.0 * 16.0 * 16.0 * ROUNDS as f64;

/// Sixteen independent chains of multiply-adds, all in registers: in assembly, so that no optimisation level decides
/// what the peak is.
#[target_feature(enable = "avx512f")]
pub fn peak() {
    // SAFETY: touches nothing but the registers it names.
    unsafe {
        std::arch::asm!(
            "2:",
            "vfmadd231ps zmm0, zmm30, zmm31", "vfmadd231ps zmm1, zmm30, zmm31", "vfmadd231ps zmm2, zmm30, zmm31", "vfmadd231ps zmm3, zmm30, zmm31",
            "vfmadd231ps zmm4, zmm30, zmm31", "vfmadd231ps zmm5, zmm30, zmm31", "vfmadd231ps zmm6, zmm30, zmm31", "vfmadd231ps zmm7, zmm30, zmm31",
            "vfmadd231ps zmm8, zmm30, zmm31", "vfmadd231ps zmm9, zmm30, zmm31", "vfmadd231ps zmm10, zmm30, zmm31", "vfmadd231ps zmm11, zmm30, zmm31",
            "vfmadd231ps zmm12, zmm30, zmm31", "vfmadd231ps zmm13, zmm30, zmm31", "vfmadd231ps zmm14, zmm30, zmm31", "vfmadd231ps zmm15, zmm30, zmm31",
            "dec {rounds}",
            "jnz 2b",
            rounds = inout(reg) ROUNDS => _,
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _, out("zmm7") _,
            out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _, out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _,
            inout("zmm30") std::arch::x86_64::_mm512_set1_ps(0.5) => _, inout("zmm31") std::arch::x86_64::_mm512_set1_ps(0.25) => _,
            options(nomem, nostack),
        );
    }
}
