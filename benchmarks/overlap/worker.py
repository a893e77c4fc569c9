"""A compiling process: one case, or one GPU, and a record for each result."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxpar
from jaxpar.choose.tuning import versions
from jaxpar.schedule import Target, compile_for, matmul_floor, timeline
from jaxpar.schedule import target as describe
from jaxpar.tools.cli.ops import OPS, Op, with_gradients
from jaxpar.tools.cli.workers import answer, one_line
from overlap import peers
from workers import KEPT

CASES = Path(__file__).with_name("cases.json")
FORMS = {
    "gather lhs rows": "gather-lhs-rows",
    "gather rhs k": "gather-rhs-k",
    "gather rhs n": "gather-rhs-cols",
    "scatter rows": "scatter-rows",
}
MODES = ("naive", "chunked-4", "chunked-8", "unidirectional", "bidirectional", "auto")
GPUS = ("h100:8", "b200:8")
GPU_SHAPE = (8192, 8192, 28672)


@dataclass(frozen=True)
class Case:
    """A global matmul over one ring of a TPU slice."""

    name: str
    chip: str
    mesh: dict[str, int]
    axis: str
    op: str
    m: int
    k: int
    n: int
    dtype: str
    grad: bool = False
    fallback: bool = False  # rings can only lose there
    few_rows: bool = False  # a weight is most of what is read

    @property
    def size(self) -> int:
        """The number of devices on the ring."""
        return self.mesh[self.axis]

    @property
    def form(self) -> Op:
        """Which dimensions are sharded."""
        return OPS[FORMS[self.op]]


def load_cases() -> list[Case]:
    """Reads the public cases."""
    return [Case(**record) for record in json.loads(CASES.read_text())]


def serve_case(case: Case) -> Iterator[dict[str, Any]]:
    """Yields the floor of a case, then a record of each peer and mode, compiled and played."""
    described = describe(case.chip, ",".join(f"{axis}={n}" for axis, n in case.mesh.items()))
    mesh, ring = described.mesh, (case.axis,)
    yield {"floor": _floor(case, described)}
    matmul = (case.form.name, (case.m, case.k, case.n), jnp.dtype(case.dtype), mesh, ring)
    compiler = Compiler(described, peers.operands(*matmul), case.grad)
    for peer in peers.PEERS:
        if peer == "XLA plain jit":
            layouts = peers.plain_jit(*matmul, grad=case.grad)
            plain = [
                Compiler(described, args, case.grad).record(peer, function, options)
                for function, args in layouts
                for options in peers.plain_options(compiler.options)
            ]
            yield min(plain, key=_total) | {"kind": "peer", "spent": sum(r["spent"] for r in plain)}
            continue
        function = peers.build(peer, case.form.name, mesh, ring, grad=case.grad)
        options = peers.compiler_options(peer, compiler.options)
        yield compiler.record(peer, function, options) | {"kind": "peer"}
    for mode in MODES:
        function = _jit(case.form.bind(mesh, ring, mode), case.grad)
        yield compiler.record(mode, function) | {"kind": "mode"}


def serve_gpu(chip: str) -> Iterator[dict[str, Any]]:
    """Yields a record of each operation on a described GPU host, forward and with gradients."""
    described = describe(chip)
    for grad in (False, True):
        for op in OPS.values():
            operands = peers.operands(op.name, GPU_SHAPE, jnp.bfloat16, described.mesh, ("tp",))
            compiler = Compiler(described, operands, grad)
            functions = {mode: _jit(op.bind(described.mesh, ("tp",), mode), grad) for mode in MODES}
            yield compiler.record_auto(functions) | {"kind": "gpu", "op": op.name, "grad": grad}


class Compiler:
    """Compiles functions of the same operands; one that traces to a known program only once."""

    def __init__(self, target: Target, operands: list[Any], grad: bool):
        self._target = target
        self.options = jaxpar.compiler_options(target)  # what every form gets
        self._operands = operands if grad else operands[:2]
        self._known: dict[str, dict[str, Any]] = {}  # by the traced program

    def record(
        self, variant: str, function: Any, options: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Compiles a jitted function and plays its schedule; says why where that fails."""
        start = time.perf_counter()
        options = self.options if options is None else options
        try:
            text = f"{options}\n{self._trace(function)}"
            if text in self._known:
                return self._known[text] | {"variant": variant, "spent": 0.0}
            program = compile_for(
                function, self._target, *self._operands, compiler_options=options, cache=KEPT
            )
            played = timeline(program)
        except Exception as reason:  # each compiler has its own
            spent = time.perf_counter() - start
            return {"variant": variant, "failure": one_line(reason), "spent": spent}
        asynchronous = [event for event in played.transfers if not event.synchronous]
        self._known[text] = {
            "same_as": variant,
            "total": played.total,
            "exposed": played.exposed,
            "asynchronous": len(asynchronous),
            "bracketing": sum(bool(event.covers) for event in asynchronous),
            "synchronous": len(played.transfers) - len(asynchronous),
        }
        return self._known[text] | {"variant": variant, "spent": time.perf_counter() - start}

    def record_auto(self, functions: dict[str, Any]) -> dict[str, Any]:
        """Compiles `auto` alone, and traces the other modes to tell which one it is."""
        found = self.record("auto", functions["auto"])
        if "failure" not in found:
            auto = self._trace(functions["auto"])
            same = [m for m in MODES[:-1] if self._trace(functions[m]) == auto]
            found["same_as"] = same[0] if same else "auto"
        return found

    def _trace(self, function: Any) -> str:
        with jax.set_mesh(self._target.mesh), jaxpar.compiled_with(self.options):
            return function.trace(*self._operands).lower().as_text()


def _floor(case: Case, described: Target) -> float:
    """The least over all ways to part the work."""
    form, n, dtype, shape = case.form, case.size, jnp.dtype(case.dtype), (case.m, case.k, case.n)
    sent = form.least_sent(shape, n, case.grad) * dtype.itemsize / (2 if case.grad else 1)
    floors = (
        matmul_floor(
            *(described, "mk,kn->mn", (m, k), (k, cols), sent),
            axis=case.axis,
            dtype=dtype,
            grad=case.grad,
        )
        for m, k, cols in form.pieces(shape, n)
    )
    return min(floor.total for floor in floors)


def _total(record: dict[str, Any]) -> float:
    return record.get("total", inf)


def _jit(function: Any, grad: bool) -> Any:
    return jax.jit(with_gradients(function) if grad else function)


def serve(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields all that there is to say of a task."""
    yield {"versions": versions("jax", "libtpu", "jax-cuda13-pjrt")}
    yield from serve_gpu(task["gpu"]) if "gpu" in task else serve_case(Case(**task["case"]))


if __name__ == "__main__":
    answer(serve)
