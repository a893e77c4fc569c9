"""Writes files completely or not at all."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written(path: str | Path) -> Generator[Path, None, None]:
    """Yields a temporary name; at the end, its file replaces `path`."""
    # An interruption leaves `path` unchanged. Special files are written directly.
    from jaxpar.arguments.local_paths import local_path

    final = local_path("path", path, writes=True).resolve()
    if final.exists() and not final.is_file():
        yield Path(path)
        return
    # The suffix stays last: matplotlib chooses the format by it.
    half = final.with_name(f".{final.stem}.{os.getpid()}{final.suffix}")
    try:
        yield half
        half.replace(final)
    finally:
        half.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    with written(path) as half:
        half.write_text(text)
