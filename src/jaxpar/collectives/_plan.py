"""The plan of a ring operation: which blocks travel which way, in how many steps."""

from dataclasses import dataclass

from jaxpar._chips import traced_for_cpu_cluster


@dataclass(frozen=True)
class Plan:
    """Static data that both folds follow, the gather forwards and the scatter backwards.

    In step `s` (1 to `hops`) of a gather, the lane of direction `d` brings the whole block of the
    device `d * s` places back. If `halves`, one more step brings the block of the opposite device,
    one half from each side, so that each link carries (size - 1) / 2 blocks and none waits for the
    other. A scatter runs the same steps in reverse, each lane the other way: in step `s` a device
    adds to the partial sum that it will hand on to the owner `d * s` places back.

    If `queued`, a step's transfers start once its matmul has its operands, and the next step once
    both are over: the order that devices need which execute in order, in which a matmul overlaps a
    transfer only if it was queued first.
    """

    directions: tuple[int, ...]
    hops: int
    halves: bool
    queued: bool = False


def make_plan(size: int, mode: str) -> Plan:
    """Returns the plan of a ring of `size` devices, one way or both ways."""
    directions = {"unidirectional": (1,), "bidirectional": (1, -1)}[mode]
    hops, rest = divmod(size - 1, len(directions))
    return Plan(directions, hops, halves=bool(rest), queued=traced_for_cpu_cluster())
