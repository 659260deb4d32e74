//! Faults: mistakes that somebody could make in a line of the compiler, kept beside the right line.
//!
//! [`fault!`](crate::fault) is an expression that has the right value, unless a test has switched its fault on: so tests see which
//! verifier refuses what comes of it. They are there with feature `faults`, which tests of `passes` ask for; without it
//! [`on`] is constant, and nothing of a fault is left in what is built.

/// A value, or a wrong one where the fault of this name is on: `fault!("bucket.result.offset", 0, row)`. A name begins with that of its pass.
#[cfg(feature = "faults")]
#[macro_export]
macro_rules! fault {
    ($name:literal, $wrong:expr, $right:expr) => {
        if $crate::faults::on($name) { $wrong } else { $right }
    };
}

/// A value; the wrong one beside it has to be of its type, and is no part of the program.
#[cfg(not(feature = "faults"))]
#[macro_export]
macro_rules! fault {
    ($name:literal, $wrong:expr, $right:expr) => {
        if const { $crate::faults::on($name) } { $wrong } else { $right }
    };
}

/// Whether this fault is on.
#[cfg(not(feature = "faults"))]
pub const fn on(_: &str) -> bool {
    false
}

#[cfg(feature = "faults")]
pub use watched::{on, watch};

#[cfg(feature = "faults")]
mod watched {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    #[derive(Default)]
    struct Watch {
        on: Option<&'static str>,
        reached: BTreeSet<&'static str>,
    }

    thread_local! {
        static WATCH: RefCell<Option<Watch>> = const { RefCell::new(None) };
    }

    /// Whether this fault is on in this thread; that it was reached is noted.
    pub fn on(name: &'static str) -> bool {
        WATCH.with_borrow_mut(|watch| {
            let Some(watch) = watch else { return false };
            watch.reached.insert(name);
            watch.on == Some(name)
        })
    }

    /// Runs something in this thread, with one fault on or none, and says which were reached. Whoever wants to hear of a panic catches it within.
    pub fn watch<T>(fault: Option<&'static str>, run: impl FnOnce() -> T) -> (T, BTreeSet<&'static str>) {
        let before = WATCH.replace(Some(Watch { on: fault, ..Watch::default() }));
        let out = run();
        let watch = WATCH.replace(before);
        (out, watch.unwrap_or_default().reached)
    }
}
