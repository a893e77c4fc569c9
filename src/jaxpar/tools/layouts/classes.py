"""Classes of the dimensions of arrays, and what a function does with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

Tokens = tuple[int, ...]  # one for each dimension of an array
LOOKED_UP = "rows that are looked up"


class Made(Tokens):
    """The dimensions of an array that is made of weights and constants alone, not of data."""

    weights: frozenset[str] = frozenset()  # their paths

    @classmethod
    def of(cls, tokens: Tokens, weights: frozenset[str]) -> Made:
        """The same dimensions, with the weights that the array is made of."""
        made = cls(tokens)
        made.weights = weights
        return made


def weights_of(tokens: Tokens) -> frozenset[str]:
    """The weights that an array is made of, if it is made of nothing else."""
    return tokens.weights if isinstance(tokens, Made) else frozenset()


class OneHot(Tokens):
    """The dimensions of a one-hot array: data choose one entry of its last dimension."""


@dataclass
class Sum:
    """A result that must be added up between devices if these dimensions are sharded."""

    over: Tokens
    bytes: float
    what: str


@dataclass
class Contraction:
    """One of dot_general or a convolution."""

    flops: float
    tokens: Tokens  # of all dimensions that share its work
    result: Tokens
    bytes: float  # of the result


@dataclass
class Cut:
    """A part that is cut out of a dimension or joined into one: entries move between devices.

    Shards are parts of equal sizes, in order. Parts of other sizes cross their edges.
    """

    what: str
    before: int
    after: int | None  # None: the dimension is gone
    bytes: float  # of the part


@dataclass
class Classes:
    """What is known of the dimensions of a function's arrays."""

    parent: list[int] = field(default_factory=list)
    sizes: list[set[int]] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    matmuls: list[Contraction] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    looked_up: set[str] = field(default_factory=set)  # weights whose rows data choose
    multiplied: set[str] = field(default_factory=set)  # weights that are operands of matmuls
    carried: list[Tokens] = field(default_factory=list)  # from trip to trip of loops
    experts: Tokens = ()  # batch dimensions of weights in matmuls with data
    together: set[tuple[int, int]] = field(default_factory=set)  # in one array
    unsure: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    times: float = 1.0  # how often the current loop runs

    def new(self, size: int) -> int:
        """A dimension that is like no other yet."""
        self.parent.append(len(self.parent))
        self.sizes.append({size})
        return len(self.parent) - 1

    def of(self, token: int) -> int:
        """The class of a dimension."""
        while self.parent[token] != token:
            self.parent[token] = self.parent[self.parent[token]]
            token = self.parent[token]
        return token

    def join(self, a: int, b: int) -> int:
        """Makes one class of two dimensions."""
        a, b = self.of(a), self.of(b)
        if a != b:
            self.parent[b] = a
            self.sizes[a] |= self.sizes[b]
        return a

    def join_all(self, some: Sequence[Tokens], others: Sequence[Tokens]) -> None:
        """Makes one class of each dimension of some arrays and the same one of others."""
        for first, second in zip(some, others, strict=True):
            for a, b in zip(first, second, strict=True):
                self.join(a, b)

    def rows_looked_up(self) -> set[int]:
        """The classes of rows of which data say which are wanted."""
        return {self.of(t) for found in self.sums if found.what == LOOKED_UP for t in found.over}

    def fresh(self, shape: Sequence[int]) -> Tokens:
        """The dimensions of an array that is like no other."""
        return tuple(self.new(size) for size in shape)
