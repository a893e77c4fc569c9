"""The guarded calls of this process, and the thread that reports them."""

from __future__ import annotations

import atexit
import os
import re
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from faulthandler import dump_traceback
from functools import cache
from multiprocessing.connection import wait
from tempfile import TemporaryFile
from threading import Event, Lock, Thread, get_ident
from time import monotonic, sleep
from typing import Any

import jax

from jaxpar.tools.guard.board import SILENCE, Board, silence
from jaxpar.tools.guard.call import GuardedCall
from jaxpar.tools.guard.guarded_programs import TracedProgram
from jaxpar.tools.guard.report import report
from jaxpar.tools.guard.state import BEAT, ProcessState
from jaxpar.tools.program.sources import Line, own_line
from jaxpar.tools.toolkit_api import (
    arrange,
    board_address,
    board_listener,
    connect,
    met,
    naming,
    patience,
    read_message,
    token,
    value_error,
    write_message,
)

HASTE = 0.02  # seconds between reports while the process waits
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_MOST_RUNS = 64  # changes of the program that are reported

# JAX's monitoring events at the ends of compilation steps, and the step that follows.
_NEXT = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "compiling",
    "/jax/core/compile/backend_compile_duration": "python",
}


class Watch:
    def __init__(self) -> None:
        self.rank = 0
        self.count = 1
        self.entered = self.known = self.agreed = 0
        self.active: list[GuardedCall] = []  # nested, the innermost last
        self.pending: deque[GuardedCall] = deque()  # left, with results not computed yet
        self.last: GuardedCall | None = None
        self.progress = monotonic()
        self.raised = ""
        self.runs: list[tuple[int, str, str]] = []
        self.programs: dict[str, TracedProgram] = {}
        self.trouble: Mapping[str, Any] = {}
        self._printed: set[str] = set()
        self._started = self._ended = False
        self._settling = Lock()
        self._bell, self._ear = socket.socketpair()  # to wake its thread
        self._answered = Event()
        self._wanted: str | None = None
        self._peer: socket.socket | None = None  # to process 0, which only answers
        self._main = get_ident()

    # -- in the thread of the calls ---------------------------------------------------------------

    def enter(
        self, name: str, limit: float, exit_code: int | None, is_jitted: bool = False
    ) -> GuardedCall:
        self.start()
        self.entered += 1
        call = GuardedCall(self.entered, name, limit, exit_code, self, is_jitted)
        if not self.active and not self.pending:
            self.progress = call.entered
        self.active.append(call)
        self.last = call
        if not is_jitted:
            self.know(call, "")
        return call

    def know(self, call: GuardedCall, digest: str) -> None:
        if not self.runs or self.runs[-1][1:] != (call.name, digest):
            self.runs.append((call.number, call.name, digest))
            del self.runs[:-_MOST_RUNS]
        self.known = call.number

    def wait_agreed(self, number: int) -> None:
        """Waits until all reached this call, programs equal."""
        while self.count > 1 and self.agreed < number:
            self._answered.clear()
            self._bell.send(b".")
            self._answered.wait(1)
            if self.trouble.get("kind") == "programs":
                with naming("guard"):
                    raise value_error(
                        f"{self.trouble['what']}; make them equal: a collective would wait for "
                        "ever, or return garbage"
                    )

    def leave(self, call: GuardedCall, raised: BaseException | None) -> None:
        # The call's results may not be computed yet.
        self.active.remove(call)
        if raised is not None:
            self.raised = f"{type(raised).__name__} in call {call.number} of {call.name!r}"
            self._ask_why(raised, call)
            call.result = None
        if call.result is None:
            self.progress = monotonic()
        else:
            call.do("running")
            self.pending.append(call)
            self._settle()  # holds no more results than the device works on
        if raised is None:
            self.raised = ""

    def _ask_why(self, raised: BaseException, call: GuardedCall) -> None:
        # What is wrong with others shows a moment later.
        # While a program runs, jaxlib raises a ValueError if a connection is lost.
        is_lost = isinstance(raised, ValueError) and call.is_jitted and call.doing == "running"
        if self.count == 1 or not (is_lost or isinstance(raised, jax.errors.JaxRuntimeError)):
            return
        for _ in range(5):
            self._answered.clear()
            self._bell.send(b".")
            if not self._answered.wait(1) or self.trouble:
                break
            sleep(0.2)
        if self.trouble and self.trouble["what"] not in str(raised):
            raised.add_note(f"jaxpar.guard: {self.trouble['what']}")

    def start(self) -> None:
        # It waits only if processes have not met.
        if self._started:
            return
        self._started = True
        self.rank, self.count = jax.process_index(), jax.process_count()
        jax.monitoring.register_event_duration_secs_listener(self._compiles)
        if self.count > 1 and not met():
            # This is the first collective. Without a board nobody can say who is missing.
            arrange()
        Thread(target=self._report, name="jaxpar.guard", daemon=True).start()

    def _compiles(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        call = self.active[-1] if self.active else None
        if call is None or call.thread != get_ident() or event not in _NEXT:
            return
        if call.doing != "comparing":
            call.do("running" if _NEXT[event] == "python" and call.is_jitted else _NEXT[event])
        if _NEXT[event] == "python" and (name := kwargs.get("fun_name")):
            call.compiled.append(str(name))

    def _bye(self) -> None:
        for self._ended in (False, True):  # in the first round, a lost process 0 is an error
            self._answered.clear()
            self._bell.send(b".")
            self._answered.wait(1)

    # -- in its own thread -------------------------------------------------------------------------

    def _report(self) -> None:
        exchange = self._exchange()
        atexit.register(self._bye)
        while True:
            is_asking = any(call.doing == "comparing" for call in self.active)
            ears = [self._ear, *([] if self._peer is None else [self._peer])]
            if self._ear in wait(ears, HASTE if is_asking or self._wanted else BEAT):
                self._ear.recv(4096)
            self._settle()
            said: dict[str, Any] = {"token": token(), "state": asdict(self.state())}
            if (digest := self._wanted) and digest in self.programs:
                said["details"] = self.programs[digest].details()
            try:
                answer = exchange(said)
            except (OSError, ConnectionError):
                self._alone()
                return
            self.agreed, self._wanted = answer["agreed"], answer.get("want")
            self.trouble = answer.get("trouble", {})
            self._answered.set()
            if self.trouble:
                self._tell(answer["states"])

    def _exchange(self) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        if self.rank == 0:
            board = Board(self.count)
            if self.count > 1:
                serving = (board_listener(), token())
                Thread(target=board.serve, args=serving, name="jaxpar.board", daemon=True).start()
            return board.hear
        self._peer = peer = connect(board_address(), 300)
        peer.settimeout(60)

        def exchange(said: Mapping[str, Any]) -> dict[str, Any]:
            write_message(peer, said)
            asked = monotonic()
            while not wait([peer], BEAT):
                self._tell_of_silence(monotonic() - asked)
            return read_message(peer)

        return exchange

    # -- in both -----------------------------------------------------------------------------------

    def _settle(self) -> None:
        with self._settling:
            while self.pending and _is_computed(self.pending[0].result):
                self.pending.popleft()
                self.progress = monotonic()

    def state(self) -> ProcessState:
        now = monotonic()
        call = self.active[-1] if self.active else None
        first = self.pending[0] if self.pending else call
        shown = call or first or self.last
        unfinished = min((c.number for c in (first, *self.active[:1]) if c), default=None)
        doing = call.doing if call else "running" if first else "nothing"
        since = call.since if call else first.since if first else self.progress
        return ProcessState(
            rank=self.rank,
            entered=self.entered,
            known=self.known,
            done=self.entered if unfinished is None else unfinished - 1,
            number=shown.number if shown else 0,
            name=shown.name if shown else "",
            first=first.number if first else 0,
            first_name=first.name if first else "",
            doing=doing,
            doing_s=now - since,
            waiting_s=now - max(self.progress, first.since)
            if first and not first.is_made
            else None,
            timeout_s=first.limit if first else 60.0,
            where=str(_line_of(shown.thread if shown else self._main) or ""),
            raised=self.raised,
            ended=self._ended,
            compiled=tuple(shown.compiled[-5:]) if shown else (),
            runs=tuple(self.runs),
        )

    def _tell(self, states: Sequence[Mapping[str, Any]]) -> None:
        if self.trouble["key"] in self._printed:
            return
        self._printed.add(self.trouble["key"])
        call = self.pending[0] if self.pending else self.active[-1] if self.active else None
        programs = [*self.programs.values(), *([call.program] if call and call.program else ())]
        mesh = next((program.mesh for program in reversed(programs) if program.mesh), None)
        report(self.rank, self.count, self.trouble, states, call, mesh)
        if self.trouble["key"].startswith(SILENCE):
            return  # it may come back
        if self.last is not None and self.last.exit_code is not None:
            # The others print it too, so process 0 must keep the board until then.
            sleep(2 * BEAT + 2 * BEAT * (self.rank == 0))
            os._exit(self.last.exit_code)

    def _tell_of_silence(self, seconds: float) -> None:
        """Tells what this process can, while process 0 does not answer."""
        self._settle()
        state = self.state()
        if state.waiting_s is not None and state.waiting_s > state.timeout_s:
            call = f"call {state.first} of {state.first_name!r}"
            what = f"{call} takes {state.waiting_s:.1f} s, more than its limit of "
            what += f"{state.timeout_s:g} s: process 0 has not answered for {seconds:.1f} s"
            self.trouble = {"kind": "alone", "key": f"late {state.first}", "what": what}
        elif seconds > patience():
            self.trouble = {**silence([0], seconds), "kind": "alone"}
        else:
            return
        self._answered.set()
        self._tell([{**asdict(state), "ago": 0.0, "gone": None}])

    def _alone(self) -> None:
        # At the program's end this is no fault.
        self._settle()
        self.trouble = {
            "kind": "alone",
            "key": "alone",
            "what": "process 0 is gone, killed or crashed: its connection was lost",
        }
        if not self._ended:
            self._tell([{**asdict(self.state()), "ago": 0.0, "gone": None}])
        self._answered.set()


def _is_computed(result: Any) -> bool:
    try:
        return result.is_ready()
    except Exception:  # donated to a later call, which waits for it; or computing it has failed
        return True


def _line_of(thread: int) -> Line | None:
    # Not by `sys._current_frames()`: while Python code goes from frame to frame, the other thread
    # runs on, and Python 3.11 may crash. This writes all frames in one step.
    with TemporaryFile() as file:
        dump_traceback(file)
        file.seek(0)
        text = file.read().decode(errors="replace")
    _, _, frames = text.partition(f"hread 0x{thread:016x} ")  # "Thread" or "Current thread"
    frames, _, _ = frames.partition("\n\n")
    return own_line(
        [Line(file, int(number), name) for file, number, name in _FRAME.findall(frames)]
    )


@cache
def watch() -> Watch:
    return Watch()
