//! The harness: compiles a text, runs one step on all ranks, and compares with the logical graph.

use super::checkpoints::round_trip;
use super::played::{in_use, played};
use super::wanted::{ExpectedStep, RUNS, unrounded};
use frontend::{Models, Options as Text};
use ir::diag::{Diagnostic, Sources};
use ir::dim::Base;
use ir::eval::{self, Env};
use ir::graph::{Body, Graph, Report, Type, Value};
use ir::model::LossScale;
use ir::op::{DType, Op, Real, Scalar};
use ir::options::{
    ActivationOffload, Counts, CpComm, Cuts, MemoryOrder, MoeBuffer, Offload, Options, ParamOffload, Recompute, RowChoice, SequenceParallel, SplitK,
    TpOverlap, Zero,
};
use ir::pipeline::Schedule;
use ir::program::{InputEntry, Job};
use ir::random;
use passes::compile::{CompileError, Compiled, compile};
use passes::graph::differentiate::sum_losses;
use runtime::host::Tensor;
use runtime::reference::{self, Interleaving, Settings};
use std::collections::BTreeMap;

/// A mesh, a schedule and data.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    pub dp: u64,
    pub cp: u64,
    pub cp_comm: CpComm,
    pub tp: u64,
    pub ep: u64,
    pub etp: Option<u64>,
    pub pp: u64,
    pub sp: bool,
    pub tp_overlap: TpOverlap,
    pub zero: Zero,
    pub replicas: u64,
    pub pairs: bool,
    pub memory_order: MemoryOrder,
    pub offload: Offload,
    pub param_offload: ParamOffload,
    pub activation_offload: ActivationOffload,
    pub bucket_size: Option<u64>,
    pub moe_buffer: MoeBuffer,
    pub moe_passes: u64,
    pub micro_batch: u64,
    pub global_batch: u64,
    pub schedule: Schedule,
    pub rows: RowChoice,
    pub vpp: Option<u64>,
    pub group: Option<u64>,
    pub layout: Cuts,
    /// The values of parameters, states and inputs.
    pub seed: u64,
    pub data: Data,
    /// Elaborate attention's body instead of the op.
    pub inline_ops: bool,
    pub recompute: Recompute,
    /// The working precision; f16 goes with a constant loss scale.
    pub precision: DType,
    /// Mark products for tensor cores; what the marks mean is the interpreter's affair, so the job is run without them.
    pub tf32: bool,
    /// Segments of a product, at most; 1: none is split.
    pub segments: u64,
    /// Chunks of logits, at most; 1: they are whole.
    pub logits: u64,
}

/// The kind of values in parameters, states and inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// Normal numbers; results agree to 1e-9 of the tensor's greatest element. In 16 bits they do so without rounding, and with it as far as
    /// rounding goes ([`ExpectedStep`]).
    Real,
    /// Small integers; results agree to the last bit, wherever f64 is exact.
    Exact,
}

impl Default for Case {
    fn default() -> Self {
        Case {
            dp: 1,
            cp: 1,
            cp_comm: CpComm::Ring,
            tp: 1,
            ep: 1,
            etp: None,
            pp: 1,
            sp: false,
            tp_overlap: TpOverlap::Off,
            zero: Zero::None,
            replicas: 1,
            pairs: false,
            memory_order: MemoryOrder::Time,
            offload: Offload::Off,
            param_offload: ParamOffload::Off,
            activation_offload: ActivationOffload::Off,
            bucket_size: None,
            moe_buffer: MoeBuffer::Whole,
            moe_passes: 1,
            micro_batch: 1,
            global_batch: 1,
            schedule: Schedule::OneFOneB,
            rows: RowChoice::Rules,
            vpp: None,
            group: None,
            layout: Cuts::Even { embedding: Counts::AsNothing, loss: Counts::AsNothing },
            seed: 1,
            data: Data::Real,
            inline_ops: false,
            recompute: Recompute::None,
            precision: DType::F32,
            tf32: false,
            segments: 1,
            logits: 1,
        }
    }
}

/// What an input of integers holds: uniform in `0..below`, or -100 for some, as labels that do not count.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub below: u64,
    pub ignored: bool,
}

pub type Ranges = BTreeMap<String, Range>;

/// The outcome of a case.
#[derive(Debug)]
pub enum Outcome {
    /// Results agree to the last bit, or within the tolerance.
    Right(Data),
    /// The compiler refused the case with this error.
    Refused(Vec<Diagnostic>),
    /// The logical graph itself gives infinities or NaN, which cannot be compared.
    NotFinite,
    /// The step stopped: more rows came to experts than there was room for.
    Full(String),
}

/// A text, elaborated for training and for evaluation.
///
/// # Errors
/// Its errors, rendered.
pub fn models(text: &str, defines: &[(&str, &str)], case: &Case) -> Result<Models, String> {
    let options = Text {
        defines: defines.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect(),
        batch: case.global_batch,
        micro_batch: Some(case.micro_batch * case.dp),
        inline_ops: case.inline_ops,
        precision: case.precision,
        ..Text::default()
    };
    let mut sources = Sources::default();
    let models = frontend::compile_both(&mut sources, "test.mdl", text, &options, &mut |_| Err("no imports".into()));
    let mut models = models.map_err(|errors| -> String { errors.iter().map(|e| frontend::render(e, &sources, frontend::Style::Plain)).collect() })?;
    if case.precision == DType::F16 {
        models.training.train.loss_scale = Some(LossScale::Constant(Real(SCALE)));
    }
    Ok(models)
}

pub fn options(case: &Case) -> Options {
    Options {
        dp: case.dp,
        cp: case.cp,
        cp_comm: case.cp_comm,
        tp: case.tp,
        ep: case.ep,
        etp: case.etp,
        pp: case.pp,
        sp: if case.sp { SequenceParallel::On } else { SequenceParallel::Off },
        tp_overlap: case.tp_overlap,
        zero: case.zero,
        replicas: case.replicas,
        logits_chunks: Some(case.logits),
        pass_pairs: case.pairs,
        memory_order: case.memory_order,
        offload: case.offload,
        param_offload: case.param_offload,
        activation_offload: case.activation_offload,
        tf32: case.tf32,
        split_k: if case.segments > 1 { SplitK::Into(case.segments) } else { SplitK::Off },
        bucket_size: case.bucket_size,
        moe_buffer: case.moe_buffer,
        moe_passes: case.moe_passes,
        micro_batch: case.micro_batch,
        global_batch: case.global_batch,
        schedule: case.schedule.clone(),
        vpp: case.vpp,
        group: case.group,
        layout: case.layout.clone(),
        pad_vocab_to: 1,
        recompute: case.recompute,
        rows: case.rows,
        // The option adds turns of sends and changes nothing else.
        serial_exchanges: true,
        ..Options::default()
    }
}

/// All levels of a text that must compile.
pub fn compiled(text: &str, defines: &[(&str, &str)], case: &Case) -> Compiled {
    let Models { training, evaluation, .. } = models(text, defines, case).unwrap_or_else(|e| panic!("{e}"));
    compile(training, evaluation, &options(case)).unwrap_or_else(|e| panic!("{case:?}: {e:?}"))
}

/// Compiles for the case, runs one step and one evaluation, and compares every report, parameter and state with the logical graph's.
pub fn check(text: &str, defines: &[(&str, &str)], case: &Case) {
    match attempt(text, defines, case, &Ranges::new()) {
        Ok(Outcome::Right(_)) => {}
        Ok(other) => panic!("{other:?} in {case:?}"),
        Err(e) => panic!("{e} in {case:?}"),
    }
}

/// As [`check`], for texts that may be refused.
///
/// # Errors
/// A difference, or a bug that a verifier found.
pub fn attempt(text: &str, defines: &[(&str, &str)], case: &Case, ranges: &Ranges) -> Result<Outcome, String> {
    let Models { training, evaluation, .. } = models(text, defines, case)?;
    let mut eval_graph = evaluation.graph.clone();
    eval_graph.outputs.clear();
    let eval_graph = sum_losses(eval_graph);
    let mut c = match compile(training, evaluation, &options(case)) {
        Ok(c) => c,
        Err(CompileError::User(errors)) => return Ok(Outcome::Refused(errors)),
        Err(e @ CompileError::Broken(_)) => return Err(e.to_string()),
    };
    c.job.kernels.iter_mut().for_each(|k| without_marks(&mut k.body));
    let given = StepInputs::new(&c, case, ranges);
    let graph = &c.graph;
    let want = ExpectedStep::new(graph, &given, case.precision, RUNS[0]);
    if graph.roots().iter().any(|v| want.values[v.index()].iter().any(|x| !x.is_finite())) {
        return Ok(Outcome::NotFinite);
    }
    let full = |e: &str| case.moe_buffer != MoeBuffer::Whole && e.contains(" is more than ");
    let got = match reference::run_step(&c.job, &given.params, &given.states, &given.inputs, STEP, RATE, SEED) {
        Err(e) if full(&e.to_string()) => return Ok(Outcome::Full(e.to_string())),
        got => got.map_err(|e| e.to_string())?,
    };
    let mut wrong = if case.precision.is_half() { without_rounding(&c, &eval_graph, &given)? } else { vec![] };
    if !want.fits {
        return if wrong.is_empty() { Ok(Outcome::Right(Data::Real)) } else { Err(wrong.join("; ")) };
    }
    let settings = Settings { step: STEP, steps: 1, evaluations: 0, learning_rate: RATE, seed: SEED, interleaving: Interleaving::Random(case.seed) };
    let other = reference::run_step_with(&c.job, &given.params, &given.states, &given.inputs, &settings).map_err(|e| format!("streams: {e}"))?;
    if (&other.reports, &other.params, &other.states) != (&got.reports, &got.params, &got.states) {
        return Err("streams and list order give different results".into());
    }
    // Small integers have exact sums in any order; squares of gradients may be too large.
    let exact = case.data == Data::Exact && want.is_exact(graph, graph.grad_norm.map_or(usize::MAX, Value::index));
    let want = if exact { want.exactly() } else { want };
    let mut differs = compare_step(graph, &want, &got);
    if !differs.is_empty() && !want.is_sharp() {
        differs = compare_step(graph, &ExpectedStep::new(graph, &given, case.precision, RUNS[1]), &got);
    }
    wrong.extend(differs);
    wrong.extend(round_trip(&c.job).err());
    wrong.extend(played(&c.job).err());
    wrong.extend(in_use(&c.job).err());
    wrong.extend(planned_differently(text, defines, case, &given, &got)?);
    if !wrong.is_empty() {
        return Err(wrong.join("; "));
    }
    let evaluated = match reference::run_eval(&c.job, &given.params, &given.inputs, SEED) {
        Err(e) if full(&e.to_string()) => return Ok(Outcome::Full(e.to_string())),
        evaluated => evaluated.map_err(|e| format!("evaluation: {e}"))?,
    };
    let want = ExpectedStep::new(&eval_graph, &given, case.precision, RUNS[0]);
    let want = if exact && want.is_exact(&eval_graph, usize::MAX) { want.exactly() } else { want };
    let wrong: Vec<String> = compare_reports(&eval_graph, &want, &evaluated).into_iter().map(|e| format!("evaluation's {e}")).collect();
    if !wrong.is_empty() {
        return Err(wrong.join("; "));
    }
    Ok(Outcome::Right(if exact { Data::Exact } else { Data::Real }))
}

/// The body with products in full precision, without tf32.
pub fn without_marks(body: &mut Body) {
    for node in &mut body.nodes {
        if let Op::Dot { tf32, .. } | Op::GroupedDot { tf32, .. } = &mut node.op {
            *tf32 = false;
        }
    }
}

/// The differences of a step and an evaluation beyond 1e-9, without rounding to 16 bits.
fn without_rounding(c: &Compiled, eval_graph: &Graph, given: &StepInputs) -> Result<Vec<String>, String> {
    let plain = |e: String| format!("without rounding: {e}");
    let job = unrounded(&c.job);
    let got = reference::run_step(&job, &given.params, &given.states, &given.inputs, STEP, RATE, SEED).map_err(|e| plain(e.to_string()))?;
    let evaluated = reference::run_eval(&job, &given.params, &given.inputs, SEED).map_err(|e| plain(format!("evaluation: {e}")))?;
    let step = compare_step(&c.graph, &ExpectedStep::unrounded(&c.graph, given), &got);
    let evaluation = compare_reports(eval_graph, &ExpectedStep::unrounded(eval_graph, given), &evaluated);
    Ok(step.into_iter().chain(evaluation.into_iter().map(|e| format!("evaluation's {e}"))).map(plain).collect())
}

/// The differences in a step's reports, parameters and states.
fn compare_step(graph: &Graph, want: &ExpectedStep, got: &reference::StepResult) -> Vec<String> {
    let mut wrong = compare_reports(graph, want, &got.reports);
    wrong.extend(graph.grad_norm.and_then(|v| want.differs("grad_norm", &[got.reports["grad_norm"]], v, &want.values[v.index()])));
    for u in &graph.updates {
        let info = &graph.params[u.param as usize];
        let mut compare = |name: &str, got: &[f64], v: Value| {
            let in_order = eval::reorder(&graph.body.dims, &want.values[v.index()], graph.body.dims_of(v), &info.ty.dims);
            wrong.extend(want.differs(name, got, v, &in_order));
        };
        // AdamW divides by a root that may be tiny, which magnifies rounding without bound, so only its states are
        // compared.
        if want.is_sharp() || u.states.len() < 2 {
            compare(&info.name, &got.params[&info.name].data, u.new);
        }
        for (k, v) in u.states.iter().enumerate() {
            compare(&format!("{} state {k}", info.name), &got.states[&(info.name.clone(), k as u32)].data, *v);
        }
    }
    wrong
}

/// The first bitwise difference to a plan without options that must change nothing. With random rules a recomputed
/// value may be split differently from its original, so recomputation is kept.
fn planned_differently(
    text: &str,
    defines: &[(&str, &str)],
    case: &Case,
    given: &StepInputs,
    got: &reference::StepResult,
) -> Result<Option<String>, String> {
    let recompute = if case.rows == RowChoice::Rules { Recompute::None } else { case.recompute };
    let activation_offload = ActivationOffload::Off;
    let simple = Case { memory_order: MemoryOrder::Time, activation_offload, tf32: false, ..case.clone() };
    let plain = Case { recompute, tp_overlap: TpOverlap::Off, offload: Offload::Off, param_offload: ParamOffload::Off, pairs: false, ..simple };
    // Recomputation may change which logits can be cut, and so how sums over tokens round.
    if plain == *case || case.logits > 1 {
        return Ok(None);
    }
    let Models { training, evaluation, .. } = models(text, defines, &plain)?;
    let c = compile(training, evaluation, &options(&plain))
        .map_err(|e| format!("without recomputation, chunks, offload, pairs and an order for memory: {e}"))?;
    let want = reference::run_step(&c.job, &given.params, &given.states, &given.inputs, STEP, RATE, SEED).map_err(|e| e.to_string())?;
    let same = want.reports == got.reports && want.params == got.params && want.states == got.states;
    let Case { recompute, tp_overlap, offload, param_offload, activation_offload, memory_order, pairs, .. } = case;
    let changes = format!(
        "{recompute:?}, {tp_overlap:?}, {offload:?}, {param_offload:?}, {activation_offload:?}, {memory_order:?} and pairs: {pairs} change a result"
    );
    Ok((!same).then_some(changes))
}

/// Runs a job, which `c` may have been before it was changed, in list order and in some interleavings of its streams, with none, one or two evaluations before each step.
///
/// # Errors
/// A difference, or an error that stops one of the runs.
pub fn interleaved(c: &Compiled, job: &Job, case: &Case, interleavings: u64) -> Result<(), String> {
    let given = StepInputs::new(c, case, &Ranges::new());
    let run = |interleaving| {
        let evaluations = if let Interleaving::Random(seed) = interleaving { seed % 3 } else { 0 };
        let settings = Settings { step: STEP, steps: 2, evaluations, learning_rate: RATE, seed: SEED, interleaving };
        reference::run_step_with(job, &given.params, &given.states, &given.inputs, &settings).map_err(|e| format!("{interleaving:?}: {e}"))
    };
    let ordered = run(Interleaving::List)?;
    for seed in 0..interleavings {
        let other = run(Interleaving::Random(seed))?;
        let text = |r: &reference::StepResult| format!("{:?} {:?} {:?}", r.reports, r.params, r.states);
        if text(&other) != text(&ordered) {
            return Err(format!("interleaving {seed} gives another result"));
        }
    }
    Ok(())
}

fn compare_reports(graph: &Graph, want: &ExpectedStep, got: &BTreeMap<String, f64>) -> Vec<String> {
    let total = graph.loss.map(|value| Report { name: "loss".into(), value });
    // A metric may be a count, which rounding of its operands changes by whole units.
    let metrics = graph.metrics.iter().filter(|_| want.is_sharp());
    let reports = graph.losses.iter().chain(metrics).chain(&total);
    reports.filter_map(|r| want.differs(&r.name, &[got[&r.name]], r.value, &want.values[r.value.index()])).collect()
}

const RATE: f64 = 0.0625;
/// The loss scale of f16 models.
const SCALE: f64 = 16.0;
const SEED: u64 = 7;
const STEP: u64 = 3;

/// The state that a step starts from: whole tensors by name.
pub struct StepInputs {
    params: BTreeMap<String, Tensor>,
    inputs: BTreeMap<String, Tensor>,
    states: reference::States,
}

impl StepInputs {
    fn new(c: &Compiled, case: &Case, ranges: &Ranges) -> StepInputs {
        let graph = &c.graph;
        let sizes = |ty: &Type| ty.dims.iter().map(|d| graph.body.dims[*d].logical).collect::<Vec<u64>>();
        let tensor = |ty: &Type, element: &dyn Fn(u64) -> f64| {
            let sizes = sizes(ty);
            Tensor { data: (0..sizes.iter().product()).map(element).collect(), sizes }
        };
        let stream = |name: &str| random::stream(random::key(name), case.seed, 0);
        let float = |stream: u64, i: u64| match case.data {
            Data::Real => random::normal(stream, i) * 0.5,
            Data::Exact => random::normal(stream, i).round(),
        };
        let state = |stream: u64, i: u64| match case.data {
            Data::Real => random::normal(stream, i).powi(2) * 0.1,
            Data::Exact => float(stream, i),
        };
        let input = |entry: &InputEntry, i: u64| {
            let (name, u) = (&entry.name, random::uniform(stream(&entry.name), i));
            match entry.dtype {
                DType::I32 => {
                    let most = entry.takes.iter().flatten().last().filter(|i| i.most < i32::MAX);
                    let range = ranges.get(name).copied().unwrap_or(Range { below: most.map_or(4, |i| i.most as u64 + 1), ignored: false });
                    if range.ignored && random::uniform(stream(name), !i) < 0.3 { -100.0 } else { (u * range.below as f64).floor() }
                }
                DType::Bool => f64::from(u < 0.7),
                DType::F32 | DType::Bf16 | DType::F16 => float(stream(name), i) * 2.0,
            }
        };
        let with_states = graph.updates.iter().flat_map(|u| (0..u.states.len() as u32).map(move |k| (u.param, k)));
        StepInputs {
            params: graph.params.iter().map(|p| (p.name.clone(), tensor(&p.ty, &|i| float(stream(&p.name), i)))).collect(),
            inputs: graph.inputs.iter().zip(&c.job.inputs).map(|(p, e)| (p.name.clone(), tensor(&p.ty, &|i| input(e, i)))).collect(),
            states: with_states
                .map(|(p, k)| {
                    let info = &graph.params[p as usize];
                    ((info.name.clone(), k), tensor(&info.ty, &|i| state(stream(&format!("{} state {k}", info.name)), i)))
                })
                .collect(),
        }
    }
}

/// Runs jobs from the same start, in several orders.
pub struct Runner(StepInputs);

/// Reports, parameters and states after a step, and reports of an evaluation.
pub type Outcomes = (BTreeMap<String, f64>, BTreeMap<String, Tensor>, reference::States, BTreeMap<String, f64>);

impl Runner {
    pub fn new(c: &Compiled, case: &Case, ranges: &Ranges) -> Runner {
        Runner(StepInputs::new(c, case, ranges))
    }

    /// # Errors
    /// What stopped a rank, and orders of streams that give different results, or evaluations before steps that do.
    pub fn outcomes(&self, job: &Job) -> Result<Outcomes, String> {
        let StepInputs { params, inputs, states } = &self.0;
        let mut out: Option<Outcomes> = None;
        let orders = [Interleaving::List, Interleaving::Random(1), Interleaving::Random(2), Interleaving::Random(3)];
        for (interleaving, evaluations) in orders.into_iter().zip([0, 0, 1, 2]) {
            let settings = Settings { step: STEP, steps: 2, evaluations, learning_rate: RATE, seed: SEED, interleaving };
            let got = reference::run_step_with(job, params, states, inputs, &settings).map_err(|e| e.to_string())?;
            let eval = reference::run_eval(job, params, inputs, SEED).map_err(|e| format!("evaluation: {e}"))?;
            let got = (got.reports, got.params, got.states, eval);
            match &out {
                Some(first) if *first != got => return Err("another order, or an evaluation before each step, gives other results".into()),
                Some(_) => {}
                None => out = Some(got),
            }
        }
        out.ok_or_else(|| "nothing ran".into())
    }
}

/// The sources and scalars of a logical graph, for [`eval`].
pub struct Logical<'a> {
    pub graph: &'a Graph,
    pub given: &'a StepInputs,
}

impl Env for Logical<'_> {
    fn source(&mut self, op: &Op, ty: &Type) -> Vec<f64> {
        match op {
            Op::Param(p) => self.given.params[&self.graph.params[*p as usize].name].data.clone(),
            Op::Input(i) => self.given.inputs[&self.graph.inputs[*i as usize].name].data.clone(),
            Op::State(p, k) => self.given.states[&(self.graph.params[*p as usize].name.clone(), *k)].data.clone(),
            Op::Table(t) => eval::reorder(&self.graph.body.dims, &self.graph.tables[*t as usize].data, &ty.dims, &ty.dims),
            other => panic!("{}", other.name()),
        }
    }

    fn scalar(&self, scalar: &Scalar) -> f64 {
        match scalar {
            Scalar::LearningRate => RATE,
            Scalar::LossScale => SCALE,
            Scalar::Step => STEP as f64,
            Scalar::Seed => SEED as f64,
            Scalar::BiasCorrection(beta) => 1.0 - beta.0.powi(STEP as i32),
            other => panic!("{other:?}"),
        }
    }

    fn base(&self, _: &Base) -> u64 {
        0
    }
}
