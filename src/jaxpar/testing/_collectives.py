"""Counting the collectives and the residuals of a function, forward and backward."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.testing._jaxpr import count, local_bytes, sent_bytes


@dataclass(frozen=True, repr=False)
class CollectiveCounts:
    """What one device sends, by the names of `jax.lax`, and what it keeps for the backward.

    Attributes:
        forward: how often each collective runs in the forward; absent ones count 0.
        backward: how often each collective runs in the backward alone.
        forward_bytes: bytes that a device sends in the forward.
        backward_bytes: bytes that a device sends in the backward alone.
        residual_bytes: bytes per device kept from forward to backward.

    Example:
        >>> from collections import Counter
        >>> CollectiveCounts(Counter(ppermute=3), Counter(), 1024, 0, 512)
        CollectiveCounts(forward={'ppermute': 3}, backward={}, forward_bytes=1_024,
        backward_bytes=0, residual_bytes=512)
    """

    forward: Counter[str]
    backward: Counter[str]
    forward_bytes: int
    backward_bytes: int
    residual_bytes: int

    def __repr__(self) -> str:
        forward, backward = (dict(sorted(c.items())) for c in (self.forward, self.backward))
        return (
            f"CollectiveCounts(forward={forward}, backward={backward}, "
            f"forward_bytes={self.forward_bytes:_}, backward_bytes={self.backward_bytes:_}, "
            f"residual_bytes={self.residual_bytes:_})"
        )


def count_collectives(
    fn: Callable[..., Any], *args: Any, grad: bool = True, platform: str | None = None
) -> CollectiveCounts:
    """Collectives that `fn` and its transpose run, read from their jaxprs; nothing is compiled.

    A scan counts its body `length` times (and so does `lax.fori_loop` with bounds known while
    tracing); a `lax.cond` counts, for each collective, the branch that runs it most often. Names
    are those of `jax.lax`: `psum_scatter` for the primitive reduce_scatter, and so on. A psum
    that `shard_map` places for a replicated argument is in the backward. XLA may later merge or
    replace collectives: this is what the program asks for, not what a compiler makes of it.

    Bytes are those of operands for a ppermute. XLA's own collectives are charged what the
    bandwidth-optimal ring algorithm sends for `n` devices and a local operand of `b` bytes: an
    all_gather `(n - 1) b`, a psum_scatter or all_to_all `(n - 1) / n b`, a psum `2 (n - 1) / n b`.

    `residual_bytes` counts each distinct array that the function returned by `jax.vjp` holds,
    inputs of `fn` among them where the backward reads them, by the size of the block that a
    `shard_map` in `fn` takes or returns; one that no shard_map touches counts whole. Under
    `jax.jit` of a whole step XLA may keep less, by recomputing.

    To count what a gradient taken *inside* `shard_map` sends, pass the shard_mapped function
    that takes it, with `grad=False`: `forward` then holds both directions.

    Args:
        fn: a function of global arrays, such as a shard_mapped one.
        *args: pytrees of arrays or `jax.ShapeDtypeStruct`s.
        grad: whether to differentiate `fn` with respect to all float arguments. The forward is
            then the one that autodiff runs, the `fwd` rule of a `jax.custom_vjp`.
        platform: where `fn` uses `lax.platform_dependent`, the platform whose branch counts,
            such as "tpu"; when None such a choice counts like `lax.cond`.

    Returns:
        The counts. Without `grad`, or without float arguments or outputs, `backward` is empty
        and `residual_bytes` is 0.

    Raises:
        ValueError: a `lax.while_loop` whose trip count is unknown runs collectives.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> gather = jax.shard_map(
        ...     lambda x: jax.lax.all_gather(x, "x", tiled=True),
        ...     mesh=mesh, in_specs=P("x"), out_specs=P("x"),
        ... )
        >>> count_collectives(gather, jnp.ones(4))
        CollectiveCounts(forward={'all_gather': 1}, backward={'psum_scatter': 1}, forward_bytes=0,
        backward_bytes=0, residual_bytes=0)
    """
    # A new function each time: make_jaxpr caches by function, and fn may read what has changed.
    outputs = jax.eval_shape(lambda *a: fn(*a), *args)
    if not (grad and _floats(args) and _floats(outputs)):
        forward = jax.make_jaxpr(lambda *a: fn(*a))(*args)
        return CollectiveCounts(
            count(forward.jaxpr, platform), Counter(), sent_bytes(forward.jaxpr, platform), 0, 0
        )

    def pull(*args: Any) -> Any:
        def split(*args: Any) -> tuple[list[Any], Any]:
            out = fn(*args)
            return _floats(out), out

        out, pullback, _ = jax.vjp(split, *args, has_aux=True)
        return out, pullback

    forward, (out, pullback) = jax.make_jaxpr(pull, return_shape=True)(*args)
    backward = jax.make_jaxpr(lambda pullback, ct: pullback(ct))(pullback, out)
    residuals = forward.jaxpr.outvars[len(out) :]
    return CollectiveCounts(
        count(forward.jaxpr, platform),
        count(backward.jaxpr, platform),
        sent_bytes(forward.jaxpr, platform),
        sent_bytes(backward.jaxpr, platform),
        local_bytes(forward.jaxpr, list(residuals)),
    )


def _floats(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
