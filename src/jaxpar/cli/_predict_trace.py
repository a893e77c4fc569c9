"""Timelines in rows, and as the trace that Perfetto and Chrome open."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.cli._predict_results import NOTE, Prediction, Report
from jaxpar.schedule import Event, Timeline


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


# -- rows, as the picture has them too -------------------------------------------------------------


def rows_of(timeline: Timeline) -> dict[str, list[Event]]:
    """Events by row: computing first, then where transfers go, memory copies last."""
    found: dict[str, list[Event]] = {"compute": []}
    for event in timeline.events:
        found.setdefault(event.row, []).append(event)
    order = sorted(found, key=lambda row: (row != "compute", row == "memory", _lane(row)))
    return {row: found[row] for row in order}


def without_overlap(events: Iterable[Event], slack: float = 0.0) -> list[list[Event]]:
    """Splits a row so that no two events of a part run at the same time, up to `slack` seconds."""
    parts: list[list[Event]] = []
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        for part in parts:
            if part[-1].end <= event.start + slack:
                part.append(event)
                break
        else:
            parts.append([event])
    return parts


def shares(events: Iterable[Event], edges: np.ndarray) -> np.ndarray:
    """The share of each interval between two `edges` that events take; at most 1."""
    spans = np.array([(event.start, event.end) for event in events]).reshape(-1, 2)
    start, end = spans[:, :1], spans[:, 1:]  # [events, 1]
    until = np.clip(edges, start, end) - start  # [events, edges]: seconds of it so far
    return np.minimum(np.diff(until.sum(axis=0)) / np.diff(edges), 1.0)


def _lane(row: str) -> tuple[str, bool, str]:
    """Up the axis before down it."""
    return row.partition(" ")[0], "-" in row.partition(" ")[2][:1], row
