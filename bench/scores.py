"""Attention with programs of scores beside PyTorch's: `python3 -m bench.scores > docs/benchmarks/scores.md`.

One thread each, in turn: `codegen/examples/attention_bench.rs`, then PyTorch. Its forward pass is `flex_attention`,
compiled, which has no backward pass on CPUs; its backward pass is that of `scaled_dot_product_attention` with a mask
or a bias for each pair of query and key, which knows no soft cap.
"""

import re
import statistics
import subprocess
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

ROOT = Path(__file__).resolve().parent.parent
HEADS = 8
SIZES = [(512, 64), (512, 128), (2048, 64), (2048, 128)]
SCORES = ["causal", "documents", "ragged", "alibi", "capped"]
ROUNDS, CALLS = 2, 10
CAP = 50.0


def document(scores: str, seq: int) -> torch.Tensor:
    """The document of each position, as `Scores::fill` of the example has it."""
    if scores == "documents":
        return torch.arange(seq) // 256
    borders = [int(seq * ((k * 0.618034) % 1)) for k in range(1, seq // 256)]
    return torch.tensor([sum(b <= i for b in borders) for i in range(seq)])


def contestants(scores: str, seq: int, d: int):
    """Calls of PyTorch's forward and, where there is one, backward pass."""
    q, k, v, grad = (torch.full((1, seq, HEADS, d), 0.5).transpose(1, 2) for _ in range(4))
    ids, slope = document(scores, seq), torch.full((HEADS,), 0.5)
    packed = scores in ("documents", "ragged")

    def seen(b, h, i, j):
        return (i >= j) & (ids[i] == ids[j]) if packed else i >= j

    def changed(score, b, h, i, j):
        return score + slope[h] * (j - i) if scores == "alibi" else CAP * torch.tanh(score / CAP)

    block = create_block_mask(seen, None, None, seq, seq, device="cpu")
    # Each shape by itself: after eight of them it would be compiled no more.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    change = changed if scores in ("alibi", "capped") else None

    def forward():
        with torch.no_grad():
            return compiled(q, k, v, score_mod=change, block_mask=block)

    if scores == "capped":
        return [forward, None]
    at = torch.arange(seq)
    mask = at[:, None] >= at[None, :]
    if packed:
        mask = mask & (ids[:, None] == ids[None, :])
    if scores == "alibi":
        bias = slope[:, None, None] * (at[None, :] - at[:, None])
        mask = torch.where(mask, bias, -torch.inf).to(torch.float32)[None]
    operands = [t.detach().requires_grad_() for t in (q, k, v)]
    causal = scores == "causal"
    out = F.scaled_dot_product_attention(*operands, attn_mask=None if causal else mask, is_causal=causal)
    return [forward, lambda: torch.autograd.grad(out, operands, grad, retain_graph=True)]


def median_of(call) -> float:
    call()
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def ours(scores: str, seq: int, d: int) -> list[float]:
    program = ROOT / "target/release/examples/attention_bench"
    said = subprocess.run([program, f"1x{HEADS}x{seq}x{d}", scores], check=True, capture_output=True, text=True).stdout
    return [float(re.search(rf"{name}: ([\d.]+) ms", said).group(1)) for name in ("forward", "backward")]


def main() -> None:
    build = ["cargo", "build", "--release", "-p", "codegen", "--example", "attention_bench"]
    subprocess.run(build, check=True, cwd=ROOT, capture_output=True)
    torch.set_num_threads(1)
    print("# Programs of scores\n")
    print(f"This page says how many milliseconds f32 attention with masks and biases takes on one thread, with {HEADS} heads, and how")
    print("many times as fast as PyTorch's mcc's is (`python3 -m bench.scores`). PyTorch's forward pass is `flex_attention`,")
    print("compiled. Its backward pass is `scaled_dot_product_attention`'s; all but causal have a mask or bias for each pair.\n")
    print(f"PyTorch {torch.__version__}; medians of {ROUNDS} rounds.\n")
    print("| positions | head | scores | forward | PyTorch's | | backward | PyTorch's | |")
    print("|---|---|---|---|---|---|---|---|---|")
    for seq, d in SIZES:
        for scores in SCORES:
            calls = contestants(scores, seq, d)
            rounds = [(ours(scores, seq, d), [call and median_of(call) for call in calls]) for _ in range(ROUNDS)]
            cells = []
            for which in range(2):
                own = statistics.median(r[0][which] for r in rounds)
                other = statistics.median(r[1][which] for r in rounds) if calls[which] else None
                cells += [f"{own:.2f}", f"{other:.2f}" if other else "none", f"{other / own:.1f}" if other else ""]
            print(f"| {seq:,} | {d} | {scores} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
