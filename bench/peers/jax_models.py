"""GPT-2, Llama and Mixtral as JAX users write them: functions of a dict of weights, under mcc's names and shapes."""

import jax
import jax.numpy as jnp


def layer_norm(x, w, b, eps):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + eps) * w + b


def rms_norm(x, w, eps):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * w


def mean_loss(logits, targets):
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()


def gpt(w, tokens, targets, c, eps, theta):
    x = w["wte"][tokens] + w["wpe"]
    for i in range(c.layers):
        p = lambda name: w[f"layers.{i}.{name}"]
        h = layer_norm(x, p("ln1.w"), p("ln1.b"), eps)
        q, k, v = (jnp.einsum("bsh,hnd->bsnd", h, p(f"attn.{n}.w")) + p(f"attn.{n}.b") for n in "qkv")
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + jnp.einsum("bsnd,ndh->bsh", y, p("attn.o.w")) + p("attn.o.b")
        h = layer_norm(x, p("ln2.w"), p("ln2.b"), eps)
        h = jax.nn.gelu(h @ p("mlp.up.w") + p("mlp.up.b"), approximate=True)
        x = x + h @ p("mlp.down.w") + p("mlp.down.b")
    return mean_loss(layer_norm(x, w["ln_f.w"], w["ln_f.b"], eps) @ w["wte"].T, targets)


def rotate(x, theta):
    """Rotary positions of [batch, seq, heads, head_dim], pairing the halves of a head."""
    pairs = x.shape[-1] // 2
    angle = jnp.outer(jnp.arange(x.shape[1]), theta ** (-jnp.arange(pairs) / pairs))[:, None, :]
    a, b = x[..., :pairs], x[..., pairs:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], axis=-1)


def experts(x, p, c):
    """Dropless: every token goes through every expert, most of them with weight 0. On CPUs XLA's grouped products do as much, and are slower."""
    rows = x.reshape(-1, c.hidden)
    score, chosen = jax.lax.top_k(jax.nn.softmax(rows @ p("moe.router.w")), c.top_k)
    weight = (jax.nn.one_hot(chosen, c.experts) * (score / score.sum(-1, keepdims=True))[..., None]).sum(1)
    h = jax.nn.silu(jnp.einsum("rh,ehf->erf", rows, p("moe.experts.gate"))) * jnp.einsum("rh,ehf->erf", rows, p("moe.experts.up"))
    return jnp.einsum("erf,efh->rh", h * weight.T[..., None], p("moe.experts.down")).reshape(x.shape)


def llama(w, tokens, targets, c, eps, theta):
    x = w["embed"][tokens]
    for i in range(c.layers):
        p = lambda name: w[f"layers.{i}.{name}"]
        h = rms_norm(x, p("norm1.w"), eps)
        q = jnp.einsum("bsh,hkgd->bskgd", h, p("attn.q.w")).reshape(*tokens.shape, c.heads, -1)
        k, v = (jnp.einsum("bsh,hkd->bskd", h, p(f"attn.{n}.w")) for n in "kv")
        y = jax.nn.dot_product_attention(rotate(q, theta), rotate(k, theta), v, is_causal=True)
        x = x + y.reshape(*tokens.shape, -1) @ p("attn.o.w").reshape(-1, c.hidden)
        h = rms_norm(x, p("norm2.w"), eps)
        if c.experts:
            x = x + experts(h, p, c)
        else:
            x = x + (jax.nn.silu(h @ p("mlp.gate.w")) * (h @ p("mlp.up.w"))) @ p("mlp.down.w")
    return mean_loss(rms_norm(x, w["norm.w"], eps) @ w["head"].T, targets)


def loss(config):
    return gpt if config.family == "gpt2" else llama
