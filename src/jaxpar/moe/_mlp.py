"""The experts' MLP and its gradients, for several kinds of products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32, Num

from jaxpar.arguments.calls import public, readable, type_error
from jaxpar.arguments.dtypes import common_dtype, sum_dtype
from jaxpar.arguments.lazy_names import open_types
from jaxpar.axis.checks import as_array
from jaxpar.layers._activation import Activation, activate
from jaxpar.moe._group_blocks import Block, block_dot
from jaxpar.moe._grouped import GroupedProduct, Kernels, clear, group_products, rows_product


@readable
class Experts(NamedTuple):
    """The weights of `e` experts, each `(activation(x @ gate) * (x @ up)) @ down`.

    Without a gate: `activation(x @ up) @ down`. With a `jaxpar.layers.GatedActivation`:
    `function(x @ gate, x @ up) @ down`.

    Attributes:
      up: `[e, d, f]`.
      down: `[e, f, d]`.
      gate: `[e, d, f]`, or None.
      up_bias: `[e, f]`, or None.
      gate_bias: `[e, f]`, or None.
      down_bias: `[e, d]`, or None.

    Example:
      >>> Experts(up=jnp.ones((8, 4, 6)), down=jnp.ones((8, 6, 4))).gate is None
      True
    """

    up: Array
    down: Array
    gate: Array | None = None
    up_bias: Array | None = None
    gate_bias: Array | None = None
    down_bias: Array | None = None


if TYPE_CHECKING:
    ExpertsLike = Experts | Mapping[str, Any]
else:
    globals().update(open_types(__name__))


@public
def as_experts(given: ExpertsLike) -> Experts:
    """Returns `Experts` from a mapping with the same keys.

    Args:
      given: a mapping, or `Experts`, which are returned as they are.

    Returns:
      `Experts`.

    Raises:
      TypeError: a key is unknown or missing.

    Example:
      >>> as_experts({"up": jnp.ones((8, 4, 6)), "down": jnp.ones((8, 6, 4))}).up.shape
      (8, 4, 6)
    """
    if isinstance(given, Experts):
        return given
    given_: Any = given
    if not isinstance(given_, Mapping):
        raise type_error(f"experts must be Experts or a mapping, got {type(given).__name__}")
    known = ", ".join(Experts._fields)
    unknown = sorted(map(str, set(given) - set(Experts._fields)))
    if unknown:
        raise type_error(f"experts have no {', '.join(unknown)}; the keys are {known}")
    missing = [key for key in ("up", "down") if given.get(key) is None]
    if missing:
        raise type_error(f"experts lack {' and '.join(missing)}; the keys are {known}")
    return Experts(**given)


def expert_arrays(experts: ExpertsLike, kind: str = "experts") -> Experts:
    weights = present(as_experts(experts))
    return Experts(**{name: as_array(f"{kind}.{name}", w) for name, w in weights.items()})


def present(experts: Experts | None) -> dict[str, Any]:
    fields = {} if experts is None else experts._asdict()
    return {name: w for name, w in fields.items() if w is not None}


class Operands(NamedTuple):
    """The MLP's differentiable inputs. `weights` scale rows of the result."""

    x: Num[Array, "rows d"]
    experts: Experts  # in a block an expert's, without the first dimension
    weights: Float[Array, " rows"] | None


# Rows times up, and rows times gate. The second is None without a gate. Both are None where blocks
# compute them again.
Projected = tuple[Num[Array, "rows f"] | None, Num[Array, "rows f"] | None]


@runtime_checkable
class Products(Protocol):
    def rows(
        self, x: Num[Array, "rows into"], w: Num[Array, "*groups d f"], contracted: int, dtype: Any
    ) -> Num[Array, "rows out"]:
        """Multiplies rows by `[e, d, f]`, along dimension 1 or 2."""
        ...

    def outer(
        self, x: Num[Array, "rows into"], ct: Num[Array, "rows out"], dtype: Any
    ) -> Num[Array, "*groups into out"]:
        """Returns a weight's gradient."""
        ...

    def spread(self, bias: Num[Array, "*groups out"], dtype: Any) -> Num[Array, "#rows out"]: ...

    def total(self, ct: Num[Array, "rows out"], dtype: Any) -> Num[Array, "*groups out"]:
        """Returns a bias's gradient."""
        ...

    def within(self, x: Num[Array, "rows out"]) -> Num[Array, "rows out"]:
        """Clears rows that `outer` and `total` must not read."""
        ...

    def clear(self, x: Num[Array, "rows out"]) -> Num[Array, "rows out"]:
        """Clears rows without an expert."""
        ...


@dataclass(frozen=True)
class Mlp:
    kernels: Kernels
    activation: Activation
    preferred: Any  # the dtype of partial sums; None: the package's rule
    dtype: Any  # of the result

    def activate(
        self, up: Num[Array, "rows f"], gate: Num[Array, "rows f"] | None
    ) -> Num[Array, "rows f"]:
        return activate(self.activation, up, gate)

    def project(
        self,
        on: Products,
        x: Num[Array, "rows d"],
        w: Num[Array, "*groups d f"],
        bias: Num[Array, "*groups f"] | None,
        dtype: Any,
    ) -> Num[Array, "rows f"]:
        """Projects rows. Biases are added before rounding."""
        if bias is None:
            return on.rows(x, w, 1, dtype)
        wide = sum_dtype(dtype)
        return (on.rows(x, w, 1, wide) + on.spread(bias, wide)).astype(dtype)

    def forward(self, on: Products, operands: Operands) -> tuple[Num[Array, "rows d"], Projected]:
        x, experts, weights = operands
        hidden, projected = self.begin(on, x, experts, weights)
        return self.finish(on, hidden, experts, weights), projected

    def begin(
        self,
        on: Products,
        x: Num[Array, "rows d"],
        experts: Experts,
        weights: Num[Array, " rows"] | None,
    ) -> tuple[Num[Array, "rows f"], Projected]:
        """Returns weighted hidden rows, and the two projections.

        Weighing results instead would take another pass.
        """
        up = on.clear(self.project(on, x, experts.up, experts.up_bias, self.dtype))
        gate = None
        if experts.gate is not None:
            gate = on.clear(self.project(on, x, experts.gate, experts.gate_bias, self.dtype))
        hidden = jax.checkpoint(self.activate)(up, gate)
        # The preferred dtype is for sums and results, not for operands.
        return self._weigh(on, hidden, weights).astype(x.dtype), (up, gate)

    def finish(
        self,
        on: Products,
        hidden: Num[Array, "rows f"],
        experts: Experts,
        weights: Num[Array, " rows"] | None,
    ) -> Num[Array, "rows d"]:
        if experts.down_bias is None:
            return on.clear(on.rows(hidden, experts.down, 1, self.dtype))
        wide = sum_dtype(self.dtype)
        out = on.rows(hidden, experts.down, 1, wide)
        bias = self._weigh(on, on.spread(experts.down_bias, wide), weights)
        return on.clear(out + bias.astype(wide)).astype(self.dtype)

    def _weigh(
        self, on: Products, rows: Num[Array, "#rows out"], weights: Num[Array, " rows"] | None
    ) -> Num[Array, "#rows out"]:
        if weights is None:
            return rows
        wide = common_dtype(sum_dtype(rows.dtype), weights.dtype)
        return rows.astype(wide) * on.clear(weights[:, None].astype(wide))

    def gradients(
        self, on: Products, operands: Operands, projected: Projected, ct: Num[Array, "rows d"]
    ) -> Operands:
        x, experts, weights = operands
        dtypes = jax.tree.map(lambda w: w.dtype, operands)
        hidden, pull = jax.vjp(self.activate, *projected)
        weighted = self._weigh(on, hidden, weights).astype(x.dtype)
        d_hidden = on.rows(ct.astype(x.dtype), experts.down, 2, hidden.dtype)
        d_weights, d_bias = None, ct
        if weights is not None:
            wide = common_dtype(sum_dtype(hidden.dtype), weights.dtype)
            d_weights = jnp.sum(d_hidden.astype(wide) * hidden.astype(wide), axis=1)
            if experts.down_bias is not None:
                bias = on.spread(experts.down_bias, wide)
                d_weights = d_weights + jnp.sum(ct.astype(wide) * bias, axis=1)
                d_bias = self._weigh(on, ct, weights)
            d_weights = on.clear(d_weights[:, None])[:, 0].astype(weights.dtype)
            d_hidden = self._weigh(on, d_hidden, weights).astype(hidden.dtype)
        # Computed rows that `outer` and `total` sum, `weighted` below too, are set to 0 where there
        # is no expert. There, arithmetic on rows of anything may have made NaN.
        d_up, d_gate = (None if d is None else on.within(d) for d in pull(d_hidden))
        d_x = _back(on, experts.up, d_up, x.dtype)
        if d_gate is not None:
            d_x = d_x + _back(on, experts.gate, d_gate, x.dtype)

        def of_weight(rows: Array, d: Any, dtype: Any) -> Any:
            return None if d is None else on.outer(rows, d.astype(x.dtype), dtype)

        def of_bias(d: Any, dtype: Any) -> Any:
            return None if d is None or dtype is None else on.total(d, dtype)

        of = dtypes.experts
        d_experts = Experts(
            up=of_weight(x, d_up, of.up),
            down=of_weight(on.within(weighted), ct, of.down),
            gate=of_weight(x, d_gate, of.gate),
            up_bias=of_bias(d_up, of.up_bias),
            gate_bias=of_bias(d_gate, of.gate_bias),
            down_bias=of_bias(d_bias, of.down_bias),
        )
        return Operands(on.clear(d_x), d_experts, d_weights)


def _back(on: Products, w: Any, ct: Any, dtype: Any) -> Num[Array, "rows d"]:
    return on.rows(ct.astype(w.dtype), w, 2, dtype)


@dataclass(frozen=True)
class WholeProducts:
    mlp: Mlp
    group_sizes: Int32[Array, " groups"]
    length: int

    def rows(
        self, x: Num[Array, "rows into"], w: Num[Array, "groups d f"], contracted: int, dtype: Any
    ) -> Num[Array, "rows out"]:
        product = GroupedProduct(
            self.mlp.kernels, contracted, self.mlp.preferred, dtype, cleared=False
        )
        return rows_product(product, x, w, self.group_sizes)

    def outer(
        self, x: Num[Array, "rows into"], ct: Num[Array, "rows out"], dtype: Any
    ) -> Num[Array, "groups into out"]:
        product = GroupedProduct(self.mlp.kernels, 1, self.mlp.preferred, dtype, cleared=False)
        return group_products(product, x, ct, self.group_sizes)

    def spread(self, bias: Num[Array, "groups out"], dtype: Any) -> Num[Array, "rows out"]:
        return spread_rows(self.mlp.kernels, self.length, dtype, bias, self.group_sizes)

    def total(self, ct: Num[Array, "rows out"], dtype: Any) -> Num[Array, "groups out"]:
        return sum_rows(self.mlp.kernels, ct, self.group_sizes, dtype)

    def within(self, x: Num[Array, "rows out"]) -> Num[Array, "rows out"]:
        return self.clear(x)

    def clear(self, x: Num[Array, "rows out"]) -> Num[Array, "rows out"]:
        return clear(x, self.group_sizes)


@dataclass(frozen=True)
class BlockProducts:
    mlp: Mlp
    block: Block

    def rows(
        self, x: Num[Array, "rows into"], w: Num[Array, "d f"], contracted: int, dtype: Any
    ) -> Num[Array, "rows out"]:
        return self._dot(x, w, 1, contracted - 1).astype(dtype)

    def outer(
        self, x: Num[Array, "rows into"], ct: Num[Array, "rows out"], dtype: Any
    ) -> Num[Array, "into out"]:
        return self._dot(x, ct, 0, 0)  # not rounded before all blocks are summed

    def spread(self, bias: Num[Array, " out"], dtype: Any) -> Num[Array, "1 out"]:
        return bias.astype(dtype)[None]

    def total(self, ct: Num[Array, "rows out"], dtype: Any) -> Num[Array, " out"]:
        return jnp.sum(ct.astype(sum_dtype(ct.dtype)), axis=0)

    def within(self, x: Num[Array, "rows out"]) -> Num[Array, "rows out"]:
        return jnp.where(self.block.inside, x, 0)

    def clear(self, x: Num[Array, "rows out"]) -> Num[Array, "rows out"]:
        return x  # only the group's rows are placed

    def _dot(
        self, left: Num[Array, "_ _"], right: Num[Array, "_ _"], left_dim: int, right_dim: int
    ) -> Num[Array, "_ _"]:
        dims, precision = (left_dim, right_dim), self.mlp.kernels.precision
        return block_dot(left, right, dims, self.mlp.preferred, precision)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def spread_rows(
    kernels: Kernels,
    rows: int,
    dtype: Any,
    bias: Num[Array, "groups out"],
    group_sizes: Int32[Array, " groups"],
) -> Num[Array, "{rows} out"]:
    """Returns rows' biases. Rows past the last group hold anything."""
    ends = jnp.cumsum(group_sizes, dtype="int32")
    group = jnp.sum(lax.iota("int32", rows)[:, None] >= ends[None, :], axis=1, dtype="int32")
    return jnp.take(bias, group, axis=0, mode="clip").astype(dtype)


def sum_rows(
    kernels: Kernels, ct: Num[Array, "rows out"], group_sizes: Int32[Array, " groups"], dtype: Any
) -> Num[Array, "groups out"]:
    # In full precision, like a sum. A matmul may have less.
    exact = Kernels(kernels.implementation, lax.Precision.HIGHEST)
    ones = jnp.ones_like(ct[:, :1])
    sums: Any = group_products(GroupedProduct(exact, 1, None, dtype), ones, ct, group_sizes)
    return sums[:, 0]


def _spread_fwd(kernels: Kernels, rows: int, dtype: Any, *operands: Array) -> Any:
    return spread_rows(kernels, rows, dtype, *operands), operands


def _spread_bwd(kernels: Kernels, rows: int, dtype: Any, residuals: Any, ct: Array) -> Any:
    bias, group_sizes = residuals
    return sum_rows(kernels, ct, group_sizes, bias.dtype), None


spread_rows.defvjp(_spread_fwd, _spread_bwd)
