//! Where lanes that part at a branch come together again: the immediate post-dominator of the branch.

use crate::inst::{Inst, Op};

/// The immediate post-dominator of each instruction. `code.len()` stands for the end of the kernel.
///
/// Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm" (2001), on the reversed graph of control flow.
pub fn joins(code: &[Inst]) -> Vec<u32> {
    let end = code.len();
    let next = |i: usize| -> Vec<usize> {
        let guarded = code[i].guard.is_some();
        match code[i].op {
            Op::Bra { to } if guarded => vec![to as usize, i + 1],
            Op::Bra { to } => vec![to as usize],
            Op::Exit | Op::Trap if guarded => vec![end, i + 1],
            Op::Exit | Op::Trap => vec![end],
            _ => vec![i + 1],
        }
    };
    let mut before: Vec<Vec<usize>> = vec![vec![]; end + 1];
    for i in 0..end {
        for n in next(i) {
            before[n].push(i);
        }
    }
    // This computes the postorder of the reversed graph, starting from the end.
    let (mut order, mut number) = (vec![], vec![usize::MAX; end + 1]);
    let mut seen = vec![false; end + 1];
    let mut open = vec![(end, 0)];
    seen[end] = true;
    while let Some((v, k)) = open.pop() {
        match before[v].get(k) {
            Some(u) => {
                open.push((v, k + 1));
                if !seen[*u] {
                    seen[*u] = true;
                    open.push((*u, 0));
                }
            }
            None => {
                number[v] = order.len();
                order.push(v);
            }
        }
    }
    let mut join = vec![usize::MAX; end + 1];
    join[end] = end;
    let mut changed = true;
    while changed {
        changed = false;
        for v in order.iter().rev().copied().filter(|v| *v != end) {
            let mut found = usize::MAX;
            for mut n in next(v).into_iter().filter(|n| join[*n] != usize::MAX) {
                if found == usize::MAX {
                    found = n;
                    continue;
                }
                while n != found {
                    if number[n] < number[found] {
                        n = join[n];
                    } else {
                        found = join[found];
                    }
                }
            }
            if found != join[v] {
                join[v] = found;
                changed = true;
            }
        }
    }
    // An endless loop never reaches the end and has no join, so its lanes stay apart.
    join.into_iter().take(end).map(|j| if j == usize::MAX { end as u32 } else { j as u32 }).collect()
}
