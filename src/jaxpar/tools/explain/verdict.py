"""The closed list of causes, and what a rule says of a transfer that is waited for."""

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
]

# What each one means, for readers.
CAUSES: dict[Cause, str] = {
    "in disguise": "a gather or a reduce-scatter is done as a sum of whole arrays: twice the bytes",
    "resharding": "an array lies otherwise than the operation that uses it wants it",
    "sent twice": "the same bytes travel more than once in a step",
    "wide dtype": "numbers travel in more bytes than the result keeps of them",
    "links apart": "neighbours on the mesh axis are several links apart",
    "links busy": "the links are in use by another transfer",
    "start alone": "the program starts it early, and nothing runs beside it all the same",
    "latency": "the message is small: most of its time passes before the first byte is there",
    "synchronous": "the compiler makes it synchronous: nothing runs beside it",
    "ends of a pipeline": "it fills or drains a pipeline whose other transfers are hidden",
    "ordered elsewhere": "work that needs it not stands at another place of the program",
    "nothing to hide behind": "what comes next needs it, and there is no other work",
    "copies": "a loop copies what it carries from trip to trip",
    "windowed einsums": "the partitioner has cut matmuls into pieces with permutes between them",
}


@dataclass(frozen=True)
class Verdict:
    """What a rule says of an exposed collective.

    Attributes:
      cause: the rule's.
      why: the evidence, as a sentence.
      edit: what to change, where none of `edits` is faster.
      edits: those that can be tried by themselves.
      is_sure: whether it holds without a trial; else one of them must make the step faster.
    """

    cause: Cause
    why: str
    edit: str
    edits: Iterable[Edit] = ()
    is_sure: bool = True
