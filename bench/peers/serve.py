"""What every peer's process does: it reads one command a line and answers with one line, both JSON."""

import json
import os
import sys
import time
from types import SimpleNamespace

import numpy as np


def serve(make):
    """`make(order)` gives a function that trains one step on tokens [batch, seq + 1] and returns the loss, when it is known."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    order = json.loads(sys.argv[1], object_hook=lambda fields: SimpleNamespace(**fields))
    data = np.load(order.data)
    state = {"step": None, "done": 0}
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = run(command, order, make, state, data)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:600]}
        print(json.dumps(answer), file=answers, flush=True)


def run(command, order, make, state, data):
    assert command["do"] == "steps", command
    if state["step"] is None:
        state["step"] = make(order)
    seconds, losses = [], []
    for _ in range(command["n"]):
        batch = data[state["done"] % len(data)]
        began = time.perf_counter()
        losses.append(state["step"](batch))
        seconds.append(time.perf_counter() - began)
        state["done"] += 1
    return {"seconds": seconds, "losses": losses}
