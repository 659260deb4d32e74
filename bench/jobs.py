"""Saving and loading a checkpoint: mcc beside torch.distributed.checkpoint, on the same disk, with the same tensors on two ranks.

usage: python -m bench.jobs MCC DIRECTORY [ROUNDS]

Each rank of PyTorch holds half of each tensor (a DTensor split along its first dim, as FSDP2 has them), saves with the defaults, which
flush, and loads into tensors that are there. mcc saves after its last step, so that nothing is trained beside. The contestants take turns.
"""

import json
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time

MODEL = pathlib.Path(__file__).resolve().parent.parent / "models" / "gpt2.mdl"
SIZES = {"29 M": ["hidden=512", "heads=8", "layers=8", "vocab=8192"], "110 M": ["hidden=768", "heads=12", "layers=12", "vocab=32768"]}
RANKS = 2


def mcc(binary, there, words):
    return subprocess.run([binary, *words], cwd=there, check=True, capture_output=True, text=True)


def compiled(binary, there, sizes):
    settings = [word for size in [*sizes, "seq=64"] for word in ["-D", size]]
    plan = ["--dp", str(RANKS), "--zero", "2", "--global-batch-size", str(RANKS), "--lr-warmup-iters", "1", "--lr-decay-style", "constant"]
    mcc(binary, there, ["compile", MODEL, *settings, *plan, "-o", "a.mcc"])
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


def main():
    binary, there = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    print("| parameters | bytes | | mcc | PyTorch | mcc is faster by |\n|---|---:|---|---:|---:|---:|")
    for number, (name, sizes) in enumerate(SIZES.items()):
        at = there / str(number)
        shutil.rmtree(at, ignore_errors=True)
        at.mkdir(parents=True)
        compiled(binary, at, sizes)
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


if __name__ == "__main__":
    main()
