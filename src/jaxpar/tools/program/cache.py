"""What compilers made of programs, kept on disk: a second call need not compile again."""

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

from jaxpar.tools.private_names import versions, written
from jaxpar.tools.timeline.target import Target

COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
MOST_BYTES = 2**30  # of all files in a folder; those that were used last stay
_FORM = 1  # of what is kept; another number makes old files useless
_ABANDONED_S = 24 * 3600  # a half-written file that is older is nobody's any more


def default_folder() -> Path:
    """Where the commands keep programs: `jaxpar` in the user's folder for caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpar"


# Where a line of these tools stands in a program's text: they call what is compiled.
_OWN_LINES = re.compile(r'(loc\("[^"]*\bjaxpar/tools/[^"]*"):\d+:\d+(?: to \d*:\d+)?')


def key_of(lowered: Any, target: Target, options: Mapping[str, Any]) -> str:
    """Names a program: its text with its lines, its devices, its options and the compilers.

    Two programs of one key compile to the same text, but for lines of these tools: who changes the
    model of a chip need not compile again.
    """
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
    """What was kept under a key; None if nothing was, or what is there is damaged."""
    path = _path(folder, key)
    try:
        with gzip.open(path, "rt") as file:
            found = json.load(file)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error):
        return None
    if not _is_program(found):
        return None
    with suppress(OSError):  # a folder of somebody else's, or a file that is being deleted
        os.utime(path)
    return found


def _is_program(found: Any) -> bool:
    """Whether it is what `keep` writes."""
    sizes = {"arguments", "outputs", "temporaries", "aliased", "peak"}
    match found:
        case {"text": str(), "memory": dict(memory)}:
            return set(memory) == sizes and all(isinstance(n, int) for n in memory.values())
        case _:
            return False


def keep(folder: Path, key: str, text: str, memory: Any) -> None:
    """Keeps a compiled program, and deletes those that were not used for the longest time.

    A folder that cannot be written keeps nothing, silently.
    """
    path = _path(folder, key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with written(path) as half, gzip.open(half, "wt", compresslevel=3) as file:
            json.dump({"text": text, "memory": asdict(memory)}, file)
    except OSError:
        return
    _forget(folder, path)


def _forget(folder: Path, newest: Path) -> None:
    """Deletes what is beyond `MOST_BYTES`, and what a process that was killed left half-written.

    Others may read, write and delete in the folder meanwhile. Who reads a file that is deleted has
    it still, or finds nothing and compiles.
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
    """When each file of a folder was used, and its bytes."""
    for path in folder.glob("*.json*.gz"):
        with suppress(OSError):
            stat = path.stat()
            yield stat.st_mtime, stat.st_size, path


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.json.gz"
