//! Strided ranges of elements.

/// Elements between the first and the last of a strided range, both included; 0 if it has none.
pub fn reach(sizes: &[u64], strides: &[u64]) -> u64 {
    if sizes.contains(&0) {
        return 0;
    }
    1 + sizes.iter().zip(strides).map(|(n, s)| (n - 1) * s).sum::<u64>()
}

/// The offset of every element of a strided range, row-major.
pub fn offsets(sizes: &[u64], strides: &[u64], mut visit: impl FnMut(u64)) {
    let mut at = vec![0u64; sizes.len()];
    for _ in 0..sizes.iter().product::<u64>() {
        visit(at.iter().zip(strides).map(|(i, s)| i * s).sum());
        for k in (0..at.len()).rev() {
            at[k] += 1;
            if at[k] < sizes[k] {
                break;
            }
            at[k] = 0;
        }
    }
}
