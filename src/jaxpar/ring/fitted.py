"""What the compiler of each kind of chip does to a program: figures of the cost model.

Fitted to schedules of jax 0.10.2 and 0.12.0.1 with libtpu 0.0.50.1, and of the GPU compiler of jax
0.12.0.1. `python benchmarks/sweep --ways` compiles what they decide, and shows where they are
wrong. It is run again after a change of compilers, and a figure is changed where more points get
better.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fitted:
    """The figures of one kind of chip.

    Attributes:
      within: of a copy of what stays, how much longer a matmul takes that cuts it by itself.
      placed_apart: columns that a turn computes are placed by a pass of its own.
      turn_passes: how often sums of float32 are read and written for each piece, apart from the
        matmul, in turns; not at all where the compiler adds in its epilogue at full speed.
      chunk_passes: the same in chunks.
      piece: seconds that one more piece of work costs beyond what it computes, reads and writes.
      resident: of VMEM, what an operand takes at most that is read from HBM once for all pieces.
    """

    within: float = 0.0
    placed_apart: bool = False
    turn_passes: float = 0.0
    chunk_passes: float = 0.0
    piece: float = 3e-6
    resident: float = 0.4


_OTHERS = Fitted(chunk_passes=2.0)
_BY_KIND = {
    "TPU v5 lite": Fitted(turn_passes=2.0, chunk_passes=0.5, resident=0.5),
    "TPU v5": Fitted(within=0.5, piece=1.8e-6),
    "TPU v6 lite": Fitted(turn_passes=1.0, chunk_passes=1.0, resident=0.5),
    "TPU7x": Fitted(placed_apart=True, turn_passes=1.0, chunk_passes=1.0),
}


def fitted_to(kind: str) -> Fitted:
    """Returns the figures of a kind of chip, those of most where none were fitted to it."""
    return _BY_KIND.get(kind, _OTHERS)
