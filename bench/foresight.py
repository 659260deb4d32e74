"""Steps that were published beside the steps that mcc predicts for the same models, plans and machines:
`python3 -m bench.foresight > docs/benchmarks/foresight.md`, a quarter of an hour.

Nothing is fitted to mcc's own steps: all numbers are those of the machine files, each with its source. What is fitted
to those of Megatron-LM's programs is in `bench/published.py`. Nothing runs on a device.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from bench import published
from bench.published import SEQ, TABLE1, TABLE5, VOCAB

ROOT = Path(__file__).resolve().parent.parent

GPT = "-D layers=32 -D hidden=2048 -D heads=16 -D seq=2048 -D vocab=50304"


def predicted(mcc, row, flags):
    """A step of a GPT, and how long mcc took to say so."""
    _, heads, hidden, layers, tp, pp, ranks, batch, micro, virtual, *_ = row
    plan = f"--tp {tp} --pp {pp} --dp {ranks // tp // pp} --micro-batch-size {micro} --global-batch-size {batch} --fp16"
    plan += f" --vpp {virtual}" if virtual > 1 else ""
    model = f"-D layers={layers} -D hidden={hidden} -D heads={heads} -D seq={SEQ} -D vocab={VOCAB}"
    return run(mcc, f"--machine a100-80g-dgx {model} {plan} {flags}")


def run(mcc, flags):
    line = f"{mcc} simulate models/gpt2.mdl --json {flags}"
    began = time.monotonic()
    done = subprocess.run(line.split(), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{line}\n{done.stderr}")
    return json.loads(done.stdout), time.monotonic() - began


def shares(step):
    spent = step["spent"]
    return " | ".join(f"{100 * spent[k] / step['seconds']:.0f} %" for k in ["kernels", "exchanges", "bubble"])


def table(mcc, rows, seconds_of, flags):
    print("| model | GPUs | published | predicted for mcc | give or take | predicted / published | kernels | exchanges | bubble | mcc took |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    ratios = []
    for row in rows:
        step, took = predicted(mcc, row, flags)
        seconds = seconds_of(row)
        ratios.append(step["seconds"] / seconds)
        error = 100 * step["give_or_take"] / step["seconds"]
        times = f"{seconds:.2f} s | {step['seconds']:.2f} s | {error:.0f} % | {ratios[-1]:.2f}"
        print(f"| {row[0]} | {row[6]} | {times} | {shares(step)} | {took:.1f} s |", flush=True)
    mean = sum(ratios) / len(ratios)
    off = sum(abs(r / mean - 1) for r in ratios) / len(ratios)
    print(f"\nOn average {mean:.2f}; apart from that the rows differ by {100 * off:.1f} % in the mean.\n")


def main():
    mcc = ROOT / (sys.argv[1] if len(sys.argv) > 1 else "target/release/mcc")
    print(HEAD)
    print("## A step that was measured\n\n" + MEASURED)
    print("| card | measured | predicted | give or take | predicted / measured |\n|---|---|---|---|---|")
    for name, machine, seconds in [("H100 SXM", "h100-dgx", 0.213), ("H200 SXM", "h200", 0.2055)]:
        step, _ = run(mcc, f"--machine {machine} {GPT} --bf16 --micro-batch-size 4 --global-batch-size 4")
        error = 100 * step["give_or_take"] / step["seconds"]
        print(f"| {name} | {1e3 * seconds:.1f} ms | {1e3 * step['seconds']:.0f} ms | {error:.0f} % | {step['seconds'] / seconds:.2f} |")
    print()
    print("## With full recomputation\n\n" + FULL)
    table(mcc, TABLE1, published.seconds_of, "--recompute full")
    print("## With sequence parallelism and selective recomputation\n\n" + SELECTED)
    table(mcc, TABLE5, lambda r: r[11], "--sp --recompute selective")
    print("## The programs that were measured\n\n" + PROGRAMS)
    published.tables()


HEAD = """# Steps predicted, beside steps published

By `python3 -m bench.foresight`, which runs [`mcc simulate`](../simulate.md) on machine file `a100-80g-dgx`. What was
published are steps of Megatron-LM; what is predicted are steps of mcc's own programs for the same model, plan and
batch. The two are not the same programs: mcc's attention is fused, its sums of gradients overlap with backward
passes, and its products are taken to reach what the best libraries of today do. So mcc's should be shorter. How far
that is why stands [below](#the-programs-that-were-measured), where the programs that were measured are played on the
same model of the machine. Nothing is fitted to mcc's own steps, and nothing has run on such a machine.
"""
MEASURED = """A GPT-2 of 1.72 B parameters on one card, 8,192 tokens in bf16, as [gpu.md](gpu.md) has it. Rates of products and of
attention in these two machine files are from the same page, of kernels by themselves; how they make up a step is not.
"""
FULL = """GPTs of 2,048 positions, fp16, on DGX A100 (Narayanan et al. 2021, table 1). Seconds follow from the TFLOP/s that are
published, by the formula that stands there.
"""
SELECTED = """The same machines a year later (Korthikanti et al. 2022, table 5). With `--recompute selective` mcc computes the
core of attention again, as they do.
"""

PROGRAMS = """\
What Megatron-LM ran in 2021 is played on the same machine file, from mcc's programs of a text that stores scores
and makes Q, K and V by one product (`bench/megatron_2021.mdl`), compiled so that nothing is exchanged beside
kernels, and from what else those programs did differently (`simulate/examples/megatron_2021.rs`). Each part of it
is what the papers, and Megatron-LM 2.5 with PyTorch of that time, say, with the number of times that each kernel
goes through its operands. None has a number of its own to fit, and none was taken out for what it does to the
errors; but the table was known when they were written. Left out are gradients of embeddings, which are added up
too, and copies into the buckets that are exchanged.

Two numbers are fitted: the efficiencies of products and of memory, within wide bounds: what Calculon (Isaev et
al. 2023) has for an A100 from small operands to large ones, 0.60 to 0.95, and 0.60 to 0.90. *Left out* are errors
of rows to which nothing was fitted: each time the other nine rows choose, from all pairs.
"""

if __name__ == "__main__":
    main()
