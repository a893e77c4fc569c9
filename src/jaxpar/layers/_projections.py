"""The matmuls of tensor-parallel layers: weights sharded by columns, and by rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import Array, lax
from jaxtyping import Num

from jaxpar.arguments.calls import type_error, value_error
from jaxpar.arguments.types import Integer
from jaxpar.axis.axis import OF_FSDP, OF_MATMULS, AxisLike, Ring, bind
from jaxpar.axis.checks import as_array, check_dim, check_own
from jaxpar.axis.checks_of_layers import check_sequence_dim
from jaxpar.axis.vma import vary_on_wire, vary_over, varying_axes
from jaxpar.choose.problem import Problem
from jaxpar.choose.row_chunks import choose_row_chunks
from jaxpar.layers._fsdp import add_bias, fsdp_gather, whole_bias
from jaxpar.matmul import _einsum
from jaxpar.matmul._labels import Labels, matmul_labels
from jaxpar.matmul._product import Product, dtype_of_products, multiply
from jaxpar.ring.cuts import even_cuts
from jaxpar.ring.seconds import Flow

Weights = Mapping[str, Array]  # by the names that errors use
Biases = tuple[Array | None, ...]
Options = tuple[Any, Any]  # preferred_element_type, precision
Select = Callable[[str, Array], Array]

SHARDED_SEQUENCE = (
    "shard it in in_specs, or pass sequence_dim=None if all devices have the full sequence"
)


@dataclass(frozen=True)
class Projection:
    ring: Ring
    sequence_dim: Any  # None: the sequence is unsharded, before and after
    fsdp: Ring | None  # the axes that shard weights further
    options: Options

    def columns(
        self,
        x: Array,
        weights: Weights,
        biases: Biases,
        fsdp_dim: Integer,
        select: Select = lambda _, whole: whole,
        shared: tuple[str, ...] = (),
    ) -> tuple[Array, ...]:
        """Multiplies x by each weight, with one gather.

        `select(name, whole)` takes the used columns of a weight or bias. `shared` names weights
        that all devices have.
        """
        along = self._check(x, weights, fsdp_dim)
        if self.sequence_dim is not None:
            check_own("x", x, self.ring, "a part of the sequence", SHARDED_SEQUENCE)
        for name, w in weights.items():
            if name not in shared:
                check_own(name, w, self.ring, "columns")

        def product(
            x: Num[Array, "*tokens d"], shards: tuple[Num[Array, "_ _"], ...]
        ) -> tuple[Num[Array, "..."], ...]:
            whole = self._gather(shards, along)
            return self._into_columns(x, tuple(map(select, weights, whole)))

        results = self._recomputed(product)(x, tuple(weights.values()))
        return tuple(
            y if bias is None else add_bias(y, select(name, self._whole_bias(name, w, bias, along)))
            for y, (name, w), bias in zip(results, weights.items(), biases, strict=True)
        )

    def rows(
        self, x: Array, weights: Weights, bias: Array | None, fsdp_dim: Integer
    ) -> Num[Array, "*tokens columns"]:
        """Multiplies, sums over the axis, adds bias once."""
        along = self._check(x, weights, fsdp_dim)
        ((name, w),) = weights.items()
        check_own(name, w, self.ring, "rows")

        def product(
            x: Num[Array, "*tokens d"], shards: tuple[Num[Array, "_ _"], ...]
        ) -> Num[Array, "*out columns"]:
            (whole,) = self._gather(shards, along)
            return self._out_of_rows(x, whole)

        y = self._recomputed(product)(x, tuple(weights.values()))
        if bias is None:
            return y
        return add_bias(y, self._whole_bias(name, w, bias, along))

    def used_as(self, w: Array) -> Any:
        return w.dtype if self.fsdp is None else self.fsdp.gathered_as(w.dtype)

    def in_chunks(
        self, block: Callable[[Projection, Array], Array], x: Array, weights: tuple[Array, ...]
    ) -> Array:
        """Applies a block of layers to x, in chunks if faster.

        `block(layer, x)` gathers rows, applies all weights to each row alone, and scatters.
        """
        if self.sequence_dim is None or self.fsdp is not None or x.ndim < 2:
            return block(self, x)
        dim: Any = check_sequence_dim("x", self.sequence_dim, x.shape)
        rows, width = x.size // max(1, x.shape[-1]), x.dtype.itemsize
        sizes = [w.size for w in weights]
        last = rows * weights[-1].shape[-1] * width if weights[-1].ndim else 0
        flows = (
            Flow("gather", self._flops(rows, sizes[:-1]), x.size * width, sum(sizes[:-1]) * width),
            Flow("scatter", self._flops(rows, sizes[-1:]), last, sizes[-1] * width),
        )
        shapes, what = (x.shape, *(w.shape for w in weights)), f"a block of {x.dtype}"
        problem = Problem("projection", self.ring, shapes, flows, what=what)
        cuts = even_cuts(x.shape[dim], choose_row_chunks(problem))
        if len(cuts) < 2:
            return block(self, x)
        at_once = replace(self, ring=replace(self.ring, mode="naive"))
        parts = [lax.slice_in_dim(x, start, start + size, axis=dim) for start, size in cuts]
        return lax.concatenate([block(at_once, part) for part in parts], dim)

    def _flops(self, rows: int, sizes: list[int]) -> float:
        return 2.0 * rows * self.ring.size * sum(sizes)

    def _into_columns(
        self, x: Num[Array, "*tokens d"], weights: tuple[Num[Array, "d _"], ...]
    ) -> tuple[Num[Array, "..."], ...]:
        dim = check_sequence_dim("x", self.sequence_dim, x.shape)
        labels, call = self._call(x, *weights)
        if dim is not None:
            return _einsum.gather(call, "lhs", labels.lhs[dim], x, weights)
        preferred, wire = call.arithmetic.preferred_element_type, self.ring.wire_dtype
        dtype = dtype_of_products(x.dtype, preferred, wire)
        product = Product(labels.lhs, labels.rhs, labels.out, dtype)
        # The derivative adds up all weights' parts in float32, and sums over the axis.
        axes = varying_axes(x, weights, self.ring.index())
        wide = vary_on_wire(axes, x, wire)
        return tuple(
            multiply(call.arithmetic, product, wide.astype(x.dtype), w, dtype)
            for w in vary_over(axes, weights)
        )

    def _out_of_rows(
        self, x: Num[Array, "*tokens d"], w: Num[Array, "d columns"]
    ) -> Num[Array, "*out columns"]:
        dim = check_sequence_dim("x", self.sequence_dim, x.shape)
        labels, call = self._call(x, w)
        if dim is None:
            return _einsum.all_reduce(call, x, w)
        return _einsum.scatter(call, labels.out[dim], x, w)

    def _call(self, x: Array, *weights: Array) -> tuple[Labels, _einsum.EinsumOptions]:
        labels = matmul_labels(x, *weights)
        call = _einsum.make_call(labels, self.ring, *self.options)
        return labels, replace(call, recomputed=self.fsdp is not None, in_layer=True)

    def _recomputed(self, product: Callable[..., Any]) -> Callable[..., Any]:
        # The recomputed product itself is dead code.
        return product if self.fsdp is None else jax.checkpoint(product)

    def _gather(
        self, shards: tuple[Num[Array, "_ _"], ...], along: int
    ) -> tuple[Num[Array, "_ _"], ...]:
        if self.fsdp is None:
            return shards
        return fsdp_gather(shards, self.fsdp, dim=along)

    def _whole_bias(
        self, name: str, w: Num[Array, "_ columns"], bias: Array, along: int
    ) -> Num[Array, " whole"]:
        columns = w.shape[1]  # of a shard; a weight gathered along columns has more
        if self.fsdp is not None and along == 1:
            columns *= self.fsdp.size
        return whole_bias(name, bias, columns, self.fsdp)

    def _check(self, x: Array, weights: Weights, fsdp_dim: Integer) -> int:
        if x.ndim < 1:
            raise value_error("x must be [..., k], got an array without dimensions")
        along = 0
        for name, w in weights.items():
            if w.ndim != 2:
                raise value_error(
                    f"{name} must be [k, m], got local shape {w.shape} with {w.ndim} "
                    "dimensions; reshape it"
                )
            if self.used_as(w) != x.dtype:
                raise type_error(
                    f"x is {x.dtype}{list(x.shape)} and {name} is "
                    f"{(self.fsdp or self.ring).describe_shard(w)}; cast one of them with .astype, "
                    "and choose the dtype of the result with preferred_element_type"
                )
            along = check_dim("fsdp_dim", fsdp_dim, w.shape)
            if self.fsdp is not None:
                check_own(name, w, self.fsdp, "a shard")
            rows, text = w.shape[0], ""
            if self.fsdp is not None and along == 0:
                rows *= self.fsdp.size
                text = f" x {self.fsdp.size} = {rows} gathered over {self.fsdp}"
            if x.shape[-1] != rows:
                other = f", or fsdp_dim={1 - along}" if self.fsdp is not None else ""
                raise value_error(
                    f"x has local shape {x.shape} and {name} {w.shape}, but "
                    f"{x.shape[-1]} columns of x cannot meet {w.shape[0]}{text} rows of {name}; "
                    f"they must be equal: check how both are sharded over {self.ring}{other}"
                )
        return along


def as_weights(weights: Mapping[str, Any]) -> Weights:
    return {name: as_array(name, w) for name, w in weights.items()}


def bind_projection(
    axis: AxisLike,
    sequence_dim: Integer | None,
    fsdp_axis: AxisLike | None,
    options: Options,
) -> Projection:
    ring = bind(axis, takes=OF_MATMULS)
    fsdp = None if fsdp_axis is None else bind(fsdp_axis, "fsdp_axis", takes=OF_FSDP)
    shared = set(ring.names) & set(fsdp.names if fsdp else ())
    if shared:
        raise value_error(
            f"fsdp_axis {fsdp_axis!r} and axis {axis!r} share "
            f"{sorted(shared)}; weights are sharded over both, so name different axes"
        )
    return Projection(ring, sequence_dim, fsdp, options)


def as_biases(argument: str, biases: Any, weights: tuple[str, ...]) -> tuple[Array | None, ...]:
    if biases is None:
        return (None,) * len(weights)
    if not isinstance(biases, tuple) or len(biases) != len(weights):
        error, got = (
            (value_error, len(biases))
            if isinstance(biases, tuple)
            else (type_error, type(biases).__name__)
        )
        raise error(
            f"{argument} must be a tuple of {len(weights)}, an array or None for each "
            f"of {', '.join(weights)}; got {got}"
        )
    pairs = zip(weights, biases, strict=True)
    return tuple(None if b is None else as_array(f"the bias of {name}", b) for name, b in pairs)


def fsdp_pair(fsdp_dim: Any) -> tuple[Any, Any]:
    if not isinstance(fsdp_dim, tuple):
        return fsdp_dim, fsdp_dim
    if len(fsdp_dim) != 2:
        raise value_error(
            f"fsdp_dim must be an integer, or a pair of them for the weights that are "
            f"cut by columns and by rows over axis; got {fsdp_dim}"
        )
    return fsdp_dim
