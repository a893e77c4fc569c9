"""The same model on one device: plain jax.numpy over unpadded arrays, to be checked by reading."""

import jax
import jax.numpy as jnp


def loss(params, tokens, labels, model, training):
    """The mean over the labels that are not -1, and over layers of what their routers cost."""

    def layer(x, w):
        x = x + attention(rms_norm(x, w["attention_norm"]), w, model)
        normed = rms_norm(x, w["mlp_norm"])
        if not model.experts:
            made = (jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"]
            return x + made, jnp.zeros((), x.dtype)
        made, balance, z = mixture(normed, w, model)
        return x + made, training.balance_loss * balance + training.router_z_loss * z

    # [b, s, d], and what the router of each layer costs.
    x, of_routers = jax.lax.scan(layer, params["embedding"][tokens], params["layers"])
    table = params["embedding"].T if model.tied else params["logits"]
    logits = rms_norm(x, params["final_norm"]) @ table  # [b, s, V]
    chosen = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    mean = jnp.where(labels >= 0, losses, 0).sum() / (labels >= 0).sum().astype(losses.dtype)
    return mean + of_routers.mean()


def mixture(x, w, model):
    """Every expert computes every token, and most are weighed by 0."""
    logits = x @ w["router"]  # [b, s, E]
    scores = jax.nn.softmax(logits)
    best = jax.lax.top_k(logits, model.top_k)[1]
    chosen = jax.nn.one_hot(best, model.experts, dtype=x.dtype).sum(axis=-2)  # [b, s, E]
    weights = scores * chosen
    if model.top_k > 1:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    hidden = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, w["gate"]))
    hidden = hidden * jnp.einsum("bsd,edf->bsef", x, w["up"])
    made = jnp.einsum("bsef,efd,bse->bsd", hidden, w["down"], weights)
    shares = chosen.mean(axis=(0, 1)) / model.top_k
    balance = model.experts * (shares * scores.mean(axis=(0, 1))).sum()
    return made, balance, jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)


def attention(x, w, model):
    batch, length, _ = x.shape
    group = model.heads // model.kv_heads
    q = (x @ w["query"]).reshape(batch, length, model.heads, model.head_size)
    k = (x @ w["key"]).reshape(batch, length, model.kv_heads, model.head_size)
    v = (x @ w["value"]).reshape(batch, length, model.kv_heads, model.head_size)
    k = jnp.repeat(rotate(k, model), group, axis=2)  # query head j has key-value head j // group
    v = jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("bqhe,bkhe->bhqk", rotate(q, model), k) / model.head_size**0.5
    scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
    out = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores), v)
    return out.reshape(batch, length, -1) @ w["output"]


def rotate(x, model):
    """Turns features (i, i + e/2), as a complex number, by position * base**(-2i/e)."""
    half = model.head_size // 2
    rates = model.rotary_base ** -(jnp.arange(half, dtype=x.dtype) / half)
    angles = jnp.arange(x.shape[1], dtype=x.dtype)[:, None, None] * rates
    turned = jax.lax.complex(x[..., :half], x[..., half:]) * jnp.exp(
        jax.lax.complex(jnp.zeros_like(angles), angles)
    )
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def rms_norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale
