"""FLOPs of the matmuls of a traced program, kernels included."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from jax.extend import core

from jaxpar.tools.program.constants import Known, bodies, learned, opened
from jaxpar.tools.program.costs import Kernels, Shapes
from jaxpar.tools.program.kernels import KERNELS, PRODUCTS, Kernel, dot_flops, kernel_of
from jaxpar.tools.toolkit_api import manual_axes, subjaxprs

Results = Sequence[core.Var | core.Literal]


def device_flops(jaxpr: core.ClosedJaxpr, devices: int) -> float:
    """Returns the FLOPs of all matmuls that each of `devices` runs.

    Outside of `shard_map`s, all devices share the work. A loop of unknown length counts once.
    """
    inner, known = opened(jaxpr)
    return _count(inner, known, 1.0 / devices, inner.outvars)


def _count(jaxpr: core.Jaxpr, known: Known, share: float, results: Results) -> float:
    # Only what `results` need counts: a compiler drops the rest, as a gradient's forward pass.
    needed: set[core.Var] = {var for var in results if not isinstance(var, core.Literal)}
    total, counted_dots = 0.0, set[tuple[Any, ...]]()
    known = learned(jaxpr, known)
    for eqn in reversed(jaxpr.eqns):
        if not eqn.effects and needed.isdisjoint(eqn.outvars):
            continue
        name = eqn.primitive.name
        if name in PRODUCTS:
            same = (*map(id, eqn.invars), str(eqn.params))  # compilers compute equal ones once
            total += 0.0 if same in counted_dots else share * dot_flops(eqn)
            counted_dots.add(same)
        elif name in KERNELS:
            total += share * kernel_of(eqn, known).flops
        elif name in ("ragged_dot", "ragged_dot_general"):
            lhs, out = _shapes(eqn)
            total += share * 2.0 * prod(lhs) * prod(out[-1:])
        else:
            inner = [
                _count(sub, handed, _share(eqn, share), _needed_inside(eqn, sub, needed))
                for sub, handed in bodies(eqn, known)
            ]
            counted = max(inner, default=0.0) if name == "cond" else sum(inner)
            total += counted * (eqn.params["length"] if name == "scan" else 1)
        needed |= {var for var in eqn.invars if not isinstance(var, core.Literal)}
    return total


def _needed_inside(eqn: core.JaxprEqn, sub: core.Jaxpr, needed: set[core.Var]) -> Results:
    # The next iteration may need what a loop carries.
    if eqn.primitive.name in ("scan", "while") or len(sub.outvars) != len(eqn.outvars):
        return sub.outvars
    return [inside for inside, out in zip(sub.outvars, eqn.outvars, strict=True) if out in needed]


def _share(eqn: core.JaxprEqn, share: float) -> float:
    if eqn.primitive.name != "shard_map":
        return share
    mesh = eqn.params["mesh"]
    return share * prod(mesh.shape[name] for name in manual_axes(eqn.params))


@dataclass(frozen=True)
class Dot:
    m: int
    k: int
    n: int
    width: int


def dots_of(jaxpr: core.ClosedJaxpr) -> list[Dot]:
    # Shapes are local inside of `shard_map`s.
    dots: list[Dot] = []
    for eqn in _named("dot_general", jaxpr.jaxpr):
        (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
        lhs, out = _shapes(eqn)
        k, b = (prod(lhs[dim] for dim in dims) for dims in (contracted, batch))
        m = prod(lhs) // max(1, k * b)
        width = max(var.aval.dtype.itemsize for var in eqn.invars)  # type: ignore[attr-defined]
        dots.append(Dot(m, k, prod(out) // max(1, m * b), width))
    return dots


def _named(primitive: str, jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == primitive:
            yield eqn
        else:
            for inner in subjaxprs(eqn.params):
                yield from _named(primitive, inner)


def _shapes(eqn: core.JaxprEqn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lhs: Any = eqn.invars[0].aval
    out: Any = eqn.outvars[0].aval
    return lhs.shape, out.shape


# -- kernels --------------------------------------------------------------------------------------


def kernels_in(jaxpr: core.ClosedJaxpr) -> Kernels:
    """Returns kernels by shapes, without ambiguous shapes."""
    by_shapes: dict[tuple[Shapes, Shapes], set[Kernel]] = {}
    for eqn, known in _kernels(*opened(jaxpr)):
        shapes = (_all_shapes(eqn.invars), _all_shapes(eqn.outvars))
        by_shapes.setdefault(shapes, set()).add(kernel_of(eqn, known))
    return {shapes: kernels.pop() for shapes, kernels in by_shapes.items() if len(kernels) == 1}


def _kernels(jaxpr: core.Jaxpr, known: Known) -> Iterator[tuple[core.JaxprEqn, Known]]:
    known = learned(jaxpr, known)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in KERNELS:
            yield eqn, known
        else:
            for inner, handed in bodies(eqn, known):
                yield from _kernels(inner, handed)


def _all_shapes(atoms: Sequence[core.Var | core.Literal]) -> Shapes:
    avals: list[Any] = [atom.aval for atom in atoms]
    return tuple(aval.shape for aval in avals)
