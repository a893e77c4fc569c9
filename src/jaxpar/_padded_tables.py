"""Tables that layouts pad: a loss over their rows is refused until it is told how many count.

A device's block under `jax.shard_map` does not say how much of it is padding, and each row of
zeros would add exp(0) to the softmax. So there is a note of such tables while there is a layout
that pads them, or an array that it has padded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, finalize

from jaxpar._calls import value_error


@dataclass(frozen=True)
class PaddedTable:
    """An array of which one dimension is padded: `rows` are `padded` on the devices of `axes`.

    As a table it may be as wide as any other dimension: of stacked tables one is taken.
    """

    path: str
    rows: int
    padded: int
    widths: frozenset[int]
    axes: tuple[str, ...]
    at_the_end: bool


class PaddedTables:
    """Those of one layout: known until it goes, and the arrays that it has padded."""

    def __init__(self, tables: Iterable[PaddedTable]) -> None:
        self.tables = tuple(tables)
        if self.tables:
            _known.add(self)

    def stay_with(self, arrays: Iterable[Any]) -> None:
        """Keeps the note as long as any of these arrays is there."""
        for array in arrays:
            finalize(array, lambda held: None, self).atexit = False  # and holds it until then


_known: WeakSet[PaddedTables] = WeakSet()


def check_no_padding(argument: str, width: int, rows: int) -> None:
    """Raises where a layout has padded a table to these sizes, of whose rows all would count."""
    check_no_padding_between(width, rows)
    if tables := _of_size(width, rows):
        says = ", or ".join(dict.fromkeys(f"{argument}={table.rows}" for table in tables))
        raise value_error(
            f"{_told(tables)}, as many as here: each row of padding would count as a token; say "
            f"{says}, or {argument}={rows} if this is another table"
        )


def check_no_padding_between(width: int, rows: int) -> None:
    """Raises where a table of these sizes has padding between its rows, which counts as rows do."""
    if tables := [table for table in _of_size(width, rows) if not table.at_the_end]:
        raise value_error(
            f"{_told(tables)}, as many as here: rows behind the padding of a shard would be those "
            "of other tokens; pad it at its end, Padded"
        )


def _of_size(width: int, rows: int) -> list[PaddedTable]:
    """Those that are so large, over whichever axes: rows may have been gathered, and cut anew."""
    known = (table for of_layout in list(_known) for table in of_layout.tables)
    found = {table for table in known if table.padded == rows and width in table.widths}
    # Of a layout and its optimizer's states, one.
    return list({(t.rows, t.at_the_end): t for t in sorted(found, key=_order)}.values())


def _order(table: PaddedTable) -> tuple[int, int, str]:
    return -table.rows, -len(table.path), table.path


def _told(tables: list[PaddedTable]) -> str:
    return " and ".join(
        f"{table.path!r} has {table.rows} rows, which a layout pads to {table.padded} over "
        f"{table.axes}"
        for table in tables
    )
