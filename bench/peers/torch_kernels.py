"""PyTorch's products (MKL) and attention, for the requests of codegen/examples/kernel_server.rs."""

import sys
import time

import torch
import torch.nn.functional as F

# Fewest calls that are measured, after one that is not.
CALLS = 3


def product(shape, layout, beta):
    m, k, n = map(int, shape.split("x"))
    a = torch.full((k, m), 0.01).T if layout[0] == "T" else torch.full((m, k), 0.01)
    b = torch.full((n, k), 0.01).T if layout[1] == "T" else torch.full((k, n), 0.01)
    c = torch.full((m, n), 0.01)
    return (lambda: c.addmm_(a, b)) if beta == "1" else (lambda: torch.mm(a, b, out=c))


def attention(way, shape):
    batch, heads, seq, d = shape.split("x")
    batch, seq, d = map(int, (batch, seq, d))
    heads, *shared = map(int, heads.split("/"))
    kv = shared[0] if shared else heads
    # Stored as projections give it, [batch, seq, heads, d].
    q, k, v, grad = (torch.full((batch, seq, h, d), 0.5).transpose(1, 2) for h in (heads, kv, kv, heads))

    def forward(*operands):
        return F.scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=kv != heads)

    if way == "forward":
        return lambda: forward(q, k, v)
    operands = [t.requires_grad_() for t in (q, k, v)]
    out = forward(*operands)
    return lambda: torch.autograd.grad(out, operands, grad, retain_graph=True)


def main():
    known = {}
    for line in sys.stdin:
        *what, threads, budget = line.split()
        torch.set_num_threads(int(threads))
        key = " ".join(what)
        if key not in known:
            known[key] = product(*what[1:]) if what[0] == "gemm" else attention(*what[1:])
        call, seconds, began = known[key], [], time.perf_counter()
        while len(seconds) <= CALLS or time.perf_counter() - began < float(budget):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        print(*seconds[1:], flush=True)


if __name__ == "__main__":
    main()
