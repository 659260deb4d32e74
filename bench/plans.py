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
ELSEWHERE = [
    "",
    "--optimizer-offload",
    "--optimizer-offload=disk",
    "--optimizer-offload --param-offload",
    "--optimizer-offload=disk --param-offload",
    "--optimizer-offload=disk --param-offload=disk",
]
DEEPSEEK = "-D layers=4 -D seq=4096 -D vocab=8192"
MESHES = [
    ("one rank", ""),
    ("--tp 8 --sp", "--tp 8 --sp"),
    *[(f"--tp 2 --cp 4 --cp-comm-type {how}", f"--tp 2 --cp 4 --cp-comm-type {how}") for how in ["p2p", "all_gather", "a2a", "a2a+p2p"]],
]


GPT = "-D layers=24 -D hidden=1024 -D heads=16 -D seq=1024 --dp 4"
GPT3 = "-D layers=96 -D hidden=12288 -D heads=96 -D seq=2048 -D vocab=51200 --dp 384 --zero 3 --recompute full"


LLAMA405 = "-D hidden=16384 -D heads=128 -D kv_heads=8 -D ffn=53248 -D layers=126 -D vocab=128256 -D seq=131072"
MESH405 = f"{LLAMA405} --tp 8 --sp --cp 16 --pp 16 --dp 8"
ONE_LAYER = "--recompute full --recompute-method block --recompute-num-layers 1"
SELECTIVE = "--recompute selective"
MESH_V3 = "--tp 2 --sp --pp 8 --vpp 4 --dp 64 --ep 64 --etp 1 --zero 1"
V3 = f"{MESH_V3} {SELECTIVE}"
MIXTRAL = "--pp 4 --vpp 8 --dp 8 --ep 8"
LARGE = [
    ("Llama-3 405B, 131,072 tokens", "llama", f"{MESH405} --zero 1", 256, "0"),
    ("the same", "llama", f"{MESH405} --zero 1 {ONE_LAYER}", 256, "4.2 %: 1 of 8 layers"),
    ("the same", "llama", f"{MESH405} --zero 2", 256, "0"),
    ("the same", "llama", f"{MESH405} --zero 2 {ONE_LAYER}", 256, "4.2 %: 1 of 8 layers"),
    ("the same", "llama", f"{MESH405} --zero 1 --activation-offload all", 256, "0"),
    ("the same", "llama", f"{MESH405} --zero 2 --activation-offload all", 256, "0"),
    ("DeepSeek-V3, 1,024 ranks", "deepseek_v3", f"{V3} --recompute-modules moe", 2048, "experts"),
    ("the same", "deepseek_v3", f"{V3} --recompute-modules moe,mla_up_proj,norm", 2048, "experts, projections, norms"),
    ("the same", "deepseek_v3", f"{V3} --recompute-modules mla_up_proj,norm --activation-offload moe", 2048, "projections, norms"),
    ("the same", "deepseek_v3", f"{MESH_V3} --activation-offload all", 2048, "0"),
    ("the same, room for all rows", "deepseek_v3", f"{V3} --recompute-modules moe --moe-passes 1", 2048, "experts"),
    ("the same", "deepseek_v3", f"{V3} --recompute-modules moe,mla_up_proj,norm --moe-passes 1", 2048, "experts, projections, norms"),
    ("the same, a balanced router's room alone", "deepseek_v3", f"{V3} --recompute-modules moe --moe-buffer-factor 1 --moe-passes 1", 2048, "experts"),
    ("Mixtral 8x7B", "mixtral", MIXTRAL, 256, "0"),
    ("the same, room for all rows", "mixtral", f"{MIXTRAL} --moe-passes 1", 256, "0"),
    ("the same, a balanced router's room alone", "mixtral", f"{MIXTRAL} --moe-buffer-factor 1 --moe-passes 1", 256, "0"),
]


def plan(root: Path, model: str, flags: str, batch: str = "--micro-batch-size 1 --global-batch-size 8") -> tuple[str, float]:
    """The line of memory of a compile by the mcc of a checkout, and its total in GiB."""
    line = next(line for line in plan_lines(root, model, flags, batch) if line.startswith("memory"))
    number, unit = re.search(r"([\d.]+) (MiB|GiB|TiB)", line).groups()
    return line, float(number) * {"MiB": 1 / 1024, "GiB": 1, "TiB": 1024}[unit]


def plan_lines(root: Path, model: str, flags: str, batch: str = "--micro-batch-size 1 --global-batch-size 8") -> list[str]:
    """What a compile by the mcc of a checkout prints."""
    with tempfile.TemporaryDirectory() as out:
        model = root / "models" / f"{model}.mdl"
        words = [root / "target/release/mcc", "compile", model, *flags.split(), "--target", "sm_90a", "--dtype", "bf16"]
        words += [*batch.split(), "--emit", "program", "-o", f"{out}/a.mcc"]
        ran = subprocess.run(words, check=True, capture_output=True, text=True)
    return (ran.stdout + ran.stderr).splitlines()


def part(line: str, name: str) -> str:
    return re.search(rf"{name} ((?:\d+ x )?[\d.]+ \w+)", line).group(1)


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
    print("`python3 -m bench.plans` prints the memory that a rank is planned to take, in bf16 for sm_90a, with one sequence a")
    print("microbatch and eight a step. *Hidden* is the part of bytes moved that overlaps kernels, on the [nominal")
    print("machine](../explain.md) of `mcc explain`, whose bus carries 25 GB/s.")
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
    order()
    offload()
    elsewhere()
    side_by_side()
    large()


def zero() -> None:
    """What each level of ZeRO takes, by microbatches."""
    print("\n## ZeRO by level and microbatches\n")
    print("A GPT-2 of 24 layers of 1,024 elements at 1,024 tokens, on four data-parallel ranks. Parameters, gradients and states")
    print("[last over a step](../training.md#memory-of-data-parallel-ranks). Exchanges and the driver's context take as much at")
    print("every level. *Transient* are activations and temporary buffers, such as buckets and layers under way.\n")
    rows = []
    for level in range(4):
        plans = [plan(ROOT, "gpt2", f"{GPT} --zero {level}", f"--micro-batch-size 1 --global-batch-size {4 * m}") for m in [1, 2, 8]]
        lasts = " + ".join(part(plans[0][0], name) for name in ["parameters", "gradients", "optimizer"])
        fixed = " + ".join(part(plans[0][0], name) for name in ["exchanges", "context"])
        transient = [f"{activations(line)} + {part(line, 'temporary')} = {total:.2f} GiB" for line, total in plans]
        rows.append([str(level), lasts, fixed, *transient])
    table(["`--zero`", "lasts", "exchanges + context", "1 microbatch: transient = all", "2", "8"], rows)
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


def order() -> None:
    """What an order of commands for memory saves."""
    print("\n## Order of commands\n")
    print("`--memory-order time` overlaps communication with compute; `memory` has few bytes in use.\n")
    rows = []
    for name, model, flags, batch in [
        ("GPT-2, 24 layers, `--dp 4 --zero 2`", "gpt2", f"{GPT} --zero 2", 4),
        ("GPT-2, 24 layers, `--dp 4 --zero 3`", "gpt2", f"{GPT} --zero 3", 4),
        ("Llama-3 8B, `--dp 8 --zero 2`", "llama", f"{LLAMA} --dp 8 --zero 2", 16),
        ("Llama-3 8B, `--tp 8 --sp`", "llama", f"{LLAMA} --tp 8 --sp", 8),
    ]:
        sizes = f"--micro-batch-size 1 --global-batch-size {batch}"
        plans = [plan(ROOT, model, f"{flags} --memory-order {how}", sizes) for how in ["time", "memory"]]
        rows.append([name, *[f"{total:.2f} GiB, {part(line, 'temporary')}" for line, total in plans]])
    sizes = f"--micro-batch-size 4 --global-batch-size {384 * 4}"
    plans = [plan(ROOT, "gpt2", f"{GPT3} --memory-order {how}", sizes) for how in ["time", "memory"]]
    rows.append(["GPT-3, 384 ranks, as above", *[f"{total:.2f} GiB, {part(line, 'temporary')}" for line, total in plans]])
    table(["", "time: all, temporary", "memory"], rows)


def offload() -> None:
    """What activations on the host save, and how much of the copies is hidden."""
    print("\n## Activations on the host\n")
    print("Llama-3 8B at 8,192 tokens on eight data-parallel ranks with `--zero 1`, by `--activation-offload`. *Each way* is what")
    print("a rank copies for its one sequence of a step.\n")
    rows = []
    for flags in ["", "--activation-offload mlp", "--activation-offload all", "--recompute full", "--recompute full --activation-offload all"]:
        line, total = plan(ROOT, "llama", f"{LLAMA} --dp 8 --zero 1 {flags}")
        moved = streams(f"{LLAMA} --dp 8 --zero 1 {flags}")
        rows.append([f"`{flags}`" if flags else "", f"{total:.2f} GiB", activations(line), part(line, "temporary"), *moved])
    table(["flags", "a rank", "of it activations", "temporary", "each way", "hidden: to the host", "and back"], rows)


def streams(flags: str) -> list[str]:
    """What goes to the host in a step, and how much of it, and of what comes back, is hidden."""
    words = [ROOT / "target/release/mcc", "explain", ROOT / "models/llama.mdl", "--collectives", *flags.split()]
    words += ["--target", "sm_90a", "--dtype", "bf16", "--global-batch-size", "8"]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    found = {stream: (size, share) for stream, size, share in re.findall(r"^stream (to_\w+) +([\d.]+ \w+) .*\((\d+ %)\) overlapped", said, re.M)}
    if not found:
        return ["", "", ""]
    return [found["to_host"][0], found["to_host"][1], found["to_device"][1]]


PAIRED = "--overlap-moe-expert-parallel-comm"


def side_by_side() -> None:
    """What passes in pairs hide of tensor- and expert-parallel exchanges, and what they take."""
    print("\n## Passes side by side\n")
    print("*Side by side* is with `--overlap-moe-expert-parallel-comm`. *Hidden* is of tensor- and expert-parallel exchanges, in")
    print("a step without further passes of rows.\n")
    rows = []
    for name, model, flags, batch in [
        ("DeepSeek-V3, 1,024 ranks, `--vpp 4`", "deepseek_v3", MESH_V3, 2048),
        ("the same, `dualpipev`", "deepseek_v3", MESH_V3.replace("--vpp 4", "--pipeline-schedule dualpipev"), 2048),
        ("`--vpp 4`, experts, projections and norms recomputed", "deepseek_v3", f"{V3} --recompute-modules moe,mla_up_proj,norm", 2048),
        (f"Mixtral 8x7B, `{MIXTRAL}`", "mixtral", MIXTRAL, 256),
        ("Llama-3 8B, `--tp 8 --sp`, 8,192 tokens", "llama", f"{LLAMA} --tp 8 --sp", 8),
    ]:
        sizes = f"--micro-batch-size 1 --global-batch-size {batch}"
        both = [(plan(ROOT, model, f"{flags} {more}", sizes)[1], hidden(model, f"{flags} {more} {sizes}")) for more in ["", PAIRED]]
        rows.append([name, *[cell for total, share in both for cell in (f"{total:.2f} GiB", share)]])
    table(["", "one after the other", "hidden", "side by side", "hidden"], rows)


def hidden(model: str, flags: str, stream: str = "tensor") -> str:
    """How much of what goes on a stream in a step is hidden."""
    words = [ROOT / "target/release/mcc", "explain", ROOT / f"models/{model}.mdl", "--collectives", *flags.split()]
    said = subprocess.run([*words, "--target", "sm_90a", "--dtype", "bf16"], check=True, capture_output=True, text=True).stdout
    return re.search(rf"^stream {stream} .*\((\d+ %)\) overlapped", said, re.M).group(1)


def elsewhere() -> None:
    """What of states and parameters is where."""
    print("\n## States and parameters elsewhere\n")
    print("Llama-3 8B at 8,192 tokens: bytes of a rank in each memory, and on its disk. With states on disk, the host keeps the")
    print("smallest of them, 16 MiB to read and write by, and room for a few pieces of updates. *Hidden* is of copies to the")
    print("device.\n")
    rows = []
    for flags in ["", "--dp 8 --zero 3"]:
        for where in ELSEWHERE:
            shown = f"{flags} {where}".strip()
            lines = plan_lines(ROOT, "llama", f"{LLAMA} {shown}")
            found = [re.search(rf"^{name} +[^:\n]*: ([\d.]+ \w+) =", "\n".join(lines), re.M) for name in ["memory", "host", "disk"]]
            sizes = "--micro-batch-size 1 --global-batch-size 8"
            share = hidden("llama", f"{LLAMA} {shown} {sizes}", "to_device") if where else ""
            rows.append([f"`{shown}`" if shown else "", *[size.group(1) if size else "" for size in found], share])
    table(["flags", "device", "host", "disk", "hidden"], rows)


def large() -> None:
    """What models take that are trained on thousands of GPUs."""
    print("\n## Large models\n")
    print("Each line is a compile with `--target sm_90a --dtype bf16 --micro-batch-size 1`, and its ranks that hold most.")
    print("*Recomputed* is a share of a step's operations without recomputation, of which a forward pass is a third. Rows of")
    print("experts have room for 1.25 times a balanced share, with further passes, unless flags say more.\n")
    rows = []
    for name, model, flags, batch, recomputed in LARGE:
        line, total = plan(ROOT, model, flags, f"--micro-batch-size 1 --global-batch-size {batch}")
        shown = flags.removeprefix(LLAMA405).strip()
        rows.append([name, f"`{shown}`", f"{total:.2f} GiB", activations(line), part(line, "temporary"), recomputed])
    table(["model", "flags", "a rank", "of it activations", "temporary", "recomputed"], rows)


if __name__ == "__main__":
    main()
