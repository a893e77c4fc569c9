"""What must be equal in all processes, compared before the first collective."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxpar._calls import public
from jaxpar._checks import check_number
from jaxpar._types import Number
from jaxpar.layout import Layout, LayoutMap
from jaxpar.layout._paths import arrays_of
from jaxpar.processes._describe import versions
from jaxpar.processes._meeting import compare

_SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64")


@public
def agree(*, timeout_s: Number = 60, **values: Any) -> None:
    """Compares what must be equal in all processes, before the first collective.

    A collective among programs that differ hangs, or returns garbage with exit code 0. Versions,
    settings of compilers and the kind and number of devices are compared always.

    Args:
      timeout_s: seconds to wait for the others.
      values: meshes, layouts, pytrees of arrays or shapes, whatever prints itself; and programs, as
        `step=jax.jit(step).lower(*args)`, which compares every operation.

    Raises:
      ValueError: processes that differ: names both sides and the first difference. All processes
        raise it.
      TimeoutError: processes that did not come, by their numbers. JAX waits for dead ones at exit,
        for the `heartbeat_timeout_seconds` of `initialize`.

    Cost: a message of some hundred bytes from each process to process 0, over the network of hosts.

    Example:
      >>> agree(mesh=make_mesh("tp=8"), step=jax.jit(jnp.sin).lower(1.0))  # alone: always
    """
    seconds = check_number("timeout_s", timeout_s)
    texts = {"what it runs on": _surroundings()}
    texts |= {name: list(_lines(value)) for name, value in values.items()}
    if jax.process_count() == 1:
        return
    compare(texts, seconds)


def _lines(value: Any) -> Iterator[str]:
    """A value as text, of which equal values have the same."""
    match value:
        case Mesh():
            yield f"axes {dict(value.shape)}"
            for index, device in np.ndenumerate(value.devices):
                yield f"{index}: device {device.id} of process {device.process_index}"
        case AbstractMesh():
            yield f"axes {dict(value.shape)}"
        case Layout():
            yield f"mesh {dict(value.mesh.shape)}"
            for path, array in value.items():
                yield f"{path}: {array.dtype}{list(array.shape)} {array.spec}"
        case LayoutMap() | str():
            yield from str(value).splitlines()
        case _ if hasattr(value, "as_text"):  # a program
            yield from value.as_text().splitlines()
        case _:
            arrays = [found for found in arrays_of(value)[0] if found is not None]
            if len(arrays) != len(jax.tree.leaves(value)) or not arrays:
                yield from repr(value).splitlines()
                return
            for path, x in arrays:
                if hasattr(x, "shape"):
                    spec = getattr(getattr(x, "sharding", None), "spec", "")
                    yield f"{path}: {x.dtype}{list(x.shape)} {spec}"
                else:
                    yield f"{path}: {x!r}"


def _surroundings() -> list[str]:
    settings = {name: os.environ.get(name, "") for name in _SETTINGS}
    local = jax.local_devices()
    return [
        *(f"{name} {number}" for name, number in versions().items()),
        *(f"{name}={text}" for name, text in settings.items()),
        f"{len(local)} local devices of kind {local[0].device_kind}",
    ]
