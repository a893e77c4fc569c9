"""Tables of the benchmarks, for the terminal and between markers of a README.md."""

from dataclasses import dataclass
from datetime import date
from pathlib import Path

from jaxpar.choose.tuning import versions
from jaxpar.tools.cli.console import open_console, require_extra


@dataclass(frozen=True)
class Table:
    """Titles of columns, and rows of text."""

    titles: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """The table in Markdown, numbers to the right."""
        rule = ["---", *["---:"] * (len(self.titles) - 1)]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.titles, rule, *self.rows))

    def print(self, width: int = 100) -> None:
        """Prints it on at least `width` columns, unless it has no rows."""
        if not self.rows:
            return
        rich, text = require_extra("rich.table"), require_extra("rich.text").Text
        box = require_extra("rich.box").SIMPLE_HEAD
        printed = rich.Table(box=box, pad_edge=False, padding=(0, 1))
        for number, title in enumerate(self.titles):
            printed.add_column(text(title), justify="right" if number else "left")
        for row in self.rows:
            printed.add_row(*(text(cell.replace("**", "")) for cell in row))
        console = open_console()
        console.width = max(console.width, width)
        console.print(printed)


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


def update(readme: Path, section: str, tables: str) -> None:
    """Rewrites a section of a file."""
    readme.write_text(rewrite(readme.read_text(), section, tables))


def made_by(command: str, *packages: str) -> str:
    """The line above tables: what made them, when, and with which versions."""
    found = versions("jaxpar", "jax", *packages)
    return f"`{command}`, {date.today()}: {', '.join(f'{k} {v}' for k, v in found.items())}."
