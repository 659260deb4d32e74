"""What PyTorch takes for the shapes of `mcc gpu-check`: JSON from standard input, JSON to standard output. Times are medians of CUDA graphs' or of loops' runs."""

import json
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if not torch.cuda.is_available():
    sys.exit("this PyTorch finds no GPU")
device, bf16 = "cuda", torch.bfloat16
torch.manual_seed(0)


def seconds(run, least=5, budget=0.5):
    """Of one call, the median; as many calls as take half a second."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(n):
        start.record()
        for _ in range(n):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / n

    n = max(1, min(1000, int(budget / 10 / max(timed(1), 1e-6))))
    return statistics.median(timed(n) for _ in range(max(least, 10)))


def random(*sizes):
    return torch.randn(*sizes, device=device, dtype=bf16)


def product(s):
    count, m, n, k = (s[x] for x in ("count", "m", "n", "k"))
    a = random(count, k, m).transpose(1, 2) if s["a_transposed"] else random(count, m, k)
    b = random(count, n, k).transpose(1, 2) if s["b_transposed"] else random(count, k, n)
    if count == 1:
        a, b = a[0], b[0]
    return seconds(lambda: torch.matmul(a, b))


def attention(s):
    """Of the fastest backend that can."""
    q = random(1, s["heads"], s["seq"], s["d"]).requires_grad_(s["backward"])
    k, v = (random(1, s["kv_heads"], s["seq"], s["d"]).requires_grad_(s["backward"]) for _ in range(2))
    grouped = {} if s["heads"] == s["kv_heads"] else {"enable_gqa": True}
    best = None
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(backend):
                forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=s["causal"], **grouped)
                if s["backward"]:
                    out = forward()
                    grad = torch.randn_like(out)
                    took = seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
                else:
                    took = seconds(forward)
        except RuntimeError:
            continue
        best = took if best is None else min(best, took)
    return best


def copied():
    """Bytes read and written a second by a copy."""
    a = torch.empty(1 << 29, device=device, dtype=bf16)
    b = torch.empty_like(a)
    return 2 * a.numel() * a.element_size() / seconds(lambda: b.copy_(a))


class Block(torch.nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.qkv, self.out = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.up, self.down = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        batch, seq, hidden = x.shape
        q, k, v = (t.view(batch, seq, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Gpt(torch.nn.Module):
    def __init__(self, g):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(g["vocab"], g["hidden"]), torch.nn.Embedding(g["seq"], g["hidden"])
        self.blocks = torch.nn.ModuleList(Block(g["hidden"], g["heads"]) for _ in range(g["layers"]))
        self.ln = torch.nn.LayerNorm(g["hidden"])

    def loss(self, x, targets):
        logits = self.ln(x) @ self.wte.weight.T
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return self.loss(x, targets)


def gpt(g):
    """A step in bf16 autocast, weights and AdamW in f32, gradients clipped; blocks and loss compiled, as torchtitan has it: all blocks at once take minutes."""
    model = Gpt(g).to(device)
    for block in model.blocks:
        block.compile()
    model.loss = torch.compile(model.loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, g["vocab"], (g["batch"], g["seq"] + 1), device=device)

    def step():
        with torch.autocast(device, bf16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return seconds(step)


def tried(run, *arguments):
    try:
        return run(*arguments)
    except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
        print(f"{run.__name__}: {error}", file=sys.stderr)
        return None


asked = json.load(sys.stdin)
kinds = {"product": product, "attention": attention, "bytes": lambda _: None}
shapes = [tried(kinds[s["kind"]], s) for s in asked["shapes"]]
print(json.dumps({"shapes": shapes, "copy": copied(), "gpt": tried(gpt, asked["gpt"])}))
