"""A mixture of experts on one device: each token times each of its experts, in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.layers import GatedActivation


def kept_by_capacity(chosen, weights, capacity, policy, experts):
    """Which (token, choice) pairs of one device experts keep, by looking at one after the other."""
    kept = chosen >= 0
    for expert in range(experts):
        tokens, choices = np.nonzero(chosen == expert)
        order = np.arange(len(tokens))
        if policy == "probability":
            order = np.lexsort((tokens, -weights[tokens, choices]))
        if policy == "choice":
            order = np.lexsort((tokens, choices))
        for place in order[capacity:]:
            kept[tokens[place], choices[place]] = False
    return kept


# Operations one by one take longer to compile than together.
@partial(jax.jit, static_argnames="scoring")
def scores_of(logits, scoring):
    return jax.nn.sigmoid(logits) if scoring == "sigmoid" else jax.nn.softmax(logits)


@partial(jax.jit, static_argnames=("scoring", "normalize", "scale"))
def weights_of(logits, chosen, scoring, normalize, scale):
    if scoring == "selected_softmax":
        weights = jax.nn.softmax(jnp.take_along_axis(logits, chosen, axis=1))
    else:
        weights = jnp.take_along_axis(scores_of(logits, scoring), chosen, axis=1)
    if normalize:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return weights * scale


def choose(params, top_k, devices, capacity, policy, mask, bias, **how):
    """Returns what is not differentiated: the chosen experts of each token, and which are kept."""
    logits = jnp.asarray(params["tokens"] @ params["router"])
    choice = np.asarray(scores_of(logits, how["scoring"])) + (0 if bias is None else bias)
    chosen = np.argsort(-choice, axis=1, kind="stable")[:, :top_k]
    weights = np.asarray(weights_of(logits, chosen, **how))
    chosen = chosen if mask is None else np.where(mask[:, None], chosen, -1)
    if capacity is None:
        return chosen, chosen >= 0
    blocks = np.split(chosen, devices), np.split(weights, devices)
    count = logits.shape[1]
    kept = [kept_by_capacity(c, w, capacity, policy, count) for c, w in zip(*blocks, strict=True)]
    return chosen, np.concatenate(kept)


def mlp(x, w, activation):
    up = x @ w["up"] + w.get("up_bias", 0)
    if "gate" in w:
        gate = x @ w["gate"] + w.get("gate_bias", 0)
        joined = isinstance(activation, GatedActivation)
        hidden = activation.function(gate, up) if joined else activation(gate) * up
    else:
        hidden = activation(up)
    return hidden @ w["down"] + w.get("down_bias", 0)


def _one_hot(chosen, count):
    return chosen[..., None] == np.arange(count)


def moe(params, chosen, kept, activation=jax.nn.silu, **how):
    """Returns results and statistics of the tokens of all devices, `[devices * t, d]`.

    `params` has tokens, router, experts and, where there are any, shared.
    """
    tokens, count = params["tokens"], params["router"].shape[1]
    logits = tokens @ params["router"]
    weights = weights_of(logits, jnp.maximum(chosen, 0), **how)
    shares = jnp.sum(weights[..., None] * kept[..., None] * _one_hot(chosen, count), axis=1)
    each = jax.vmap(lambda w: mlp(tokens, w, activation))(params["experts"])
    out = jnp.einsum("te,etd->td", shares, each)
    if "shared" in params:
        gate = jax.nn.sigmoid(tokens @ params["shared_gate"]) if "shared_gate" in params else 1
        out = out + (chosen[:, :1] >= 0) * gate * mlp(tokens, params["shared"], activation)
    loads = jnp.sum(_one_hot(chosen, count), axis=(0, 1))
    counted = chosen[:, 0] >= 0
    real = counted / jnp.maximum(counted.sum(), 1)
    scores = scores_of(logits, how["scoring"])
    shares = scores / scores.sum(axis=1, keepdims=True)
    return out, {
        "load_balance_loss": count * jnp.sum(loads / jnp.maximum(loads.sum(), 1) * (real @ shares)),
        "router_z_loss": real @ jax.nn.logsumexp(logits, axis=1) ** 2,
        "tokens_per_expert": loads,
        "dropped": (chosen >= 0).sum() - kept.sum(),
    }
