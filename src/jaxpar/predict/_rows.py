"""The rows of a timeline, as the picture and the trace show them."""

from collections.abc import Iterable

import numpy as np

from jaxpar.schedule import Event, Timeline


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
