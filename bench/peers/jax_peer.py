"""JAX with its default flags: one jitted step that gives its operands' memory to its results."""

import jax
import jax.numpy as jnp
from safetensors.numpy import load_file

from .. import configs
from . import jax_models
from .serve import serve


def decays(name, w):
    """Matrices alone; a bias of heads has two dims and is none."""
    return w.ndim >= 2 and not name.endswith(".b")


def make(order):
    jax.config.update("jax_compilation_cache_dir", order.options.cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    c, a = order.config, order.adamw
    loss = jax_models.loss(c)

    def update(name, w, g, m, v, t):
        m = a.beta1 * m + (1 - a.beta1) * g
        v = a.beta2 * v + (1 - a.beta2) * jnp.square(g)
        if decays(name, w):
            w = w * (1 - a.lr * a.weight_decay)
        return w - a.lr * (m / (1 - a.beta1**t)) / (jnp.sqrt(v / (1 - a.beta2**t)) + a.eps), m, v

    def step(w, m, v, t, tokens):
        value, grads = jax.value_and_grad(loss)(w, tokens[:, :-1], tokens[:, 1:], c, configs.NORM_EPS, configs.ROPE_THETA)
        new = {n: update(n, w[n], grads[n], m[n], v[n], t) for n in w}
        return value, *({n: parts[i] for n, parts in new.items()} for i in range(3))

    weights = {n: jnp.asarray(w) for n, w in load_file(order.weights).items()}
    zeros = lambda: {n: jnp.zeros_like(w) for n, w in weights.items()}
    state = [weights, zeros(), zeros()]
    jitted = jax.jit(step, donate_argnums=(0, 1, 2))
    done = 0

    def train(batch):
        nonlocal done
        done += 1
        value, *state[:] = jitted(*state, jnp.float32(done), batch)
        value = float(value)
        jax.block_until_ready(state)
        return value

    return train


if __name__ == "__main__":
    serve(make)
