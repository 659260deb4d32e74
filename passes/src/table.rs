//! All passes, in order: what the compiler does, on a page.
//!
//! A pass takes a module and leaves one ([`ir::module`]); after each, its verifier looks at what came out. A step and an evaluation are
//! graphs of their own that go the same way, as far as they have the same to do, and end in one job of programs that do both.

use crate::commands::{allocate, events, list_schedule, offload_activations, offload_states, pair_passes, prefetch, send_turns, streams};
use crate::graph::{accumulate_f32, differentiate, fold_constants, indices, optimize, pad, rematerialize, simplify, stage_sums};
use crate::local::{bucket, chunk_logits, offload, split_reduction, tf32, tp_overlap, update_pieces, zero};
use crate::lower::job;
use crate::partition;
use crate::partition::stored_rows::RowBudget;
use crate::report::{complaints, sizes};
use crate::sharding::{axes, check_cp, propagate, zigzag};
use ir::diag::Diagnostic;
use ir::graph::Graph;
use ir::module::{GlobalGraph, Graphs, JobLevel, Level, Module};
use ir::options::{ActivationOffload, MOE_PASSES, MemoryOrder, Offload, Options, Overlap, ParamOffload, RowChoice, TpOverlap, Zero};
use ir::program::Job;
use verify::{LocationPart, Violation, references};

/// Warnings of a pass that is done, or what the user has to mend before it can be.
pub type PassResult = Result<Vec<Diagnostic>, Vec<Diagnostic>>;

/// That what a verifier shows holds, or the first invariant that does not.
pub type Verification = Result<(), Violation>;

/// A pass, and how it is known to have done right.
pub struct Pass {
    /// A name of its own, by which [`find`] finds it.
    pub name: &'static str,
    /// What it does, in one sentence.
    pub summary: &'static str,
    /// The levels of what it takes and of what it leaves.
    pub levels: (Level, Level),
    /// Whether options ask for it.
    pub wanted: fn(&Options) -> bool,
    /// Changes the module in place.
    pub run: fn(&mut Module) -> PassResult,
    /// What looks at what it left, one after the other.
    pub verifiers: &'static [&'static Verifier],
}

/// Looks at a module after a pass. It believes nothing of the pass.
pub struct Verifier {
    /// A name of its own among [`VERIFIERS`].
    pub name: &'static str,
    /// What holds of a module that it accepts, in one sentence.
    pub summary: &'static str,
    /// The first and the last level at which it has to hold.
    pub levels: (Level, Level),
    /// Warnings say what it could not look at.
    pub run: fn(&Module) -> Result<Vec<Diagnostic>, Violation>,
}

const GRAPHS: Verifier = Verifier {
    name: "graph",
    summary: "Every op has the types that its operands give it, and what a graph names exists.",
    levels: (Level::Graph, Level::Graph),
    run: |m| shown(graphs(m)),
};
/// What looks at all that passes over logical graphs did, once these are done.
pub const MEANING: Verifier = Verifier {
    name: "meaning",
    summary: "A step computes what the text says, with its gradient and its optimizer, and an evaluation the same without drops.",
    levels: (Level::Graph, Level::Sharded),
    run: means,
};
const SHARDED: Verifier = Verifier {
    name: "sharded",
    summary: "The sharding of every value follows from those of its operands, by rules of the verifier's own.",
    levels: (Level::Sharded, Level::Job),
    run: |m| shown(sharded(m)),
};
const PARTITION: Verifier = Verifier {
    name: "partition",
    summary: "The ranks together compute the sharded graph, and what they send each other arrives.",
    levels: (Level::Local, Level::Job),
    run: |m| shown(partitioned(m)),
};
const LOCALS: Verifier = Verifier {
    name: "local",
    summary: "Every op of a local graph has the types that its operands give it, and runs no earlier than they do.",
    levels: (Level::Local, Level::Job),
    run: |m| shown(locals(m)),
};
const EQUIVALENCE: Verifier = Verifier {
    name: "equivalence",
    summary: "The local graphs compute what those of the partitioning compute, in real numbers.",
    levels: (Level::Local, Level::Job),
    run: |m| shown(equivalent(m)),
};
const COMMANDS: Verifier = Verifier {
    name: "commands",
    summary: "No command reads what is not there, and no rank waits forever.",
    levels: (Level::Commands, Level::Commands),
    run: |m| shown(sound(m)),
};
const MEMORY: Verifier = Verifier {
    name: "memory",
    summary: "As `commands`, and no two buffers in use at a time share a byte.",
    levels: (Level::Memory, Level::Memory),
    run: |m| shown(sound(m)),
};
const JOB: Verifier = Verifier {
    name: "job",
    summary: "As `memory`, and no two commands that can run at once touch the same bytes.",
    levels: (Level::Job, Level::Job),
    run: |m| shown(sound(m)),
};
const SERIAL: Verifier = Verifier {
    name: "serial",
    summary: "Where sends have turns, no rank waits forever, though exchanges are done one by one and none is buffered.",
    levels: (Level::Job, Level::Job),
    run: |m| shown(m.job.as_ref().map_or(Ok(()), verify::job::check_serial)),
};
const LOWERING: Verifier = Verifier {
    name: "lowering",
    summary: "Every program computes its local graphs, and the job describes them.",
    levels: (Level::Commands, Level::Job),
    run: |m| shown(refined(m)),
};

/// All verifiers, in the order of the levels that they look at.
pub const VERIFIERS: [&Verifier; 11] = [&GRAPHS, &MEANING, &SHARDED, &PARTITION, &LOCALS, &EQUIVALENCE, &COMMANDS, &MEMORY, &JOB, &SERIAL, &LOWERING];

/// The pass of this name.
pub fn find(name: &str) -> Option<&'static Pass> {
    PASSES.iter().find(|p| p.name == name)
}

/// The verifiers that a module has to hold up to, whatever pass it comes from.
pub fn verifiers(m: &Module) -> impl Iterator<Item = &'static Verifier> {
    let level = m.level();
    // Equivalence compares classes, which do not exist right after the partitioning.
    let partitioned = level == Level::Local && m.training.locals.is_empty();
    VERIFIERS.into_iter().filter(move |v| v.levels.0 <= level && level <= v.levels.1 && !(partitioned && v.name == EQUIVALENCE.name))
}

const fn graph(name: &'static str, summary: &'static str, run: fn(&mut Module) -> PassResult) -> Pass {
    Pass { name, summary, levels: (Level::Graph, Level::Graph), wanted: always, run, verifiers: &[&GRAPHS] }
}

const fn local(name: &'static str, summary: &'static str, wanted: fn(&Options) -> bool, run: fn(&mut Module) -> PassResult) -> Pass {
    Pass { name, summary, levels: (Level::Local, Level::Local), wanted, run, verifiers: &[&LOCALS] }
}

/// A pass over commands, of which no place follows yet.
const fn commands(name: &'static str, summary: &'static str, run: fn(&mut Module) -> PassResult) -> Pass {
    let wanted = |o: &Options| o.overlap != Overlap::Off;
    Pass { name, summary, levels: (Level::Commands, Level::Commands), wanted, run, verifiers: &[&COMMANDS] }
}

fn on_job(m: &mut Module, pass: fn(Job) -> Job) -> PassResult {
    m.job = m.job.take().map(pass);
    Ok(vec![])
}

/// The passes of every compile, in order.
pub const PASSES: &[Pass] = &[
    graph("drop_outputs", "Leaves out named outputs; an evaluation leaves parameters and states as they are.", |m| {
        m.on_graphs(|graph| Graph { outputs: vec![], ..graph });
        m.evaluation.on_graph(|graph| Graph { updates: vec![], ..graph });
        Ok(vec![])
    }),
    graph("differentiate", "Appends the backward pass; ops of it carry the layer and scope of the forward op.", |m| {
        let graph = differentiate::differentiate(m.training.take_graph(), &m.train).map_err(complaints::no_gradient)?;
        m.training.whole = GlobalGraph::Logical(graph);
        m.evaluation.on_graph(differentiate::sum_losses);
        Ok(vec![])
    }),
    graph("optimize", "Appends gradient norm, clipping and the optimizer, as ordinary ops.", |m| {
        let train = m.train;
        m.training.on_graph(|graph| optimize::optimize(graph, &train));
        Ok(vec![])
    }),
    graph("simplify", "Brings graphs to normal form: one n-ary sum op, no dead or repeated nodes, phase after phase.", |m| {
        m.on_graphs(simplify::simplify);
        unless(complaints::unused(m.training.whole.graph()))
    }),
    graph("accumulate_f32", "Leaves sums of 16-bit values unrounded where they are wanted in f32.", |m| {
        m.on_graphs(|graph| simplify::simplify(accumulate_f32::widen(graph)));
        Ok(vec![])
    }),
    graph("fold_constants", "Evaluates what follows from constants alone, as tables (rotary angles).", |m| {
        m.on_graphs(|graph| simplify::simplify(fold_constants::tabulate(graph)));
        Ok(vec![])
    }),
    graph("indices", "Finds what inputs of integers may hold, for the check of a run's data.", |m| {
        let found = indices::indices(m.training.whole.graph()).and(indices::indices(m.evaluation.whole.graph()));
        m.takes = found.takes;
        Ok(found.warnings)
    }),
    graph("pad", "Gives vocabularies the sizes that the mesh asks for, and masks padding where it could reach a result.", |m| {
        let Module { plan, options, mesh, training, evaluation, .. } = m;
        for graphs in [&mut *training, evaluation] {
            let mut padded = vec![];
            graphs.on_graph(|mut graph| {
                let lists = axes::lists(plan, &graph, mesh, options);
                padded = axes::pad_vocabularies(&mut graph, mesh, &lists, options.pad_vocab_to);
                graph
            });
            unless(sizes::padded(graphs.whole.graph()))?;
            graphs.on_graph(|graph| simplify::simplify(pad::mask_padding(graph, &padded)));
        }
        complaints::sizes(m)
    }),
    graph("stage_sums", "Splits sums whose terms are made on several pipeline stages: one per stage.", |m| {
        let pipeline = m.pipeline.clone();
        m.on_graphs(|graph| stage_sums::sum_by_stage(graph, &pipeline.layout, pipeline.weights()));
        Ok(vec![])
    }),
    // Recomputed copies are ordinary ops of the backward pass, so later passes need not know of them.
    graph("rematerialize", "Recomputes forward values in the backward pass instead of keeping them.", |m| {
        let Module { options, pipeline, training, .. } = m;
        training.on_graph(|graph| rematerialize::rematerialize(graph, options.recompute, &pipeline.layout));
        Ok(vec![])
    }),
    // Both graphs read the same parameters and data, so they store them alike.
    graph("zigzag", "Stores the positions of causal attention so that context-parallel ranks have equal work.", |m| {
        let choices = m.both().map(|graphs| {
            let graph = graphs.whole.graph();
            zigzag::choose(graph, &m.mesh, &axes::lists(&m.plan, graph, &m.mesh, &m.options))
        });
        let [training, evaluation] = choices;
        let (orders, warnings) = zigzag::agreed(training, &evaluation);
        m.on_graphs(|graph| zigzag::apply(graph, &orders));
        Ok(warnings)
    }),
    Pass {
        name: "propagate",
        summary: "Chooses a sharding for every value and inserts the reshards between them.",
        levels: (Level::Graph, Level::Sharded),
        wanted: always,
        run: |m| {
            let Module { plan, options, mesh, training, evaluation, .. } = m;
            let mut found = vec![];
            for graphs in [training, evaluation] {
                let graph = graphs.take_graph();
                let lists = axes::lists(plan, &graph, mesh, options);
                let sharded = propagate::propagate(graph, mesh, &lists, options.rows);
                // Random rules, which only tests use, may repeat work.
                if options.rows == RowChoice::Rules && found.is_empty() {
                    found = check_cp::check(&sharded, &lists);
                }
                graphs.whole = GlobalGraph::Sharded(sharded);
            }
            unless(found)
        },
        // `MEANING` covers all passes over logical graphs together.
        verifiers: &[&SHARDED, &MEANING],
    },
    Pass {
        name: "partition",
        summary: "Makes a local graph for each pipeline stage: local shapes, collectives, transfers, rows of experts.",
        levels: (Level::Sharded, Level::Local),
        wanted: always,
        run: |m| {
            let Module { options, pipeline, training, evaluation, .. } = m;
            let room = RowBudget { buffer: options.moe_buffer, passes: options.moe_passes };
            let made = |graphs: &Graphs, training: Option<&Graphs>| {
                let training = training.map(Graphs::sharded);
                partition::partition(graphs.sharded(), training, &pipeline.layout, pipeline.weights(), room)
            };
            let asked = ![1, MOE_PASSES].contains(&room.passes);
            let one = asked && partition::most_passes(training.sharded(), &pipeline.layout, pipeline.weights(), room) == Some(1);
            // From here on, local graphs are compared with sharded ones, which were compared with the text.
            (training.model, evaluation.model) = (None, None);
            training.stages = made(training, None)?;
            evaluation.stages = made(evaluation, Some(training))?;
            Ok(one.then(complaints::one_pass).into_iter().collect())
        },
        verifiers: &[&PARTITION],
    },
    local("classes", "Makes one local graph of those of stages that are equal up to names.", always, |m| {
        m.training.locals = partition::classes(m.training.stages.clone());
        let evaluations = partition::classes(m.evaluation.stages.clone());
        m.evaluation.locals = m.training.locals.iter().map(|l| job::of_stages(&evaluations, l).clone()).collect();
        Ok(vec![])
    }),
    // This runs before `tp_overlap`, since logits have their own chunks.
    local(
        "chunk_logits",
        "Computes logits, losses and their gradients for some tokens at a time.",
        |o| o.logits_chunks != Some(1),
        |m| {
            let chunks = m.options.logits_chunks;
            let mut cuts = vec![];
            m.on_classes(|training, evaluation| {
                let (training, cut) = chunk_logits::chunk(training, chunks);
                cuts.push(cut);
                (training, chunk_logits::chunk(evaluation, chunks).0)
            });
            Ok(complaints::whole_logits(&cuts, chunks))
        },
    ),
    local(
        "tp_overlap",
        "Cuts products beside tensor-parallel collectives, and these, into chunks.",
        |o| o.tp_overlap != TpOverlap::Off,
        |m| {
            let how = m.options.tp_overlap;
            m.on_classes(|training, evaluation| (tp_overlap::split(training, how), tp_overlap::split(evaluation, how)));
            Ok(vec![])
        },
    ),
    // This runs before `bucket`, since sharded updates are reduced and gathered in buckets of their own.
    local(
        "zero",
        "Shares updates out among data-parallel ranks, as parts of buckets of parameters.",
        |o| o.zero != Zero::None,
        |m| {
            let Module { options, training, evaluation, .. } = m;
            let pairs = std::mem::take(&mut training.locals).into_iter().zip(std::mem::take(&mut evaluation.locals));
            (training.locals, evaluation.locals) = zero::share_out(pairs.collect(), options, bucket::size(options)).into_iter().unzip();
            Ok(vec![])
        },
    ),
    local("bucket", "Joins the collectives that a step does once.", always, |m| {
        let size = bucket::size(&m.options);
        m.on_classes(|training, evaluation| (bucket::join(training, size), evaluation));
        Ok(vec![])
    }),
    // At this point updates are single or joined in buckets, and move as such.
    local(
        "offload",
        "Moves the values of updates to the host, and parameters that passes read apart from the weights.",
        |o| o.offload != Offload::Off,
        |m| {
            let params = m.options.param_offload;
            m.on_classes(|training, evaluation| offload::offload(training, evaluation, params));
            Ok(vec![])
        },
    ),
    local(
        "update_pieces",
        "Cuts large updates on the host into pieces.",
        |o| o.offload != Offload::Off,
        |m| {
            let size = update_pieces::PieceSize::of(&m.options);
            m.on_classes(|training, evaluation| (update_pieces::cut(training, size), evaluation));
            Ok(vec![])
        },
    ),
    // This runs after buckets are formed; sums of their parts stay as they are.
    Pass {
        name: "split_reduction",
        summary: "Cuts large sums in steps, and for GPUs products of few tiles, so that all threads have work.",
        levels: (Level::Local, Level::Local),
        wanted: always,
        run: |m| {
            let options = m.options.clone();
            m.on_classes(|training, evaluation| (split_reduction::cut(training, &options), split_reduction::cut(evaluation, &options)));
            Ok(vec![])
        },
        // `EQUIVALENCE` covers all passes over local graphs together, with sums of real numbers.
        verifiers: &[&LOCALS, &EQUIVALENCE],
    },
    Pass {
        name: "tf32",
        summary: "Marks the products of f32 factors that tensor cores are to round.",
        levels: (Level::Local, Level::Local),
        wanted: |o| o.tf32,
        run: |m| {
            m.on_classes(|training, evaluation| (tf32::mark(training), tf32::mark(evaluation)));
            Ok(vec![])
        },
        // Programs are compared with the graphs that this pass leaves.
        verifiers: &[&LOCALS, &EQUIVALENCE],
    },
    Pass {
        name: "lower",
        summary: "Fuses local graphs into kernels, gives values buffers and writes the commands.",
        levels: (Level::Local, Level::Commands),
        wanted: always,
        run: |m| {
            m.job = Some(job::lower(m));
            m.settled = JobLevel::Commands;
            Ok(vec![])
        },
        verifiers: &[&COMMANDS],
    },
    // This runs before streams and places in memory are assigned, so that its copies are treated as any others.
    Pass {
        wanted: |o| o.activation_offload != ActivationOffload::Off,
        ..commands("offload_activations", "Has activations wait in the host's memory for the backward pass.", |m| {
            let which = m.options.activation_offload;
            m.job = m.job.take().map(|job| offload_activations::offload(job, which));
            Ok(vec![])
        })
    },
    Pass {
        wanted: |o| o.overlap == Overlap::On && (o.activation_offload != ActivationOffload::Off || o.param_offload != ParamOffload::Off),
        ..commands("prefetch", "Issues copies from the host ahead of the commands that want them.", |m| on_job(m, prefetch::issue))
    },
    // This runs after `prefetch`, so a value is read from the disk before it is copied to the device.
    Pass {
        wanted: |o| o.offload == Offload::Disk || o.param_offload == ParamOffload::Disk,
        ..commands("offload_states", "Has states and parameters that the host keeps rest on a disk.", |m| {
            let (states, params) = (m.options.offload == Offload::Disk, m.options.param_offload == ParamOffload::Disk);
            m.job = m.job.take().map(|job| offload_states::offload(job, states, params));
            Ok(vec![])
        })
    },
    commands("streams", "Puts communication on streams of its own, and messages between stages in stashes.", |m| on_job(m, streams::assign)),
    Pass {
        wanted: |o| o.overlap != Overlap::Off || o.memory_order == MemoryOrder::Memory,
        ..commands(
            "list_schedule",
            "Orders the commands of each body, so that communication is under way beside compute, or few bytes are in use.",
            |m| {
                let how = m.options.memory_order;
                m.job = m.job.take().map(|job| list_schedule::schedule(job, how));
                Ok(vec![])
            },
        )
    },
    Pass {
        wanted: Options::pairs_passes,
        ..commands("pair_passes", "Calls a forward pass and the backward pass after it part by part, side by side.", |m| {
            m.job = m.job.take().map(|job| pair_passes::pair(job, &m.pipeline.order));
            Ok(vec![])
        })
    },
    Pass {
        name: "allocate",
        summary: "Gives every buffer its place in memory, and every stash its slots.",
        levels: (Level::Commands, Level::Memory),
        wanted: always,
        run: |m| {
            m.settled = JobLevel::Memory;
            on_job(m, allocate::allocate)?;
            unless(m.job.as_ref().map_or(vec![], |job| sizes::addressable(job, m.training.whole.graph())))
        },
        verifiers: &[&MEMORY],
    },
    // Events follow from the bytes that commands touch, not from values.
    Pass {
        name: "events",
        summary: "Has streams wait for each other where they touch the same bytes.",
        levels: (Level::Memory, Level::Job),
        wanted: always,
        run: |m| {
            m.settled = JobLevel::All;
            on_job(m, events::synchronise)
        },
        verifiers: &[&JOB, &LOWERING],
    },
    Pass {
        name: "send_turns",
        summary: "Says when what stages send goes out, where exchanges of a rank follow each other one by one.",
        levels: (Level::Job, Level::Job),
        wanted: |o| o.serial_exchanges && o.pp > 1,
        run: |m| on_job(m, send_turns::order),
        // Only the turns of sends change, not the commands.
        verifiers: &[&SERIAL],
    },
];

fn always(_: &Options) -> bool {
    true
}

/// Complaints that end a compile, if there are any.
fn unless(complaints: Vec<Diagnostic>) -> PassResult {
    if complaints.is_empty() { Ok(vec![]) } else { Err(complaints) }
}

/// Looks at the graphs of the step, then at those of an evaluation.
fn both(m: &Module, of: impl Fn(&Graphs) -> Verification) -> Verification {
    of(&m.training).map_err(|e| e.within(LocationPart::Training))?;
    of(&m.evaluation).map_err(|e| e.within(LocationPart::Evaluation))
}

fn shown(held: Verification) -> Result<Vec<Diagnostic>, Violation> {
    held.map(|()| vec![])
}

fn means(m: &Module) -> Result<Vec<Diagnostic>, Violation> {
    let unproved = verify::meaning::verify(m)?;
    Ok(unproved.map(complaints::unproved).into_iter().collect())
}

fn graphs(m: &Module) -> Verification {
    both(m, |g| verify::graph::verify(g.whole.graph()))
}

fn sharded(m: &Module) -> Verification {
    both(m, |g| references::whole(g).and_then(verify::sharded::verify))
}

fn partitioned(m: &Module) -> Verification {
    both(m, |g| {
        let sharded = references::whole(g)?;
        verify::partition::exchanges::verify(&g.stages)?;
        verify::partition::verify(sharded, &g.stages)
    })
}

fn locals(m: &Module) -> Verification {
    let class = |l: &ir::local::Local| LocationPart::Class(l.stages.first().map_or(0, |s| s.0));
    both(m, |g| {
        let sharded = references::whole(g)?;
        g.locals.iter().try_for_each(|l| verify::partition::local::verify(l, sharded).map_err(|e| e.within(class(l))))
    })
}

fn equivalent(m: &Module) -> Verification {
    let of =
        |graphs: fn(&Graphs) -> &[ir::local::Local]| verify::equivalence::Graphs { training: graphs(&m.training), evaluation: graphs(&m.evaluation) };
    verify::equivalence::verify(of(|g| &g.stages), of(|g| &g.locals))
}

fn sound(m: &Module) -> Verification {
    m.job.as_ref().map_or(Ok(()), |job| verify::job::verify_settled(job, m.settled))
}

fn refined(m: &Module) -> Verification {
    let Some(job) = &m.job else { return Ok(()) };
    both(m, |g| references::whole(g).map(|_| ()))?;
    verify::lowering::described::verify(job, m)?;
    verify::lowering::verify(job, m.settled, &m.training.locals, &m.evaluation)
}
