"""Links between described devices, and their transfer times."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from jaxpar.tools.program.costs import Message
from jaxpar.tools.program.mesh_axes import Groups, Pairs, in_mesh, lane_of, lane_of_groups
from jaxpar.tools.timeline.event import Event
from jaxpar.tools.timeline.gpu_tables import kind_of_permute
from jaxpar.tools.timeline.target import measured_of
from jaxpar.tools.toolkit_api import (
    ADDED,
    PERMUTE_STARTS,
    Chip,
    Tpu,
    closed_dims,
    platform_of,
    slice_of,
)

RACK = 72  # GPUs that a switch joins across hosts
OWN_KERNEL = "(XLA's"  # in a row: a kernel of XLA's own, in place of NCCL's
BETWEEN_SLICES = "(DCN)"  # in a row: over the data-centre network between TPU slices


@dataclass(frozen=True)
class Route:
    """Seconds a byte on each link, and hops."""

    links: Int[np.ndarray, "used"]  # indices of the links in use
    seconds: Float[np.ndarray, "used"]  # of each of them
    hops: int
    in_pieces: bool = False  # a piece is forwarded while the next arrives
    starts: float = 1.0  # how many starts of a transfer
    latency: float = 0.0  # a table's, in place of starts and hops

    def of(self, size: float) -> "Route":
        return replace(self, seconds=self.seconds * size)


@dataclass(frozen=True)
class Transfer:
    row: str  # where the timeline shows it
    sent: float  # bytes that a device sends
    route: Route
    is_measured: bool = False  # a GPU's table covers its size


class Links:
    # Partitions are in mesh order.
    def __init__(self, mesh: Mesh, chip: Chip) -> None:
        self.mesh, self.chip = mesh, chip
        devices = list(mesh.devices.flat)
        self.devices = len(devices)
        if chip.torus:
            coords = np.array([device.coords for device in devices])  # [devices, dims]
            self.coords = coords - coords.min(axis=0)
            self.extent = self.coords.max(axis=0) + 1
            self.wraps = closed_dims(devices[0].device_kind, self.extent)
            numbers = [slice_of(device) for device in devices]
            self.slice = np.unique(numbers, return_inverse=True)[1]  # slices share coordinates
            # Two per node and dim; then out of each device to the other slices, and in.
            self.torus = int(self.extent.prod()) * len(set(numbers)) * len(self.extent) * 2
            self.count = self.torus + 2 * self.devices
        else:
            self.host = np.array([_switch_of(device, chip) for device in devices])
            self.torus, self.count = 0, 4 * self.devices  # out and in, by switch and by network
        self.tables = measured_of(chip)
        self.permute = lru_cache(maxsize=None)(self._permute)
        self._rings: dict[str, dict[frozenset[frozenset[int]], Pairs]] = {}  # by names of axes

    def transfer(self, message: Message, share: float) -> Transfer:
        message = in_mesh(message, self.mesh)
        payload, kind = message.payload * share, message.kind
        if message.between_slices:
            return self._between_slices(message, payload)
        if kind == "collective-permute":
            row, route = self._lane(message.pairs), self.permute(message.pairs).of(payload)
            moving = [pair for pair in message.pairs if pair[0] != pair[1]]
            measured = self._measured(kind_of_permute(moving), moving, 0, payload)
            return Transfer(row, payload, *(measured or (route, False)))
        groups = message.groups or [range(self.devices)]
        size = len(groups[0])
        kernel = f" {OWN_KERNEL} {message.kernel})" if message.kernel else ""
        row = f"{lane_of_groups(self.mesh, groups)}{kernel} {kind}"
        whole = payload * size if kind == "all-gather" else payload
        passes = 2 if kind == "all-reduce" else 1  # as a reduce-scatter and an all-gather
        sent = passes * whole * (size - 1) / size
        if measured := self._measured(kind, groups, size, whole):
            route, is_measured = measured  # the tables are NCCL's
            return Transfer(row, sent, route, is_measured and not kernel)
        if kind in ("all-to-all", "ragged-all-to-all"):
            return Transfer(row, sent, self.all_to_all(groups).of(payload))
        in_turn = message.ways == 1 and message.phases > 2  # one link at a time hides additions
        added = passes == 2 and message.phases > 1 and not in_turn
        route = self.ring(groups, passes, message).of(whole / ADDED if added else whole)
        return Transfer(row, sent, route)

    def _between_slices(self, message: Message, payload: float) -> Transfer:
        # All that leaves a device, as no figure tells a host's own devices from others.
        if message.pairs:
            source, target = np.array(message.pairs).T
            row, sent = f"{self._lane(message.pairs)} {BETWEEN_SLICES}", payload
        else:
            source = target = np.array(message.groups).reshape(-1)
            size = len(message.groups[0])
            whole = payload * size if message.kind == "all-gather" else payload
            sent = whole * (size - 1) / size * (2 if message.kind == "all-reduce" else 1)
            lane = lane_of_groups(self.mesh, message.groups)
            row = f"{lane} {BETWEEN_SLICES} {message.kind}"
        load = np.zeros(self.count)
        load[self.torus + source] = load[self.torus + self.devices + target] = 1.0
        return Transfer(row, sent, self._route(load, 1).of(sent))

    def latency(self, route: Route) -> float:
        """Returns a message's seconds beyond its bytes'."""
        hops = route.hops * self.chip.latency
        if route.in_pieces:
            hops = max(0.0, hops - float(route.seconds.max(initial=0.0)))
        return route.starts * self.chip.start + hops if route.hops else route.latency

    def _measured(
        self, kind: str, groups: Groups, size: int, whole: float
    ) -> tuple[Route, bool] | None:
        """Returns a table's route, and whether it fits."""
        if self.tables is None or any(len(set(self.host[list(group)])) > 1 for group in groups):
            return None
        seconds = self.tables.collective(kind, size, whole) if groups else None
        if seconds is None:
            return None
        members = np.array(groups)
        load = self._ports(members) if size else self._load(*members.T)[0]  # a permute has a way
        ports = np.flatnonzero(load)
        latency = self.tables.latency(kind, size, whole)
        sending = np.full(len(ports), seconds - latency)
        is_within = self.tables.has_collective(kind, size, whole)
        return Route(ports, sending, 0, latency=latency), is_within

    def _lane(self, pairs: Pairs) -> str:
        # Rings over the same axes are numbered. The first direction is `+`.
        name = lane_of(self.mesh, pairs)
        sources, targets = map(set, zip(*pairs, strict=True))
        if name == "itself" or name[-1:].isdecimal() or sources != targets:
            return name  # its offset names it, or it is no ring
        ways = frozenset(map(frozenset, pairs))
        rings = self._rings.setdefault(name, {})
        first = rings.setdefault(ways, pairs)
        number = list(rings).index(ways) + 1
        return f"{name} ring {number}{'+' if set(pairs) == set(first) else '-'}"

    def used(self, transfer: Transfer) -> float:
        """Returns how many links a device uses, on average."""
        if not self.chip.torus or BETWEEN_SLICES in transfer.row:
            return 1.0
        senders = np.unique(transfer.route.links // (2 * len(self.extent)))
        return transfer.route.links.size / max(senders.size, 1)

    def there(self, transfer: Event) -> int:
        """Returns how many links a device has for it."""
        # A port counts as a link.
        if not self.chip.torus or BETWEEN_SLICES in transfer.row:
            return 1
        both_ways = [1 if extent == 2 else 2 for extent in self.extent if extent > 1]
        return max(1, sum(both_ways))

    def speed(self, transfer: Event) -> float:
        """Returns the bytes a second of each of its links."""
        return self.chip.network if BETWEEN_SLICES in transfer.row else self.chip.link

    def least(self, transfer: Event) -> float:
        """Returns a transfer's seconds over all links."""
        sent = transfer.bytes
        if not self.chip.torus and transfer.row.endswith("all-reduce"):
            sent /= 2  # a GPU's switch may add on the way
        return sent / (self.there(transfer) * self.speed(transfer))

    def least_of_all(self, transfers: Iterable[Event]) -> float:
        """Returns their seconds, if a slice's links and the network send at once."""
        seconds = [0.0, 0.0]
        for transfer in transfers:
            seconds[BETWEEN_SLICES in transfer.row] += self.least(transfer)
        return max(seconds)

    @property
    def apart(self) -> int:
        """Returns how many slices, or hosts of GPUs, a slow network joins."""
        return len(np.unique(self.slice if self.chip.torus else self.host))

    def is_slow(self, transfer: Transfer) -> bool:
        """Returns whether it goes over that network."""
        if self.chip.torus:
            return BETWEEN_SLICES in transfer.row
        return bool((transfer.route.links >= 2 * self.devices).any())

    def within(self, groups: Groups) -> int:
        """Returns a device's fewest links to its group."""
        if not self.chip.torus:
            return 1
        return min(map(self._degree, groups))

    def speed_within(self, groups: Groups) -> float:
        """Returns bytes a second of a device to its group."""
        joins = self.chip.torus and any(map(self._joins_slices, groups))
        return self.within(groups) * self.chip.link + (self.chip.network if joins else 0.0)

    def _joins_slices(self, group: Sequence[int]) -> bool:
        return len(set(self.slice[list(group)].tolist())) > 1

    def _degree(self, group: Sequence[int]) -> int:
        there = self._places(group)
        fewest = min(len(self._next_to(place) & there) for place in group)
        # Devices of one chip have no link between them.
        return fewest or int(len(there) < len(group) or not self._joins_slices(group))

    def _places(self, group: Sequence[int]) -> frozenset[tuple[int, ...]]:
        members = list(group)  # as indices
        there = zip(self.slice[members].tolist(), self.coords[members].tolist(), strict=True)
        return frozenset((slice, *coords) for slice, coords in there)

    def _next_to(self, place: int) -> set[tuple[int, ...]]:
        places: set[tuple[int, ...]] = set()
        here = self.coords[place]
        for dim, step in product(range(len(here)), (1, -1)):
            next_to = here.copy()
            next_to[dim] += step
            if self.wraps[dim]:
                next_to[dim] %= self.extent[dim]
            places.add((int(self.slice[place]), *next_to.tolist()))
        return places

    def _permute(self, pairs: Pairs) -> Route:
        source, target = np.array(pairs, dtype=int).reshape(-1, 2).T
        load, hops = self._load(source, target)
        return self._route(load, hops, starts=PERMUTE_STARTS if self.chip.torus else 1.0)

    def ring(self, groups: Groups, passes: int, message: Message) -> Route:
        """Returns the route of XLA's own collective, per byte of the full array.

        A gather is one pass. A closed dimension has two directions. An open one has one, because
        data returns over its links. Groups interleaved along a dimension share its links. Over
        several dimensions, only cores of a chip share.
        """
        members = np.array(groups)  # [groups, size]
        size = members.shape[1]
        share = passes * (size - 1) / size
        if not self.chip.torus:
            within = max(Counter(self.host[members[0]].tolist()).values())
            load = self._ports(members) * share
            return self._route(load, passes * max(within - 1, 1), starts=float(passes))
        lengths = np.array([len(set(dim.tolist())) for dim in self.coords[members[0]].T])
        closed = self.wraps & (lengths == self.extent)
        dims = int((lengths > 1).sum())
        room = int(((lengths > 1) * (1 + closed)).sum())
        one_ring = message.phases == 1 and dims > 1  # through all of them
        hops = size - 1 if one_ring else int(np.where(closed, lengths // 2, lengths - 1).sum())
        if dims == 1:
            load = sum((self._round(group[None]) for group in members), np.zeros(self.count))
        else:
            load = self._round(members) * self._on_the_same_chips(members)
        load *= share / max(min(message.ways, room), 1)
        known = platform_of(self.chip.kind)
        starts = known.measured.sparse_core_starts if isinstance(known, Tpu) else 1.0
        return self._route(load, passes * hops, one_ring, starts)

    def _on_the_same_chips(self, members: Int[np.ndarray, "groups size"]) -> int:
        chips = Counter(map(self._places, members.tolist()))
        return max(chips.values())

    def _round(self, members: Int[np.ndarray, "groups size"]) -> Float[np.ndarray, "links"]:
        following = np.roll(members, -1, axis=-1)
        load = np.zeros(self.count)
        for source, target in ((members, following), (following, members)):
            load += self._load(source.reshape(-1), target.reshape(-1))[0]
        return np.minimum(load, 1.0)

    def _ports(self, members: Int[np.ndarray, "groups size"]) -> Float[np.ndarray, "links"]:
        load = np.zeros((4, self.devices))  # out and in, through the switch and through the network
        load[:2, members.reshape(-1)] = 1.0
        for group in members:
            hosts, counts = np.unique(self.host[group], return_counts=True)
            if len(hosts) > 1:  # traffic out of a host is spread over its members
                load[2:, group] = 1.0 / counts[np.searchsorted(hosts, self.host[group])]
        return load.reshape(-1)

    def all_to_all(self, groups: Groups) -> Route:
        load, most = np.zeros(self.count), 0
        members = np.array(groups)
        size = members.shape[1]
        for offset in range(1, size):
            part, hops = self._load(members.reshape(-1), np.roll(members, -offset, 1).reshape(-1))
            load, most = load + part / size, max(most, hops)
        return self._route(load, most)

    def _route(
        self,
        load: Float[np.ndarray, "links"],
        hops: int,
        in_pieces: bool = False,
        starts: float = 1.0,
    ) -> Route:
        used = np.flatnonzero(load)
        if not self.chip.torus and not (used >= 2 * self.devices).any():
            starts = 0.0  # behind one switch: only the network takes a start
        return Route(used, load[used] / self._bandwidth()[used], hops, in_pieces, starts)

    def _bandwidth(self) -> Float[np.ndarray, "links"]:
        if self.chip.torus:
            speeds = [self.chip.link, self.chip.network or self.chip.link]
            return np.repeat(speeds, [self.torus, 2 * self.devices])
        return np.repeat([self.chip.link, self.chip.network or self.chip.link], 2 * self.devices)

    def _load(
        self, source: Int[np.ndarray, "messages"], target: Int[np.ndarray, "messages"]
    ) -> tuple[Float[np.ndarray, "links"], int]:
        # Messages go axis by axis.
        load = np.zeros(self.count)
        if not self.chip.torus:
            across = self.host[source] != self.host[target]
            moves = source != target
            for shift, ends in ((0, source), (1, target)):
                # Ports in order: out to the switch, in from it, out to the network, in from it.
                port = (2 * across + shift) * self.devices + ends
                np.add.at(load, port[moves], 1.0)
            return load, 1
        here, there, slices = self.coords[source].copy(), self.coords[target], self.slice[source]
        most = np.zeros(len(here), dtype=int)
        for dim, extent in enumerate(self.extent):
            apart = there[:, dim] - here[:, dim]
            if self.wraps[dim]:  # the shorter direction
                apart = (apart + extent // 2) % extent - extent // 2
                # Half way round, both directions are equal: a message and its answer take one each.
                apart = np.where((2 * apart == -extent) & (here[:, dim] % 2 == 1), -apart, apart)
            most += np.abs(apart)
            for _ in range(int(np.abs(apart).max(initial=0))):  # all messages advance by a link
                step = np.sign(apart)
                moving = step != 0
                node = np.ravel_multi_index(tuple(here[moving].T), tuple(self.extent))
                node += slices[moving] * int(self.extent.prod())
                link = (node * len(self.extent) + dim) * 2 + (step[moving] < 0)
                np.add.at(load, link, 1.0)
                here[:, dim] = (here[:, dim] + step) % extent
                apart = apart - step
        return load, int(most.max(initial=0))


def _switch_of(gpu: Any, chip: Chip) -> int:
    return gpu.id // chip.switched if chip.switched == RACK else gpu.process_index
