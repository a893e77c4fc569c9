"""What the compiler of each kind of chip does to a program: figures of the cost model.

Fitted to schedules of jax 0.10.2 and 0.12.0.1 with libtpu 0.0.50.1, and of the GPU compiler of jax
0.12.0.1. `python benchmarks/sweep --ways` compiles what they decide, and shows where they are
wrong. It is run again after a change of compilers, and a figure is changed where more points get
better.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fitted:
    """The figures of one kind of chip. Shares are of HBM's speed, for bytes read and written.

    Attributes:
      copies: what a copy reaches that a compiler adds.
      slices: what a slice reaches that is cut for a matmul, by an instruction of its own.
      within: how much of such a slice's time a matmul takes more that cuts by itself.
      last_gather: what the copy reaches by which a gather enters the result of a program; None:
        there is none.
      placed_apart: columns that a turn computes are placed by a pass of its own.
      turn_passes: how often sums of float32 are read and written for each piece, apart from the
        matmul, in turns; not at all where the compiler adds in its epilogue at full speed.
      chunk_passes: the same in chunks.
      chunked_margin: by what factor chunks must be predicted to win: each is a matmul that a
        compiler tiles by itself.
      piece: seconds that one more piece of work costs beyond what it computes, reads and writes.
      resident: of VMEM, what an operand takes at most that is read from HBM once for all pieces.
      travelling: how often sums that travel are read and written as float32 besides, in turns.
    """

    copies: float = 1.0
    slices: float = 1.0
    within: float = 0.0
    last_gather: float | None = None
    placed_apart: bool = False
    turn_passes: float = 0.0
    chunk_passes: float = 0.0
    chunked_margin: float = 0.94
    piece: float = 3e-6
    resident: float = 0.4
    travelling: float = 0.0


_OTHERS = Fitted()
_BY_KIND = {
    "TPU v5 lite": Fitted(last_gather=0.4, turn_passes=2.0, chunk_passes=0.5, resident=0.5),
    "TPU v5": Fitted(
        copies=0.4,
        slices=0.4,
        within=0.5,
        chunked_margin=0.92,
        piece=1.8e-6,
        travelling=0.9,
    ),
    "TPU v6 lite": Fitted(
        copies=0.4,
        slices=0.4,
        last_gather=0.4,
        turn_passes=1.0,
        chunk_passes=1.0,
        resident=0.5,
    ),
    "TPU7x": Fitted(
        copies=0.4,
        slices=0.4,
        last_gather=0.2,
        placed_apart=True,
        turn_passes=1.0,
        chunk_passes=1.0,
    ),
}


def fitted_to(kind: str) -> Fitted:
    """Returns the figures of a kind of chip, those of most where none were fitted to it."""
    return _BY_KIND.get(kind, _OTHERS)
