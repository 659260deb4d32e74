"""A step of Muon in numpy, in f64: the numbers of `verify/src/meaning/muon.rs`.

Run: python3 passes/tests/autograd/muon.py
"""

import numpy as np

MOMENTUM, RATE, DECAY, FACTOR, CLIP = 0.9, 0.1, 0.2, 0.2, 0.5


def orthogonal(x, iterations):
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(iterations):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def numbers(shape, first):
    """Numbers that anything can make: no library draws the same ones."""
    count = int(np.prod(shape))
    return np.array([((7 * i * i + 3 * i + first) % 23 - 11) / 8 for i in range(count)]).reshape(shape)


def step(shape, nesterov, scale, iterations):
    """Of `shape`: a batch of matrices, inputs, outputs."""
    p, g, m = numbers(shape, 1), numbers(shape, 5), numbers(shape, 9)
    g = CLIP * g
    m = MOMENTUM * m + g
    n = g + MOMENTUM * m if nesterov else m
    x = np.stack([orthogonal(n[b], iterations) for b in range(shape[0])])
    return (1 - RATE * DECAY) * p - RATE * FACTOR * scale(*shape[1:]) * x, m


if __name__ == "__main__":
    np.set_printoptions(precision=17)
    for shape, nesterov, scale, iterations in [
        ((1, 2, 3), True, lambda i, o: max(i, o) ** 0.5, 5),
        ((2, 3, 2), False, lambda i, o: max(1, o / i) ** 0.5, 5),
        ((1, 2, 4), True, lambda i, o: (o / i) ** 0.5, 3),
    ]:
        p, m = step(shape, nesterov, scale, iterations)
        print(shape, [float(f"{x:.15g}") for x in p.flatten()], [float(f"{x:.15g}") for x in m.flatten()])
