"""Classes of the dimensions of arrays, and what a function does with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

Tokens = tuple[int, ...]  # one for each dimension of an array


@dataclass
class Sum:
    """A result that must be added up between devices if these dimensions are sharded."""

    over: Tokens
    bytes: float
    what: str


@dataclass
class Matmul:
    """One of dot_general or a convolution."""

    flops: float
    tokens: Tokens  # of all dimensions that share its work
    batch: Tokens  # of both operands and the result


@dataclass
class Classes:
    """What is known of the dimensions of a function's arrays."""

    parent: list[int] = field(default_factory=list)
    sizes: list[set[int]] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    matmuls: list[Matmul] = field(default_factory=list)
    together: set[tuple[int, int]] = field(default_factory=set)  # in one array
    unsure: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    times: float = 1.0  # how often the loop runs that is being followed

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

    def fresh(self, shape: Sequence[int]) -> Tokens:
        """The dimensions of an array that is like no other."""
        return tuple(self.new(size) for size in shape)
