"""How tokens reach the experts of other devices, and how what those make of them gets home."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpar._axis import Ring
from jaxpar._compat import optimization_barrier
from jaxpar._dtypes import addition_dtype
from jaxpar.moe._bounds import Bounds
from jaxpar.moe._dispatcher import RaggedDispatcher
from jaxpar.moe._local import LocalExperts, Pairs, Tokens
from jaxpar.moe._mlp import Experts


@dataclass(frozen=True)
class Exchange(ABC):
    """What the ways have in common: chunks, and how a device computes its own experts.

    `tensor` is the ring over which the hidden features of each expert are sharded, if tokens are
    sharded over it too: those that have arrived are gathered over it.
    """

    ring: Ring
    bounds: Bounds
    local: LocalExperts
    tensor: Ring | None

    def apply(self, tokens: Tokens, experts: Experts, chunks: int) -> tuple[Array, Array]:
        """Sends tokens in chunks, each while the experts compute the one before.

        Returns the results, [t, d], and the number of pairs that this device computed.

        Where experts are applied in two stages, the next chunk comes during the first, and what
        was made of the chunk before goes home during the second; else both do during the one. What
        is not yet sent passes through the barriers too, or a compiler would start it before its
        stage.
        """
        ends = [len(tokens[0]) * i // chunks for i in range(chunks + 1)]
        left = [jax.tree.map(lambda x: x[i:j], tokens) for i, j in pairwise(ends)]  # noqa: B023
        # All plans first: what they send would wait behind the tokens.
        plans = [self.plan(piece) for piece in left]
        if chunks > 1:
            left, plans = optimization_barrier((left, plans))
        results: list[Array] = []
        computed: Any = 0
        following: Any = self.send(left.pop(0), plans[0])
        made: Any = None
        for number, size in enumerate(j - i for i, j in pairwise(ends)):
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
    def send(self, tokens: Tokens, plan: Any) -> Tokens:
        """Returns the tokens that have arrived here."""

    @abstractmethod
    def home(self, made: Array, plan: Any) -> Array:
        """Sends what was made of tokens back, and sums it for each token."""

    def begin(self, tokens: Tokens, experts: Experts, sent: int, sources: int) -> Pairs:
        """Takes tokens into the hidden features of this device's experts.

        Each of `sources` devices sent at most `sent` of them.
        """
        if self.tensor is not None:
            tokens, sources = gather(self.tensor, tokens), sources * self.tensor.size
        first = self.ring.index().astype("int32") * self.bounds.local
        return self.local.begin(
            tokens, experts, first, self.bounds.pairs(sent, sources, len(tokens[0]))
        )

    def finish(self, pairs: Pairs, experts: Experts) -> tuple[Array, Array]:
        """Returns this device's share of the results, and how many pairs it is made of."""
        out, computed = self.local.finish(pairs, experts), jnp.sum(pairs.sizes, dtype="int32")
        if self.tensor is None:
            return out, computed
        # Every device of the ring has computed these pairs, each a share of their features.
        computed = jnp.where(self.tensor.index() == 0, computed, 0)
        return scatter(self.tensor, out), computed


@dataclass(frozen=True)
class Ragged(Exchange):
    """Each token is sent to the devices that it needs, by a ragged all-to-all."""

    def plan(self, tokens: Tokens) -> Any:
        """Tells all devices how many tokens will come from where."""
        _, chosen, _ = tokens
        devices = jnp.where(chosen < 0, -1, chosen // self.bounds.local)
        return RaggedDispatcher.from_target_device_ids(devices, axis=self.ring.names)

    def send(self, tokens: Tokens, plan: Any) -> Tokens:
        """Returns the tokens that have arrived here."""
        capacity = self.bounds.rows(len(tokens[0]))
        (rows, chosen, weights), valid = plan.dispatch(tokens, capacity)
        return rows, jnp.where(valid[:, None], chosen, -1), weights

    def home(self, made: Array, plan: Any) -> Array:
        """Sends the rows that were made of those that arrived, and sums them for each token."""
        return plan.combine(made, len(made))[0]


@dataclass(frozen=True)
class Gathered(Exchange):
    """Every token is sent to all devices, which ignore what is not for them."""

    def plan(self, tokens: Tokens) -> Any:
        """There is nothing to tell."""

    def send(self, tokens: Tokens, plan: Any) -> Tokens:
        """Returns the tokens of all devices."""
        return gather(self.ring, tokens)

    def home(self, made: Array, plan: Any) -> Array:
        """Sums what all devices made of each token."""
        return scatter(self.ring, made)


def gather(ring: Ring, tree: Any) -> Any:
    """The rows of all devices of the ring."""
    if ring.size == 1 or not len(jax.tree.leaves(tree)[0]):
        return tree
    return jax.tree.map(lambda x: lax.all_gather(x, ring.names, tiled=True), tree)


def scatter(ring: Ring, x: Array) -> Array:
    """The sums over the ring of this device's own rows."""
    if ring.size == 1 or not len(x):
        return x
    wide = x.astype(ring.wire_dtype or addition_dtype(x.dtype))
    return lax.psum_scatter(wide, ring.names, tiled=True).astype(x.dtype)
