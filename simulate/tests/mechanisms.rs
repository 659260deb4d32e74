//! Mechanisms one by one, against what a hand works out.

use frontend::Options as Text;
use ir::diag::Sources;
use ir::options::{Offload, Options as Plan, Overlap, SequenceParallel, Zero};
use ir::pipeline::Schedule;
use ir::program::{Action, BodyKind, Job, ProgramPhase};
use passes::compile::compile;
use passes::report::explain::{exchanges, totals};
use simulate::Options;
use simulate::fit::{self, KernelTime, StepTime};
use simulate::kernels::formula;
use simulate::machine::{Figure, Machine, Measured};
use simulate::step::{Step, predict, without};
use simulate::tape::{BY_ITSELF, Costs, Meetings, StageTape};
use std::collections::{BTreeMap, BTreeSet};

const MLP: &str = "models/mlp.mdl";
const GPT2: &str = "models/gpt2.mdl";
const LLAMA: &str = "models/llama.mdl";
const MIXTRAL: &str = "models/mixtral.mdl";

const SMALL: &str = "layers=4 hidden=64 heads=4 seq=32 vocab=128";

fn job(model: &str, defines: &str, plan: Plan) -> Job {
    let path = format!("{}/../{model}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).expect("a model text");
    let defines = defines.split(' ').filter_map(|d| d.split_once('=')).map(|(n, v)| (n.into(), v.into())).collect();
    let micro_batch = Some(plan.micro_batch * plan.dp);
    let elaboration = Text { defines, batch: plan.global_batch, micro_batch, ..Text::default() };
    let models = frontend::compile_both(&mut Sources::default(), model, &text, &elaboration, &mut |_| Err("no imports".into()));
    let models = models.unwrap_or_else(|e| panic!("{model}: {e:?}"));
    compile(models.training, models.evaluation, &plan).unwrap_or_else(|e| panic!("{model}: {e:?}")).job
}

fn plan(pp: u64, microbatches: u64) -> Plan {
    Plan { pp, micro_batch: 1, global_batch: microbatches, serial_exchanges: true, ..Plan::default() }
}

/// A machine on which only kernels take time, with a core for each rank where it has cores.
fn ideal(name: &str) -> Machine {
    let mut machine = Machine::named(name).expect("a machine");
    machine.devices = machine.devices.max(8);
    (machine.host.wake, machine.host.crowded_wake) = (None, None);
    machine.device.memory.bytes_per_second.value = 1e300;
    machine.host.bus_bytes_per_second.value = 1e300;
    for figure in [&mut machine.device.launch, &mut machine.device.phase, &mut machine.contention.kernels, &mut machine.contention.exchanges] {
        figure.value = 0.0;
    }
    for link in &mut machine.links {
        (link.bytes_per_second.value, link.latency.value, link.hop.value) = (1e300, 0.0, 0.0);
    }
    machine
}

fn figure(value: f64) -> Figure {
    Figure { value, source: "a100".into(), spread: 0.0 }
}

fn step(job: &Job, machine: &Machine) -> Step {
    predict(job, machine, Options::default()).expect("it ends")
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * b.abs().max(1e-12)
}

/// How often a stage's program launches each kernel in bodies of a kind that a training step calls.
fn launched(job: &Job, stage: usize, kind: fn(BodyKind) -> bool) -> Vec<u64> {
    let mut out = vec![0; job.kernels.len()];
    let program = &job.programs[job.stages[stage].program as usize];
    let called: BTreeSet<u32> = job.stages[stage].schedule.train.iter().map(|c| c.body.0).collect();
    let bodies = called.into_iter().map(|b| &program.bodies[b as usize]);
    for command in bodies.filter(|b| kind(b.kind)).flat_map(|b| &b.commands) {
        if let Action::Launch { kernel, .. } = &command.action {
            out[kernel.index()] += 1;
        }
    }
    out
}

/// A machine on which a stage's forward pass takes one second, its backward pass two, and all else nothing. In each
/// kind of pass one kernel takes time, which all stages have alike.
fn passes_of_one_and_two(job: &Job, name: &str) -> Machine {
    let mut machine = ideal(name);
    let mut kernels: BTreeMap<String, Figure> = job.kernels.iter().map(|k| (k.name(), figure(0.0))).collect();
    let forward = |k: BodyKind| matches!(k, BodyKind::Forward(_));
    let backward = |k: BodyKind| matches!(k, BodyKind::Backward(_));
    let all: Vec<[Vec<u64>; 2]> = (0..job.stages.len()).map(|s| [launched(job, s, forward), launched(job, s, backward)]).collect();
    for (own, other, seconds) in [(0, 1, 1.0), (1, 0, 2.0)] {
        let alike = |k: &usize| all[0][own][*k] > 0 && all.iter().all(|s| s[own][*k] == all[0][own][*k] && s[other][*k] == 0);
        let k = (0..job.kernels.len()).find(alike).expect("a kernel of all layers");
        kernels.insert(job.kernels[k].name(), figure(seconds / all[0][own][k] as f64));
    }
    machine.measured = Some(Measured { threads: 1, kernels });
    machine
}

/// The bubbles are of `p` stages and `m` microbatches, whose passes take a second forward and two backward.
#[test]
fn bubbles_are_those_of_the_closed_forms() {
    for (pp, m) in [(1, 3), (2, 2), (2, 8), (4, 4), (4, 8)] {
        for schedule in [Schedule::OneFOneB, Schedule::GPipe] {
            let job = job(MLP, "depth=4 features=16 hidden=8 classes=4", Plan { schedule: schedule.clone(), ..plan(pp, m) });
            for machine in ["a100-80g-dgx", "cpu"] {
                let found = step(&job, &passes_of_one_and_two(&job, machine));
                let case = format!("{schedule:?}, {pp} stages, {m} microbatches on {machine}");
                assert!(found.steady && near(found.seconds, 3.0 * (m + pp - 1) as f64), "{case}: {} s", found.seconds);
                assert!(near(found.spent.bubble, 3.0 * (pp - 1) as f64), "{case}: {:?}", found.spent);
            }
        }
    }
}

/// Virtual stages divide the bubble by as many as a stage has (Narayanan et al. 2021), where messages are buffered.
#[test]
fn virtual_stages_divide_the_bubble() {
    for (pp, v, m) in [(2, 2, 4), (2, 2, 8), (4, 2, 8)] {
        let job = job(MLP, "depth=8 features=16 hidden=8 classes=4", Plan { vpp: Some(v), ..plan(pp, m) });
        let found = step(&job, &passes_of_one_and_two(&job, "cpu"));
        let bubble = 3.0 * (pp - 1) as f64 / v as f64;
        assert!(near(found.seconds, 3.0 * m as f64 + bubble), "{pp} x {v}, {m} microbatches: {} s", found.seconds);
        assert!(near(found.spent.bubble, bubble), "{:?}", found.spent);
    }
}

/// If the last of four stages takes twice as long, it is always busy from the first microbatch's arrival to the last
/// one's return.
#[test]
fn a_slow_stage_holds_up_all() {
    let job = job(MLP, "depth=4 features=16 hidden=8 classes=4", plan(4, 8));
    let machine = passes_of_one_and_two(&job, "a100-80g-dgx");
    let slow = |stage, factor| predict(&job, &machine, Options { slow: Some((stage, factor)), ..Options::default() }).expect("it ends").seconds;
    assert!(near(slow(3, 2.0), 3.0 * 3.0 + 8.0 * 6.0), "{}", slow(3, 2.0));
    // If the first stage is slow, its forward passes fill the others, and it never waits.
    assert!(near(slow(0, 4.0), 8.0 * 12.0), "{}", slow(0, 4.0));
    assert!(near(slow(1, 1.0), 3.0 * 11.0));
}

/// One microbatch goes through two stages and back.
#[test]
fn a_slow_link_is_waited_for_in_both_directions() {
    let job = job(MLP, "depth=2 features=16 hidden=8 classes=4", plan(2, 1));
    let mut machine = passes_of_one_and_two(&job, "a100-80g-dgx");
    let messages = exchanges(&job).into_iter().filter(|e| e.kind == "send").count();
    assert_eq!(messages, 2);
    // Sums of reports over the stages are left out.
    let passes = |_: usize, body: &ir::program::ProgramBody, at: usize| !matches!(body.commands[at].action, Action::Collective { .. });
    let seconds = |machine: &Machine| without(&job, machine, Options::default(), &passes).expect("it ends");
    machine.links[0].latency.value = 0.25;
    assert!(near(seconds(&machine), 2.0 * 3.0 + 2.0 * 0.25));
    // Each direction carries 8 elements of 4 bytes, over a link of 32 bytes a second.
    (machine.links[0].latency.value, machine.links[0].bytes_per_second.value) = (0.0, 32.0 / machine.links[0].efficiency.value);
    assert!(near(seconds(&machine), 2.0 * 3.0 + 2.0), "{}", seconds(&machine));
}

/// All time is accounted for on every machine: what ranks do, and what the step waits for.
#[test]
fn parts_add_up_to_the_step() {
    let cases = [
        (GPT2, SMALL, Plan { dp: 2, tp: 2, pp: 2, zero: Zero::States, micro_batch: 1, global_batch: 8, ..plan(2, 8) }),
        (
            LLAMA,
            "layers=4 hidden=64 heads=4 kv_heads=2 ffn=96 seq=32 vocab=128",
            Plan { tp: 2, sp: SequenceParallel::On, vpp: Some(2), ..plan(2, 4) },
        ),
        (
            MIXTRAL,
            "layers=2 hidden=32 heads=2 kv_heads=2 expert_ffn=32 experts=4 seq=16 vocab=64",
            Plan { dp: 2, ep: 2, pp: 2, global_batch: 8, ..plan(2, 8) },
        ),
        (GPT2, SMALL, Plan { dp: 4, zero: Zero::Params, global_batch: 8, ..plan(1, 8) }),
        (GPT2, SMALL, Plan { dp: 2, overlap: Overlap::Off, global_batch: 4, ..plan(1, 4) }),
        (GPT2, SMALL, Plan { cp: 2, schedule: Schedule::ZbH1, ..plan(2, 4) }),
    ];
    for (model, defines, plan) in cases {
        let job = job(model, defines, plan.clone());
        for machine in ["a100-80g-dgx", "h100-dgx", "cpu"] {
            let found = step(&job, &Machine::named(machine).expect("a machine"));
            for spent in found.stages.iter().chain([&found.spent]) {
                let all: f64 = spent.named().iter().map(|s| s.1).sum();
                assert!(near(all, found.seconds), "{model} on {machine}: {all} of {}", found.seconds);
            }
            let path: f64 = found.path.iter().map(|p| p.1).sum();
            assert!(near(path, found.seconds), "{model} on {machine}: {path} of {}", found.seconds);
            assert!(found.steady, "{model} on {machine}");
        }
    }
}

/// Without time of exchanges a step of one stage takes what its kernels take.
#[test]
fn with_infinite_links_time_is_compute() {
    for plan in [plan(1, 2), Plan { dp: 4, zero: Zero::States, global_batch: 8, ..plan(1, 8) }, Plan { tp: 4, ..plan(1, 2) }] {
        let job = job(GPT2, SMALL, plan);
        let mut machine = Machine::named("h100-dgx").expect("a machine");
        machine.device.phase.value = 0.0;
        (machine.contention.kernels.value, machine.contention.exchanges.value) = (0.0, 0.0);
        machine.host.bus_bytes_per_second.value = 1e300;
        for link in &mut machine.links {
            (link.bytes_per_second.value, link.latency.value, link.hop.value) = (1e300, 0.0, 0.0);
        }
        let found = step(&job, &machine);
        let alone: f64 = found.kernels.iter().filter(|r| r.name != "the batch").map(|r| r.seconds).sum();
        let copies = found.spent.copies;
        assert!(near(found.seconds - copies, alone), "{} of kernels {alone}", found.seconds);
    }
}

/// Each mechanism appears in the time under its own name, and under no other.
#[test]
fn taking_a_mechanism_out_takes_its_time_out() {
    let job = job(GPT2, SMALL, plan(1, 2));
    let machine = Machine::named("a100-80g-dgx").expect("a machine");
    let whole = step(&job, &machine);
    let part = |name: &str| whole.path.iter().find(|p| p.0 == name).map_or(0.0, |p| p.1);
    let changed = |change: fn(&mut Machine)| {
        let mut other = machine.clone();
        change(&mut other);
        step(&job, &other).seconds
    };
    assert!(near(whole.seconds - changed(|m| m.device.launch.value = 0.0), part("launches")));
    assert!(near(whole.seconds - changed(|m| m.device.phase.value = 0.0), part("the host between phases")));
    // Launches that take longer add as much as their part says.
    assert!(near(whole.seconds - changed(|m| m.device.launch.value *= 3.0), -2.0 * part("launches")));
    assert!(near(step(&job, &machine).seconds, without(&job, &machine, Options::default(), &|_, _, _| true).expect("it ends")));
    let kernels = |s: usize, body: &ir::program::ProgramBody, at: usize| s > 0 || !matches!(body.commands[at].action, Action::Launch { .. });
    let rest = without(&job, &machine, Options::default(), &kernels).expect("it ends");
    let alone: f64 = whole.kernels.iter().filter(|r| r.name != "the batch" && r.name != "fills").map(|r| r.seconds).sum();
    assert!(near(whole.seconds - rest, alone), "{} without, {rest}; kernels {alone}", whole.seconds);
}

/// The simulated programs send what `mcc explain` says.
#[test]
fn bytes_are_those_of_explain() {
    for plan in [
        Plan { dp: 2, tp: 2, zero: Zero::States, global_batch: 8, ..plan(2, 8) },
        Plan { dp: 2, tp: 2, sp: SequenceParallel::On, zero: Zero::Params, global_batch: 4, ..plan(1, 4) },
        Plan { cp: 2, dp: 2, vpp: Some(2), global_batch: 8, ..plan(2, 8) },
    ] {
        let job = job(GPT2, SMALL, plan);
        let machine = ideal("a100-80g-dgx");
        let (mut costs, mut meetings) = (Costs::new(&job, &machine, &Options::default()), Meetings::default());
        let of_stage = |(s, stage): (usize, &ir::program::Stage)| {
            let tape = StageTape::new(&mut costs, s, &mut meetings, BY_ITSELF);
            let program = &job.programs[stage.program as usize];
            let calls: Vec<_> = [ProgramPhase::Train, ProgramPhase::Update].iter().flat_map(|p| stage.schedule.calls(*p)).collect();
            let times = |body: u32| calls.iter().filter(|c| c.body.0 == body && c.part == 0).count() as u64;
            let is_sent = |action: &Action| !matches!(action, Action::Recv { .. });
            let sent = tape.exchanges.iter().filter(|e| is_sent(&program.bodies[e.body as usize].commands[e.command as usize].action));
            sent.map(|e| e.bytes * times(e.body)).sum::<u64>()
        };
        let played: Vec<u64> = job.stages.iter().enumerate().map(of_stage).collect();
        let said = |stage: u64| {
            let all = exchanges(&job).into_iter().filter(|e| !e.optional && e.stages.contains(&stage));
            all.map(|e| e.sent_per_step).sum::<u64>()
        };
        let said: Vec<u64> = (0..job.stages.len() as u64).map(said).collect();
        assert_eq!(played, said);
        assert!(!totals(&exchanges(&job), false).is_empty() && said.iter().all(|n| *n > 0));
    }
}

/// A number of the machine governs as much as the step gains if the number is a little better, where kernels and
/// exchanges take nothing from each other: that feeds back, and is known only roughly.
#[test]
fn limits_are_what_the_numbers_change() {
    let cases = [
        (GPT2, SMALL, Plan { tp: 2, ..plan(1, 4) }, "h100-dgx"),
        (GPT2, SMALL, Plan { dp: 16, zero: Zero::Params, global_batch: 16, ..plan(1, 1) }, "h100-dgx"),
        (GPT2, SMALL, Plan { dp: 4, offload: Offload::Optimizer, zero: Zero::States, global_batch: 8, ..plan(1, 2) }, "a100-80g-dgx"),
        (MLP, "depth=4 features=512 hidden=512 classes=64", Plan { micro_batch: 64, global_batch: 64, ..plan(1, 1) }, "cpu"),
    ];
    let mut seen = BTreeSet::new();
    for (model, defines, plan, name) in cases {
        let job = job(model, defines, plan);
        let mut machine = Machine::named(name).expect("a machine");
        (machine.contention.kernels.value, machine.contention.exchanges.value) = (0.0, 0.0);
        let whole = step(&job, &machine);
        for (number, gain) in &whole.limits {
            let is_time = ["tail", "depth", "launch", "phase", "kernels", "exchanges", "latency", "hop"].iter().any(|t| number.ends_with(t));
            let (little, part) = (1e-4, if is_time { gain / 0.1 } else { gain / (1.0 - 1.0 / 1.1) });
            let text = serde_json::to_string(&machine).expect("JSON");
            let mut file: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            let value = field(&mut file, number);
            *value = (value.as_f64().expect("a number") * if is_time { 1.0 - little } else { 1.0 + little }).into();
            let better = step(&job, &Machine::parse(&file.to_string()).expect("a machine")).seconds;
            let off = (whole.seconds - better) / little - part;
            assert!(
                off.abs() <= 1e-3 * part + 1e-5 * whole.seconds,
                "{model} on {name}: {number} governs {part} s, not {off} more, of {}",
                whole.seconds
            );
            seen.insert(number.split('.').next_back().expect("a field").to_string());
        }
    }
    for number in ["efficiency", "depth", "tail", "launch", "phase", "bytes_per_second", "latency", "hop", "f32"] {
        assert!(seen.contains(number), "{number} limits none of {seen:?}");
    }
}

/// The value of a number by the name that it has in predictions.
fn field<'a>(file: &'a mut serde_json::Value, number: &str) -> &'a mut serde_json::Value {
    let mut at = file;
    let mut link = false;
    for part in number.split('.') {
        at = if link { at.as_array_mut().expect("links").iter_mut().find(|l| l["name"] == part).expect("a link") } else { &mut at[part] };
        link = part == "links";
    }
    &mut at["value"]
}

/// Ranks that share the host's memory take longer for it, which is no contention with exchanges.
#[test]
fn who_shares_a_pool_waits_for_that() {
    let job = job(GPT2, SMALL, Plan { dp: 8, offload: Offload::Optimizer, global_batch: 8, ..plan(1, 1) });
    let found = step(&job, &Machine::named("h100-dgx").expect("a machine"));
    let part = |name: &str| found.path.iter().filter(|p| p.0.contains(name)).map(|p| p.1).sum::<f64>();
    let alone = found.kernels.iter().find(|r| r.name == "kernels of the host").expect("an optimizer").seconds;
    // Eight ranks run at once, each at an eighth of the rate.
    assert!((part("kernels of the host") / (8.0 * alone) - 1.0).abs() < 0.05, "{} of {alone}", part("kernels of the host"));
    assert!(part("hold up") < 0.05 * found.seconds);
}

/// If groups of a stage lie otherwise than the first one, all wait for the slowest.
#[test]
fn a_group_across_machines_holds_up_all() {
    let job = job(GPT2, "layers=2 hidden=48 heads=3 seq=32 vocab=96", Plan { dp: 4, tp: 3, global_batch: 4, ..plan(1, 1) });
    let found = step(&job, &Machine::named("h100-dgx").expect("a machine"));
    // One of the ranks 6 to 8 is on another machine.
    let tp = found.exchanges.iter().find(|r| r.name == "all_reduce over tp").expect("sums");
    let network = Machine::named("h100-dgx").expect("a machine").links[1].latency.value;
    assert!(tp.seconds / tp.calls > network + 14e-6, "{tp:?}");
}

/// Four ranks with one thread each take twice as long on two cores.
#[test]
fn ranks_share_cores() {
    let mut machine = Machine::named("cpu").expect("a machine");
    machine.device.phase.value = 0.0;
    (machine.host.wake, machine.host.crowded_wake) = (None, None);
    (machine.contention.kernels.value, machine.contention.exchanges.value) = (0.0, 0.0);
    (machine.links[0].bytes_per_second.value, machine.links[0].latency.value, machine.links[0].hop.value) = (1e300, 0.0, 0.0);
    let job = |dp: u64| job(GPT2, SMALL, Plan { dp, global_batch: 2 * dp, serial_exchanges: false, ..plan(1, 1) });
    let seconds = |dp: u64| {
        let found = step(&job(dp), &machine);
        (found.seconds, found.kernels.iter().map(|r| r.seconds).sum::<f64>())
    };
    let [two, four] = [2, 4].map(seconds);
    assert!(near(two.0, two.1) && near(four.0, 2.0 * four.1), "{two:?} {four:?}");
}

/// Kernels take longer while an exchange is under way, and the other way round.
#[test]
fn kernels_and_exchanges_hold_each_other_up() {
    let job = job(GPT2, SMALL, Plan { dp: 2, zero: Zero::Gradients, global_batch: 8, ..plan(1, 4) });
    let mut machine = Machine::named("a100-80g-dgx").expect("a machine");
    let lost = |machine: &Machine| {
        let found = step(&job, machine);
        found.path.iter().filter(|p| p.0.contains("hold up")).map(|p| p.1).sum::<f64>()
    };
    let some = lost(&machine);
    (machine.contention.kernels.value, machine.contention.exchanges.value) = (0.0, 0.0);
    assert!(some > 0.0 && lost(&machine) < 1e-12, "{some}");
}

/// The machines of a stage's ranks decide over which links its groups exchange.
#[test]
fn groups_go_over_the_links_that_they_reach() {
    let names = |dp: u64, tp: u64| {
        let job = job(GPT2, SMALL, Plan { dp, tp, global_batch: dp, ..plan(1, 1) });
        let found = step(&job, &Machine::named("h100-dgx").expect("a machine"));
        found.path.into_iter().filter(|p| p.0.starts_with("starts of exchanges")).map(|p| p.0).collect::<BTreeSet<_>>()
    };
    assert_eq!(names(1, 4), BTreeSet::from(["starts of exchanges over NVLink".to_string()]));
    assert_eq!(names(4, 4), BTreeSet::from(["starts of exchanges over NVLink".into(), "starts of exchanges over InfiniBand".into()]));
}

/// A fit finds the kernels' numbers again from times of a machine with other numbers.
#[test]
fn numbers_of_kernels_are_found_again() {
    let job = job(GPT2, "layers=2 hidden=256 heads=4 seq=256 vocab=512", plan(1, 2));
    let mut real = Machine::named("cpu").expect("a machine");
    let device = &mut real.device;
    (device.products.efficiency.value, device.memory.efficiency.value, device.launch.value) = (0.61, 0.47, 3e-6);
    (device.attention.forward.value, device.attention.backward.value) = (0.41, 0.52);
    let seconds: Vec<f64> = job.kernels.iter().map(|k| formula(&real, k, 1).seconds()).collect();
    let time = |(kernel, seconds): (_, &f64)| KernelTime { kernel, threads: 1, calls: 1.0, seconds: *seconds };
    let times: Vec<KernelTime> = job.kernels.iter().zip(&seconds).map(time).collect();
    let mut machine = Machine::named("cpu").expect("a machine");
    let fits = fit::kernels(&mut machine, &times, "profile");
    assert_eq!(fits.len(), 4);
    assert!(fits.iter().all(|f| f.after < 0.02 && f.after < f.before), "{fits:?}");
    let near = |found: f64, real: f64| (found / real - 1.0).abs() < 0.03;
    let (found, real) = (&machine.device, &real.device);
    assert!(near(found.memory.efficiency.value, real.memory.efficiency.value) && near(found.launch.value, real.launch.value), "{fits:?}");
    assert!(near(found.products.efficiency.value, real.products.efficiency.value), "{fits:?}");
    assert!(near(found.attention.forward.value, real.attention.forward.value), "{fits:?}");
    assert!(near(found.attention.backward.value, real.attention.backward.value), "{fits:?}");
}

/// A fit finds the waits of threads again from whole steps, of ranks with a core each and of ranks that share cores.
#[test]
fn waits_of_threads_are_found_again_from_steps() {
    let mut real = Machine::named("cpu").expect("a machine");
    let figure = |value: f64| Some(Figure { value, source: "profile".into(), spread: 0.0 });
    (real.host.wake, real.host.crowded_wake, real.device.phase.value) = (figure(4e-5), figure(1.5e-4), 3e-4);
    let of = |tp: u64| job(GPT2, SMALL, Plan { tp, ..plan(1, 2) });
    let time = |job: Job, cores: u64| {
        let seconds = predict(&job, &Machine { devices: cores, ..real.clone() }, Options::default()).expect("a step").seconds;
        // The kernels have no measured times of their own.
        StepTime { job, cores, kernels: BTreeMap::new(), seconds }
    };
    let pipeline = job(GPT2, SMALL, plan(2, 4));
    let times = [time(of(1), 2), time(of(2), 2), time(pipeline, 2), time(of(4), 2), time(of(2), 1)];
    let mut machine = Machine::named("cpu").expect("a machine");
    let fits = fit::steps(&mut machine, &times, "profile");
    assert_eq!(fits.len(), 2);
    assert!(fits.iter().all(|f| f.after < 0.02 && f.samples >= 2), "{fits:?}");
    let value = |figure: &Option<Figure>| figure.as_ref().expect("a number").value;
    let near = |found: f64, real: f64| (found / real - 1.0).abs() < 0.1;
    assert!(near(value(&machine.host.wake), 4e-5) && near(value(&machine.host.crowded_wake), 1.5e-4), "{fits:?}");
    assert!(near(machine.device.phase.value, 3e-4), "{fits:?}");
}

/// A thread that waits takes a while to go on: the one that exchanges, after it has waited for kernels, and the one
/// that computes, after it has waited for the other.
#[test]
fn threads_that_wait_take_a_while_to_go_on() {
    let job = job(GPT2, SMALL, Plan { tp: 2, ..plan(1, 1) });
    let kernels: BTreeMap<String, Figure> = job.kernels.iter().map(|k| (k.name(), figure(1.0))).collect();
    let seconds = |wake: f64| {
        let mut machine = ideal("cpu");
        machine.measured = Some(Measured { threads: 1, kernels: kernels.clone() });
        machine.host.wake = Some(figure(wake));
        let step = predict(&job, &machine, Options::default()).expect("a step");
        assert!((step.spent.named().iter().map(|s| s.1).sum::<f64>() / step.seconds - 1.0).abs() < 1e-9);
        (step.seconds, step.spent.wakes)
    };
    let (without, none) = seconds(0.0);
    let [(one, waked), (two, twice)] = [seconds(1e-3), seconds(2e-3)];
    let waits = (one - without) / 1e-3;
    // Each layer sums twice in the forward pass, and two threads wake for each sum. In the backward pass, kernels run
    // beside the sums.
    assert!(none == 0.0 && waits >= 2.0 * 2.0 * 4.0 && (waits - waits.round()).abs() < 1e-6, "{waits}");
    assert!(((two - without) / 2e-3 - waits).abs() < 1e-6, "{two} {without}");
    assert!((waked - 1e-3 * waits).abs() < 1e-9 && (twice - 2.0 * waked).abs() < 1e-9, "{waked} {twice}");
}
