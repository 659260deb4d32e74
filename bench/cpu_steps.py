"""Steps that are predicted beside steps that are measured, on the cores of this machine:
`python3 -m bench.cpu_steps MCC [ROUNDS] > docs/benchmarks/cpu-steps.md`, a quarter of an hour or more.

All is predicted before anything of it is measured: links and waits from small models on two and four ranks, kernels
from one rank of each stage by itself. Runs take turns.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SIZES = "-D layers=4 -D seq=256 -D vocab=256 --global-batch-size 8 --micro-batch-size 1"
MODELS = {
    "gpt2": f"-D hidden=512 -D heads=8 {SIZES}",
    "llama": f"-D hidden=512 -D heads=8 -D kv_heads=4 -D ffn=1408 {SIZES}",
    "mixtral": f"-D hidden=512 -D heads=8 -D kv_heads=4 -D experts=4 -D expert_ffn=704 {SIZES}",
}
MESHES = ["", "--dp 2", "--tp 2 --sp", "--pp 2", "--cp 2", "--dp 4", "--tp 2 --sp --dp 2", "--tp 2 --sp --pp 2", "--pp 2 --dp 2", "--pp 4"]
EXPERTS = ["", "--dp 2", "--dp 2 --ep 2", "--tp 2 --sp", "--pp 2", "--dp 4 --ep 2", "--dp 2 --ep 2 --pp 2"]
STEPS = 10


def mcc(program, line, cwd):
    done = subprocess.run([program, *line.split()], cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"mcc {line}: {done.stderr}")
    return done.stdout


def main():
    program = str(Path(sys.argv[1]).resolve())
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with tempfile.TemporaryDirectory() as work:
        table(program, rounds, Path(work))


def table(program, rounds, work):
    (work / "text.txt").write_bytes(bytes(32 + (k * k * 31 + k // 7) % 90 for k in range(1 << 18)))
    fitted = mcc(program, "calibrate -o base.json", work)
    cases = [(model, mesh) for model in MODELS for mesh in (EXPERTS if model == "mixtral" else MESHES)]
    predicted, measured, further = {}, {case: [] for case in cases}, {}
    for number, (model, mesh) in enumerate(cases):
        mcc(program, f"compile {ROOT}/models/{model}.mdl {MODELS[model]} {mesh} -o {number}.mcc", work)
        mcc(program, f"calibrate {number}.mcc --machine base.json --profile-steps 4 -o {number}.json", work)
        predicted[model, mesh] = json.loads(mcc(program, f"simulate {number}.mcc --machine {number}.json --json", work))
    for _ in range(rounds):
        for number, case in enumerate(cases):
            line = f"run {number}.mcc --data text.txt --steps {STEPS} --threads-per-rank 1 --metrics steps.jsonl --force"
            mcc(program, line, work)
            steps = [json.loads(line)["step_ms"] for line in (work / "steps.jsonl").read_text().splitlines()]
            measured[case].append(statistics.median(steps[2:]) / 1e3)
            further[case] = json.loads((work / "steps.jsonl").read_text().splitlines()[-1]).get("moe_further_passes")
    print("# Steps predicted, beside steps measured, on CPUs\n")
    print(
        "`python3 -m bench.cpu_steps` makes this page: models of four layers, on two cores of a machine that was not alone.\n"
        "[`mcc simulate`](../simulate.md) predicted each step before anything of it was measured. [`mcc\n"
        "calibrate`](../simulate.md#calibration) fitted links and waits to small models on two and four ranks, and timed\n"
        "kernels on one rank of each stage.\n\n"
        f"*Measured* is the median of {rounds} rounds in turns, of the median step of each. *Rounds* has the least and the greatest.\n"
    )
    print("## What was fitted\n\n```")
    print("\n".join(line for line in fitted.splitlines() if not line.startswith(("timing", "compiling", "wrote"))))
    print("```\n")
    print(
        "With `--ep`, experts have room for the rows of an even router; other rows take further passes, which predictions\n"
        "leave out. Untrained routers are uneven: *further passes* is the part of them that ran.\n"
    )
    print("## Steps\n\n| model | mesh | ranks | measured | rounds | predicted | predicted / measured | further passes |\n|---|---|---|---|---|---|---|---|")
    apart = {1: [], 2: [], 4: [], "with further passes": []}
    for case in cases:
        step, found = predicted[case], sorted(measured[case])
        middle = statistics.median(found)
        ratio = step["seconds"] / middle
        passes = "" if further[case] is None else f"{100 * further[case]:.0f} %"
        apart["with further passes" if further[case] else step["ranks"]].append(abs(ratio - 1))
        wavers = f"{found[0] * 1e3:.0f} to {found[-1] * 1e3:.0f}"
        print(f"| {case[0]} | {case[1] or 'one rank'} | {step['ranks']} | {middle * 1e3:.0f} ms | {wavers} | {step['seconds'] * 1e3:.0f} ms | {ratio:.2f} | {passes} |")
    print("\n| ranks | off in the mean | at most |\n|---|---|---|")
    for ranks, parts in [(ranks, parts) for ranks, parts in apart.items() if parts]:
        print(f"| {ranks} | {100 * statistics.mean(parts):.1f} % | {100 * max(parts):.1f} % |")
    even = [part for ranks in (1, 2, 4) for part in apart[ranks]]
    print(f"| all without further passes | {100 * statistics.mean(even):.1f} % | {100 * max(even):.1f} % |")


if __name__ == "__main__":
    main()
