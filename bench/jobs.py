"""Saving and loading a checkpoint: mcc beside torch.distributed.checkpoint, on the same disk, with the same tensors on two ranks.

usage: python -m bench.jobs MCC DIRECTORY [ROUNDS]

Each rank of PyTorch holds half of each tensor (a DTensor split along its first dim, as FSDP2 has them), saves with the defaults, which
flush, and loads into tensors that are there. mcc saves after its last step, so that nothing is trained beside. The contestants take turns.
Then what saves cost mcc's steps, beside which they are written, and how long a run is away of which a rank is killed.
"""

import json
import pathlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time

MODEL = pathlib.Path(__file__).resolve().parent.parent / "models" / "gpt2.mdl"
SIZES = {"29 M": ["hidden=512", "heads=8", "layers=8", "vocab=8192"], "110 M": ["hidden=768", "heads=12", "layers=12", "vocab=32768"]}
# Tokens of a sequence where something is trained beside: steps of a few seconds.
LENGTHS = {"29 M": 256, "110 M": 64}
RANKS = 2


def mcc(binary, there, words):
    return subprocess.run([binary, *words], cwd=there, check=True, capture_output=True, text=True)


def compiled(binary, there, sizes, out, batch):
    settings = [word for size in sizes for word in ["-D", size]]
    plan = ["--dp", str(RANKS), "--zero", "2", "--global-batch-size", str(batch), "--lr-warmup-iters", "1", "--lr-decay-style", "constant"]
    mcc(binary, there, ["compile", MODEL, *settings, *plan, "-o", out])
    (there / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)


def saved_by_mcc(binary, there):
    for name in ["ck", "log"]:
        shutil.rmtree(there / name, ignore_errors=True)
    mcc(binary, there, ["run", "a.mcc", "--data", "text.txt", "--bytes", "--steps", "1", "--save", "ck", "--log-dir", "log"])
    records = [json.loads(line) for line in (there / "log" / "run.jsonl").read_text().splitlines()]
    saved = next(r for r in records if r["event"] == "saved")
    return saved["bytes"], saved["milliseconds"] / 1e3


def loaded_by_mcc(binary, there):
    out = mcc(binary, there, ["run", "a.mcc", "--data", "text.txt", "--bytes", "--steps", "2", "--load", "ck", "-v"]).stdout
    return float(re.search(r"were read from .* in ([0-9.]+) s", out).group(1))


def shapes(there):
    manifest = json.loads((there / "ck" / "step-1" / "checkpoint.json").read_text())
    return [(tensor["name"], tensor["shape"]) for tensor in manifest["checkpoint"]["tensors"]]


def torch_rank(rank, tensors, directory, port, out):
    import os
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {name: distribute_tensor(torch.randn(shape), mesh, [Shard(0)]) for name, shape in tensors}
    times = []
    for act in [dcp.save, dcp.load]:
        dist.barrier()
        begun = time.perf_counter()
        act(state, checkpoint_id=directory)
        dist.barrier()
        times.append(time.perf_counter() - begun)
    if rank == 0:
        out.put(times)
    dist.destroy_process_group()


def torch_times(tensors, directory, port):
    import torch.multiprocessing as processes

    shutil.rmtree(directory, ignore_errors=True)
    out = processes.get_context("spawn").SimpleQueue()
    processes.spawn(torch_rank, (tensors, str(directory), port, out), nprocs=RANKS)
    return out.get()


def stalls(binary, there, rounds):
    """Medians of the seconds of steps beside which a checkpoint is written, and of the others of the same runs."""
    beside, others, saves = [], [], []
    for _ in range(rounds):
        for name in ["stall", "log"]:
            shutil.rmtree(there / name, ignore_errors=True)
        mcc(binary, there, ["run", "b.mcc", "--data", "text.txt", "--bytes", "--steps", "20", "--save", "stall", "--save-interval", "4", "--keep", "1", "--log-dir", "log"])
        steps = [json.loads(line) for line in (there / "log" / "metrics.jsonl").read_text().splitlines()]
        # The first steps are slower.
        for step in steps[4:]:
            (beside if step["step"] % 4 == 1 else others).append(step["step_ms"] / 1e3)
        records = [json.loads(line) for line in (there / "log" / "run.jsonl").read_text().splitlines()]
        saves += [(r["bytes"], r["milliseconds"] / 1e3) for r in records if r["event"] == "saved" and r["step"] < 20]
    return statistics.median(beside), statistics.median(others), saves[0][0], statistics.median(s for _, s in saves)


def away(binary, there):
    """Seconds from the end of a rank to the first step after it."""
    for name in ["away", "away.jsonl"]:
        shutil.rmtree(there / name, ignore_errors=True) if name == "away" else (there / name).unlink(missing_ok=True)
    words = ["run", "b.mcc", "--data", "text.txt", "--bytes", "--steps", "12", "--save", "away", "--save-interval", "4", "--keep", "1", "--restarts", "1", "--metrics", "away.jsonl"]
    run = subprocess.Popen([binary, *words], cwd=there, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = there / "away.jsonl"
    lines = lambda: metrics.read_text().count("\n") if metrics.exists() else 0
    while not (there / "away" / "step-4").exists() or lines() < 6:
        time.sleep(0.001)
    before, begun = lines(), time.perf_counter()
    ranks = pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(int(ranks[0]), signal.SIGKILL)
    while lines() == before:
        time.sleep(0.001)
    seconds = time.perf_counter() - begun
    assert run.wait() == 0
    return seconds


def main():
    binary, there = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    print("| parameters | bytes | | mcc | PyTorch | mcc is faster by |\n|---|---:|---|---:|---:|---:|")
    for number, (name, sizes) in enumerate(SIZES.items()):
        at = there / str(number)
        shutil.rmtree(at, ignore_errors=True)
        at.mkdir(parents=True)
        compiled(binary, at, [*sizes, "seq=64"], "a.mcc", RANKS)
        own, peer = [], []
        for k in range(rounds):
            size, save = saved_by_mcc(binary, at)
            own.append((save, loaded_by_mcc(binary, at)))
            peer.append(torch_times(shapes(at), at / "dcp", 29600 + 10 * number + k))
        for which, act in enumerate(["save", "load"]):
            (a, b) = (statistics.median(t[which] for t in times) for times in (own, peer))
            ratios = sorted(p[which] / o[which] for o, p in zip(own, peer))
            rate = lambda seconds: f"{seconds:.2f} s ({size / seconds / 1e9:.2f} GB/s)"
            print(f"| {name} | {size / 2**20:.0f} MiB | {act} | {rate(a)} | {rate(b)} | {b / a:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |")
    beside_training(binary, there, rounds)


def beside_training(binary, there, rounds):
    print("\n| parameters | bytes | a save | a step | a step with a save beside | a rank killed, until the next step |\n|---|---:|---:|---:|---:|---:|")
    for number, (name, sizes) in enumerate(SIZES.items()):
        at = there / str(number)
        compiled(binary, at, [*sizes, f"seq={LENGTHS[name]}"], "b.mcc", 4 * RANKS)
        beside, other, size, save = stalls(binary, at, rounds)
        gone = statistics.median(away(binary, at) for _ in range(rounds))
        stall = f"{beside:.2f} s ({100 * (beside / other - 1):+.1f} %)"
        print(f"| {name} | {size / 2**20:.0f} MiB | {save:.2f} s ({size / save / 1e9:.2f} GB/s) | {other:.2f} s | {stall} | {gone:.2f} s |")


if __name__ == "__main__":
    main()
