"""What `auto` means: every choice of a way over a ring, and all that it may depend on.

A `Problem` says what is to be done; `choose_way` returns the way over the ring, of the mode
that the ring has. The rules of `auto` are the functions of `RULES`, one for each kind of work,
and can be replaced here without touching anything else."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax

from jaxpar._axis import Ring
from jaxpar._chips import Chip, traced_chip
from jaxpar._types import Dispatch, Mode
from jaxpar.collectives._in_turns import UNROLLED, InTurns
from jaxpar.collectives._order import traced_order
from jaxpar.collectives._turns import Turn, gather_turns, stretches
from jaxpar.collectives._ways import Naive, Way

# What a matmul costs beyond its FLOPs when it is cut into one more piece, in seconds. A ring must
# win by more than the model can be trusted for.
PIECE_OVERHEAD = 2e-6
MARGIN = 0.95

Kind = Literal["matmul", "attention", "collective", "weights", "loss", "experts"]
Shape = tuple[int, ...]


def _traced_devices() -> int:
    return jax.sharding.get_abstract_mesh().size


@dataclass(frozen=True)
class Problem:
    """Work over a ring, as one device sees it: all that a choice may depend on.

    Attributes:
      kind: what is to be done: a collective beside a matmul or attention, one by itself, weights
        that are gathered ahead of a layer, a loss over a vocabulary, tokens sent to experts.
      ring: the devices.
      shapes: of the local operands, where they are known.
      flops: of the local work, over all turns.
      block_bytes: what a device sends in one turn.
      needed: of experts, to how many devices a token must go, on average.
      passes: for which the way is; today one way serves both.
      chip: that the program is traced for; None: not in the table.
      devices: of the whole mesh.
    """

    kind: Kind
    ring: Ring
    shapes: tuple[Shape, ...] = ()
    flops: float = 0.0
    block_bytes: int = 0
    needed: float = 0.0
    passes: Literal["forward", "backward", "both"] = "both"
    chip: Chip | None = field(default_factory=traced_chip)
    devices: int = field(default_factory=_traced_devices)


def choose_way(problem: Problem) -> Way:
    """Returns the way of the ring's mode, of `auto` that which is predicted to be the fastest."""
    mode = problem.ring.mode
    return RULES[problem.kind](problem) if mode == "auto" else way_of(problem, mode)


def way_of(problem: Problem, mode: Mode) -> Way:
    """Returns the way of a mode that is named."""
    if mode == "naive":
        return Naive(problem.ring)
    directions = {"unidirectional": (1,), "bidirectional": (1, -1)}[mode]
    return InTurns(problem.ring, directions, traced_order(), _opposite_is_covered(problem))


def choose_stages(problem: Problem) -> tuple[Way, ...]:
    """Returns the ways of weights over a ring of several axes, one after the other.

    A collective takes all axes at once; in turns, blocks of the last axis, which are neighbours, go
    round before those of the others. Axes of one device have no stage.
    """
    rings = problem.ring.stages()
    if not rings:
        return ()
    longest = max(rings, key=lambda ring: ring.size)
    if isinstance(choose_way(replace(problem, ring=longest)), Naive):
        return (Naive(problem.ring),)
    return tuple(choose_way(replace(problem, ring=ring)) for ring in rings)


def by_roofline(problem: Problem) -> Way:
    """The rule of work whose transfers hide beside it: whichever is predicted to be the fastest.

    The model: naive is the collective at the speed of the links (both directions on a torus), then
    the work at peak. A turn takes the longer of its work at peak and its transfers at one hop of
    latency plus bytes over one link, and a fixed overhead for each piece. Naive it is on a chip
    that is not in the table, on CPU devices (which share cores, so that a transfer takes the time
    of a matmul instead of hiding behind it), on 1 or 2 devices, which have at most one transfer,
    beyond one switch, and where the compiler makes permutes synchronous.
    """
    chip, ring = problem.chip, problem.ring
    if chip is None or ring.size <= 2 or _synchronous(problem):
        return Naive(ring)
    if chip.switched is not None and ring.size > chip.switched:
        # Each hop that leaves a host waits for one port, a collective uses all of them.
        return Naive(ring)
    # Where every transfer is covered the times are equal, and half the traffic a link is better.
    modes: list[Mode] = ["bidirectional", "unidirectional"] if chip.torus else ["unidirectional"]
    ways: list[Any] = [way_of(problem, mode) for mode in modes]
    best = min(ways, key=lambda way: time_in_turns(chip, way, problem))
    wins = time_in_turns(chip, best, problem) < MARGIN * naive_time(chip, problem)
    return best if wins else Naive(ring)


def by_links(problem: Problem) -> Way:
    """The rule of a ring collective by itself: the ring that uses the chip's links best.

    On a torus both directions have links of their own. Behind a switch one direction already fills
    a device's port, and two serialise.
    """
    chip = problem.chip
    both = chip is not None and chip.torus
    return way_of(problem, "bidirectional" if both else "unidirectional")


def by_prefetching(problem: Problem) -> Way:
    """The rule of weights that are gathered ahead: rings where a collective would be waited for.

    It is so on TPU, whose compiler makes collectives synchronous, but runs a chain of permutes
    beside what does not need it. That of GPUs makes collectives asynchronous itself; on CPU devices
    nothing is hidden. A ring that runs in a loop has nothing beside it.
    """
    chip = problem.chip
    turns = gather_turns(problem.ring.size, (1, -1), whole_opposite=True)
    unrolled = all(times <= UNROLLED for _, times, _ in stretches(turns))
    rings = chip is not None and chip.torus and unrolled and not _synchronous(problem)
    return way_of(problem, "bidirectional" if rings else "naive")


def naively(problem: Problem) -> Way:
    """The rule of what has nothing to hide behind."""
    return Naive(problem.ring)


RULES: dict[Kind, Callable[[Problem], Way]] = {
    "matmul": by_roofline,
    "attention": by_roofline,
    "collective": by_links,
    "weights": by_prefetching,
    "loss": naively,
    "experts": naively,
}


def naive_time(chip: Chip, problem: Problem) -> float:
    """Seconds for one collective and then the work."""
    ways, hops = 2 if chip.torus else 1, problem.ring.size - 1
    return problem.flops / chip.flops + hops / ways * (_hop_time(chip, problem))


def time_in_turns(chip: Chip, way: InTurns, problem: Problem) -> float:
    """Seconds for all turns, each as long as its work or its transfers."""
    turns = gather_turns(way.ring.size, way.directions, whole_opposite=way.whole_opposite)
    piece = problem.flops / chip.flops / way.ring.size + PIECE_OVERHEAD
    hop = _hop_time(chip, problem)

    def seconds(turn: Turn) -> float:
        whole = [leg for leg in turn.legs if leg.half is None]  # two halves are one block's work
        links = [hop if leg.half is None else hop / 2 for leg in turn.blocks]
        return max(piece * max(1, len(whole)), *links, 0.0)

    return sum(map(seconds, turns))


def joining_is_cheaper(length: int) -> bool:
    """Whether two blocks of `length` are better joined along it, contracted, and multiplied once.

    A sum of M x N float32 is read and written, 8 M N bytes, while 2 M N `length` FLOPs run. Beyond
    half of their time joining is cheaper, where a compiler joins for nothing, within the matmul
    (TPU).
    """
    chip = traced_chip()
    return chip is not None and chip.torus and 8 * chip.flops / chip.hbm > length


def choose_dispatch(problem: Problem) -> Dispatch:
    """Returns how tokens get to experts: all to all devices where that costs no more.

    It is so where nearly every token needs nearly every device. Around a ring of links, which an
    axis is on slices of two dimensions, a row goes n/4 places to each device that it needs, and
    one way or the other past all of them in n - 1.
    """
    needed, n, chip = problem.needed, problem.ring.size, problem.chip
    around = chip is not None and chip.dimensions == 2 and needed * n / 4 > n - 1
    return "all_gather" if around or needed > 0.9 * n else "ragged"


def applies_experts_in_stages(chunks: int) -> bool:
    """Whether each of two exchanges gets half of the experts' work to hide behind.

    A TPU has one ragged all-to-all under way at a time, so that each needs work of its own.
    """
    chip = traced_chip()
    return chunks > 1 and chip is not None and chip.torus


def _synchronous(problem: Problem) -> bool:
    """Whether the compiler makes permutes synchronous there, so that a ring can only lose."""
    chip = problem.chip
    return (
        chip is not None
        and chip.synchronous_from is not None
        and problem.devices >= chip.synchronous_from
    )


def _opposite_is_covered(problem: Problem) -> bool:
    """Whether the last block of an even ring had better come whole, not in halves."""
    chip = problem.chip
    if problem.kind == "weights":  # cutting costs two passes over memory, and it is prefetched
        return True
    if not problem.flops or chip is None:
        return False
    # The work of one turn both ways, two blocks, covers a transfer of a whole block.
    work = 2 * problem.flops / problem.ring.size / chip.flops
    return work >= problem.block_bytes / chip.link


def _hop_time(chip: Chip, problem: Problem) -> float:
    return problem.block_bytes / chip.link + chip.latency
