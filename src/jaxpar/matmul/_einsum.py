"""Checks a call, chooses an algorithm, and runs the einsum."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import Array

from jaxpar.arguments.calls import value_error
from jaxpar.arguments.dtypes import as_dtype, bits_of
from jaxpar.arguments.types import Operand
from jaxpar.axis.axis import Ring
from jaxpar.axis.checks import PARTIAL_SUMS, as_array, check_divides, check_own, check_precision
from jaxpar.axis.quantized import MaybeQuantized, Quantized, values_of
from jaxpar.axis.vma import vary_alike
from jaxpar.choose.choice import choose_ways, may_keep
from jaxpar.choose.problem import Problem
from jaxpar.matmul._labels import Labels, check_ranks, local_sizes
from jaxpar.matmul._product import (
    Arithmetic,
    Out,
    Product,
    dtype_of_products,
    gradients_of_gather,
    gradients_of_scatter,
)
from jaxpar.matmul._ring_einsum import RingEinsum
from jaxpar.matmul._ring_vjp import gather_einsum, scatter_einsum
from jaxpar.matmul._work import flow_of
from jaxpar.ring.seconds import Flow
from jaxpar.ring.ways import Forms


@dataclass(frozen=True)
class EinsumOptions:
    labels: Labels
    ring: Ring
    arithmetic: Arithmetic
    # Gathers again in the backward pass, unless `keep_gathered` is True.
    regather: bool = False
    recomputed: bool = False
    in_layer: bool = False  # a layer's other work runs before and after the einsum
    names: tuple[str, str] = ("lhs", "rhs")  # of the operands, in errors

    @property
    def gathers_again(self) -> bool:
        keep = self.ring.keep_gathered
        return self.regather if keep is None else not keep

    def method(
        self,
        label: str,
        operands: tuple[MaybeQuantized, ...],
        forward: tuple[Flow, ...],
        backward: tuple[Flow, ...] = (),
        *,
        low_bit: bool = False,
        travels: Any = None,
    ) -> RingEinsum:
        shapes = tuple(x.shape for x in operands)
        kind = "projection" if self.in_layer else "matmul"
        what = f"{forward[0].kind} {label} of {self.labels}, {operands[0].dtype}"
        may = not self.recomputed and not self.gathers_again
        keeps = may and may_keep(self.ring)
        problem = Problem(
            kind, self.ring, shapes, forward, backward, what=what, keeps=keeps, keeps_by_jax=may
        )
        way, back = choose_ways(problem)
        underived, _ = choose_ways(replace(problem, backward=()))  # no derivative
        rest = label, self.arithmetic, self.recomputed, low_bit, travels
        method = RingEinsum(way, back, underived, *rest)
        length = forward[0].length // self.ring.size
        if forward[0].kind != "gather" or method.left_to_jax or way.kept(length) is None:
            return method
        # Two naive passes save the operand. In 8 bits JAX cannot derive the pass, so save it here.
        return replace(method, keeps=keeps or (may and way == back and way.derived_by_jax))


def make_call(
    labels: Labels,
    ring: Ring,
    preferred_element_type: Any,
    precision: Any,
) -> EinsumOptions:
    preferred = as_dtype("preferred_element_type", preferred_element_type)
    check_precision(precision)
    return EinsumOptions(labels, ring, Arithmetic(preferred, precision))


def gathered_operand(
    call: EinsumOptions, label: str, lhs: MaybeQuantized, rhs: MaybeQuantized
) -> Operand:
    """Returns the operand sharded along `label`: the only or the smaller."""
    labels = call.labels
    if len(label) != 1 or label not in labels.lhs + labels.rhs:
        raise value_error(
            f"gather={label!r} is not a label of an operand of '{labels}'; "
            f"choose one of {sorted(set(labels.lhs + labels.rhs))}"
        )
    if label not in labels.rhs:
        return "lhs"
    if label not in labels.lhs:
        return "rhs"
    check_ranks(labels, lhs, rhs)
    left, right = lhs.shape[labels.lhs.index(label)], rhs.shape[labels.rhs.index(label)]
    return "lhs" if left <= right else "rhs"


def gather(
    call: EinsumOptions,
    operand: Operand,
    label: str,
    lhs: Any,
    rhs: tuple[Any, ...],
) -> tuple[Array, ...]:
    """Multiplies lhs by each `rhs`, gathering `operand` along `label`."""
    ring, labels = call.ring, call.labels
    # A product has the gathered operand on its left, even if the user gathers rhs.
    swapped = operand == "rhs"
    left, partners = (rhs[0], (lhs,)) if swapped else (lhs, rhs)
    rights = tuple(as_array("lhs" if swapped else "rhs", x) for x in partners)
    seen: Any = jax.ShapeDtypeStruct(left.shape, ring.gathered_as(left.dtype))
    if isinstance(left, Quantized):  # multiplied in the dtype of its partner
        seen = left = replace(left, dtype=rights[0].dtype)
    operands = [(right, seen) if swapped else (seen, right) for right in rights]
    sizes = [local_sizes(labels, *pair, ring, gathered=(operand, label)) for pair in operands]
    preferred = call.arithmetic.preferred_element_type
    dtype = dtype_of_products(seen.dtype, preferred, ring.wire_dtype)
    check_own(call.names[1 if swapped else 0], values_of(left), ring, "a block")
    letters = (labels.rhs, labels.lhs) if swapped else (labels.lhs, labels.rhs)
    product, dim = Product(*letters, labels.out, dtype), letters[0].index(label)
    if isinstance(left, Quantized):
        from jaxpar.axis.scale_blocks import are_whole

        are_whole(left.scales, dim, ring, refused=True)
    left, rights = vary_alike(ring.names, left, rights)
    if (rounding := ring.low_bit(left.dtype)) is not None:
        from jaxpar.axis.rounding import straight_through

        left = straight_through(rounding, left, dim)
    low_bit = isinstance(left, Quantized)
    products, width = [product] * len(rights), bits_of(rights[0].dtype)
    sent = bits_of(left.values.dtype) if low_bit else width  # bits of a number in transfer
    for_left, for_rights = gradients_of_gather(products, left.dtype, [r.dtype for r in rights])
    forth = flow_of("gather", label, ring.size, products, sizes, width, sent, quantized=low_bit)
    rounds = ring.low_bit_sums(left.dtype) is not None
    wire = 8 if rounds else bits_of(ring.wire(left.dtype))
    back = (
        flow_of("scatter", label, ring.size, for_left, sizes, width, wire, quantized=rounds),
        flow_of("gather", label, ring.size, for_rights, sizes, width, sent, quantized=low_bit),
    )
    travels = None if low_bit or seen.dtype == left.dtype else seen.dtype  # None: no cast
    method = call.method(label, (left, *rights), (forth,), back, low_bit=low_bit, travels=travels)
    run = gather_einsum
    if method.keeps:
        from jaxpar.matmul._saved_blocks import gather_and_keep as run  # `auto` takes it on TPUs

    gathered = partial(run, method, tuple(products))
    # The special derivative gathers again by itself. A stationary operand is never gathered.
    stays = method.way.perform(Forms(lambda: False, lambda _: False, lambda: True))
    regather = call.gathers_again and method.left_to_jax and not stays
    return (jax.checkpoint(gathered) if regather else gathered)(left, rights)


def scatter(call: EinsumOptions, label: str, lhs: Array, rhs: Array) -> Out:
    ring, labels = call.ring, call.labels
    sizes = local_sizes(labels, lhs, rhs, ring)
    dim, shape = labels.out.index(label), tuple(sizes[name] for name in labels.out)
    check_divides("the result", shape, dim, ring)
    preferred = call.arithmetic.preferred_element_type
    dtype = dtype_of_products(lhs.dtype, preferred, ring.wire_dtype)
    check_own(" and ".join(call.names), (lhs, rhs), ring, "a product", PARTIAL_SUMS)
    lhs, rhs = vary_alike(ring.names, lhs, rhs)
    product = Product(labels.lhs, labels.rhs, labels.out, dtype)
    width, rounds = bits_of(lhs.dtype), ring.low_bit_sums(dtype) is not None
    sums = 8 if rounds else bits_of(ring.wire(dtype))
    forth = flow_of("scatter", label, ring.size, [product], [sizes], width, sums, quantized=rounds)
    gradients = gradients_of_scatter([product], [(lhs.dtype, rhs.dtype)])
    low_bit = ring.low_bit_cotangents(dtype) is not None
    sent = 8 if low_bit else bits_of(dtype)
    back = flow_of(
        "gather", label, ring.size, gradients, [sizes] * 2, width, sent, quantized=low_bit
    )
    method = call.method(label, (lhs, rhs), (forth,), (back,), low_bit=low_bit or rounds)
    return scatter_einsum(method, (product,), ((lhs, rhs),))


def all_reduce(call: EinsumOptions, lhs: Array, rhs: Array) -> Out:
    ring, labels = call.ring, call.labels
    sizes = local_sizes(labels, lhs, rhs, ring)
    preferred = call.arithmetic.preferred_element_type
    dtype = dtype_of_products(lhs.dtype, preferred, ring.wire_dtype)
    check_own(" and ".join(call.names), (lhs, rhs), ring, "a product", PARTIAL_SUMS)
    lhs, rhs = vary_alike(ring.names, lhs, rhs)
    product = Product(labels.lhs, labels.rhs, labels.out, dtype)
    label, width, wire = labels.out[0], bits_of(lhs.dtype), bits_of(ring.wire(dtype))
    forth = flow_of("all-reduce", label, ring.size, [product], [sizes], width, wire)
    method = call.method(label, (lhs, rhs), (forth,))
    from jaxpar.matmul._all_reduce import all_reduce_einsum  # a gather or scatter does not need it

    return all_reduce_einsum(method, product, lhs, rhs)
