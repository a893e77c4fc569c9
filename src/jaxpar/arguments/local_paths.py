"""Paths of this host, for files that are mapped into memory."""

from __future__ import annotations

import re
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from jaxpar.arguments.calls import type_error, value_error

# `Path("gs://bucket/a")` has one slash.
_REMOTE = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.IGNORECASE | re.DOTALL)
_DOWN = {
    "gs": "gcloud storage cp -r gs://{} .",
    "s3": "aws s3 cp --recursive s3://{} .",
    "hf": "hf download {} --local-dir .",
    "http": "curl -LO http://{}",
    "https": "curl -LO https://{}",
}
_UP = {
    "gs": "gcloud storage cp -r FOLDER gs://{}",
    "s3": "aws s3 cp --recursive FOLDER s3://{}",
    "hf": "hf upload {} FOLDER",
}


def local_path(argument: str, path: str | PathLike[Any], *, writes: bool = False) -> Path:
    """Returns a path of this host; refuses those of stores and sites."""
    place: Any = path
    if not isinstance(place, (str, PathLike)):
        raise type_error(f"{argument} must be a path, a str say, got {type(place).__name__}")
    remote = _REMOTE.fullmatch(str(fspath(path)))
    if remote is None:
        return Path(path)
    kind, rest = remote[1].lower(), remote[2]
    command = (_UP if writes else _DOWN).get(kind, "").format(rest)
    hint = f" with `{command}`" if command else ""
    if kind == "file":
        remedy = f"give '/{rest}'"
    elif writes:
        remedy = f"write to a folder of this host, and copy that{hint}"
    else:
        remedy = f"copy it to this host{hint}, and give the copy's path"
    raise value_error(f"{argument}={str(path)!r} is no path of this host; {remedy}")
