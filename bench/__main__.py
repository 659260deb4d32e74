"""`python -m bench`: measures, and writes the record, the table and the plots."""

import argparse
import json
import os
import platform
import re
import subprocess
import traceback
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from . import configs, growth, kernels, models, plots, ranks, report

ROOT = Path(__file__).parent.parent
PARTS = ["models", "compile", "growth", "ranks", "storage", "kernels"]
CONTESTANTS = ["mcc", "torch", "torch.compile", "jax"]


def arguments():
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measures mcc beside PyTorch and JAX on this machine's CPU.")
    parser.add_argument("--quick", action="store_true", help="less of everything where nothing else is said: some minutes; writes to out/bench/quick")
    parser.add_argument("--resume", action="store_true", help="leave out what the record has of this revision: goes on where a run was stopped")
    parser.add_argument("--parts", help="of " + ", ".join(PARTS))
    parser.add_argument("--models", help="which of " + ", ".join(c.name for c in configs.MODELS))
    parser.add_argument("--contestants", help=f"who trains them: {','.join(CONTESTANTS)}; where sizes grow, without torch.compile")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--together", type=int, default=3, help="peers in a session with mcc: fewer need less memory at once")
    parser.add_argument("--with", dest="before", default="", metavar="CMD", help="put before the command of each session, to keep the machine free")
    parser.add_argument("--mcc", type=Path, default=ROOT / "target/release/mcc")
    parser.add_argument("--kernels", type=Path, default=ROOT / "target/release/examples/kernel_server")
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench/work")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--report", action="store_true", help="only table and plots, of a record that is there")
    return parser.parse_args()


def version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine():
    def first(pattern, path):
        found = re.search(pattern, Path(path).read_text())
        return found[1].strip() if found else None

    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            caches[f"L{level}"] = size
    return {"cpu": first(r"model name\s*:\s*(.*)", "/proc/cpuinfo"), "cores": os.cpu_count(), "caches": caches,
            "memory_gib": round(int(first(r"MemTotal:\s*(\d+)", "/proc/meminfo")) / 2**20), "system": platform.release()}


def revision():
    """Of mcc: the record itself may have changed."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)

    found = git("describe", "--always").stdout.strip()
    changed = git("diff", "--quiet", "HEAD", "--", ".", ":!docs").returncode
    return found + ("-dirty" if changed else "") if found else None


def main():
    args = arguments()
    output = args.output or ROOT / ("out/bench/quick" if args.quick else "docs/benchmarks")
    path = output / "cpu.json"
    output.mkdir(parents=True, exist_ok=True)
    record = json.loads(path.read_text()) if path.exists() and (args.resume or not args.quick) else {}

    def publish():
        (output / "cpu.md").write_text(report.page(record))
        plots.write(record, output)

    if not args.report:
        measure(args, record, lambda: path.write_text(json.dumps(record, indent=1) + "\n"), publish)
    publish()
    print(report.ratios(record))
    print(f"wrote {path}, cpu.md and plots beside it")


def measure(args, record, save, publish):
    """Fills the record, saves it after each entry and publishes it after each part; what was measured before and is not measured now stays."""
    parts = args.parts.split(",") if args.parts else ["models", "compile", "growth", "ranks", "kernels"] if args.quick else PARTS
    if unknown := [part for part in parts if part not in PARTS]:
        raise SystemExit(f"no such part: {', '.join(unknown)}")
    names = args.models.split(",") if args.models else ["gpt-nano", "llama-mini"] if args.quick else [c.name for c in configs.MODELS]
    rounds = args.rounds or (2 if args.quick else 5)
    settings = models.Settings(
        work=args.work.resolve(), mcc=args.mcc.resolve(), python=str(ROOT / "out/bench/venv/bin/python"),
        kernels=args.kernels.resolve() if kernels.works(args.kernels) else None, before=args.before, together=args.together,
        contestants=args.contestants.split(",") if args.contestants else CONTESTANTS)
    without = settings if args.contestants else replace(settings, contestants=[n for n in CONTESTANTS if n != "torch.compile"])
    this = revision()
    record |= {"machine": machine(), "versions": {p: version(p) for p in ("torch", "jax", "jaxlib")}}

    def keep(part, name, make):
        if args.resume and record.get(part, {}).get(name, {}).get("revision") == this:
            return
        try:
            found = make()
        except models.Failure as failure:
            print(f"{name}: {failure}")
            return
        record.setdefault(part, {})[name] = found | {"revision": this}
        save()
        if part == "compile":
            models.say(f"{name}: compiled in {found['cold_s']:.2f} s, again in {found['warm_s']:.2f} s")

    def entries(part):
        match part:
            case "models":
                for config in (c for c in configs.MODELS if c.name in names):
                    yield config.name, lambda: models.measure(settings, config, rounds)
            case "compile":
                for name, (config, how, at) in configs.compiled(args.quick).items():
                    yield name, lambda: models.session(settings, settings.work, models.compiling(config, how)) | {"at": at}
            case "growth":
                for config, at in configs.growth(args.quick).items():
                    yield config.name, lambda: growth.measure(without, config, min(rounds, 3)) | {"at": at}
            case "ranks":
                if not args.quick:
                    yield "llama-mini", lambda: ranks.measure(settings, configs.LLAMA_MINI, ranks.meshes(configs.LLAMA_MINI), rounds)
                base = configs.base(args.quick)
                yield base.name, lambda: ranks.measure(settings, base, configs.counts(base, os.cpu_count()), rounds)
            case "storage":
                yield "llama-mini", lambda: ranks.measure(settings, configs.LLAMA_MINI, ranks.storage(configs.LLAMA_MINI), rounds)
            case "kernels" if settings.kernels:
                for group in kernels.requests(args.quick):
                    order = {"requests": group, "rounds": min(rounds, 3)}
                    yield group[0], lambda: kernels.summary(models.session(settings, settings.work, order))

    for part in (p for p in PARTS if p in parts):
        for name, make in entries(part):
            keep(part, name, make)
        try:
            publish()
        except Exception:
            # The other parts are measured all the same, and it is tried again after each.
            traceback.print_exc()


if __name__ == "__main__":
    main()
