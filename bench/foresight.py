"""Steps that were published beside the steps that mcc predicts for the same models, plans and machines:
`python3 -m bench.foresight > docs/benchmarks/foresight.md`, some minutes.

Nothing is fitted to them: all numbers are those of the machine files, each with its source. Nothing runs on a device.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), table 1;
# microbatches and virtual stages are those of Megatron-LM's `examples/sc21/run_table_1.sh`. Parameters, heads, hidden,
# layers, tp, pp, GPUs, batch, microbatch, virtual stages, TFLOP/s a GPU.
MEGATRON = [
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
# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), table 5. Parameters,
# heads, hidden, layers, tp, pp, GPUs, batch, microbatch, virtual stages, seconds with sequence parallelism and
# selective recomputation.
SELECTIVE = [
    ("22B", 64, 6144, 48, 8, 1, 8, 4, 4, 1, 1.10),
    ("175B", 96, 12288, 96, 8, 8, 64, 64, 1, 3, 13.75),
    ("530B", 128, 20480, 105, 8, 35, 280, 280, 1, 3, 37.83),
    ("1T", 160, 25600, 128, 8, 64, 512, 512, 1, 1, 71.49),
]
SEQ, VOCAB = 2048, 51200
GPT = "-D layers=32 -D hidden=2048 -D heads=16 -D seq=2048 -D vocab=50304"


def operations(layers, hidden, batch):
    """Those of a step with full recomputation, as the first paper counts them."""
    return 96 * batch * SEQ * layers * hidden**2 * (1 + SEQ / (6 * hidden) + VOCAB / (16 * layers * hidden))


def predicted(mcc, row, flags):
    """A step of a GPT, and how long mcc took to say so."""
    _, heads, hidden, layers, tp, pp, ranks, batch, micro, virtual, _ = row
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


def table(mcc, rows, published, flags, what):
    print(f"| model | GPUs | {what} | predicted for mcc | give or take | predicted / published | kernels | exchanges | bubble | mcc took |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    ratios = []
    for row in rows:
        step, took = predicted(mcc, row, flags)
        seconds = published(row)
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
    table(mcc, MEGATRON, lambda r: operations(r[3], r[2], r[7]) / r[6] / (r[10] * 1e12), "--recompute full", "published")
    print("## With sequence parallelism and selective recomputation\n\n" + SELECTED)
    table(mcc, SELECTIVE, lambda r: r[10], "--sp --recompute selective", "published")


HEAD = """# Steps predicted, beside steps published

By `python3 -m bench.foresight`, which runs [`mcc simulate`](../simulate.md) on machine file `a100-80g-dgx`. What was
published are steps of Megatron-LM; what is predicted are steps of mcc's own programs for the same model, plan and
batch. The two are not the same programs: mcc's attention is fused, its sums of gradients overlap with backward
passes, and its products are taken to reach what the best libraries of today do. So mcc's should be shorter; that this
is why, and why the least so in large models, of which attention is a smaller part, is a guess. Nothing is fitted to
these rows, and nothing has run on such a machine.
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

if __name__ == "__main__":
    main()
