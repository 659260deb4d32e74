"""Writes texts.json: random model texts, with the loss and the gradients that PyTorch's autograd has for them in float64.

    python3 passes/tests/autograd/record.py > passes/tests/autograd/texts.json

Each text is a chain of random blocks, written twice: as text of mcc and as calls of PyTorch. Numbers follow from a seed of each tensor, by
`value`, which the test computes too. `differential/autograd.rs` elaborates and differentiates the texts and compares."""

import json
import random
import sys

import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
BATCH, SEQ, HIDDEN, HEADS, WIDTH, VOCAB = 2, 3, 4, 2, 2, 5


def value(seed, i):
    """Element `i` of a tensor: a number in [-1, 1), the same in any language that has integers of 64 bits."""
    return (seed * 2654435761 + i * 40503 + i * i * 17) % 10007 / 10007 * 2 - 1


class Text:
    """A text on its way: its lines, and what PyTorch has for each value."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.seed = seed
        self.head, self.lines, self.params, self.seeds, self.dims = [], [], {}, {}, set()
        self.tokens = [self.random.randrange(VOCAB) for _ in range(BATCH * SEQ)]
        self.targets = [self.random.choice([*range(VOCAB), -100]) for _ in range(BATCH * SEQ)]
        self.values = []
        # Two numbers of which one is chosen are never equal: there derivatives are a matter of taste.
        self.apart = True

    def param(self, name, *shape):
        self.seeds[name] = len(self.seeds) * 31 + self.seed % 97 + 1
        size = torch.Size(shape).numel()
        tensor = torch.tensor([value(self.seeds[name], i) for i in range(size)]).reshape(shape).requires_grad_()
        self.params[name] = tensor
        return tensor

    def declare(self, name, *dims):
        sizes = {"hidden": HIDDEN, "heads": HEADS, "width": WIDTH, "vocab": VOCAB, "seq": SEQ}
        self.lines.append(f"param {name}: [{', '.join(dims)}] ~ normal(1);")
        return self.param(name, *(sizes[d] for d in dims))

    def let(self, text, tensor):
        name = f"x{len(self.values)}"
        self.lines.append(f"let {name} = {text};")
        self.values.append((name, tensor))
        return name, tensor

    def dim(self, text):
        if text not in self.dims:
            self.dims.add(text)
            self.lines.append(f"dim {text};")

    def choose(self, t, axis):
        top = t.topk(2, axis).values
        self.apart &= not torch.equal(*top.split(1, axis)) and bool((top.diff(dim=axis) != 0).all())

    def any(self):
        return self.random.choice(self.values[-3:])

    def linear(self, x, name, fan_in, fan_out, bias):
        w = self.param(f"{name}.w", fan_in, fan_out)
        y = x @ w
        return y + self.param(f"{name}.b", fan_out) if bias else y

    def block(self, k):
        x, t = self.any()
        y, u = self.any()
        r = self.random
        name = f"b{k}"
        kinds = [
            "unary", "unary", "binary", "binary", "scale", "shift", "linear", "norm", "mean", "sum", "max", "softmax", "lse", "cumsum",
            "heads", "halves", "attention", "attention", "rope", "stop", "mlp", "gated", "where", "stack", "argmax",
        ]
        kind = r.choice(kinds)
        if kind == "unary":
            text, f = r.choice(UNARY)
            return self.let(text.format(x=x), f(t))
        if kind == "binary":
            text, f = r.choice(BINARY)
            for a, b in [(t, u * 0.5), (t * 0.5, u)]:
                self.apart &= not ("imum" in text and bool((a == b).any()))
            return self.let(text.format(x=x, y=y), f(t, u))
        if kind == "where":
            return self.let(f"where({x} > {y}, {x} * 0.5, {y} * {x})", torch.where(t > u, t * 0.5, u * t))
        if kind in ("scale", "shift"):
            p = self.declare(f"p{k}", "hidden")
            return self.let(f"{x} {'*' if kind == 'scale' else '+'} p{k}", t * p if kind == "scale" else t + p)
        if kind == "linear":
            self.dim(f"to{k} = {HIDDEN}")
            bias = r.random() < 0.5
            flag = ", bias: true" if bias else ""
            return self.let(f"view(linear({x}, hidden, to{k}{flag}) as {name}, to{k} -> hidden)", self.linear(t, name, HIDDEN, HIDDEN, bias))
        if kind == "norm":
            how = r.choice(["layer_norm", "rms_norm", "layer_norm_1p"])
            w = self.param(f"{name}.w", HIDDEN)
            if how == "rms_norm":
                z = t * torch.rsqrt((t * t).mean(-1, keepdim=True) + 1e-3) * w
            else:
                b = self.param(f"{name}.b", HIDDEN)
                z = F.layer_norm(t, [HIDDEN], eps=1e-3) * (w + 1 if how == "layer_norm_1p" else w) + b
            return self.let(f"{how}({x}, over: hidden, eps: 1e-3) as {name}", z)
        if kind == "mean":
            d, a = r.choice([("seq", 1), ("hidden", 2)])
            return self.let(f"{x} - mean({x}, over: {d})", t - t.mean(a, keepdim=True))
        if kind == "sum":
            return self.let(f"{x} / (1 + sum({y} * {y}, over: hidden))", t / (1 + (u * u).sum(-1, keepdim=True)))
        if kind == "max":
            d, a = r.choice([("seq", 1), ("hidden", 2)])
            self.choose(u, a)
            return self.let(f"{x} * 0.5 + max({y}, over: {d})", t * 0.5 + u.amax(a, keepdim=True))
        if kind == "argmax":
            self.choose(u, -1)
            best = u.argmax(-1)
            table = self.declare(f"t{k}", "hidden", "width")
            z = t * table[best].sum(-1, keepdim=True)
            return self.let(f"{x} * sum(t{k}[hidden: argmax({y}, over: hidden)], over: width)", z)
        if kind == "softmax":
            d, a = r.choice([("seq", 1), ("hidden", 2)])
            return self.let(f"softmax({x}, over: {d})", t.softmax(a))
        if kind == "lse":
            return self.let(f"{x} - log_sum_exp({x}, over: hidden)", t - t.logsumexp(-1, keepdim=True))
        if kind == "cumsum":
            return self.let(f"cumsum({x}, over: seq)", t.cumsum(1))
        if kind == "heads":
            p = self.declare(f"p{k}", "heads", "width")
            parts = t.reshape(BATCH, SEQ, HEADS, WIDTH) * p
            self.lines.append(f"let h{k} = view({x}, hidden -> [heads, width]) * p{k};")
            return self.let(f"view(h{k}, [heads, width] -> hidden)", parts.reshape(BATCH, SEQ, HIDDEN))
        if kind == "halves":
            a, b = r.choice([(1, 3), (2, 2), (3, 1)])
            self.dim(f"a{k} = {a}, b{k} = {b}")
            text = f"concat(slice({x}, hidden -> b{k}, at: {a}), slice({y}, hidden -> a{k}, at: 0) * 2, [b{k}, a{k}] -> hidden)"
            return self.let(text, torch.cat([t[..., a:], u[..., :a] * 2], -1))
        if kind == "stack":
            self.dim(f"two{k} = 2")
            z = torch.stack([t, u], 0)
            self.choose(z, 0)
            return self.let(f"max(stack({x}, {y}, over: two{k}), over: two{k}) + {x}", z.amax(0) + t)
        if kind == "stop":
            return self.let(f"stop_gradient({x}) * {y}", t.detach() * u)
        if kind == "rope":
            angle = torch.arange(SEQ)[:, None] * 100.0 ** (-torch.arange(HIDDEN // 2) * 2 / HIDDEN)
            c, s = angle.cos(), angle.sin()
            a, b = t[..., : HIDDEN // 2], t[..., HIDDEN // 2 :]
            return self.let(f"rope({x}, hidden, index(seq), theta: 100.0)", torch.cat([a * c - b * s, b * c + a * s], -1))
        if kind in ("mlp", "gated"):
            self.dim(f"ffn{k} = 3")
            if kind == "mlp":
                act, f = r.choice([("gelu_tanh", lambda z: F.gelu(z, approximate="tanh")), ("relu2", lambda z: F.relu(z) ** 2), ("gelu", F.gelu)])
                z = self.linear(f(self.linear(t, f"{name}.up", HIDDEN, 3, True)), f"{name}.down", 3, HIDDEN, True)
                return self.let(f'mlp({x}, hidden, ffn{k}, act: "{act}") as {name}', z)
            gate = F.silu(self.linear(t, f"{name}.gate", HIDDEN, 3, False))
            z = self.linear(gate * self.linear(t, f"{name}.up", HIDDEN, 3, False), f"{name}.down", 3, HIDDEN, False)
            return self.let(f"gated_mlp({x}, hidden, ffn{k}) as {name}", z)
        # Attention; keys and values of one head, or of as many as queries have.
        shared = r.random() < 0.4
        window = r.choice([None, 1, 2])
        causal = window is not None or r.random() < 0.6
        self.dim(f"keys{k} = seq")
        q = self.linear(t, f"{name}q", HIDDEN, HIDDEN, False).reshape(BATCH, SEQ, HEADS, WIDTH)
        to, heads = ("width", 1) if shared else ("[heads, width]", HEADS)
        k_, v_ = (self.linear(u, f"{name}{c}", HIDDEN, heads * WIDTH, False).reshape(BATCH, SEQ, heads, WIDTH) for c in "kv")
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k_.expand(-1, -1, HEADS, -1)) * WIDTH**-0.5
        i, j = torch.arange(SEQ)[:, None], torch.arange(SEQ)[None]
        mask = (j <= i) & (i - j < (window or SEQ)) if causal else torch.ones(SEQ, SEQ, dtype=torch.bool)
        p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        z = torch.einsum("bhqk,bkhd->bqhd", p, v_.expand(-1, -1, HEADS, -1)).reshape(BATCH, SEQ, HIDDEN)
        at = f"causal(seq, keys{k})" + (f" and within(seq, keys{k}, {window})" if window else "")
        flag = f", mask: {at}" if causal else ""
        names = f"linear({x}, hidden, [heads, width]) as {name}q", *(f"view(linear({y}, hidden, {to}) as {name}{c}, seq -> keys{k})" for c in "kv")
        for c, text in zip("qkv", names):
            self.lines.append(f"let {name}{c}_ = {text};")
        text = f"attention({name}q_, {name}k_, {name}v_, width, keys{k}{flag})"
        return self.let(f"view({text}, [heads, width] -> hidden)", z)

    def loss(self):
        r = self.random
        x, t = self.values[-1]
        y, u = self.any()
        kind = r.choice(["square", "tokens", "tokens", "weighted", "two"])
        if kind == "square":
            self.lines.append(f"loss mean({x} * {x});")
            return (t * t).mean()
        if kind == "weighted":
            p = self.declare("weights", "seq", "hidden")
            self.lines.append(f"loss sum({x} * weights) * 0.1;")
            return (t * p).sum() * 0.1
        if kind == "two":
            self.lines.append(f"loss a = mean(tanh({x}));")
            self.lines.append(f"loss b = 0.3 * mean({x} * {y});")
            return t.tanh().mean() + 0.3 * (t * u).mean()
        tied = r.random() < 0.5
        table = self.params["embed"] if tied else self.declare("head", "vocab", "hidden")
        self.lines.append(f"loss token_loss(dot({x}, {'embed' if tied else 'head'}, over: hidden), targets, over: vocab);")
        return F.cross_entropy((t @ table.T).reshape(-1, VOCAB), torch.tensor(self.targets), ignore_index=-100, reduction="sum") / max(
            1, sum(x != -100 for x in self.targets)
        )


UNARY = [
    ("tanh({x})", torch.tanh),
    ("sin({x})", torch.sin),
    ("cos({x})", torch.cos),
    ("erf({x})", torch.erf),
    ("exp(0.3 * tanh({x}))", lambda t: torch.exp(0.3 * torch.tanh(t))),
    ("log(1 + {x} * {x})", lambda t: torch.log(1 + t * t)),
    ("sqrt(1 + {x} * {x})", lambda t: torch.sqrt(1 + t * t)),
    ("rsqrt(1 + {x} * {x})", lambda t: torch.rsqrt(1 + t * t)),
    ("abs({x})", torch.abs),
    ("sigmoid({x})", torch.sigmoid),
    ("silu({x})", F.silu),
    ("relu({x})", F.relu),
    ("relu2({x})", lambda t: F.relu(t) ** 2),
    ("gelu({x})", F.gelu),
    ("gelu_tanh({x})", lambda t: F.gelu(t, approximate="tanh")),
    ("{x} ^ 2", lambda t: t**2),
    ("(1 + {x} * {x}) ^ 0.7", lambda t: (1 + t * t) ** 0.7),
    ("-{x}", lambda t: -t),
]

BINARY = [
    ("{x} + {y}", lambda t, u: t + u),
    ("{x} - 0.5 * {y}", lambda t, u: t - 0.5 * u),
    ("{x} * {y}", lambda t, u: t * u),
    ("{x} / (1 + {y} * {y})", lambda t, u: t / (1 + u * u)),
    ("maximum({x}, {y} * 0.5)", lambda t, u: torch.maximum(t, u * 0.5)),
    ("minimum({x} * 0.5, {y})", lambda t, u: torch.minimum(t * 0.5, u)),
]


def text(seed):
    """One text with its numbers, or none where two that are chosen from are equal, or numbers are very large."""
    m = Text(seed)
    embed = m.declare("embed", "vocab", "hidden")
    places = m.declare("places", "seq", "hidden")
    m.let("embed[vocab: tokens] + places", embed[torch.tensor(m.tokens)].reshape(BATCH, SEQ, HIDDEN) + places)
    for k in range(m.random.randint(2, 9)):
        m.block(k)
    loss = m.loss()
    grads = torch.autograd.grad(loss, list(m.params.values()), allow_unused=True)
    numbers = [loss.item(), *(x for g in grads if g is not None for x in g.flatten().tolist())]
    if not m.apart or not all(abs(x) < 1e6 for x in numbers):
        return None
    head = f"model random(batch, seq = {SEQ}, hidden = {HIDDEN}, heads = {HEADS}, width = {WIDTH}, vocab = {VOCAB}) {{"
    inputs = ["input tokens: i32[batch, seq];", "input targets: i32[batch, seq];"]
    grads = {name: g.flatten().tolist() for name, g in zip(m.params, grads) if g is not None}
    return {
        "text": "\n  ".join([head, *inputs, *m.lines]) + "\n}\n",
        "tokens": m.tokens,
        "targets": m.targets,
        "seeds": m.seeds,
        "loss": loss.item(),
        "gradients": grads,
    }


if __name__ == "__main__":
    found, seed = [], 0
    while len(found) < 200:
        seed += 1
        one = text(seed)
        if one:
            found.append(one)
    print("[", ",\n".join(json.dumps(f) for f in found), "]", sep="\n")
    print(f"{len(found)} texts of {seed} seeds", file=sys.stderr)
