"""The board of guards on process 0: where every process is, and what is wrong.

Each process reports a `ProcessState` about twice a second. The answer says up to which call all
programs are equal, and in trouble where everyone is.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import floor, log2
from threading import Lock, Thread
from time import monotonic
from typing import Any

from jaxpar.tools.guard.guarded_programs import first_difference
from jaxpar.tools.guard.state import BEAT, MAKING, SILENT, KnownProcess, ProcessState
from jaxpar.tools.toolkit_api import (
    jax_ends,
    patience,
    processes_text,
    read_message,
    write_message,
)

SILENCE = "silence"  # a kind of trouble


@dataclass
class Board:
    count: int
    seen: dict[int, KnownProcess] = field(default_factory=dict[int, KnownProcess])
    agreed: int = 0  # all programs are equal up to this call
    unequal: tuple[int, int, int] | None = None  # a call, and two processes that differ in it
    verdict: str = ""  # how they differ
    details: dict[tuple[int, str], Mapping[str, Any]] = field(
        default_factory=dict[tuple[int, str], Mapping[str, Any]]
    )
    noticed: dict[str, float] = field(default_factory=dict[str, float])  # when, by kind of trouble
    lock: Lock = field(default_factory=Lock)

    def hear(self, said: Mapping[str, Any]) -> dict[str, Any]:
        with self.lock:
            state = ProcessState.of(said["state"])
            self.seen[state.rank] = KnownProcess(state, monotonic())
            if "details" in said:
                self.details[state.rank, said["details"]["digest"]] = said["details"]
            self._compare()
            answer: dict[str, Any] = {"agreed": self.agreed}
            if wanted := self._wanted(state.rank):
                answer["want"] = wanted
            elif (trouble := self._trouble()) and self._is_ripe(trouble["kind"]):
                answer["trouble"] = trouble
                answer["states"] = self.told()
            return answer

    def lose(self, rank: int) -> None:
        with self.lock:
            if rank in self.seen:
                self.seen[rank].gone = monotonic()

    def told(self) -> list[dict[str, Any]]:
        """Returns states, with seconds since the last reports."""
        now = monotonic()
        told: list[dict[str, Any]] = []
        for rank in sorted(self.seen):
            seen = self.seen[rank]
            since = now - seen.at
            state = seen.state
            if state.waiting_s is not None:
                state = replace(state, waiting_s=state.waiting_s + since)
            gone = None if seen.gone is None else now - seen.gone
            told.append(
                {
                    **asdict(replace(state, doing_s=state.doing_s + since)),
                    "ago": since,
                    "gone": gone,
                }
            )
        return told

    def serve(self, listener: socket.socket, token: str) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return  # the process ends
            Thread(target=self._converse, args=(peer, token), daemon=True).start()

    def _converse(self, peer: socket.socket, token: str) -> None:
        rank = None
        with suppress(ConnectionError, ValueError, OSError), peer:
            peer.settimeout(30)
            while True:
                said = read_message(peer)
                if said.get("token") != token:
                    return
                peer.settimeout(None)
                rank = said["state"]["rank"]
                write_message(peer, self.hear(said))
        if rank is not None:
            self.lose(rank)

    # -- whether the programs are equal ---------------------------------------------------------

    def _compare(self) -> None:
        if self.unequal is not None:
            return
        states = [seen.state for seen in self.seen.values()]
        marks = {begun for state in states for begun, _, _ in state.runs}
        for call in sorted(mark for mark in marks if mark > self.agreed):
            runs = {state.rank: run for state in states if (run := state.run_of(call))}
            first = next(iter(runs), None)
            if first is None:
                continue
            other = next((rank for rank in runs if runs[rank] != runs[first]), None)
            if other is not None:
                self.unequal = (call, min(first, other), max(first, other))
                return
        everyone = len(states) == self.count
        self.agreed = min((state.known for state in states), default=0) if everyone else 0

    def _wanted(self, rank: int) -> str | None:
        if self.unequal is None or self.verdict:
            return None
        call, *ranks = self.unequal
        (low, ours), (other, theirs) = (
            (who, self.seen[who].state.run_of(call) or ("", "")) for who in ranks
        )
        digests = {low: ours[1], other: theirs[1]}
        where = f"processes {low} and {other} run different programs in call {call} of {ours[0]!r}"
        if ours[0] != theirs[0] or not all(digests.values()):
            self.verdict = (
                f"processes {low} and {other} differ in call {call}: process {low} is in "
                f"{ours[0]!r}, process {other} in {theirs[0]!r}"
            )
            return None
        details = {who: told for who in ranks if (told := self.details.get((who, digests[who])))}
        if len(details) == len(ranks):
            difference = first_difference(low, details[low], other, details[other])
            self.verdict = f"{where}: {difference}"
        elif any(self.seen[who].is_out for who in ranks if who not in details):
            self.verdict = f"{where}; one of them is gone"
        elif rank in ranks and rank not in details:
            return digests[rank]
        return None

    # -- what is wrong --------------------------------------------------------------------------

    def _trouble(self) -> dict[str, Any] | None:
        # The key changes to print the trouble again.
        if self.verdict:
            return {"kind": "programs", "key": "programs", "what": self.verdict}
        now = monotonic()
        waiting = {
            rank: seen.state.waiting_s + now - seen.at
            for rank, seen in self.seen.items()
            if seen.state.waiting_s is not None and not seen.is_out and now - seen.at < SILENT
        }
        out = [
            rank
            for rank, seen in self.seen.items()
            if (seen.gone is not None and not seen.state.ended)
            or (seen.state.ended and any(self._needs(other, seen.state) for other in waiting))
        ]
        if out:
            what = "; ".join(_how_it_went(self.seen[rank], now) for rank in sorted(out))
            return {"kind": f"out {sorted(out)}", "key": f"out {sorted(out)}", "what": what}
        late = [rank for rank in waiting if waiting[rank] > self.seen[rank].state.timeout_s]
        if not late:
            return self._silence(now)
        rank = max(late, key=waiting.__getitem__)
        state = self.seen[rank].state
        call, times = state.first, floor(log2(waiting[rank] / state.timeout_s))
        what = (
            f"call {call} of {state.first_name!r} takes {waiting[rank]:.1f} s, more than its limit "
            f"of {state.timeout_s:g} s: {self._why(call, now)}"
        )
        return {"kind": f"late {call}", "key": f"late {call} {times}", "what": what}

    def _silence(self, now: float) -> dict[str, Any] | None:
        silent = [
            rank
            for rank, seen in sorted(self.seen.items())
            if not seen.is_out and now - seen.at > patience()
        ]
        return silence(silent, max(now - self.seen[rank].at for rank in silent)) if silent else None

    def _needs(self, rank: int, ended: ProcessState) -> bool:
        """Returns whether a process awaits an ended process."""
        return self.seen[rank].state.done >= ended.done

    def _why(self, call: int, now: float) -> str:
        why: dict[str, list[int]] = {}
        for rank in range(self.count):
            seen = self.seen.get(rank)
            if seen is None or seen.state.entered < call:
                reason = "not come to it"
            elif now - seen.at > SILENT:
                reason = "not answered"
            elif seen.state.done >= call:
                raised = seen.state.raised
                reason = f"left it after {raised}" if raised else "finished it"
            elif seen.state.number == call and seen.state.doing in MAKING:
                reason = f"not finished {seen.state.doing} it"
            else:
                continue
            why.setdefault(reason, []).append(rank)
        said = [
            f"{processes_text(ranks)} {'has' if len(ranks) == 1 else 'have'} {reason}"
            for reason, ranks in why.items()
        ]
        return "; ".join(said) or "all processes are in it"

    def _is_ripe(self, kind: str) -> bool:
        # Trouble can be told once everyone has reported since.
        now = monotonic()
        since = self.noticed.setdefault(kind, now)
        spoken = (seen.at >= since for seen in self.seen.values() if not seen.is_out)
        return all(spoken) or now - since > 2 * BEAT


def silence(ranks: Sequence[int], seconds: float) -> dict[str, Any]:
    """Returns the trouble that processes are silent, before JAX ends all; it ends none itself."""
    have = "has" if len(ranks) == 1 else "have"
    what = f"{processes_text(ranks)} {have} not answered for {seconds:.1f} s: {jax_ends()}"
    return {"kind": SILENCE, "key": f"{SILENCE} {ranks}", "what": what}


def _how_it_went(seen: KnownProcess, now: float) -> str:
    after = f", after {seen.state.raised}" if seen.state.raised else ""
    if seen.state.ended:
        return f"process {seen.state.rank} has ended{after}"
    return (
        f"process {seen.state.rank} is gone, killed or crashed: its connection was lost "
        f"{now - (seen.gone or now):.1f} s ago{after}"
    )
