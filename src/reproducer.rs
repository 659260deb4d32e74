//! What a bug in mcc leaves for whoever mends it: the module of the model text, which can be made smaller as a later
//! one could not, and the command that repeats what happened.

use ir::module::Module;
use ir::text::print_module;
use passes::compile::CompilerBug;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The text of a module under lines that say what is wrong with it, and how to see that again; `%s` is the text's
/// file.
pub fn text(says: &str, module: &Module, flags: &str) -> String {
    let says = says.replace('\n', "\n; ");
    format!("; mcc {}\n; {says}\n; RUN: mcc opt {flags} %s\n{}", env!("CARGO_PKG_VERSION"), print_module(module))
}

/// The flags of `mcc opt` that run these passes, or all verifiers, and damage the module after one of them.
pub fn flags(passes: &[&str], damaged: Option<&str>) -> String {
    let what = if passes.is_empty() { "--verify".to_string() } else { format!("--passes {}", passes.join(",")) };
    damaged.into_iter().fold(what, |flags, pass| flags + &format!(" --damage-after {pass}"))
}

/// Writes a reproducer into the working directory, or where temporary files go, under a name that nothing has; and
/// says what to do with it.
///
/// # Errors
/// Neither directory takes it.
pub fn leave(broken: &CompilerBug, damaged: Option<&str>) -> io::Result<Option<String>> {
    let Some(again) = &broken.reproducer else { return Ok(None) };
    let text = text(&broken.to_string(), &again.first, &flags(&again.passes, damaged));
    let path = create(Path::new(""), broken.pass, &text).or_else(|_| create(&std::env::temp_dir(), broken.pass, &text))?;
    Ok(Some(format!(
        "the model's graph is in {0}; `mcc opt {0}` repeats this with the passes up to that one, and `mcc reduce {0}` makes it smaller",
        path.display()
    )))
}

fn create(folder: &Path, pass: &str, text: &str) -> io::Result<PathBuf> {
    let names = (1..100).map(|k| if k == 1 { format!("mcc-bug-{pass}.mir") } else { format!("mcc-bug-{pass}-{k}.mir") });
    for path in names.map(|name| folder.join(name)) {
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(mut file) => return file.write_all(text.as_bytes()).map(|()| path),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}
