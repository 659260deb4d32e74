//! Inputs to begin with: small ones of every kind that are right, made anew, so that they follow the formats.

use crate::{files, fixture};
use frontend::Options as TextOptions;
use ir::diag::Sources;
use ir::text;
use passes::compile::{Compiled, Options, compile};
use runtime::weights::{Layout, Mark};
use std::fs::{self, File};
use std::io;
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
    seeds.extend(data().into_iter().map(|d| ("data", d)));
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

/// The models, and the texts whose errors are tested.
fn texts() -> io::Result<Vec<Vec<u8>>> {
    let mut texts = vec![];
    for folder in ["models", "frontend/tests/errors"] {
        let mut files: Vec<_> = fs::read_dir(repository().join(folder))?.collect::<Result<Vec<_>, _>>()?;
        files.sort_by_key(|f| f.file_name());
        for file in files.iter().map(|f| f.path()).filter(|p| p.extension().is_some_and(|e| e == "mdl")) {
            texts.push(fs::read(file)?);
        }
    }
    Ok(texts)
}

/// A small model on two stages of two tensor-parallel ranks.
fn compiled() -> Compiled {
    let text = "model tiny(batch, ins = 4, outs = 4) {\n  input x: f32[batch, ins];\n  input label: i32[batch];\n  dim mid = outs;\n  \
                let h = relu(linear(real(x), ins, mid, bias: true) as first);\n  loss token_loss(linear(h, mid, outs) as last, label, over: outs);\n}\nplan { dp: batch; tp: mid; }\n";
    let model = |training| {
        let options = TextOptions { training, batch: 2, ..TextOptions::default() };
        let mut no_imports = |name: &str| Err(name.to_owned());
        let done = frontend::compile(&mut Sources::default(), "tiny.mdl", text, &options, &mut no_imports);
        done.unwrap_or_else(|e| panic!("{e:?}")).model
    };
    let options = Options { tp: 2, global_batch: 2, ..Options::default() };
    compile(model(true), model(false), &options).unwrap_or_else(|e| panic!("{e:?}"))
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
    let of = |layout: Layout| {
        layout.start(&File::create(&path)?)?;
        fs::read(&path)
    };
    Ok(vec![of(Layout::new(&job))?, of(Layout::of_run(&job, &Mark { step: 3, seed: 1, scaling: None }))?])
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
