"""Checks of a mesh."""

from collections.abc import Iterable
from math import prod
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jaxpar.arguments.calls import type_error, value_error
from jaxpar.arguments.types import AnyMesh
from jaxpar.axis.axis import AxisLike, axis_names


def check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise type_error(
            f"mesh must be a jax.sharding.Mesh, got {mesh!r} of type {type(mesh).__name__}; "
            "make_mesh makes one"
        )


def axes_in(mesh: AnyMesh, axis: AxisLike) -> tuple[str, ...]:
    names = axis_names(axis)
    for name in names:
        if name not in mesh.shape:
            raise value_error(
                f"axis {name!r} is not an axis of the mesh, which has {dict(mesh.shape)}"
            )
    return names


def size_of(mesh: AnyMesh, names: Iterable[str]) -> int:
    return prod(mesh.shape[name] for name in names)
