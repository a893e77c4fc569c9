"""Tables that layouts pad. A loss over a table needs the number of rows without padding.

A block does not tell its padding, and each row of zeros would add exp(0) to a softmax.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, finalize

from jaxpar.arguments.calls import value_error


@dataclass(frozen=True)
class PaddedTable:
    """A table whose `rows` become `padded`. Stacked tables have several possible widths."""

    path: str
    rows: int
    padded: int
    widths: frozenset[int]
    axes: tuple[str, ...]
    at_the_end: bool


class PaddedTables:
    """A layout's padded tables, remembered as long as it or a padded array exists."""

    def __init__(self, tables: Iterable[PaddedTable]) -> None:
        self.tables = tuple(tables)
        if self.tables:
            _known.add(self)

    def stay_with(self, arrays: Iterable[Any]) -> None:
        for array in arrays:
            finalize(array, lambda held: None, self).atexit = False  # holds `self` until then


_known: WeakSet[PaddedTables] = WeakSet()


def check_no_padding(argument: str, width: int, rows: int) -> None:
    check_no_padding_between(width, rows)
    if tables := _of_size(width, rows):
        says = ", or ".join(dict.fromkeys(f"{argument}={table.rows}" for table in tables))
        raise value_error(
            f"{_told(tables)}, as many as here: each row of padding would count as a token; give "
            f"{says}, or {argument}={rows} if this is another table"
        )


def check_no_padding_between(width: int, rows: int) -> None:
    """Raises if a layout's table has padding between rows."""
    if tables := [table for table in _of_size(width, rows) if not table.at_the_end]:
        raise value_error(
            f"{_told(tables)}, as many as here: rows after the padding of a shard would belong to "
            "other tokens; pad it at its end by Padded"
        )


def _of_size(width: int, rows: int) -> list[PaddedTable]:
    """Returns such tables, of any axes: rows may be sharded again."""
    known = (table for of_layout in list(_known) for table in of_layout.tables)
    tables = {table for table in known if table.padded == rows and width in table.widths}
    # A layout and its optimizer's states have the same tables: count them once.
    return list({(t.rows, t.at_the_end): t for t in sorted(tables, key=_order)}.values())


def _order(table: PaddedTable) -> tuple[int, int, str]:
    return -table.rows, -len(table.path), table.path


def _told(tables: list[PaddedTable]) -> str:
    return " and ".join(
        f"{table.path!r} has {table.rows} rows, which a layout pads to {table.padded} over "
        f"{table.axes}"
        for table in tables
    )
