"""The process of one target: reads a request, compiles, and writes results line by line.

TPU and GPU compilers cannot share a process, and one that dies takes only its own with it.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from traceback import extract_tb
from typing import Any

import jaxpar
from jaxpar.bench._errors import UsageError
from jaxpar.bench._ops import Ring
from jaxpar.predict._programs import Program, programs
from jaxpar.predict._results import (
    Facts,
    Failure,
    Prediction,
    Request,
    prediction_record,
    request_from,
)
from jaxpar.schedule import Target, compile_for, timeline
from jaxpar.schedule import target as describe

Emit = Callable[[str, Any], None]

_COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-pjrt", "jax-cuda12-pjrt")}


def main() -> None:
    """Serves the request on stdin; what a user's function prints goes to stderr."""
    with os.fdopen(os.dup(1), "w", buffering=1) as lines:
        os.dup2(2, 1)

        def emit(kind: str, record: Any) -> None:
            lines.write(json.dumps({kind: record}) + "\n")

        serve(request_from(json.load(sys.stdin)), emit)
        emit("end", None)


def serve(request: Request, emit: Emit) -> None:
    """Emits `facts`, then a `prediction` or a `failure` for each program."""
    try:
        target = _target(request)
        ring = () if request.function else _ring(request, target)
        chosen = programs(request, target, ring)
    except UsageError as reason:
        emit("failure", asdict(Failure("", str(reason), usage=True)))
        return
    except Exception as reason:
        emit("failure", asdict(Failure("", _one_line(reason))))
        return
    emit("facts", asdict(_facts(target, ring)))
    texts: dict[tuple[str, str], str] = {}  # the mode that first compiled to a text
    for program in chosen:
        label = f"{program.case} {program.mode}".rstrip()
        emit("begin", label)
        try:
            prediction = _predict(program, request, target, texts)
        except Exception as reason:
            emit("failure", asdict(Failure(label, _one_line(reason))))
        else:
            emit("prediction", prediction_record(prediction))


def _predict(
    program: Program, request: Request, target: Target, texts: dict[tuple[str, str], str]
) -> Prediction:
    options = dict(request.compiler_options) or None
    compiled = compile_for(program.function, target, *program.args, compiler_options=options)
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
    )


def _target(request: Request) -> Target:
    try:
        found = describe(request.target, request.mesh)
    except (ImportError, ValueError) as reason:
        text = str(reason)
        if text.startswith("make_mesh: "):
            # What follows the semicolon is a remedy for who calls make_mesh.
            text = text.removeprefix("make_mesh: ").partition("; ")[0]
            text = f"--mesh {request.mesh}: {text}; a size of -1 takes what the other axes leave"
        for prefix in ("target: ", f"{request.target!r}: "):
            text = text.removeprefix(prefix)
        raise UsageError(_first_line(text)) from None
    if found.chip is None:
        kind = found.mesh.devices.flat[0].device_kind
        raise UsageError(
            f"jaxpar has no published figures of {kind!r}; use a chip that it has, such as v5e:2x4 "
            "or h100:8"
        )
    return found


def _ring(request: Request, target: Target) -> Ring:
    mesh = target.mesh
    ring = tuple(request.axis.split(",")) if request.axis else (mesh.axis_names[-1],)
    if len(set(ring)) != len(ring) or not set(ring) <= set(mesh.axis_names):
        raise UsageError(
            f"--axis {request.axis} must name distinct axes of the mesh, which has "
            f"{', '.join(mesh.axis_names)}"
        )
    return ring


def _facts(target: Target, ring: Ring) -> Facts:
    first = target.mesh.devices.flat[0]
    compilers = ("jax", *_COMPILERS["tpu" if target.platform == "tpu" else "gpu"])
    return Facts(
        platform=target.platform,
        device_kind=first.device_kind,
        devices=target.mesh.size,
        mesh=dict(target.mesh.shape),
        ring=ring,
        links_apart=int(jaxpar.ring_hops(target.mesh, ring).max()) if ring else 0,
        chip=asdict(target.chip) if target.chip else {},
        versions={name: found for name in compilers if (found := _version(name))},
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _one_line(reason: BaseException) -> str:
    frames = extract_tb(reason.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).parent == Path.cwd()]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(reason).__name__}: {_first_line(str(reason))}{where}"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")[
        :400
    ]


if __name__ == "__main__":
    main()
