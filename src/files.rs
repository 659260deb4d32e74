//! Files that a command line names and that are not there: said with the flag, before anything starts.

use crate::Failure;
use crate::cli::RunArgs;
use anyhow::anyhow;
use runtime::data::{Encoding, Spec};
use std::path::Path;

/// # Errors
/// Nothing has this name.
pub fn artifact(path: &Path) -> Result<(), Failure> {
    if path.exists() {
        return Ok(());
    }
    let name = path.display();
    Err(anyhow!("there is no artifact `{name}`; `mcc compile MODEL.mdl -o {name}` writes one").into())
}

/// What a run reads, and where it writes.
///
/// # Errors
/// The first such file.
pub fn of_run(args: &RunArgs) -> Result<(), Failure> {
    let of_specs = |flag: &'static str, specs: &[String]| specs.iter().map(|s| (flag, Spec::parse(s, Encoding::Text).file)).collect::<Vec<_>>();
    let tokens = "data are a text, or token ids in a .bin or .npy";
    let read = [
        (of_specs("--data", &args.data), tokens),
        (of_specs("--valid-data", &args.valid_data), tokens),
        (args.init.iter().map(|f| ("--init", f.clone())).collect(), "`mcc run --save` writes weights, and `mcc import hf` reads foreign ones"),
        (args.resume.iter().map(|f| ("--resume", f.clone())).collect(), "`mcc run --save-state` writes one"),
    ];
    for (named, way_out) in &read {
        if let Some((flag, file)) = named.iter().find(|(_, file)| !file.exists()) {
            return Err(anyhow!("`{flag} {}`: there is no such file; {way_out}", file.display()).into());
        }
    }
    let written = [("--save", &args.save), ("--save-state", &args.save_state), ("--metrics", &args.metrics), ("--trace", &args.trace)];
    for (flag, file) in written.iter().filter_map(|(flag, file)| Some((flag, file.as_ref()?))) {
        let parent = file.parent().filter(|p| !p.as_os_str().is_empty());
        if let Some(parent) = parent.filter(|p| !p.is_dir()) {
            let (file, parent) = (file.display(), parent.display());
            return Err(anyhow!("`{flag} {file}`: there is no directory `{parent}`; `mkdir -p {parent}` makes it").into());
        }
        if file.is_dir() {
            return Err(anyhow!("`{flag} {0}` is a directory; name a file, such as `{0}/{1}`", file.display(), flag.trim_start_matches('-')).into());
        }
    }
    Ok(())
}
