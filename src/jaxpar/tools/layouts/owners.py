"""Assigns each collective of a compiled program to a weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from jaxpar.tools.program.hlo import Instruction, parse
from jaxpar.tools.program.values import Value, Values, reached

What = Literal["the weight", "its gradient", "its product", "its input"]


class Owners:
    def __init__(
        self, text: str, arguments: Mapping[str, str], results: Sequence[str | None]
    ) -> None:
        """Reads scheduled HLO.

        Args:
          arguments: the paths of weights, by JAX's names of parameters.
          results: for each result, the weight of which it is the new value, gradient or moment.
        """
        self.values = Values(parse(text))
        self.weights: dict[Instruction, str] = {
            parameter: arguments[name]
            for parameter in self.values.hlo.entry.parameters.values()
            if (name := parameter.op_name.replace("\\'", "'")) in arguments
        }
        self.renewed = self._renewed(results)

    def of(self, name: str) -> dict[tuple[str | None, What | None], float]:
        """Returns a collective's weights with what moves of each, and its share of bytes.

        The share of no weight is under None.
        """
        collective = self.values.collective(name)
        parts = [] if collective is None else self._parts(collective)
        whole = sum(operand.bytes for _, operand in parts) or 1
        shares: dict[tuple[str | None, What | None], float] = defaultdict(float)
        for value, operand in parts:
            what, paths = self._cause(value, self.values.value(operand))
            for path in paths or {None}:
                shares[path, what if path else None] += operand.bytes / whole / max(len(paths), 1)
        return shares or {(None, None): 1.0}

    def _parts(self, collective: Instruction) -> list[tuple[Value, Instruction]]:
        operands = collective.operands
        if len(operands) == 1 or not collective.type_text.startswith("("):
            return [(self.values.value(collective), operands[0])]
        return [(self.values.value(collective, n), operand) for n, operand in enumerate(operands)]

    def _cause(self, value: Value, operand: Value) -> tuple[What, set[str]]:
        if weights := self._itself(operand):
            return "the weight", weights
        if weights := self.renewed.get(value, set()):
            return "its gradient", weights
        if (value.sums or self._is_added(value)) and (weights := self._multiplied(operand)):
            return "its product", weights
        return "its input", self._multiplying(value)

    def _is_added(self, value: Value) -> bool:
        """Returns whether a value is added on arrival."""

        def on(value: Value) -> list[Value]:
            return [user for user in self.values.users[value] if user.moves]

        users = (user for moved in reached([value], on) for user in self.values.users[moved])
        return any(user.kind == "add" for user in users)

    def _itself(self, value: Value) -> set[str]:
        """Returns the weights that a value is part of."""

        def back(value: Value) -> Iterator[Value]:
            return self.values.sources(value) if value.moves else iter(())

        return {
            self.weights[source.instruction]
            for source in reached([value], back)
            if source.instruction in self.weights
        }

    def _multiplied(self, value: Value) -> set[str]:
        """Returns the weights of summed products."""

        def back(value: Value) -> Iterator[Value]:
            return self.values.sources(value) if value.is_linear else iter(())

        products = [product for product in reached([value], back) if product.multiplies]
        return set[str]().union(*map(self._factors, products))

    def _multiplying(self, value: Value) -> set[str]:
        """Returns the weights in the nearest products."""
        level, seen = [value], set[Value]()
        while level:
            users = {user: None for maker in level for user in self.values.users[maker]}
            level = [user for user in users if user not in seen]
            seen.update(level)
            factors = set[str]().union(*(self._factors(user) for user in level if user.multiplies))
            if factors:
                return factors
            level = [user for user in level if not user.multiplies and not user.is_scalar]
        return set()

    def _factors(self, product: Value) -> set[str]:
        return set[str]().union(*map(self._itself, self.values.sources(product)))

    def _renewed(self, results: Sequence[str | None]) -> dict[Value, set[str]]:
        """Returns the weights that values become part of."""
        weights: dict[Value, set[str]] = {}
        by_path: dict[str, list[Value]] = {}
        for value, path in zip(self.values.results(), results, strict=True):
            if path is not None:
                by_path.setdefault(path, []).append(value)

        def back(value: Value) -> Iterator[Value]:
            if value.is_elementwise and not value.is_scalar:
                yield from self.values.sources(value)

        for path, values in by_path.items():
            for value in reached(values, back):
                weights.setdefault(value, set()).add(path)
        return weights
