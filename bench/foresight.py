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
    print("| model | GPUs | published | predicted for mcc | give or take | predicted / published | kernels | exchanges | bubble |")
    print("|---|---|---|---|---|---|---|---|---|")
    ratios, durations = [], []
    for row in rows:
        step, took = predicted(mcc, row, flags)
        durations.append(took)
        seconds = seconds_of(row)
        ratios.append(step["seconds"] / seconds)
        error = 100 * step["give_or_take"] / step["seconds"]
        times = f"{seconds:.2f} s | {step['seconds']:.2f} s | {error:.0f} % | {ratios[-1]:.2f}"
        print(f"| {row[0]} | {row[6]} | {times} | {shares(step)} |", flush=True)
    mean = sum(ratios) / len(ratios)
    off = sum(abs(r / mean - 1) for r in ratios) / len(ratios)
    print(f"\nOn average {mean:.2f}; apart from that the rows differ by {100 * off:.1f} % in the mean.")
    print(f"mcc took {min(durations):.0f} to {max(durations):.0f} s for each.\n")


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

This page puts published steps of Megatron-LM beside steps that [`mcc simulate`](../simulate.md) predicts for mcc's
own programs, with the same model, plan and batch, on machine file `a100-80g-dgx` (`python3 -m bench.foresight`).
Nothing is fitted to mcc's own steps, and nothing has run on such a machine.

mcc's steps should be shorter: it fuses attention, overlaps sums of gradients with backward passes, and its products
are taken to be as fast as today's best libraries. [Megatron-LM's programs](#the-programs-that-were-measured), played
on the same machine file, show how far that is why.
"""
MEASURED = """A GPT-2 of 1.72 B parameters on one card, 8,192 tokens in bf16 ([gpu.md](gpu.md)). Machine files have that page's
rates of single products and attention, not how they make up a step.
"""
FULL = """GPTs of 2,048 positions in fp16, on DGX A100 (Narayanan et al. 2021, table 1). Published TFLOP/s become seconds by the
paper's formula.
"""
SELECTED = """The same machines a year later (Korthikanti et al. 2022, table 5). With `--recompute selective` mcc recomputes the
core of attention, as they do.
"""

PROGRAMS = """\
What Megatron-LM ran in 2021 is played on the same machine file. mcc compiles a text that stores scores and makes Q, K
and V by one product (`bench/megatron_2021.mdl`), so that no exchange overlaps kernels.
`simulate/examples/megatron_2021.rs` adds what else those programs did differently.

Each part of that follows the papers, and Megatron-LM 2.5 with PyTorch of that time, down to how often each kernel
goes through its operands. No part has a number to fit, and none was taken out for what it does to the errors; but the
table was known when they were written. Adding up gradients of embeddings, and copies into buckets, are left out.

Two numbers are fitted: the efficiencies of products (0.60 to 0.95) and of memory (0.60 to 0.90). These wide bounds
are Calculon's (Isaev et al. 2023) for an A100. *Left out* is the error of a row when the other nine alone choose,
from all pairs.
"""

if __name__ == "__main__":
    main()
