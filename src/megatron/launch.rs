//! The command that starts the training: how many ranks it starts, by which launcher, and with which flags.

use super::text::Text;

/// A training that a script starts.
#[derive(Clone, Debug)]
pub struct Launch {
    pub line: usize,
    /// The words before the program: launchers and the interpreter.
    pub before: Vec<Text>,
    pub program: Text,
    pub flags: Vec<Text>,
}

/// Who starts the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// The program itself, as one rank.
    Nobody,
    Torchrun,
    Slurm,
    Mpi,
}

/// Flags by which a command is a training whatever its program is called.
const TRAINS: &[&str] = &["--train-iters", "--train-samples", "--lr"];

/// The training that a command with these words starts, if it does.
pub fn find(words: &[Text], line: usize) -> Option<Launch> {
    let at = words.iter().position(|w| w.ends_with(".py"))?;
    let flags = &words[at + 1..];
    let name = words[at].filled(|_| String::new());
    let is_named = name.rsplit('/').next().is_some_and(|file| file.starts_with("pretrain"));
    let has_flags = flags.iter().any(|f| f.whole().is_some_and(|f| TRAINS.contains(&f.split('=').next().unwrap_or(f))));
    (is_named || has_flags).then(|| Launch { line, before: words[..at].to_vec(), program: words[at].clone(), flags: flags.to_vec() })
}

/// Of `srun .. bash -c 'text'`: the words before the shell, and what it is to run.
pub fn shell_text(words: &[Text]) -> Option<(&[Text], &Text)> {
    let at = words.iter().position(|w| w.whole().is_some_and(|w| matches!(w.rsplit('/').next(), Some("bash" | "sh"))))?;
    let rest = &words[at + 1..];
    let c = rest.iter().position(|w| w.whole().is_some_and(|w| w.starts_with('-') && !w.starts_with("--") && w.ends_with('c')))?;
    rest.get(c + 1).map(|text| (&words[..at], text))
}

impl Launch {
    /// The file's name of the program: `pretrain_gpt.py`.
    pub fn file(&self) -> String {
        let name = self.program.filled(|_| String::new());
        name.rsplit('/').next().unwrap_or("").into()
    }

    pub fn launcher(&self) -> Launcher {
        let has = |names: &[&str]| self.before.iter().any(|w| w.whole().is_some_and(|w| names.contains(&w.rsplit('/').next().unwrap_or(w))));
        match () {
            () if has(&["torchrun", "torch.distributed.run", "torch.distributed.launch"]) => Launcher::Torchrun,
            () if has(&["srun"]) => Launcher::Slurm,
            () if has(&["mpirun", "mpiexec"]) => Launcher::Mpi,
            () => Launcher::Nobody,
        }
    }

    /// The last value of an option before the program, under any of these names: `--nnodes 2`, `--nnodes=2`, `-N2`.
    pub fn option(&self, names: &[&str]) -> Option<Text> {
        let mut found = None;
        for (k, word) in self.before.iter().enumerate() {
            let (name, own) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (word.clone(), None),
            };
            let Some(name) = name.whole() else { continue };
            let spelled = if name.starts_with("--") { name.replace('_', "-") } else { name.into() };
            if names.contains(&spelled.as_str()) {
                found = own.or_else(|| self.before.get(k + 1).cloned());
            } else if let Some(short) = names.iter().find(|n| n.len() == 2 && spelled.len() > 2 && spelled.starts_with(**n)) {
                found = Some(Text::known(&spelled[short.len()..], word.line));
            }
        }
        found
    }

    /// The words by which several machines start `mcc run` as they did the program: without the interpreter,
    /// and for torchrun with `--no-python`.
    pub fn words(&self) -> Vec<Text> {
        let mut out = vec![];
        let mut words = self.before.iter().peekable();
        while let Some(word) = words.next() {
            let name = word.whole().map(|w| w.rsplit('/').next().unwrap_or(w).to_string()).unwrap_or_default();
            match name.as_str() {
                "torchrun" => out.extend([word.clone(), Text::known("--no-python", word.line)]),
                _ if name.starts_with("python") => {
                    // The interpreter may have flags of its own: `python -u -m torch.distributed.run`.
                    while words.next_if(|w| w.whole().is_some_and(|w| w.starts_with('-') && w != "-m")).is_some() {}
                    if words.next_if(|w| w.whole() == Some("-m")).is_some() && words.next().is_some() {
                        out.extend(["torchrun", "--no-python"].map(|w| Text::known(w, word.line)));
                    }
                }
                "exec" | "time" | "nohup" => {}
                _ => out.push(word.clone()),
            }
        }
        out
    }
}

/// Flags of a batch script: `#SBATCH --nodes=4`.
pub fn batch_options(source: &str) -> Vec<(String, Text)> {
    let mut out = vec![];
    for (k, line) in source.lines().enumerate() {
        let Some(options) = line.strip_prefix("#SBATCH") else { continue };
        let mut words = options.split(|c: char| c.is_whitespace() || c == '=').filter(|w| !w.is_empty()).peekable();
        while let Some(word) = words.next() {
            if word.starts_with('#') {
                break;
            }
            if word.starts_with('-')
                && let Some(value) = words.next_if(|w| !w.starts_with('-'))
            {
                out.push((word.into(), Text::known(value, k + 1)));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<Text> {
        line.split_whitespace().map(|w| Text::known(w, 1)).collect()
    }

    #[test]
    fn launchers_are_kept_and_interpreters_are_not() {
        let shown = |line: &str| {
            let launch = find(&words(line), 1).expect("it trains");
            let words: Vec<String> = launch.words().iter().map(|w| w.whole().unwrap().to_string()).collect();
            (words.join(" "), launch.launcher())
        };
        let run = "pretrain_gpt.py --num-layers 2";
        assert_eq!(shown(&format!("torchrun --nnodes 2 {run}")), ("torchrun --no-python --nnodes 2".into(), Launcher::Torchrun));
        let module = format!("python3 -u -m torch.distributed.run --nnodes=2 {run}");
        assert_eq!(shown(&module), ("torchrun --no-python --nnodes=2".into(), Launcher::Torchrun));
        assert_eq!(shown(&format!("srun -N2 python -u a/{run}")), ("srun -N2".into(), Launcher::Slurm));
        assert_eq!(shown(&format!("python {run}")), (String::new(), Launcher::Nobody));
        assert!(find(&words("python tools/preprocess_data.py --input a"), 1).is_none());
    }

    #[test]
    fn options_are_found_however_they_are_written() {
        let launch = find(&words("srun -N2 --ntasks_per_node=8 torchrun --nproc-per-node 4 pretrain_gpt.py"), 1).expect("it trains");
        let of = |names: &[&str]| launch.option(names).map(|t| t.whole().unwrap().to_string());
        assert_eq!(of(&["-N", "--nodes"]), Some("2".into()));
        assert_eq!(of(&["--ntasks-per-node"]), Some("8".into()));
        assert_eq!(of(&["--nproc-per-node"]), Some("4".into()));
        assert_eq!(of(&["--nnodes"]), None);
        let options = batch_options("#!/bin/bash\n#SBATCH --nodes=4 --exclusive -t 1:00 # a\n#SBATCH --ntasks-per-node 8\necho\n");
        let shown: Vec<_> = options.iter().map(|(n, v)| (n.as_str(), v.whole().unwrap(), v.line)).collect();
        assert_eq!(shown, [("--nodes", "4", 2), ("-t", "1:00", 2), ("--ntasks-per-node", "8", 3)]);
    }
}
