"""Classes of array dimensions, and a function's effect on them.

A token is a dimension of an array. Dimensions of a class must be sharded alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

Tokens = tuple[int, ...]  # a token for each dimension of an array
LOOKED_UP = "rows that are looked up"


class Made(Tokens):
    """The tokens of weights and constants only, no data."""

    weights: frozenset[str] = frozenset()  # their paths

    @classmethod
    def of(cls, tokens: Tokens, weights: frozenset[str]) -> Made:
        made = cls(tokens)
        made.weights = weights
        return made


def weights_of(tokens: Tokens) -> frozenset[str]:
    # It is empty unless the array is made of weights alone.
    return tokens.weights if isinstance(tokens, Made) else frozenset()


class OneHot(Tokens):
    """Data choose the entry of its last dimension."""


@dataclass
class Sum:
    """A result to sum over devices, if sharded."""

    over: Tokens
    bytes: float
    what: str


@dataclass
class Contraction:
    flops: float
    tokens: Tokens  # of all dimensions that divide its work
    result: Tokens
    bytes: float  # of the result


@dataclass
class Cut:
    """A part cut out of a dimension, or joined into one. Its entries move between devices.

    Shards are equal parts, in order. Other parts cross their edges.
    """

    what: str
    before: int
    after: int | None  # None: the dimension is gone
    bytes: float  # of the part


@dataclass
class Classes:
    parent: list[int] = field(default_factory=list)
    sizes: list[set[int]] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    matmuls: list[Contraction] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    looked_up: set[str] = field(default_factory=set)  # weights whose rows data choose
    multiplied: set[str] = field(default_factory=set)  # weights that are operands of matmuls
    carried: list[Tokens] = field(default_factory=list)  # from iteration to iteration of loops
    stacked: list[tuple[int, Tokens]] = field(default_factory=list)  # what scans take apart
    experts: Tokens = ()  # batch dimensions of matmuls of weights and data
    together: set[tuple[int, int]] = field(default_factory=set)  # pairs in one array
    unsure: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    times: float = 1.0  # how often the current loop runs

    def new(self, size: int) -> int:
        self.parent.append(len(self.parent))
        self.sizes.append({size})
        return len(self.parent) - 1

    def of(self, token: int) -> int:
        while self.parent[token] != token:
            self.parent[token] = self.parent[self.parent[token]]
            token = self.parent[token]
        return token

    def join(self, a: int, b: int) -> int:
        a, b = self.of(a), self.of(b)
        if a != b:
            self.parent[b] = a
            self.sizes[a] |= self.sizes[b]
        return a

    def join_all(self, arrays: Sequence[Tokens], others: Sequence[Tokens]) -> None:
        for first, second in zip(arrays, others, strict=True):
            for a, b in zip(first, second, strict=True):
                self.join(a, b)

    def rows_looked_up(self) -> set[int]:
        return {self.of(t) for total in self.sums if total.what == LOOKED_UP for t in total.over}

    def fresh(self, shape: Sequence[int]) -> Tokens:
        return tuple(self.new(size) for size in shape)
