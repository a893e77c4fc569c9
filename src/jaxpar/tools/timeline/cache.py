"""Compiled programs on disk."""

from __future__ import annotations

import gzip
import json
import os
import re
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from jaxpar.tools.timeline.target import Target
from jaxpar.tools.toolkit_api import versions, written

COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
MOST_BYTES = 2**30  # of all files in a folder; the last used stay
_FORM = 2  # of a saved program; a new number makes old files useless
_ABANDONED_S = 24 * 3600  # an older half-written file has no writer any more


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpar"


# Lines of these tools in a program's text: they call the compiled function.
_OWN_LINES = re.compile(r'(loc\("[^"]*\bjaxpar/tools/[^"]*"):\d+:\d+(?: to \d*:\d+)?')


def key_of(lowered: Any, target: Target, options: Mapping[str, Any]) -> str:
    # Lines of these tools do not count: a new model of a chip needs no new compilation.
    parts = [
        _FORM,
        _OWN_LINES.sub(r"\1", lowered.as_text(debug_info=True)),
        target.name,
        [device.id for device in target.mesh.devices.flat],
        target.mesh.devices.flat[0].device_kind,
        sorted((name, str(value)) for name, value in options.items()),
        versions(*COMPILERS),
        [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
    ]
    return sha256(json.dumps(parts, default=str).encode()).hexdigest()


def kept(folder: Path, key: str) -> dict[str, Any] | None:
    # None: the file is missing or damaged.
    path = _path(folder, key)
    try:
        with gzip.open(path, "rt") as file:
            record = json.load(file)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error):
        return None
    if not _is_program(record):
        return None
    with suppress(OSError):  # another user's folder, or a file that is being deleted
        os.utime(path)
    return record


def _is_program(record: Any) -> bool:
    sizes = {"arguments", "outputs", "temporaries", "aliased", "peak"}
    match record:
        case {"text": str(), "memory": dict(memory)}:
            return set(memory) == sizes and all(isinstance(n, int) for n in memory.values())
        case _:
            return False


def keep(folder: Path, key: str, text: str, memory: Any) -> None:
    """Saves a program, and deletes the longest unused."""
    path = _path(folder, key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with written(path) as half, gzip.open(half, "wt", compresslevel=3) as file:
            json.dump({"text": text, "memory": asdict(memory)}, file)
    except OSError:
        return
    _forget(folder, path)


def _forget(folder: Path, newest: Path) -> None:
    """Deletes files beyond `MOST_BYTES`, and abandoned half-written ones.

    Another process that reads a deleted file still has it, or compiles.
    """
    total, now = 0, time.time()
    for used, size, path in sorted(_files(folder), reverse=True):
        if path.name.startswith("."):
            is_wanted = now - used < _ABANDONED_S
        else:
            total += size
            is_wanted = total <= MOST_BYTES or path == newest
        if not is_wanted:
            with suppress(OSError):
                path.unlink()


def _files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    for path in folder.glob("*.json*.gz"):
        with suppress(OSError):
            stat = path.stat()
            yield stat.st_mtime, stat.st_size, path


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.json.gz"
