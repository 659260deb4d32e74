"""What models are planned to take, packed and not: `python3 -m bench.plans > docs/benchmarks/plans.md`.

Compiles without making code for the host; the bytes are those that mcc prints, and allocates. With `--before DIR`, a
checkout of an earlier commit with its `target/release/mcc`, what that one plans stands beside.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LLAMA = "-D hidden=4096 -D heads=32 -D kv_heads=8 -D ffn=14336 -D layers=32 -D vocab=128256 -D seq=8192"
DEEPSEEK = "-D layers=4 -D seq=4096 -D vocab=8192"
MESHES = [
    ("one rank", ""),
    ("--tp 8 --sp", "--tp 8 --sp"),
    *[(f"--tp 2 --cp 4 --cp-comm-type {how}", f"--tp 2 --cp 4 --cp-comm-type {how}") for how in ["p2p", "all_gather", "a2a", "a2a+p2p"]],
]


GPT = "-D layers=24 -D hidden=1024 -D heads=16 -D seq=1024 --dp 4"
GPT3 = "-D layers=96 -D hidden=12288 -D heads=96 -D seq=2048 -D vocab=51200 --dp 384 --zero 3 --recompute full"


def plan(root: Path, model: str, flags: str, batch: str = "--micro-batch-size 1 --global-batch-size 8") -> tuple[str, float]:
    """The line of memory of a compile by the mcc of a checkout, and its total in GiB."""
    with tempfile.TemporaryDirectory() as out:
        model = root / "models" / f"{model}.mdl"
        words = [root / "target/release/mcc", "compile", model, *flags.split(), "--target", "sm_90a", "--dtype", "bf16"]
        words += [*batch.split(), "--emit", "program", "-o", f"{out}/a.mcc"]
        ran = subprocess.run(words, check=True, capture_output=True, text=True)
    line = next(line for line in (ran.stdout + ran.stderr).splitlines() if line.startswith("memory"))
    number, unit = re.search(r"([\d.]+) (MiB|GiB|TiB)", line).groups()
    return line, float(number) * {"MiB": 1 / 1024, "GiB": 1, "TiB": 1024}[unit]


def part(line: str, name: str) -> str:
    return re.search(rf"{name} ([\d.]+ \w+)", line).group(1)


def activations(line: str) -> str:
    return part(line, "activations")


def table(columns: list[str], rows: list[list[str]]) -> None:
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, metavar="DIR", help="a checkout of an earlier commit, built")
    before = parser.parse_args().before
    earlier = ["packed, before"] if before else []

    print("# Plans\n")
    print("What a rank takes, by `python3 -m bench.plans`: bf16 for sm_90a, one sequence a microbatch, eight a step.")
    if before:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=before, check=True, capture_output=True, text=True)
        print(f"*Before* is commit {commit.stdout.strip()}, by `--before`: attention with documents or with values of another")
        print("size was no kernel, and stored its scores.")
    print("\n## Llama-3 8B at 8,192 tokens, plain and packed\n")
    print("`-D packed=true` keeps attention within documents and counts positions from their starts.\n")
    rows = []
    for name, flags in MESHES:
        (_, plain), (line, packed) = plan(ROOT, "llama", f"{LLAMA} {flags}"), plan(ROOT, "llama", f"{LLAMA} -D packed=true {flags}")
        old = [f"{plan(before, 'llama', f'{LLAMA} -D packed=true {flags}')[1]:.2f} GiB"] if before else []
        rows.append([name, f"{plain:.2f} GiB", *old, f"{packed:.2f} GiB", activations(line), f"{packed / plain:.3f}"])
    table(["mesh", "plain", *earlier, "packed", "of it activations", "packed / plain"], rows)
    print("\n## Four layers of DeepSeek-V3 at 4,096 tokens\n")
    print("Keys of 192 elements a head, values of 128; no matrix of scores is stored.\n")
    rows = []
    for flags in ["--ep 8 --dp 8", "--tp 8 --sp --ep 8 --dp 8"]:
        line, total = plan(ROOT, "deepseek_v3", f"{DEEPSEEK} {flags}")
        old = [f"{plan(before, 'deepseek_v3', f'{DEEPSEEK} {flags}')[1]:.2f} GiB"] if before else []
        rows.append([flags, *old, f"{total:.2f} GiB", activations(line)])
    table(["mesh", *(["before"] if before else []), "a rank", "of it activations"], rows)
    zero()
    logits()


def zero() -> None:
    """What each level of ZeRO takes, by microbatches."""
    print("\n## ZeRO by level and microbatches\n")
    print("A GPT-2 of 24 layers of 1,024 elements at 1,024 tokens on four data-parallel ranks. What lasts over a step")
    print("(parameters, gradients, states) is as [training.md](../training.md#memory-of-data-parallel-ranks) has it;")
    print("*temporary* are buckets and layers under way, beside what else a pass computes with.\n")
    rows = []
    for level in range(4):
        plans = [plan(ROOT, "gpt2", f"{GPT} --zero {level}", f"--micro-batch-size 1 --global-batch-size {4 * m}") for m in [1, 2, 8]]
        lasts = " + ".join(part(plans[0][0], name) for name in ["parameters", "gradients", "optimizer"])
        rows.append([str(level), lasts, *[f"{total:.2f} GiB, {part(line, 'temporary')}" for line, total in plans]])
    table(["`--zero`", "lasts", "1 microbatch: all, temporary", "2", "8"], rows)
    print("\nBefore, at commit 617b7f4, gradients were in memory to the end of the backward pass where there is one microbatch:")
    print("4.64 GiB in f32 for level 2 and 4.08 for level 3, 4.09 and 2.89 since, and 718 GiB for the first line below.")
    print("\nGPT-3 of 175 B parameters on 384 ranks with `--zero 3 --recompute full`, four sequences a microbatch:\n")
    rows = []
    for m in [1, 2]:
        line, total = plan(ROOT, "gpt2", GPT3, f"--micro-batch-size 4 --global-batch-size {384 * 4 * m}")
        rows.append([str(m), f"{total:.2f} GiB", activations(line), part(line, "temporary")])
    table(["microbatches", "a rank", "of it activations", "of it temporary"], rows)


def logits() -> None:
    """What chunks of logits save."""
    print("\n## Logits in chunks\n")
    print("Llama-3 8B at 8,192 tokens on eight data-parallel ranks with `--zero 1`, by `--logits-chunks`.\n")
    rows = []
    for name, flags in [("1 (whole)", "--logits-chunks 1"), ("4", "--logits-chunks 4"), ("by default", "")]:
        line, total = plan(ROOT, "llama", f"{LLAMA} --dp 8 --zero 1 {flags}")
        rows.append([name, f"{total:.2f} GiB", activations(line), part(line, "temporary")])
    table(["chunks", "a rank", "of it activations", "of it temporary"], rows)


if __name__ == "__main__":
    main()
