"""Tables of the benchmarks, for the terminal and between markers of README.md."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Titles of columns, and rows of text."""

    titles: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """The table in Markdown, numbers to the right."""
        rule = ["---", *["---:"] * (len(self.titles) - 1)]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.titles, rule, *self.rows))


def print_table(table: Table, width: int = 100) -> None:
    """Prints a table on at least `width` columns, unless it has no rows."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as Printed

    if not table.rows:
        return
    printed = Printed(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for number, title in enumerate(table.titles):
        printed.add_column(title, justify="right" if number else "left")
    for row in table.rows:
        printed.add_row(*(cell.replace("**", "") for cell in row))
    console = Console(markup=False, highlight=False)
    console.print(printed, width=max(console.width, width))


def markers(section: str) -> tuple[str, str]:
    """What stands before and after a section that a command rewrites."""
    return f"<!-- {section}:begin -->", f"<!-- {section}:end -->"


def rewrite(text: str, section: str, tables: str) -> str:
    """Returns `text` with `tables` between the markers of a section.

    Raises:
      ValueError: the markers are not there, once each and in order.
    """
    first, last = markers(section)
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end or first in rest or last in before or last in after:
        raise ValueError(f"the markers {first} and {last} must be there, once each and in order")
    return f"{before}{first}\n\n{tables}\n\n{last}{after}"
