"""Terminal output of the commands."""

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from threading import Timer
from typing import Any

from jaxpar.tools.toolkit_api import distribution, install_command

SECONDS_A_LINE = 5.0  # between lines of progress, without a terminal
INTERRUPTED = 130  # exit status after Ctrl-C: 128 and the number of SIGINT


class UsageError(Exception):
    """A refused argument; says why, and what to write."""


def status_of(program: str, run: Callable[[], int]) -> int:
    """Runs a command; prints `UsageError` as one line."""
    try:
        return run()
    except UsageError as reason:
        print_error(program, reason)
        return 2
    except TimeoutError as reason:  # other processes are missing
        print_error(program, reason)
        return 1
    except KeyboardInterrupt:
        print_error(program, "interrupted")
        return INTERRUPTED


def print_error(program: str, reason: object) -> None:
    print(f"{program}: error: {reason}", file=sys.stderr)


def require_extra(module: str, extra: str = "bench") -> Any:
    """Imports an extra's module, or raises `UsageError`."""
    try:
        return import_module(module)
    except ImportError as missing:
        raise UsageError(
            f"{distribution(module)} is not installed; {install_command(extra)}"
        ) from missing


def open_console(stderr: bool = False) -> Any:
    console = require_extra("rich.console").Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 100  # a pipe has no width
    return console


@contextmanager
def progress(
    first: str, total: int | None, *, shown: bool = True, still: bool = False
) -> Generator[Callable[[str], None], None, None]:
    """Shows a bar, or log lines; yields a function to call after each step.

    `total` is None if unknown. With `still`, no thread draws, which would disturb a timing.
    """
    if not shown:
        yield lambda label: None
        return
    console = open_console(stderr=True)
    if not console.is_terminal:
        with _lines(first, total, still) as tick:
            yield tick
        return
    bar = require_extra("rich.progress").Progress(
        console=console,
        transient=True,
        auto_refresh=not still,
    )
    with bar:
        task = bar.add_task(first, total=total)
        bar.refresh()
        yield lambda label: bar.update(task, advance=1, description=label, refresh=still)


@contextmanager
def _lines(
    first: str, total: int | None, still: bool
) -> Generator[Callable[[str], None], None, None]:
    done, last = 0, time.monotonic()

    def tick(label: str) -> None:
        nonlocal done, last
        done += 1
        if time.monotonic() - last >= SECONDS_A_LINE:
            last = time.monotonic()
            of = "" if total is None else f" of {total}"
            print(f"{done}{of} done, {label}", file=sys.stderr, flush=True)

    begun = Timer(SECONDS_A_LINE, lambda: print(f"{first} ...", file=sys.stderr, flush=True))
    begun.daemon = True
    if not still:
        begun.start()
    try:
        yield tick
    finally:
        begun.cancel()


@dataclass(frozen=True)
class Column:
    title: str
    width: int | None = None
    left: bool = False
    wraps: bool = False


def print_rows(
    console: Any,
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    *,
    padding: tuple[int, ...] = (0, 1),
    show_header: bool = False,
) -> None:
    table = require_extra("rich.table").Table(
        box=None, padding=padding, pad_edge=False, show_header=show_header
    )
    for column in columns:
        table.add_column(
            column.title,
            justify="left" if column.left else "right",
            width=column.width,
            no_wrap=not column.wraps,
            overflow="fold" if column.wraps else "ellipsis",
        )
    for row in rows:
        table.add_row(*row)
    console.print(table)
