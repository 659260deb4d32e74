"""Steps of Megatron-LM that were published, predicted from what its programs did, which
`simulate/examples/megatron_2021.rs` has; here is what is left open and fitted. Called by `bench.foresight`.
"""

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021),
# table 1; microbatches and virtual stages are those of Megatron-LM's `examples/sc21/run_table_1.sh`. Parameters,
# heads, hidden, layers, tp, pp, GPUs, batch, microbatch, virtual stages, TFLOP/s a GPU.
TABLE1 = [
    ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
    ("3.6B", 32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
    ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 16, 1, 142),
    ("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
    ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138),
    ("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140),
    ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148),
    ("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155),
    ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163),
    ("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163),
]
# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), table 5. The same
# columns, but for seconds: with full recomputation, and with sequence parallelism and selective recomputation.
TABLE5 = [
    ("22B", 64, 6144, 48, 8, 1, 8, 4, 4, 1, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 8, 64, 64, 1, 3, 18.13, 13.75),
    ("530B", 128, 20480, 105, 8, 35, 280, 280, 1, 3, 49.05, 37.83),
    ("1T", 160, 25600, 128, 8, 64, 512, 512, 1, 1, 94.42, 71.49),
]
SEQ, VOCAB = 2048, 51200

# Parts of the adapter, and what each is.
PARTS = {
    "softmax": "attention's core has products of 16 bits, a kernel for probabilities and one for their gradients",
    "whole_layer": "a layer is computed again to its end, with its last product and all-reduce",
    "half_gradients": "gradients have 16 bits, and are added up by kernels of their own",
    "torch_ddp": "without a pipeline, gradients are exchanged beside the last backward pass",
    "scatter_gather": "each rank sends a share of what a stage gives, which receivers gather",
    "dropout": "dropout of probabilities and of each half of a layer, with stored masks",
    "pointwise": "biases, GeLU, copies of the context and sums of two gradients are kernels of their own",
    "cross_entropy": "the loss is a chain of kernels over logits in 32 bits",
}
# What efficiencies may be. Calculon (Isaev et al., 2023, `systems/a100_80g.json`) has for an A100 0.60 to 0.95 for
# products from 1 GFLOP on, and 0.60 to 0.90 for memory from 1 MB on. Here tiles that begin, end and leave
# multiprocessors idle have numbers of their own, so these bounds are wide.
BOUNDS = {"products": (0.60, 0.95), "memory": (0.60, 0.90)}
NODES, STEPS = 6, 140


def operations(layers, hidden, batch):
    """Those of a step with full recomputation, as the first paper counts them."""
    return 96 * batch * SEQ * layers * hidden**2 * (1 + SEQ / (6 * hidden) + VOCAB / (16 * layers * hidden))


def seconds_of(row):
    """Of a row of the first table, which has TFLOP/s."""
    return operations(row[3], row[2], row[7]) / row[6] / (row[10] * 1e12)


class Programs:
    """The example, which is asked and tells."""

    def __init__(self):
        build = ["cargo", "build", "--release", "--workspace", "--example", "megatron_2021", "--quiet"]
        subprocess.run(build, cwd=ROOT, check=True)
        command = [ROOT / "target/release/examples/megatron_2021"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.machine = json.loads((ROOT / "machines/a100-80g-dgx.json").read_text())

    def seconds(self, row, points, parts=tuple(PARTS), machine=None, stores_scores=True, serial=True):
        """Of a step of a row, with each of these efficiencies of products and of memory."""
        _, heads, hidden, layers, tp, pp, ranks, batch, micro, virtual, *_ = row
        model = dict(heads=heads, hidden=hidden, layers=layers, seq=SEQ, vocab=VOCAB, stores_scores=stores_scores)
        plan = dict(tp=tp, pp=pp, dp=ranks // tp // pp, batch=batch, micro_batch=micro, vpp=virtual, serial=serial)
        asked = dict(row={**model, **plan}, parts=list(parts), machine=json.dumps(machine or self.machine), points=points)
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())["seconds"]


class Surface:
    """A step's seconds over both efficiencies: played at some, and in between linear in what they divide by, as the
    parts of a chain of waits are."""

    def __init__(self, programs, row):
        self.axes = [[1 / e for e in spread(BOUNDS[which], NODES)] for which in ["products", "memory"]]
        points = [[1 / p, 1 / m] for p in self.axes[0] for m in self.axes[1]]
        told = programs.seconds(row, points)
        self.seconds = [told[k : k + NODES] for k in range(0, len(told), NODES)]

    def at(self, products, memory):
        (i, u), (j, v) = (place(axis, 1 / e) for axis, e in zip(self.axes, [products, memory]))
        s = self.seconds
        return (s[i][j] * (1 - u) + s[i + 1][j] * u) * (1 - v) + (s[i][j + 1] * (1 - u) + s[i + 1][j + 1] * u) * v


def spread(bounds, count):
    """So many efficiencies, evenly by what they divide by, the largest first."""
    low, high = 1 / bounds[1], 1 / bounds[0]
    return [1 / (low + (high - low) * k / (count - 1)) for k in range(count)]


def place(axis, x):
    k = max(k for k in range(len(axis) - 1) if k == 0 or axis[k] <= x)
    return k, (x - axis[k]) / (axis[k + 1] - axis[k])


def fit(errors, rows):
    """The efficiencies with the least mean error of these rows, of all that were tried."""
    return min(errors, key=lambda at: sum(abs(errors[at][k]) for k in rows))


def off(published, predicted):
    """Of TFLOP/s: what is predicted to take longer has less."""
    return published / predicted - 1


def percent(x):
    return f"{100 * x:+.1f} %"


def mean(errors):
    errors = list(errors)
    return f"{100 * sum(abs(e) for e in errors) / len(errors):.1f} %"


def tables():
    programs = Programs()
    own = [programs.machine["device"]["products"]["efficiency"]["value"], programs.machine["device"]["memory"]["efficiency"]["value"]]
    published = [seconds_of(r) for r in TABLE1]
    tried = [(p, m) for p in spread(BOUNDS["products"], STEPS) for m in spread(BOUNDS["memory"], STEPS)]
    surfaces = [Surface(programs, r) for r in TABLE1]
    errors = {at: [off(t, s.at(*at)) for t, s in zip(published, surfaces)] for at in tried}
    all_rows = range(len(TABLE1))
    best = fit(errors, all_rows)
    fitted = [programs.seconds(r, [best])[0] for r in TABLE1]
    unfitted = [programs.seconds(r, [own])[0] for r in TABLE1]
    left_out, chosen = [], []
    for k in all_rows:
        # From nothing: all efficiencies are tried on the other rows.
        others = fit(errors, [j for j in all_rows if j != k])
        chosen.append(others)
        left_out.append(off(published[k], programs.seconds(TABLE1[k], [others])[0]))
    teraflops = [r[10] for r in TABLE1]
    # The constant with the least mean error is one of the others.
    def least(others):
        return min(others, key=lambda c: sum(abs(c / t - 1) for t in others))

    constant = [least(teraflops[:k] + teraflops[k + 1 :]) / teraflops[k] - 1 for k in all_rows]
    print("| model | GPUs | published | nothing fitted | two fitted | error | left out, error | a constant, left out |")
    print("|---|---|---|---|---|---|---|---|")
    for k, r in enumerate(TABLE1):
        flops = [r[10] * published[k] / s for s in (unfitted[k], fitted[k])]
        shown = f"{r[10]} | {flops[0]:.1f} | {flops[1]:.1f} | {percent(off(published[k], fitted[k]))}"
        print(f"| {r[0]} | {r[6]} | {shown} | {percent(left_out[k])} | {percent(constant[k])} |", flush=True)
    shown = f"{mean(off(t, s) for t, s in zip(published, unfitted))} | {mean(off(t, s) for t, s in zip(published, fitted))}"
    print(f"| mean error | | | {shown} | | {mean(left_out)} | {mean(constant)} |\n")
    ends = [f"{min(c[i] for c in chosen):.3f} to {max(c[i] for c in chosen):.3f}" for i in range(2)]
    print(
        f"In TFLOP/s a GPU. The fitted efficiencies are {best[0]:.3f} of products and {best[1]:.3f} of memory (machine file: {own[0]:.2f} and {own[1]:.2f});\n"
        f"without one row, {ends[0]} and {ends[1]}. All of {len(tried):,} pairs were tried, on steps played at {NODES**2} pairs\n"
        f"and linear in between. The table's steps were played again at the chosen pairs.\n"
    )
    parts(programs, best, fitted, published)
    numbers(programs, best, fitted, published)
    held_out(programs, own, best)


def parts(programs, best, fitted, published):
    print("What each part changes, with the two fitted numbers:\n")
    print("| part | its name | step without it, by row | mean error without it |")
    print("|---|---|---|---|")
    without = [(what, name, dict(parts=[p for p in PARTS if p != name])) for name, what in PARTS.items()]
    without.append(("scores are stored, and Q, K and V one product", "the text", dict(stores_scores=False, parts=[p for p in PARTS if p != "softmax"])))
    without.append(("all else is exchanged beside no kernel", "a flag", dict(serial=False)))
    for what, name, flags in without:
        seconds = [programs.seconds(r, [best], **flags)[0] for r in TABLE1]
        change = [s / f - 1 for s, f in zip(seconds, fitted)]
        error = mean(off(t, s) for t, s in zip(published, seconds))
        print(f"| {what} | `{name}` | {percent(min(change))} to {percent(max(change))} | {error} |", flush=True)
    print()


def numbers(programs, best, fitted, published):
    """All other numbers that no data sheet has, a tenth more and less."""
    machine = programs.machine
    own = mean(off(t, s) for t, s in zip(published, fitted))
    print(f"Mean error (of {own}) with other numbers of the machine file that no data sheet has, a tenth less and more:\n")
    print("| number | a tenth less | a tenth more | step, at most |")
    print("|---|---|---|---|")
    quiet, still = 0.0034, 0
    places = [("device", "products", "tail"), ("device", "products", "depth"), ("device", "launch"), ("device", "phase")]
    places += [("links", k, what) for k in range(2) for what in ["efficiency", "latency", "hop"]]
    places += [("contention", what) for what in ["kernels", "exchanges"]]
    for path in places:
        shown, most = [], 0.0
        for factor in [0.9, 1.1]:
            changed = json.loads(json.dumps(machine))
            at = changed
            for step in path:
                at = at[step]
            # A part of a whole is no more than that.
            at["value"] = min(at["value"] * factor, 1.0) if path[-1] == "efficiency" else at["value"] * factor
            seconds = [programs.seconds(r, [best], machine=changed)[0] for r in TABLE1]
            shown.append(mean(off(t, s) for t, s in zip(published, seconds)))
            most = max([most, *(abs(s / f - 1) for s, f in zip(seconds, fitted))])
        name = ".".join(machine["links"][p]["name"] if isinstance(p, int) else p for p in path)
        if most <= quiet:
            still += 1
            continue
        print(f"| `{name}` | {shown[0]} | {shown[1]} | {100 * most:.1f} % |", flush=True)
    print(f"\nThe other {still} numbers change no step by more than {100 * quiet:.1f} %.\n")


def held_out(programs, own, best):
    print("The same programs on rows of the second paper, with full recomputation. Nothing was fitted to these:\n")
    print("| model | GPUs | published | nothing fitted | error | with the two numbers above | error |")
    print("|---|---|---|---|---|---|---|")
    errors = [[], []]
    for r in TABLE5:
        seconds = programs.seconds(r, [own, best])
        for k, s in enumerate(seconds):
            errors[k].append(off(r[10], s))
        shown = " | ".join(f"{s:.2f} s | {percent(e[-1])}" for s, e in zip(seconds, errors))
        print(f"| {r[0]} | {r[6]} | {r[10]:.2f} s | {shown} |", flush=True)
    print(f"| mean error | | | | {mean(errors[0])} | | {mean(errors[1])} |\n")
    first, second = seconds_of(TABLE1[8]), TABLE5[2][10]
    exchange = programs.seconds(TABLE1[8], [best])[0] - programs.seconds(TABLE5[2], [best])[0]
    print(
        f"The second paper's programs are faster: 530B took {first:.2f} s in the first, with nine replicas, and {second:.2f} s in the\n"
        f"second, with one of the same plan. What replicas exchange is predicted to take {exchange:.2f} s. So what was fitted to the\n"
        f"first paper is too slow for the second.\n"
    )
