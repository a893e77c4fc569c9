"""Timelines in the trace format that Perfetto and Chrome open."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxpar.predict._results import NOTE, Prediction, Report
from jaxpar.predict._rows import rows_of, without_overlap
from jaxpar.schedule import Event


def write_trace(path: str, reports: Sequence[Report]) -> None:
    """Writes one process a program, one thread a row."""
    Path(path).write_text(json.dumps(trace(reports)) + "\n")


def trace(reports: Sequence[Report]) -> dict[str, Any]:
    """The trace: times are microseconds of the model."""
    chosen = [
        (report.target, prediction)
        for report in reports
        for prediction in report.predictions
        if not prediction.same_as
    ]
    events = [
        event
        for pid, (target, prediction) in enumerate(chosen, start=1)
        for event in _program(pid, target, prediction)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"note": NOTE}}


def _program(pid: int, target: str, prediction: Prediction) -> Iterator[dict[str, Any]]:
    yield _name("process_name", pid, 0, f"{target} {prediction.label}")
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
    tid = 0
    for row, events in rows_of(prediction.timeline).items():
        # Events of one thread must nest, and transfers that share a link only overlap.
        for number, part in enumerate(without_overlap(events), start=1):
            tid += 1
            yield _name("thread_name", pid, tid, row if number == 1 else f"{row} ({number})")
            order = {"sort_index": tid}
            yield {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": order}
            for event in part:
                yield _complete(pid, tid, event)


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(pid: int, tid: int, event: Event) -> dict[str, Any]:
    return {
        "name": f"wait for {event.name}" if event.kind == "wait" else event.name,
        "cat": event.kind,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": event.start * 1e6,
        "dur": event.seconds * 1e6,
        "args": {
            "op": event.op,
            "kind": event.kind,
            "bytes": event.bytes,
            "synchronous": event.synchronous,
            "covers": list(event.covers),
            "is_matmul": event.is_matmul,
        },
    }
