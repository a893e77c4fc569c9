"""The process that compiles a target's programs."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from traceback import extract_tb
from typing import Any

import jaxpar
from jaxpar.schedule import CompiledProgram, Target, compile_for, timeline
from jaxpar.schedule import target as describe
from jaxpar.tools.accuracy.interval import texts_of
from jaxpar.tools.cli.console import UsageError
from jaxpar.tools.cli.ops import Ring
from jaxpar.tools.cli.predict_programs import PlannedProgram, programs, requested_options
from jaxpar.tools.cli.predict_results import Facts, Failure, Prediction, Request, request_from
from jaxpar.tools.cli.shared_options import mesh_error, parse_ring
from jaxpar.tools.cli.workers import answer, first_line, one_line
from jaxpar.tools.explain.pipelines import pipeline_lines
from jaxpar.tools.timeline.cache import default_folder
from jaxpar.tools.timeline.target import unknown_network
from jaxpar.tools.toolkit_api import jitted_with, stays_within_a_slice, versions, why_not_closed

Record = dict[str, Any]  # an entry: what it is, and the thing itself

COMPILER_PACKAGES = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-pjrt", "jax-cuda12-pjrt")}


def serve(request: Request) -> Iterator[Record]:
    """Yields `facts`, then `begin` and a result per program."""
    try:
        target = target_of(request)
        ring = () if request.function else parse_ring(request.axis, target.mesh)
        chosen = programs(request, target, ring)
    except UsageError as reason:
        yield _failure("", str(reason), usage=True)
        return
    except Exception as reason:
        yield _failure("", where(reason))
        return
    yield {"facts": asdict(facts_of(request, target, ring, chosen))}
    texts: dict[tuple[str, str], str] = {}  # the first mode that compiled to a text
    for program in chosen:
        label = f"{program.case} {program.mode}".rstrip()
        yield {"begin": label}
        try:
            prediction = _predict(program, request, target, texts)
        except Exception as reason:
            yield _failure(label, where(reason))
        else:
            yield {"prediction": asdict(prediction)}


def _failure(label: str, reason: str, usage: bool = False) -> Record:
    return {"failure": asdict(Failure(label, reason, usage))}


def _predict(
    program: PlannedProgram, request: Request, target: Target, texts: dict[tuple[str, str], str]
) -> Prediction:
    compiled = compiled_program(program, request, target)
    played = timeline(compiled)
    first = texts.setdefault((program.case, compiled.text), program.mode)
    return Prediction(
        case=program.case,
        mode=program.mode,
        timeline=played,
        floor=program.floor(compiled, played),
        memory=compiled.memory,
        compile_seconds=compiled.seconds,
        same_as=None if first == program.mode else first,
        intervals=tuple(texts_of(played, target)),
        pipeline=pipeline_lines(played, target),
    )


def compiled_program(program: PlannedProgram, request: Request, target: Target) -> CompiledProgram:
    return compile_for(
        program.function,
        target,
        *program.args,
        compiler_options=requested_options(request, target),
        cache=default_folder() if request.cache else None,
    )


def target_of(request: Request, needs_figures: bool = True) -> Target:
    # A measurement needs no figures.
    try:
        target = describe(request.target, request.mesh, figures=request.figures)
    except (ImportError, ValueError) as reason:
        text = str(reason)
        if text.startswith("make_mesh: "):
            text = mesh_error(request.mesh, reason)
        for prefix in ("target: ", f"{request.target!r}: "):
            text = text.removeprefix(prefix)
        raise UsageError(first_line(text)) from None
    if target.chip is None and not needs_figures:
        return target
    if why := unknown_network(target.mesh):
        raise UsageError(why)
    if target.chip is None:
        kind = target.mesh.devices.flat[0].device_kind
        raise UsageError(
            f"jaxpar has no published figures of {kind!r}; use a chip that it has, such as v5e:2x4 "
            "or h100:8"
        )
    return target


def facts_of(request: Request, target: Target, ring: Ring, chosen: list[PlannedProgram]) -> Facts:
    first = target.mesh.devices.flat[0]
    # A function of `jaxpar.jit` keeps its own options, besides the requested ones.
    _, options = jitted_with(chosen[0].function, requested_options(request, target))
    not_closed = _not_closed(target, ring)
    compilers = ("jax", *COMPILER_PACKAGES["tpu" if target.platform == "tpu" else "gpu"])
    return Facts(
        platform=target.platform,
        device_kind=first.device_kind,
        devices=target.mesh.size,
        mesh=dict(target.mesh.shape),
        ring=ring,
        links_apart=_links_apart(target, ring),
        disjoint=not_closed == [],
        not_closed=tuple(not_closed or ()),
        chip=asdict(target.chip) if target.chip else {},
        compiler_options=options,
        versions=versions(*compilers),
    )


def _links_apart(target: Target, ring: Ring) -> int:
    """Returns the most links between neighbours; 0 if the network joins some."""
    joins = target.platform == "tpu" and not all(
        stays_within_a_slice(target.mesh, name) for name in ring
    )
    return int(jaxpar.ring_hops(target.mesh, ring).max()) if ring and not joins else 0


def _not_closed(target: Target, ring: Ring) -> list[str] | None:
    """Returns why the ring's axes are not closed."""
    long = [name for name in ring if target.mesh.shape[name] > 1]
    if len(long) < 2 or target.platform != "tpu":
        return None
    sizes = {name: target.mesh.shape[name] for name in long}
    two = [name for name, size in sizes.items() if size == 2]
    if two and (len(two) < len(long) or len(long) < 3):
        return [f"the two devices of {name} have one link" for name in two]
    return [why for name in long if (why := why_not_closed(target.mesh, name))]


def where(reason: BaseException) -> str:
    frames = extract_tb(reason.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).parent == Path.cwd()]
    place = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    return f"{one_line(reason)}{place}"


if __name__ == "__main__":
    answer(lambda record: serve(request_from(record)))
