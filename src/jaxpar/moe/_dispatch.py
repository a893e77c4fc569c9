"""Dispatch sends tokens to the devices of their experts, and combine returns the results."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike
from jaxtyping import Float, Int, Int32

from jaxpar.arguments.dtypes import common_dtype, sum_dtype
from jaxpar.axis.axis import Ring
from jaxpar.axis.vma import vary_alike, vary_over, vary_wide, varying_axes
from jaxpar.choose.choice import choose_way
from jaxpar.choose.problem import Problem
from jaxpar.compiler.compat import optimization_barrier
from jaxpar.layers import column_parallel_linear, gated_mlp, row_parallel_linear
from jaxpar.layers._activation import Activation, activate
from jaxpar.moe._capacity import Bounds
from jaxpar.moe._dispatcher import RaggedDispatcher
from jaxpar.moe._local import InSlots, LocalExperts, Pairs, Tokens
from jaxpar.moe._mlp import Experts
from jaxpar.moe._sharding import Axes
from jaxpar.ring.blocks import gather_along, scatter_along

Arrived = tuple[Float[Array, "arrived d"], Int[Array, "arrived k"], Float[Array, "arrived k"]]


@dataclass(frozen=True)
class Exchange(ABC):
    """A dispatch algorithm. `tensor` is the ring that shards hidden features and tokens, if any."""

    name: ClassVar[str]  # shown in profiles

    ring: Ring
    bounds: Bounds
    local: LocalExperts
    tensor: Ring | None

    def apply(
        self, tokens: Tokens, experts: Experts, chunks: int
    ) -> tuple[Float[Array, "rows d"], Int32[Array, ""]]:
        """Sends each chunk of tokens while the experts compute the chunk before.

        Returns the results, and the number of pairs that this device computed.

        With two stages, the next chunk arrives during the first, and earlier results return during
        the second. Unsent tokens pass the barriers too, or a compiler would send them early.
        """
        ends = [len(tokens[0]) * i // chunks for i in range(chunks + 1)]
        sizes = [j - i for i, j in pairwise(ends)]
        # One operation cuts all chunks, so that one joins their gradients, without padding and
        # adding.
        left = list(zip(*(lax.split(x, sizes) for x in tokens), strict=True))
        # All plans come first. Otherwise their small transfers would wait behind the tokens.
        plans = [self.plan(piece) for piece in left]
        if chunks > 1:
            left, plans = optimization_barrier((left, plans))
        results: list[Array] = []
        computed: Any = 0
        following: Any = self.send(left.pop(0), plans[0])
        made: Any = None
        for number, size in enumerate(sizes):
            arrived, following = following, None
            if left:
                following = self.send(left.pop(0), plans[number + 1])
            pairs = self.begin(arrived, experts, size, self.ring.size)
            if self.local.staged:
                pinned = pairs, following, made, left
                pairs, following, made, left = optimization_barrier(pinned)
            back = None if made is None else self.home(made, plans[number - 1])
            made, count = self.finish(pairs, experts)
            if chunks > 1:
                pinned = made, back, following, left
                made, back, following, left = optimization_barrier(pinned)
            results += [] if back is None else [back]
            computed = computed + count
        results.append(self.home(made, plans[-1]))
        return jnp.concatenate(results), computed

    @abstractmethod
    def plan(self, tokens: Tokens) -> Any:
        """Tells all devices what `send` will send."""

    @abstractmethod
    def send(self, tokens: Tokens, plan: Any) -> Arrived:
        """Returns the tokens that have arrived."""

    @abstractmethod
    def home(self, made: Float[Array, "arrived d"], plan: Any) -> Float[Array, "rows d"]:
        """Sends results back; sums them for each token."""

    def begin(self, tokens: Arrived, experts: Experts, sent: int, sources: int) -> Pairs | InSlots:
        """Sorts arrived tokens by expert; in two stages computes hidden features.

        Each of `sources` devices sent at most `sent` tokens.
        """
        if self.tensor is not None:
            tokens, sources = gather(self.tensor, tokens), sources * self.tensor.size
        first = self.ring.index().astype("int32") * self.bounds.local
        pairs = self.bounds.pairs(sent, sources, len(tokens[0]))
        average = self.bounds.average(sent, sources)
        return self.local.begin(tokens, experts, first, pairs, average)

    def finish(
        self, pairs: Pairs | InSlots, experts: Experts
    ) -> tuple[Float[Array, "arrived d"], Int32[Array, ""]]:
        """Returns this device's share of results, and its pairs."""
        out, computed = self.local.finish(pairs, experts), jnp.sum(pairs.sizes, dtype="int32")
        if self.tensor is None:
            return out, computed
        # Every device of the ring has computed these pairs, each a share of the features: one
        # counts them.
        computed = jnp.where(self.tensor.index() == 0, computed, 0)
        return scatter(self.tensor, out), computed


@dataclass(frozen=True)
class Ragged(Exchange):
    """Sends tokens where needed, by a ragged all-to-all."""

    name: ClassVar[str] = "ragged"

    def plan(self, tokens: Tokens) -> Any:
        _, chosen, _ = tokens
        devices = jnp.where(chosen < 0, -1, chosen // self.bounds.local)
        return RaggedDispatcher.from_target_device_ids(devices, axis=self.ring)

    def send(self, tokens: Tokens, plan: Any) -> Arrived:
        capacity = self.bounds.rows(len(tokens[0]))
        (rows, chosen, weights), valid = plan.dispatch(tokens, capacity)
        return rows, jnp.where(valid[:, None], chosen, -1), weights

    def home(self, made: Float[Array, "arrived d"], plan: Any) -> Float[Array, "rows d"]:
        return plan.combine(made, len(made))[0]


@dataclass(frozen=True)
class Gathered(Exchange):
    """Sends every token to all devices."""

    name: ClassVar[str] = "all_gather"

    def plan(self, tokens: Tokens) -> Any:
        """Sends nothing."""

    def send(self, tokens: Tokens, plan: Any) -> Arrived:
        return gather(self.ring, tokens)

    def home(self, made: Float[Array, "arrived d"], plan: Any) -> Float[Array, "rows d"]:
        return scatter(self.ring, made)


def gather(ring: Ring, tree: Any) -> Any:
    if ring.size == 1 or not len(jax.tree.leaves(tree)[0]):
        return tree
    leaves = jax.tree.leaves(tree)
    what = f"gather of {' and '.join(str(x.dtype) for x in leaves)}"
    way = choose_way(Problem("experts", ring, tuple(x.shape for x in leaves), what=what))
    return jax.tree.map(lambda x: gather_along(way, x, 0), vary_alike(ring.names, *tree))


def scatter(ring: Ring, x: Float[Array, "rows d"]) -> Float[Array, "own d"]:
    if ring.size == 1 or not len(x):
        return x
    way = choose_way(Problem("experts", ring, (x.shape,), what=f"scatter of {x.dtype}"))
    (x,) = vary_alike(ring.names, x)
    return scatter_along(way, x, 0)


def apply_shared(
    axes: Axes,
    rows: Float[Array, "rows d"],
    experts: Experts,
    gate: Float[Array, "d 1"] | None,
    activation: Activation,
    precision: PrecisionLike,
) -> Float[Array, "rows d"]:
    if axes.tensor is None:
        out = _apply_whole(rows, experts, activation, precision)
    else:
        options = {"sequence_dim": 0 if axes.sharded else None, "precision": precision}
        out = _apply_sharded(axes.tensor, rows, experts, activation, options)
    if gate is None:
        return out
    share = jax.nn.sigmoid(logits_of(rows, gate, precision))
    return (out.astype(share.dtype) * share).astype(out.dtype)


def logits_of(
    rows: Float[Array, "tokens d"], w: Float[Array, "d columns"], precision: PrecisionLike
) -> Float[Array, "tokens columns"]:
    """Computes logits at least in float32: rounding sways scores."""
    wide = common_dtype(sum_dtype(rows.dtype), sum_dtype(w.dtype))
    w = vary_over(varying_axes(rows), w.astype(wide))
    return lax.dot(rows.astype(wide), w, precision=precision)


def _apply_whole(
    rows: Float[Array, "rows d"],
    experts: Experts,
    activation: Activation,
    precision: PrecisionLike,
) -> Float[Array, "rows d"]:
    axes = varying_axes(rows, experts)

    def linear(
        x: Float[Array, "rows features"],
        w: Float[Array, "features columns"],
        bias: Float[Array, " columns"] | None,
    ) -> Float[Array, "rows columns"]:
        w = vary_over(axes, w)
        if bias is None:  # the result is narrow, and so is its derivative
            return lax.dot(x, w, precision=precision, preferred_element_type=x.dtype)
        wide = sum_dtype(x.dtype)
        y = lax.dot(x, w, precision=precision, preferred_element_type=wide)
        return (y + vary_wide(axes, bias).astype(wide)).astype(x.dtype)

    hidden = linear(rows, experts.up, experts.up_bias)
    gate = None
    if experts.gate is not None:
        gate = linear(rows, experts.gate, experts.gate_bias)
    hidden = activate(activation, hidden, gate).astype(rows.dtype)
    return linear(hidden, experts.down, experts.down_bias)


def _apply_sharded(
    ring: Ring,
    rows: Float[Array, "rows d"],
    experts: Experts,
    activation: Activation,
    options: dict[str, Any],
) -> Float[Array, "rows d"]:
    up, down = experts.up, experts.down
    if experts.gate is not None:
        biases = experts.gate_bias, experts.up_bias, experts.down_bias
        weights = experts.gate, up, down
        return gated_mlp(rows, *weights, ring, activation=activation, biases=biases, **options)
    hidden = column_parallel_linear(rows, up, ring, bias=experts.up_bias, **options)
    hidden = activate(activation, hidden, None).astype(down.dtype)
    return row_parallel_linear(hidden, down, ring, bias=experts.down_bias, **options)
