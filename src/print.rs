//! All that mcc prints goes through here, and no print ends a run: standard output and standard error may be closed,
//! full, or without a reader.
//!
//! [`out!`] prints what a command was asked for: where that cannot be printed, the command ends. [`progress!`] prints
//! what goes on beside work that is worth more than its report: where that cannot be printed, it is said once and the
//! work goes on. [`note!`] prints to standard error, after which there is nowhere left to complain.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Why a command could not print what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum PrintError {
    /// Such as `head` in `mcc dump .. | head`: it has what it wanted.
    #[error("the reader of standard output is gone")]
    ReaderGone,
    #[error("cannot write to standard output: {0}")]
    Write(io::Error),
}

impl From<io::Error> for PrintError {
    fn from(cause: io::Error) -> PrintError {
        match cause.kind() {
            ErrorKind::BrokenPipe => PrintError::ReaderGone,
            _ => PrintError::Write(cause),
        }
    }
}

/// As `print!`, with a `Result<(), PrintError>`. A line ends with the `\n` that is written.
macro_rules! out {
    ($($text:tt)*) => { $crate::print::print(format_args!($($text)*)) };
}

/// As [`out!`], of what was done: files that are written are worth more than the report of them, so that a command
/// whose report cannot be printed has not failed.
macro_rules! report {
    ($($text:tt)*) => { $crate::print::print_report(format_args!($($text)*)) };
}

/// A line on standard output, if it can be printed.
macro_rules! progress {
    ($($text:tt)*) => { $crate::print::print_or_go_on(format_args!($($text)*)) };
}

/// A line on standard error, if it can be printed.
macro_rules! note {
    ($($text:tt)*) => { $crate::print::print_error(format_args!($($text)*)) };
}

pub(crate) use {note, out, progress, report};

/// What [`out!`] calls.
pub fn print(text: Arguments) -> Result<(), PrintError> {
    let mut stdout = io::stdout().lock();
    stdout.write_fmt(text)?;
    Ok(stdout.flush()?)
}

/// What [`progress!`] calls.
pub fn print_or_go_on(text: Arguments) {
    static LOST: AtomicBool = AtomicBool::new(false);
    if LOST.load(Ordering::Relaxed) {
        return;
    }
    if let Err(cause) = print(format_args!("{text}\n")) {
        LOST.store(true, Ordering::Relaxed);
        print_error(format_args!("warning: {cause}; nothing more is printed there, and the work goes on"));
    }
}

/// What [`report!`] calls.
pub fn print_report(text: Arguments) {
    if let Err(cause @ PrintError::Write(_)) = print(text) {
        print_error(format_args!("warning: {cause}; what was to be written is written"));
    }
}

/// What [`note!`] calls.
pub fn print_error(text: Arguments) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Ascending numbers, runs of them in short: `0 to 3, 6`, and `0 to 56 by 8` of four or more.
pub fn runs(list: &[u64]) -> String {
    let (mut named, mut rest) = (vec![], list);
    while let [first, behind @ ..] = rest {
        let step = behind.first().and_then(|second| second.checked_sub(*first)).unwrap_or(0);
        let more = (1..).zip(behind).take_while(|(k, n)| **n == first + k * step).count();
        let counts = step == 1 || step > 1 && more >= 3;
        let more = if counts { more } else { 0 };
        named.push(match (more, step) {
            (0, _) => first.to_string(),
            (_, 1) => format!("{first} to {}", behind[more - 1]),
            (_, step) => format!("{first} to {} by {step}", behind[more - 1]),
        });
        rest = &behind[more..];
    }
    named.join(", ")
}

#[cfg(test)]
mod tests {
    use super::runs;

    #[test]
    fn numbers_that_follow_each_other_are_runs() {
        for (list, text) in [
            (&[][..], ""),
            (&[5], "5"),
            (&[0, 1, 2, 6], "0 to 2, 6"),
            (&[0, 8, 16], "0, 8, 16"),
            (&[0, 8, 16, 24, 25, 26], "0 to 24 by 8, 25 to 26"),
            (&[3, 3, 1], "3, 3, 1"),
        ] {
            assert_eq!(runs(list), text);
        }
    }
}
