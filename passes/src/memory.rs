//! Assigns arena offsets. Buffers whose lifetimes overlap never overlap in memory; offsets are 64-byte aligned.

/// Alignment of every buffer, in bytes: a cache line, and the widest vector.
pub const ALIGN: u64 = 64;

/// A buffer's need: bytes, and the commands from its first write to its last use, inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    pub bytes: u64,
    pub first: usize,
    pub last: usize,
}

/// Offsets for buffers with lifetimes, and the arena's size: the largest first, each at the lowest offset that is free
/// over its lifetime (greedy by size; Pisarchyk & Lee 2020).
pub fn assign(needs: &[Need]) -> (Vec<u64>, u64) {
    let mut order: Vec<usize> = (0..needs.len()).collect();
    order.sort_by_key(|k| (std::cmp::Reverse(needs[*k].bytes), needs[*k].first, *k));
    let mut offsets = vec![0; needs.len()];
    let mut placed: Vec<usize> = vec![];
    let mut total = 0;
    for k in order {
        let bytes = needs[k].bytes.next_multiple_of(ALIGN);
        let mut busy: Vec<(u64, u64)> = placed
            .iter()
            .filter(|j| needs[**j].first <= needs[k].last && needs[k].first <= needs[**j].last)
            .map(|j| (offsets[*j], offsets[*j] + needs[*j].bytes.next_multiple_of(ALIGN)))
            .collect();
        busy.sort_unstable();
        let mut at = 0;
        for (from, to) in busy {
            if at + bytes <= from {
                break;
            }
            at = at.max(to);
        }
        offsets[k] = at;
        total = total.max(at + bytes);
        placed.push(k);
    }
    (offsets, total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_share_memory_only_when_their_lifetimes_do_not_meet() {
        let needs = [Need { bytes: 100, first: 0, last: 2 }, Need { bytes: 64, first: 2, last: 3 }, Need { bytes: 128, first: 3, last: 5 }];
        let (at, total) = assign(&needs);
        for (i, a) in needs.iter().enumerate() {
            for (j, b) in needs.iter().enumerate().skip(i + 1) {
                let time = a.first <= b.last && b.first <= a.last;
                let space = at[i] < at[j] + b.bytes && at[j] < at[i] + a.bytes;
                assert!(!(time && space), "{i} and {j}");
            }
        }
        assert_eq!(total, 192);
    }
}
