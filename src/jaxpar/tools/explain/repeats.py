"""Rewrites programs so that repeated collectives run once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxpar.tools.explain.rewrite import Change, Handler, bound, evaluated
from jaxpar.tools.toolkit_api import COLLECTIVES, LAX_NAMES, type_of, varying_axes


def hoisted(jaxpr: core.Jaxpr) -> dict[int, Handler]:
    return {
        place: _hoist
        for place, eqn in enumerate(jaxpr.eqns)
        if eqn.primitive.name == "scan" and _of_constants(eqn)
    }


def _of_constants(scan: core.JaxprEqn) -> dict[int, int]:
    """Returns each loop-invariant collective's constant."""
    body, (count, _) = scan.params["jaxpr"].jaxpr, _counts(scan)
    constants = {var: number for number, var in enumerate(body.invars[:count])}
    return {
        place: constants[eqn.invars[0]]
        for place, eqn in enumerate(body.eqns)
        if is_collective(eqn) and len(eqn.invars) == 1 and eqn.invars[0] in constants
    }


def _counts(scan: core.JaxprEqn) -> tuple[int, int]:
    body = scan.params["jaxpr"].jaxpr

    def sliced(whole: Sequence[Any], parts: Sequence[Any]) -> int:
        return sum(
            len(type_of(x).shape) > len(type_of(part).shape)
            for x, part in zip(whole, parts, strict=True)
        )

    carried = len(body.outvars) - sliced(scan.outvars, body.outvars)
    return len(body.invars) - sliced(scan.invars, body.invars) - carried, carried


def _hoist(scan: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    params = scan.params
    closed, (consts, carried) = params["jaxpr"], _counts(scan)
    body = closed.jaxpr
    sent = {
        place: bound(body.eqns[place], [operands[number]])
        for place, number in _of_constants(scan).items()
    }
    change = Change(
        lambda jaxpr: (
            {place: partial(_given, results) for place, results in sent.items()}
            if jaxpr is body
            else {}
        )
    )

    def trip(carry: Any, xs: Any) -> Any:
        outputs = evaluated(body, closed.consts, [*operands[:consts], *carry, *xs], change)
        return outputs[:carried], outputs[carried:]

    last, stacked = lax.scan(
        trip,
        operands[consts : consts + carried],
        operands[consts + carried :],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*last, *stacked]


def kept(jaxpr: core.Jaxpr) -> dict[int, Handler]:
    """Returns handlers that reuse the forward pass's results."""
    numbers = _Numbers(jaxpr)
    results: dict[int, Sequence[Any]] = {}  # of forward collectives, by their number
    handlers: dict[int, Handler] = {}
    for place, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "remat2" or not eqn.params["differentiated"]:
            continue
        inner = eqn.params["jaxpr"]
        inside = _Numbers(inner, numbers, eqn.invars)
        repeated = {
            n: inside.of[other.outvars[0]]
            for n, other in enumerate(inner.eqns)
            if is_collective(other) and inside.of[other.outvars[0]] in numbers.collectives
        }
        if not repeated:
            continue
        for number in repeated.values():
            handlers[numbers.collectives[number]] = partial(_noted, results, number)
        handlers[place] = partial(_with_results, results, repeated)
    return handlers


def _noted(
    results: dict[int, Sequence[Any]], number: int, eqn: core.JaxprEqn, operands: list[Any]
) -> Sequence[Any]:
    results[number] = [_as_kept(x) for x in bound(eqn, operands)]
    return results[number]


def _as_kept(x: Any) -> Any:
    # jax.checkpoint saves a residual with a pass over memory.
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    figures = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, exponent_bits=figures.nexp, mantissa_bits=figures.nmant)


def _with_results(
    results: dict[int, Sequence[Any]],
    repeated: dict[int, int],
    eqn: core.JaxprEqn,
    operands: list[Any],
) -> Sequence[Any]:
    inner = eqn.params["jaxpr"]
    kept = {n: list(results[k]) for n, k in repeated.items()}
    # The lowering of remat2 has barriers too. Without them the compiler would save the rest.
    operands, kept = _behind_barriers((operands, kept))
    handlers: dict[int, Handler] = {n: partial(_given, values) for n, values in kept.items()}
    return evaluated(inner, (), operands, Change(lambda jaxpr: handlers if jaxpr is inner else {}))


def _behind_barriers(tree: Any) -> Any:
    # Leaves of the same varying axes share a barrier.
    leaves, structure = jax.tree.flatten(tree)
    alike: dict[frozenset[str], list[int]] = {}
    for place, leaf in enumerate(leaves):
        alike.setdefault(varying_axes(leaf), []).append(place)
    for places in alike.values():
        passed = lax.optimization_barrier([leaves[place] for place in places])
        for place, leaf in zip(places, passed, strict=True):
            leaves[place] = leaf
    return structure.unflatten(leaves)


def _given(results: Sequence[Any], eqn: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    return results


def is_collective(eqn: core.JaxprEqn) -> bool:
    name = eqn.primitive.name
    return LAX_NAMES.get(name, name) in COLLECTIVES


class _Numbers:
    """Numbers variables; equal values get equal numbers."""

    def __init__(
        self, jaxpr: core.Jaxpr, outer: _Numbers | None = None, invars: Sequence[Any] = ()
    ) -> None:
        self.table: dict[Any, int] = {} if outer is None else dict(outer.table)
        self.of: dict[core.Var, int] = {}
        self.collectives: dict[int, int] = {}  # the places of collectives, by their number
        known = [outer.number(x) for x in invars] if outer else map(self._new, jaxpr.invars)
        self.of.update(zip(jaxpr.invars, known, strict=True))
        for place, eqn in enumerate(jaxpr.eqns):
            operands = tuple(map(self.number, eqn.invars))
            params = tuple((key, str(value)) for key, value in eqn.params.items())
            for n, var in enumerate(eqn.outvars):
                self.of[var] = self._new((eqn.primitive.name, params, operands, n))
            if is_collective(eqn):
                self.collectives.setdefault(self.of[eqn.outvars[0]], place)

    def number(self, x: core.Var | core.Literal) -> int:
        if isinstance(x, core.Literal):
            return self._new(("literal", str(x.val), str(x.aval)))
        return self.of[x] if x in self.of else self._new(x)

    def _new(self, key: Any) -> int:
        return self.table.setdefault(key, len(self.table))
