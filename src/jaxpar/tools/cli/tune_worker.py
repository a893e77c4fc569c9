"""The tuning process: compiles programs, predicts or times them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpar
from jaxpar import compiled_with
from jaxpar.schedule import Target, compile_for, timeline
from jaxpar.tools.accuracy.interval import texts_of
from jaxpar.tools.cli.bench_times import quartiles, time_interleaved
from jaxpar.tools.cli.console import UsageError
from jaxpar.tools.cli.predict_programs import programs, requested_options
from jaxpar.tools.cli.predict_results import Request, request_from
from jaxpar.tools.cli.predict_worker import COMPILER_PACKAGES, target_of, where
from jaxpar.tools.cli.shared_options import mesh_error
from jaxpar.tools.cli.tune_search import Candidate, Record, TriedWay, search
from jaxpar.tools.cli.workers import answer, start_jax
from jaxpar.tools.timeline.frameworks import traced_by_jax
from jaxpar.tools.timeline.target import HERE
from jaxpar.tools.toolkit_api import Asked, Choices, Trial, jitted_with, trying, versions

# A way must save at least this share of the time, predicted or timed, to replace another.
LEAST_PREDICTED = 0.001
LEAST_TIMED = 0.02


@dataclass
class Traces:
    jitted: Any
    args: Sequence[Any]
    mesh: Mesh
    options: Mapping[str, Any]

    def decisions(self) -> Mapping[tuple[str, str], Asked]:
        trial = Trial({})
        with jax.set_mesh(self.mesh), compiled_with(self.options), trying(trial):
            self.jitted.trace(*self.args)
        return trial.asked

    def lower(self, choices: Choices) -> Candidate:
        trial = Trial(choices)
        with jax.set_mesh(self.mesh), compiled_with(self.options), trying(trial):
            lowered = _Lowered(traced_by_jax(self.jitted.trace(*self.args)))
        return Candidate(choices, lowered, trial.asked)


class _Lowered:
    # `compile_for` takes it as a jitted function.
    def __init__(self, traced: Any) -> None:
        self.jaxpr, self._lowered = traced.jaxpr, traced.lower()

    def trace(self, *args: Any) -> Any:
        return self

    def lower(self) -> Any:
        return self._lowered

    def as_text(self) -> str:
        return self._lowered.as_text()


@dataclass
class Predicted(Traces):
    target: Target
    fits: float = 0.0  # the most bytes of a program: the chip's, or auto's if it needs more
    name = "predicted"

    def time(self, candidate: Candidate) -> float:
        options: Any = dict(self.options)
        program = compile_for(candidate.lowered, self.target, *self.args, compiler_options=options)
        chip, peak = self.target.chip, program.memory.peak
        if not candidate.choices:
            self.fits = max(peak, 0.0 if chip is None else chip.capacity)
        if peak > self.fits:
            raise MemoryError(f"{peak / 2**30:.1f} GiB do not fit a device")
        played = timeline(program)
        candidate.seconds, candidate.intervals = played.total, texts_of(played, self.target)
        return candidate.seconds

    def wins(self, candidate: Candidate, best: Candidate) -> bool:
        return self.time(candidate) < (1 - LEAST_PREDICTED) * best.seconds

    def compare(self, first: Candidate, best: Candidate) -> tuple[float, float]:
        return first.seconds, best.seconds


@dataclass
class Timed(Traces):
    repeats: int
    name = "measured"

    def __post_init__(self) -> None:
        with jax.set_mesh(self.mesh):
            self.args = self._arrays()

    def time(self, candidate: Candidate) -> float:
        [seconds] = self._rounds(candidate)
        candidate.seconds = quartiles(seconds)[1]
        return candidate.seconds

    def wins(self, candidate: Candidate, best: Candidate) -> bool:
        """Returns whether it is faster in most rounds, and again in a second run.

        Its seconds are the best's, timed earlier, times the ratio.
        """
        won, _ = self._beats(candidate, best)
        return won and self._beats(candidate, best)[0]

    def compare(self, first: Candidate, best: Candidate) -> tuple[float, float]:
        # Their seconds are equal if they differ only by noise.
        won, (before, after) = self._beats(best, first)
        return before, after if won else before

    def _beats(self, candidate: Candidate, best: Candidate) -> tuple[bool, tuple[float, float]]:
        old, new = self._rounds(best, candidate)
        _, ratio, high = quartiles([b / a for a, b in zip(old, new, strict=True)])
        candidate.seconds = ratio * best.seconds
        return high < 1 and ratio < 1 - LEAST_TIMED, (quartiles(old)[1], quartiles(new)[1])

    def _rounds(self, *candidates: Candidate) -> list[list[float]]:
        for candidate in candidates:
            if candidate.compiled is None:
                candidate.compiled = self._compile(candidate.lowered.lower())
        lowered = candidates[0].lowered.lower()
        used_up = any(info.donated for info in jax.tree.leaves(lowered.args_info))
        renew = (lambda x: jax.tree.map(_copy, x)) if used_up else (lambda x: x)
        with jax.set_mesh(self.mesh):
            compiled = [candidate.compiled for candidate in candidates]
            return time_interleaved(compiled, self.args, self.repeats, lambda: None, renew)

    def _compile(self, lowered: Any) -> Any:
        return lowered.compile(compiler_options=dict(self.options) or None)

    def _arrays(self) -> list[Any]:
        # Zeros are valid indices.
        leaves, tree = jax.tree.flatten(tuple(self.args))
        shardings: list[Any] = [getattr(leaf, "sharding", None) for leaf in leaves]
        abstract = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]
        if any(a and s is None for a, s in zip(abstract, shardings, strict=True)):
            # The compiler chooses the shardings that are not given.
            compiled = self._compile(self.lower({}).lowered.lower())
            shardings = jax.tree.leaves(compiled.input_shardings[0])
        numbered = enumerate(zip(leaves, shardings, abstract, strict=True))
        made = [_array(x, place, self.mesh, seed) if a else x for seed, (x, place, a) in numbered]
        return list(jax.tree.unflatten(tree, made))


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


def _array(like: Any, sharding: Any, mesh: Mesh, seed: int) -> jax.Array:
    if isinstance(sharding, PartitionSpec):
        sharding = NamedSharding(mesh, sharding)

    def make() -> jax.Array:
        if not jnp.issubdtype(like.dtype, jnp.inexact):
            return jnp.zeros(like.shape, like.dtype)
        key = jax.random.key(seed)
        return jax.random.normal(key, like.shape, "float32").astype(like.dtype)

    return jax.jit(make, out_shardings=sharding)()


def serve(task: Mapping[str, Any]) -> Iterator[Record]:
    """Yields `facts`, the search's records, perhaps a `failure`."""
    try:
        request = request_from(task["request"])
        target = _here(request) if request.target == HERE else target_of(request)
        [program] = programs(request, target, ())
        jitted, options = jitted_with(program.function, requested_options(request, target))
        if not Traces(jitted, program.args, target.mesh, options).decisions():
            raise UsageError(
                f"{request.function} has no call site of jaxpar with mode='auto', so there is "
                "nothing to tune; call jaxpar.all_gather_matmul or another collective of jaxpar"
            )
        yield {"facts": _facts(target, options)}
        if request.target == HERE:
            clock = Timed(jitted, program.args, target.mesh, options, task["repeats"])
        else:
            clock = Predicted(jitted, program.args, target.mesh, options, target)
        known = {tried.key: tried for tried in (TriedWay(**entry) for entry in task["known"])}
        yield from search(clock, known, task["tries"], task["modes"])
    except UsageError as reason:
        yield {"failure": {"reason": str(reason), "usage": True}}
    except Exception as reason:
        yield {"failure": {"reason": where(reason), "usage": False}}


def _here(request: Request) -> Target:
    if jax.process_count() > 1:
        raise UsageError(
            f"there are {jax.process_count()} processes, and each would choose by its own clock; "
            "tune for a --target"
        )
    try:
        mesh = jaxpar.make_mesh(request.mesh)
    except ValueError as reason:
        raise UsageError(mesh_error(request.mesh, reason)) from None
    return Target(HERE, mesh, None)


def _facts(target: Target, options: Mapping[str, Any]) -> Record:
    packages = ("jaxpar", "jax", "jaxlib", *COMPILER_PACKAGES.get(target.platform, ()))
    return {
        "versions": versions(*packages),
        "device_kind": target.mesh.devices.flat[0].device_kind,
        "mesh": dict(target.mesh.shape),
        "compiler_options": dict(options),
    }


def _serve(task: Mapping[str, Any]) -> Iterator[Record]:
    with start_jax(hides=False):
        yield from serve(task)


if __name__ == "__main__":
    answer(_serve)
