"""Simulates a program on all devices, which may take different branches."""

from collections.abc import Callable
from math import prod
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from jaxpar.tools.program.costs import Message
from jaxpar.tools.program.known_values import LoopState, Scope
from jaxpar.tools.program.operations import Call, Collective, Conditional, Loop, Operation, Schedule

_MOST = 4  # devices that are named one by one


@runtime_checkable
class PlayedDevice(Protocol):
    """One device, or several that do the same: a player."""

    now: float

    @property
    def end(self) -> float: ...

    @property
    def computed(self) -> float: ...

    def clone(self) -> Any: ...

    def step(self, operation: Operation, others: float = 0.0) -> None: ...

    def computing(self, schedule: Schedule) -> float: ...


Player = TypeVar("Player", bound=PlayedDevice)


class Places(Generic[Player]):
    """Devices in groups that have taken the same branches.

    Each group has a player. A collective begins when the last of its devices comes to it.
    """

    def __init__(
        self, player: Player, partitions: int, slices: int, assumed: Callable[[str], int | None]
    ) -> None:
        self.players, self._assumed = [player], assumed  # the trips of a loop of unknown length
        self.place = np.zeros((slices, partitions), int)  # of each device: the number of its player
        self.active = [0]  # players that run the current schedule
        self.unknown: dict[str, None] = {}  # names of loops of unknown length, in order

    def run(self, entry: Schedule) -> Player:
        """Returns the player that ends last."""
        slices, partitions = self.place.shape
        self._run(entry, Scope(partitions, slices))
        return max(self.players, key=lambda player: (player.end, player.computed))

    def _run(self, schedule: Schedule, scope: Scope) -> None:
        for operation in schedule.operations:
            match operation:
                case Loop():
                    self._loop(operation, scope)
                case Conditional():
                    self._conditional(operation, scope)
                case Call(source=source):
                    self._run(operation.runs[0], scope.called(source.operands if source else ()))
                case _:
                    begins: dict[int, float] = {}
                    if isinstance(operation, Collective) and len(self.active) > 1:
                        begins = self._begins(operation.message)
                    for number in self.active:
                        self.players[number].step(operation, begins.get(number, 0.0))

    def _loop(self, loop: Loop, scope: Scope) -> None:
        state = LoopState(scope, loop.source) if loop.source else None
        trips = loop.trips
        if trips is None and state:
            trips = state.trips()
        if trips is None:
            trips = self._assumed(loop.op)
        if trips is None:
            self.unknown[loop.name] = None
        for trip in range(1 if trips is None else trips):
            self._run(loop.runs[1], state.at(trip) if state else scope)

    def _conditional(self, conditional: Conditional, scope: Scope) -> None:
        taken, source = None, conditional.source
        if conditional.taken is not None:
            taken = np.array([conditional.taken])
        elif source:
            taken = scope.branch(source)
        if taken is None:  # data decide: the branch that computes the longest
            lengths = list(map(self.players[0].computing, conditional.runs))
            taken = np.array([lengths.index(max(lengths))])
        around, first = self.active, len(self.players)
        branches = self._parted(np.broadcast_to(taken, self.place.size).reshape(self.place.shape))
        for branch, self.active in branches.items():
            self._run(
                conditional.runs[branch], scope.in_branch(source, branch) if source else scope
            )
        self.active = [*around, *range(first, len(self.players))]

    def _parted(self, taken: Int[np.ndarray, "slices partitions"]) -> dict[int, list[int]]:
        """Returns the players that take each branch; a player whose devices differ is parted."""
        by_branch: dict[int, list[int]] = {}
        for number in list(self.active):
            mask = self.place == number
            first, *others = np.unique(taken[mask]).tolist()
            by_branch.setdefault(first, []).append(number)
            for branch in others:
                self.place[mask & (taken == branch)] = len(self.players)
                by_branch.setdefault(branch, []).append(len(self.players))
                self.players.append(self.players[number].clone())
        return by_branch

    def _begins(self, message: Message) -> dict[int, float]:
        """Returns when the last player comes to each player's exchange."""
        groups = [self.active]
        if not message.between_slices:
            members = message.pairs or message.groups or [range(self.place.shape[1])]
            groups = [players[list(group)].tolist() for players in self.place for group in members]
        begins: dict[int, float] = {}
        for group in groups:
            last = max(self.players[number].now for number in group)
            begins |= {number: max(last, begins.get(number, 0.0)) for number in group}
        return begins

    def computed(
        self, mesh: Mesh, places: Int[np.ndarray, "slices partitions"]
    ) -> dict[str, float]:
        """Returns the seconds that each group of devices computes; empty if all do the same.

        `places` has each device's place in the mesh.
        """
        groups = [np.sort(places[self.place == number]) for number in range(len(self.players))]
        seconds = [player.computed for player in self.players]
        if len(groups) == 1:
            return {}
        return {_name(mesh, group): time for group, time in zip(groups, seconds, strict=True)}


def _name(mesh: Mesh, devices: Int[np.ndarray, " group"]) -> str:
    """Names devices by axes along which they are not all, as in `"pp=3"`."""
    places = map(np.unique, np.unravel_index(devices, tuple(mesh.shape.values())))
    by_axis = dict(zip(mesh.axis_names, places, strict=True))
    if prod(map(len, by_axis.values())) > len(devices):
        more = f" and {len(devices) - _MOST} more" if len(devices) > _MOST else ""
        return f"devices {', '.join(map(str, devices[:_MOST]))}{more}"
    return " ".join(
        f"{name}={','.join(map(str, numbers))}"
        for name, numbers in by_axis.items()
        if len(numbers) < mesh.shape[name]
    )
