"""Where a process is in its guarded calls, as it says itself and as the board knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BEAT = 0.5  # seconds between two reports of a process
SILENT = 4 * BEAT  # after which a process counts as one that does not answer
MAKING = ("tracing", "compiling")  # what a process does before it runs a program


@dataclass(frozen=True)
class ProcessState:
    """Where one process is, as it says itself.

    Attributes:
      rank: which process.
      entered: how many guarded calls it has begun; they are numbered from 1.
      known: up to which of them it has said what it runs.
      done: up to which of them nothing is left to wait for.
      number: of the call that it is in, or was in last.
      name: of that call.
      first: number of the call that it waits for; 0: there is nothing to wait for.
      first_name: of that call.
      doing: what it does in there: `"python"`, `"tracing"`, `"comparing"`, `"compiling"`,
        `"running"`; `"nothing"` outside.
      doing_s: for how many seconds.
      waiting_s: seconds since anything of its calls was done; None: there is nothing to wait for,
        or it traces or compiles itself.
      timeout_s: that it may wait.
      where: the line of the user's that its Python is at.
      raised: the error with which its last call ended.
      compiled: the functions that were compiled in its call.
      runs: calls from which on it runs another program than before: number, name, digest.
      ended: whether the process has ended by itself.
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
        """From what JSON makes of one."""
        runs = tuple((call, name, digest) for call, name, digest in said["runs"])
        fields: dict[str, Any] = {**said, "runs": runs, "compiled": tuple(said["compiled"])}
        return cls(**fields)

    def run_of(self, call: int) -> tuple[str, str] | None:
        """Name and digest of what it ran in a call; None: it has not said so, or long ago."""
        if call > self.known:
            return None
        found = [(name, digest) for begun, name, digest in self.runs if begun <= call]
        return found[-1] if found else None


@dataclass
class KnownProcess:
    """A process as the board knows it."""

    state: ProcessState
    at: float  # when it said so
    gone: float | None = None  # when its connection was lost

    @property
    def is_out(self) -> bool:
        """Whether it will say nothing more."""
        return self.state.ended or self.gone is not None


def absent(states: Sequence[Mapping[str, Any]], count: int, call: int) -> list[int]:
    """The processes that are not in a call with all that it needs of them."""
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
