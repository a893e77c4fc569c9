"""Files that are there whole or not at all."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written(path: str | Path) -> Generator[Path, None, None]:
    """Yields a name to write under; the file takes the place of `path` once the block is through.

    An interrupted block leaves `path` as it was. What is no regular file, as /dev/stdout, is
    written directly.
    """
    final = Path(path).resolve()
    if final.exists() and not final.is_file():
        yield Path(path)
        return
    # The ending stays last: matplotlib tells the format by it.
    half = final.with_name(f".{final.stem}.{os.getpid()}{final.suffix}")
    try:
        yield half
        half.replace(final)
    finally:
        half.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Writes a text whole or not at all."""
    with written(path) as half:
        half.write_text(text)
