"""Runs a program of steps: unrolled while tracing, or as a loop if many steps are alike."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array

from jaxpar.compiler import control_flow
from jaxpar.ring.steps import Step, moved, stretches

# So many steps that differ only in distance are unrolled while tracing. More run in a loop.
# benchmarks/compile_time/README.md shows compile time and program size on both sides.
UNROLLED = 15


def run(
    steps: Sequence[Step],
    state: Any,
    step: Callable[[Any, Step], Any],
    *,
    period: int = 1,
    unrolled: int | None = None,
) -> Any:
    """Folds `step(state, t)` over a program; many steps that differ only in distance are a loop."""
    unrolled = UNROLLED if unrolled is None else unrolled
    for first, times, growth in stretches(steps, period):
        if times > unrolled:
            state = _loop(first, times, growth, state, step)
        else:
            for number in range(times):
                for t in moved(first, number * growth):
                    state = step(state, t)
    return state


def loops(steps: Sequence[Step], period: int = 1) -> bool:
    return any(times > UNROLLED for _, times, _ in stretches(steps, period))


def _loop(first: list[Step], times: int, growth: int, state: Any, step: Any) -> Any:
    def trip(number: Array, state: Any) -> Any:
        for t in moved(first, number.astype("int32") * growth):
            state = step(state, t)
        return state

    # Two periods an iteration: with one, compilers copy the carried block before each send.
    return control_flow.fori_loop(0, times, trip, state, unroll=2)
