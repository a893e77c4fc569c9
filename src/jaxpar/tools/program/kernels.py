"""A Pallas kernel's computation, from its traced program and grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jaxtyping import Bool, Int

from jaxpar.tools.program.constants import Atom, Known, bodies, opened, value_of

KERNELS = ("pallas_call", "mpmd_map")  # JAX's names of kernels with a grid, and on several cores
PRODUCTS = ("dot_general", "scaled_dot", "scaled_matmul_wrapper")
MOST_STEPS = 1 << 20  # of a grid; in a larger grid all blocks count as run

Steps = Bool[np.ndarray, " steps"]
# By the number of a grid's dimension, or by the name of an axis of cores.
Places = Mapping[int | str, Int[np.ndarray, " steps"]]

_SCALAR: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "neg": np.negative,
    "div": lambda x, y: _divided(np.asarray(x), np.where(y == 0, 1, y)),
    "sign": np.sign,
    "rem": lambda x, y: np.fmod(x, np.where(y == 0, 1, y)),
    "select_n": lambda which, *cases: np.choose(np.asarray(which).astype(int), cases),
    "convert_element_type": lambda x: x,  # each result gets its dtype at the end
    "squeeze": lambda x: x,
}
# These move numbers or create them. No vector unit computes them.
_MOVES = {
    *("broadcast_in_dim", "concatenate", "get", "iota", "pad", "reshape", "slice", "squeeze"),
    *("swap", "tile", "broadcast", "expand_dims", "copy", "masked_load", "masked_swap", "repeat"),
}


@dataclass(frozen=True)
class Kernel:
    flops: float = 0.0  # of its matmuls, 8-bit ones count half
    numbers: float = 0.0  # single results of vector operations
    is_least: bool = False  # loops or a grid of unknown length count once
    moved: float = inf  # the most bytes of the blocks that its grid can visit
    copied: float = 0.0  # the most bytes of the copies that it starts itself

    def __add__(self, other: Kernel) -> Kernel:
        flops, numbers = self.flops + other.flops, self.numbers + other.numbers
        is_least, copied = self.is_least or other.is_least, self.copied + other.copied
        return Kernel(flops, numbers, is_least, copied=copied)

    def times(self, count: int) -> Kernel:
        flops, numbers, copied = (count * x for x in (self.flops, self.numbers, self.copied))
        return replace(self, flops=flops, numbers=numbers, copied=copied)


def kernel_of(eqn: core.JaxprEqn, known: Known) -> Kernel:
    """Returns what a Pallas kernel computes.

    A branch counts in the steps that take it, if the grid and known operands decide. If data
    decide, the largest branch counts in all steps. The kernel's own estimate counts if it is
    smaller, a loop's length is unknown, or several cores share the work.
    """
    has_cores, estimate = "meshes" in eqn.params, eqn.params.get("cost_estimate")
    counted = _on_cores(eqn) if has_cores else _on_grid(eqn, known)
    estimated = float(estimate.flops) if estimate else 0.0  # zero: unknown to its author
    counts = has_cores or counted.is_least or estimated < counted.flops
    return replace(counted, flops=estimated) if estimated and counts else counted


def _on_cores(eqn: core.JaxprEqn) -> Kernel:
    total = Kernel()
    for mesh, jaxpr in zip(eqn.params["meshes"], eqn.params["jaxprs"], strict=True):
        cores = np.indices(tuple(mesh.shape.values())).reshape(len(mesh.shape), -1)
        places = dict(zip(mesh.shape, cores, strict=True))
        total += _computed(*opened(jaxpr), np.ones(cores.shape[1], bool), places)[0]
    return total if total.is_least or not total.copied else replace(total, moved=total.copied)


def _on_grid(eqn: core.JaxprEqn, known: Known) -> Kernel:
    mapping = eqn.params["grid_mapping"]
    # Lengths that are operands come first. A length that depends on data counts as one step.
    bounds = iter([value_of(atom, known) for atom in eqn.invars])
    lengths = [n if isinstance(n, int) else next(bounds) for n in mapping.grid]
    grid, is_known = [1 if n is None else int(n) for n in lengths], None not in lengths
    steps = prod(grid)
    inner, consts = opened(eqn.params["jaxpr"])
    if steps > MOST_STEPS or not is_known:
        each, _ = _computed(inner, consts, np.ones(1, bool), {})
        return each.times(steps) + Kernel(is_least=not is_known)
    first = sum(not isinstance(n, int) for n in mapping.grid)
    operands = eqn.invars[first : first + mapping.num_index_operands]
    read = zip(inner.invars, operands, strict=False)
    values = [(var, value_of(atom, known)) for var, atom in read]
    inside = {**consts, **{var: value for var, value in values if value is not None}}
    # A dimension that `vmap` has added in front has no number in the kernel.
    own_dims = [dim for dim in range(len(grid)) if dim not in mapping.vmapped_dims]
    at = np.unravel_index(np.arange(steps), grid or (1,))
    places: Places = {number: at[dim] for number, dim in enumerate(own_dims)}
    computed, _ = _computed(inner, inside, np.ones(steps, bool), places)
    refs = inner.invars[mapping.num_index_operands :]
    arrays = (*eqn.invars[first + mapping.num_index_operands :], *eqn.outvars)
    blocks = zip(refs, arrays, strict=False)  # without scratch memory
    most = (_width(x) * min(_size(x), steps * _size(ref)) for ref, x in blocks)
    listed = sum(_width(x) * _size(x) for x in operands)
    return replace(computed, moved=float(listed + sum(most)))


def _computed(
    jaxpr: core.Jaxpr, known: Known, active: Steps, places: Places
) -> tuple[Kernel, Known]:
    # Known scalars have an entry per step, or one for all.
    total, values, times = Kernel(), dict(known), int(active.sum())
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in ("program_id", "axis_index"):
            place = places.get(eqn.params["axis" if name == "program_id" else "axis_name"])
            if place is not None:
                values[eqn.outvars[0]] = place
        elif name == "cond":
            total += _branches(eqn, values, active, places)
        elif inner := bodies(eqn, values):
            computed = [_computed(sub, handed, active, places) for sub, handed in inner]
            each = sum((kernel for kernel, _ in computed), Kernel(is_least=name == "while"))
            total += each.times(eqn.params.get("length", 1))
            if name in ("jit", "pjit"):  # such as `//` and `%` of scalars
                (sub, _), (_, behind) = inner[0], computed[0]
                pairs = zip(eqn.outvars, sub.outvars, strict=True)
                results = ((out, value_of(x, behind)) for out, x in pairs)
                values |= {out: value for out, value in results if value is not None}
        elif name in PRODUCTS:
            total += Kernel(flops=dot_flops(eqn)).times(times)
        elif name == "dma_start":
            total += Kernel(copied=_copied(eqn)).times(times)
        elif name.endswith("mma"):  # on a GPU's tensor cores, of references to memory
            total += Kernel(is_least=True)
        elif eqn.outvars:
            if (value := _scalar(eqn, values)) is not None:
                values[eqn.outvars[0]] = value
            most = max(map(_size, (*eqn.invars, *eqn.outvars)))  # for a sum, its operand
            if most > 1 and name not in _MOVES:
                total += Kernel(numbers=float(most)).times(times)
    return total, values


def _branches(eqn: core.JaxprEqn, known: Known, active: Steps, places: Places) -> Kernel:
    branches = bodies(eqn, known)
    which = value_of(eqn.invars[0], known)
    if which is None:
        each = [_computed(sub, handed, active, places)[0] for sub, handed in branches]
        return max(each, key=lambda kernel: (kernel.flops, kernel.numbers, kernel.copied))
    taken = np.clip(np.broadcast_to(which, active.shape).astype(int), 0, len(branches) - 1)
    parts = [
        _computed(sub, handed, active & (taken == number), places)[0]
        for number, (sub, handed) in enumerate(branches)
    ]
    return sum(parts, Kernel())


def _scalar(eqn: core.JaxprEqn, known: Known) -> np.ndarray | None:
    """Returns a scalar of grid and known operands."""
    if _size(eqn.outvars[0]) > 1:
        return None
    if eqn.primitive.name == "get":
        array, indices = value_of(eqn.invars[0], known), eqn.invars[1:]
        values = [value_of(index, known) for index in indices]
        if array is None or len(values) != array.ndim or any(value is None for value in values):
            return None
        return array[tuple(np.asarray(value).astype(int) for value in values)]
    compute, dtype = _SCALAR.get(eqn.primitive.name), getattr(_aval(eqn.outvars[0]), "dtype", None)
    values = [value_of(atom, known) for atom in eqn.invars]
    if compute is None or any(value is None for value in values):
        return None
    result = np.asarray(compute(*values))
    return result.astype(dtype) if isinstance(dtype, np.dtype) else result


def _copied(eqn: core.JaxprEqn) -> float:
    """Returns a copy's bytes: no more than its smaller array has."""
    parts = jax.tree.unflatten(eqn.params["tree"], eqn.invars)
    # A part of an array names it; a tuple has only indices.
    named = [getattr(part, "ref", part) for part in parts if not isinstance(part, tuple)]
    refs = [ref for ref in named if ref is not None][:2]
    in_hbm = sum("hbm" in str(_aval(ref)) or "any" in str(_aval(ref)) for ref in refs)
    return float(max(1, in_hbm) * min(_width(ref) * _size(ref) for ref in refs))


def _divided(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Divides as XLA does, whole numbers towards zero."""
    is_whole = x.dtype.kind in "iub" and by.dtype.kind in "iub"
    return np.trunc(x / by).astype(np.int64) if is_whole else x / by


def dot_flops(eqn: core.JaxprEqn) -> float:
    # That of jax.nn.scaled_matmul has none: [b, m, k] and [b, n, k].
    (contracted, _), _ = eqn.params.get("dimension_numbers", (((2,), (2,)), ()))
    (lhs, rhs), out = eqn.invars[:2], eqn.outvars[0]
    sizes = [_aval(lhs).shape[dim] for dim in contracted]
    width = max(_aval(atom).dtype.itemsize for atom in (lhs, rhs))
    # Narrow operands are faster. Wide ones count as if they were not slower.
    return min(1.0, width / 2) * 2.0 * prod(_aval(out).shape) * prod(sizes)


def _width(atom: Atom) -> int:
    return getattr(getattr(_aval(atom), "dtype", None), "itemsize", 0)


def _size(atom: Atom) -> int:
    return prod(getattr(_aval(atom), "shape", ()))


def _aval(atom: Atom) -> Any:
    return atom.aval
