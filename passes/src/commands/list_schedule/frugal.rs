//! An order of a body's commands that keeps few bytes in use: what gives memory back comes first, what takes some comes
//! in the order of the graph. (Greedy by the change in bytes, as register-pressure schedulers are.)

use std::collections::BTreeSet;

/// Buffers that share memory with others, and which of them each command touches.
pub struct SharedBuffers {
    pub bytes: Vec<u64>,
    /// Per command, the buffers that it touches, each once.
    pub of: Vec<Vec<usize>>,
    /// Which buffers are in use before the first command, and which after the last one.
    pub before: Vec<bool>,
    pub behind: Vec<bool>,
}

/// The commands, each after all that it is a user of.
pub fn order(users: &[BTreeSet<usize>], touched: &SharedBuffers) -> Vec<usize> {
    let mut first: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); users.len()];
    for (k, users) in users.iter().enumerate() {
        users.iter().for_each(|user| {
            first[ir::fault!("list_schedule.frugal.user", k, *user)].insert(k);
        });
    }
    list(users, &first, touched)
}

/// The same from the last command to the first: then what takes memory comes as late as it can.
pub fn order_backward(users: &[BTreeSet<usize>], touched: &SharedBuffers) -> Vec<usize> {
    let last = users.len().saturating_sub(1);
    let mut after: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); users.len()];
    let mut before = after.clone();
    for (k, users) in users.iter().enumerate() {
        for user in users {
            after[last - user].insert(last - k);
            before[last - k].insert(last - user);
        }
    }
    let of = touched.of.iter().rev().cloned().collect();
    let touched = SharedBuffers { bytes: touched.bytes.clone(), of, before: touched.behind.clone(), behind: touched.before.clone() };
    list(&after, &before, &touched).into_iter().rev().map(|k| last - k).collect()
}

fn list(users: &[BTreeSet<usize>], first: &[BTreeSet<usize>], touched: &SharedBuffers) -> Vec<usize> {
    let mut needs: Vec<usize> = first.iter().map(BTreeSet::len).collect();
    let mut there = touched.before.clone();
    let mut left: Vec<usize> = touched.behind.iter().map(|stays| usize::from(*stays)).collect();
    touched.of.iter().flatten().for_each(|b| left[*b] += 1);
    let mut ready: BTreeSet<usize> = (0..users.len()).filter(|k| needs[*k] == 0).collect();
    let mut out = Vec::with_capacity(users.len());
    while !ready.is_empty() {
        let change = |k: &usize| {
            let of = |b: &usize| {
                let bytes = touched.bytes[*b] as i128;
                i128::from(!there[*b]) * bytes - i128::from(left[*b] == 1) * bytes
            };
            touched.of[*k].iter().map(of).sum::<i128>()
        };
        // Of the commands that take memory, the first is chosen.
        let k = ready.iter().copied().min_by_key(|k| (change(k).min(1), *k)).expect("invariant: it is not empty");
        ready.remove(&k);
        for b in &touched.of[k] {
            there[*b] = true;
            left[*b] -= 1;
        }
        for user in &users[k] {
            needs[*user] -= 1;
            if needs[*user] == 0 {
                ready.insert(*user);
            }
        }
        out.push(k);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two chains take 8 bytes each, then 1, and leave 1 for the command that joins both.
    #[test]
    fn what_gives_memory_back_comes_first() {
        let edges = [(0, 2), (1, 3), (2, 4), (3, 4)];
        let mut users = vec![BTreeSet::new(); 5];
        edges.iter().for_each(|(from, to)| {
            users[*from].insert(*to);
        });
        let of = vec![vec![0], vec![1], vec![0, 2], vec![1, 3], vec![2, 3]];
        let touched = SharedBuffers { bytes: vec![8, 8, 1, 1], of, before: vec![false; 4], behind: vec![false; 4] };
        assert_eq!(order(&users, &touched), [0, 2, 1, 3, 4]);
        assert_eq!(order_backward(&users, &touched), [0, 2, 1, 3, 4]);
    }
}
