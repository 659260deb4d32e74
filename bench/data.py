"""Text to tokens, the first sample of a large order, and what ranks read: mcc beside Hugging Face's tokenizers and
megatron-core.

    cargo build --release -p data --example first_sample; cargo build --release
    python3 -m venv out/bench/data-venv; out/bench/data-venv/bin/pip install --no-deps -r bench/requirements/data.txt
    out/bench/data-venv/bin/python -m bench.data [--with CMD] [--only tokens,orders,ranks]

Contestants take turns on the same files; medians of the rounds. Both must write the same bytes and read the same first
sample. Writes docs/benchmarks/data.md; with `--only` its other sections stay. `ranks` needs no package.
"""

import argparse
import json
import os
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEGATRON = [sys.executable, "-m", "bench.peers.megatron_data"]
# Bytes of a document of text.
DOCUMENT = 3000
# Of the model whose ranks read: a step of it takes some tenths of a second on two cores.
VOCAB, SEQUENCE, BATCH, STEPS = 512, 256, 16, 24
MESHES = ["", "--dp 2", "--dp 4", "--cp 2", "--cp 4", "--pp 4", "--tp 4", "--dp 2 --cp 2"]
# Of the data set whose orders are made.
DOCUMENTS, SHORTEST, LONGEST, LENGTH = 200_000, 100, 900, 16


def arguments():
    parser = argparse.ArgumentParser(prog="python -m bench.data", description=__doc__.split("\n")[0])
    parser.add_argument("--mcc", type=Path, default=ROOT / "target/release/mcc")
    parser.add_argument("--first", type=Path, default=ROOT / "target/release/examples/first_sample")
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench/data")
    parser.add_argument("--rounds", type=int, default=5, help="of tokens, and of the smaller orders")
    parser.add_argument("--samples", default="1e7,1e8,1e9", help="sizes of orders; one of 1e9 needs 12 GB of disk and as much memory")
    parser.add_argument("--only", default="tokens,orders,ranks", help="sections that are measured")
    parser.add_argument("--with", dest="before", default="", metavar="CMD", help="put before each command, to keep the machine free")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/benchmarks/data.md")
    return parser.parse_args()


def run(args, command):
    """A command's wall time in seconds, its output, and its peak of memory in bytes."""
    script = """import os, subprocess, sys, time
begin = time.perf_counter()
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE)
out = child.stdout.read()
_, status, used = os.wait4(child.pid, 0)
print(time.perf_counter() - begin, used.ru_maxrss * 1024, status)
sys.stdout.flush()
os.write(1, out)"""
    words = [*args.before.split(), sys.executable, "-c", script, *map(str, command)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    head, _, out = done.stdout.partition("\n")
    seconds, peak, status = head.split() or (0, 0, 1)
    if int(status):
        raise SystemExit(f"{' '.join(map(str, command))}: {done.stderr}")
    return float(seconds), out, int(peak)


def corpus(work):
    """The texts of this repository, in documents of some kilobytes."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    names = sorted(n for n in names if n.endswith((".md", ".rs", ".mdl", ".py")))
    texts = [(ROOT / n).read_text() for n in names]
    documents = [t[k:k + DOCUMENT] for t in texts for k in range(0, len(t), DOCUMENT)]
    random.Random(1).shuffle(documents)
    path = work / "text.jsonl"
    path.write_text("".join(json.dumps({"text": d}, ensure_ascii=False) + "\n" for d in documents))
    return path, sum(len(d.encode()) for d in documents)


def tokens(args):
    text, size = corpus(args.work)
    tokenizer = args.work / "tokenizer"
    run(args, [args.mcc, "data", "train-tokenizer", text, "--tokens", 32000, "--force", "-o", tokenizer])
    prefixes = {name: args.work / name for name in ("mcc", "megatron")}
    seconds, peaks = {name: [] for name in prefixes}, {}
    for _ in range(args.rounds):
        took, _, peaks["mcc"] = run(args, [args.mcc, "data", "tokenize", text, "--tokenizer", tokenizer, "--append-eod", "--force", "-o", prefixes["mcc"]])
        seconds["mcc"].append(took)
        _, out, peaks["megatron"] = run(args, [*MEGATRON, "tokenize", text, tokenizer / "tokenizer.json", prefixes["megatron"]])
        seconds["megatron"].append(float(out.split()[0]))
        for end in (".bin", ".idx"):
            if Path(f"{prefixes['mcc']}{end}").read_bytes() != Path(f"{prefixes['megatron']}{end}").read_bytes():
                raise SystemExit(f"the two {end} differ")
    return size, seconds, peaks


def indexed(prefix):
    """A data set of random tokens."""
    import numpy

    r = numpy.random.RandomState(1)
    lengths = r.randint(SHORTEST, LONGEST + 1, DOCUMENTS).astype("<i4")
    pointers = numpy.concatenate([[0], numpy.cumsum(2 * lengths[:-1].astype("<i8"))]).astype("<i8")
    r.randint(0, 50000, int(lengths.sum()), dtype=numpy.uint16).tofile(f"{prefix}.bin")
    with open(f"{prefix}.idx", "wb") as out:
        out.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, DOCUMENTS, DOCUMENTS + 1) + lengths.tobytes())
        out.write(pointers.tobytes() + numpy.arange(DOCUMENTS + 1, dtype="<i8").tobytes())
    return int(lengths.sum())


def orders(args):
    prefix, cache = args.work / "set", args.work / "cache"
    size = indexed(prefix)
    sizes = [int(float(n)) for n in args.samples.split(",")]
    found = {}
    commands = {"mcc": [args.first, prefix], "megatron": [*MEGATRON, "first", prefix]}
    for samples in sizes:
        rounds = args.rounds if samples <= 10**7 else min(args.rounds, 3) if samples <= 10**8 else 1
        for _ in range(rounds):
            firsts = set()
            for name in commands:
                shutil.rmtree(cache, ignore_errors=True)
                _, out, peak = run(args, [*commands[name], samples, LENGTH, cache])
                seconds, _, tokens = out.strip().split(" ", 2)
                firsts.add(tokens)
                kept = sum(f.stat().st_size for f in cache.rglob("*") if f.is_file())
                found.setdefault((samples, name), []).append((float(seconds), peak, kept))
            if len(firsts) > 1:
                raise SystemExit(f"first samples differ: {firsts}")
    shutil.rmtree(cache, ignore_errors=True)
    return size, found


def ranks(args):
    """Of each mesh: bytes that a rank read for a step, and what part of all steps waited, of a data set and of one token."""
    text, _ = corpus(args.work)
    tokenizer, prefix, constant = (args.work / name for name in ("small", "read", "constant.txt"))
    run(args, [args.mcc, "data", "train-tokenizer", text, "--tokens", VOCAB, "--force", "-o", tokenizer])
    run(args, [args.mcc, "data", "tokenize", text, "--tokenizer", tokenizer, "--append-eod", "--force", "-o", prefix])
    constant.write_text("a" * (SEQUENCE * BATCH * (STEPS + 1)))
    size = Path(f"{prefix}.bin").stat().st_size // 2
    sizes = [f"-D{name}" for name in (f"vocab={VOCAB}", "hidden=128", "heads=4", "layers=4", f"seq={SEQUENCE}")]
    found = []
    for mesh in MESHES:
        artifact, log = args.work / "ranks.mcc", args.work / "ranks.jsonl"
        run(args, [args.mcc, "compile", "models/gpt2.mdl", *sizes, *mesh.split(), "--micro-batch-size", 4, "--global-batch-size", BATCH,
                   "--lr-warmup-iters", 0, "-o", artifact])
        row = {"mesh": mesh or "one rank"}
        for name, data in {"set": ["--data-path", prefix, "--split", "1,0,0"], "constant": ["--data", constant]}.items():
            run(args, [args.mcc, "run", artifact, *data, "--steps", STEPS, "--metrics", log, "--quiet", "--force"])
            steps = [json.loads(line) for line in log.read_text().splitlines()][1:]
            waits, whole = [step["data_wait_ms"] for step in steps], [step["step_ms"] for step in steps]
            row[name] = max(s["data_bytes"] for s in steps), 100 * sum(waits) / sum(whole), 1e3 * statistics.median(waits), statistics.median(whole)
        found.append(row)
    return size, found


def of_tokens(found):
    size, seconds, peaks = found
    median = {name: statistics.median(s) for name, s in seconds.items()}
    ratios = sorted(b / a for a, b in zip(seconds["mcc"], seconds["megatron"]))
    who = {"mcc": "mcc", "megatron": "tokenizers, megatron-core"}
    lines = [f"{size / 1e6:.1f} MB of text and sources of this repository in documents of {DOCUMENT} characters, as JSON lines; a byte-level BPE of",
             "32,000 tokens. Of mcc the whole command counts, of Python what follows the imports: `encode_batch_fast` of 1000",
             "documents at a time on all cores, and `IndexedDatasetBuilder`. Both must write the same bytes.",
             "", "| | seconds | MB/s | peak of memory |", "|---|---:|---:|---:|"]
    lines += [f"| {who[n]} | {median[n]:.2f} | {size / median[n] / 1e6:.1f} | {peaks[n] / 2**20:.0f} MiB |" for n in who]
    return lines + ["", f"mcc is faster by {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), of {len(ratios)} turns."]


def of_orders(found):
    size, found = found
    lines = [f"A data set of {size:,} tokens in {DOCUMENTS:,} documents, cut into samples of {LENGTH} tokens, with as many epochs as needed.",
             "Orders are built, written to a cache and read from it. Both must read the same first sample.",
             f"{os.cpu_count()} cores, {processor()}, shared with other work: ratios, taken in each turn, count more than times.",
             "", "| samples | mcc | megatron-core | mcc is faster by | peak of memory: mcc | megatron-core | cache: mcc | megatron-core |",
             "|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for samples in sorted({n for n, _ in found}):
        own, other = found[samples, "mcc"], found[samples, "megatron"]
        middle = lambda rows, k: statistics.median(r[k] for r in rows)
        a, b = [[f"{middle(of, 0):.2f} s", f"{middle(of, 1) / 1e6:,.0f} MB", f"{middle(of, 2) / 1e6:,.0f} MB"] for of in (own, other)]
        ratio = f"{statistics.median(y[0] / x[0] for x, y in zip(own, other)):.1f}"
        lines.append(f"| {samples:,} | {a[0]} | {b[0]} | {ratio} | {a[1]} | {b[1]} | {a[2]} | {b[2]} |")
    return lines + ["", "Peaks count pages of the cache that were read, which the system may reclaim. mcc takes 16 MiB a core while it writes,",
                    "and looks at every byte of a cache before it uses it. Neither waits for the disk. 10^9 samples were measured in one",
                    "turn. The bars are 10^8 samples in 30 s, 10^9 in 5 minutes, and 16 bytes a sample."]


def of_ranks(found):
    size, rows = found
    whole = rows[0]["set"][0]
    text = (f"A GPT-2 of 4 layers, on a data set of {size:,} tokens of 16 bits; {os.cpu_count()} cores, {processor()}, shared with other work, so "
            f"shares count and not times. *Bytes* is the most that a rank reads for a step; a batch of {BATCH} sequences of {SEQUENCE} tokens has {whole:,} "
            f"with its labels. *Waits* is of the rank that waits most for its reading thread, over {STEPS - 1} steps after the first. "
            f"*One token* is the same with a file of one token.")
    lines = [textwrap.fill(text, 118), "", "| mesh | bytes of a rank | of the batch | waits for data | of a step | of a step, one token |",
             "|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        (read, share, wait, step), constant = row["set"], row["constant"]
        lines.append(f"| {row['mesh']} | {read:,} | {100 * read / whole:.1f} % | {wait:.0f} µs of {step:.0f} ms | {share:.3f} % | {constant[1]:.3f} % |")
    return lines + ["", "The bar is 1 % of a step. Ranks of tp read the same rows. In a pipeline the first stage reads tokens, the last labels."]


SECTIONS = {"tokens": ("Text to tokens", tokens, of_tokens), "orders": ("The first sample", orders, of_orders), "ranks": ("What ranks read", ranks, of_ranks)}


def processor():
    model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return model[1] if model else "unknown"


def page(args):
    """The page, with what was there of sections that are not measured."""
    old = args.output.read_text() if args.output.exists() else ""
    only = args.only.split(",")
    head = ["# Data", "", "<!-- Written by `python -m bench.data`. -->", "",
            "mcc's data sets are measured beside Hugging Face's tokenizers 0.23.3 and megatron-core 0.16.1, with its compiled",
            f"helpers. {os.cpu_count()} cores, {processor()}. Contestants take turns on the same files; figures are medians."]
    made = [("\n".join(head) if "tokens" in only else old.split("\n## ")[0].rstrip())]
    for name, (title, measure, write) in SECTIONS.items():
        there = re.search(rf"^## {title}\n\n(.*?)(?=^## |\Z)", old, re.M | re.S)
        body = "\n".join(write(measure(args))) if name in only else there[1].rstrip() if there else ""
        made += [f"## {title}\n\n{body}"] if body else []
    return "\n\n".join(made) + "\n"


def main():
    args = arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    args.mcc, args.first, args.work = args.mcc.resolve(), args.first.resolve(), args.work.resolve()
    args.output.write_text(page(args))
    print(args.output.read_text())


if __name__ == "__main__":
    main()
