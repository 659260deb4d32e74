"""States on a disk, and parameters too: what a step takes beside one whose states are in memory, and what the disk
alone says.

usage: python -m bench.disk MCC DIRECTORY [ROUNDS]

The runs take turns. The disk's own speed is that of two processes which write and read at the same time, past the
page cache, as much as a step does each way.
"""

import json
import pathlib
import re
import statistics
import subprocess
import sys
import time

MODEL = pathlib.Path(__file__).resolve().parent.parent / "models" / "gpt2.mdl"
SIZES = ["hidden=1024", "heads=16", "layers=12", "vocab=8192", "seq=256"]
PLAN = ["--bf16", "--global-batch-size", "1", "--lr-warmup-iters", "1", "--lr-decay-style", "constant"]
WHERE = {
    "in memory": ["--optimizer-offload"],
    "on a disk": ["--optimizer-offload=disk"],
    "on a disk, parameters too": ["--optimizer-offload=disk", "--param-offload=disk"],
}
STEPS = 6
BLOCK = 4 << 20


def compiled(binary, there, where):
    settings = [word for size in SIZES for word in ["-D", size]]
    words = [binary, "compile", MODEL, *settings, *PLAN, *WHERE[where], "-o", f"{where}.mcc"]
    table = subprocess.run(words, cwd=there, check=True, capture_output=True, text=True).stdout
    line = lambda name: next((text for text in table.splitlines() if re.match(rf"{name} +a rank: ", text)), "")
    return {name: size(line(name)) for name in ["memory", "host", "disk"]}


def size(line):
    found = re.search(r": ([0-9.]+) (KiB|MiB|GiB) =", line)
    return float(found[1]) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[found[2]] if found else 0.0


def run(binary, there, where):
    words = [binary, "run", f"{where}.mcc", "--data", "text.txt", "--bytes", "--steps", str(STEPS), "--metrics", "m.jsonl", "--force"]
    subprocess.run([*words, *(["--offload-to", "."] if where != "in memory" else [])], cwd=there, check=True, capture_output=True)
    steps = [json.loads(line) for line in (there / "m.jsonl").read_text().splitlines()]
    # The first ones draw weights' pages into memory.
    return statistics.median(step["step_ms"] for step in steps[2:]) / 1e3, max(step["memory_bytes"] for step in steps)


def alone(there, count):
    """Seconds in which so many bytes are read and as many written at the same time."""
    blocks = str(max(int(count) // BLOCK, 1))
    dd = lambda *words: ["dd", f"bs={BLOCK}", f"count={blocks}", "status=none", *words]
    subprocess.run(dd("if=/dev/zero", f"of={there}/read.bin", "oflag=direct"), check=True)
    begun = time.monotonic()
    both = [dd(f"if={there}/read.bin", "of=/dev/null", "iflag=direct"), dd("if=/dev/zero", f"of={there}/written.bin", "oflag=direct")]
    for process in [subprocess.Popen(words) for words in both]:
        if process.wait() != 0:
            raise SystemExit("dd failed")
    taken = time.monotonic() - begun
    for name in ["read.bin", "written.bin"]:
        (there / name).unlink()
    return taken


def main():
    binary, there = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 4
    there.mkdir(parents=True, exist_ok=True)
    (there / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4000)
    planned = {where: compiled(binary, there, where) for where in WHERE}
    states = planned["on a disk"]["disk"]
    taken = {where: [] for where in [*WHERE, "disk"]}
    memory = {}
    for _ in range(rounds):
        for where in WHERE:
            seconds, memory[where] = run(binary, there, where)
            taken[where].append(seconds)
        taken["disk"].append(alone(there, states))
    gib = lambda n: f"{n / 2**30:.2f} GiB"
    spread = lambda of: f"{min(of):.2f} to {max(of):.2f}"
    print("| states | a step | of runs | memory planned | taken |\n|---|---|---|---|---|")
    for where in WHERE:
        all_of = planned[where]["memory"] + planned[where]["host"]
        print(f"| {where} | {statistics.median(taken[where]):.2f} s | {spread(taken[where])} | {gib(all_of)} | {gib(memory[where])} |")
    more = statistics.median(taken["on a disk"]) - statistics.median(taken["in memory"])
    disk = statistics.median(taken["disk"])
    print(f"\n{gib(states)} each way: the disk alone takes {disk:.2f} s ({spread(taken['disk'])}), {2 * states / disk / 1e9:.2f} GB/s; a step {more:.2f} s more.")


if __name__ == "__main__":
    main()
