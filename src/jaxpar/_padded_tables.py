"""Tables that layouts pad: a loss over their rows is refused until it is told how many count.

A device's block under `jax.shard_map` does not say how much of it is padding, and each row of
zeros would add exp(0) to the softmax. So a layout keeps a note of such tables while it is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakSet

from jaxpar._calls import value_error


@dataclass(frozen=True)
class PaddedTable:
    """A matrix of which one dimension is padded: `rows` are `padded` on the devices of `axes`."""

    path: str
    rows: int
    padded: int
    width: int
    axes: tuple[str, ...]
    at_the_end: bool


class PaddedTables:
    """Those of one layout, which holds this note: they are known until it goes."""

    def __init__(self, tables: Iterable[PaddedTable]) -> None:
        self.tables = tuple(tables)
        if self.tables:
            _known.add(self)


_known: WeakSet[PaddedTables] = WeakSet()


def check_no_padding(argument: str, width: int, rows: int, axes: tuple[str, ...]) -> None:
    """Raises where a layout has padded a table to these sizes, of whose rows all would count."""
    found = [
        table
        for of_layout in _known
        for table in of_layout.tables
        # Of further axes a function may have gathered its rows.
        if (table.width, table.padded) == (width, rows) and set(axes) <= set(table.axes)
    ]
    if not found:
        return
    table = min(found, key=lambda table: table.path)
    remedy = (
        f"say {argument}={table.rows}, or {argument}={rows} if this is another table"
        if table.at_the_end
        else f"pad it at its end, Padded, and say {argument}={table.rows}"
    )
    raise value_error(
        f"{table.path!r} has {table.rows} rows, which a layout pads to {rows} over {table.axes}, "
        f"as many as here: each row of padding would count as a token; {remedy}"
    )
