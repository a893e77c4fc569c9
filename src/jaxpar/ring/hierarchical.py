"""Gathers and scatters along the dimensions of a torus in turn, and their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxpar.axis.axis import Ring
from jaxpar.axis.ring_order import Index
from jaxpar.mesh.ring_orders import AlongOne
from jaxpar.platforms.chips import Chip, fitted_to
from jaxpar.ring.gather import Gather
from jaxpar.ring.phase import Phase
from jaxpar.ring.seconds import (
    INSTRUCTION,
    SCATTERED_SHARE,
    Flow,
    copy_time,
    gathered_again,
    hop_time,
    joins,
    work_time,
)
from jaxpar.ring.slab import Slab
from jaxpar.ring.stepwise import Stepwise

if TYPE_CHECKING:
    from jaxpar.choose.problem import Problem


@dataclass(frozen=True)
class Hierarchical(Stepwise):
    """Blocks, sums, or both go along the torus dimensions in turn.

    Each share uses a different dimension at a time. Other flows use disjoint rings.
    """

    sides: tuple[int, ...] = ()
    blocks: bool = False
    sums: bool = False

    def _steps_time(self, problem: Problem, flow: Flow, beside: float = 0.0) -> float:
        if not (self.blocks if flow.kind == "gather" else self.sums):
            return super()._steps_time(problem, flow, beside)
        chip, size, messages = problem.figures, self.ring.size, problem.messages("rings")
        if flow.kind == "gather":
            cuts_first = self.order.cuts_first
            seconds = time_of_blocks(chip, flow, size, self.sides, messages, cuts_first)
        else:
            pieces = self.order.pieces
            seconds = time_of_sums(chip, flow, size, self.sides, pieces, messages, beside)
            seconds += gathered_again(chip, flow, size, problem.messages("collective"))
        return seconds + self._cut_time(chip, flow, len(self.sides))

    def _gather(self, cuts: Sequence[tuple[int, int]], shares: int, dim: int | None) -> Gather:
        if dim is None or not self.blocks:
            return super()._gather(cuts, shares, dim)
        last, *earlier = phases_over(self.ring, self.sides, shares)
        if self.sides[0] % 2 == 0:
            # The opposite device's slab arrives in halves, which are two arrays from the first step
            # on. Cutting before a transfer, and joining after it, would copy them twice.
            last = last.in_halves()
        return Gather([*earlier[::-1], last], self.directions, cuts, dim, whole_opposite=True)

    def _sum_phases(self, shares: int) -> Sequence[Phase]:
        if not self.sums:
            return super()._sum_phases(shares)
        return phases_over(self.ring, self.sides, shares)


def along_dimensions(way: Stepwise, sides: tuple[int, ...]) -> Hierarchical:
    rest = way.ring, way.directions, way.order, way.whole_opposite, way.rings
    return Hierarchical(*rest, sides=sides, blocks=True, sums=True)


@dataclass(frozen=True)
class AlongDimensions(Phase):
    """A phase over a torus of equal sides.

    A scatter's first phase leaves each device the sums for a slab of owners. The next ones divide
    it. A gather has the same phases, the last first. With `halves`, a share is two arrays, half
    of the slab each.
    """

    dimensions: tuple[tuple[int, ...], ...] = ()
    halves: bool = False

    def in_halves(self) -> AlongDimensions:
        rings = tuple(ring for ring in self.rings for _ in (0, 1))
        dimensions = tuple(of for of in self.dimensions for _ in (0, 1))
        return AlongDimensions(rings, dimensions, halves=True)

    def positions(self, owner: Index, ring: int, length: int, start: int, size: int) -> Slab:
        walk, dimensions = self.rings[ring].walk, self.dimensions[ring]
        assert isinstance(walk, AlongOne)
        starts, sizes = [0 for _ in dimensions], [*self.sides(ring)]
        along = dimensions.index(walk.dimension)
        starts[along], sizes[along] = walk.place(owner), 1
        if self.halves:  # along the first other side: each half is a stretch of a slab
            other = 1 if along == 0 else 0
            sizes[other] //= 2
            starts[other] = ring % 2 * sizes[other]
        return Slab((*self.sides(ring), length), (*starts, start), (*sizes, size))

    def sides(self, ring: int) -> tuple[int, ...]:
        walk = self.rings[ring].walk
        assert isinstance(walk, AlongOne)
        return tuple(walk.sides[dimension] for dimension in self.dimensions[ring])


def phases_over(ring: Ring, sides: tuple[int, ...], shares: int) -> list[AlongDimensions]:
    """Returns a scatter's phases; shares never use the same dimension at once."""
    # A scatter over 4 x 4 devices at places (row, column), in two shares:
    #
    #     phase 0   share 0 along rows:     a device and the 3 others of its column sum for the 4
    #                                       owners of its row
    #               share 1 along columns:  a device and the 3 others of its row sum for the 4
    #                                       owners of its column
    #     phase 1   share 0 along columns:  a device and the 3 others of its row sum for 1 owner
    #               share 1 along rows:     a device and the 3 others of its column do so
    #
    # A device holds sums for 16 owners, then for 4, then for 1. The two shares always use different
    # links. A gather is this backwards: 1 block, then 4 of a row or a column, then all 16.
    phases: list[AlongDimensions] = []
    for number in range(len(sides)):
        orders = [
            [(share + later) % len(sides) for later in range(number, len(sides))]
            for share in range(shares)
        ]
        rings = tuple(replace(ring, walk=AlongOne(sides, order[0])) for order in orders)
        phases.append(AlongDimensions(rings, tuple(tuple(sorted(order)) for order in orders)))
    return phases


def time_of_sums(
    chip: Chip,
    flow: Flow,
    size: int,
    sides: tuple[int, ...],
    pieces: int,
    messages: int,
    beside: float,
) -> float:
    side, shares = sides[0], len(sides)
    fitted = fitted_to(chip.kind)
    made = side * shares * pieces
    work = work_time(chip, flow, made, fitted.step_passes)
    each = (work + beside) / made  # seconds of a sum
    sent = flow.block_bytes * size / made  # bytes of a sum
    step = 2 * shares * each  # both directions of each share

    def hop(sent: float) -> float:
        return hop_time(chip, sent * messages)

    # The first step that adds waits for the first sum. Half a step is before, and half behind.
    seconds = 2 * step + hop(sent) + (side - 2) * max(step, hop(sent))
    for _ in sides[1:]:
        sent /= side
        # With more shares, fewer are whole tiles.
        addition = 1.5 * copy_time(chip, sent) + (shares - 1) * fitted.piece
        adds = made * addition
        seconds += max(adds, (side - 1) * hop(sent)) + hop(sent)
    # Columns of the blocks of a slab lie apart.
    return seconds + flow.minor / (SCATTERED_SHARE * chip.hbm)


def time_of_blocks(
    chip: Chip, flow: Flow, size: int, sides: tuple[int, ...], messages: int, cuts_first: bool
) -> float:
    side, shares = sides[0], len(sides)
    fitted = fitted_to(chip.kind)
    hops, opposite = divmod(side - 1, 2)
    sent = flow.block_bytes / shares  # bytes of a share

    def hop(sent: float) -> float:
        return hop_time(chip, sent * messages)

    seconds = 0.0
    for _ in sides[1:]:
        placed = shares * side * (INSTRUCTION + copy_time(chip, sent))
        seconds += hop(sent) + max(placed, (hops + opposite - 1) * hop(sent))
        sent *= side
    pieces = side * shares
    if opposite:  # slabs are cut in halves, the second during transfers
        seconds += shares * copy_time(chip, sent) / 2
        pieces *= 2
    joined = 0.0
    if flow.sums and joins(chip, flow.length // pieces, flow.sums, cuts_first):
        # Each slab is joined to others, and so is the operand that multiplies it.
        joined = 2 * INSTRUCTION * pieces + copy_time(chip, size * flow.block_bytes)
        pieces = side
    work = (work_time(chip, flow, pieces, fitted.step_passes) + joined) / side  # one direction
    seconds += max(work, hop(sent)) + (hops - 1) * max(2 * work, hop(sent))
    if opposite:
        seconds += max(2 * work, hop(sent / 2)) + work
    else:
        seconds += 2 * work
    # Columns of the blocks of a slab lie apart.
    seconds += (flow.minor - flow.sliced) / (SCATTERED_SHARE * chip.hbm)
    return seconds
