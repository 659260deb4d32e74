"""GPT-2, Llama and Mixtral as PyTorch users write them. Weights come under mcc's names."""

import torch
import torch.nn.functional as F
from torch import nn


class GptAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Linear(c.hidden, 3 * c.hidden)
        self.out = nn.Linear(c.hidden, c.hidden)

    def forward(self, x):
        batch, seq, hidden = x.shape
        q, k, v = (t.view(batch, seq, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(hidden, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, hidden))


class GptLayer(nn.Module):
    def __init__(self, c, eps):
        super().__init__()
        self.ln1 = nn.LayerNorm(c.hidden, eps)
        self.attn = GptAttention(c)
        self.ln2 = nn.LayerNorm(c.hidden, eps)
        self.up = nn.Linear(c.hidden, c.ffn)
        self.down = nn.Linear(c.ffn, c.hidden)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, c, eps, theta):
        super().__init__()
        self.wte = nn.Embedding(c.vocab, c.hidden)
        self.wpe = nn.Embedding(c.seq, c.hidden)
        self.layers = nn.ModuleList(GptLayer(c, eps) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.hidden, eps)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def load(self, w):
        put(self.wte.weight, w["wte"])
        put(self.wpe.weight, w["wpe"])
        put_norm(self.norm, w, "ln_f")
        for i, layer in enumerate(self.layers):
            own = f"layers.{i}."
            put_norm(layer.ln1, w, own + "ln1")
            put_norm(layer.ln2, w, own + "ln2")
            hidden = w[own + "attn.q.w"].shape[0]
            put(layer.attn.qkv.weight, torch.cat([w[f"{own}attn.{n}.w"].reshape(hidden, -1) for n in "qkv"], 1).T)
            put(layer.attn.qkv.bias, torch.cat([w[f"{own}attn.{n}.b"].flatten() for n in "qkv"]))
            put(layer.attn.out.weight, w[own + "attn.o.w"].reshape(-1, hidden).T)
            put(layer.attn.out.bias, w[own + "attn.o.b"])
            for part, name in ((layer.up, "up"), (layer.down, "down")):
                put(part.weight, w[f"{own}mlp.{name}.w"].T)
                put(part.bias, w[f"{own}mlp.{name}.b"])


def rotate(x, cos, sin):
    """Rotary positions, pairing the halves of a head."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class LlamaAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.hidden // c.heads
        self.q = nn.Linear(c.hidden, c.hidden, bias=False)
        self.k = nn.Linear(c.hidden, self.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(c.hidden, self.kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(c.hidden, c.hidden, bias=False)

    def forward(self, x, cos, sin):
        batch, seq, hidden = x.shape
        q = self.q(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(batch, seq, hidden))


class GatedMlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate = nn.Linear(c.hidden, c.ffn, bias=False)
        self.up = nn.Linear(c.hidden, c.ffn, bias=False)
        self.down = nn.Linear(c.ffn, c.hidden, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Dropless: rows sorted by expert, and one grouped product per matrix. As fast as one expert after the other, faster when compiled."""

    def __init__(self, c):
        super().__init__()
        self.top_k, self.experts = c.top_k, c.experts
        self.router = nn.Linear(c.hidden, c.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(c.experts, c.hidden, c.ffn))
        self.up = nn.Parameter(torch.empty(c.experts, c.hidden, c.ffn))
        self.down = nn.Parameter(torch.empty(c.experts, c.ffn, c.hidden))

    def forward(self, x):
        rows = x.flatten(0, 1)
        score, chosen = torch.softmax(self.router(rows), dim=-1).topk(self.top_k, dim=-1)
        weight = score / score.sum(dim=-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=self.experts).cumsum(0).int()
        row = order // self.top_k
        taken = rows[row]
        h = F.silu(F.grouped_mm(taken, self.gate, offs=ends)) * F.grouped_mm(taken, self.up, offs=ends)
        y = F.grouped_mm(h, self.down, offs=ends) * weight.flatten()[order, None]
        return torch.zeros_like(rows).index_add_(0, row, y).view_as(x)


class LlamaLayer(nn.Module):
    def __init__(self, c, eps):
        super().__init__()
        self.norm1 = nn.RMSNorm(c.hidden, eps)
        self.attn = LlamaAttention(c)
        self.norm2 = nn.RMSNorm(c.hidden, eps)
        self.mlp = Experts(c) if c.experts else GatedMlp(c)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, c, eps, theta):
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(LlamaLayer(c, eps) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.hidden, eps)
        self.head = nn.Linear(c.hidden, c.vocab, bias=False)
        pairs = c.hidden // c.heads // 2
        angle = torch.outer(torch.arange(c.seq), theta ** (-torch.arange(pairs) / pairs)).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def load(self, w):
        put(self.embed.weight, w["embed"])
        put(self.head.weight, w["head"])
        put_norm(self.norm, w, "norm")
        for i, layer in enumerate(self.layers):
            own = f"layers.{i}."
            put_norm(layer.norm1, w, own + "norm1")
            put_norm(layer.norm2, w, own + "norm2")
            hidden = w[own + "attn.q.w"].shape[0]
            for part, name in ((layer.attn.q, "q"), (layer.attn.k, "k"), (layer.attn.v, "v")):
                put(part.weight, w[f"{own}attn.{name}.w"].reshape(hidden, -1).T)
            put(layer.attn.o.weight, w[own + "attn.o.w"].reshape(-1, hidden).T)
            for name in ("gate", "up", "down"):
                if isinstance(layer.mlp, Experts):
                    put(getattr(layer.mlp, name), w[f"{own}moe.experts.{name}"])
                else:
                    put(getattr(layer.mlp, name).weight, w[f"{own}mlp.{name}.w"].T)
            if isinstance(layer.mlp, Experts):
                put(layer.mlp.router.weight, w[own + "moe.router.w"].T)


def put(parameter, value):
    with torch.no_grad():
        parameter.copy_(value)


def put_norm(norm, weights, name):
    put(norm.weight, weights[name + ".w"])
    if name + ".b" in weights:
        put(norm.bias, weights[name + ".b"])


def model(config, eps, theta):
    return (Gpt if config.family == "gpt2" else Llama)(config, eps, theta)
