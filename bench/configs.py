"""What is measured: models, their arithmetic, and the training settings that all contestants share."""

from dataclasses import asdict, dataclass, replace

# One set for everybody: constant rate, decay of matrices alone, no clipping, f32.
ADAMW = {"lr": 3e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
NORM_EPS = 1e-5
ROPE_THETA = 1e4


@dataclass(frozen=True)
class Config:
    """A model of models/FAMILY.mdl and the shape of its batches. With experts, `ffn` is that of one expert."""

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    vocab: int
    batch: int
    experts: int = 0
    top_k: int = 0

    @property
    def head_dim(self):
        return self.hidden // self.heads

    @property
    def tokens(self):
        return self.batch * self.seq

    def defines(self):
        """The settings of the model text."""
        common = {n: getattr(self, n) for n in ("layers", "hidden", "heads", "seq", "vocab")}
        match self.family:
            case "gpt2":
                own = {"ffn": self.ffn}
            case "llama":
                own = {"ffn": self.ffn, "kv_heads": self.kv_heads, "rope_theta": ROPE_THETA}
            case "mixtral":
                own = {"expert_ffn": self.ffn, "kv_heads": self.kv_heads, "experts": self.experts, "top_k": self.top_k,
                       "balanced": "false", "rope_theta": ROPE_THETA}
        return common | own

    def matmul_parameters(self):
        """Parameters that a token is multiplied with: chosen experts alone, and no embedding that is only looked up."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * self.head_dim
        match self.family:
            case "gpt2":
                mlp = 2 * self.hidden * self.ffn
            case "llama":
                mlp = 3 * self.hidden * self.ffn
            case "mixtral":
                mlp = 3 * self.hidden * self.ffn * self.top_k + self.hidden * self.experts
        return self.layers * (attention + mlp) + self.hidden * self.vocab

    def flops(self):
        """Operations of a training step, as all contestants are counted: masked attention as if it were not."""
        return (6 * self.matmul_parameters() + 12 * self.layers * self.hidden * self.seq) * self.tokens

    def describe(self):
        return asdict(self)


def gpt(name, layers, hidden, heads, seq, vocab, batch):
    return Config(name, "gpt2", layers, hidden, heads, heads, 4 * hidden, seq, vocab, batch)


LLAMA_MINI = Config("llama-mini", "llama", 8, 512, 8, 4, 1536, 256, 8192, 8)

MODELS = [
    gpt("gpt-nano", 6, 384, 6, 256, 8192, 8),
    gpt("gpt-small", 12, 768, 12, 512, 50304, 2),
    gpt("gpt-124m-short", 12, 768, 12, 64, 50304, 4),
    LLAMA_MINI,
    replace(LLAMA_MINI, name="moe-mini", family="mixtral", ffn=768, experts=8, top_k=2),
]


def deep():
    """What is only compiled: few layers and many, at gpt-small's sizes."""
    small = MODELS[1]
    return [replace(small, name=f"gpt-small, {n} layers", layers=n) for n in (12, 48, 128)]


def growth():
    """From a small Llama, one size at a time: name of the size, and the models."""
    base = replace(LLAMA_MINI, layers=4, batch=2)
    sizes = {
        "layers": [replace(base, layers=n) for n in (2, 4, 8, 16)],
        "hidden": [replace(base, hidden=n, heads=n // 64, kv_heads=n // 128, ffn=3 * n) for n in (256, 512, 1024)],
        "seq": [replace(base, seq=n, batch=2048 // n) for n in (128, 256, 512, 1024, 2048)],
    }
    return {size: [replace(c, name=f"{size}-{getattr(c, size)}") for c in configs] for size, configs in sizes.items()}
