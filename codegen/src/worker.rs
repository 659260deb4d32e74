//! Worker processes: compilation where LLVM may end the process, and runs of kernels where their code may.
//!
//! Protocol: frames of a 32-bit little-endian length and as many bytes. A request is postcard, as JSON has no
//! infinities; an answer is one byte, 0 and what was asked for or 1 and why not. What a compile gives is an encoded
//! kernel or a text, what a check gives postcard. One answer per request, in order. End of input ends the worker.

use crate::check::{Checker, SECONDS, Verification, Wrong};
use crate::object::{self, Compiled, Emit};
use crate::target::Target;
use ir::kernel::Kernel;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

#[derive(Serialize, Deserialize)]
enum Request {
    Compile {
        kernel: Kernel,
        target: Target,
        emit: Emit,
    },
    /// Holds an encoded kernel's code to the kernel's body; a GPU's too, where it `emulates`.
    Check {
        kernel: Kernel,
        target: Target,
        compiled: Vec<u8>,
        emulates: bool,
    },
}

const DONE: u8 = 0;
const FAILED: u8 = 1;
/// No frame is longer: guards against reading a stream that is not ours.
const MAX_FRAME: u32 = 1 << 30;

fn write_frame(to: &mut impl Write, parts: &[&[u8]]) -> io::Result<()> {
    let length: usize = parts.iter().map(|p| p.len()).sum();
    let length = u32::try_from(length).map_err(|_| io::Error::other("a frame of more than 4 GiB"))?;
    to.write_all(&length.to_le_bytes())?;
    for part in parts {
        to.write_all(part)?;
    }
    to.flush()
}

/// The next frame; nothing at the end of the stream.
fn read_frame(from: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    let mut have = 0;
    while have < length.len() {
        match from.read(&mut length[have..])? {
            0 if have == 0 => return Ok(None),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => have += n,
        }
    }
    let length = u32::from_le_bytes(length);
    if length > MAX_FRAME {
        return Err(io::Error::other("not a frame of the worker protocol"));
    }
    let mut bytes = vec![0; length as usize];
    from.read_exact(&mut bytes)?;
    Ok(Some(bytes))
}

/// The main function of a worker process: serves standard input and output, and ends when the process that started it
/// does, in the middle of a kernel too.
///
/// # Errors
/// As [`serve`].
pub fn main() -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    answer_all(io::stdin().lock(), io::stdout().lock(), Checker::limited(SECONDS))
}

/// Answers requests until the input ends.
///
/// # Errors
/// The streams fail, or a request is not of the protocol.
pub fn serve(input: impl Read, output: impl Write) -> io::Result<()> {
    answer_all(input, output, Checker::default())
}

fn answer_all(input: impl Read, output: impl Write, mut checker: Checker) -> io::Result<()> {
    let (mut input, mut output) = (BufReader::new(input), BufWriter::new(output));
    while let Some(bytes) = read_frame(&mut input)? {
        match postcard::from_bytes(&bytes).map_err(io::Error::other)? {
            Request::Compile { kernel, target, emit } => match object::compile(&kernel, &target, emit) {
                Ok(compiled) => write_frame(&mut output, &[&[DONE], &compiled.encode()])?,
                Err(error) => write_frame(&mut output, &[&[FAILED], error.to_string().as_bytes()])?,
            },
            Request::Check { kernel, target, compiled, emulates } => {
                checker = checker.emulates(emulates);
                let compiled = Compiled::decode(&compiled).ok_or_else(|| io::Error::other("no kernel to check"))?;
                let plain = "invariant: what came of a check is plain data";
                match checker.check(&kernel, &compiled, &target) {
                    Ok(verification) => write_frame(&mut output, &[&[DONE], &postcard::to_stdvec(&verification).expect(plain)])?,
                    Err(wrong) => write_frame(&mut output, &[&[FAILED], &postcard::to_stdvec(&wrong).expect(plain)])?,
                }
            }
        }
    }
    Ok(())
}

/// How to start a worker: a program that calls [`serve`] on its standard streams.
#[derive(Clone, Debug)]
pub struct WorkerCommand {
    /// Path of the executable.
    pub program: PathBuf,
    /// What follows its name on the command line.
    pub arguments: Vec<OsString>,
}

/// Why a worker gave no kernel.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum WorkerError {
    #[error("cannot start the worker {program}: {error}")]
    Start { program: PathBuf, error: io::Error },
    /// The kernel is at fault, or what the code generator makes of it.
    #[error("{0}")]
    Refused(String),
    /// The process ended in the middle: a bug of the code generator or of LLVM.
    #[error("the worker crashed ({status}){}", if .messages.is_empty() { String::new() } else { format!(":\n{}", .messages) })]
    Crashed { status: ExitStatus, messages: String },
    /// The kernel's code, in its run, ended the process, or did not end: a bug of the code generator.
    #[error("its code {}", ended(*.0))]
    CodeCrashed(ExitStatus),
    #[error(transparent)]
    Wrong(#[from] Wrong),
    #[error("the worker does not follow the protocol: {0}")]
    Protocol(String),
}

/// How code ended the process that it ran in.
fn ended(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) if signal == Signal::XCPU.as_raw() => format!("has not ended on random operands after {SECONDS} s of a processor"),
        _ => format!("crashed on random operands ({status})"),
    }
}

/// A running worker.
pub struct Worker {
    child: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    /// What it writes to its standard error.
    messages: std::fs::File,
}

impl Worker {
    /// # Errors
    /// The program cannot be started.
    pub fn start(command: &WorkerCommand) -> Result<Worker, WorkerError> {
        let failed = |error| WorkerError::Start { program: command.program.clone(), error };
        let messages = tempfile::tempfile().map_err(failed)?;
        let mut child = Command::new(&command.program)
            .args(&command.arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(messages.try_clone().map_err(failed)?)
            .spawn()
            .map_err(failed)?;
        let requests = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().expect("invariant: standard output is piped"));
        Ok(Worker { child, requests, answers, messages })
    }

    /// Of its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// # Errors
    /// The kernel does not compile, or the worker is lost; after [`WorkerError::Crashed`] or
    /// [`WorkerError::Protocol`] it is of no more use.
    pub fn compile(&mut self, kernel: &Kernel, target: &Target, emit: Emit) -> Result<Compiled, WorkerError> {
        let answer = self.answer(&Request::Compile { kernel: kernel.clone(), target: target.clone(), emit })?;
        match answer.split_first() {
            Some((&DONE, rest)) => Compiled::decode(rest).ok_or_else(|| WorkerError::Protocol("an answer that is no kernel".into())),
            Some((&FAILED, text)) => Err(WorkerError::Refused(String::from_utf8_lossy(text).into_owned())),
            _ => Err(WorkerError::Protocol("an answer of no known kind".into())),
        }
    }

    /// Holds a kernel's code to its body.
    ///
    /// # Errors
    /// It computes something else, or the worker is lost, as after [`WorkerError::CodeCrashed`].
    pub fn check(&mut self, kernel: &Kernel, target: &Target, compiled: &Compiled, emulates: bool) -> Result<Verification, WorkerError> {
        let request = Request::Check { kernel: kernel.clone(), target: target.clone(), compiled: compiled.encode(), emulates };
        let answer = self.answer(&request).map_err(|error| match error {
            WorkerError::Crashed { status, .. } => WorkerError::CodeCrashed(status),
            other => other,
        })?;
        let unknown = |_| WorkerError::Protocol("an answer that is no check's".into());
        match answer.split_first() {
            Some((&DONE, rest)) => postcard::from_bytes(rest).map_err(unknown),
            Some((&FAILED, rest)) => Err(postcard::from_bytes::<Wrong>(rest).map_err(unknown)?.into()),
            _ => Err(WorkerError::Protocol("an answer of no known kind".into())),
        }
    }

    fn answer(&mut self, request: &Request) -> Result<Vec<u8>, WorkerError> {
        let bytes = postcard::to_stdvec(request).expect("invariant: a request is plain data");
        let stream = self.requests.as_mut().expect("invariant: a worker in use has its input");
        match write_frame(stream, &[&bytes]).and_then(|()| read_frame(&mut self.answers)) {
            Ok(Some(answer)) => Ok(answer),
            // Either stream has closed, so the process is gone or about to be.
            Ok(None) | Err(_) => Err(self.crashed()),
        }
    }

    fn crashed(&mut self) -> WorkerError {
        self.requests = None;
        let status = match self.child.wait() {
            Ok(status) => status,
            Err(error) => return WorkerError::Protocol(error.to_string()),
        };
        let mut messages = String::new();
        let read = self.messages.rewind().and_then(|()| (&self.messages).take(4000).read_to_string(&mut messages));
        if read.is_err() {
            messages.clear();
        }
        WorkerError::Crashed { status, messages: messages.trim_end().into() }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The end of its input ends a worker. One that does not follow the protocol is killed.
        self.requests = None;
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::KernelDraft;
    use ir::kernel::Family;
    use ir::op::{DType, Op, Unary};

    fn kernel() -> Kernel {
        let mut make = KernelDraft::default();
        let d = make.dim("d", 5);
        let x = make.input(DType::F32, &[d]);
        let y = make.op(Op::Unary(Unary::Exp), &[x]);
        make.kernel(Family::Loops { grid: vec![d] }, &[y])
    }

    fn shell(script: &str) -> WorkerCommand {
        WorkerCommand { program: "/bin/sh".into(), arguments: vec!["-c".into(), script.into()] }
    }

    #[test]
    fn requests_are_answered_in_order() {
        let mut bad = kernel();
        bad.outputs.clear();
        let mut requests = Vec::new();
        for kernel in [kernel(), bad] {
            let request = Request::Compile { kernel, target: Target::x86_64_v3(), emit: Emit { llvm: true, ..Emit::default() } };
            write_frame(&mut requests, &[&postcard::to_stdvec(&request).expect("plain data")]).expect("written");
        }
        let mut answers = Vec::new();
        serve(requests.as_slice(), &mut answers).expect("served");
        let mut answers = answers.as_slice();
        let first = read_frame(&mut answers).expect("a frame").expect("an answer");
        let compiled = Compiled::decode(&first[1..]).expect("a kernel");
        assert_eq!((first[0], &compiled.name), (DONE, &kernel().name()));
        assert!(compiled.llvm.is_some_and(|text| text.contains(&compiled.name)));
        let second = read_frame(&mut answers).expect("a frame").expect("an answer");
        assert_eq!(second[0], FAILED);
        assert!(String::from_utf8_lossy(&second[1..]).contains("no output"));
        assert!(read_frame(&mut answers).expect("the end").is_none());
    }

    #[test]
    fn a_worker_that_dies_is_a_crash_with_its_last_words() {
        let mut worker = Worker::start(&shell("echo LLVM ERROR: cannot select >&2; kill -ABRT $$")).expect("started");
        match worker.compile(&kernel(), &Target::x86_64_v3(), Emit::default()) {
            Err(WorkerError::Crashed { messages, status }) => {
                assert!(messages.contains("cannot select"));
                assert!(!status.success());
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_program_that_is_no_worker_is_found_out() {
        let mut worker = Worker::start(&shell("head -c 4 > /dev/null; printf '\\001\\000\\000\\000z'; cat > /dev/null")).expect("started");
        let answer = worker.compile(&kernel(), &Target::x86_64_v3(), Emit::default());
        assert!(matches!(answer, Err(WorkerError::Protocol(_))), "{answer:?}");
        let absent = WorkerCommand { program: "/nonexistent".into(), arguments: vec![] };
        assert!(matches!(Worker::start(&absent), Err(WorkerError::Start { .. })));
    }
}
