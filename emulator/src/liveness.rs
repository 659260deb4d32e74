//! How many registers a thread needs, as far as PTX says it: those that hold what is read later.

use crate::inst::{Inst, Op};
use crate::registers::Registers;

/// Registers are allocated in eights, and a thread has at most 255.
const GRAIN: u32 = 8;
const MOST: u32 = 255;

/// About as many 32-bit registers as `ptxas` would give a thread of this code: the most that are alive at any place.
pub fn registers(code: &[Inst], counts: [usize; 3]) -> u32 {
    let all: usize = counts.iter().sum();
    let words = all.div_ceil(64);
    // Predicates have a register file of their own, so they count 0.
    let weight = |r: usize| [1, 2, 0][usize::from(r >= counts[0]) + usize::from(r >= counts[0] + counts[1])];
    let uses: Vec<Registers> = code.iter().map(|i| Registers::of(i, counts)).collect();
    let mut alive = vec![vec![0u64; words]; code.len() + 1];
    loop {
        let (mut changed, mut most) = (false, 0);
        for k in (0..code.len()).rev() {
            let mut now = match code[k].op {
                Op::Exit | Op::Trap if code[k].guard.is_none() => vec![0; words],
                Op::Bra { to } if code[k].guard.is_none() => alive[to as usize].clone(),
                Op::Bra { to } => alive[k + 1].iter().zip(&alive[to as usize]).map(|(a, b)| a | b).collect(),
                _ => alive[k + 1].clone(),
            };
            // A guarded write keeps the old value in some lanes.
            if code[k].guard.is_none() {
                uses[k].writes.iter().for_each(|r| now[*r as usize / 64] &= !(1 << (r % 64)));
            }
            uses[k].reads.iter().for_each(|r| now[*r as usize / 64] |= 1 << (r % 64));
            let live: u32 = (0..all).filter(|r| now[r / 64] >> (r % 64) & 1 != 0).map(weight).sum();
            most = most.max(live);
            changed |= now != alive[k];
            alive[k] = now;
        }
        if !changed {
            return most.next_multiple_of(GRAIN).min(MOST);
        }
    }
}
