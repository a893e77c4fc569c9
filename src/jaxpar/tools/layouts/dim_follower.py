"""Follows parameters' dimensions through a function.

Elementwise operations join the dimensions that they match, a matmul those that it contracts. A
reshape joins a dimension to its major part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxpar.tools.layouts.classes import Made, OneHot, Tokens, weights_of
from jaxpar.tools.layouts.primitives import Steps, fits

# A primitive without a group here or a method counts as elementwise if its shapes fit.
_REDUCTIONS = (
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
    *("argmax", "argmin"),
)
_LOOPS = ("scan", "while", "cond")
_MATMULS = ("conv_general_dilated", "dot_general", "ragged_dot_general")
_ALONG = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev")


class DimFollower(Steps):
    def follow(
        self, jaxpr: Jaxpr, consts: Sequence[Tokens], args: Sequence[Tokens]
    ) -> list[Tokens]:
        known: dict[Any, Tokens] = dict(zip(jaxpr.constvars, consts, strict=True))
        known |= dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Tokens:  # a variable or a literal
            if isinstance(atom, Literal) or atom not in known:
                described: Any = atom.aval
                return Made(self.fresh(described.shape))
            return known[atom]

        for equation in jaxpr.eqns:
            results = self._equation(equation, [read(atom) for atom in equation.invars])
            for variable, tokens in zip(equation.outvars, results, strict=True):
                known[variable] = tokens
                self._are_together(tokens)
        return [read(atom) for atom in jaxpr.outvars]

    def _are_together(self, tokens: Tokens) -> None:
        for i, a in enumerate(tokens):
            for b in tokens[i + 1 :]:
                self.together.add((a, b))

    def _equation(self, e: Any, args: list[Tokens]) -> list[Tokens]:
        name = e.primitive.name
        if name in _LOOPS:
            return getattr(self, f"_{name}")(e, args)
        if name != "shard_map" and (inner := _body(e)) is not None:
            return self._call(inner, args)
        results, operands = self._primitive(e, args), args
        if name in _MATMULS:
            self.multiplied |= frozenset[str]().union(*map(weights_of, args))
        if name == "dynamic_slice" or (name == "gather" and not self.rows_of(e)):
            operands = args[:1]  # a layer of a stack is a weight, even if data choose it
        if all(isinstance(t, Made) for t in operands):
            weights = frozenset[str]().union(*map(weights_of, operands))
            return [Made.of(tokens, weights) for tokens in results]
        if name == "gather":
            self.looked_up |= weights_of(args[0])
        if name == "eq" and any(isinstance(t, Made) and len(t) > 1 for t in args):
            return [OneHot(results[0])]  # an iota compared with data
        if name == "convert_element_type" and isinstance(args[0], OneHot):
            return [OneHot(results[0])]
        return [tuple(tokens) for tokens in results]

    def _primitive(self, e: Any, args: list[Tokens]) -> list[Tokens]:
        name = e.primitive.name
        shapes = [tuple(atom.aval.shape) for atom in e.invars]
        out = tuple(e.outvars[0].aval.shape) if e.outvars else ()
        rule = getattr(self, f"_{name.replace('-', '_')}", None)
        if rule is not None:
            return rule(e, args, shapes, out)
        if name in _REDUCTIONS:
            return [self._reduced(e, args[0], e.params["axes"], out)] * len(e.outvars)
        if name in _ALONG:
            along = e.params.get("axis", e.params.get("dimension", e.params.get("dimensions", -1)))
            self._along(e, args[0], np.atleast_1d(along).tolist())
            return [args[0] for _ in e.outvars]
        if all(tuple(v.aval.shape) == out for v in e.outvars) and all(fits(s, out) for s in shapes):
            return [self._elementwise(args, shapes, out)] * len(e.outvars)
        self.unsure[name] += [t for tokens in args for t in tokens]
        return [self.fresh(v.aval.shape) for v in e.outvars]

    def _call(self, inner: ClosedJaxpr | Jaxpr, args: Sequence[Tokens]) -> list[Tokens]:
        jaxpr, consts = (
            (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, [])
        )
        operands = args[len(args) - len(jaxpr.invars) :]
        return self.follow(jaxpr, [Made(self.fresh(np.shape(c))) for c in consts], operands)

    def _scan(self, e: Any, args: list[Tokens]) -> list[Tokens]:
        body, times, length = e.params["jaxpr"], self.times, e.params["length"]
        # Stacked arrays have one dimension more outside. jax's names of their counts vary.
        inside = [(*body.jaxpr.invars,), (*body.jaxpr.outvars,)]
        stacked_in, stacked_out = (
            sum(a.aval.ndim > b.aval.ndim for a, b in zip(outer, inner, strict=True))
            for outer, inner in zip((e.invars, e.outvars), inside, strict=True)
        )
        carry = len(e.outvars) - stacked_out
        consts = len(e.invars) - stacked_in - carry
        self.times *= max(1, length)
        self.stacked.append((length, tuple(t[0] for t in args[consts + carry :])))
        # A loop's carry counts as data, even if it starts from weights.
        carried = map(tuple, args[consts : consts + carry])
        parts = [_with_weights(t[1:], t) for t in args[consts + carry :]]
        results = self._call(body, [*args[:consts], *carried, *parts])
        self.times = times
        self.carried += results[:carry]
        self.join_all(args[consts : consts + carry], results[:carry])
        stacked = [_with_weights((self.new(length), *t), t) for t in results[carry:]]
        return [*results[:carry], *stacked]

    def _while(self, e: Any, args: list[Tokens]) -> list[Tokens]:
        skip, consts = e.params["cond_nconsts"], e.params["body_nconsts"]
        carried = map(tuple, args[skip + consts :])
        results = self._call(e.params["body_jaxpr"], [*args[skip : skip + consts], *carried])
        self.carried += results
        self.join_all(args[skip + consts :], results)
        return results

    def _cond(self, e: Any, args: list[Tokens]) -> list[Tokens]:
        results = [self._call(branch, args[1:]) for branch in e.params["branches"]]
        for other in results[1:]:
            self.join_all(results[0], other)
        return results[0]


def _with_weights(tokens: Tokens, whole: Tokens) -> Tokens:
    """Gives a loop's slices their stack's weights."""
    return Made.of(tokens, whole.weights) if isinstance(whole, Made) else tokens


def _body(e: Any) -> ClosedJaxpr | Jaxpr | None:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = e.params.get(name)
        if isinstance(inner, (ClosedJaxpr, Jaxpr)):
            return inner
    return None
