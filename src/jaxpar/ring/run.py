"""Runs a program of turns: unrolled while tracing, or as a loop where many are alike."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array

from jaxpar.compiler import control_flow
from jaxpar.ring.turns import Turn, moved, stretches

# How many turns that differ in distance alone are unrolled while tracing; more run in a loop.
# benchmarks/compile_time/README.md has compile time and program size on both sides of it.
UNROLLED = 15


def run(
    turns: Sequence[Turn],
    state: Any,
    turn: Callable[[Any, Turn], Any],
    *,
    period: int = 1,
    unrolled: int | None = None,
) -> Any:
    """Folds `turn(state, t)` over a program; many that differ in distance alone are a loop."""
    unrolled = UNROLLED if unrolled is None else unrolled
    for first, times, step in stretches(turns, period):
        if times > unrolled:
            state = _loop(first, times, step, state, turn)
        else:
            for number in range(times):
                for t in moved(first, number * step):
                    state = turn(state, t)
    return state


def loops(turns: Sequence[Turn], period: int = 1) -> bool:
    """Whether some of the turns are a loop, not unrolled."""
    return any(times > UNROLLED for _, times, _ in stretches(turns, period))


def _loop(first: list[Turn], times: int, step: int, state: Any, turn: Any) -> Any:
    def trip(number: Array, state: Any) -> Any:
        for t in moved(first, number.astype("int32") * step):
            state = turn(state, t)
        return state

    # Two times a trip: with one, the compilers copy the carried block before each send.
    return control_flow.fori_loop(0, times, trip, state, unroll=2)
