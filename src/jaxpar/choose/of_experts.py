"""What `auto` chooses of experts: how tokens get to them, and how they are applied."""

from jaxpar.arguments.types import Dispatch
from jaxpar.choose.problem import Problem
from jaxpar.choose.sites import DISPATCHES, notes, settled_dispatch
from jaxpar.mesh.chips import Chip, traced_chip, traced_for_cpu


def choose_dispatch(problem: Problem) -> Dispatch:
    """Returns how tokens get to experts: all to all devices where that costs no more.

    It is so where nearly every token needs nearly every device. Around a ring of links, which an
    axis is on slices of two dimensions, a row goes n/4 places to each device that it needs, and
    one way or the other past all of them in n - 1. Behind a switch a row leaves once for each
    device, and copies for a ragged exchange cost their passes over memory.
    """
    best, tuned = _dispatch(problem), settled_dispatch(problem)
    taken = tuned or best
    why = "it sends more bytes"
    if notes.value is not None:
        from jaxpar.choose.noted import WayRow

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
    """The dispatch that is faster by seconds a token and byte of a row, there and back."""
    needed, n = problem.needed, problem.ring.size
    link = chip.link if chip.switched is None or n <= chip.switched else chip.network
    copies = min([n, *(shape[1] for shape in problem.shapes[1:])])  # as many as there can be
    # Copies are written and read, rows read and sums written; what arrives is masked on one of two
    # ways.
    ragged = 2 * needed * (n - 1) / n / link + (2 * copies + 2 + needed) / chip.hbm
    return "ragged" if ragged < 2 * (n - 1) / link else "all_gather"


def applies_experts_in_stages(chunks: int) -> bool:
    """Whether each of two exchanges gets half of the experts' work to hide behind.

    A TPU has one ragged all-to-all under way at a time, so that each needs work of its own.
    """
    chip = traced_chip()
    return chunks > 1 and chip is not None and chip.torus


def applies_experts_in_slots(average: float) -> bool:
    """Whether experts that have `average` rows each are applied to a static number of rows at once.

    A TPU has a kernel for groups of any size; what is in no table may have one too. Slots read the
    weights of experts that have no rows, which most have where the average is below one.
    """
    chip = traced_chip()
    without_kernel = traced_for_cpu() if chip is None else not chip.torus
    return without_kernel and average >= 1


def gathers_apart() -> bool:
    """Whether rows that are summed are better gathered by an instruction of their own.

    A TPU gathers rows by itself; elsewhere a gather is part of the loop that adds.
    """
    chip = traced_chip()
    return not traced_for_cpu() if chip is None else chip.torus
