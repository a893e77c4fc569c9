"""Tables that layouts pad: a loss over their rows must be told how many rows count.

A device's block under `jax.shard_map` does not say how much of it is padding, and each row of
zeros would add exp(0) to the softmax. So such a table is remembered while its layout, or an array
that it has padded, exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, finalize

from jaxpar.arguments.calls import value_error


@dataclass(frozen=True)
class PaddedTable:
    """An array with one padded dimension: `rows` become `padded` on the devices of `axes`.

    Any other dimension may be the width of the table: stacked tables have several.
    """

    path: str
    rows: int
    padded: int
    widths: frozenset[int]
    axes: tuple[str, ...]
    at_the_end: bool


class PaddedTables:
    """The padded tables of one layout, known while it, or an array that it has padded, exists."""

    def __init__(self, tables: Iterable[PaddedTable]) -> None:
        self.tables = tuple(tables)
        if self.tables:
            _known.add(self)

    def stay_with(self, arrays: Iterable[Any]) -> None:
        """Keeps the note as long as any of these arrays exists."""
        for array in arrays:
            finalize(array, lambda held: None, self).atexit = False  # and holds it until then


_known: WeakSet[PaddedTables] = WeakSet()


def check_no_padding(argument: str, width: int, rows: int) -> None:
    """Raises if a layout has padded a table to these sizes: all rows would count."""
    check_no_padding_between(width, rows)
    if tables := _of_size(width, rows):
        says = ", or ".join(dict.fromkeys(f"{argument}={table.rows}" for table in tables))
        raise value_error(
            f"{_told(tables)}, as many as here: each row of padding would count as a token; give "
            f"{says}, or {argument}={rows} if this is another table"
        )


def check_no_padding_between(width: int, rows: int) -> None:
    """Raises if a table of these sizes has padding between its rows, which would shift them."""
    if tables := [table for table in _of_size(width, rows) if not table.at_the_end]:
        raise value_error(
            f"{_told(tables)}, as many as here: rows after the padding of a shard would belong to "
            "other tokens; pad it at its end by Padded"
        )


def _of_size(width: int, rows: int) -> list[PaddedTable]:
    """Tables of these sizes, over any axes: rows may have been gathered and sharded again."""
    known = (table for of_layout in list(_known) for table in of_layout.tables)
    found = {table for table in known if table.padded == rows and width in table.widths}
    # A layout and its optimizer's states count once.
    return list({(t.rows, t.at_the_end): t for t in sorted(found, key=_order)}.values())


def _order(table: PaddedTable) -> tuple[int, int, str]:
    return -table.rows, -len(table.path), table.path


def _told(tables: list[PaddedTable]) -> str:
    return " and ".join(
        f"{table.path!r} has {table.rows} rows, which a layout pads to {table.padded} over "
        f"{table.axes}"
        for table in tables
    )
