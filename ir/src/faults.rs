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
pub use sources::{Fault, in_sources};
#[cfg(feature = "faults")]
pub use watched::{on, watch};

#[cfg(feature = "faults")]
mod sources {
    use crate::random::key;
    use std::fs;
    use std::path::Path;

    /// A fault, as the sources have it.
    pub struct Fault {
        /// As `fault!` has it: `bucket.result.offset`.
        pub name: &'static str,
        /// `passes/src/local/bucket.rs:228`.
        pub place: String,
    }

    /// Every `fault!` in the sources of these crates of a workspace, in an order that mixes all of them. Files and folders called `faults` are
    /// about faults, and have none.
    ///
    /// # Panics
    /// A file cannot be read, or a fault does not begin with its name.
    pub fn in_sources(root: &Path, crates: &[&str]) -> Vec<Fault> {
        let mut found = vec![];
        crates.iter().for_each(|krate| read(root, &root.join(krate).join("src"), &mut found));
        found.sort_by_key(|f| key(f.name));
        found
    }

    fn read(root: &Path, folder: &Path, found: &mut Vec<Fault>) {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.file_stem().is_some_and(|stem| stem == "faults") {
            } else if path.is_dir() {
                read(root, &path, found);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&path).expect("text");
                let shown = path.strip_prefix(root).expect("in the workspace").display().to_string();
                let mut pieces = text.split("fault!(");
                let mut line = 1 + pieces.next().map_or(0, |before| before.matches('\n').count());
                for piece in pieces {
                    let name = piece.trim_start().strip_prefix('"').and_then(|rest| rest.split_once('"')).expect("a fault begins with its name").0;
                    found.push(Fault { name: name.to_string().leak(), place: format!("{shown}:{line}") });
                    line += piece.matches('\n').count();
                }
            }
        }
    }
}

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
