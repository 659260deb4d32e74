//! The levels below the model text: their text forms, and the job as an artifact holds it.

use ir::program::Job;
use ir::text;
use std::fmt::Debug;

/// A text of any level: what reads prints as one that reads back to the same, and verifiers judge it, whatever it
/// says. The first line names the level.
pub fn level(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Some((name, text)) = text.split_once('\n') else { return };
    match name {
        "graph" => drop(read(text, text::parse_graph, text::print_graph).map(|g| verify::graph::verify(&g))),
        "sharded" => drop(read(text, text::parse_sharded, text::print_sharded).map(|s| verify::sharded::verify(&s))),
        "local" => drop(read(text, text::parse_local, text::print_local)),
        "kernel" => drop(read(text, text::parse_kernel, text::print_kernel).map(|k| k.verify())),
        "program" => drop(read(text, text::parse_program, text::print_program)),
        "job" => {
            if let Some(job) = read(text, text::parse_job, text::print_job) {
                judge(&job);
            }
        }
        _ => {}
    }
}

fn read<T: Debug>(text: &str, parse: impl Fn(&str) -> Result<T, text::ParseError>, print: impl Fn(&T) -> String) -> Option<T> {
    let value = parse(text).ok()?;
    let printed = print(&value);
    let again = parse(&printed).unwrap_or_else(|e| panic!("what was printed does not read back: {e}\n{printed}"));
    assert_eq!(print(&again), printed);
    Some(value)
}

/// A job as `job.bin` holds it, unpacked: what an artifact's reader accepts has been judged without a panic, and
/// packs to bytes that give the same job.
pub fn packed(bytes: &[u8]) {
    let Ok(job) = postcard::from_bytes::<Job>(bytes) else { return };
    judge(&job);
    let again = postcard::to_stdvec(&job).expect("a job is plain data");
    let job: Job = postcard::from_bytes(&again).expect("what was packed unpacks");
    assert_eq!(postcard::to_stdvec(&job).expect("a job is plain data"), again);
}

/// The verifier may count on what the reader of artifacts has checked.
fn judge(job: &Job) {
    if runtime::check::check(job).is_ok() {
        let _ = verify::job::verify(job);
    }
}
