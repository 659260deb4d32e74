"""The table, from a record. Needs nothing but Python."""

import math
import re
import statistics

PEERS = ["torch", "torch.compile", "jax"]
TITLES = {"jax": "JAX"}
MIB = 2**20


def by_contestant(record, key):
    """Median over the sessions of a record, by contestant."""
    found = {}
    for session in record["sessions"]:
        for name, own in session["contestants"].items():
            if own.get(key) is not None:
                found.setdefault(name, []).append(own[key])
    return {name: statistics.median(values) for name, values in found.items()}


def peak(record, threads):
    rates = [s["peak_gflops"][threads] for s in record["sessions"] if threads in s["peak_gflops"]]
    return statistics.median(rates) if rates else None


def against(record):
    """How many times as long as mcc each peer takes: median over the sessions that both are in."""
    found = {}
    for session in record["sessions"]:
        steps = {name: own["step_s"] for name, own in session["contestants"].items() if "step_s" in own}
        for name in steps:
            if name != "mcc" and "mcc" in steps:
                found.setdefault(name, []).append(steps[name] / steps["mcc"])
    return {name: statistics.median(values) for name, values in found.items()}


def best_torch(ratios):
    return min((ratios[n] for n in ("torch", "torch.compile") if n in ratios), default=None)


def number(x, form="{:.0f}", scale=1.0):
    return "" if x is None else form.format(scale * x)


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def filled(head, rows):
    """A table without columns that are empty."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


def crossed(corner, cells):
    """A table of `{(row, column): cell}`, in the order in which rows, tuples as long as the corner, and columns come."""
    columns = list(dict.fromkeys(column for _, column in cells))
    rows = dict.fromkeys(row for row, _ in cells)
    return table([*corner, *columns], [[*row, *(cells.get((row, column), "") for column in columns)] for row in rows])


def agreement(record):
    apart = [max(found["first"], found["later"]) for found in record["losses"].values()]
    if not apart:
        return ""
    return ("yes" if all(found["agree"] for found in record["losses"].values()) else "**no**") + f", {max(apart):.0e}"


STEP = ["model", "mcc, ms", "GFLOP/s", "of peak", "torch, ms", "torch.compile, ms", "JAX, ms", "best torch / mcc", "JAX / mcc", "same losses", "revision of mcc"]
GROWN_STEP = ["model", "mcc, ms", "of peak", "best torch / mcc", "JAX / mcc", "same losses", "revision of mcc"]


def step_times(models, columns=STEP):
    """The revision of mcc has a column where it is not the same for all."""
    one = len({record.get("revision") for record in models.values()}) < 2
    rows = []
    for name, record in models.items():
        steps, ratios, top = by_contestant(record, "step_s"), against(record), peak(record, "2")
        rate = record["flops"] / steps["mcc"] / 1e9 if "mcc" in steps else None
        cells = [name, number(steps.get("mcc"), scale=1e3), number(rate), number(rate and top and rate / top, "{:.0f} %", 100),
                 *(number(steps.get(n), scale=1e3) for n in PEERS), number(best_torch(ratios), "{:.2f}"), number(ratios.get("jax"), "{:.2f}"),
                 agreement(record), "" if one else record.get("revision", "")]
        rows.append([cells[STEP.index(column)] for column in columns])
    return filled(columns, rows)


def starts(models):
    """Seconds until a step can begin, and until the first one has ended, with nothing cached and with all."""
    compiles, firsts = {}, {}
    for name, record in models.items():
        warm = {key: by_contestant(record, key) for key in ("compile_s", "first_step_s", "latency_s", "step_s")}
        for contestant, cold in record["contestants"].items():
            step = warm["step_s"].get(contestant)
            compiled = [cold.get("cold_compile_s"), warm["compile_s"].get(contestant)]
            if contestant in ("torch.compile", "jax") and step is not None and "cold_first_step_s" in cold:
                compiled = [cold["cold_first_step_s"] - step, warm["first_step_s"].get(contestant, step) - step]
            first = [cold.get("cold_latency_s"), warm["latency_s"].get(contestant)]
            for found, what, pair in ((compiles, "compile", compiled), (firsts, "first step", first)):
                if any(x is not None for x in pair):
                    found[(name,), f"{what}: {TITLES.get(contestant, contestant)}"] = ", ".join(number(x, "{:.2f}") or "?" for x in pair)
    return crossed(["model"], compiles | firsts)


def memory(models):
    head = ["model", "mcc's plan, MiB", "mcc", "torch", "torch.compile", "JAX"]
    rows = []
    for name, record in models.items():
        peaks = by_contestant(record, "peak_bytes")
        plan = by_contestant(record, "plan_bytes").get("mcc")
        rows.append([name, number(plan, scale=1 / MIB), *(number(peaks.get(n), scale=1 / MIB) for n in ["mcc", *PEERS])])
    return table(head, rows)


def growth(records):
    """What grows with which size: times, and the powers of the size that times and memory follow."""
    return "\n".join([step_times(records, GROWN_STEP), powers(records, GROWN)])


def lines(records):
    """`{size: [(how much of it, record), ..]}`, in order: a record can be on several lines."""
    found = {}
    for record in records.values():
        for size, at in record.get("at", {}).items():
            found.setdefault(size, []).append((at, record))
    return {size: sorted(own, key=lambda point: point[0]) for size, own in found.items()}


def power(points):
    """The p of y = c x^p, by least squares of the logarithms."""
    if len({x for x, _ in points}) < 2:
        return None
    xs, ys = ([math.log(point[i]) for point in points] for i in (0, 1))
    middle_x, middle_y = statistics.mean(xs), statistics.mean(ys)
    return sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys)) / sum((x - middle_x) ** 2 for x in xs)


def values(key):
    """Of a record, by contestant; for what is known of mcc alone, under that name."""
    if key == "flops":
        return lambda record: dict.fromkeys(by_contestant(record, "step_s"), record["flops"])
    if key in ("cold_s", "warm_s", "compiler_bytes", "plan_bytes"):
        return lambda record: {"mcc": record.get("compile", record).get(key)}
    return lambda record: by_contestant(record, key)


# What grows: its name, and what it is in a record.
GROWN = [("operations", values("flops")), ("step", values("step_s")), ("compile, cold", values("cold_s")), ("compile, warm", values("warm_s")),
         ("first step, cold", values("latency_s")), ("plan", values("plan_bytes")), ("peak memory", values("peak_bytes"))]
COMPILED = [("cold", values("cold_s")), ("warm", values("warm_s")), ("memory of the compiler", values("compiler_bytes")), ("plan of a rank", values("plan_bytes"))]


def series(points, value):
    """`{contestant: [(size, value), ..]}` of a line."""
    found = {}
    for at, record in points:
        for name, x in value(record).items():
            if x:
                found.setdefault(name, []).append((at, x))
    return found


def powers(records, grown):
    """Those between the last two points of each line: a row for all that grows, a column for each size and contestant."""
    cells = {}
    for size, points in lines(records).items():
        for what, value in grown:
            for name, line in series(points, value).items():
                if (p := power(line[-2:])) is not None:
                    cells[(what,), f"{size} {points[-2][0]} to {points[-1][0]}: {TITLES.get(name, name)}"] = f"{round(p, 2) + 0:.2f}"
    return crossed(["grows"], cells) if cells else ""


# What a mesh is compared with, and the share of the time that is left beside its own bubble.
BASES = {"tp2": ("one rank", 1.0), "dp2": ("one rank", 1.0), "pp2, mb8": ("one rank, mb8", 8 / 9)}


def efficiency(record):
    found = {}
    for session in record["sessions"]:
        steps = {name: own["step_s"] for name, own in session["contestants"].items() if "step_s" in own}
        for mesh, (base, share) in BASES.items():
            if mesh in steps and base in steps:
                found[mesh] = (steps[base] / steps[mesh] / share, base)
        for mesh in steps:
            if "1 rank" in steps and (many := re.fullmatch(r"[dt]p (\d+)|pp (\d+)", mesh)):
                found[mesh] = (steps["1 rank"] / steps[mesh] / int(many[1] or many[2]), "its ranks")
    return found


def ranks(records):
    rows = []
    for model, record in records.items():
        steps, peaks, share = by_contestant(record, "step_s"), by_contestant(record, "peak_bytes"), efficiency(record)
        for name, step in steps.items():
            of = "{:.2f} of {}".format(*share[name]) if name in share else ""
            rows.append([model, name, number(step, scale=1e3), of, number(peaks.get(name), scale=1 / MIB)])
    return table(["model", "", "step, ms", "efficiency", "peak memory, MiB"], rows)


def storage(records):
    rows = []
    for model, record in records.items():
        found = record["sessions"][0]["contestants"]
        for name, own in found.items():
            ratio = own["step_s"] / found["fp32"]["step_s"] if "step_s" in own and "step_s" in found["fp32"] else None
            rows.append([model, name, number(own.get("step_s"), scale=1e3) or own["failed"], number(ratio, "{:.2f}"),
                         number(own.get("plan_bytes"), scale=1 / MIB), number(own.get("peak_bytes"), scale=1 / MIB)])
    return table(["model", "", "step, ms", "of f32", "plan, MiB", "peak, MiB"], rows)


def compiles(records):
    rows = [[name, number(r["cold_s"], "{:.2f}"), number(r["warm_s"], "{:.2f}"), number(r["kernels"]), number(r.get("compiler_bytes"), scale=1 / MIB),
             number(r["plan_bytes"], scale=1 / MIB)] for name, r in records.items()]
    found = table(["model", "cold, s", "warm, s", "kernels", "memory of the compiler, MiB", "plan of a rank, MiB"], rows)
    return found + ("\n" + powers(records, COMPILED) if lines(records) else "")


def kernels(records):
    """Share of the peak of mcc, and how many times as fast as PyTorch it is; the rates of attention are those of unmasked work."""
    attention, products = {}, {}
    for record in records.values():
        for threads in ("1", "2"):
            for request, rates in record[threads]["gflops"].items():
                mcc, torch, top = rates.get("mcc"), rates.get("torch"), record[threads]["peak_gflops"]
                cell = ", ".join(filter(None, [number(mcc and mcc / top, "{:.0f}", 100), number(mcc and torch and mcc / torch, "{:.2f}")]))
                match request.split():
                    case ["attention", pass_, shape]:
                        attention[(shape, threads), pass_] = cell
                    case ["gemm", shape, layout, added]:
                        products[(shape, threads), layout + (" added" if added == "1" else "")] = cell
    return "\n".join(crossed([what, "threads"], cells) for what, cells in (("attention", attention), ("gemm", products)) if cells)


def failures(record):
    lines = []
    for part in ("models", "growth", "ranks", "storage"):
        for name, own in record.get(part, {}).items():
            found = {**own.get("contestants", {})}
            for session in own["sessions"]:
                found |= {n: c for n, c in session["contestants"].items() if "failed" in c}
            lines += [f"- {name}, {n}: {' '.join(c['failed'].split())}" for n, c in found.items() if "failed" in c]
    return "\n".join(lines) + "\n" if lines else ""


def ratios(record):
    return step_times(record["models"]) if record.get("models") else ""


SECTIONS = [
    ("models", "Training steps", step_times,
     "Whole steps with AdamW in f32 on two threads. GFLOP/s are, for all contestants,\n"
     "(6 x matmul parameters x tokens + 12 x layers x hidden x seq x tokens) / time. The peak is that of a loop of\n"
     "multiply-adds on both cores between the same rounds. *Same losses* has the largest relative distance from mcc's.", "steps.svg"),
    ("models", "Compiling and starting", starts,
     "Seconds, with empty caches and with full ones. Peers compile for as long as their first step takes longer than a later\n"
     "one. *First step*: from the start of the process (of `mcc compile` for mcc) to the end of that step.", "starts.svg"),
    ("models", "Peak memory", memory,
     "The most MiB resident (VmHWM): of mcc the launcher and its ranks, of the others the Python process.", "memory.svg"),
    ("compile", "Compiling deep models, and for many ranks", compiles,
     "`mcc compile` with an empty cache of kernels (*cold*), then with a full one (*warm*, median of three). Layers and\n"
     "ranks share kernels. `large` is a GPT of 64 layers, hidden 4096, 64 heads, and 64 sequences of 1024 tokens in as many\n"
     "microbatches, for one rank and for many (dp with `--zero 1`).\n\n"
     "The second table has the p of size^p between the last two points; 1 is linear.", "compile.svg"),
    ("growth", "Growth", growth,
     "A GPT of 4 layers, hidden 384, 6 heads, 4 sequences of 256 tokens and vocabulary 8192, of which one size grows at a\n"
     "time; longer sequences have 4096 tokens a step. The second table has the p of size^p between the last two points. First\n"
     "steps have empty caches, and count from the start of the process (of `mcc compile` for mcc).", "growth.svg"),
    ("ranks", "Ranks", ranks,
     "llama-mini: two ranks of one thread against one rank of two; pp2, of 8 microbatches, beside its own bubble (8/9).\n"
     "The small GPT of *Growth*, in microbatches of one sequence: ranks of one thread against one such rank, divided by\n"
     "their number.", "ranks.svg"),
    ("storage", "16-bit storage", storage,
     "Weights and optimizer states are f32 in both. With bf16, activations and the weights that they meet are 16-bit.", None),
    ("kernels", "Kernels", kernels,
     "mcc's percentage of the peak, and how many times as fast as PyTorch's kernel (for products MKL's) it is.\n\n"
     "Attention (BATCHxHEADS[/KV]xSEQxD) is causal, with operands as [batch, seq, heads, d]. Only unmasked work counts: two\n"
     "products forward and five backward. mcc's backward pass takes the row sums of output times gradient from another\n"
     "kernel, which is not counted here.\n\n"
     "Products are MxKxN. T: a factor that is stored transposed; *added*: to the result.", "kernels.svg"),
]


def page(record):
    text = "# Measured on a CPU\n\n`make bench` measures mcc beside PyTorch and JAX ([how](README.md)). [cpu.json](cpu.json) has all samples.\n\n"
    m, v = record["machine"], record["versions"]
    caches = ", ".join(f"{level} {size}" for level, size in m["caches"].items())
    text += f"Machine: {m['cpu']}, {m['cores']} cores, {caches} (of the first core), {m['memory_gib']} GiB.\n"
    text += ", ".join(f"{package} {number}" for package, number in v.items() if number) + ".\n"
    revisions = {}
    for part, own in record.items():
        for entry in own.values() if isinstance(own, dict) else []:
            if isinstance(entry, dict) and "revision" in entry:
                revisions.setdefault(str(entry["revision"]), {})[part] = True
    text += "mcc: " + ", ".join(name if len(revisions) == 1 else f"{name} ({', '.join(parts)})" for name, parts in sorted(revisions.items())) + ".\n"
    for part, title, make, words, plot in SECTIONS:
        if record.get(part):
            text += f"\n## {title}\n\n{words}\n\n{make(record[part])}"
            text += f"\n![{title}]({plot})\n" if plot and (part not in ("compile", "growth") or lines(record[part])) else ""
    if failed := failures(record):
        text += f"\n## Not measured\n\n{failed}"
    return text
