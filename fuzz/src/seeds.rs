//! Inputs to begin with: small ones of every kind that are right, made anew, so that they follow the formats.

use crate::{files, fixture};
use frontend::Options as TextOptions;
use ir::diag::Sources;
use ir::options::Options;
use ir::program::ProgramPhase;
use ir::text;
use passes::compile::{Compiled, compile};
use runtime::checkpoint::{METADATA, Stored};
use runtime::comm::Position;
use runtime::profile::{ProfileChunk, Ran};
use runtime::protocol::{Event, HeldOut, RankPlacement, StepEvent};
use runtime::rendezvous::Member;
use runtime::schedule::learning_rate;
use runtime::weights::{Mark, SafetensorsLayout};
use std::fs::{self, File};
use std::io;
use std::net::Ipv4Addr;
use std::path::Path;

/// The seeds of all targets: the target's name, and bytes.
///
/// # Errors
/// If files cannot be read or written on the way.
pub fn all() -> io::Result<Vec<(&'static str, Vec<u8>)>> {
    let mut seeds = texts()?.into_iter().map(|t| ("texts", t)).collect::<Vec<_>>();
    seeds.extend(levels().into_iter().map(|(name, text)| ("levels", format!("{name}\n{text}").into_bytes())));
    for split in [fixture::Split { microbatches: 1, pp: 1, dp: 1, tp: 1 }, fixture::Split { microbatches: 2, pp: 2, dp: 2, tp: 2 }] {
        seeds.push(("job", postcard::to_stdvec(&fixture::job(&split)).expect("a job is plain data")));
    }
    seeds.extend(weights()?.into_iter().map(|w| ("weights", w)));
    seeds.push(("dcp", distributed()?));
    seeds.extend(data().into_iter().map(|d| ("data", d)));
    seeds.extend(network());
    Ok(seeds)
}

/// Writes the seeds of each target to a folder of its name.
///
/// # Errors
/// What the file system says.
pub fn write(dir: &Path) -> io::Result<()> {
    for (k, (target, bytes)) in all()?.into_iter().enumerate() {
        let folder = dir.join(target);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join(format!("seed{k}")), bytes)?;
    }
    Ok(())
}

fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The texts whose errors are tested, and the examples of the language's page, alone and within a model: small ones
/// of all that the language has. Whole models take a search too long.
fn texts() -> io::Result<Vec<Vec<u8>>> {
    let mut files: Vec<_> = fs::read_dir(repository().join("frontend/tests/errors"))?.collect::<Result<Vec<_>, _>>()?;
    files.sort_by_key(|f| f.file_name());
    let files = files.iter().map(|f| f.path()).filter(|p| p.extension().is_some_and(|e| e == "mdl"));
    let mut texts = files.map(fs::read).collect::<io::Result<Vec<_>>>()?;
    let page = fs::read_to_string(repository().join("docs/language.md"))?;
    for example in page.split("\n```mdl\n").skip(1).filter_map(|rest| rest.split("\n```").next()) {
        texts.push(example.into());
        texts.push(format!("model tiny(batch, d = 4) {{\n  input x: f32[batch, d];\n{example}\n  loss mean(x);\n}}\n").into());
    }
    Ok(texts)
}

/// A small model on two stages of two tensor-parallel ranks.
fn compiled() -> Compiled {
    let text = "model tiny(batch, ins = 4, outs = 4) {\n  input x: f32[batch, ins];\n  input label: i32[batch];\n  dim mid = outs;\n  \
                let h = relu(linear(real(x), ins, mid, bias: true) as first);\n  loss token_loss(linear(h, mid, outs) as last, label, over: outs);\n}\nplan { dp: batch; tp: mid; }\n";
    let elaboration = TextOptions { batch: 2, ..TextOptions::default() };
    let models = frontend::compile_both(&mut Sources::default(), "tiny.mdl", text, &elaboration, &mut |name| Err(name.to_owned()));
    let models = models.unwrap_or_else(|e| panic!("{e:?}"));
    let options = Options { tp: 2, global_batch: 2, ..Options::default() };
    compile(models.training, models.evaluation, &options).unwrap_or_else(|e| panic!("{e:?}"))
}

fn levels() -> Vec<(&'static str, String)> {
    let c = compiled();
    let mut texts = vec![("graph", text::print_graph(&c.graph)), ("sharded", text::print_sharded(&c.sharded)), ("job", text::print_job(&c.job))];
    texts.extend(c.locals.iter().map(|l| ("local", text::print_local(l))));
    texts.extend(c.job.kernels.iter().map(|k| ("kernel", text::print_kernel(k))));
    let stages = (0..).zip(&c.job.stages).map(|(s, stage)| (s, stage.schedule.clone())).collect();
    texts.push(("program", text::print_program(&(c.job.mesh.clone(), c.job.programs[0].clone(), stages))));
    texts
}

/// Weights alone, and what a run resumes from.
fn weights() -> io::Result<Vec<Vec<u8>>> {
    let job = files::job();
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("weights");
    let of = |layout: SafetensorsLayout| {
        layout.start(&File::create(&path)?)?;
        fs::read(&path)
    };
    Ok(vec![of(SafetensorsLayout::new(&job))?, of(SafetensorsLayout::of_run(&job, &Mark { step: 3, seed: 1, ..Mark::default() }, None))?])
}

/// What mcc writes of a state for PyTorch.
fn distributed() -> io::Result<Vec<u8>> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("state");
    SafetensorsLayout::of_run(&files::job(), &Mark { step: 3, seed: 1, ..Mark::default() }, None).start(&File::create(&path)?)?;
    let written = Stored::open(&path).and_then(|stored| stored.write_distributed(dir.path()));
    written.map_err(io::Error::other)?;
    let (metadata, items) = (fs::read(dir.path().join(METADATA))?, fs::read(dir.path().join(files::ITEMS))?);
    Ok([&(metadata.len() as u16).to_le_bytes()[..], &metadata, &items].concat())
}

/// A text, tokens of llm.c, and arrays of NumPy of both lengths.
fn data() -> Vec<Vec<u8>> {
    let llmc = [[20_240_520u32, 1, 16].map(u32::to_le_bytes).concat(), vec![0; 1012], [7u16; 16].map(u16::to_le_bytes).concat()].concat();
    let npy = |descr: &str, shape: &str, bytes: usize| {
        let header = format!("{:117}\n", format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"));
        [b"\x93NUMPY\x01\x00v\x00".as_slice(), header.as_bytes(), &vec![0; bytes]].concat()
    };
    vec![
        b"the quick brown fox jumps over the lazy dog".to_vec(),
        llmc,
        npy("<i4", "(2, 2, 4)", 64),
        npy("|u1", "(1, 2, 3)", 6),
        npy("<i8", "(1, 2, 4)", 64),
    ]
}

/// A rank that connects in each of the ways; messages of ranks, and rank 0's plan; a frame with two ranges that wakes
/// a rank.
fn network() -> Vec<(&'static str, Vec<u8>)> {
    let plain = |what: &dyn Fn() -> postcard::Result<Vec<u8>>| what().expect("plain data");
    let member = plain(&|| postcard::to_stdvec(&Member { rank: 1, world: 2, id: "an id".into() }));
    let mut seeds: Vec<_> = (0..5u8).map(|how| ("hello", [&[how, 9][..], &member].concat())).collect();
    seeds.push(("hello", [&[3, 200][..], &(member.len() as u32).to_le_bytes(), &member].concat()));

    let step = StepEvent {
        step: 1,
        learning_rate: learning_rate(&files::job().train.schedule, 1, 4),
        milliseconds: 2.0,
        busy: [0.5; 2],
        read: 272,
        waited: 0.0,
        further_passes: [1, 2],
        reports: vec![Some(1.5), None],
        valid: vec![],
        loss_scale: None,
        skipped: false,
    };
    let events = [
        Event::Step(step),
        Event::NonFinite { step: 2, reports: vec![Some(f64::NAN), None], blame: None },
        Event::Skipped { step: 1, skips: 1, most: Some(2) },
        Event::Evaluated { part: HeldOut::Valid(1), reports: vec![Some(1.5), None] },
        Event::Failed { message: "an error".into(), help: None, aborted: false },
        Event::Finished { step: 1 },
    ];
    // Two bytes stand before each message: its rank and its kind.
    let words = [0, 1].map(|rank| events.iter().flat_map(|e| [vec![rank, 0], plain(&|| postcard::to_stdvec(e))].concat()).collect::<Vec<u8>>());
    let status = (7u64, 1u64, (ProgramPhase::Train, 1u32, 2u32), Some(vec![0u64]));
    let pulse = [vec![1, 1], plain(&|| postcard::to_stdvec(&(status.clone(), 3u32, false)))].concat();
    let ended = [vec![1, 2], plain(&|| postcard::to_stdvec(&("was killed", "it wrote", status.clone())))].concat();
    let ran = vec![Ran { at: Position { phase: ProgramPhase::Train, call: 0, command: 0 }, start: 1, time: 2 }];
    let parts =
        ProfileChunk::of(vec![(1, 0, 9)], ran).into_iter().map(|p| [vec![0, 0], plain(&|| postcard::to_stdvec(&Event::Profile(p.clone())))].concat());
    let all = [words.concat(), pulse, ended, parts.flatten().collect(), vec![1, 3, 1, 4, 9]];
    seeds.extend(all.iter().map(|w| ("message", [&[1], &w[..]].concat())));
    let place = |machine, host: &str| RankPlacement { machine, host: host.into(), address: Ipv4Addr::LOCALHOST.into(), port: 1, cores: 1 };
    let plan = plain(&|| postcard::to_stdvec(&([7u8; 16], [place(0, "a"), place(1, "b")].to_vec(), None::<Vec<u8>>)));
    seeds.push(("message", [&[2], &plan[..]].concat()));
    seeds.push(("message", [&[0], &plan[..]].concat()));

    let numbers = [2u64 | 1 << 32, 64, 5, 128, 8, 256, 3, 1].map(u64::to_le_bytes).concat();
    seeds.extend([0, 1].map(|how| ("frames", [&[how], &numbers[..], b"elevenbytes"].concat())));
    seeds
}
