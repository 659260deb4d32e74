"""mcc alone: ranks of one thread against one rank of two, and 16-bit storage against f32."""

import shutil

from .models import prepare, say, session, summary, training

MICROBATCHES = 8
ONE, TWO = {"threads_per_rank": 1}, {"threads_per_rank": 2}


def meshes(config):
    """Sessions: how a model is compiled with one rank and with two, by name; `mb8` is in eight microbatches."""
    whole = {"one rank": TWO}
    small = {"micro": config.batch // MICROBATCHES}
    return [
        whole | {"one rank, one thread": ONE},
        whole | {"tp2": ONE | {"mesh": ["--tp", "2"]}},
        whole | {"dp2": ONE | {"mesh": ["--dp", "2"], "micro": config.batch // 2}},
        {"one rank, mb8": TWO | small, "pp2, mb8": ONE | small | {"mesh": ["--pp", "2"]}},
    ]


def storage(config):
    return [{"fp32": TWO, "bf16": TWO | {"dtype": "bf16"}}]


def measure(settings, config, sessions, rounds):
    """Record of several ways to compile one model, those of a session in turns."""
    work = prepare(settings, config)
    record = {"config": config.describe(), "flops": config.flops(), "sessions": []}
    for ways in sessions:
        specs = {}
        for name, how in ways.items():
            own = {"binary": str(settings.mcc), "config": config.describe(), "name": name.replace(" ", "-").replace(",", "")}
            specs[name] = {"kind": "mcc", "how": own | how}
        record["sessions"].append(summary(session(settings, work, training(specs, rounds))))
        found = record["sessions"][-1]["contestants"]
        say(f"{config.name}: " + ", ".join(f"{n} " + (f"{1e3 * f['step_s']:.1f} ms" if "step_s" in f else f["failed"]) for n, f in found.items()))
    shutil.rmtree(work)
    return record
