"""What is to be done over a ring, as one device sees it."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import jax

from jaxpar.axis.axis import Ring
from jaxpar.compiler.told import traced_asynchronous
from jaxpar.mesh.chips import Chip, traced_chip
from jaxpar.mesh.walk import AxisLinks, How, traced_links
from jaxpar.ring.seconds import Flow

Kind = Literal["matmul", "projection", "attention", "collective", "weights", "loss", "experts"]
Shape = tuple[int, ...]


def _traced_devices() -> int:
    return jax.sharding.get_abstract_mesh().size


@dataclass(frozen=True)
class Problem:
    """Work over a ring, as one device sees it: all that a choice may depend on.

    Attributes:
      kind: what is to be done: a collective beside a matmul, one of a layer, or attention, one by
        itself, weights that are gathered for a layer, a loss over a vocabulary, tokens sent to
        experts.
      ring: the devices.
      shapes: of the local operands, where they are known; of tokens and their choices for experts.
      forward: what the forward pass does.
      backward: what the backward pass does; nothing where one way serves both.
      needed: of experts, to how many devices a token must go, on average.
      chip: that the program is traced for; None: not in the table.
      devices: of the whole mesh.
      told: the collectives that the compiler runs beside other work; None: those of the program
        that is traced.
      what: by which it differs from other work of equal shapes, in words.
      links: what is known of those of the mesh.
      keeps: whether the forward pass may keep what it gathers for a backward pass of its own.
      keeps_by_jax: whether it does where the derivative is left to JAX.
      near: for work that needs only blocks of near devices: the directions in which they travel,
        and the number of hops; None: past all devices.
    """

    kind: Kind
    ring: Ring
    shapes: tuple[Shape, ...] = ()
    forward: tuple[Flow, ...] = ()
    backward: tuple[Flow, ...] = ()
    needed: float = 0.0
    chip: Chip | None = field(default_factory=traced_chip)
    devices: int = field(default_factory=_traced_devices)
    told: frozenset[str] | None = None
    what: str = ""
    links: AxisLinks = field(default_factory=traced_links)
    keeps: bool = False
    keeps_by_jax: bool = True
    near: tuple[tuple[int, ...], int] | None = None

    def messages(self, how: How) -> int:
        """How many share the busiest link, where all rings over its axes send so at once.

        Several where hops are over several links, or devices of one chip send at once; one where
        nothing is known of the mesh.
        """
        names = tuple(ring.names[0] for ring in self.ring.stages())
        if self.links.messages is None or not names:
            return 1
        return self.links.messages(names, how)

    @cached_property
    def spans_a_torus(self) -> bool:
        """Whether disjoint rings over its axes are known to have more links than one ring.

        Two devices of a chip that are on one axis may have all there is by one ring.
        """
        axes = self.ring.stages()
        if len(axes) == 1:
            return bool(self.links.walks.get(axes[0].names[0]))
        known = self.links.messages is not None and self.ring.has_disjoint
        return known and len(axes) * self.messages("ring") > self.messages("rings")  # more links

    @cached_property
    def beside(self) -> frozenset[str]:
        """The collectives that the compiler runs beside other work."""
        return traced_asynchronous() if self.told is None else self.told

    @property
    def figures(self) -> Chip:
        """Those of a chip that is in the table."""
        assert self.chip is not None, "nothing is predicted of a chip that is in no table"
        return self.chip

    @property
    def innermost(self) -> bool:
        """Whether devices of the ring are next to each other in the mesh: no axis is within it."""
        sizes = dict(jax.sharding.get_abstract_mesh().shape)
        axes = [name for name, size in sizes.items() if size > 1]
        within = [name for name in self.ring.names if sizes.get(name, 1) > 1]  # of one device: none
        return set(axes[len(axes) - len(within) :]) == set(within)
