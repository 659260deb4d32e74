"""Contestants: processes that train the same model on the same data, a few steps at a time."""

import json
import os
import re
import subprocess
import threading
import time
from pathlib import Path

from . import configs


class Failure(Exception):
    """A contestant that cannot be measured; the report says why."""


def peak_bytes(pid):
    """The most memory that a process has had resident: VmHWM; 0 once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return 1024 * int(found[1]) if found else 0


def children(pid):
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


class Peer:
    """A Python process that answers lines of JSON (peers/serve.py); it stays alive between rounds."""

    def __init__(self, python, work, module, config, threads=2, env=None, options=None):
        order = {"config": config, "data": str(work / "data.npy"), "weights": str(work / "weights.safetensors"), "threads": threads,
                 "adamw": configs.ADAMW, "options": options or {}}
        threads = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self.began = time.perf_counter()
        self.log = open(work / f"{module}.log", "a")
        self.process = subprocess.Popen(
            [python, "-m", f"bench.peers.{module}", json.dumps(order)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
            text=True, cwd=Path(__file__).parent.parent, env=os.environ | threads | (env or {}))

    def ask(self, **command):
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            raise Failure(f"ended with status {self.process.wait()}: {Path(self.log.name).read_text().strip()[-400:]}")
        answer = json.loads(answer)
        if "error" in answer:
            raise Failure(answer["error"])
        return answer

    def first(self, n):
        """The first n steps: their losses, the seconds from the start of the process to the end of the first, and those of the first alone."""
        first = self.ask(do="steps", n=1)
        latency = time.perf_counter() - self.began
        losses = first["losses"] + (self.ask(do="steps", n=n - 1)["losses"] if n > 1 else [])
        return {"losses": losses, "latency_s": latency, "first_step_s": first["seconds"][0]}

    def steps(self, n):
        return self.ask(do="steps", n=n)["seconds"]

    def memory(self):
        return peak_bytes(self.process.pid)

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


class Mcc:
    """`mcc compile`, then `mcc run` anew in each round: the first step of a run is not counted, as it is the first to touch its memory."""

    def __init__(self, work, binary, config, name="mcc", threads_per_rank=2, **how):
        self.artifact, self.metrics = work / f"{name}.mcc", work / f"{name}.jsonl"
        self.compiled = compile_mcc(binary, configs.Config(**config), self.artifact, work / f"{name}-cache", **how)
        self.command = [binary, "run", self.artifact, "--data", work / "data.npy", "--init", work / "weights.safetensors",
                        "--threads-per-rank", threads_per_rank, "--metrics", self.metrics]
        self.peak = 0

    def run(self, n):
        self.metrics.unlink(missing_ok=True)
        began = time.perf_counter()
        process = subprocess.Popen([str(c) for c in [*self.command, "--steps", n]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        watch = threading.Thread(target=self.watch, args=[process])
        watch.start()
        said = process.communicate()[0]
        watch.join()
        if process.returncode != 0:
            raise Failure(said.strip()[-400:])
        wall = time.perf_counter() - began
        lines = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        return wall, [line["step_ms"] / 1e3 for line in lines], [line["loss"] for line in lines]

    def watch(self, process):
        """Peak memory of launcher and ranks together; what ranks share counts for each."""
        peaks = {}
        while process.poll() is None:
            for pid in [process.pid, *children(process.pid)]:
                peaks[pid] = max(peaks.get(pid, 0), peak_bytes(pid))
            time.sleep(0.02)
        self.peak = max(self.peak, sum(peaks.values()))

    def first(self, n):
        wall, seconds, losses = self.run(n)
        latency = self.compiled["compile_s"] + wall - sum(seconds[1:])
        return self.compiled | {"losses": losses, "latency_s": latency, "first_step_s": seconds[0]}

    def steps(self, n):
        return self.run(n + 1)[1][1:]

    def memory(self):
        return self.peak

    def close(self):
        pass


def compile_mcc(binary, config, output, cache, mesh=(), micro=None, dtype="fp32"):
    """`mcc compile`: its seconds, the most memory it had, its kernels, and the bytes of its memory plan for a rank. Kernels go to and come from the
    directory `cache`."""
    a = configs.ADAMW
    command = [binary, "compile", Path(__file__).parent.parent / "models" / f"{config.family}.mdl"]
    command += [x for name, value in config.defines().items() for x in ("-D", f"{name}={value}")]
    command += ["--micro-batch-size", micro or config.batch, "--global-batch-size", config.batch, *mesh, "--dtype", dtype]
    command += ["--lr", a["lr"], "--min-lr", a["lr"], "--lr-decay-style", "constant", "--lr-warmup-iters", 0, "--clip-grad", 0]
    command += ["--weight-decay", a["weight_decay"], "--adam-beta1", a["beta1"], "--adam-beta2", a["beta2"], "--adam-eps", a["eps"]]
    command += ["--emit", "schedule", "-o", output]
    began = time.perf_counter()
    with subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env=os.environ | {"MCC_CACHE": str(cache)}) as process:
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    if process.returncode != 0:
        raise Failure(said.strip()[-400:])
    kernels = re.search(r"(\d+) kernels", said)
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    plan = re.search(r"a rank(?: of stage \d+ \(most\))?: ([\d.]+) (B|KiB|MiB|GiB)", said)
    return {"compile_s": seconds, "compiler_bytes": 1024 * usage.ru_maxrss, "kernels": int(kernels[1]) if kernels else None,
            "plan_bytes": float(plan[1]) * units[plan[2]] if plan else None}
