//! Whether a kernel orders what it does, and not more than it must.

use super::{everything, run_ptx};
use crate::object::{self, Emit};
use crate::target::Target;
use emulator::{Options, Timing};
use ir::kernel::Kernel;

/// Schedules with background copies and products as late and as early as they may be, and at random, and with warps
/// in several orders.
fn all_options() -> Vec<Options> {
    let timings = [Timing::Late, Timing::Random, Timing::Early];
    let options = |timing, seed| Options { timing, seed, threads: 1, limit: 1 << 22, ..Options::default() };
    (0..3).flat_map(|seed| timings.map(|timing| options(timing, seed))).collect()
}

/// A line that is left out; a wait for a phase is over at once.
fn without(line: &str) -> String {
    match line.split_once("mbarrier.try_wait").and_then(|(before, rest)| Some((before, rest.split_once(';')?.1))) {
        Some((before, after)) => format!("{before}setp.eq.u32 p, 0, 0;{after}"),
        None => String::new(),
    }
}

/// Lines of which one is left out in a run of all tests; `make test-long-kernels` leaves out each.
const SAMPLED: usize = 5;

/// Checks that a kernel computes the same bits in every schedule, and that without any one line that has one of
/// `ordering`, some schedule faults or gives another result. One of [`SAMPLED`] lines is tried.
pub fn every_line_is_needed(kernel: &Kernel, cpu: &str, inputs: &[Vec<f64>], ordering: &[&str], at_least: usize) {
    every_line_but(kernel, cpu, inputs, ordering, at_least, 0);
}

/// The same, but for so many lines that this kernel does not need.
pub fn every_line_but(kernel: &Kernel, cpu: &str, inputs: &[Vec<f64>], ordering: &[&str], at_least: usize, spare: usize) {
    let compiled = object::compile(kernel, &Target::gpu(cpu), Emit::default()).expect("the kernel compiles");
    let text = String::from_utf8(compiled.object.clone()).expect("PTX is text");
    let run = |text: &str, options| run_ptx(kernel, &compiled, text, options, inputs, &[], f64::NAN);
    let mut results = all_options().into_iter().map(|options| run(&text, options).unwrap_or_else(|e| panic!("{options:?}: {e}\n{text}")));
    let want = results.next().expect("there are schedules");
    assert!(results.all(|got| got == want), "results depend on the schedule\n{text}");
    let lines: Vec<&str> = text.lines().collect();
    // Some lines have several instructions.
    let orders = |line: &&str| line.split(';').any(|instruction| ordering.iter().any(|o| instruction.trim_start().starts_with(o)));
    let tried: Vec<usize> = (0..lines.len()).filter(|k| orders(&lines[*k])).collect();
    let unneeded = |number: &usize| {
        let changed: String = lines.iter().enumerate().map(|(k, l)| if k == *number { without(l) + "\n" } else { format!("{l}\n") }).collect();
        !all_options().into_iter().any(|options| run(&changed, options).map_or(true, |out| out != want))
    };
    let every = if everything() { 1 } else { SAMPLED };
    let unneeded: Vec<String> =
        tried.iter().copied().step_by(every).filter(unneeded).map(|k| format!("line {}, `{}`", k + 1, lines[k].trim())).collect();
    assert!(if everything() { unneeded.len() == spare } else { unneeded.len() <= spare }, "nothing is found without any of {unneeded:?}\n{text}");
    assert!(tried.len() >= at_least, "only {} lines order something", tried.len());
}
