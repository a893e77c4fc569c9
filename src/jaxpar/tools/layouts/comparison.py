"""Compares an inferred map with plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.layout import Layout, LayoutError, LayoutMap, data_parallel, fully_sharded
from jaxpar.schedule import Target
from jaxpar.tools.timeline.timeline import of_arrays
from jaxpar.tools.toolkit_api import AnyMesh, filling, is_array, size_text


@dataclass(frozen=True)
class Compared:
    name: str
    rules: LayoutMap
    bytes_per_device: int
    seconds: float | None = None  # of a step; None: not compiled, or it failed
    peak: int = 0  # bytes
    fits: bool = True  # into the chip's memory
    why_not: str = ""

    def __str__(self) -> str:
        text = f"{self.name}: {size_text(self.bytes_per_device)} a device"
        if self.seconds is not None:
            text += f", a step takes {self.seconds * 1e6:.4g} us and {size_text(self.peak)}"
        return text + (f", {self.why_not}" if self.why_not else "")


def others(
    params: Any, mesh: AnyMesh, without: LayoutMap | None
) -> Iterator[tuple[str, LayoutMap]]:
    # `without` is the inferred map before FSDP.
    names = tuple(map(str, mesh.axis_names))
    if without is not None:
        yield "without fully sharding", without
    with suppress(LayoutError):  # some sizes do not divide
        yield "fully sharded over all axes", fully_sharded(params, mesh, axis=names)
    yield "replicated", data_parallel(params, mesh, axis=names)


def compare(
    function: Callable[..., Any],
    params: Any,
    batch: Any,
    mesh: AnyMesh,
    maps: Mapping[str, LayoutMap],
    target: str | Target | None,
) -> Iterator[Compared]:
    seen = set[tuple[Layout, Any]]()
    for name, rules in maps.items():
        layout = rules.layout(params, mesh, strict=False)
        if (layout, rules.batch) in seen:
            continue
        seen.add((layout, rules.batch))
        held = layout.table().bytes_per_device
        if target is None:
            yield Compared(name, rules, held)
            continue
        try:
            costs = layout.explain(_step(function, params), target, batch, tries=0)
        except ValueError as reason:
            yield Compared(name, rules, held, why_not=str(reason).splitlines()[0])
            continue
        peak, chip = costs.program.memory.peak, costs.target.chip
        fits = chip is None or peak <= chip.capacity
        yield Compared(
            name, rules, held, costs.timeline.total, peak, fits, "" if fits else "too much for it"
        )


def _step(function: Callable[..., Any], params: Any) -> Callable[..., Any]:
    filled = filling(params)

    def called(arrays: Any, batch: Any) -> Any:
        return function(filled(filter(is_array, jax.tree.leaves(arrays))), batch)

    def step(arrays: Any, batch: Any) -> Any:
        alone, leaves = of_arrays(called, (arrays, batch))
        out = jax.eval_shape(alone, *leaves)
        is_loss = getattr(out, "shape", None) == () and jnp.issubdtype(out.dtype, jnp.floating)
        return (_with_gradient(called) if is_loss else called)(arrays, batch)

    return step


def _with_gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    # Leaves other than floats have no gradient.
    def called(arrays: Any, batch: Any) -> Any:
        flat, tree = jax.tree.flatten(arrays)
        real = [
            n
            for n, x in enumerate(flat)
            if is_array(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        ]

        def of_real(floats: list[Any]) -> Any:
            leaves = dict(enumerate(flat)) | dict(zip(real, floats, strict=True))
            return loss(tree.unflatten(list(leaves.values())), batch)

        value, gradients = jax.value_and_grad(of_real)([flat[n] for n in real])
        by_place = dict(zip(real, gradients, strict=True))
        return value, tree.unflatten([by_place.get(n) for n in range(len(flat))])

    return called
