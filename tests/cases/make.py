"""Makes the reference cases named on the command line: python tests/cases/make.py gemma2 qwen3_moe

Needs transformers 5.23 and PyTorch 2.15 (bench/requirements/torch.txt). All of training is in fp64, also where the
models of transformers turn to fp32: in norms, in softmax and in rotary angles.
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
from transformers.modeling_layers import MtpModel

HERE = Path(__file__).parent
STEPS, BATCH, SEQ, VOCAB = 6, 4, 24, 96
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.15, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": None,
}
T5_SIZES = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
CASES = {
    # Caps low enough to bend what goes through them.
    "gemma2": ("Gemma2", {
        "head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": 7, "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
    }),
    # The layers with a window turn by 100, the last by 1000 and a factor.
    "gemma3": ("Gemma3", {
        "head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": 7, "num_hidden_layers": 6,
        "final_logit_softcapping": None, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }),
    # Two of four groups of two experts; the first layer is dense.
    "deepseek_v3": ("DeepseekV3", {
        "num_key_value_heads": 4, "moe_intermediate_size": 20, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 12,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 0,
    }),
    # Two layers behind the others predict a token further each.
    "deepseek_mtp": ("DeepseekV3", {
        "num_key_value_heads": 4, "moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "num_nextn_predict_layers": 2,
    }),
    # Queries from the stream, one group, weights that do not add up to one, halves that turn: as others use DeepSeek's.
    "deepseek_yarn": ("DeepseekV3", {
        "num_key_value_heads": 4, "moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "norm_topk_prob": False,
        "rope_interleave": False, "num_nextn_predict_layers": 0, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.5, "mscale_all_dim": 2.0,
        },
    }),
    # Biases everywhere; the ramp of YaRN is not cut to whole pairs.
    "llama_yarn": ("Llama", {
        "attention_bias": True, "mlp_bias": True, "head_dim": 16, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False,
        },
    }),
    "olmo2": ("Olmo2", {}),
    # v1.1, whose head is a matrix of its own, and v1.0.
    "t5": ("T5", {
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }),
    "t5_relu": ("T5", {"feed_forward_proj": "relu"}),
    "phi3": ("Phi3", {
        "sliding_window": 7, "original_max_position_embeddings": 32, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5,
        },
    }),
    # A factor for each frequency, for sequences longer than 16.
    "phi3_long": ("Phi3", {
        "original_max_position_embeddings": 16, "max_position_embeddings": 64, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.25, 1.5], "long_factor": [1.5, 3.0, 6.0],
        },
    }),
    # The same for sequences that are no longer than 32; all of each head turns.
    "phi3_short": ("Phi3", {
        "original_max_position_embeddings": 32, "max_position_embeddings": 64, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0,
            "short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.5, 3.0, 6.0, 8.0],
        },
    }),
    # A limit low enough to bend what goes through it.
    "gpt_oss": ("GptOss", {
        "head_dim": 16, "intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7,
        "swiglu_limit": 0.5, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False,
        },
    }),
    "qwen3_moe": ("Qwen3Moe", {
        "head_dim": 16, "moe_intermediate_size": 20, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "output_router_logits": True, "router_aux_loss_coef": 0.02,
    }),
}


def checkpoint(name, tensor):
    """What a checkpoint calls a tensor or its parts: experts share tensors in memory only, but for gpt-oss's."""
    stem = name.removesuffix(".gate_up_proj").removesuffix(".down_proj")
    if not stem.endswith(".experts") or SHARED:
        yield name, tensor
        return
    for i, expert in enumerate(tensor):
        if name.endswith(".down_proj"):
            yield f"{stem}.{i}.down_proj.weight", expert
        else:
            gate, up = expert.chunk(2)
            yield f"{stem}.{i}.gate_proj.weight", gate
            yield f"{stem}.{i}.up_proj.weight", up


def states(model):
    """What checkpoints have beside the parameters."""
    parameters = dict(model.named_parameters())
    return [(n, s) for n, s in model.state_dict().items() if n.endswith("_correction_bias") and n not in parameters]


class Further:
    """Layers that predict further tokens, as transformers runs them to draft tokens, under the names of checkpoints."""

    # As `models/deepseek_v3.mdl` has it.
    WEIGHT = 0.1

    def __init__(self, model):
        self.first = model.config.num_hidden_layers
        self.depths = getattr(model.config, "num_mtp_layers", None) or 0
        if not self.depths:
            return
        self.layers = MtpModel(model, self.depths).layers.train()
        with torch.no_grad():
            for name, p in [*self.layers.named_parameters(), *states(self.layers)]:
                draw = 0.15 * torch.randn_like(p)
                p.copy_(1 + draw if name.endswith("norm.weight") else draw)

    def named(self, tensors):
        for name, tensor in tensors:
            k, rest = name.split(".", 1)
            rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            yield f"model.layers.{self.first + int(k)}.{rest}", tensor

    def parameters(self):
        return list(self.named(self.layers.named_parameters())) if self.depths else []

    def states(self):
        return list(self.named(states(self.layers))) if self.depths else []

    def copies(self, named):
        """Embedding and head, which checkpoints have once more for each layer."""
        named = dict(named)
        for k in range(self.depths):
            yield f"model.layers.{self.first + k}.embed_tokens.weight", named["model.embed_tokens.weight"]
            yield f"model.layers.{self.first + k}.shared_head.head.weight", named["lm_head.weight"]

    def loss(self, model, hidden, targets):
        """Mean cross entropy of each token further, by what is known of the text up to the one before."""
        loss, token = 0.0, targets
        at = torch.arange(targets.shape[1])[None]
        mask = torch.full((targets.shape[1],) * 2, -1e30, dtype=torch.float64).triu(1)[None, None]
        for layer in self.layers:
            known = model.model.embed_tokens(token.clamp(min=0))
            turn = model.model.rotary_emb(known, position_ids=at)
            hidden = layer(known, hidden, turn, mask, at, None)
            token = torch.cat([token[:, 1:], torch.full_like(token[:, :1], -100)], 1)
            logits = model.lm_head(hidden).flatten(0, 1)
            loss += self.WEIGHT / self.depths * F.cross_entropy(logits, token.flatten(), ignore_index=-100)
        return loss


def norms(named):
    return {n: t.detach().norm().item() for name, tensor in named for n, t in checkpoint(name, tensor)}


def in_fp64():
    """Has the models stay in fp64 where they ask for fp32."""
    softmax, to = F.softmax, torch.Tensor.to
    wide = {torch.float32: torch.float64}
    F.softmax = lambda x, dim=None, dtype=None, **_: softmax(x, dim=dim)
    torch.Tensor.float = torch.Tensor.double
    torch.Tensor.to = lambda self, *a, **k: to(
        self,
        *[wide.get(v, v) if isinstance(v, torch.dtype) else v for v in a],
        **{n: wide.get(v, v) if isinstance(v, torch.dtype) else v for n, v in k.items()},
    )


def initial(case, architecture, options):
    """A model whose parameters are neither zero nor one throughout, written as a checkpoint in fp32."""
    sizes = T5_SIZES if architecture[0] == "T5Config" else SIZES
    config = getattr(transformers, architecture[0])(**{**sizes, **options})
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = getattr(transformers, architecture[1])._from_config(config, **plain)
    if options.get("tie_word_embeddings") is False:
        model.lm_head.weight = torch.nn.Parameter(0.15 * torch.randn_like(model.lm_head.weight))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(0.2 * torch.randn_like(p))
            elif p.abs().max() == 0:
                p.copy_(0.15 * torch.randn_like(p))
        for _, state in states(model):
            state.copy_(0.1 * torch.randn_like(state))
    with tempfile.TemporaryDirectory() as out:
        model.save_pretrained(out)
        further = Further(model)
        if further.depths:
            own = [(n, t.detach()) for n, t in further.parameters() + further.states()]
            own += further.copies(model.state_dict().items())
            tensors = load_file(f"{out}/model.safetensors")
            tensors |= {n: t.contiguous().clone() for name, tensor in own for n, t in checkpoint(name, tensor)}
            save_file(tensors, f"{out}/model.safetensors", metadata={"format": "pt"})
        for file in ["config.json", "model.safetensors"]:
            (case / file).write_bytes((Path(out) / file).read_bytes())
    if further.depths:
        further.layers.double()
    return model.double().train(), further


def losses(model, further, tokens, labels):
    """Mean cross entropy, also of tokens further on, and what balances experts."""
    if labels is not None:
        return model(input_ids=tokens, labels=labels, use_cache=False).loss
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    out = model(input_ids=inputs, use_cache=False, output_hidden_states=bool(further.depths))
    loss = F.cross_entropy(out.logits.reshape(-1, VOCAB), targets.reshape(-1))
    if getattr(model.config, "output_router_logits", False):
        loss = loss + model.config.router_aux_loss_coef * out.aux_loss
    if further.depths:
        loss = loss + further.loss(model, out.hidden_states[-1], targets)
    return loss


def make(name):
    global SHARED
    prefix, options = CASES[name]
    SHARED = prefix == "GptOss"
    case = HERE / name
    case.mkdir(exist_ok=True)
    torch.manual_seed(sum(name.encode()))
    labels = None
    if prefix == "T5":
        rows = torch.randint(0, VOCAB, (STEPS, BATCH, 20), dtype=torch.int32)
        labels = torch.randint(1, VOCAB, (STEPS, BATCH, 16), dtype=torch.int32)
        # Rows of uneven lengths.
        for i, length in enumerate([16, 3, 11, 7]):
            labels[:, i, length:] = -100
        numpy.save(case / "labels.npy", labels.numpy())
    else:
        rows = torch.randint(0, VOCAB, (STEPS, BATCH, SEQ + 1), dtype=torch.int32)
    numpy.save(case / "tokens.npy", rows.numpy())
    kind = "TextConfig" if prefix == "Gemma3" else "Config"
    head = "ForConditionalGeneration" if prefix == "T5" else "ForCausalLM"
    model, further = initial(case, (prefix + kind, prefix + head), options)
    named, beside = list(model.named_parameters()) + further.parameters(), states(model) + further.states()
    is_plain = [p.dim() == 1 or n.endswith("_bias") for n, p in named]
    decayed, plain = ([p for (_, p), s in zip(named, is_plain) if s == side] for side in [False, True])
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-6)
    expected = {"losses": [], "grad_norms": [], "param_norms_init": norms([*named, *beside, *further.copies(named)])}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = losses(model, further, rows[step].long(), None if labels is None else labels[step].long())
        loss.backward()
        norm = sum(p.grad.square().sum() for _, p in named).sqrt()
        if step == 0:
            grads = [(n, p.grad) for n, p in named]
            still = [(n, 0 * s) for n, s in beside]
            expected["grad_norms_by_param_step0"] = norms([*grads, *still, *further.copies(grads)])
        expected["losses"].append(loss.item())
        expected["grad_norms"].append(norm.item())
        for _, p in named:
            p.grad.mul_(min(1.0, 1.0 / (norm.item() + 1e-6)))
        optimizer.step()
    expected["param_norms"] = norms([*named, *beside, *further.copies(named)])
    (case / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(name, expected["losses"], expected["grad_norms"])


if __name__ == "__main__":
    in_fp64()
    for name in sys.argv[1:]:
        make(name)
