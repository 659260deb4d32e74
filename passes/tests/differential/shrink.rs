//! Makes a triple that is wrong smaller, as long as it stays wrong in the same way.

use crate::generate::Triple;
use crate::harness::{Case, Data, attempt};
use ir::op::DType;
use ir::options::{ActivationOffload, Counts, Cuts, MemoryOrder, MoeBuffer, Offload, ParamOffload, Recompute, RowChoice, TpOverlap, Zero};
use ir::pipeline::Schedule;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Simpler variants of a case.
const SIMPLER: &[fn(&mut Case)] = &[
    |c| c.data = Data::Real,
    |c| c.precision = DType::F32,
    |c| c.recompute = Recompute::None,
    |c| c.tp_overlap = TpOverlap::Off,
    |c| c.rows = RowChoice::Rules,
    |c| c.zero = Zero::None,
    |c| c.pairs = false,
    |c| c.memory_order = MemoryOrder::Time,
    |c| c.param_offload = ParamOffload::Off,
    |c| (c.offload, c.param_offload) = (Offload::Off, ParamOffload::Off),
    |c| c.activation_offload = ActivationOffload::Off,
    |c| c.tf32 = false,
    |c| c.replicas = 1,
    |c| c.logits = 1,
    |c| c.segments = 1,
    |c| c.moe_buffer = MoeBuffer::Whole,
    |c| c.moe_passes = 1,
    |c| c.layout = Cuts::Even { embedding: Counts::AsNothing, loss: Counts::AsNothing },
    |c| (c.schedule, c.vpp, c.group) = (Schedule::OneFOneB, None, None),
    |c| (c.schedule, c.pp, c.vpp, c.group) = (Schedule::OneFOneB, 1, None, None),
    |c| (c.vpp, c.group) = (None, None),
    |c| c.etp = None,
    |c| c.ep = 1,
    |c| (c.ep, c.etp) = (1, None),
    |c| c.sp = false,
    |c| c.tp = 1,
    |c| c.cp = 1,
    |c| (c.global_batch, c.dp, c.replicas) = (c.global_batch / c.dp, 1, 1),
    |c| c.global_batch = c.micro_batch * c.dp,
    |c| (c.global_batch, c.micro_batch) = (c.global_batch / c.micro_batch, 1),
    |c| c.inline_ops = false,
    |c| c.bucket_size = None,
];

/// The error of a triple without its numbers. `None` if it is right or refused.
fn wrong(t: &Triple) -> Option<String> {
    let ran = catch_unwind(AssertUnwindSafe(|| attempt(&t.text, &[], &t.case, &t.ranges)));
    let text = match ran {
        Ok(Ok(_)) => return None,
        Ok(Err(e)) if e.starts_with("error[") => return None,
        Ok(Err(e)) => e,
        Err(_) => "panic".into(),
    };
    if text.contains(" instead of ") {
        return Some("differs".into());
    }
    // Numbers and text in brackets are removed from the message.
    let mut open = 0;
    let mut plain = |c: char| {
        open += i32::from(c == '(') - i32::from(c == ')');
        open == 0 && !c.is_ascii_digit()
    };
    Some(text.chars().filter(|c| plain(*c)).collect())
}

/// The smallest triple that simpler cases and texts with fewer lines lead to.
pub fn shrunk(mut best: Triple) -> Triple {
    let Some(how) = wrong(&best) else { return best };
    loop {
        let before = (best.case.clone(), best.text.clone());
        for simpler in SIMPLER {
            let mut case = best.case.clone();
            simpler(&mut case);
            let next = Triple { case, text: best.text.clone(), ranges: best.ranges.clone(), whole: best.whole };
            if next.case != best.case && wrong(&next).as_ref() == Some(&how) {
                best = next;
            }
        }
        // Longer runs of lines are tried first, so that a block goes as a whole.
        for run in (1..=8).rev() {
            let mut at = 1;
            loop {
                let lines: Vec<&str> = best.text.lines().collect();
                if at + run > lines.len() {
                    break;
                }
                let text = [&lines[..at], &lines[at + run..]].concat().join("\n");
                let next = Triple { case: best.case.clone(), text, ranges: best.ranges.clone(), whole: best.whole };
                if wrong(&next).as_ref() == Some(&how) { best = next } else { at += 1 }
            }
        }
        if before == (best.case.clone(), best.text.clone()) {
            return best;
        }
    }
}
