"""The state of a process in its guarded calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BEAT = 0.5  # seconds between two reports of a process
SILENT = 4 * BEAT  # after which a process counts as not answering
MAKING = ("tracing", "compiling")  # before a process runs a program


@dataclass(frozen=True)
class ProcessState:
    """The state of a process, as it reports it.

    Attributes:
      entered: guarded calls that it has begun, numbered from 1.
      known: the last call whose program it has reported.
      done: the last call that nothing is left to wait for.
      number: of its current or last call, with `name`.
      first: number of the call that it waits for, with `first_name`; or 0.
      doing: `"python"`, `"tracing"`, `"comparing"`, `"compiling"` or `"running"`; `"nothing"`
        outside.
      waiting_s: seconds without progress; None if it waits for nothing, traces or compiles.
      where: the user's line that its Python is at.
      runs: number, name and digest of each call with a new program.
      ended: whether it has ended by itself.
    """

    rank: int
    entered: int = 0
    known: int = 0
    done: int = 0
    number: int = 0
    name: str = ""
    first: int = 0
    first_name: str = ""
    doing: str = "nothing"
    doing_s: float = 0.0
    waiting_s: float | None = None
    timeout_s: float = 60.0
    where: str = ""
    raised: str = ""
    compiled: tuple[str, ...] = ()
    runs: tuple[tuple[int, str, str], ...] = ()
    ended: bool = False

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> ProcessState:
        runs = tuple((call, name, digest) for call, name, digest in said["runs"])
        fields: dict[str, Any] = {**said, "runs": runs, "compiled": tuple(said["compiled"])}
        return cls(**fields)

    def run_of(self, call: int) -> tuple[str, str] | None:
        # None: the call is unknown or too old.
        if call > self.known:
            return None
        runs = [(name, digest) for begun, name, digest in self.runs if begun <= call]
        return runs[-1] if runs else None


@dataclass
class KnownProcess:
    state: ProcessState
    at: float  # when it reported
    gone: float | None = None  # when its connection was lost

    @property
    def is_out(self) -> bool:
        return self.state.ended or self.gone is not None


def absent(states: Sequence[Mapping[str, Any]], count: int, call: int) -> list[int]:
    there = [
        state["rank"]
        for state in states
        if state["gone"] is None
        and not state["ended"]
        and state["ago"] < SILENT
        and (
            state["entered"] > call
            or (state["entered"] == call and state["doing"] not in ("python", *MAKING))
        )
    ]
    return [rank for rank in range(count) if rank not in there]
