//! `wgmma`: matrix products of a warpgroup out of shared memory, in the background (PTX ISA, section 9.7.15).
//!
//! Each warp of the four computes its own 16 rows, so each has its own queue. A product is one operation of all four:
//! who waits for it waits for all of them. Until a warp has waited, its accumulators are poison.

use crate::block::{Block, Flow, Timing};
use crate::fault::Wrong;
use crate::float;
use crate::history::Access;
use crate::inst::{Element, MatrixA, Op, W, Wgmma};
use crate::matrix::{fragment_a, tf32};
use crate::order::{Engine, Stamp, View};
use crate::shared::of_rank;
use crate::tensor_map::Swizzle;
use crate::warp::{State, Words};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

/// The value of an accumulator in flight: NaN.
const POISON: u32 = 0x7FC0_DEAD;

/// The matrix engine of a warp.
pub struct Matrix {
    /// Whether registers of products were written since the last `wgmma.fence`.
    pub dirty: bool,
    pending: VecDeque<PendingProduct>,
    /// The moment of each committed group.
    groups: Vec<Stamp>,
    /// For each register in flight, its real value.
    flying: Vec<Option<Box<Words>>>,
}

struct PendingProduct {
    op: Wgmma,
    a: u64,
    b: u64,
    scale: bool,
    pc: u32,
    stamp: Stamp,
    view: Rc<View>,
    /// The number of its group.
    group: usize,
    done: bool,
}

impl Matrix {
    /// Whether products are under way.
    pub fn is_busy(&self) -> bool {
        !self.pending.is_empty()
    }

    pub fn new(words: usize) -> Matrix {
        Matrix { dirty: true, pending: VecDeque::new(), groups: vec![], flying: vec![None; words] }
    }
}

/// A matrix in shared memory, by its descriptor.
struct Descriptor {
    start: u64,
    leading: u64,
    stride: u64,
    swizzle: Swizzle,
}

impl Descriptor {
    fn new(bits: u64) -> Result<Descriptor, Wrong> {
        let field = |at: u32| (bits >> at & 0x3FFF) << 4;
        let swizzle = match bits >> 62 {
            0 => Swizzle::None,
            1 => Swizzle::B128,
            2 => Swizzle::B64,
            _ => Swizzle::B32,
        };
        if bits >> 49 & 7 != 0 {
            return Err(Wrong::Descriptor("matrix descriptors with a base offset are not supported".into()));
        }
        Ok(Descriptor { start: field(0), leading: field(16), stride: field(32), swizzle })
    }

    /// The offset of element (row, k), of `bytes` bytes; rows are M or N. These are the canonical layouts of the PTX
    /// ISA, section 9.7.15.5.1, in pieces of 8 x 16 bytes.
    fn place(&self, row: u64, k: u64, bytes: u64, transposed: bool) -> u64 {
        let per = 16 / bytes;
        let wide = self.swizzle.row() / 16;
        let offset = match (transposed, self.swizzle) {
            (false, Swizzle::None) => row / 8 * self.stride + row % 8 * 16 + k / per * self.leading + k % per * bytes,
            (false, s) => row / 8 * self.stride + row % 8 * s.row() + k * bytes,
            (true, Swizzle::None) => row / per * self.stride + row % per * bytes + k / 8 * self.leading + k % 8 * 16,
            (true, s) => row / (per * wide) * self.leading + row % (per * wide) * bytes + k / 8 * self.stride + k % 8 * s.row(),
        };
        self.swizzle.place(self.start + offset)
    }
}

impl Block<'_> {
    pub fn wgmma(&mut self, w: usize, op: &Op, mask: u32) -> Result<Flow, Wrong> {
        self.converged(w, mask, "wgmma")?;
        match op {
            Op::WgmmaFence => self.engines[w].matrix.dirty = false,
            Op::WgmmaCommit => {
                let stamp = self.warps[w].stamp(Engine::Matrix);
                self.engines[w].matrix.groups.push(stamp);
                self.warps[w].tick(Engine::Matrix);
                let peers = self.warpgroup(w);
                self.warps[peers].iter_mut().filter(|p| p.state == State::Matrix).for_each(|p| p.state = State::Running);
            }
            Op::WgmmaWait(left) => {
                let end = self.engines[w].matrix.groups.len().saturating_sub(*left as usize);
                let peers = self.warpgroup(w);
                if end > 0 && peers.clone().any(|p| self.engines[p].matrix.groups.len() < end) {
                    self.warps[w].state = State::Matrix;
                    return Ok(Flow::Moved);
                }
                for p in peers.filter(|_| end > 0) {
                    let over = self.engines[p].matrix.pending.iter().take_while(|x| x.group < end).count();
                    (0..over).try_for_each(|k| self.multiply(p, k))?;
                    self.warps[w].view.see(self.engines[p].matrix.groups[end - 1]);
                }
                self.engines[w].matrix.pending.retain(|p| p.group >= end);
                self.land(w)?;
            }
            Op::Wgmma(op) => self.start(w, op)?,
            _ => unreachable!("invariant: only wgmma comes here"),
        }
        Ok(Flow::Next)
    }

    /// The warps of a warp's warpgroup.
    fn warpgroup(&self, w: usize) -> Range<usize> {
        let first = w - self.warps[w].of_block % 4;
        first..(first + 4).min(self.of_block(w).end)
    }

    fn start(&mut self, w: usize, op: &Wgmma) -> Result<(), Wrong> {
        let warp = &self.warps[w];
        let four = self.warpgroup(w).len() == 4;
        let m = &mut self.engines[w].matrix;
        if m.dirty {
            return Err(Wrong::InFlight("they were written after the last `wgmma.fence`".into()));
        }
        if warp.alive() != u32::MAX || !four {
            return Err(Wrong::Divergent("`wgmma` is for four whole warps".into()));
        }
        let uniform = |v: [u64; 32]| {
            if v.iter().all(|x| *x == v[0]) { Ok(v[0]) } else { Err(Wrong::Descriptor("lanes have different matrix descriptors".into())) }
        };
        let a = match &op.a {
            MatrixA::Descriptor(a) => uniform(warp.long(*a))?,
            MatrixA::Registers(_) => 0,
        };
        let b = uniform(warp.long(op.b))?;
        let scale = warp.predicate(op.scale_d);
        if scale != 0 && scale != u32::MAX {
            return Err(Wrong::Descriptor("lanes disagree on whether accumulators count".into()));
        }
        let (stamp, view, group) = (warp.stamp(Engine::Matrix), Rc::new(warp.view.clone()), m.groups.len());
        let pending = PendingProduct { op: op.clone(), a, b, scale: scale != 0, pc: warp.pc(), stamp, view, group, done: false };
        for r in &op.accumulators {
            let place = &mut m.flying[r.0 as usize];
            if place.is_none() {
                *place = Some(Box::new(self.warps[w].word(crate::inst::Sw::Reg(*r))));
                self.warps[w].set_word(*r, &[POISON; 32], u32::MAX);
            }
        }
        m.pending.push_back(pending);
        let last = m.pending.len() - 1;
        let now = match self.options.timing {
            Timing::Early => true,
            Timing::Late => false,
            // This computes the products before it as well, since a warp's products happen in order.
            Timing::Random => self.draw().is_multiple_of(2),
        };
        if now { (0..=last).try_for_each(|k| self.multiply(w, k)) } else { Ok(()) }
    }

    /// Computes a pending product, unless that has been done.
    fn multiply(&mut self, w: usize, k: usize) -> Result<(), Wrong> {
        let p = &mut self.engines[w].matrix.pending[k];
        if std::mem::replace(&mut p.done, true) {
            return Ok(());
        }
        let (op, a, b, scale, access) = (p.op.clone(), p.a, p.b, p.scale, (p.stamp, p.view.clone(), p.pc));
        let access = Access { stamp: access.0, view: &access.1, pc: access.2 };
        let (bytes, depth) = if op.element == Element::Tf32 { (4, 8) } else { (2, 16) };
        let n = op.n as usize;
        self.statistics.matrix_operations += 2 * 16 * op.n as u64 * depth;
        if let Some(counting) = &mut self.counting {
            counting.product(&op, depth, bytes);
        }
        if !self.options.products {
            return Ok(());
        }
        let mut am = [[0f32; 16]; 16];
        match &op.a {
            MatrixA::Registers(r) => {
                let a: Vec<Words> = r.iter().map(|r| self.warps[w].word(crate::inst::Sw::Reg(*r))).collect();
                am = fragment_a(op.element, depth as usize, &a);
            }
            MatrixA::Descriptor(_) => {
                let d = Descriptor::new(a)?;
                let first = (self.warps[w].of_block % 4 * 16) as u64;
                for (r, row) in am.iter_mut().enumerate() {
                    self.row_of(&d, op.element, first + r as u64, bytes, depth, op.transpose[0], access, &mut row[..depth as usize])?;
                }
            }
        }
        // B is stored by k, so that the inner loop of sums runs along n.
        let d = Descriptor::new(b)?;
        let mut bm = vec![0f32; depth as usize * n];
        let mut column = [0f32; 16];
        for j in 0..n {
            self.row_of(&d, op.element, j as u64, bytes, depth, op.transpose[1], access, &mut column[..depth as usize])?;
            column[..depth as usize].iter().enumerate().for_each(|(k, v)| bm[k * n + j] = *v);
        }
        let sign = if op.negate[0] != op.negate[1] { -1.0 } else { 1.0 };
        let m = &mut self.engines[w].matrix;
        let mut sums = vec![0f32; 16 * n];
        let place = |i: usize, l: usize| (l / 4 + 8 * (i % 4 / 2)) * n + 8 * (i / 4) + 2 * (l % 4) + i % 2;
        if scale {
            for (i, r) in op.accumulators.iter().enumerate() {
                let v = m.flying[r.0 as usize].as_ref().expect("invariant: an accumulator of a pending product is in flight");
                (0..32).for_each(|l| sums[place(i, l)] = f32::from_bits(v[l]));
            }
        }
        for (row, sums) in am.iter().zip(sums.chunks_exact_mut(n)) {
            for (x, b) in row[..depth as usize].iter().zip(bm.chunks_exact(n)) {
                let x = sign * x;
                for (s, b) in sums.iter_mut().zip(b) {
                    *s += x * b;
                }
            }
        }
        for (i, r) in op.accumulators.iter().enumerate() {
            let v = m.flying[r.0 as usize].as_mut().expect("invariant: an accumulator of a pending product is in flight");
            (0..32).for_each(|l| v[l] = sums[place(i, l)].to_bits());
        }
        Ok(())
    }

    /// A row of A or a column of B: the elements along k.
    #[allow(clippy::too_many_arguments)]
    fn row_of(
        &mut self,
        d: &Descriptor,
        e: Element,
        row: u64,
        bytes: u64,
        depth: u64,
        transposed: bool,
        access: Access<'_>,
        out: &mut [f32],
    ) -> Result<(), Wrong> {
        let rank = self.warps[access.stamp.warp()].rank();
        let read = |bits: &[u8]| match e {
            Element::Tf32 => tf32(u32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]])),
            Element::F16 | Element::Bf16 => float::widen(e, u16::from_le_bytes([bits[0], bits[1]])),
        };
        if transposed {
            for (k, o) in out.iter_mut().enumerate() {
                let at = of_rank(rank, d.place(row, k as u64, bytes, true));
                self.shared.note_read(at, bytes as usize, access)?;
                *o = read(self.shared.peek(at, bytes as usize)?);
            }
            return Ok(());
        }
        // The 16 bytes of a piece are contiguous.
        let per = 16 / bytes;
        for piece in 0..depth / per {
            let at = of_rank(rank, d.place(row, piece * per, bytes, false));
            self.shared.note_read(at, 16, access)?;
            let all = self.shared.peek(at, 16)?;
            for k in 0..per as usize {
                out[piece as usize * per as usize + k] = read(&all[k * bytes as usize..]);
            }
        }
        Ok(())
    }

    /// Gives back the accumulators that no pending product uses.
    fn land(&mut self, w: usize) -> Result<(), Wrong> {
        let m = &mut self.engines[w].matrix;
        let busy: std::collections::HashSet<W> = m.pending.iter().flat_map(|p| p.op.accumulators.iter().copied()).collect();
        for k in 0..m.flying.len() {
            let r = W(k as u16);
            if busy.contains(&r) {
                continue;
            }
            if let Some(v) = m.flying[k].take() {
                if self.warps[w].word(crate::inst::Sw::Reg(r)) != [POISON; 32] {
                    return Err(Wrong::InFlight("one was written before `wgmma.wait_group`".into()));
                }
                self.warps[w].set_word(r, &v, u32::MAX);
            }
        }
        Ok(())
    }
}
