//! Which registers an instruction reads and writes.

use crate::inst::*;

/// Collects registers by number: those of 32 bits, then those of 64, then predicates.
pub struct Registers {
    words: usize,
    longs: usize,
    pub reads: Vec<u32>,
    pub writes: Vec<u32>,
}

impl Registers {
    /// The registers of an instruction, in a kernel with so many registers of 32 and of 64 bits.
    pub fn of(inst: &Inst, [words, longs, _]: [usize; 3]) -> Registers {
        let mut r = Registers { words, longs, reads: vec![], writes: vec![] };
        if let Some((p, _)) = inst.guard {
            r.reads.push(r.predicate(p));
        }
        r.op(&inst.op);
        r
    }

    fn predicate(&self, p: P) -> u32 {
        (self.words + self.longs + usize::from(p.0)) as u32
    }

    fn sw(&mut self, all: &[Sw]) -> &mut Self {
        for s in all {
            if let Sw::Reg(w) = s {
                self.reads.push(u32::from(w.0));
            }
        }
        self
    }

    fn sd(&mut self, all: &[Sd]) -> &mut Self {
        for s in all {
            match s {
                Sd::Reg(d) => self.reads.push((self.words + usize::from(d.0)) as u32),
                Sd::Low(w) => self.reads.push(u32::from(w.0)),
                Sd::Imm(_) | Sd::Clock => {}
            }
        }
        self
    }

    fn sp(&mut self, all: &[Sp]) -> &mut Self {
        for s in all {
            if let Sp::Reg(p, _) = s {
                self.reads.push(self.predicate(*p));
            }
        }
        self
    }

    fn src(&mut self, all: &[Src]) -> &mut Self {
        for s in all {
            match s {
                Src::W(w) => self.sw(&[*w]),
                Src::D(d) => self.sd(&[*d]),
            };
        }
        self
    }

    fn at(&mut self, all: &[Address]) -> &mut Self {
        for a in all {
            self.sd(&[a.base]);
        }
        self
    }

    fn w(&mut self, all: &[W]) -> &mut Self {
        self.writes.extend(all.iter().map(|w| u32::from(w.0)));
        self
    }

    fn d(&mut self, all: &[D]) -> &mut Self {
        self.writes.extend(all.iter().map(|d| (self.words + usize::from(d.0)) as u32));
        self
    }

    fn p(&mut self, all: &[P]) -> &mut Self {
        self.writes.extend(all.iter().map(|p| (self.words + self.longs + usize::from(p.0)) as u32));
        self
    }

    fn reg(&mut self, all: &[Reg]) -> &mut Self {
        for r in all {
            match r {
                Reg::W(w) => self.w(&[*w]),
                Reg::D(d) => self.d(&[*d]),
                Reg::Sink => self,
            };
        }
        self
    }

    fn op(&mut self, op: &Op) -> &mut Self {
        match op {
            Op::MovW(d, a) | Op::Int1W(_, _, d, a) | Op::F1(_, _, d, a) | Op::H1(_, _, _, d, a) => self.sw(&[*a]).w(&[*d]),
            Op::MovD(d, a) | Op::Int1D(_, _, d, a) | Op::D1(_, d, a) => self.sd(&[*a]).d(&[*d]),
            Op::MovP(d, a) => self.sp(&[*a]).p(&[*d]),
            Op::Pack(d, parts, _) => self.sw(parts).reg(&[*d]),
            Op::Unpack(d, s, _) => self.src(&[*s]).reg(d),
            Op::IntW(_, _, d, a, b) | Op::F2(_, _, d, a, b) | Op::H2(_, _, _, d, a, b) => self.sw(&[*a, *b]).w(&[*d]),
            Op::IntD(_, _, d, a, b) | Op::D2(_, d, a, b) => self.sd(&[*a, *b]).d(&[*d]),
            Op::ShiftD(_, _, d, a, b) => self.sd(&[*a]).sw(&[*b]).d(&[*d]),
            Op::CountD(_, d, a) => self.sd(&[*a]).w(&[*d]),
            Op::WideD(_, d, a, b, c) => self.sw(&[*a, *b]).sd(c.as_slice()).d(&[*d]),
            Op::WideW(_, d, a, b, c) => self.sw(&[*a, *b]).sw(c.as_slice()).w(&[*d]),
            Op::MadW(_, d, a, b, c)
            | Op::ExtractW(_, d, a, b, c)
            | Op::Prmt(d, a, b, c)
            | Op::Lop3(d, a, b, c, _)
            | Op::Fma(_, d, a, b, c)
            | Op::HFma(_, _, d, a, b, c) => self.sw(&[*a, *b, *c]).w(&[*d]),
            Op::MadD(d, a, b, c) | Op::DFma(d, a, b, c) => self.sd(&[*a, *b, *c]).d(&[*d]),
            Op::Funnel { d, lo, hi, by, .. } => self.sw(&[*lo, *hi, *by]).w(&[*d]),
            Op::ExtractD(_, d, a, b, c) => self.sd(&[*a]).sw(&[*b, *c]).d(&[*d]),
            Op::InsertW(d, a, b, c, e) => self.sw(&[*a, *b, *c, *e]).w(&[*d]),
            Op::InsertD(d, a, b, c, e) => self.sd(&[*a, *b]).sw(&[*c, *e]).d(&[*d]),
            Op::SetP { d, inverse, a, b, and, .. } => {
                self.src(&[*a, *b]);
                if let Some((_, p)) = and {
                    self.sp(&[*p]);
                }
                self.p(d.as_slice()).p(inverse.as_slice())
            }
            Op::SelW(d, a, b, p) => self.sw(&[*a, *b]).sp(&[*p]).w(&[*d]),
            Op::SelD(d, a, b, p) => self.sd(&[*a, *b]).sp(&[*p]).d(&[*d]),
            Op::LogicP(_, d, a, b) => self.sp(&[*a, *b]).p(&[*d]),
            Op::Convert { d, a, .. } | Op::ToGeneric(_, d, a) | Op::FromGeneric(_, d, a) => self.src(&[*a]).reg(&[*d]),
            Op::ConvertPair { d, high, low, .. } => self.sw(&[*high, *low]).w(&[*d]),
            Op::Load { d, a, .. } => self.at(&[*a]).reg(d),
            Op::Store { s, a, .. } => self.at(&[*a]).src(s),
            Op::Atom { d, a, b, c, .. } => self.at(&[*a]).src(&[*b]).src(c.as_slice()).reg(&[*d]),
            Op::Shfl { d, p, a, b, c, members, .. } => self.sw(&[*a, *b, *c, *members]).w(&[*d]).p(p.as_slice()),
            Op::Vote { d, p, a, members, .. } => self.sp(&[*a]).sw(&[*members]).reg(&[*d]).p(p.as_slice()),
            Op::Redux { d, a, members, .. } => self.sw(&[*a, *members]).w(&[*d]),
            Op::ActiveMask(d) => self.w(&[*d]),
            Op::Elect(d, p, members) => self.sw(&[*members]).reg(&[*d]).p(&[*p]),
            Op::Bar { id, threads, .. } => self.sw(&[*id]).sw(threads.as_slice()),
            Op::SyncWarp(members) => self.sw(&[*members]),
            Op::MapRank(_, d, a, rank) => self.src(&[*a]).sw(&[*rank]).reg(&[*d]),
            Op::CpAsync { d, s, read, .. } => self.at(&[*d, *s]).sw(read.as_slice()),
            Op::CpArrive { a, .. } | Op::BarrierInval(a) => self.at(&[*a]),
            Op::BarrierInit(a, n) => self.at(&[*a]).sw(&[*n]),
            Op::BarrierArrive { a, what, state, .. } => {
                let (Arrive::Count(n) | Arrive::Expect(n) | Arrive::ExpectOnly(n)) = what;
                self.at(&[*a]).sw(&[*n]).d(state.as_slice())
            }
            Op::BarrierTest { d, a, phase, .. } => self.at(&[*a]).src(&[*phase]).p(&[*d]),
            Op::TensorLoad { d, map, at, barrier, ranks } => self.at(&[*d, *map, *barrier]).sw(at).sw(ranks.as_slice()),
            Op::TensorStore { map, at, s } => self.at(&[*map, *s]).sw(at),
            Op::BulkLoad { d, s, bytes, barrier, ranks } => self.at(&[*d, *s, *barrier]).sw(&[*bytes]).sw(ranks.as_slice()),
            Op::BulkStore { d, s, bytes } => self.at(&[*d, *s]).sw(&[*bytes]),
            Op::LdMatrix { d, a, .. } => self.at(&[*a]).w(d),
            Op::StMatrix { a, s, .. } => self.at(&[*a]).sw(s),
            Op::Mma { d, a, b, c, .. } => self.sw(a).sw(b).sw(c).w(d),
            Op::Wgmma(op) => {
                if let MatrixA::Descriptor(a) = &op.a {
                    self.sd(&[*a]);
                }
                if let MatrixA::Registers(r) = &op.a {
                    self.reads.extend(r.iter().map(|w| u32::from(w.0)));
                }
                self.reads.extend(op.accumulators.iter().map(|w| u32::from(w.0)));
                self.sd(&[op.b]).sp(&[op.scale_d]).w(&op.accumulators)
            }
            Op::Nop
            | Op::Fence
            | Op::Registers(..)
            | Op::Bra { .. }
            | Op::Exit
            | Op::Trap
            | Op::FenceProxy
            | Op::FenceBarriers
            | Op::ClusterArrive { .. }
            | Op::ClusterWait
            | Op::CpCommit
            | Op::CpWait(_)
            | Op::BulkCommit
            | Op::BulkWait { .. }
            | Op::WgmmaFence
            | Op::WgmmaCommit
            | Op::WgmmaWait(_) => self,
        }
    }
}
