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


def base(quick):
    """The small GPT that grows."""
    return named(gpt("", 2, 128, 2, 64, 1024, 2) if quick else gpt("", 4, 384, 6, 256, 8192, 4))


def named(model):
    return replace(model, name=f"{model.layers} layers, hidden {model.hidden}, {model.batch} x {model.seq} tokens")


def growth(quick):
    """What is trained, from a small GPT one size at a time: models, and with each the lines it is on and where (`{"layers": 4}`)."""
    start = base(quick)
    layers, hidden, seq, tokens = (2, 4, 8, 16), (192, 384, 768, 1536), (256, 512, 1024, 2048, 4096), 4096
    if quick:
        layers, hidden, seq, tokens = (1, 2), (128, 256), (64, 256), 256
    lines = {
        "layers": [replace(start, layers=n) for n in layers],
        "hidden": [replace(start, hidden=n, heads=n // 64, kv_heads=n // 64, ffn=4 * n) for n in hidden],
        "seq": [replace(start, seq=n, batch=tokens // n) for n in seq],
    }
    points = {}
    for size, models in lines.items():
        for model in models:
            points.setdefault(named(model), {})[size] = getattr(model, size)
    return points


def compiled(quick):
    """What is only compiled: gpt-small with few layers and many, and a large GPT for one rank and for many, in microbatches of one sequence.

    By name: a model, how it is compiled, and where it is on which lines, as above.
    """
    small, large = MODELS[1], gpt("large", 64, 4096, 64, 1024, 50304, 64)
    depths, counts = (12, 24, 48, 96, 128), (4, 16, 64)
    if quick:
        large, depths, counts = gpt("large", 4, 256, 4, 64, 1024, 4), (2, 4), (2, 4)
    points = {f"gpt-small, {n} layers": (replace(small, layers=n), {}, {"layers": n}) for n in depths}
    points["large, 1 rank"] = (large, {"micro": 1}, {"dp": 1, "tp": 1, "pp": 1})
    for axis in ("dp", "tp", "pp"):
        for n in counts:
            shared = ["--zero", "1"] if axis == "dp" else []
            points[f"large, {axis} {n}"] = (large, {"micro": 1, "mesh": [f"--{axis}", str(n), *shared]}, {axis: n})
    return points


def counts(config, cores):
    """One session: one rank, and up to as many as there are cores, each of one thread and in microbatches of one sequence."""
    common = {"threads_per_rank": 1, "micro": 1}
    found, n = {"1 rank": common}, 2
    while n <= cores:
        sizes = {"dp": config.batch, "tp": config.heads, "pp": config.layers}
        found |= {f"{axis} {n}": common | {"mesh": [f"--{axis}", str(n)]} for axis, size in sizes.items() if size % n == 0}
        n *= 2
    return [found]
