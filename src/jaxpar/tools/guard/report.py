"""The text of a guard."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import Thread
from typing import TYPE_CHECKING, Any

from jaxpar.tools.guard.guarded_programs import place_in
from jaxpar.tools.guard.state import SILENT, absent
from jaxpar.tools.toolkit_api import processes_text

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxpar.tools.guard.call import GuardedCall
    from jaxpar.tools.guard.guarded_programs import TracedProgram

_SECONDS = "<seconds>"
States = Sequence[Mapping[str, Any]]


def report(
    rank: int,
    count: int,
    trouble: Mapping[str, Any],
    states: States,
    call: GuardedCall | None,
    mesh: Mesh | None,
) -> None:
    is_alone = trouble["kind"] == "alone"  # process 0 is gone, so nothing is known of the others
    asked = range(0 if is_alone else count)
    _say(rank, [trouble["what"], *(f"  {line}" for line in _who_is_where(states, asked, mesh))])
    if call is None or call.program is None or trouble["kind"] == "programs":
        return
    missing = [0] if is_alone else absent(states, count, call.number)
    if rank in missing:
        return  # the others wait for this process
    thread = Thread(target=_say_where, args=(rank, call, call.program, missing), daemon=True)
    thread.start()
    if call.exit_code is not None:
        thread.join(10)  # the process ends then


def _say(rank: int, lines: Sequence[str]) -> None:
    # Processes may share a terminal, so this prints in one piece.
    text = "\n".join(lines)
    sys.stderr.write(f"jaxpar.guard: process {rank}: {text}\n")
    sys.stderr.flush()


def _say_where(
    rank: int, call: GuardedCall, program: TracedProgram, missing: Sequence[int]
) -> None:
    what = f"call {call.number} of {call.name!r}"
    if missing and (first := program.first_for(missing)):
        number, sent = first
        waits = f"waits for {processes_text(missing)} in {what}: the first collective that needs "
        them = "it" if len(missing) == 1 else "them"
        _say(rank, [f"{waits}{them} is {sent} (number {number} of {len(program.sends)})"])
    elif not missing and (branching := [sent for sent in program.sends if sent.is_conditional]):
        _say(
            rank,
            [f"all processes run {what}; not all may come to {branching[0]}: it is in a branch"],
        )


def _who_is_where(states: States, asked: Iterable[int], mesh: Mesh | None) -> Iterator[str]:
    places: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for state in states:
        places[_place(state)].append(state)
    for place, there in places.items():
        ranks = [state["rank"] for state in there]
        seconds = max(map(_seconds, there))
        at = place_in(mesh, ranks) if mesh else ""
        who = f"{processes_text(ranks)} ({at})" if at else processes_text(ranks)
        yield f"{who}: {place.replace(_SECONDS, f'{seconds:.1f} s')}"
    missing = sorted(set(asked) - {state["rank"] for state in states})
    if missing:
        yield f"{processes_text(missing)}: not known to the board: no guard was reached there"


def _seconds(state: Mapping[str, Any]) -> float:
    if state["gone"] is not None:
        return state["gone"]
    return state["ago"] if state["ago"] > SILENT else state["doing_s"]


def _place(state: Mapping[str, Any]) -> str:
    # Seconds stay open, so that equal places are equal.
    at = f"; Python is at {state['where']}" if state["where"] else ""
    after = f", after {state['raised']}" if state["raised"] else ""
    if state["ended"]:
        return f"ended{after}; it was {_doing(state)}"
    if state["gone"] is not None:
        return f"gone for {_SECONDS}, killed or crashed{after}; last heard of {_doing(state)}{at}"
    if state["ago"] > SILENT:
        return f"not answering for {_SECONDS}{after}; last heard of {_doing(state)}{at}"
    return f"{_doing(state)} for {_SECONDS}{after}{at}"


def _doing(state: Mapping[str, Any]) -> str:
    number, name = state["number"], repr(state["name"])
    match state["doing"]:
        case "nothing" if not number:
            return "in no guarded call yet"
        case "nothing":
            return f"outside guarded calls, after call {number} of {name}"
        case "python":
            made = f" (it compiled {', '.join(state['compiled'])})" if state["compiled"] else ""
            return f"in call {number} of {name}{made}"
        case "comparing":
            return f"waiting for others to compare their programs in call {number} of {name}"
        case "running":
            first = state["first"]
            later = f" to {state['entered']}" if state["entered"] > first else ""
            return f"running call {first}{later} of {state['first_name']!r}"
        case doing:
            return f"{doing} call {number} of {name}"
