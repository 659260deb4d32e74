//! Compiles a model up to code generation and prints how long each pass took: what grows with layers and ranks.
//!
//! ```text
//! cargo run --release -p passes --example growth -- models/gpt2.mdl layers=128 dp=8 tp=8 pp=8 zero=1 --dump DIR
//! ```
//! Names of the mesh (`dp cp tp pp ep etp vpp zero micro global sp recompute`) are options, others settings of the text. `--dump` writes all
//! levels as texts, so that two revisions can be compared.

use frontend::Options as Text;
use ir::diag::Sources;
use ir::options::{Options, Recompute, SequenceParallel, Zero};
use passes::compile::{Compiled, compile};
use std::path::Path;
use std::time::{Duration, Instant};

fn main() {
    let mut options = Options::default();
    let mut defines = vec![];
    let mut global = None;
    let (mut model, mut dump) = (None, None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        if word == "--dump" {
            dump = words.next();
            continue;
        }
        let Some((name, value)) = word.split_once('=') else {
            model = Some(word);
            continue;
        };
        let number = || value.parse::<u64>().unwrap_or_else(|e| panic!("{word}: {e}"));
        match name {
            "dp" => options.dp = number(),
            "cp" => options.cp = number(),
            "tp" => options.tp = number(),
            "pp" => options.pp = number(),
            "ep" => options.ep = number(),
            "etp" => options.etp = Some(number()),
            "vpp" => options.vpp = Some(number()),
            "zero" => options.zero = Zero::ALL[number() as usize],
            "micro" => options.micro_batch = number(),
            "global" => global = Some(number()),
            "sp" if number() > 0 => options.sp = SequenceParallel::On,
            "recompute" => options.recompute = Recompute::Uniform(number() as u32),
            _ => defines.push((name.to_string(), value.to_string())),
        }
    }
    let model = model.expect("the path of a model text");
    options.global_batch = global.unwrap_or(options.micro_batch * options.dp * options.pp);

    let start = Instant::now();
    let text = std::fs::read_to_string(&model).unwrap_or_else(|e| panic!("{model}: {e}"));
    let elaboration = Text { defines, batch: options.global_batch, ..Text::default() };
    let mut sources = Sources::default();
    let models = frontend::compile_both(&mut sources, &model, &text, &elaboration, &mut |_| Err("no imports".into()));
    let models = models.unwrap_or_else(|errors| {
        panic!("{}", errors.iter().map(|e| frontend::render(e, &sources, frontend::Style::Plain)).collect::<String>());
    });
    let parsed = start.elapsed();
    let compiled = compile(models.training, models.evaluation, &options).unwrap_or_else(|e| panic!("{e:?}"));
    let whole = start.elapsed();
    let print = |name: &str, took: Duration| println!("{name:14} {:9.1} ms", took.as_secs_f64() * 1e3);
    print("parse", parsed);
    for t in &compiled.times {
        print(t.pass, t.run);
        t.verified.iter().for_each(|(verifier, took)| print(&format!("  {verifier}"), *took));
    }
    print("all", whole);
    compiled.warnings.iter().for_each(|w| println!("{}: {}", w.code, w.message));
    if let Some(dir) = dump {
        write(&compiled, Path::new(&dir));
    }
}

fn write(c: &Compiled, dir: &Path) {
    let put = |name: String, text: String| std::fs::write(dir.join(&name), text).unwrap_or_else(|e| panic!("{name}: {e}"));
    std::fs::create_dir_all(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    put("graph.txt".into(), ir::text::print_graph(&c.graph));
    put("sharded.txt".into(), ir::text::print_sharded(&c.sharded));
    let locals = [("stage", &c.stages), ("local", &c.locals), ("eval", &c.evaluation.locals)];
    for (what, graphs) in locals {
        graphs.iter().enumerate().for_each(|(k, l)| put(format!("{what}.{k}.txt"), ir::text::print_local(l)));
    }
    for (k, program) in c.job.programs.iter().enumerate() {
        let stages = (0u64..).zip(&c.job.stages).filter(|(_, s)| s.program as usize == k).map(|(n, s)| (n, s.schedule.clone())).collect();
        put(format!("program.{k}.txt"), ir::text::print_program(&(c.job.mesh.clone(), program.clone(), stages)));
    }
    put("kernels.txt".into(), c.job.kernels.iter().map(ir::text::print_kernel).collect());
    put("job.txt".into(), format!("{:?} {:?} {:?} {:?}", c.job.params, c.job.inputs, c.job.tables, c.job.in_flight));
}
