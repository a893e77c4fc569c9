"""What compilers made of programs, kept on disk: a second call need not compile again."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from jaxpar._files import written
from jaxpar._tuning import versions
from jaxpar.schedule._target import Target

COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
_FORM = 1  # of what is kept; another number makes old files useless


def default_folder() -> Path:
    """Where the commands keep programs: `jaxpar` in the user's folder for caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpar"


def key_of(lowered: Any, target: Target, options: Mapping[str, Any]) -> str:
    """Names a program: its text with its lines, its devices, its options and the compilers.

    Two programs of one key compile to the same text.
    """
    parts = [
        _FORM,
        lowered.as_text(debug_info=True),
        target.name,
        [device.id for device in target.mesh.devices.flat],
        target.mesh.devices.flat[0].device_kind,
        sorted((name, str(value)) for name, value in options.items()),
        versions(*COMPILERS),
        [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
    ]
    return sha256(json.dumps(parts, default=str).encode()).hexdigest()


def kept(folder: Path, key: str) -> dict[str, Any] | None:
    """What was kept under a key; None if nothing was, or what is there cannot be read."""
    try:
        with gzip.open(_path(folder, key), "rt") as file:
            return json.load(file)
    except (OSError, EOFError, ValueError):
        return None


def keep(folder: Path, key: str, text: str, memory: Any) -> None:
    """Keeps a compiled program. A folder that cannot be written keeps nothing, silently."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with written(_path(folder, key)) as half, gzip.open(half, "wt", compresslevel=3) as file:
            json.dump({"text": text, "memory": asdict(memory)}, file)
    except OSError:
        return


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.json.gz"
