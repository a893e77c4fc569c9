"""The mesh of a run, and how a batch is laid out on it."""

from collections.abc import Mapping
from math import lcm, prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar import make_mesh
from jaxpar.layers import zigzag_order
from jaxpar.tools.cli.console import UsageError
from jaxpar.tools.cli.shared_options import mesh_error
from language_model.data import PADDING, Batch

AXES = ("pp", "dp", "fsdp", "ep", "cp", "tp")
BATCH_AXES, SEQUENCE_AXES = ("dp", "fsdp", "ep"), ("cp", "tp")
TOKENS = PartitionSpec(BATCH_AXES, "cp")  # whole over tp: each device has rows of the table
LABELS = PartitionSpec(BATCH_AXES, SEQUENCE_AXES)  # like the activations

Sizes = Mapping[str, int]


def mesh_axes(text: str) -> dict[str, int]:
    """Reads `"dp=2,tp=4"`; axes that it leaves out have size 1."""
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in AXES or name in sizes or not size.removeprefix("-").isdecimal():
            raise UsageError(
                f"--mesh {text}: {part.strip()!r} is not one of {', '.join(AXES)}, each once, and "
                "its size, as in 'dp=2,fsdp=2,tp=2'"
            )
        sizes[name] = int(size)
    return {**sizes, **{name: 1 for name in AXES if name not in sizes}}


def build_mesh(text: str, devices: list[Any] | None = None) -> Mesh:
    """Makes the mesh over `devices`; over the first of this process's where they are fewer."""
    axes, devices = mesh_axes(text), devices or jax.devices()
    if -1 not in axes.values() and jax.process_count() == 1:
        devices = devices[: max(1, int(np.prod(list(axes.values()))))]
    try:
        return make_mesh(axes, devices=devices)
    except ValueError as reason:
        raise UsageError(mesh_error(text, reason)) from None


def padded_sizes(batch: int, sequence: int, microbatches: int, sizes: Sizes) -> tuple[int, int]:
    """Returns the batch and sequence that the mesh divides, at least as large as those given."""
    rows = prod(sizes[name] for name in BATCH_AXES) * microbatches
    # Zigzag cuts the sequence into two chunks a device of cp.
    zigzag = 2 * sizes["cp"] if sizes["cp"] > 1 else 1
    # Devices of pp compute the losses of parts of what each has.
    columns = lcm(zigzag, sizes["cp"] * sizes["tp"] * sizes["pp"])
    return -(-batch // rows) * rows, -(-sequence // columns) * columns


def pad_batch(batch: Batch, shape: tuple[int, int]) -> Batch:
    """Adds rows and columns that count nowhere: no token attends to them, no expert gets them."""
    missing = [(0, size - have) for size, have in zip(shape, batch[0].shape, strict=True)]
    return np.pad(batch[0], missing), np.pad(batch[1], missing, constant_values=PADDING)


def place_batch(batch: Batch, mesh: Mesh, microbatches: int = 1) -> tuple[jax.Array, jax.Array]:
    """Pads a batch, puts the sequence in its order over cp, and gives each device its blocks.

    Every process has the whole batch, which is small, and uploads what its own devices hold.
    """
    sizes = dict(mesh.shape)
    tokens, labels = pad_batch(batch, padded_sizes(*batch[0].shape, microbatches, sizes))
    order = sequence_order(tokens.shape[1], sizes["cp"])
    return (
        _place(tokens[:, order], NamedSharding(mesh, TOKENS)),
        _place(labels[:, order], NamedSharding(mesh, LABELS)),
    )


def sequence_order(length: int, size: int) -> np.ndarray:
    """Returns the position of the sequence at each place, device by device of cp."""
    return zigzag_order(length, size) if size > 1 else np.arange(length)


def _place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
