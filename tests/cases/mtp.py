"""What DeepSeek-V3's text says with `-D mtp=2`, computed by layers of transformers in fp64:

    mcc import hf tests/cases/deepseek_v3 -o model
    mcc compile model/model.mdl -D mtp=2 -D mtp_weight=0.3 -D seq=24 --global-batch-size 4 --lr 0 \
        --lr-decay-style constant --lr-warmup-iters 0 --optimizer sgd --weight-decay 0 -o out.mcc
    mcc run out.mcc --init model/weights.safetensors --allow-missing 'predict*' --steps 1 \
        --data tests/cases/deepseek_v3/tokens.npy --save-weights weights.safetensors
    python tests/cases/mtp.py weights.safetensors

prints the loss and the part of further tokens that the end-to-end tests hold mcc to. Needs what make.py needs.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

CASE = Path(__file__).parent / "deepseek_v3"
DEPTHS, WEIGHT = 2, 0.3


def matrix(x, inputs):
    """A weight of so many dims of inputs as `torch.nn.Linear` has it."""
    return x.reshape(x.shape[:inputs].numel(), -1).T.contiguous()


def layer(weights, k, config):
    """The tensors of the k-th layer that predicts, under the names of a checkpoint's layers."""
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]

    def of(name):
        return weights[f"predict.{k}.{name}"]

    def by_head(names, rank):
        return matrix(torch.cat([of(f"attn.{name}.w").reshape(rank, heads, -1) for name in names], -1), 1)

    out = {
        "input_layernorm.weight": of("norm1.w"),
        "post_attention_layernorm.weight": of("norm2.w"),
        "self_attn.q_a_proj.weight": matrix(of("attn.q_a.w"), 1),
        "self_attn.q_a_layernorm.weight": of("attn.q_norm.w"),
        "self_attn.q_b_proj.weight": by_head(["q", "q_rope"], config["q_lora_rank"]),
        "self_attn.kv_a_proj_with_mqa.weight": torch.cat([matrix(of(f"attn.{n}.w"), 1) for n in ("kv_a", "k_rope")]),
        "self_attn.kv_a_layernorm.weight": of("attn.kv_norm.w"),
        "self_attn.kv_b_proj.weight": by_head(["k", "v"], rank),
        "self_attn.o_proj.weight": matrix(of("attn.o.w"), 2),
        "mlp.gate.weight": matrix(of("moe.router.w"), 1),
        "mlp.gate.e_score_correction_bias": torch.zeros(config["n_routed_experts"]),
    }
    for name in ("gate", "up", "down"):
        out[f"mlp.shared_experts.{name}_proj.weight"] = matrix(of(f"moe.shared.{name}.w"), 1)
        for e, expert in enumerate(of(f"moe.experts.{name}")):
            out[f"mlp.experts.{e}.{name}_proj.weight"] = expert.T.contiguous()
    return out


def main():
    weights = {name: x.double() for name, x in load_file(sys.argv[1]).items()}
    config = json.loads((CASE / "config.json").read_text())
    layers = config["num_hidden_layers"]
    tensors = load_file(CASE / "model.safetensors")
    for k in range(DEPTHS):
        own = layer(weights, k, config)
        tensors |= {f"model.layers.{layers + k}.{name}": x.float() for name, x in own.items()}
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        Path(folder, "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers + DEPTHS}))
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float64, **plain)
    core, head = model.model, model.lm_head
    tokens = torch.tensor(numpy.load(CASE / "tokens.npy")[0]).long()
    given, token = tokens[:, :-1], tokens[:, 1:]
    at = torch.arange(given.shape[1])[None]
    hidden = torch.full((given.shape[1],) * 2, -1e30, dtype=torch.float64).triu(1)[None, None]

    def run(block, x):
        out = block(x, attention_mask=hidden, position_ids=at, position_embeddings=core.rotary_emb(x, at))
        return out[0] if isinstance(out, tuple) else out

    def norm(x, weight):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight

    def cross_entropy(x, labels):
        return F.cross_entropy(head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)

    with torch.no_grad():
        x = core.embed_tokens(given)
        for block in core.layers[:layers]:
            x = run(block, x)
        x = core.norm(x)
        loss, further = cross_entropy(x, token), 0.0
        for k in range(DEPTHS):
            def of(name):
                return weights[f"predict.{k}.{name}.w"]

            known = norm(core.embed_tokens(token.clamp(min=0)), of("e_norm")) @ of("e_proj")
            x = norm(run(core.layers[layers + k], known + norm(x, of("h_norm")) @ of("h_proj")), of("norm"))
            token = torch.cat([token[:, 1:], torch.full_like(token[:, :1], -100)], 1)
            further += WEIGHT / DEPTHS * cross_entropy(x, token)
    print(f"loss {float(loss + further):.12f}, of further tokens {float(further):.12f}")


if __name__ == "__main__":
    main()
