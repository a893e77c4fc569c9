"""The cross-entropy of a chunk of tokens after another, and its derivative.

A device saves three numbers a token; one pmax and one psum of them give the losses. The derivative
computes logits again.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Shaped

from jaxpar.arguments.dtypes import sum_dtype
from jaxpar.axis.axis import Ring
from jaxpar.axis.vma import checks_varying, vary_alike, vary_over, varying_axes, zeros_alike
from jaxpar.choose.choice import choose_way
from jaxpar.choose.problem import Problem
from jaxpar.ring.blocks import all_reduce, gather_along, scatter_along
from jaxpar.ring.ways import Way

# For each token, in the local columns: the highest logit, the sum of exp(logit - highest), and the
# sum of the logits weighted by the target.
Measured = tuple[Float[Array, " tokens"], Float[Array, " tokens"], Float[Array, " tokens"]]


@dataclass(frozen=True)
class ChunkedLoss:
    ring: Ring
    dim: int | None  # the sharded dimension of x
    vocabulary: int
    chunk: int
    label_smoothing: float
    z_loss: float
    ignore_label: int
    softcap: float | None
    precision: Any

    def way(self, ring: Ring, x: Array) -> Way:
        return choose_way(Problem("loss", ring, (x.shape,), what=str(x.dtype)))

    def whole(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*all d"]:
        if self.dim is None:
            return x
        (x,) = vary_alike(self.ring.names, x)
        return gather_along(self.way(self.ring, x), x, self.dim)

    def of_tokens(
        self, x: Float[Array, "*tokens"], labels: Int[Array, "*tokens"]
    ) -> Float[Array, "*tokens"]:
        """Returns x, 0 for ignored tokens, NaN for wrong labels."""
        ignored = labels == self.ignore_label  # this label is usually no column either
        wrong = ~ignored & ((labels < 0) | (labels >= self.vocabulary))
        # Not a constant NaN: `jax_debug_nans` would stop although nothing is wrong.
        return jnp.where(ignored, 0, x) + jnp.log(jnp.where(wrong, -1, 1).astype(x.dtype))

    def chunks(
        self, x: Shaped[Array, "..."], fill: int = 0, features: int = 0
    ) -> Shaped[Array, "chunks tokens *features"]:
        """Cuts tokens into equal chunks, the last padded."""
        x = x.reshape(-1, *x.shape[x.ndim - features :])
        count = -(-len(x) // self.chunk)
        length = -(-len(x) // count)
        widths = [(0, count * length - len(x)), *[(0, 0)] * features]
        x = jnp.pad(x, widths, constant_values=fill).reshape(count, length, *x.shape[1:])
        return vary_over(self.ring.names, x)

    def products(
        self,
        rows: Float[Array, "tokens d"],
        w: Float[Array, "d columns"],
        labels: Int[Array, " tokens"],
    ) -> tuple[Float[Array, "tokens d"], Float[Array, "tokens columns"]]:
        """Returns rows, 0 if ignored, and their products."""
        # Ignored rows may hold NaN, and NaN times a zero gradient is NaN.
        rows = jnp.where((labels == self.ignore_label)[:, None], 0, rows)
        products = jnp.einsum(
            "td,dv->tv",
            *(rows, w),
            precision=self.precision,
            preferred_element_type=sum_dtype(w.dtype),
        )
        return rows, products

    def logits(
        self,
        columns: Int[Array, "1 columns"],
        products: Float[Array, "tokens columns"],
        bias: Float[Array, " columns"] | None,
    ) -> Float[Array, "tokens columns"]:
        """Returns logits: biased, capped, -inf in padded columns."""
        real = columns < self.vocabulary
        if bias is not None:
            products = products + bias[None].astype(products.dtype)
        if self.softcap is not None:
            # Mask the padding first: a NaN that is masked later has a NaN gradient.
            products = jnp.where(real, products, 0)
            products = self.softcap * jnp.tanh(products / self.softcap)
        return jnp.where(real, products, -jnp.inf)

    def columns(self, w: Float[Array, "d columns"], labels: Array) -> Int[Array, "1 columns"]:
        first = (self.ring.index() * w.shape[1]).astype(labels.dtype)
        return (first + jnp.arange(w.shape[1], dtype=labels.dtype))[None]

    def target(
        self, columns: Int[Array, "1 columns"], labels: Int[Array, " tokens"], dtype: Any
    ) -> Float[Array, "tokens columns"]:
        even = self.label_smoothing / self.vocabulary
        here = columns == labels[:, None]
        return jnp.where(here, 1.0 - self.label_smoothing + even, even).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_losses(
    loss: ChunkedLoss,
    x: Float[Array, "*tokens d"],
    w: Float[Array, "d columns"],
    bias: Float[Array, " columns"] | None,
    labels: Int[Array, "*all"],
) -> Float[Array, "*tokens"]:
    """Computes each token's loss. `labels` are all devices'."""
    # Along the ring w and the bias vary, and x only if it is gathered along a `dim`. Over other
    # axes all operands vary alike.
    return _fwd(loss, x, w, bias, labels)[0]


def _fwd(
    loss: ChunkedLoss,
    x: Float[Array, "*tokens d"],
    w: Float[Array, "d columns"],
    bias: Float[Array, " columns"] | None,
    labels: Int[Array, "*all"],
) -> tuple[Float[Array, "*tokens"], Any]:
    names, columns = loss.ring.names, loss.columns(w, labels)

    def measure(
        _: None, chunk: tuple[Float[Array, "tokens d"], Int[Array, " tokens"]]
    ) -> tuple[None, Measured]:
        _rows, products = loss.products(chunk[0], w, chunk[1])
        logits = loss.logits(columns, products, bias)  # [tokens, columns]
        # The shift cancels in the losses, so second derivatives do not need its derivative.
        highest = lax.stop_gradient(jnp.max(logits, axis=1))
        # If all local columns are padding, -inf - -inf would be NaN.
        below = jnp.exp(logits - jnp.where(highest == -jnp.inf, 0, highest)[:, None])
        target = loss.target(columns, chunk[1], logits.dtype)
        # Logits of other columns may be -inf, and 0 times -inf is NaN.
        aimed = jnp.where((columns < loss.vocabulary) & (target > 0), target * logits, 0)
        return None, (highest, jnp.sum(below, axis=1), jnp.sum(aimed, axis=1))

    tokens = loss.chunks(loss.whole(x), features=1), loss.chunks(labels, loss.ignore_label)
    _, measured = lax.scan(measure, None, tokens)
    highest, total, aimed = (part.reshape(-1)[: labels.size] for part in measured)
    top = lax.pmax(highest, names)
    total, aimed = lax.psum(jnp.stack([total * jnp.exp(highest - top), aimed]), names)
    log_total = jnp.log(total)
    # Subtract the large numbers first: their difference is exact where they are close.
    losses = (log_total + (top - aimed)).reshape(labels.shape)
    if loss.z_loss:
        losses = losses + loss.z_loss * (top + log_total).reshape(labels.shape) ** 2
    losses = loss.of_tokens(losses, labels)
    if loss.dim is not None:
        length = labels.shape[loss.dim] // loss.ring.size
        start = loss.ring.index() * length
        losses = lax.dynamic_slice_in_dim(losses, start, length, loss.dim)
    return losses, (x, w, bias, labels, top, log_total)


def _bwd(
    loss: ChunkedLoss, residuals: Any, ct: Float[Array, "*tokens"]
) -> tuple[Float[Array, "*tokens d"], Float[Array, "d columns"], Any, None]:
    x, w, bias, labels, top, log_total = residuals
    names, columns = loss.ring.names, loss.columns(w, labels)
    padded = loss.vocabulary < w.shape[1] * loss.ring.size
    whole = loss.whole(x)
    if loss.dim is not None:
        ct = lax.all_gather(ct, names, axis=loss.dim, tiled=True)
    elif not checks_varying(names):
        ct = lax.psum(ct, names)  # without types, this is the derivative of a psum
    ct = loss.of_tokens(ct, labels)

    def step(
        total: tuple[Float[Array, "d columns"], Any], chunk: tuple[Array, ...]
    ) -> tuple[tuple[Float[Array, "d columns"], Any], Float[Array, "tokens d"]]:
        rows, labels, top, log_total, ct = chunk
        rows, products = loss.products(rows, w, labels)
        logits, pull = jax.vjp(partial(loss.logits, columns), products, bias)
        target = loss.target(columns, labels, logits.dtype)
        # Subtract step by step: `top + log_total` loses digits in float32 if logits are large.
        # The softmax would then not sum to 1, nor the gradient of the logits to 0.
        softmax = jnp.exp((logits - top[:, None]) - log_total[:, None])
        slope = softmax * (1 + 2 * loss.z_loss * (top + log_total))[:, None] - target
        slope, of_bias = pull(slope * ct[:, None])
        # In the dtype of the operands, like the cotangent of a matmul.
        slope = slope.astype(w.dtype)
        multiply = partial(
            jnp.einsum, precision=loss.precision, preferred_element_type=sum_dtype(w.dtype)
        )
        more = multiply("td,tv->dv", rows, slope), of_bias
        # Padding may be NaN, and 0 times NaN is NaN. The mask becomes a part of this matmul. Before
        # the loop it would copy w.
        real = jnp.where(columns < loss.vocabulary, w, 0) if padded else w
        return jax.tree.map(jnp.add, total, more), multiply("tv,dv->td", slope, real)

    zeros: Any = jax.tree.map(lambda a: zeros_alike(a.shape, sum_dtype(a.dtype), w), (w, bias))
    numbers = (loss.chunks(part) for part in (top, log_total, ct))
    chunks = loss.chunks(whole, features=1), loss.chunks(labels, loss.ignore_label), *numbers
    (dw, of_bias), dx = lax.scan(step, zeros, chunks)
    dx = dx.reshape(-1, dx.shape[-1])[: labels.size].reshape(whole.shape)
    if loss.dim is not None:
        dx = scatter_along(loss.way(loss.ring, dx), dx, loss.dim)
    elif checks_varying(names):
        copied = tuple(name for name in names if name not in varying_axes(x))
        if copied:
            dx = all_reduce(loss.way(loss.ring.over(copied), dx), dx)
    return dx.astype(x.dtype), dw.astype(w.dtype), of_bias, None


chunked_losses.defvjp(_fwd, _bwd)
