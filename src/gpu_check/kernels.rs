//! Every kernel of a training step of every model, launch by launch, against its definition in f64, and the GPU
//! against the emulator.

use super::check::Check;
use super::table::{Table, markdown, verdict};
use crate::print::progress;
use anyhow::{Context, anyhow};
use ir::kernel::Kernel;
use ir::kernel::distance::narrowest;
use ir::op::DType;
use ir::program::ProgramPhase;
use runtime::artifact::{self, AcceptedArtifacts, Artifact};
use runtime::checked::{Instrumentation, InstrumentedDevice, Verdict};
use runtime::data::{Data, Encoding, Spec};
use runtime::device::ThreadResources;
use runtime::executor::{CommandOrder, PersistentId, Rank, Step};
use runtime::gpu;
use runtime::host::{Tensor, Whole, sizes};
use runtime::loopback::{Hub, TurnOrder, run_phase};
use runtime::scale::Scaler;
use runtime::schedule::learning_rate;
use runtime::target::DeviceKind;
use runtime::weights::Weights;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// A model and its flags. Heads of 64 and hidden sizes of 128 and more take the paths that tensor cores have.
const CASES: [(&str, &str); 15] = [
    ("gpt2", "--dtype fp32"),
    ("gpt2", "--dtype bf16"),
    ("gpt2", "--dtype fp16 -D dropout_rate=0.1"),
    ("gpt2", "--dtype bf16 -D attention_dropout=0.1"),
    ("llama", "--dtype bf16 -D kv_heads=1 -D ffn=200"),
    ("llama", "--dtype fp32 -D kv_heads=1 -D ffn=200"),
    ("llama", "--dtype bf16 -D kv_heads=1 -D ffn=200 -D packed=true -D window=40"),
    ("llama", "--dtype fp16 -D kv_heads=2 -D ffn=200 -D packed=true -D head_dim=80"),
    ("llama", "--dtype fp32 --tf32 -D kv_heads=1 -D ffn=200"),
    ("llama", "--dtype bf16 -D kv_heads=1 -D ffn=200 --optimizer muon"),
    ("gemma", "--dtype bf16 -D kv_heads=1 -D ffn=200 -D head_dim=64 -D query_scalar=64 -D score_cap=2.0 -D window=40"),
    ("mixtral", "--dtype bf16 -D kv_heads=1 -D experts=4 -D expert_ffn=96 -D aux_per_sequence=true"),
    ("gpt_oss", "--dtype bf16 -D kv_heads=1 -D experts=4 -D top_k=2 -D expert_ffn=96 -D window=40"),
    (
        "deepseek_v3",
        "--dtype bf16 -D mtp=1 -D first_dense=1 -D experts=4 -D groups=2 -D top_groups=1 -D top_k=2 -D expert_ffn=96 -D ffn=200 -D q_rank=48 -D kv_rank=64",
    ),
    ("t5", "--dtype bf16 -D ffn=200"),
];

/// Sizes with which products have several tiles for each multiprocessor and more stages than a ring holds, and heads
/// 128 elements, on a card alone: the emulator would take hours.
const LARGE: [(&str, &str); 13] = [
    ("gpt2", "--dtype bf16 -D heads=8"),
    ("gpt2", "--dtype fp16 -D heads=16"),
    ("gpt2", "--dtype fp32 -D heads=16"),
    ("gpt2", "--dtype bf16 -D heads=8 -D attention_dropout=0.1"),
    ("llama", "--dtype bf16 -D heads=8 -D kv_heads=2 -D ffn=2816"),
    ("llama", "--dtype bf16 -D heads=8 -D kv_heads=2 -D ffn=2816 -D packed=true"),
    ("llama", "--dtype fp16 -D heads=8 -D kv_heads=2 -D ffn=2816 -D packed=true -D head_dim=96"),
    ("llama", "--dtype fp32 --tf32 -D heads=16 -D kv_heads=4 -D ffn=2816"),
    ("gemma", "--dtype bf16 -D heads=4 -D kv_heads=2 -D ffn=2816 -D head_dim=256 -D score_cap=2.0 -D window=400"),
    ("mixtral", "--dtype bf16 -D heads=8 -D kv_heads=2 -D experts=8 -D expert_ffn=1408 -D aux_per_sequence=true"),
    ("gpt_oss", "--dtype bf16 -D heads=16 -D kv_heads=4 -D experts=8 -D expert_ffn=1408"),
    ("deepseek_v3", "--dtype bf16 -D heads=8 -D first_dense=0 -D experts=8 -D groups=2 -D top_groups=1 -D top_k=2 -D expert_ffn=704 -D q_rank=384"),
    ("t5", "--dtype bf16 -D heads=16 -D ffn=2816"),
];

/// Sizes by the names that a model's text gives them.
fn size_flags(model: &str, hidden: u32, layers: u32, positions: u32) -> String {
    let named = match model {
        "t5" => format!("-D encoder_layers={layers} -D source={positions} -D target={positions}"),
        _ => format!("-D layers={layers} -D seq={positions}"),
    };
    format!("-D hidden={hidden} {named}")
}

#[derive(Default, Serialize)]
pub struct Kernels {
    kernels: Vec<KernelCheck>,
    /// Cases that ended before their kernels were checked, and why.
    failed: Vec<(String, String)>,
}

#[derive(Serialize, Deserialize)]
pub struct KernelCheck {
    model: String,
    kernel: String,
    family: String,
    /// The names of its ops, each once.
    ops: String,
    dtype: String,
    verdict: Verdict,
    right: bool,
}

/// The model, all flags, and whether the emulator computes the same.
fn cases(check: &Check) -> Vec<(&'static str, String, bool)> {
    let (cases, heads, [hidden, layers, positions]) = match check.args.quick {
        true => (&CASES[1..2], 1, [64, 1, 16]),
        false if check.device == DeviceKind::Emulated => (&CASES[..], 2, [128, 1, 32]),
        false => (&CASES[..], 4, [256, 2, 96]),
    };
    // If the device is the emulator, there is nothing to compare with it.
    let beside = check.device != DeviceKind::Emulated;
    let small = cases
        .iter()
        .map(|(model, flags)| (*model, format!("{flags} {} -D heads={heads} -D vocab=256", size_flags(model, hidden, layers, positions)), beside));
    let large = if beside && !check.args.quick && check.unmeasured().is_none() { &LARGE[..] } else { &[] };
    let large = large.iter().map(|(model, flags)| (*model, format!("{flags} {} -D vocab=2048", size_flags(model, 1024, 1, 1024)), false));
    small
        .chain(large)
        .map(|(model, flags, beside)| (model, format!("{flags} --micro-batch-size 2 --global-batch-size 4 --lr 1e-3"), beside))
        .collect()
}

/// Each case by itself, some at once: most of the time goes to interpreting their definitions, on a thread each.
pub fn run(check: &Check) -> anyhow::Result<Kernels> {
    let cases = cases(check);
    let next = AtomicUsize::new(0);
    let found = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..(threads() / 2).clamp(1, cases.len()) {
            scope.spawn(|| {
                loop {
                    let k = next.fetch_add(1, Ordering::Relaxed);
                    let Some((model, flags, _)) = cases.get(k) else { break };
                    let begun = Instant::now();
                    let kernels = check.case::<Vec<KernelCheck>>("kernels", k).map_err(|e| format!("{e:#}"));
                    let seconds = begun.elapsed().as_secs();
                    // The progress is for those who end a run before its report.
                    match &kernels {
                        Ok(found) => {
                            let right = found.iter().filter(|f| f.right).count();
                            progress!("{right} of {} kernels right, {seconds} s: {model} {flags}", found.len());
                        }
                        Err(e) => progress!("failed, {seconds} s: {model} {flags}: {e}"),
                    }
                    found.lock().expect("invariant: no holder panics").insert(k, kernels);
                }
            });
        }
    });
    let mut out = Kernels::default();
    for (k, kernels) in found.into_inner().expect("invariant: no holder panics") {
        let (model, flags, _) = &cases[k];
        match kernels {
            Ok(kernels) => out.kernels.extend(kernels),
            Err(e) => out.failed.push((format!("{model} {flags}"), e)),
        }
    }
    Ok(out)
}

/// The kernels of one case.
pub fn of_case(check: &Check, number: usize) -> anyhow::Result<Vec<KernelCheck>> {
    let cases = cases(check);
    let (model, flags, beside) = cases.get(number).ok_or_else(|| anyhow!("there are {} cases of kernels", cases.len()))?;
    let artifact = artifact::read(&check.compile(model, flags, &check.target)?, &AcceptedArtifacts::Anyones)?;
    let other = if *beside { Some(gpu::open(&artifact, DeviceKind::Emulated, threads())?) } else { None };
    let mut task = Instrumentation::Check { other, verdicts: BTreeMap::new() };
    step(check, &artifact, &mut task).with_context(|| format!("{model} {flags}"))?;
    let Instrumentation::Check { verdicts, .. } = task else { return Err(anyhow!("kernels were timed, not checked")) };
    let found = verdicts.into_iter().map(|(id, verdict)| {
        let kernel = &artifact.job.kernels[id as usize];
        let right = verdict.is_right();
        KernelCheck {
            model: (*model).into(),
            kernel: kernel.name(),
            family: kernel.family.describe().into(),
            ops: ops(kernel),
            dtype: narrowest(kernel).name().into(),
            verdict,
            right,
        }
    });
    Ok(found.collect())
}

pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Trains one step of an artifact of one rank, with random weights.
pub fn step<'a>(check: &Check, artifact: &'a Artifact, task: &mut Instrumentation<'a>) -> anyhow::Result<()> {
    let job = &artifact.job;
    let fed = job.inputs.iter().filter(|i| i.default.is_none());
    let specs: Vec<Spec> = fed.map(|i| Spec::parse(&format!("{}={}", i.name, data(&check.work)), Encoding::Text)).collect();
    let data = Data::open(job, &specs)?;
    let batch = data.batch(0)?;
    let weights = Weights::random(job, check.seed);
    let tables: Vec<Tensor> = job.tables.iter().map(|t| Tensor { sizes: sizes(&t.dims), data: t.data.clone() }).collect();
    let device = InstrumentedDevice::new(job, gpu::open(artifact, check.device, threads())?, task);
    let mut rank = Rank::new(job, 0, device, CommandOrder::List);
    rank.initialise(|held| match held {
        PersistentId::Param(_) | PersistentId::State(..) => weights.get(held),
        PersistentId::Table(t) => Some(&tables[t as usize] as &dyn Whole),
    });
    // With training's initial scale, 2^16, gradients in f16 are infinite, and there would be nothing to compare.
    let loss_scale = Scaler::new(job.train.loss_scale).scale().min(256.0);
    let step = Step { number: 1, learning_rate: learning_rate(&job.train.schedule, 1, 1), loss_scale, seed: check.seed, batch: &batch };
    for phase in [ProgramPhase::Train, ProgramPhase::Update] {
        run_phase(job, std::slice::from_mut(&mut rank), &mut Hub::new(job), phase, &step, &mut TurnOrder::Long)?;
    }
    Ok(())
}

fn data(work: &Path) -> String {
    work.join("text.txt").display().to_string()
}

pub fn ops(kernel: &Kernel) -> String {
    let mut names: Vec<&str> = vec![];
    for node in kernel.body.nodes.iter().filter(|n| !n.op.is_source()) {
        if !names.contains(&node.op.name()) {
            names.push(node.op.name());
        }
    }
    let most = 6;
    let more = names.len().saturating_sub(most);
    names.truncate(most);
    names.join(", ") + &if more > 0 { format!(" and {more} more") } else { String::new() }
}

impl Table for Kernels {
    /// A line for each model, family and type: the worst of its kernels, and each kernel that is wrong.
    fn table(&self) -> String {
        let mut groups: BTreeMap<(&str, &str, &str), Vec<&KernelCheck>> = BTreeMap::new();
        self.kernels.iter().for_each(|k| groups.entry((&k.model, &k.family, &k.dtype)).or_default().push(k));
        let number = |x: f64| format!("{x:.1e}");
        let worst = |list: &[&KernelCheck], of: &dyn Fn(&Verdict) -> Option<f64>| list.iter().filter_map(|k| of(&k.verdict)).reduce(f64::max);
        let mut rows: Vec<Vec<String>> = vec![];
        for ((model, family, dtype), list) in &groups {
            let launches: u64 = list.iter().map(|k| k.verdict.launches).sum();
            let definition = worst(list, &|v| Some(v.definition.element)).map_or("-".into(), number);
            let norm = worst(list, &|v| Some(v.definition.norm)).map_or("-".into(), number);
            let other = worst(list, &|v| v.other.map(|d| d.element)).map_or("-".into(), number);
            let most = list.first().map_or("-".into(), |k| number(k.verdict.allowed.element));
            let right = verdict(list.iter().all(|k| k.right));
            let needs: Vec<ThreadResources> = list.iter().filter_map(|k| k.verdict.needs).collect();
            let registers = needs.iter().map(|n| n.registers).max().map_or("-".into(), |n| n.to_string());
            let local = needs.iter().map(|n| n.local_bytes).max().map_or("-".into(), |n| n.to_string());
            rows.push(vec![
                (*model).into(),
                (*family).into(),
                (*dtype).into(),
                list.len().to_string(),
                launches.to_string(),
                definition,
                norm,
                other,
                most,
                registers,
                local,
                right,
            ]);
        }
        for k in self.kernels.iter().filter(|k| !k.right) {
            let other = k.verdict.other.map_or("-".into(), |d| number(d.element));
            let [element, norm, most] = [k.verdict.definition.element, k.verdict.definition.norm, k.verdict.allowed.element].map(number);
            rows.push(vec![
                k.model.clone(),
                format!("{}: {}", k.kernel, k.ops),
                k.dtype.clone(),
                "1".into(),
                k.verdict.launches.to_string(),
                element,
                norm,
                other,
                most,
                k.verdict.needs.map_or("-".into(), |n| n.registers.to_string()),
                k.verdict.needs.map_or("-".into(), |n| n.local_bytes.to_string()),
                verdict(false),
            ]);
        }
        for (case, why) in &self.failed {
            let why = why.lines().next().unwrap_or_default();
            rows.push(std::iter::once(case.clone()).chain([why.to_owned()]).chain(vec!["-".to_owned(); 9]).chain([verdict(false)]).collect());
        }
        let found = ["worst element", "worst norm", "from the emulator", "allowed"];
        let columns = [&["model", "kernels", "type", "number", "launches"][..], &found, &["registers", "local bytes", ""]].concat();
        markdown("Kernels against their definitions in f64, outputs poisoned", &columns, rows.into_iter())
    }

    fn wrong(&self) -> usize {
        self.kernels.iter().filter(|k| !k.right).count() + self.failed.len()
    }
}

/// Whether a kernel computes in 16-bit floats.
pub fn is_narrow(kernel: &Kernel) -> bool {
    matches!(narrowest(kernel), DType::Bf16 | DType::F16)
}
