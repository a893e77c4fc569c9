"""Chooses how tokens get to experts, and how experts are applied."""

from jaxpar.arguments.types import Dispatch
from jaxpar.choose.problem import Problem
from jaxpar.choose.sites import DISPATCHES, notes, settled_dispatch
from jaxpar.platforms.chips import Chip, traced_chip, traced_for_cpu


def choose_dispatch(problem: Problem) -> Dispatch:
    """Returns the dispatch of tokens to experts: all-to-all (`ragged`), if it costs no more."""
    # All-gather wins if nearly every token needs nearly every device. On a ring of links, a row
    # goes n/4 places to each device that it needs, and n - 1 past all. Behind a switch, copies for
    # a ragged exchange cost passes over memory.
    best, tuned = _dispatch(problem), settled_dispatch(problem)
    taken = tuned or best
    why = "it sends more bytes"
    if notes.value is not None:
        from jaxpar.choose.record import WayRow

        rows = [WayRow(way, out="" if way == best else why) for way in DISPATCHES]
        notes.value.part(problem, "dispatch", rows, taken, tuned is not None)
    return taken


def _dispatch(problem: Problem) -> Dispatch:
    needed, n, chip = problem.needed, problem.ring.size, problem.chip
    if chip is not None and not chip.torus:
        return _dispatch_behind_a_switch(problem, chip)
    around = chip is not None and chip.dimensions == 2 and needed * n / 4 > n - 1
    return "all_gather" if around or needed > 0.9 * n else "ragged"


def _dispatch_behind_a_switch(problem: Problem, chip: Chip) -> Dispatch:
    needed, n = problem.needed, problem.ring.size
    link = chip.link if chip.switched is None or n <= chip.switched else chip.network
    copies = min([n, *(shape[1] for shape in problem.shapes[1:])])  # the most there can be
    # Copies are written and read, rows are read, and sums are written. Arrivals are masked on the
    # way there or on the way back, not on both.
    ragged = 2 * needed * (n - 1) / n / link + (2 * copies + 2 + needed) / chip.hbm
    return "ragged" if ragged < 2 * (n - 1) / link else "all_gather"


def applies_experts_in_stages(chunks: int) -> bool:
    """Returns whether two exchanges each overlap with half the experts' work."""
    # A TPU runs one exchange at a time.
    chip = traced_chip()
    return chunks > 1 and chip is not None and chip.torus


def applies_experts_in_slots(average: float) -> bool:
    """Returns whether experts are applied to a static number of rows."""
    # TPUs have a kernel for groups of any size. Slots read the weights of experts without rows:
    # most, below an `average` of one.
    chip = traced_chip()
    without_kernel = traced_for_cpu() if chip is None else not chip.torus
    return without_kernel and average >= 1


def gathers_apart() -> bool:
    """Returns whether to gather summed rows by a separate instruction."""
    chip = traced_chip()
    return not traced_for_cpu() if chip is None else chip.torus
