"""The plan of a ring operation: which blocks travel which way, in how many steps, in what order."""

from dataclasses import dataclass
from typing import Literal

from jaxpar._chips import traced_chip, traced_for_cpu_cluster

Opposite = Literal["none", "halves", "whole"]


@dataclass(frozen=True)
class Plan:
    """Static data that both folds follow, the gather forwards and the scatter backwards.

    In step `s` (1 to `hops`) of a gather, the lane of direction `d` brings the whole block of the
    device `d * s` places back. A scatter runs the same steps in reverse, each lane the other way:
    in step `s` a device adds to the partial sum that it hands on to the owner `d * s` places back.

    Both ways round an even ring, one block is left: that of the `opposite` device. A gather brings
    it in `halves`, one from each side, so that each link carries (size - 1) / 2 blocks, or `whole`
    by the first lane, which costs no cutting and half a transfer more. A scatter sends it in its
    `pieces`, which take the lanes in turn: two go one each way, one goes by the first lane.

    The rest is about the order that the compilers and executors need to overlap what may overlap:

    - `pieces`: in how many parts a scatter sums and sends each block. With two they take turns, one
      travels while the other is computed, so that an arrival is added within the next matmul.
    - `grouped`: matmuls that add to sums are made one instruction with the addition, which the TPU
      compiler would else keep apart, a pass over memory of its own.
    - `delayed`: so are all matmuls of a step, where the compiler delays a transfer until the last
      instruction that it thinks covers it, half a step too late.
    - `sliced`: operands are sliced before the matmul, not within it, where that is slower.
    - `queued`: a step's transfers start once its matmul has its operands, and the next step once
      both are over: the order that devices need which execute in order, in which a matmul overlaps
      a transfer only if it was queued first.
    """

    directions: tuple[int, ...]
    hops: int
    opposite: Opposite = "none"
    pieces: int = 1
    grouped: bool = False
    delayed: bool = False
    sliced: bool = False
    queued: bool = False

    def lanes(self, distance: int, piece: int) -> tuple[int, ...]:
        """The directions in which a scatter's piece is under way, `distance` places from home."""
        if distance <= self.hops:
            return self.directions
        if self.opposite == "none" or distance > self.hops + 1:
            return ()
        return (self.directions[piece % len(self.directions)],)


def make_plan(size: int, mode: str, *, whole_opposite: bool = False) -> Plan:
    """Returns the plan of a ring of `size` devices, one way or both ways.

    `whole_opposite`: matmuls cover even a whole last block.
    """
    directions = {"unidirectional": (1,), "bidirectional": (1, -1)}[mode]
    hops, rest = divmod(size - 1, len(directions))
    chip = traced_chip()
    on_torus = chip is not None and chip.torus
    return Plan(
        directions,
        hops,
        opposite="none" if not rest else "whole" if whole_opposite else "halves",
        pieces=2 if on_torus else 1,
        grouped=on_torus,
        delayed=chip is not None and chip.delays_transfers,
        sliced=chip is not None and chip.slices_before_matmul,
        queued=traced_for_cpu_cluster(),
    )
