"""The points of the sweep: every form of matmul over slices, rings, rows and passes."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from jaxpar.tools.cli.ops import OPS

# A slice, its mesh, and how much of it one ring takes.
MESHES = (
    ("v5e:2x4", "tp=8"),
    ("v5e:4x4", "dp=4,tp=4"),
    ("v5e:4x4", "tp=16"),
    ("v5e:8x8", "dp=8,tp=8"),
    ("v5p:4x4x4", "dp=16,tp=4"),
    ("v5p:8x8x8", "dp=64,tp=8"),
    ("v5p:4x4x4", "dp=4,tp=16"),  # a plane that is closed
    ("v5p:4x4x4", "dp=8,tp=8"),  # a cube
    ("v6e:2x4", "tp=8"),
    ("v6e:4x4", "dp=4,tp=4"),
    ("v6e:16x16", "dp=64,tp=4"),
    ("v6e:16x16", "dp=16,tp=16"),
    ("tpu7x:2x2x2", "dp=2,tp=8"),
)
ROWS = (256, 1024, 4096, 16384, 65536)
# The two other sizes of a layer, global: those of Llama 3 8B and 70B.
LAYERS = ((4096, 14336), (8192, 28672))


@dataclass(frozen=True)
class Point:
    """One matmul over one ring, in bfloat16."""

    slice: str
    mesh: str
    op: str
    shape: tuple[int, int, int]  # global M, K, N
    grad: bool  # forward and strict gradients
    options: bool  # with the compiler options of the chip

    @property
    def label(self) -> str:
        """In a line."""
        size = "x".join(map(str, self.shape))
        passes = "gradients" if self.grad else "forward"
        return f"{self.slice} {self.mesh} {self.op} {size} {passes}" + (
            "" if self.options else ", no options"
        )

    def record(self) -> dict[str, Any]:
        """What JSON can hold."""
        return asdict(self)


def point_from(record: dict[str, Any]) -> Point:
    """The inverse of `Point.record`."""
    return Point(**{**record, "shape": tuple(record["shape"])})


def points() -> list[Point]:
    """Returns all points, in an order in which every part of it has some of everything."""
    found = list(_points())
    step = 61  # no divisor of how many there are, nor of any of the loops
    return [found[number * step % len(found)] for number in range(len(found))]


def _points() -> Iterator[Point]:
    every = product(enumerate(ROWS), enumerate(MESHES), enumerate(OPS))
    for (row, rows), (slot, (chips, mesh)), (form, op) in every:
        # Every mesh and form has both passes, with both sizes of a layer, and both options: rows
        # alternate between passes, and pairs of rows between layers.
        grad = (row + slot + form) % 2 == 1
        narrow, wide = LAYERS[(row // 2 + form) % 2]
        down = op.startswith("scatter") or op == "all-reduce"
        shape = (rows, wide, narrow) if down else (rows, narrow, wide)
        if op.startswith("gather-rhs"):  # weights that are gathered: a square
            shape = (rows, narrow, narrow)
        # Chips that need options are compiled with them, and every third time without.
        yield Point(chips, mesh, op, shape, grad, options=True)
        if chips.startswith(("v5p", "v6e")) and (row + slot + form) % 3 == 0:
            yield Point(chips, mesh, op, shape, grad, options=False)
