//! The search against all plans of small worlds, compiled and played one by one.

use ir::model::Model;
use ir::op::DType;
use ir::options::{Options, SplitK};
use ir::pipeline::{PassKind, Schedule};
use ir::program::Job;
use passes::pipeline::schedule::{ScheduleShape, order};
use passes::remedy::side_by_side;
use passes::report::footprint::{Footprint, Footprints};
use planner::sample::Sample;
use planner::search::{Effort, Models, SampleCache, Search};
use planner::space::{Choice, ModelFacts, Space};
use simulate::machine::Machine;
use std::time::Instant;

/// A model text with settings, for a machine.
struct World {
    text: &'static str,
    layers: u32,
    defines: &'static [(&'static str, &'static str)],
    machine: &'static str,
    ranks: u64,
    batch: u64,
    budget: u64,
    held: Vec<Choice>,
}

struct NoCache;

impl SampleCache for NoCache {
    fn get(&self, _: &Options, _: Option<u32>) -> Option<Sample> {
        None
    }

    fn put(&self, _: &Options, _: Option<u32>, _: &Sample) {}
}

impl World {
    fn models(&self, options: &Options, layers: Option<u32>) -> Option<Models> {
        let mut defines: Vec<(String, String)> = self.defines.iter().map(|(n, v)| ((*n).into(), (*v).into())).collect();
        if self.layers > 0 {
            defines.push(("layers".into(), layers.unwrap_or(self.layers).to_string()));
        }
        let elaboration = frontend::Options {
            defines,
            batch: options.global_batch,
            micro_batch: Some(options.micro_batch * options.dp),
            precision: DType::Bf16,
            ..frontend::Options::default()
        };
        let mut sources = ir::diag::Sources::default();
        let path = format!("{}/../models/{}", env!("CARGO_MANIFEST_DIR"), self.text);
        let text = std::fs::read_to_string(path).expect("a model");
        let models = frontend::compile_both(&mut sources, self.text, &text, &elaboration, &mut |_| Err("it imports nothing".into())).ok()?;
        let machine = Machine::named(self.machine).expect("a machine");
        let split_k = machine.generation().map_or(SplitK::Off, SplitK::For);
        Some((models.training, models.evaluation, Options { serial_exchanges: !machine.is_cpu(), split_k, ..options.clone() }))
    }

    fn model(&self) -> Model {
        let one = Options { global_batch: self.batch, ..Options::default() };
        self.models(&one, None).expect("a model").0
    }
}

const GPT2: &[(&str, &str)] = &[("hidden", "512"), ("heads", "8"), ("seq", "512"), ("vocab", "1024")];
const MIXTRAL: &[(&str, &str)] = &[
    ("hidden", "256"),
    ("heads", "4"),
    ("kv_heads", "4"),
    ("head_dim", "64"),
    ("expert_ffn", "512"),
    ("experts", "4"),
    ("seq", "256"),
    ("vocab", "512"),
];
/// Settings of a DeepSeek model, whose first layer is of another kind.
const DEEPSEEK: &[(&str, &str)] = &[
    ("hidden", "128"),
    ("heads", "4"),
    ("ffn", "256"),
    ("first_dense", "1"),
    ("q_rank", "64"),
    ("kv_rank", "32"),
    ("nope", "16"),
    ("turned", "16"),
    ("v_dim", "16"),
    ("experts", "8"),
    ("top_k", "2"),
    ("groups", "2"),
    ("top_groups", "1"),
    ("expert_ffn", "64"),
    ("seq", "128"),
    ("vocab", "256"),
];

/// All worlds. Some choices are fixed, so that there are few enough plans to compile them all.
fn worlds() -> Vec<World> {
    let world = |text, layers, defines, machine, ranks, batch| World { text, layers, defines, machine, ranks, batch, budget: u64::MAX, held: vec![] };
    let gpt2 = |layers, machine, ranks, batch| world("gpt2.mdl", layers, GPT2, machine, ranks, batch);
    let none = |w: World, choice| World { held: vec![choice], ..w };
    vec![
        none(gpt2(2, "h100-dgx", 2, 4), Choice::Schedule),
        none(gpt2(4, "a100-80g-dgx", 4, 8), Choice::Recompute),
        // No plan that keeps all activations and all states fits.
        World { budget: 120 << 20, ..none(gpt2(2, "h100-dgx", 2, 8), Choice::Zero) },
        World { held: vec![Choice::Zero, Choice::Recompute], ..gpt2(4, "h100-dgx", 16, 16) },
        World { held: vec![Choice::Zero, Choice::Recompute, Choice::Cp], ..gpt2(8, "b200", 8, 32) },
        World { held: vec![Choice::Recompute, Choice::Cp], ..gpt2(4, "cpu", 2, 4) },
        World { held: vec![Choice::Recompute, Choice::Schedule, Choice::Cp], ..world("mixtral.mdl", 2, MIXTRAL, "h100-dgx", 4, 8) },
        World { held: vec![Choice::Zero, Choice::Recompute, Choice::Cp, Choice::Vpp], ..world("mixtral.mdl", 2, MIXTRAL, "h200", 16, 16) },
        World { held: vec![Choice::Zero, Choice::Recompute, Choice::Cp], ..world("deepseek_v3.mdl", 3, DEEPSEEK, "h100-dgx", 4, 4) },
        World { held: vec![Choice::Zero, Choice::MicroBatch], ..world("mlp.mdl", 0, &[], "a100-80g-dgx", 8, 64) },
    ]
}

/// Indices of the worlds that compile in seconds. `make test-long-native` runs the others.
const QUICK: [usize; 5] = [0, 2, 5, 8, 9];

#[test]
fn a_search_finds_what_compiling_all_plans_finds() {
    worlds().into_iter().enumerate().filter(|(k, _)| QUICK.contains(k)).for_each(|(_, world)| searched(&world));
}

#[test]
#[ignore = "a minute: make test-long-native"]
fn a_search_finds_what_compiling_all_plans_of_larger_worlds_finds() {
    worlds().into_iter().enumerate().filter(|(k, _)| !QUICK.contains(k)).for_each(|(_, world)| searched(&world));
}

fn searched(world: &World) {
    let machine = Machine { measured: None, ..Machine::named(world.machine).expect("a machine") };
    let models = |o: &Options, n: Option<u32>| world.models(o, n);
    let bytes = |job: &Job| Footprints::new(job, &Footprint::of).most().1.total();
    let base = Options { global_batch: world.batch, ..Options::default() };
    let fixed = world.held.iter().copied().collect();
    let search = Search {
        space: Space { ranks: world.ranks, devices: machine.devices, base, fixed, model: ModelFacts::of(&world.model()) },
        machine: &machine,
        threads: 1,
        precision: DType::Bf16,
        budget: world.budget,
        models: &models,
        sources: &[],
        bytes: &bytes,
        kept: &NoCache,
        progress: &|_, _, _| {},
        // Changes would lead to plans beyond the space.
        effort: Effort { changes: 0, ..Effort::default() },
    };
    let name = format!("{} on {} ranks of {}", world.text, world.ranks, world.machine);
    let all = side_by_side(search.estimates(), &|(options, _, least): (Options, _, f64)| search.plan(&options).map(|p| (p, least)));
    // If memory is limited, some plans do not fit.
    assert_eq!(all.iter().any(|(plan, _)| plan.bytes > world.budget), world.budget < u64::MAX, "{name}");
    let (mut best, mut tightest) = (f64::INFINITY, 0.0f64);
    for (plan, least) in &all {
        let seconds = plan.step.seconds;
        assert!(*least > 0.0 && *least <= seconds, "{name}: {:?} takes {seconds} s, below the bound of {least} s", plan.options);
        tightest = tightest.max(least / seconds);
        if plan.bytes <= world.budget {
            best = best.min(seconds);
        }
    }
    let found = search.run();
    let first = found.plans.first().unwrap_or_else(|| panic!("{name}: no plan"));
    println!("{name}: {} plans, the best {best} s; found {} s, {} compiled, bound {tightest:.2}", all.len(), first.step.seconds, found.compiled);
    assert!(first.bytes <= world.budget && first.step.seconds <= best * (1.0 + 1e-9), "{name}: {best} s is best, not {:?}", first.options);
    assert!(all.len() > 20, "{name}: {} plans are hardly a choice", all.len());
    let hurried = Search { effort: Effort { until: Some(Instant::now()), ..search.effort }, ..search }.run();
    assert!(hurried.stopped && hurried.compiled < found.compiled, "{name}: {} plans compiled without any time", hurried.compiled);
    // One round of compiles is always tried; where memory is short, none of these may fit.
    assert!(world.budget < u64::MAX || !hurried.plans.is_empty(), "{name}: no plan without any time");
    assert!(!found.stopped, "{name}: stopped without a limit");
}

/// The bounds rely on this.
#[test]
fn stages_begin_and_end_with_their_first_virtual_stage() {
    for (schedule, chunks) in
        [(Schedule::GPipe, 1), (Schedule::OneFOneB, 1), (Schedule::OneFOneB, 3), (Schedule::ZbH1, 1), (Schedule::ZbV, 2), (Schedule::DualPipeV, 2)]
    {
        for (stages, microbatches) in [(2, 2), (2, 8), (4, 4), (4, 12)] {
            let shape = ScheduleShape { stages, chunks, microbatches, group: stages, pairs: false };
            let order = order(&schedule, shape);
            for passes in &order.stages {
                let (first, last) = (passes[0], passes[passes.len() - 1]);
                assert_eq!((first.kind, first.chunk, first.microbatch), (PassKind::Forward, 0, 0), "{schedule:?}");
                assert!(order.splits_backward() || (last.kind, last.chunk) == (PassKind::Backward, 0), "{schedule:?}: {last}");
            }
        }
    }
}
