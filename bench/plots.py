"""The plots, from a record."""

import matplotlib

from . import report

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import LogFormatter  # noqa: E402

COLOURS = {"mcc": "#1b6ca8", "torch": "#e07a1f", "torch.compile": "#f2b134", "jax": "#5b9a5b"}
ALL = ["mcc", *report.PEERS]


def save(figure, path):
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def bars(axes, groups, values, label, log=False):
    """A group of bars for each name, one per contestant that has a value: `values[contestant][name]`."""
    width = 0.8 / max(1, len(values))
    for k, (contestant, own) in enumerate(values.items()):
        at = [i + (k - (len(values) - 1) / 2) * width for i, name in enumerate(groups) if name in own]
        axes.bar(at, [own[name] for name in groups if name in own], width, label=contestant, color=COLOURS.get(contestant))
    axes.set_xticks(range(len(groups)), groups, rotation=15)
    axes.set_ylabel(label)
    if log:
        axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)


def gather(models, value):
    """`{contestant: {model: value(record)[contestant]}}`."""
    found = {name: {} for name in ALL}
    for model, record in models.items():
        for name, x in value(record).items():
            if name in found and x is not None:
                found[name][model] = x
    return {name: own for name, own in found.items() if own}


def steps(models, path):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    bars(left, list(models), gather(models, lambda r: {"mcc": 1.0} | report.against(r)), "step time, mcc = 1")

    def share(record):
        top = report.peak(record, "2")
        return {n: 100 * record["flops"] / s / 1e9 / top for n, s in report.by_contestant(record, "step_s").items()} if top else {}

    bars(right, list(models), gather(models, share), "% of the multiply-add peak")
    save(figure, path)


def starts(models, path):
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    cold = gather(models, lambda r: {n: c.get("cold_latency_s") for n, c in r["contestants"].items()})
    bars(panels[0], list(models), cold, "start to the end of the first step, cold, s", log=True)
    bars(panels[1], list(models), gather(models, lambda r: report.by_contestant(r, "latency_s")), "the same, warm, s", log=True)
    save(figure, path)


def memory(models, path):
    figure, axes = plt.subplots(figsize=(7, 4))
    peaks = gather(models, lambda r: {n: b / 2**20 for n, b in report.by_contestant(r, "peak_bytes").items()})
    bars(axes, list(models), peaks, "peak memory, MiB")
    save(figure, path)


def lines(records, shown, path):
    """A column for each size and a row for each thing that grows with it, both logarithmic; in the legend the powers."""
    found = report.lines(records)
    if not found:
        return
    figure, panels = plt.subplots(len(shown), len(found), figsize=(4 * len(found), 3.2 * len(shown)), sharey="row", squeeze=False)
    for (size, points), column in zip(found.items(), panels.T):
        at = [x for x, _ in points]
        for (label, value, scale), axes in zip(shown, column):
            for name, line in report.series(points, value).items():
                p = report.power(line)
                axes.plot(*zip(*((x, scale * y) for x, y in line)), marker="o", color=COLOURS[name], label=name if p is None else f"{name}, p = {p:.2f}")
            axes.set(xscale="log", yscale="log", xlabel=size, ylabel=label)
            axes.set_xticks(at, [str(x) for x in at])
            axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
            axes.tick_params(labelleft=True)
            axes.yaxis.set_major_formatter(LogFormatter())
            axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
    save(figure, path)


def growth(records, path):
    v = report.values
    lines(records, [("step, ms", v("step_s"), 1e3), ("first step, cold, s", v("latency_s"), 1), ("compile, warm, s", v("warm_s"), 1), ("peak memory, MiB", v("peak_bytes"), 1 / 2**20)], path)


def compiles(records, path):
    v = report.values
    lines(records, [("compile, cold, s", v("cold_s"), 1), ("warm, s", v("warm_s"), 1), ("plan of a rank, MiB", v("plan_bytes"), 1 / 2**20)], path)


def ranks(records, path):
    figure, axes = plt.subplots(figsize=(7, 4))
    record = next(iter(records.values()))
    steps = {name: 1e3 * s for name, s in report.by_contestant(record, "step_s").items()}
    axes.bar(list(steps), list(steps.values()), color=COLOURS["mcc"])
    axes.set_ylabel("step, ms")
    axes.tick_params(axis="x", rotation=15)
    axes.grid(axis="y", alpha=0.3)
    save(figure, path)


def kernels(records, path):
    figure, panels = plt.subplots(2, 1, figsize=(12, 9))
    for axes, threads in zip(panels, ("1", "2")):
        rates = {}
        for record in records.values():
            for request, own in record[threads]["gflops"].items():
                for name, rate in own.items():
                    rates.setdefault(name, {})[request.removeprefix("gemm ")] = 100 * rate / record[threads]["peak_gflops"]
        names = list(dict.fromkeys(name for own in rates.values() for name in own))
        bars(axes, names, rates, f"% of the multiply-add peak, threads: {threads}")
        axes.tick_params(axis="x", rotation=90, labelsize=6)
    save(figure, path)


def write(record, directory):
    for part, draw, name in (("models", steps, "steps.svg"), ("models", starts, "starts.svg"), ("models", memory, "memory.svg"),
                             ("growth", growth, "growth.svg"), ("compile", compiles, "compile.svg"), ("ranks", ranks, "ranks.svg"), ("kernels", kernels, "kernels.svg")):
        if record.get(part):
            draw(record[part], directory / name)
