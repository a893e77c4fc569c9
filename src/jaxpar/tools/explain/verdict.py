"""The closed list of causes, and rules' verdicts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jaxpar.tools.explain.edits import Edit

Cause = Literal[
    "in disguise",
    "resharding",
    "sent twice",
    "wide dtype",
    "links apart",
    "links busy",
    "start alone",
    "latency",
    "synchronous",
    "ends of a pipeline",
    "ordered elsewhere",
    "nothing to hide behind",
    "copies",
    "windowed einsums",
    "recomputed by the compiler",
]

# The meaning of each cause, for readers.
CAUSES: dict[Cause, str] = {
    "in disguise": "an all-reduce does the work of a gather or a reduce-scatter: twice the bytes",
    "resharding": "an array's sharding is not the one that its user needs",
    "sent twice": "the same bytes travel more than once in a step",
    "wide dtype": "numbers travel in more bytes than the result keeps",
    "links apart": "neighbours on the mesh axis are several links apart",
    "links busy": "another transfer uses the links",
    "start alone": "the program starts it early, but no work overlaps with it",
    "latency": "the message is small: most of its time passes before the first byte arrives",
    "synchronous": "the compiler makes it synchronous: no work overlaps with it",
    "ends of a pipeline": "it fills or drains a pipeline whose other transfers are hidden",
    "ordered elsewhere": "independent work that could hide it runs at another time",
    "nothing to hide behind": "the next operation needs it, and there is no other work",
    "copies": "a loop copies its carry in each iteration",
    "windowed einsums": "the partitioner has cut matmuls into pieces with permutes between them",
    "recomputed by the compiler": "arrays that do not fit into memory are computed again",
}


@dataclass(frozen=True)
class Verdict:
    """The verdict of a rule on an exposed collective.

    Attributes:
      edit: what to change, if none of `edits` makes the step faster.
      is_sure: whether it holds without a trial. If not, one of `edits` must help.
    """

    cause: Cause
    why: str
    edit: str
    edits: Iterable[Edit] = ()
    is_sure: bool = True
