//! Ends a compile that takes more memory or time than it may, and says what it was at.

use crate::cli::LimitArgs;
use crate::print::note;
use crate::text::DiagnosticFormat;
use ir::diag::{Diagnostic, Sources};
use ir::progress::{Progress, ProgressSnapshot};
use passes::report::footprint::size;
use procfs::process::Process;
use procfs::{Current, Meminfo, ProcResult};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time between looks. A process can be given some tens of megabytes meanwhile.
const INTERVAL: Duration = Duration::from_millis(20);

/// A thread that looks at the memory and the clock of a compile until it is dropped. If there is too much of either
/// it says so and ends the process, and so its workers, with exit code 1. Whoever begins to write where the user
/// looks drops it first: so nothing is half written.
pub struct LimitWatch {
    progress: Arc<Progress>,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LimitWatch {
    pub fn start(args: &LimitArgs, shown: DiagnosticFormat) -> LimitWatch {
        let progress = Arc::new(Progress::default());
        let memory = args.limit_memory.or_else(|| available().map(|all| all / 8 * 7));
        let (end, ended) = channel();
        let monitor =
            LimitMonitor { progress: progress.clone(), memory, limit: Duration::from_secs(args.limit_seconds), start: Instant::now(), shown };
        let thread = Some(std::thread::spawn(move || monitor.look(&ended)));
        LimitWatch { progress, end: Some(end), thread }
    }

    pub fn progress(&self) -> &Progress {
        &self.progress
    }
}

impl Drop for LimitWatch {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct LimitMonitor {
    progress: Arc<Progress>,
    /// In bytes; none if nothing says what there is.
    memory: Option<u64>,
    limit: Duration,
    start: Instant,
    shown: DiagnosticFormat,
}

impl LimitMonitor {
    fn look(&self, ended: &Receiver<()>) {
        let mut readable = true;
        while ended.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
            let (moment, passed) = (self.progress.now(), self.start.elapsed());
            let held = match held(None) {
                Ok(own) => own + moment.workers.iter().filter_map(|id| held(Some(*id)).ok()).sum::<u64>(),
                Err(cause) => {
                    if std::mem::replace(&mut readable, false) {
                        note!("warning: --limit-memory has no effect: {cause}");
                    }
                    0
                }
            };
            let error = match self.memory.filter(|most| held > *most) {
                Some(most) => too_much(held, most, &moment),
                None if passed > self.limit => too_long(self.limit, &moment),
                None => continue,
            };
            let sizes = moment.sizes.iter().map(|(what, count)| format!("{count} {what}"));
            let so_far: Vec<String> = [format!("{:.1} s", passed.as_secs_f64()), size(held)].into_iter().chain(sizes).collect();
            let error = error.note(format!("`{}` had run for {:.1} s; so far: {}", moment.pass, moment.running.as_secs_f64(), so_far.join(", ")));
            let _ = self.shown.show(&[error], &Sources::default());
            std::process::exit(1);
        }
    }
}

/// E0906: more memory than the compile may hold.
fn too_much(held: u64, most: u64, moment: &ProgressSnapshot) -> Diagnostic {
    let d = Diagnostic::error("E0906", format!("the compile holds {} in `{}`, more than --limit-memory {}", size(held), moment.pass, size(most)));
    d.help("fewer layers, or pipeline stages that are alike, make less of each; or raise --limit-memory")
}

/// E0907: more time than the compile may take.
fn too_long(limit: Duration, moment: &ProgressSnapshot) -> Diagnostic {
    let d = Diagnostic::error("E0907", format!("the compile has not ended in `{}` after --limit-seconds {}", moment.pass, limit.as_secs()));
    d.help("fewer layers, or pipeline stages that are alike, take less; or raise --limit-seconds")
}

/// Bytes of memory that a process holds for itself: no files, and no code, which processes of one program share.
fn held(worker: Option<u32>) -> ProcResult<u64> {
    let process = match worker {
        None => Process::myself()?,
        Some(id) => Process::new(id as i32)?,
    };
    Ok(process.status()?.rssanon.unwrap_or(0) * 1024)
}

/// Bytes that this process can have: of the machine, or of the control groups that it is in.
fn available() -> Option<u64> {
    let machine = Meminfo::current().ok().map(|m| m.mem_total);
    let groups = Process::myself().and_then(|p| p.cgroups()).into_iter().flatten();
    let of_group = |group: procfs::ProcessCGroup| {
        let (root, file) = if group.controllers.iter().any(|c| c == "memory") {
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
        } else {
            ("/sys/fs/cgroup", "memory.max")
        };
        let own = Path::new(root).join(group.pathname.trim_start_matches('/'));
        let limit = |folder: &Path| fs::read_to_string(folder.join(file)).ok()?.trim().parse::<u64>().ok();
        own.ancestors().take_while(|folder| folder.starts_with(root)).filter_map(limit).min()
    };
    groups.filter_map(of_group).chain(machine).min()
}
