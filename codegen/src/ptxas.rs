//! NVIDIA's assembler, where it is at hand: PTX to a GPU's own code, and what that needs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// `ptxas` and `nvdisasm` in a directory. `codegen/tools/ptxas.sh` puts them there.
#[derive(Clone, Debug)]
pub struct Ptxas {
    directory: PathBuf,
}

/// Why there is no code.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum PtxasError {
    #[error("{tool}: {error}")]
    Io { tool: String, error: std::io::Error },
    #[error("{tool} for {cpu}:\n{text}")]
    Refused { tool: &'static str, cpu: String, text: String },
    /// Another version may word its report in another way: no number of it is believed then.
    #[error("ptxas does not say how many`{what}` a kernel takes:\n{text}")]
    Unread { what: &'static str, text: String },
}

/// Assembled code of one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assembled {
    /// The GPU's own code, an ELF file.
    pub cubin: Vec<u8>,
    /// Registers of a thread.
    pub registers: u64,
    /// Bytes of static shared memory of a block.
    pub shared_bytes: u64,
    /// Bytes of a thread's stack: zero in a kernel worth running.
    pub stack_bytes: u64,
    /// Bytes of registers that a thread stores to its stack and loads from it: zero in a kernel worth running.
    pub spill_bytes: u64,
    /// Lines of what it says that have a warning, or advice of the numbers `C75..`.
    pub warnings: Vec<String>,
}

/// The number before `what` in a text, or nothing.
fn number_before(text: &str, what: &str) -> Option<u64> {
    text[..text.find(what)?].rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

impl Ptxas {
    /// The assembler in `directory`, if it is there; perhaps without what reads its code again.
    pub fn assembler(directory: &Path) -> Option<Ptxas> {
        directory.join("ptxas").is_file().then(|| Ptxas { directory: directory.into() })
    }

    /// The tools in `directory`, if they are there.
    pub fn at(directory: &Path) -> Option<Ptxas> {
        ["ptxas", "nvdisasm"].iter().all(|tool| directory.join(tool).is_file()).then(|| Ptxas { directory: directory.into() })
    }

    /// The pinned tools in `directory`, fetched from the Python package index unless they are there: for tests, in a
    /// checkout, with a network.
    ///
    /// # Errors
    /// What the script says that fetches them.
    pub fn fetched(directory: &Path) -> Result<Ptxas, String> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/ptxas.sh");
        let output = Command::new("bash").arg(script).arg(directory).output().map_err(|e| format!("bash: {e}"))?;
        Ptxas::at(directory).ok_or_else(|| String::from_utf8_lossy(&output.stderr).into_owned())
    }

    fn run(&self, tool: &'static str, cpu: &str, arguments: &[&std::ffi::OsStr]) -> Result<Output, PtxasError> {
        let error = |error| PtxasError::Io { tool: tool.into(), error };
        let output = Command::new(self.directory.join(tool)).args(arguments).output().map_err(error)?;
        let text = || String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(output) } else { Err(PtxasError::Refused { tool, cpu: cpu.into(), text: text() }) }
    }

    /// Assembles a module with one kernel for `cpu`: `sm_80`, `sm_90a`.
    ///
    /// # Errors
    /// The tool does not run, or the text is wrong: with the tool's words.
    pub fn assemble(&self, ptx: &str, cpu: &str) -> Result<Assembled, PtxasError> {
        let io = |error| PtxasError::Io { tool: "a temporary directory".into(), error };
        let directory = tempfile::tempdir().map_err(io)?;
        let [source, target] = ["kernel.ptx", "kernel.cubin"].map(|name| directory.path().join(name));
        std::fs::write(&source, ptx).map_err(io)?;
        let arch = format!("-arch={cpu}");
        let output = self.run("ptxas", cpu, &["-v".as_ref(), arch.as_ref(), source.as_ref(), "-o".as_ref(), target.as_ref()])?;
        let text = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
        let number = |what| number_before(&text, what).ok_or_else(|| PtxasError::Unread { what, text: text.to_string() });
        Ok(Assembled {
            cubin: std::fs::read(&target).map_err(io)?,
            registers: number(" registers")?,
            // ptxas does not mention shared memory if a kernel has none.
            shared_bytes: number_before(&text, " bytes smem").unwrap_or(0),
            stack_bytes: number(" bytes stack frame")?,
            spill_bytes: number(" bytes spill stores")? + number(" bytes spill loads")?,
            warnings: text.lines().filter(|l| l.contains("warning") || l.contains("(C75")).map(str::to_owned).collect(),
        })
    }

    /// How often each instruction occurs in assembled code, by its name without modifiers: `HMMA`, `LDGSTS`, ...
    ///
    /// # Errors
    /// The tool does not run or does not know the code.
    pub fn instructions(&self, cubin: &[u8]) -> Result<BTreeMap<String, usize>, PtxasError> {
        let file = tempfile::NamedTempFile::new().and_then(|f| std::fs::write(f.path(), cubin).map(|()| f));
        let file = file.map_err(|error| PtxasError::Io { tool: "a temporary file".into(), error })?;
        let output = self.run("nvdisasm", "", &["-c".as_ref(), file.path().as_ref()])?;
        let mut counts = BTreeMap::new();
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            // A line of code looks like `/*0040*/  @!P0 LDG.E R2, [R4] ;`.
            let Some((_, code)) = line.trim_start().strip_prefix("/*").and_then(|rest| rest.split_once("*/")) else { continue };
            let name = code.split_whitespace().find(|word| !word.starts_with('@')).map(|word| word.split('.').next().unwrap_or(word));
            if let Some(name) = name.filter(|n| n.starts_with(|c: char| c.is_ascii_uppercase())) {
                *counts.entry(name.trim_end_matches(';').to_owned()).or_insert(0) += 1;
            }
        }
        Ok(counts)
    }
}
