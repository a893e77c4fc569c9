"""Call sites: their names, and decisions that replace the model's.

Problems of one name get one algorithm. The name has all that may change the fastest, except
chip, mesh and compiler, which hold for a whole file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any

import jax

from jaxpar.arguments.dtypes import LowBit, is_low_bit
from jaxpar.arguments.types import Dispatch, Mode
from jaxpar.axis.axis import MODES

if TYPE_CHECKING:
    from jaxpar.axis.axis import Ring
    from jaxpar.choose.problem import Problem


AUTO = "auto"

# JAX caches traced programs. It traces again if the value of such a context changes.
using: Any = jax.make_user_context(default_value=None)  # a file or a trial, with `decide`
imposing: Any = jax.make_user_context(default_value=None)  # a trial that imposes a mode
notes: Any = jax.make_user_context(default_value=None)  # `Notes`, if decisions are recorded


@dataclass(frozen=True)
class Asked:
    """A decision that a program asks for. Trials start with the largest `size`."""

    site: str
    part: str
    ways: tuple[str, ...]
    size: int = 0


def decide(asked: Asked) -> Any:
    """Returns a part's decision; untried: `auto`."""
    return AUTO if using.value is None else using.value.decide(asked)


def imposed() -> Mode | None:
    trial = imposing.value
    if trial is None:
        return None
    trial.met = True
    return trial.imposed


def is_tuning() -> bool:
    return using.value is not None


NAMED: tuple[Mode, ...] = tuple(mode for mode in MODES if mode != AUTO)
ROW_CHUNKS = (1, 2, 4)
DISPATCHES = ("ragged", "all_gather")


def site_of(problem: Problem) -> str:
    """Returns a name: `matmul over tp=4: gather a of ak,kn->an, bfloat16; 64x8, 8x16`."""
    ring = problem.ring
    runs = [(shape, len(list(alike))) for shape, alike in groupby(problem.shapes)]
    texts = [("x".join(map(str, shape)) or "()", times) for shape, times in runs]
    shapes = ", ".join(text if times == 1 else f"{times} of {text}" for text, times in texts)
    what = ", ".join(filter(None, (problem.what, _wire_text(ring.wire_dtype))))
    return f"{problem.kind} over {','.join(ring.names)}={ring.size}: {what}; {shapes}"


def _wire_text(wire: Any) -> str:
    if not isinstance(wire, LowBit):
        sums = "" if wire is None else f"sums in {wire}"
        return f"{wire} on the wire" if is_low_bit(wire) else sums
    columns = "" if wire.columns is None else f"a scale for {wire.columns} columns"
    sums = "" if wire.sums is None else f"sums in {wire.sums}"
    exact = "" if wire.cotangents else "cotangents as they are"
    return ", ".join(filter(None, (f"{wire.dtype} on the wire", columns, sums, exact)))


def settled(problem: Problem) -> Problem:
    """Replaces `auto` by the fastest modes, or all by an imposed mode."""
    ring = problem.ring
    if ring.size > 1 and (mode := imposed()) is not None:
        return replace(problem, ring=replace(ring, mode=mode, backward=mode))
    forward, backward = ring.mode, ring.backward or ring.mode
    if not is_tuning() or ring.size == 1 or AUTO not in (forward, backward):
        return problem
    if forward == AUTO:
        forward = _decide(problem, "forward", _modes_of(ring))
    if backward == AUTO and problem.backward:
        backward = _decide(problem, "backward", _modes_of(ring))
    elif backward == ring.mode == AUTO:
        backward = forward  # one algorithm for both
    return replace(problem, ring=replace(ring, mode=forward, backward=backward))


def _modes_of(ring: Ring) -> tuple[str, ...]:
    return tuple(mode for mode in NAMED if mode != "multi-ring" or ring.has_disjoint)


def settled_chunks(problem: Problem) -> int | None:
    """Returns the fastest number found; None: `auto` decides."""
    if not is_tuning() or problem.ring.size == 1:
        return None
    chunks = _decide(problem, "row chunks", tuple(map(str, ROW_CHUNKS)))
    return None if chunks == AUTO else int(chunks)


def settled_dispatch(problem: Problem) -> Dispatch | None:
    if not is_tuning() or problem.ring.size == 1:
        return None
    dispatch: Any = _decide(problem, "dispatch", DISPATCHES)
    return None if dispatch == AUTO else dispatch


def _decide(problem: Problem, part: str, ways: tuple[str, ...]) -> Any:
    return decide(Asked(site_of(problem), part, ways, sum(map(prod, problem.shapes))))
