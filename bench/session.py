"""A session of models: contestants start, then train in turn, again and again, so that what else happens on the machine meets all of them.

`python -m bench.session ORDER.json ANSWER.json`, also for sessions of kernels and of compiling alone; a process of its own, so that a command of the user's can be put before it
(`--with`).
"""

import json
import shutil
import statistics
import sys
from pathlib import Path

from .configs import Config
from .contestant import Failure, Mcc, Peer, compile_mcc
from .kernels import Server, turns

# Seconds that a contestant trains in a round, about; a step in any case, and not more than there are batches.
TURN = 1.5
BATCHES = 64
WARM = 3


def start(spec, python, work):
    match spec["kind"]:
        case "mcc":
            return Mcc(work=work, **spec["how"])
        case "peer":
            return Peer(python=python, work=work, **spec["how"])


def train(order, work):
    """For each contestant its start, its times, and its memory; and the peak of multiply-adds beside them."""
    answer = {"contestants": {}, "peaks": {"1": [], "2": []}}
    kernels = Server([order["kernels"]]) if order["kernels"] else None
    running, records = {}, answer["contestants"]

    def attempt(name, action):
        try:
            return action()
        except Failure as failure:
            records.setdefault(name, {})["failed"] = str(failure)
            if contestant := running.pop(name, None):
                contestant.close()

    def begin(name, spec):
        running[name] = start(spec, order["python"], work)
        records[name] = running[name].first(order["first"])

    for name, spec in order["contestants"].items():
        attempt(name, lambda: begin(name, spec))
    samples = {name: [] for name in running}
    for _ in range(order["rounds"]):
        for name, contestant in list(running.items()):
            count = round(TURN / statistics.median(samples[name])) if samples[name] else 1
            samples[name] += attempt(name, lambda: contestant.steps(min(max(count, 1), BATCHES - 1))) or []
            if kernels:
                for threads, rates in answer["peaks"].items():
                    rates.append(kernels.peak(int(threads)))
    for name, contestant in running.items():
        records[name] |= {"seconds": samples[name], "peak_bytes": contestant.memory()}
        contestant.close()
    if kernels:
        kernels.close()
    return answer


def compile_only(order, work):
    """The same compile with an empty cache of kernels and, `WARM` times, again: the median of these."""
    config, cache = Config(**order["compile"]), work / "compile-cache"
    shutil.rmtree(cache, ignore_errors=True)
    cold, *warm = (compile_mcc(order["mcc"], config, work / "compile.mcc", cache, **order["how"]) for _ in range(1 + WARM))
    seconds = [found["compile_s"] for found in warm]
    same = {key: cold[key] for key in ("kernels", "plan_bytes")}
    return {"cold_s": cold["compile_s"], "warm_s": statistics.median(seconds), "samples_s": seconds, "compiler_bytes": warm[0]["compiler_bytes"]} | same


def answer(order, work):
    if "requests" in order:
        return turns(order)
    if "compile" in order:
        try:
            return compile_only(order, work)
        except Failure as failure:
            return {"failed": str(failure)}
    return train(order, work)


if __name__ == "__main__":
    order_path, answer_path = map(Path, sys.argv[1:])
    order = json.loads(order_path.read_text())
    answer_path.write_text(json.dumps(answer(order, order_path.parent)))
