"""mcc alone: ranks of one thread against one rank of two, and 16-bit storage against f32."""

from .models import prepare, say, session, summary, training

MICROBATCHES = 8
ONE, TWO = {"threads_per_rank": 1}, {"threads_per_rank": 2}


def variants(config):
    """Name, threads of a rank, and how it is compiled; `mb8` in microbatches of one sequence."""
    small = {"micro": config.batch // MICROBATCHES}
    return {
        "one rank": TWO,
        "one rank, one thread": ONE,
        "tp2": ONE | {"mesh": ["--tp", "2"]},
        "dp2": ONE | {"mesh": ["--dp", "2"], "micro": config.batch // 2},
        "one rank, mb8": TWO | small,
        "pp2, mb8": ONE | small | {"mesh": ["--pp", "2"]},
    }


def storage(config):
    return {"fp32": TWO, "bf16": TWO | {"dtype": "bf16"}}


def measure(settings, config, ways, rounds):
    """Record of several ways to compile one model, in turns."""
    say(f"{config.name}: {', '.join(ways)}")
    work = prepare(settings, config)
    specs = {}
    for name, how in ways.items():
        own = {"binary": str(settings.mcc), "config": config.describe(), "name": name.replace(" ", "-").replace(",", "")}
        specs[name] = {"kind": "mcc", "how": own | how}
    record = {"config": config.describe(), "flops": config.flops(), "sessions": [summary(session(settings, work, training(specs, rounds)))]}
    for name, found in record["sessions"][0]["contestants"].items():
        say(f"  {name}: " + (f"{1e3 * found['step_s']:.1f} ms" if "step_s" in found else found["failed"]))
    return record
