"""torch.distributed.checkpoint (DCP) and `mcc checkpoint convert` read what the other wrote: `make test-dcp`.

    python tests/dcp.py MCC OUT    OUT is made anew
    python tests/dcp.py fixture    writes tests/dcp, which the runtime's own tests read
"""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

ROOT = Path(__file__).resolve().parent.parent
MODEL = "-D vocab=251 -D hidden=32 -D heads=4 -D layers=2 -D seq=8 --lr 1e-3 --min-lr 1e-3 --lr-warmup-iters 2"


def values():
    """What is saved, as whole tensors by their flat names."""
    w = torch.arange(30, dtype=torch.float32).reshape(5, 6) / 4
    return {
        "model.w": w,
        "model.cols": w.to(torch.bfloat16),
        "model.rep": -w[0].to(torch.float16),
        "model.turned": w.t(),
        "model.one": torch.full((1,), 2.5, dtype=torch.float64),
        "optim.step": torch.tensor(7),
    }


def saved(mesh):
    """The same, nested and distributed, with something that is no tensor."""
    v = values()
    rows, columns = [Shard(0)] * mesh.ndim, [Shard(1)] * mesh.ndim
    both = [Shard(0), Shard(1)] if mesh.ndim == 2 else rows
    model = {
        "w": distribute_tensor(v["model.w"], mesh, both),
        "cols": distribute_tensor(v["model.cols"], mesh, columns),
        "rep": distribute_tensor(v["model.rep"], mesh, [Replicate()] * mesh.ndim),
        "turned": v["model.turned"],
        "one": distribute_tensor(v["model.one"], mesh, rows),
    }
    return {"model": model, "optim": {"step": v["optim.step"]}, "epoch": 3}


def save(shape, directory, kind):
    options = {"threads": {"thread_count": 2}, "files": {"single_file_per_rank": False}, "safetensors": {"serialization_format": SerializationFormat.SAFETENSORS}}
    # Such items are contiguous.
    state = {"w": values()["model.w"]} if kind == "safetensors" else saved(init_device_mesh("cpu", shape))
    dcp.save(state, storage_writer=FileSystemWriter(directory, **options.get(kind, {})))


def load(shape, directory, file):
    """Loads what mcc wrote into tensors of these ranks, and saves it again as PyTorch does."""
    mesh = init_device_mesh("cpu", shape)
    wanted = load_file(file)
    for placement in [Shard(0), Replicate()]:
        state = {name: distribute_tensor(torch.full_like(t, -1.0), mesh, [placement]) for name, t in wanted.items()}
        state["mcc"] = ""
        dcp.load(state, checkpoint_id=directory)
        about = state["mcc"]
        assert '"model":"gpt2"' in about, about
        for name, tensor in wanted.items():
            assert torch.equal(state[name].full_tensor(), tensor), name
        if placement == Shard(0):
            dcp.save(state, checkpoint_id=f"{directory}-again")
            state.clear()


def rank_main(rank, port, work, shape, *args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank))
    world = torch.Size(shape).numel()
    os.environ["WORLD_SIZE"] = str(world)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    work(shape, *args)
    dist.destroy_process_group()


def ranks(work, shape, *args):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(rank_main, args=(port, work, shape, *args), nprocs=torch.Size(shape).numel())


def main(mcc, out):
    mcc, out = Path(mcc).resolve(), Path(out)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)

    def run(words, fails=None):
        done = subprocess.run([mcc, *words.split()], cwd=out, capture_output=True, text=True)
        if fails is None:
            assert done.returncode == 0, done.stderr
        else:
            assert done.returncode == 1 and fails in done.stderr, (done.returncode, done.stderr)
        return done.stdout

    for shape, kind in [((1,), ""), ((2,), ""), ((3,), "threads"), ((2, 2), ""), ((2, 2), "files")]:
        name = "torch-" + "x".join(map(str, shape)) + kind
        ranks(save, shape, out / name, kind)
        assert "CRC-32 checksums are right" in run(f"checkpoint verify {name}")
        run(f"checkpoint convert {name} {name}.safetensors")
        read = load_file(out / f"{name}.safetensors")
        assert read.keys() == values().keys(), read.keys()
        for tensor, wanted in values().items():
            assert torch.equal(read[tensor], wanted.float()), (name, tensor, read[tensor])
        run(f"checkpoint convert {name} no", fails="does not say after which step it was saved")
        print(f"{name}: mcc reads what PyTorch {torch.__version__} wrote")
    ranks(save, (1,), out / "safe", "safetensors")
    run("checkpoint verify safe", fails="it is a safetensors file")
    print("safetensors items: refused by name")

    (out / "text.txt").write_text("The quick brown fox jumps over the lazy dog, and then over a wall. " * 40)
    run(f"compile {ROOT}/models/gpt2.mdl {MODEL} --tp 2 -o m.mcc")
    run("run m.mcc --data text.txt --steps 3 --save ck --quiet")
    run("checkpoint convert ck/step-3 whole.safetensors")
    run("checkpoint convert ck/step-3 ours --format dcp")
    for shape in [(1,), (3,)]:
        ranks(load, shape, str(out / "ours"), out / "whole.safetensors")
        # Back from what PyTorch has loaded and saved again.
        run("checkpoint convert ours-again again --force")
        run("checkpoint convert ck/step-3 straight --force")
        for file in ["checkpoint.json", "rank-0.safetensors"]:
            assert (out / "again" / file).read_bytes() == (out / "straight" / file).read_bytes(), file
        run("run m.mcc --data text.txt --steps 4 --resume ours-again --quiet")
        shutil.rmtree(out / "ours-again")
        print(f"{shape[0]} ranks of PyTorch load what mcc wrote, bit for bit, and mcc goes on from what they save again")


if __name__ == "__main__":
    if sys.argv[1:] == ["fixture"]:
        os.chdir(ROOT / "tests")
        shutil.rmtree("dcp", ignore_errors=True)
        ranks(save, (2,), "dcp", "")
    else:
        main(*sys.argv[1:])
