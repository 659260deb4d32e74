"""Whether TensorBoard reads what `mcc run --tensorboard-dir` writes: of a run that ends early, one that goes on from an earlier
checkpoint, and a restart. Run by `make test-tensorboard`.

usage: watched.py MCC DIRECTORY
"""

import json
import pathlib
import shutil
import struct
import subprocess
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TAGS = {"loss": "loss", "grad_norm": "grad_norm", "lr": "lr", "tokens_per_s": "speed/tokens_per_s", "step_ms": "speed/step_ms",
        "data_wait_ms": "speed/data_wait_ms", "mfu": "speed/mfu", "memory_bytes": "memory_bytes", "valid_loss": "valid_loss"}


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def main():
    mcc, there = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    model = pathlib.Path(__file__).resolve().parent.parent / "models" / "gpt2.mdl"
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir(parents=True)
    (there / "text.txt").write_text("The quick brown fox jumps over the lazy dog, and then over a wall. " * 40)

    def run(*words):
        subprocess.run([mcc, *words], cwd=there, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    sizes = [word for size in ["vocab=251", "hidden=32", "heads=4", "layers=2", "seq=8"] for word in ["-D", size]]
    run("compile", model, *sizes, "--tp", "2", "-o", "a.mcc", "--min-lr", "1e-3", "--lr", "1e-3")
    job = ["run", "a.mcc", "--data", "text.txt", "--valid-data", "text.txt", "--eval-interval", "4", "--tensorboard-dir", "board", "--metrics", "m"]
    saves = ["--save", "ck", "--save-interval", "5"]
    run(*job, *saves, "--steps", "13")
    # What the first run did after step 10 is done again.
    run(*job, "--load", "ck/step-10", "--steps", "17", "--force")

    wanted = {}
    for line in (there / "m").read_text().splitlines():
        step = json.loads(line)
        wanted[step["step"]] = step
    assert sorted(wanted) == list(range(1, 18)), sorted(wanted)
    board = EventAccumulator(str(there / "board"), size_guidance={"scalars": 0})
    board.Reload()
    assert set(board.Tags()["scalars"]) == set(TAGS.values()), board.Tags()["scalars"]
    for name, tag in TAGS.items():
        found = [(e.step, e.value) for e in board.Scalars(tag)]
        expected = [(step, f32(line[name])) for step, line in sorted(wanted.items()) if name in line]
        assert found == expected, f"{tag}: {found} instead of {expected}"
    print(f"tensorboard: {len(TAGS)} curves over {len(wanted)} steps are what the metrics say")


main()
