"""Values and gradients of what runs on one device, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jaxpar
from jaxpar import layers, moe

SMALL = 1e-6  # of a step along a direction, in float64
EXACT, ROUNDED = 1e-4, 0.1  # in units of the rms: float32 at the highest precision; bfloat16

F64 = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Check:
    """A local function of arrays, and the same in NumPy.

    Attributes:
      function: of its arrays and, of what has one, the name of a mesh axis of one device.
      reference: of the same arrays in float64.
      arrays: float arrays are differentiated, others are not.
      allowed: the largest error of any number, in units of the rms.
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., F64]
    arrays: tuple[np.ndarray, ...]
    allowed: float = EXACT
    has_gradients: bool = True

    def errors(self, mesh: Mesh) -> dict[str, float]:
        """The largest error of the result, and of each gradient along one direction."""
        exact = [_exact(x) for x in self.arrays]
        want = self.reference(*exact)
        rng = np.random.default_rng(1)
        cotangent = rng.standard_normal(want.shape).astype(np.float32)
        got, gradients = self._run(mesh, cotangent)
        found = {"result": _distance(got, want)}
        for place, gradient in gradients.items():
            direction = rng.standard_normal(self.arrays[place].shape)
            along = _along(self.reference, exact, place, direction, cotangent)
            size = np.linalg.norm(_exact(gradient))
            found[f"gradient {place}"] = abs(np.sum(_exact(gradient) * direction) - along) / size
        return {name: float(error) for name, error in found.items()}

    def _run(self, mesh: Mesh, cotangent: np.ndarray) -> tuple[Any, dict[int, Any]]:
        floats = [i for i, x in enumerate(self.arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
        mapped: Any = jax.shard_map(
            self.function,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )

        def run(*arrays: Any) -> Any:
            out = mapped(*arrays)
            if not self.has_gradients:
                return out, ()

            def loss(*some: Any) -> Any:
                given = dict(zip(floats, some, strict=True))
                out = mapped(*(given.get(i, x) for i, x in enumerate(arrays)))
                return jnp.sum(out.astype(jnp.float32) * cotangent)

            return out, jax.grad(loss, tuple(range(len(floats))))(*(arrays[i] for i in floats))

        with jax.default_matmul_precision("highest"):
            out, gradients = jax.jit(run)(*self.arrays)
        return out, dict(zip(floats, gradients, strict=self.has_gradients))


def _exact(x: Any) -> Any:
    x = np.asarray(x)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _distance(got: Any, want: F64) -> float:
    rms = np.sqrt(np.mean(np.square(want)))
    return float(np.max(np.abs(_exact(got) - want)) / rms)


def _along(
    reference: Callable[..., F64], arrays: list[Any], place: int, direction: F64, cotangent: Any
) -> float:
    """The derivative along a direction of the sum of what the cotangent multiplies."""

    def loss(step: float) -> float:
        moved = [x + step * direction if i == place else x for i, x in enumerate(arrays)]
        return float(np.sum(reference(*moved) * cotangent))

    return (loss(SMALL) - loss(-SMALL)) / (2 * SMALL)


# -- what is checked ------------------------------------------------------------------------------


def checks() -> Iterator[Check]:
    """Experts, attention, losses, norms, layers and 8 bits: kernels of one device."""
    yield from _grouped()
    yield from _experts()
    yield from _attention()
    yield from _layers()
    yield from _eight_bits()


def _normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: Any = np.float32) -> Any:
    drawn = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return (scale * drawn).astype(np.float32).astype(dtype)


SIZES = np.array([0, 100, 37, 150, 5], np.int32)  # of groups; 8 rows of 300 have none


def _grouped() -> Iterator[Check]:
    def reference(x: F64, w: F64, sizes: Any) -> F64:
        ends = np.cumsum(sizes)
        parts = [x[end - size : end] @ one for end, size, one in zip(ends, sizes, w, strict=True)]
        return np.concatenate([*parts, np.zeros((len(x) - ends[-1], w.shape[2]))])

    for dtype, allowed in ((jnp.float32, EXACT), (jnp.bfloat16, ROUNDED)):
        for way in ("auto", "ragged_dot"):
            yield Check(
                f"grouped_matmul, {way}, {jnp.dtype(dtype).name}",
                partial(moe.grouped_matmul, implementation=way),
                reference,
                (_normal(300, 64, dtype=dtype), _normal(5, 64, 32, dtype=dtype), SIZES),
                allowed,
            )


def _experts() -> Iterator[Check]:
    weights = [_normal(8, *shape, scale=0.2) for shape in ((32, 48), (48, 32), (32, 48))]

    def reference(x: F64, logits: F64, up: F64, down: F64, gate: F64) -> F64:
        scores = np.exp(logits) / np.sum(np.exp(logits), 1, keepdims=True)
        chosen = np.argsort(-scores, 1, kind="stable")[:, :2]
        out = np.zeros_like(x)
        for token, experts in enumerate(chosen):
            for e in experts:
                out[token] += scores[token, e] * _mlp(x[token], up[e], down[e], gate[e])
        return out

    def layer(x: Any, logits: Any, *weights: Any, dispatch: Any) -> Any:
        experts = moe.Experts(*weights)
        return moe.moe_layer(x, moe.route(logits, 2), experts, "tp", dispatch=dispatch)[0]

    for dispatch in ("ragged", "all_gather"):
        yield Check(
            f"moe_layer, {dispatch}",
            partial(layer, dispatch=dispatch),
            reference,
            (_normal(64, 32), _normal(64, 8), *weights),
        )


def _mlp(x: F64, up: F64, down: F64, gate: F64) -> F64:
    gated = x @ gate
    return (gated / (1 + np.exp(-gated)) * (x @ up)) @ down


def _attention() -> Iterator[Check]:
    def reference(q: F64, k: F64, v: F64, window: int, softcap: float) -> F64:
        s, share = q.shape[1], q.shape[2] // k.shape[2]
        k, v = np.repeat(k, share, 2), np.repeat(v, share, 2)
        scores = np.einsum("bqhe,bkhe->bhqk", q, k) / np.sqrt(q.shape[-1])
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        distance = np.arange(s)[:, None] - np.arange(s)
        scores = np.where((distance >= 0) & (distance <= window), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("bhqk,bkhe->bqhe", weights / weights.sum(-1, keepdims=True), v)

    for dtype, allowed in ((jnp.float32, EXACT), (jnp.bfloat16, ROUNDED)):
        shapes = ((2, 256, 4, 64), (2, 256, 2, 64), (2, 256, 2, 64))
        arrays = tuple(_normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
        for window, softcap in ((255, 0.0), (40, 2.0)):
            wide = window == 255
            yield Check(
                f"ring_attention, {'causal' if wide else 'window, cap'}, {jnp.dtype(dtype).name}",
                partial(
                    layers.ring_attention,
                    axis="tp",
                    window=None if wide else window,
                    softcap=softcap or None,
                ),
                partial(reference, window=window, softcap=softcap),
                arrays,
                allowed,
            )


def _layers() -> Iterator[Check]:
    labels = np.random.default_rng(0).integers(0, 250, 48).astype(np.int32)

    def losses(x: F64, w: F64, labels: Any) -> F64:
        logits = x @ w
        return np.log(np.sum(np.exp(logits), 1)) - logits[np.arange(len(labels)), labels]

    def rms(x: F64, scale: F64) -> F64:
        return x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-6) * scale

    yield Check(
        "vocab_parallel_cross_entropy",
        partial(layers.vocab_parallel_cross_entropy, axis="tp"),
        losses,
        (_normal(48, 64), _normal(64, 250, scale=0.2), labels),
    )
    yield Check("rms_norm", layers.rms_norm, rms, (_normal(48, 640), _normal(640)))
    yield Check(
        "gated_mlp",
        partial(layers.gated_mlp, axis="tp"),
        lambda x, gate, up, down: _mlp(x, up, down, gate),
        (_normal(64, 96), *(_normal(*s, scale=0.1) for s in ((96, 128), (96, 128), (128, 96)))),
    )


def _eight_bits() -> Iterator[Check]:
    """Of a number of a block half a step at most is lost: of floats, of the largest ones.

    Without the barrier a compiler may leave out that floats are rounded and widened again.
    """

    def rounded(x: Any, dtype: str) -> Any:
        return jax.lax.optimization_barrier(jaxpar.quantize(x, dtype)).dequantized()

    x = _normal(64, 512, scale=3.0)
    for dtype, half in (("int8", 1 / 254), ("float8_e4m3fn", 1 / 16)):
        allowed = float(np.abs(x).max()) * half * 1.001 / float(np.sqrt(np.mean(np.square(x))))
        yield Check(
            f"quantize, {dtype}",
            partial(rounded, dtype=dtype),
            lambda x: x,
            (x,),
            allowed,
            has_gradients=False,
        )
