"""Plans that `mcc plan` finds for published models, beside the plans that were published, as predicted:
`python3 -m bench.planned > docs/benchmarks/planned.md`, a quarter of an hour.

Both are mcc's own programs, with the same models of kernels and links. Nothing runs on a device.
"""

import json
import subprocess
import sys
import time

from bench.foresight import ROOT, predicted
from bench.published import SEQ, TABLE1, VOCAB

LLAMA_8B = "-D hidden=4096 -D heads=32 -D kv_heads=8 -D ffn=14336 -D layers=32 -D vocab=128256 -D seq=8192"
LLAMA_405B = "-D hidden=16384 -D heads=128 -D kv_heads=8 -D ffn=53248 -D layers=126 -D vocab=128256"
# Name, text, settings, H100s, sequences of a step. Of Llama-3 405B the batches, meshes and TFLOP/s of a GPU (in bf16)
# of the Llama Team, "The Llama 3 Herd of Models" (2024), table 4.
LARGE = [
    ("Llama-3 8B", "llama", LLAMA_8B, 64, 512, None, None),
    ("Mixtral 8x7B", "mixtral", "", 128, 1024, None, None),
    ("Llama-3 405B, 8,192 positions", "llama", f"{LLAMA_405B} -D seq=8192", 8192, 2048, "--dp 64 --tp 8 --sp --pp 16", 430),
    ("Llama-3 405B, 8,192 positions", "llama", f"{LLAMA_405B} -D seq=8192", 16384, 2048, "--dp 128 --tp 8 --sp --pp 16", 400),
    ("Llama-3 405B, 131,072 positions", "llama", f"{LLAMA_405B} -D seq=131072", 16384, 128, "--dp 8 --tp 8 --sp --cp 16 --pp 16", 380),
    ("DeepSeek-V3", "deepseek_v3", "", 2048, 15360, None, None),
]


def call(mcc, line):
    began = time.monotonic()
    done = subprocess.run([str(mcc), *line.split()], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{line}: {done.stderr}")
    return json.loads(done.stdout), time.monotonic() - began


def planned(mcc, line):
    """The best plan, and the seconds of the search."""
    found, took = call(mcc, f"plan {line} --top 1 --no-cache --json")
    return found["plans"][0], took


def flags(plan):
    """Those of the mesh and of what else was chosen."""
    without = ("-D", "--target", "--fp16", "--bf16", "--global-batch-size")
    return " ".join(f.replace("=", " ") for f in plan["flags"] if not f.startswith(without))


def shares(step):
    """Seconds in which nothing is computed: exchanges that are waited for, and the ends of the pipeline."""
    spent = step["spent"]
    return f"{spent['exchanges']:.2f} + {spent['bubble']:.2f} s"


def table_one(mcc):
    print("| model | GPUs | published plan | ours | ours / theirs | exchanges + bubble: theirs | ours | our plan | found in |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in TABLE1:
        name, heads, hidden, layers, _, _, ranks, batch, _, _, _ = row
        theirs, _ = predicted(mcc, row, "--recompute full")
        model = f"-D layers={layers} -D hidden={hidden} -D heads={heads} -D seq={SEQ} -D vocab={VOCAB}"
        line = f"models/gpt2.mdl --gpus {ranks} --machine a100-80g-dgx --fp16 --global-batch-size {batch} {model}"
        best, took = planned(mcc, line)
        ours = best["step"]
        ratio = ours["seconds"] / theirs["seconds"]
        print(
            f"| {name} | {ranks} | {theirs['seconds']:.2f} s | {ours['seconds']:.2f} s | {ratio:.2f} | {shares(theirs)} | {shares(ours)} | "
            f"`{flags(best)}` | {took:.0f} s |",
            flush=True,
        )
    print()


def by_chowdhery(defines, ranks, batch, seconds):
    """TFLOP/s of a GPU with as many operations of a Llama as MFU counts in Chowdhery et al., "PaLM" (2022), appendix B:
    6 for a parameter and a token, and attention's whole square, where the causal mask leaves half."""
    of = {name: int(value) for name, value in (d.split("=") for d in defines.split() if d != "-D")}
    hidden, layers, seq, keys = of["hidden"], of["layers"], of["seq"], of["hidden"] // of["heads"] * of["kv_heads"]
    parameters = layers * (2 * hidden * (hidden + keys) + 3 * hidden * of["ffn"] + 2 * hidden) + 2 * of["vocab"] * hidden + hidden
    return (6 * parameters + 12 * layers * hidden * seq) * batch * seq / seconds / ranks / 1e12


def large(mcc):
    print("| model | H100s | sequences | step | give or take | TFLOP/s a GPU | published | published plan | remains of failures | our plan | found in |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, model, defines, ranks, batch, mesh, tflops in LARGE:
        line = f"models/{model}.mdl --machine h100-dgx --bf16 --global-batch-size {batch} {defines}"
        best, took = planned(mcc, f"{line} --gpus {ranks}")
        step, theirs, counted = best["step"], "", ""
        if mesh:
            counted = f" ({by_chowdhery(defines, ranks, batch, step['seconds']):.0f})"
            other, _ = call(mcc, f"simulate {line} {mesh} --zero 1 --recompute none --json")
            theirs = f"{other['seconds']:.2f} s, {other['flops_per_second'] / 1e12:.0f}"
        print(
            f"| {name} | {ranks} | {batch} | {step['seconds']:.2f} s | {100 * step['give_or_take'] / step['seconds']:.0f} % | "
            f"{step['flops_per_second'] / 1e12:.0f}{counted} | {tflops or ''} | {theirs} | {100 * best['goodput']['part']:.1f} % | `{flags(best)}` | {took:.0f} s |",
            flush=True,
        )
    print()


HEAD = """# Plans for published models

`python3 -m bench.planned` makes this page, by [`mcc plan`](../plan.md) with an empty cache and [`mcc
simulate`](../simulate.md). All steps are predicted ones of mcc's own programs; nothing has run on these machines.

## GPTs on A100s

The ten models of Narayanan et al. (2021), table 1, in fp16, on as many GPUs and with the same batch. The published
plan recomputes all layers, as there. Ours need not, as attention is fused in both. Exchanges are those that no kernel
hides.
"""
OTHERS = """## On H100s

Llama-3 405B has the batches of "The Llama 3 Herd of Models", table 4. *Published* are its TFLOP/s of a GPU.
*Published plan* is its mesh with ZeRO-1 and 1F1B, as mcc is predicted to run it (seconds, TFLOP/s), whether it fits
or not; how many virtual stages Meta's pipeline has is not published.

mcc counts the half of attention that the causal mask leaves. Meta cites Chowdhery et al. (2022), who count the whole
square: in brackets, ours by that count, which is the one to compare with what is published. Meta's kernels are not
mcc's.

mcc's TFLOP/s of Mixtral and DeepSeek-V3 count the room of experts, up to 1.25 times what tokens ask for. *Remains of
failures* is the part of the time that [trains and is not lost](../plan.md#failures).
"""

if __name__ == "__main__":
    path = ROOT / (sys.argv[1] if len(sys.argv) > 1 else "target/release/mcc")
    print(HEAD)
    table_one(path)
    print(OTHERS)
    large(path)
