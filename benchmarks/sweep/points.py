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
# Beside the grid, what programs have besides: slice, mesh, axes of the ring, form, shape, and
# whether with gradients.
SINGLE = (
    # Rings over two and three named axes, whose devices are a plane or a cube.
    ("v5p:4x4x4", "dp=4,x=4,y=4", "x,y", "gather-lhs-rows", (16384, 8192, 8192), False),
    ("v5p:4x4x4", "dp=4,x=4,y=4", "x,y", "gather-lhs-rows", (4096, 8192, 28672), True),
    ("v5p:4x4x4", "dp=4,x=4,y=4", "y,x", "gather-rhs-k", (16384, 8192, 8192), True),
    ("v5p:4x4x4", "dp=4,x=4,y=4", "x,y", "scatter-rows", (4096, 8192, 8192), False),
    ("v5p:4x4x4", "dp=4,x=4,y=4", "x,y", "scatter-cols", (16384, 28672, 8192), False),
    ("v5p:8x8x8", "dp=8,x=8,y=8", "x,y", "gather-lhs-rows", (16384, 8192, 28672), False),
    ("v5p:8x8x8", "dp=8,x=8,y=8", "x,y", "scatter-rows", (16384, 28672, 8192), False),
    ("v5p:2x2x2", "x=2,y=2,z=2", "x,y,z", "gather-lhs-rows", (8192, 8192, 8192), True),
    ("v5p:2x2x2", "x=2,y=2,z=2", "x,y,z", "scatter-rows", (8192, 8192, 8192), False),
    # Planes that are not closed, and rings whose neighbours are several links apart.
    ("v6e:4x4", "x=4,y=4", "x,y", "scatter-rows", (8192, 13824, 5120), False),
    ("v6e:4x4", "x=4,y=4", "x,y", "gather-lhs-rows", (8192, 5120, 13824), True),
    ("v6e:4x4", "x=4,y=4", "y,x", "gather-rhs-k", (4096, 4096, 4096), False),
    ("v6e:4x4", "dp=4,tp=4", "dp", "gather-lhs-rows", (8192, 4096, 14336), True),
    ("v5e:4x8", "x=4,y=8", "x,y", "gather-lhs-rows", (8192, 8192, 8192), False),
    ("v5e:4x8", "x=4,y=8", "x,y", "scatter-rows", (8192, 8192, 8192), True),
    ("v5e:4x8", "x=4,y=8", "x", "gather-lhs-rows", (8192, 8192, 8192), False),
    ("v6e:16x16", "tp=4,dp=64", "tp", "gather-lhs-rows", (16384, 8192, 28672), False),
    ("v6e:16x16", "tp=4,dp=64", "tp", "gather-lhs-rows", (16384, 8192, 28672), True),
    ("v6e:16x16", "tp=8,dp=32", "tp", "scatter-rows", (4096, 28672, 8192), False),
    # Local widths that are no whole number of lanes, and rows that are no power of two.
    ("v5p:8x8x8", "dp=64,tp=8", "tp", "gather-lhs-rows", (24576, 5120, 13824), False),
    ("v6e:2x4", "tp=8", "tp", "gather-lhs-rows", (24576, 5120, 13824), False),
    ("v6e:2x4", "tp=8", "tp", "gather-lhs-rows", (24576, 5120, 13824), True),
    ("v5e:2x4", "tp=8", "tp", "gather-rhs-cols", (10000, 5120, 13824), False),
    ("v5e:2x4", "tp=8", "tp", "scatter-rows", (10000, 13824, 5120), True),
    # Decoding.
    ("v6e:2x4", "tp=8", "tp", "all-reduce", (8, 14336, 4096), False),
    ("v6e:2x4", "tp=8", "tp", "scatter-rows", (128, 28672, 8192), False),
    ("v6e:2x4", "tp=8", "tp", "gather-lhs-rows", (512, 12288, 28672), False),
    ("v5e:2x4", "tp=8", "tp", "gather-lhs-rows", (64, 4096, 14336), False),
    ("v5p:8x8x8", "dp=64,tp=8", "tp", "all-reduce", (32, 28672, 8192), False),
    ("tpu7x:2x2x2", "dp=2,tp=8", "tp", "scatter-rows", (64, 28672, 8192), False),
    # Vocabularies.
    ("v6e:2x4", "tp=8", "tp", "gather-lhs-rows", (4096, 4096, 128256), True),
    ("v5p:8x8x8", "dp=64,tp=8", "tp", "gather-lhs-rows", (4096, 8192, 128256), False),
    # Operands that have what is contracted first, and two weights that share one gather.
    ("v6e:4x4", "dp=4,tp=4", "tp", "gather-transposed", (16384, 4096, 14336), False),
    ("v6e:2x4", "tp=8", "tp", "gather-transposed", (4096, 8192, 28672), True),
    ("v5p:8x8x8", "dp=64,tp=8", "tp", "gather-transposed", (16384, 8192, 28672), False),
    ("v5e:2x4", "tp=8", "tp", "gather-transposed", (16384, 4096, 14336), False),
    ("v6e:2x4", "tp=8", "tp", "gather-for-two", (8192, 4096, 14336), True),
    ("v5p:8x8x8", "dp=64,tp=8", "tp", "gather-for-two", (16384, 8192, 28672), False),
    ("v5e:2x4", "tp=8", "tp", "gather-for-two", (4096, 4096, 14336), False),
    ("h100:8", "tp=8", "tp", "gather-for-two", (8192, 8192, 28672), True),
    # GPUs.
    ("h100:8", "tp=8", "tp", "gather-lhs-rows", (8192, 8192, 28672), False),
    ("h100:8", "tp=8", "tp", "gather-lhs-rows", (8192, 8192, 28672), True),
    ("h100:8", "tp=8", "tp", "scatter-rows", (8192, 28672, 8192), False),
    ("h100:8", "tp=8", "tp", "scatter-rows", (32768, 28672, 8192), True),
    ("h100:8", "tp=8", "tp", "gather-rhs-k", (8192, 8192, 8192), True),
    ("h100:8", "tp=8", "tp", "all-reduce", (512, 28672, 8192), False),
)
FLOAT32 = (
    ("v5e:2x4", "tp=8", "tp", "gather-lhs-rows", (4096, 4096, 14336), True),
    ("v6e:2x4", "tp=8", "tp", "gather-rhs-k", (4096, 4096, 4096), False),
    ("v5p:8x8x8", "dp=64,tp=8", "tp", "scatter-rows", (16384, 28672, 8192), False),
)
# The two other sizes of a layer, global: those of Llama 3 8B and 70B.
LAYERS = ((4096, 14336), (8192, 28672))


@dataclass(frozen=True)
class Point:
    """One matmul over one ring."""

    slice: str
    mesh: str
    op: str
    shape: tuple[int, int, int]  # global M, K, N
    grad: bool  # forward and strict gradients
    options: bool  # with the compiler options of the chip
    ring: str = "tp"  # its axes
    dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        """In a line."""
        size = "x".join(map(str, self.shape))
        passes = "gradients" if self.grad else "forward"
        over = "" if self.ring == "tp" else f" over {self.ring}"
        what = "" if self.dtype == "bfloat16" else f" {self.dtype}"
        options = "" if self.options else ", no options"
        return f"{self.slice} {self.mesh}{over} {self.op} {size}{what} {passes}{options}"

    def record(self) -> dict[str, Any]:
        """What JSON can hold."""
        return asdict(self)


def point_from(record: dict[str, Any]) -> Point:
    """The inverse of `Point.record`."""
    return Point(**{**record, "shape": tuple(record["shape"])})


def points() -> list[Point]:
    """Returns all points, in an order in which every part of it has some of everything."""
    found = [*grid(), *single()]
    step = 61  # no divisor of how many there are, nor of any of the loops
    return [found[number * step % len(found)] for number in range(len(found))]


def grid() -> Iterator[Point]:
    """Yields every form over every mesh, with all rows."""
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


def single() -> Iterator[Point]:
    """Yields what is on no grid."""
    for dtype, some in (("bfloat16", SINGLE), ("float32", FLOAT32)):
        for chips, mesh, ring, op, shape, grad in some:
            yield Point(chips, mesh, op, shape, grad, True, ring, dtype)
