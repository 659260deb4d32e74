"""Measures models: cold starts, losses, and sessions of rounds."""

import json
import shlex
import shutil
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .contestant import Failure, compile_mcc
from .session import BATCHES

# Steps whose losses are compared, and what these may differ by, relatively: before any update, and after some. Updates of AdamW magnify
# what rounding does to tiny gradients.
LOSS_STEPS = 3
FIRST_TOLERANCE, LATER_TOLERANCE = 2e-5, 2e-3
# Seconds after which a session is given up.
PATIENCE = 1800


@dataclass
class Settings:
    """`before` is put before the command of each session; at most `together` peers are in a session with mcc."""

    work: Path
    mcc: Path
    python: str
    kernels: Path | None
    before: str
    together: int
    contestants: list


def write_data(config, steps, path):
    """`steps` batches of tokens, frequent ones first as in text: int32 [steps, batch, seq + 1]."""
    draws = np.random.default_rng(1234).zipf(1.2, size=(steps, config.batch, config.seq + 1))
    np.save(path, (draws % config.vocab).astype(np.int32))


def prepare(settings, config):
    """A directory with data, and initial weights as mcc draws them."""
    work = settings.work / config.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_data(config, BATCHES, work / "data.npy")
    artifact = work / "init.mcc"
    compile_mcc(settings.mcc, config, artifact, work / "init-cache")
    command = [settings.mcc, "run", artifact, "--data", work / "data.npy", "--steps", "0", "--save-weights", work / "weights.safetensors"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure((done.stdout + done.stderr).strip()[-400:])
    return work


def session(settings, work, order):
    """Runs a session in a process of its own: its answer."""
    order |= {"python": settings.python, "mcc": str(settings.mcc), "kernels": str(settings.kernels) if settings.kernels else None}
    work.mkdir(parents=True, exist_ok=True)
    order_path, answer_path = work / "order.json", work / "answer.json"
    order_path.write_text(json.dumps(order))
    answer_path.unlink(missing_ok=True)
    command = [*shlex.split(settings.before), settings.python, "-m", "bench.session", order_path, answer_path]
    try:
        subprocess.run([str(c) for c in command], cwd=Path(__file__).parent.parent, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise Failure(f"the session had not ended after {PATIENCE} s") from None
    if not answer_path.exists():
        raise Failure("the session ended without an answer")
    answer = json.loads(answer_path.read_text())
    if "failed" in answer:
        raise Failure(answer["failed"])
    return answer


def compiling(config, how):
    """The order of a session that only compiles: with an empty cache of kernels, and again."""
    return {"compile": config.describe(), "how": how}


def training(contestants, rounds, first=1):
    """The order of a session that trains; `first` steps before the rounds, whose losses are in the answer."""
    return {"contestants": contestants, "rounds": rounds, "first": first}


def specs(settings, config, work):
    """How each contestant is started; a second start finds what the first has cached."""
    def peer(module, env=None, **options):
        return {"kind": "peer", "how": {"module": module, "config": config.describe(), "env": env, "options": options}}

    every = {
        "mcc": {"kind": "mcc", "how": {"binary": str(settings.mcc), "config": config.describe()}},
        "torch": peer("torch_peer"),
        "torch.compile": peer("torch_peer", {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor")}, compile=True),
        "jax": peer("jax_peer", cache=str(work / "jax-cache")),
    }
    return {name: every[name] for name in settings.contestants}


def measure(settings, config, rounds):
    """Record of one model: what each contestant took, or why it could not be measured."""
    say(f"{config.name}: {config.layers} layers, hidden {config.hidden}, seq {config.seq}, vocabulary {config.vocab}, batch {config.batch}")
    work = prepare(settings, config)
    every = specs(settings, config, work)
    records = {}
    for name, spec in every.items():
        cold = session(settings, work, training({name: spec}, 0, LOSS_STEPS))["contestants"][name]
        records[name] = {f"cold_{key}" if key.endswith("_s") else key: value for key, value in cold.items()}
        say(f"  {name}: {cold}")
    able = {name: spec for name, spec in every.items() if "failed" not in records[name]}
    record = {"config": config.describe(), "flops": config.flops(), "contestants": records, "losses": compare_losses(records), "sessions": []}
    others = [name for name in able if name != "mcc"]
    for first in range(0, max(1, len(others)), settings.together):
        names = ["mcc", *others[first : first + settings.together]]
        answer = session(settings, work, training({n: able[n] for n in names if n in able}, rounds))
        record["sessions"].append(summary(answer))
        say("  " + ", ".join(f"{n} {1e3 * r['step_s']:.1f} ms" for n, r in record["sessions"][-1]["contestants"].items() if "step_s" in r))
    shutil.rmtree(work)
    return record


def summary(answer):
    """Medians of a session, and its samples."""
    records = {}
    for name, found in answer["contestants"].items():
        records[name] = {key: value for key, value in found.items() if key not in ("losses", "seconds")}
        if found.get("seconds"):
            records[name] |= {"step_s": statistics.median(found["seconds"]), "samples_s": [round(s, 6) for s in found["seconds"]]}
    peaks = {threads: statistics.median(rates) for threads, rates in answer["peaks"].items() if rates}
    return {"contestants": records, "peak_gflops": peaks}


def compare_losses(records):
    """Relative distances from mcc's losses, and whether they are what rounding explains."""
    own = records.get("mcc", {}).get("losses")
    found = {}
    for name, record in records.items():
        if name == "mcc" or own is None or "losses" not in record:
            continue
        apart = [abs(a - b) / abs(a) for a, b in zip(own, record["losses"])]
        found[name] = {"first": apart[0], "later": max(apart[1:]), "agree": apart[0] <= FIRST_TOLERANCE and max(apart[1:]) <= LATER_TOLERANCE}
    return found


def say(text):
    print(text, flush=True)
