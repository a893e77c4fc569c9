"""Times that no schedule beats."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxpar.tools.timeline.links import Links
from jaxpar.tools.timeline.target import Target, figures_of
from jaxpar.tools.timeline.timeline import CompiledProgram, Timeline, compile_for, timeline
from jaxpar.tools.toolkit_api import AxisLike, Chip, axis_names, naming, readable, value_error


@readable
@dataclass(frozen=True)
class Floor:
    """Two lower limits of a time, in seconds. No schedule beats the longer limit.

    Attributes:
      compute: all computation alone.
      transfer: all bytes alone, over all of a device's links to its group.
      one_ring: all bytes over the two links of a single ring; 0 for a program.

    Example:
      >>> Floor(compute=2e-3, transfer=1e-3).total
      0.002
    """

    compute: float
    transfer: float
    one_ring: float = 0.0

    @property
    def total(self) -> float:
        """Returns the longer of `compute` and `transfer`."""
        return max(self.compute, self.transfer)

    @property
    def of_one_ring(self) -> float:
        """Returns the floor of a single ring."""
        return max(self.total, self.one_ring)


@readable
@naming("matmul_floor")
def matmul_floor(
    target: Target,
    subscripts: str,
    lhs: tuple[int, ...],
    rhs: tuple[int, ...],
    sent_bytes: float,
    *,
    axis: AxisLike | None = None,
    dtype: Any = jnp.bfloat16,
    grad: bool = False,
) -> Floor:
    """Returns lower limits of an overlapped matmul's time: computation alone, transfers alone.

    The matmul is compiled in one piece. Transfers use as many links as the device with the fewest
    has to its group; a GPU has one port.

    Args:
      target: from `jaxpar.schedule.target`.
      subscripts: the local einsum, as in `"mk,kn->mn"`.
      lhs: shape of the left operand on a device, after a gather.
      rhs: likewise.
      sent_bytes: bytes that a device sends in the forward pass: `(n - 1) / n` of the gathered
        operand, or of the result before its scatter.
      axis: the mesh axes of the gather or scatter. None: one ring.
      dtype: the dtype.
      grad: counts three matmuls and twice the bytes.

    Raises:
      ValueError: no figures of the chip; subscripts that do not fit the shapes.

    Example:
      >>> floor = matmul_floor(target("v5e:2x2"), "mk,kn->mn", (1024, 512), (512, 1024), 0.0)
      >>> floor.total == floor.compute > 0
      True
    """
    chip = figures_of(target)
    ring = all_links = (2 if chip.torus else 1) * chip.link
    if axis is not None:
        all_links = Links(target.mesh, chip).speed_within(rings_over(target.mesh, axis))
    parsed = re.fullmatch(r"(\w+),(\w+)->(\w+)", subscripts)
    if parsed is None or [len(parsed[1]), len(parsed[2])] != [len(lhs), len(rhs)]:
        raise value_error(
            f"subscripts={subscripts!r} must be like 'mk,kn->mn', with a label for each dimension "
            f"of the operands, local shapes {lhs} and {rhs}"
        )
    left, right, out = parsed.groups()
    sizes = dict(zip(left + right, (*lhs, *rhs), strict=True))
    products = [(left, right, out)]
    if grad:
        products += [(out, right, left), (left, out, right)]
    seconds = sum(_one_piece(target, *product, sizes, dtype) for product in products)
    sent = (2 if grad else 1) * sent_bytes
    return Floor(seconds, sent / all_links, sent / min(ring, all_links))


def rings_over(mesh: Mesh, axis: AxisLike) -> list[list[int]]:
    names = axis_names(axis)
    along = [mesh.axis_names.index(name) for name in names]
    others = [place for place in range(mesh.devices.ndim) if place not in along]
    places = np.arange(mesh.size).reshape(mesh.devices.shape).transpose([*others, *along])
    return places.reshape(-1, prod(mesh.shape[name] for name in names)).tolist()


@readable
@naming("program_floor")
def program_floor(
    program: CompiledProgram, played: Timeline | None = None, chip: Chip | None = None
) -> Floor:
    """Returns lower limits of a program's time: FLOPs at peak, and bytes over all links.

    FLOPs are those of the traced or the compiled matmuls, whichever are fewer. Operands of 32 bits
    count at the peak of 16 bits, operands of 8 bits at twice that peak. On GPUs only half the bytes
    of a sum count, as the switch may do the addition. The longer time of links and of the network
    between TPU slices counts.

    Args:
      program: from `compile_for`.
      played: the program's timeline, if known.
      chip: figures instead of the target's.

    Raises:
      ValueError: no figures of the chip, and none given.

    Example:
      >>> x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=P("tp"))
      >>> program_floor(compile_for(jnp.sin, target("v5e:2x2"), x)).total
      0.0
    """
    chip = figures_of(program.target, chip)
    played = timeline(program, chip) if played is None else played
    transfer = Links(program.target.mesh, chip).least_of_all(played.transfers)
    return Floor(min(program.flops / chip.flops, played.at_peak), transfer)


def _one_piece(
    target: Target, left: str, right: str, out: str, sizes: dict[str, int], dtype: Any
) -> float:
    operands = [
        jax.ShapeDtypeStruct([sizes[label] for label in labels], dtype, sharding=PartitionSpec())
        for labels in (left, right)
    ]
    local = jax.shard_map(
        lambda x, y: jnp.einsum(f"{left},{right}->{out}", x, y),
        in_specs=(PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    return timeline(compile_for(local, target, *operands)).compute
