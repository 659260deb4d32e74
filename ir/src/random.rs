//! Random numbers keyed by name and global index, so that results do not depend on the mesh.

/// Mixes 64 bits: the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
pub fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// 32 bits of two numbers, each of which changes about half of them; for one number, different ones for all others.
///
/// The first is taken in twice, so that the results of one are not those of another, shifted. Shifts and factors are
/// those of the "hash prospector" (Wellons 2018, found by Ettinger).
pub fn mix_two(a: i32, b: i32) -> i32 {
    let [a, b] = [a, b].map(i32::cast_unsigned);
    let mut x = a ^ b.wrapping_mul(MIX_FACTORS[0]);
    x = (x ^ (x >> MIX_SHIFTS[0])).wrapping_mul(MIX_FACTORS[1]);
    x = (x ^ (x >> MIX_SHIFTS[1])).wrapping_add(a).wrapping_mul(MIX_FACTORS[2]);
    (x ^ (x >> MIX_SHIFTS[1])).cast_signed()
}

/// What [`mix_two`] multiplies by: the golden ratio's bits for the second number, then twice the result so far.
pub const MIX_FACTORS: [u32; 3] = [0x9e37_79b9, 0x21f0_aaad, 0xd35a_2d97];
/// What it shifts by.
pub const MIX_SHIFTS: [u32; 2] = [16, 15];

/// A key for a name (of a parameter, or of a dropout site: path and ordinal).
pub fn key(name: &str) -> u64 {
    let hash = blake3::hash(name.as_bytes());
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("invariant: eight bytes"))
}

/// The state that all elements of one tensor at one step share.
pub fn stream(key: u64, seed: u64, step: u64) -> u64 {
    mix(mix(key ^ mix(seed)) ^ step)
}

/// A multiple of 2^-24 in [0, 1) for the element of this global row-major index: exact in f32.
pub fn uniform(stream: u64, index: u64) -> f64 {
    (mix(stream ^ index) >> 40) as f64 / (1u64 << 24) as f64
}

/// A standard normal number, by Box and Muller from two uniforms of 53 bits.
pub fn normal(stream: u64, index: u64) -> f64 {
    let unit = |bits: u64| ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    let (a, b) = (mix(stream ^ index), mix(stream.rotate_left(32) ^ index ^ 0x6a09_e667_f3bc_c909));
    (-2.0 * unit(a).ln()).sqrt() * (2.0 * std::f64::consts::PI * unit(b)).cos()
}

#[cfg(test)]
mod tests {
    use super::mix_two;

    #[test]
    fn every_bit_of_both_numbers_changes_half_of_the_bits() {
        let numbers: Vec<i32> = (0..64).map(|i| super::mix(i) as i32).chain(0..64).collect();
        for (which, bit) in (0..64).map(|k| (k % 2, k / 2)) {
            let changed = numbers.iter().flat_map(|a| numbers.iter().map(move |b| [*a, *b])).map(|pair| {
                let mut other = pair;
                other[which] ^= 1 << bit;
                (mix_two(pair[0], pair[1]) ^ mix_two(other[0], other[1])).count_ones()
            });
            let mean = changed.sum::<u32>() as f64 / (numbers.len() * numbers.len()) as f64;
            assert!((14.0..18.0).contains(&mean), "bit {bit} of number {which} changes {mean} bits in the mean");
        }
    }

    #[test]
    fn patterns_of_neighbours_agree_no_more_than_by_chance() {
        // About one bit in ten is set, in 256 rows of 4,096 bits.
        let limit = (-0.8 * 2f64.powi(31)) as i32;
        let row = |a: i32| (0..4096).map(|b| mix_two(a, b) < limit).collect::<Vec<bool>>();
        let rows: Vec<Vec<bool>> = (0..256).map(row).collect();
        let share = rows.iter().flatten().filter(|x| **x).count() as f64 / (256.0 * 4096.0);
        assert!((0.098..0.102).contains(&share), "{share} of all are set");
        for pair in rows.windows(2) {
            for shift in [0, 1, 2, 17] {
                let both = pair[0].iter().zip(&pair[1][shift..]).filter(|(x, y)| **x && **y).count();
                // The mean is 41, the standard deviation 6.4.
                assert!((9..81).contains(&both), "{both} of 4,096 places of two rows");
            }
        }
    }
}
