"""Guarded programs: their differences and their collectives."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import Mesh

from jaxpar.tools.program.mesh_axes import axes_of
from jaxpar.tools.program.operations import Collective, Conditional, Control, Loop, Schedule, read
from jaxpar.tools.program.sources import Line, Sources, line_of, own_line
from jaxpar.tools.timeline.frameworks import traced_by_jax
from jaxpar.tools.toolkit_api import COLLECTIVES, LAX_NAMES, size_text, subjaxprs

_BRANCHING = ("cond", "while")


@dataclass(frozen=True)
class Sent:
    name: str  # in `jax.lax`
    axes: tuple[str, ...]
    of: str  # dtype and local shape
    line: Line | None
    is_conditional: bool  # inside a branch, or a loop whose length depends on data

    def __str__(self) -> str:
        at = f" at {self.line}" if self.line else ""
        return f"{self.name} over {', '.join(self.axes) or 'no axis'} of {self.of}{at}"


@dataclass(eq=False)
class TracedProgram:
    name: str
    arguments: tuple[str, ...]
    collectives: tuple[Sent, ...]
    has_static: bool  # values of some arguments are part of it
    mesh: Mesh | None  # from its arguments' shardings
    text: bytes = field(repr=False)  # of its operations, compressed
    lowered: Any = field(repr=False)
    is_agreed: bool = False  # all processes have reached it
    result: int | None = None  # index of its smallest result

    @cached_property
    def digest(self) -> str:
        """Returns the same for equal programs."""
        return sha256(self.text).hexdigest()

    def details(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "arguments": list(self.arguments),
            "collectives": list(map(str, self.collectives)),
            "operations": zlib.decompress(self.text).decode().splitlines(),
        }

    @cached_property
    def sends(self) -> tuple[Sent, ...]:
        # The partitioner's are only in the compiled program, which JAX still has unless there are
        # compiler options.
        return self.collectives or tuple(_inserted(self.lowered.compile().as_text(), self.mesh))

    def first_for(self, missing: Sequence[int]) -> tuple[int, Sent] | None:
        """Returns the first collective that needs them."""
        numbered = enumerate(self.sends, 1)
        return next((pair for pair in numbered if self._needs(pair[1], missing)), None)

    def _needs(self, sent: Sent, missing: Sequence[int]) -> bool:
        if self.mesh is None or not set(sent.axes) <= set(self.mesh.axis_names):
            return True
        along = [self.mesh.axis_names.index(axis) for axis in sent.axes]
        other = [place for place in range(self.mesh.devices.ndim) if place not in along]
        processes = _processes(self.mesh)
        size = int(np.prod([processes.shape[place] for place in along]))
        groups = processes.transpose([*other, *along]).reshape(-1, size)
        is_here = (groups == jax.process_index()).any(axis=1)
        return bool(np.isin(groups[is_here], list(missing)).any())


def traced(jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Traced:
    return traced_by_jax(jitted.trace(*args, **kwargs))


def program_of(
    name: str, stage: jax.stages.Traced, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TracedProgram:
    lowered = stage.lower()
    return TracedProgram(
        name=name,
        arguments=tuple(_arguments(args, kwargs)),
        has_static=len(jax.tree.leaves(lowered.args_info)) < len(jax.tree.leaves((args, kwargs))),
        collectives=tuple(_collectives(stage.jaxpr.jaxpr)),
        mesh=_mesh_of((args, kwargs)),
        text=zlib.compress(lowered.as_text().encode(), 1),
        lowered=lowered,
    )


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    for keys, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
        kind = getattr(leaf, "dtype", type(leaf).__name__)
        spec = getattr(getattr(leaf, "sharding", None), "spec", "")
        where = f" sharded by {spec}" if spec != "" else ""
        yield f"{_place(keys)}: {kind}{list(np.shape(leaf))}{where}"


def _place(keys: Sequence[Any]) -> str:
    """Returns text such as `argument 0['w']`."""
    (kind, first, *rest) = (str(key) for key in keys)
    if kind == "[1]":
        return first.strip("[']") + "".join(rest)
    return f"argument {first.strip('[]')}{''.join(rest)}"


def _processes(mesh: Mesh) -> np.ndarray:
    return np.vectorize(lambda device: device.process_index)(mesh.devices)


def place_in(mesh: Mesh, ranks: Sequence[int]) -> str:
    """Returns the indices that all devices of processes share, such as `pp=2, tp=0`."""
    indices = np.argwhere(np.isin(_processes(mesh), ranks))  # [devices, axes]
    return ", ".join(
        f"{axis}={along[0]}"
        for axis, size, along in zip(mesh.axis_names, mesh.devices.shape, indices.T, strict=True)
        if size > 1 and len(set(along.tolist())) == 1
    )


def _mesh_of(tree: Any) -> Mesh | None:
    meshes = (getattr(getattr(x, "sharding", None), "mesh", None) for x in jax.tree.leaves(tree))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def _collectives(jaxpr: core.Jaxpr, is_conditional: bool = False) -> Iterator[Sent]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name.removesuffix("_start")
        name = LAX_NAMES.get(name, name)
        if name in COLLECTIVES and eqn.invars:
            axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
            axes = (axes,) if isinstance(axes, str) else tuple(map(str, axes))
            of = eqn.invars[0].aval
            shape = f"{getattr(of, 'dtype', '')}{list(getattr(of, 'shape', ()))}"
            yield Sent(name, axes, shape, line_of(eqn), is_conditional)
        inside = is_conditional or name in _BRANCHING
        for inner in subjaxprs(eqn.params):
            yield from _collectives(inner, inside)


def _inserted(text: str, mesh: Mesh | None) -> Iterator[Sent]:
    module, sources = read(text), Sources(text)
    instructions = {i.name: i for c in module.hlo.computations.values() for i in c.instructions}

    def walk(schedule: Schedule, is_conditional: bool) -> Iterator[Sent]:
        for operation in schedule.operations:
            if isinstance(operation, Collective):
                i, message = instructions[operation.name], operation.message
                axes = () if mesh is None else axes_of(mesh, message)
                line = own_line(sources.of(i))
                yield Sent(message.kind, axes, size_text(message.payload), line, is_conditional)
            elif isinstance(operation, Control):
                of_data = isinstance(operation, Conditional) and operation.taken is None
                of_data |= isinstance(operation, Loop) and operation.trips is None
                for inner in operation.runs:
                    yield from walk(inner, is_conditional or of_data)

    yield from walk(module.entry, False)


def first_difference(
    rank: int, ours: Mapping[str, Any], other: int, theirs: Mapping[str, Any]
) -> str:
    for kind, what in (("arguments", ""), ("collectives", "collective "), ("operations", "line ")):
        mine, others = ours[kind], theirs[kind]
        pairs = zip(_padded(mine, others), _padded(others, mine), strict=True)
        for number, (left, right) in enumerate(pairs, 1):
            if left != right:
                label = f"{what}{number}: " if what else ""
                left, right = _around_difference(left, right)
                return f"{label}process {rank} has {left}, process {other} {right}"
    return "their texts are the same, their digests are not"


def _around_difference(*texts: str) -> list[str]:
    place = next(
        (n for n, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1),
        min(map(len, texts)),
    )
    start = max(0, place - 100)
    return [f"{'...' if start else ''}{text[start : start + 300]}" for text in texts]


def _padded(lines: Sequence[str], others: Sequence[str]) -> list[str]:
    return [line.strip() for line in lines] + ["nothing more"] * (len(others) - len(lines))
