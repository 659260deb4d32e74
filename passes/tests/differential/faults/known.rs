//! Faults that get through, and why.

const FRONTEND: &str = "the frontend is trusted: proofs begin with the graph that it elaborates";
const RUNTIME: &str = "the runtime is trusted: no verifier looks at how it runs a job; tests of its own do";

/// Names, and what lets each of them through.
pub const KNOWN: &[(&str, &str)] = &[
    ("elaborate.attention.scale", FRONTEND),
    ("elaborate.attention.window", FRONTEND),
    ("elaborate.capacity.own", FRONTEND),
    ("elaborate.decay.attribute", FRONTEND),
    ("elaborate.decay.dims", FRONTEND),
    ("elaborate.group.frozen", FRONTEND),
    ("elaborate.group.rate", FRONTEND),
    ("elaborate.inputs.number", FRONTEND),
    ("elaborate.mean.count", FRONTEND),
    ("elaborate.minimum.maximum", FRONTEND),
    ("elaborate.routers.split", "splits a router that is to stay whole: sums in another order, which rounding to 16 bits shows"),
    ("elaborate.select.order", FRONTEND),
    ("elaborate.sin.cos", FRONTEND),
    ("elaborate.top_k.order", FRONTEND),
    ("elaborate.train.beta", FRONTEND),
    ("elaborate.train.clip", FRONTEND),
    ("elaborate.train.warmup", FRONTEND),
    ("executor.scalars.step", RUNTIME),
    ("executor.stash.slot", RUNTIME),
    ("host.bucket.window", RUNTIME),
    ("host.part.base", RUNTIME),
    ("host.part.order", RUNTIME),
];
