"""How steps, starts and memory grow with one size at a time: small models, each in one session in which all contestants start with empty caches."""

import shutil

from . import models

# Of the losses of this many steps one is before any update.
LOSS_STEPS = 2


def measure(settings, config, rounds):
    """Record of one model, its compiling included."""
    work = models.prepare(settings, config)
    compiled = models.session(settings, work, models.compiling(config, {}))
    answer = models.session(settings, work, models.training(models.specs(settings, config, work), rounds, LOSS_STEPS))
    record = {"config": config.describe(), "flops": config.flops(), "compile": compiled, "losses": models.compare_losses(answer["contestants"]),
              "sessions": [models.summary(answer)]}
    found = record["sessions"][0]["contestants"]
    models.say(f"{config.name}: " + ", ".join(f"{n} " + (f"{1e3 * f['step_s']:.1f} ms" if "step_s" in f else f["failed"]) for n, f in found.items()))
    shutil.rmtree(work)
    return record

