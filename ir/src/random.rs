//! Random numbers keyed by name and global index, so that results do not depend on the mesh.

/// Mixes 64 bits: the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
pub fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

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
