"""Replaces a collective and its matmul by jaxpar's overlapped form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jaxpar.tools.explain.rewrite import Handler
from jaxpar.tools.program.sources import Line, line_of
from jaxpar.tools.toolkit_api import LAX_NAMES, Mode, type_of

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Form:
    mode: Mode
    line: Line | None  # only collectives of this line; None: all

    @property
    def edit(self) -> str:
        return (
            "use jaxpar.collective_einsum (all_gather_matmul, matmul_reduce_scatter) with "
            f"mode={self.mode!r} in place of the collective and its matmul"
        )

    def equations(self, jaxpr: core.Jaxpr) -> dict[int, Handler]:
        """Returns handlers for gathers and scatters around matmuls."""
        users = _users(jaxpr)
        handlers: dict[int, Handler] = {}
        for place, eqn in enumerate(jaxpr.eqns):
            if self.line is not None and line_of(eqn) != self.line:
                continue
            dots = [user for _, user in users.get(eqn.outvars[0], ())] if eqn.outvars else []
            if _is_gather(eqn) and dots and all(map(_is_dot, dots)):
                if any(eqn.outvars[0] is x for x in jaxpr.outvars):
                    continue
                handlers[place] = lambda eqn, xs: [_Sharded(xs[0], eqn)]
                for number, _ in users[eqn.outvars[0]]:
                    handlers[number] = self._gathered
        for place, eqn in enumerate(jaxpr.eqns):
            if self.line is not None and line_of(eqn) != self.line:
                continue
            source = _only_source(jaxpr, users, eqn) if _is_scatter(eqn) else None
            if source is not None and source not in handlers:
                handlers[source] = lambda eqn, xs: [_Factors(xs, eqn)]
                handlers[place] = self._scattered
        return handlers

    def _gathered(self, dot: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        from jaxpar.matmul import collective_einsum

        letters = _letters(dot)
        (which,) = [n for n, x in enumerate(operands) if isinstance(x, _Sharded)][:1]
        shard = operands[which]
        gather = letters[which][shard.eqn.params["all_gather_dimension"]]
        values = [x.x if isinstance(x, _Sharded) else x for x in operands]
        left, right = values
        return [
            collective_einsum(
                _subscripts(letters),
                left,
                right,
                shard.eqn.params["axis_name"],
                gather=gather,
                mode=self.mode,
                preferred_element_type=_preferred(dot),
                precision=dot.params["precision"],
            )
        ]

    def _scattered(self, scatter: core.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        from jaxpar.matmul import collective_einsum

        (factors,) = operands
        letters = _letters(factors.eqn)
        left, right = factors.xs
        return [
            collective_einsum(
                _subscripts(letters),
                left,
                right,
                scatter.params["axis_name"],
                scatter=letters[2][scatter.params["scatter_dimension"]],
                mode=self.mode,
                preferred_element_type=_preferred(factors.eqn),
                precision=factors.eqn.params["precision"],
            )
        ]


@dataclass(frozen=True)
class _Sharded:
    """A sharded operand that matmuls gather."""

    x: Any
    eqn: core.JaxprEqn


@dataclass(frozen=True)
class _Factors:
    """The operands of a matmul that reduce-scatters."""

    xs: list[Any]
    eqn: core.JaxprEqn


def overlapped(line: Line | None) -> list[Form]:
    return [Form("bidirectional", line), Form("unidirectional", line)]


def _users(jaxpr: core.Jaxpr) -> dict[core.Var, list[tuple[int, core.JaxprEqn]]]:
    users: dict[core.Var, list[tuple[int, core.JaxprEqn]]] = {}
    for place, eqn in enumerate(jaxpr.eqns):
        for x in {x for x in eqn.invars if not isinstance(x, core.Literal)}:
            users.setdefault(x, []).append((place, eqn))
    return users


def _only_source(jaxpr: core.Jaxpr, users: Any, eqn: core.JaxprEqn) -> int | None:
    """Returns the matmul that only this equation uses."""
    (x,) = eqn.invars
    if isinstance(x, core.Literal) or len(users[x]) > 1 or any(x is y for y in jaxpr.outvars):
        return None
    made = [n for n, other in enumerate(jaxpr.eqns) if any(x is y for y in other.outvars)]
    return made[0] if made and _is_dot(jaxpr.eqns[made[0]]) else None


def _is_gather(eqn: core.JaxprEqn) -> bool:
    name = eqn.primitive.name
    return (
        LAX_NAMES.get(name, name) == "all_gather"
        and eqn.params.get("tiled", False)
        and eqn.params.get("axis_index_groups") is None
    )


def _is_scatter(eqn: core.JaxprEqn) -> bool:
    return (
        eqn.primitive.name == "reduce_scatter"
        and eqn.params["tiled"]
        and eqn.params["axis_index_groups"] is None
    )


def _is_dot(eqn: core.JaxprEqn) -> bool:
    if eqn.primitive.name != "dot_general":
        return False
    left, right = eqn.invars
    return left is not right and type_of(left).dtype == type_of(right).dtype


def _letters(dot: core.JaxprEqn) -> tuple[str, str, str]:
    (left_sums, right_sums), (left_batch, right_batch) = dot.params["dimension_numbers"]
    left = list(_LETTERS[: len(type_of(dot.invars[0]).shape)])
    fresh, rank = iter(_LETTERS[len(left) :]), len(type_of(dot.invars[1]).shape)
    same = dict(zip((*right_sums, *right_batch), (*left_sums, *left_batch), strict=True))
    right = [left[same[n]] if n in same else next(fresh) for n in range(rank)]
    out = [left[n] for n in left_batch]
    out += [x for n, x in enumerate(left) if n not in (*left_sums, *left_batch)]
    out += [x for n, x in enumerate(right) if n not in (*right_sums, *right_batch)]
    return "".join(left), "".join(right), "".join(out)


def _subscripts(letters: tuple[str, str, str]) -> str:
    left, right, out = letters
    return f"{left},{right}->{out}"


def _preferred(dot: core.JaxprEqn) -> Any:
    dtype = dot.params["preferred_element_type"]
    return None if dtype == type_of(dot.invars[0]).dtype else dtype and jnp.dtype(dtype)
