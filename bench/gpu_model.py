"""What a GPU is predicted to take, by family of kernels: `python3 -m bench.gpu_model > docs/benchmarks/gpu-model.md`.

No GPU is needed: blocks of each kernel run in the emulator and are counted (`mcc dump --level ptx --costs`). With
`--before MCC`, an earlier mcc, what that one compiles is predicted beside it, by the same model.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

from bench.plans import ROOT, table

MCC = ROOT / "target/release/mcc"
LLAMA = "-D hidden=4096 -D heads=32 -D kv_heads=8 -D ffn=14336 -D layers=32 -D vocab=128256 -D seq=8192"
GPT = "-D hidden=12288 -D heads=96 -D layers=96 -D vocab=51200 -D seq=2048"
STEPS = [
    ("Llama-3 8B, 8,192 tokens a rank, dp 8", "llama", f"{LLAMA} --dp 8 --zero 1 --micro-batch-size 1 --global-batch-size 8"),
    ("GPT-3 175B, first of 8 stages, tp 8 with sp, 8 microbatches of 2,048 tokens", "gpt2",
     f"{GPT} --tp 8 --sp --pp 8 --micro-batch-size 1 --global-batch-size 8"),
    ("Mixtral 8x7B, 4 of 32 layers, 4,096 tokens a rank, dp 8 with ep 8", "mixtral",
     "-D layers=4 -D seq=4096 --dp 8 --ep 8 --zero 1 --micro-batch-size 1 --global-batch-size 8"),
]
# Milliseconds of these steps by earlier kernels, by the same model, and what was other in those behind.
EARLIER = [
    ("0982bcd", [750.44, 478.47, 204.13], "as an H100 ran them"),
    ("af50a681", [750.37, 476.52, 162.36], "more warps for sums by index and for few results"),
    ("bcc38200", [707.33, 458.23, 70.14], "tiles by a counter; 192 columns; teams for long rows; gates of 16 bits; bounded room for experts"),
    ("da24eaea", [700.99, 458.08, 63.23], "rotations in one kernel, both halves at once; weighted rows of experts by loops; sums by index in runs"),
]
TODAY = "clusters and turns in products"
MEASURED = ROOT / "docs/benchmarks/gpu.md"
MODELS = {"llama": ["Llama"], "gpt2": ["GPT-2, heads of 128", "GPT-2, heads of 64"]}


def rows_of(mcc: Path, model: str, flags: str) -> list[dict]:
    """The kernels of the first class of what an mcc compiles, as this mcc predicts them."""
    with tempfile.TemporaryDirectory() as out:
        words = [mcc, "compile", ROOT / "models" / f"{model}.mdl", *flags.split(), "--target", "sm_90a", "--dtype", "bf16"]
        subprocess.run([*words, "-o", f"{out}/a.mcc"], check=True, capture_output=True, text=True)
        ran = subprocess.run([MCC, "dump", f"{out}/a.mcc", "--level", "ptx", "--costs", "--json", "--class", "0"],
                             check=True, capture_output=True, text=True)
    return json.loads(ran.stdout)["classes"]["0"]


def milliseconds(rows: list[dict], family: str | None = None) -> float:
    own = (r for r in rows if "predicted" in r and family in (None, r["family"]))
    return sum(1e3 * r["predicted"]["seconds"] * r["launches"] for r in own)


def brought(steps: list[list[dict]]) -> None:
    print("\n## What changes brought\n")
    print("Milliseconds of the three steps above.\n")
    rows = [*EARLIER, ("today", [milliseconds(rows) for rows in steps], TODAY)]
    table(["kernels of", "Llama", "GPT-3", "Mixtral", "what was other"], [[c, *(f"{ms:.1f}" for ms in all), what] for c, all, what in rows])


def step(name: str, after: list[dict], before: list[dict] | None) -> None:
    print(f"\n## {name}\n")
    families = sorted({r["family"] for r in after}, key=lambda f: -milliseconds(after, f))
    lines = []
    for family in [*families, None]:
        launches = sum(r["launches"] for r in after if family in (None, r["family"]))
        earlier = [f"{milliseconds(before, family):.2f}"] if before else []
        lines.append([family or "all", str(launches), *earlier, f"{milliseconds(after, family):.2f}"])
    table(["kernels", "launches", *(["before, ms"] if before else []), "ms"], lines)
    print("\nThose that take most, without products and attention:\n")
    rest = [r for r in after if "predicted" in r and r["family"] in ("loops", "sums by index")]
    lines = []
    for r in sorted(rest, key=lambda r: -r["predicted"]["seconds"] * r["launches"])[:6]:
        p = r["predicted"]
        lines.append([r["name"], str(r["launches"]), f"{1e6 * p['seconds']:.1f}", p["bound"]])
    table(["kernel", "launches", "us each", "bound"], lines)


def plain(shape: str) -> str:
    """A shape as the page of measured times has it."""
    shape = re.sub(r" \(\d+ of keys\)", "", shape)
    return shape.replace("causal gradients of attention", "gradients of causal attention")


def measured() -> dict[tuple[str, str], float]:
    found = {}
    for line in MEASURED.read_text().splitlines():
        cells = [c.strip() for c in line.strip("|\n ").split("|")]
        if len(cells) == 5 and cells[0] in sum(MODELS.values(), []):
            found[cells[0], cells[1]] = float(cells[2])
    return found


def beside_measured() -> None:
    with tempfile.TemporaryDirectory() as out:
        words = [MCC, "gpu-check", "--device", "emulated", "--target", "sm_90a", "--only", "times", "-o", out]
        subprocess.run(words, check=True, capture_output=True, text=True)
        lines = (Path(out) / "gpu-check.md").read_text().splitlines()
    known, lines_out, ratios, seen = measured(), [], [], {}
    for line in lines:
        cells = [c.strip() for c in line.strip("|\n ").split("|")]
        if len(cells) != 5 or cells[0] not in MODELS:
            continue
        names, shape = MODELS[cells[0]], plain(cells[1])
        # The second of two models of a name comes after the first.
        name = names[min(seen.setdefault((cells[0], shape), 0), len(names) - 1)]
        seen[cells[0], shape] += 1
        if (name, shape) in known and not (name, shape) in {(a, b) for a, b, *_ in lines_out}:
            ms, real = float(cells[3]), known[name, shape]
            ratios.append((ms / real, real))
            lines_out.append([name, shape, f"{ms:.3f}", f"{real:.3f}", f"{ms / real:.2f}"])
    middle = sorted(r for r, _ in ratios)
    far = [row for row, (r, _) in zip(lines_out, ratios) if not 0.8 <= r <= 1.25]
    print(f"The median ratio is {middle[len(middle) // 2]:.2f}; {len(middle) - len(far)} of {len(middle)} are within 0.8 to 1.25. Of all time together the ratio is "
          f"{sum(r * ms for r, ms in ratios) / sum(ms for _, ms in ratios):.2f}. The others:\n")
    table(["model", "kernels", "predicted, ms", "measured, ms", "ratio"], far)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, metavar="MCC", help="an earlier mcc, whose kernels are predicted too")
    parser.add_argument("--commit", default="unknown", help="of the earlier mcc, for the page")
    args = parser.parse_args()
    before = args.before
    print("# What a GPU would take\n")
    print("<!-- Written by `python3 -m bench.gpu_model`. -->\n")
    print("This page predicts times of an H100 SXM, with kernels one after the other and no communication")
    print("([how](../kernels.md#what-a-card-would-take)). Only the column *measured* was measured.")
    if before:
        print(f"*Before* are the kernels of commit {args.commit}, by `--before`.")
    print()
    print("## Beside what was measured\n")
    print("Predictions are of today's kernels, times are [an H100's](gpu.md#times) of 26 November. Many kernels")
    print("have changed since. Of the card the model knows what a copy and cuBLAS reach; nothing was fitted to mcc's kernels.\n")
    beside_measured()
    steps = []
    for name, model, flags in STEPS:
        earlier = rows_of(before, model, flags) if before else None
        steps.append(rows_of(MCC, model, flags))
        step(name, steps[-1], earlier)
    brought(steps)


if __name__ == "__main__":
    main()
