//! What this machine's cores can do at most: multiply-adds in registers, and numbers of a large array changed in
//! place.
//!
//! Both loops are in assembly on x86-64, so that no optimisation level decides what a ceiling is.

use crate::cpu::{Threads, allowed_cores, pin};
use serde::{Deserialize, Serialize};
use std::sync::Barrier;
use std::time::Instant;

/// Of the threads of one rank, while those of all others on the machine do the same.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// f32 operations a second, two per multiply-add.
    pub flops: f64,
    /// Bytes a second, read and written.
    pub bytes: f64,
}

/// Each is the best of so many measurements: what disturbs can only make them slower.
const ROUNDS: usize = 8;

/// Turns of the loop of multiply-adds: two or three milliseconds, thousands of times what a barrier takes.
const TURNS: u64 = 1 << 19;

/// Bytes of all arrays together: more than caches hold.
const BYTES: usize = 512 << 20;

/// Measures with the threads of these ranks at once, of which there is at least one.
///
/// # Panics
/// If a thread cannot start.
pub fn measure(ranks: &[Threads]) -> Ceilings {
    let length = (BYTES / 4 / measured(ranks).len()).next_multiple_of(BLOCK);
    let bytes = best(ranks, ROUNDS, |barrier| {
        let mut array = vec![1f32; length];
        (0..ROUNDS).map(|_| rate(barrier, || change(&mut array))).collect()
    });
    Ceilings { flops: flops(ranks, ROUNDS), bytes }
}

/// [`Ceilings::flops`] alone, of so many measurements of two or three milliseconds.
///
/// # Panics
/// If a thread cannot start.
pub fn flops(ranks: &[Threads], rounds: usize) -> f64 {
    best(ranks, rounds, |barrier| (0..rounds).map(|_| rate(barrier, || multiply_add(TURNS))).collect())
}

/// The threads that measure, each with the core that it stays on. Where there are more threads than cores, as many as
/// there are cores: more would take turns, and come to no more together.
fn measured(ranks: &[Threads]) -> Vec<Option<usize>> {
    let cores = ranks.iter().flat_map(|t| (0..t.count).map(|k| t.cores.as_ref().and_then(|c| c.get(k).copied())));
    cores.take(allowed_cores().len().max(1)).collect()
}

/// The best round of all threads together, a rank. `of_thread` gives a thread's rates.
fn best(ranks: &[Threads], rounds: usize, of_thread: impl Fn(&Barrier) -> Vec<f64> + Sync) -> f64 {
    let cores = measured(ranks);
    let barrier = Barrier::new(cores.len());
    let pinned = |core: Option<usize>| {
        core.into_iter().for_each(pin);
        of_thread(&barrier)
    };
    let rates: Vec<Vec<f64>> = std::thread::scope(|scope| {
        let threads: Vec<_> = cores.iter().map(|core| scope.spawn(|| pinned(*core))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    (0..rounds).map(|round| rates.iter().map(|r| r[round]).sum::<f64>()).fold(0.0, f64::max) / ranks.len() as f64
}

/// What work says that it did, a second, when all threads begin at once.
fn rate(barrier: &Barrier, work: impl FnOnce() -> f64) -> f64 {
    barrier.wait();
    let begun = Instant::now();
    let done = work();
    done / begun.elapsed().as_secs_f64()
}

/// Sixteen independent chains of multiply-adds in the widest registers; gives the operations.
fn multiply_add(turns: u64) -> f64 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has AVX-512.
            unsafe { x86::multiply_add_512(turns) };
            return 2.0 * 16.0 * 16.0 * turns as f64;
        }
        if is_x86_feature_detected!("fma") {
            // SAFETY: the processor has FMA, hence AVX.
            unsafe { x86::multiply_add_256(turns) };
            return 2.0 * 12.0 * 8.0 * turns as f64;
        }
    }
    let mut chains = [[1f32; 4]; 16];
    for _ in 0..turns {
        chains.as_flattened_mut().iter_mut().for_each(|x| *x = x.mul_add(0.5, 0.25));
    }
    std::hint::black_box(chains);
    2.0 * 64.0 * turns as f64
}

/// Floats that [`change`] takes at a time.
const BLOCK: usize = 32;

/// Adds to every element of an array, whose length is a multiple of [`BLOCK`]; gives the bytes read and written.
fn change(array: &mut [f32]) -> f64 {
    let bytes = 2.0 * size_of_val(array) as f64;
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx") {
        // SAFETY: the processor has AVX.
        unsafe { x86::change_256(array) };
        return bytes;
    }
    array.iter_mut().for_each(|x| *x += 1.0);
    bytes
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::BLOCK;
    use std::arch::asm;
    use std::arch::x86_64::{_mm256_set1_ps, _mm512_set1_ps};

    #[target_feature(enable = "avx512f")]
    pub fn multiply_add_512(turns: u64) {
        // SAFETY: touches nothing but the registers it names.
        unsafe {
            asm!(
                "2:",
                "vfmadd213ps zmm0, zmm30, zmm31", "vfmadd213ps zmm1, zmm30, zmm31", "vfmadd213ps zmm2, zmm30, zmm31", "vfmadd213ps zmm3, zmm30, zmm31",
                "vfmadd213ps zmm4, zmm30, zmm31", "vfmadd213ps zmm5, zmm30, zmm31", "vfmadd213ps zmm6, zmm30, zmm31", "vfmadd213ps zmm7, zmm30, zmm31",
                "vfmadd213ps zmm8, zmm30, zmm31", "vfmadd213ps zmm9, zmm30, zmm31", "vfmadd213ps zmm10, zmm30, zmm31", "vfmadd213ps zmm11, zmm30, zmm31",
                "vfmadd213ps zmm12, zmm30, zmm31", "vfmadd213ps zmm13, zmm30, zmm31", "vfmadd213ps zmm14, zmm30, zmm31", "vfmadd213ps zmm15, zmm30, zmm31",
                "dec {turns}",
                "jnz 2b",
                turns = inout(reg) turns => _,
                in("zmm30") _mm512_set1_ps(0.5), in("zmm31") _mm512_set1_ps(0.25),
                inout("zmm0") _mm512_set1_ps(0.5) => _, inout("zmm1") _mm512_set1_ps(0.5) => _,
                inout("zmm2") _mm512_set1_ps(0.5) => _, inout("zmm3") _mm512_set1_ps(0.5) => _,
                inout("zmm4") _mm512_set1_ps(0.5) => _, inout("zmm5") _mm512_set1_ps(0.5) => _,
                inout("zmm6") _mm512_set1_ps(0.5) => _, inout("zmm7") _mm512_set1_ps(0.5) => _,
                inout("zmm8") _mm512_set1_ps(0.5) => _, inout("zmm9") _mm512_set1_ps(0.5) => _,
                inout("zmm10") _mm512_set1_ps(0.5) => _, inout("zmm11") _mm512_set1_ps(0.5) => _,
                inout("zmm12") _mm512_set1_ps(0.5) => _, inout("zmm13") _mm512_set1_ps(0.5) => _,
                inout("zmm14") _mm512_set1_ps(0.5) => _, inout("zmm15") _mm512_set1_ps(0.5) => _,
                options(nomem, nostack),
            );
        }
    }

    #[target_feature(enable = "fma")]
    pub fn multiply_add_256(turns: u64) {
        // SAFETY: touches nothing but the registers it names.
        unsafe {
            asm!(
                "2:",
                "vfmadd213ps ymm0, ymm14, ymm15", "vfmadd213ps ymm1, ymm14, ymm15", "vfmadd213ps ymm2, ymm14, ymm15", "vfmadd213ps ymm3, ymm14, ymm15",
                "vfmadd213ps ymm4, ymm14, ymm15", "vfmadd213ps ymm5, ymm14, ymm15", "vfmadd213ps ymm6, ymm14, ymm15", "vfmadd213ps ymm7, ymm14, ymm15",
                "vfmadd213ps ymm8, ymm14, ymm15", "vfmadd213ps ymm9, ymm14, ymm15", "vfmadd213ps ymm10, ymm14, ymm15", "vfmadd213ps ymm11, ymm14, ymm15",
                "dec {turns}",
                "jnz 2b",
                turns = inout(reg) turns => _,
                in("ymm14") _mm256_set1_ps(0.5), in("ymm15") _mm256_set1_ps(0.25),
                inout("ymm0") _mm256_set1_ps(0.5) => _, inout("ymm1") _mm256_set1_ps(0.5) => _,
                inout("ymm2") _mm256_set1_ps(0.5) => _, inout("ymm3") _mm256_set1_ps(0.5) => _,
                inout("ymm4") _mm256_set1_ps(0.5) => _, inout("ymm5") _mm256_set1_ps(0.5) => _,
                inout("ymm6") _mm256_set1_ps(0.5) => _, inout("ymm7") _mm256_set1_ps(0.5) => _,
                inout("ymm8") _mm256_set1_ps(0.5) => _, inout("ymm9") _mm256_set1_ps(0.5) => _,
                inout("ymm10") _mm256_set1_ps(0.5) => _, inout("ymm11") _mm256_set1_ps(0.5) => _,
                options(nomem, nostack),
            );
        }
    }

    #[target_feature(enable = "avx")]
    pub fn change_256(array: &mut [f32]) {
        let blocks = array.len() / BLOCK;
        if blocks == 0 {
            return;
        }
        // SAFETY: reads and writes so many blocks of the array, from its start.
        unsafe {
            asm!(
                "2:",
                "vaddps {a}, {one}, [{at}]", "vaddps {b}, {one}, [{at} + 32]", "vaddps {c}, {one}, [{at} + 64]", "vaddps {d}, {one}, [{at} + 96]",
                "vmovups [{at}], {a}", "vmovups [{at} + 32], {b}", "vmovups [{at} + 64], {c}", "vmovups [{at} + 96], {d}",
                "add {at}, 128",
                "dec {blocks}",
                "jnz 2b",
                at = inout(reg) array.as_mut_ptr() => _, blocks = inout(reg) blocks => _, one = in(ymm_reg) _mm256_set1_ps(1.0),
                a = out(ymm_reg) _, b = out(ymm_reg) _, c = out(ymm_reg) _, d = out(ymm_reg) _,
                options(nostack),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_changes_once() {
        let mut array = vec![1f32; 3 * BLOCK];
        assert_eq!(change(&mut array), 2.0 * 4.0 * 3.0 * BLOCK as f64);
        assert_eq!(array, vec![2f32; 3 * BLOCK]);
    }

    #[test]
    fn ceilings_are_those_of_one_of_several_ranks() {
        let one = measure(&[Threads::one(), Threads::one()]);
        assert!(one.flops > 1e8 && one.bytes > 1e7, "{one:?}");
    }

    #[test]
    fn no_more_threads_measure_than_there_are_cores() {
        let cores = allowed_cores().len();
        assert_eq!(measured(&vec![Threads::one(); cores + 5]), vec![None; cores]);
        let pinned = Threads { count: 1, cores: Some(vec![7]), spins: 0 };
        assert_eq!(measured(&[pinned]), [Some(7)]);
    }
}
