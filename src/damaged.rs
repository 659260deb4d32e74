//! Checkpoints that are not as they were written: a run that finds so before its first step takes the one before.

use crate::print::note;
use runtime::checkpoint::{self, Checkpoint};
use runtime::paths;
use std::fs;
use std::path::{Path, PathBuf};

/// What is wrong with a checkpoint, if anything is: all of it is read.
pub fn damage(dir: &Path) -> Option<String> {
    if !dir.is_dir() {
        return None;
    }
    match Checkpoint::open(dir) {
        Err(e) => Some(e.to_string()),
        Ok(found) => found.verify().err().map(|all| all.join("; ")),
    }
}

/// The last checkpoint beside this one that is of an earlier step and can be opened; those between are set aside, as
/// [`set_aside`] says.
pub fn before(dir: &Path, save: Option<&Path>) -> Option<PathBuf> {
    let (parent, name) = (dir.parent()?, dir.file_name()?.to_str()?);
    let steps = checkpoint::steps(parent).ok()?;
    let here = steps.iter().position(|step| checkpoint::step_name(*step) == name)?;
    for step in &steps[here + 1..] {
        let dir = parent.join(checkpoint::step_name(*step));
        match Checkpoint::open(&dir) {
            Ok(_) => return Some(dir),
            Err(e) => note!("warning: {e}"),
        }
        set_aside(&dir, save);
    }
    None
}

/// Gives a checkpoint a name under which no run goes on from it, if it is one of the directory to which this run
/// saves. Nothing of it is lost.
pub fn set_aside(dir: &Path, save: Option<&Path>) {
    let (Some(parent), Some(name)) = (dir.parent(), dir.file_name().and_then(|n| n.to_str())) else { return };
    if !save.is_some_and(|save| paths::same(parent, save)) {
        return;
    }
    let free = |k: u32| parent.join(if k == 0 { format!("damaged-{name}") } else { format!("damaged-{name}.{k}") });
    let Some(to) = (0..100).map(free).find(|to| !to.exists()) else { return };
    match fs::rename(dir, &to) {
        Ok(()) => note!("`{}` is set aside as `{}`", dir.display(), to.display()),
        Err(e) => note!("warning: `{}` cannot be set aside: {e}", dir.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_damaged_gets_another_name_where_a_run_saves() {
        let dir = tempfile::tempdir().expect("a directory");
        let step = dir.path().join("step-7");
        for name in ["damaged-step-7", "damaged-step-7.1"] {
            fs::create_dir(&step).expect("made");
            assert!(damage(&step).is_some_and(|what| what.contains("step-7")));
            set_aside(&step, None);
            set_aside(&step, Some(Path::new("/")));
            assert!(step.exists());
            set_aside(&step, Some(dir.path()));
            assert!(!step.exists() && dir.path().join(name).exists());
        }
        assert_eq!((damage(&step), before(&step, None)), (None, None));
    }
}
