"""Describes work over a ring, from a device's view."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import jax

from jaxpar.axis.axis import Ring
from jaxpar.axis.ring_order import AxisLinks, How, traced_links
from jaxpar.platforms.async_options import traced_asynchronous
from jaxpar.platforms.chips import Chip, traced_chip
from jaxpar.ring.seconds import Flow

Kind = Literal["matmul", "projection", "attention", "collective", "weights", "loss", "experts"]
Shape = tuple[int, ...]


def _traced_devices() -> int:
    return jax.sharding.get_abstract_mesh().size


@dataclass(frozen=True)
class Problem:
    """Work over a ring, from a device's view: everything on which a choice may depend."""

    kind: Kind
    ring: Ring
    # of the local operands; for experts, of tokens and their choices
    shapes: tuple[Shape, ...] = ()
    forward: tuple[Flow, ...] = ()
    backward: tuple[Flow, ...] = ()  # empty if one algorithm serves both passes
    needed: float = 0.0  # average number of devices that a token needs
    chip: Chip | None = field(default_factory=traced_chip)  # None: unknown
    devices: int = field(default_factory=_traced_devices)  # of the whole mesh
    # collectives that overlap with other work; None: as the traced program's options say
    told: frozenset[str] | None = None
    what: str = ""  # tells it from other work of equal shapes
    links: AxisLinks = field(default_factory=traced_links)
    keeps: bool = False  # whether gathered blocks may be saved for a special backward pass
    keeps_by_jax: bool = True  # whether they may if JAX derives it
    # directions and number of hops, if only near devices are needed
    near: tuple[tuple[int, ...], int] | None = None

    def messages(self, how: How) -> int:
        """Returns the messages on the busiest link, if all rings send; unknown: 1."""
        names = tuple(ring.names[0] for ring in self.ring.stages())
        if self.links.messages is None or not names:
            return 1
        return self.links.messages(names, how)

    @cached_property
    def spans_a_torus(self) -> bool:
        """Returns whether disjoint rings are known to add links."""
        # One ring may have all links of two devices of a chip on one axis.
        axes = self.ring.stages()
        if len(axes) == 1:
            return bool(self.links.walks.get(axes[0].names[0]))
        known = self.links.messages is not None and self.ring.has_disjoint
        return known and len(axes) * self.messages("ring") > self.messages("rings")  # more links

    @cached_property
    def beside(self) -> frozenset[str]:
        return traced_asynchronous() if self.told is None else self.told

    @property
    def figures(self) -> Chip:
        assert self.chip is not None, "no prediction for a chip that is in no table"
        return self.chip

    @property
    def innermost(self) -> bool:
        """Returns whether its axes are the mesh's last, with neighbouring devices."""
        sizes = dict(jax.sharding.get_abstract_mesh().shape)
        axes = [name for name, size in sizes.items() if size > 1]
        within = [name for name in self.ring.names if sizes.get(name, 1) > 1]  # more than a device
        return set(axes[len(axes) - len(within) :]) == set(within)
