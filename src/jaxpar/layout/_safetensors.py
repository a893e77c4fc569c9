"""Safetensors files: maps them into memory, so that only used tensors are read, and writes them.

The format's package (https://github.com/huggingface/safetensors), as of 0.8, reads no 8-bit floats,
and writes a transposed array's memory in place of its values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpar.arguments.calls import type_error, value_error
from jaxpar.arguments.local_paths import local_path
from jaxpar.layout._layout_error import shape_text

_DTYPES = {
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BOOL": "bool_",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


Kind = tuple[np.dtype[Any], tuple[int, ...]]  # of a tensor: its dtype and shape
KINDS = {np.dtype(getattr(np, name, None) or getattr(jnp, name)): k for k, name in _DTYPES.items()}


@dataclass(frozen=True)
class Tensor:
    name: str
    file: Path
    kind: str  # the format's name of its dtype
    shape: tuple[int, ...]
    data: np.ndarray  # its bytes in the mapped file

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Returns the dtype. None: numbers of 4 or 6 bits share bytes."""
        name = _DTYPES.get(self.kind)
        return None if name is None else np.dtype(getattr(np, name, None) or getattr(jnp, name))

    @property
    def text(self) -> str:
        return shape_text(self.dtype or self.kind, self.shape)

    def array(self) -> np.ndarray:
        return self.data.view(self.dtype or np.uint8).reshape(self.shape)


def tensors_of(files: Any) -> dict[str, Tensor]:
    sources = [files] if isinstance(files, (str, PathLike)) else files
    paths = list(sources) if isinstance(sources, Iterable) else [sources]
    if not all(isinstance(path, (str, PathLike)) for path in paths):
        raise type_error(f"files must be a path, or several, got {files!r}")
    paths = [local_path("files", path) for path in paths]
    tensors: dict[str, Tensor] = {}
    known: set[Path] = set()
    for path in paths:
        parts, index = _files(path)
        for part in parts:
            read = [] if part.resolve() in known else _read(part)
            known.add(part.resolve())
            for tensor in read:
                if index.get(tensor.name, part) != part:
                    continue
                other = tensors.setdefault(tensor.name, tensor)
                if other is not tensor:
                    raise value_error(
                        f"tensor {tensor.name!r} is in both {other.file} and {part}; give only "
                        "one of them"
                    )
        for name, part in index.items():
            if name not in tensors:
                raise value_error(
                    f"the index of {path} says that {name!r} is in {part}, which has no such "
                    "tensor; copy or download both again"
                )
    if not paths:
        raise value_error(f"files is {files!r}; name files, or folders with *.safetensors")
    return tensors


def _files(path: Path) -> tuple[list[Path], Mapping[str, Path]]:
    """Returns files, and each indexed name's file."""
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors.index*.json"))
        if len(indices) > 1:
            names = ", ".join(index.name for index in indices)
            raise value_error(f"{path} has {len(indices)} indices, {names}; give one of them")
        if indices:
            return _files(indices[0])
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise value_error(
                f"no safetensors files in {path}; name files, or folders with *.safetensors"
            )
        return files, {}
    if path.suffix != ".json":
        return [path], {}
    index = _indexed(path)
    return sorted({*index.values()}), index


def _indexed(index: Path) -> dict[str, Path]:
    try:
        of_name: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: index.parent / file for name, file in of_name.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as reason:
        raise value_error(
            f"{index} is no index of safetensors files: {reason!r}; copy or download it again"
        ) from None


def _read(path: Path) -> list[Tensor]:
    if not path.is_file():
        raise value_error(f"there is no file {path}; give safetensors files that exist")
    try:
        mapped = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
        start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
        if not 8 < start <= len(mapped):
            raise EOFError(f"its header ends at byte {start} of {len(mapped)}")
        header = json.loads(mapped[8:start].tobytes(), object_pairs_hook=_once)
        header.pop("__metadata__", None)
        tensors = [_tensor(name, path, entry, mapped[start:]) for name, entry in header.items()]
        _check_whole([entry["data_offsets"] for entry in header.values()], len(mapped) - start)
    except (EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as reason:
        raise value_error(
            f"{path} is no complete safetensors file ({reason}); copy or download it again"
        ) from None
    return tensors


def _once(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    by_name = dict(entries)
    if len(by_name) != len(entries):
        raise EOFError("its header has a name twice")
    return by_name


def _check_whole(places: list[tuple[int, int]], size: int) -> None:
    before = 0
    for start, end in [*sorted(map(tuple, places)), (size, size)]:
        if start != before:
            raise EOFError(f"a tensor ends at byte {before}, and the next begins at {start}")
        before = end


def _tensor(name: str, file: Path, entry: Mapping[str, Any], data: np.ndarray) -> Tensor:
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(isinstance(size, int) and size >= 0 for size in (*shape, start, end)):
        raise EOFError(f"{name!r} has shape {entry['shape']} and bytes {entry['data_offsets']}")
    tensor = Tensor(name, file, entry["dtype"], shape, data[start:end])
    if not 0 <= start <= end <= len(data):
        raise EOFError(f"{name!r} {tensor.text} ends at byte {end} of {len(data)}")
    if tensor.dtype is not None and prod(shape) * tensor.dtype.itemsize != end - start:
        raise EOFError(f"{name!r} {tensor.text} has {end - start} bytes")
    return tensor


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a file that is being written."""

    begun: Path
    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def write(self, x: np.ndarray) -> None:
        # The values in C order, whatever the order in memory.
        with self.begun.open("r+b") as file:
            file.seek(self.start)
            file.write(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)

    def read(self) -> np.ndarray:
        with self.begun.open("rb") as file:
            file.seek(self.start)
            return np.frombuffer(file.read(self.bytes), self.dtype).reshape(self.shape)


class Files:
    """Files that are being written: under other names, until all is there."""

    def __init__(self, where: Path) -> None:
        self.slots: dict[str, Slot] = {}
        self._where = where
        self._begun: dict[Path, Path] = {}

    def begin(self, tensors: Mapping[str, Kind], most: int) -> None:
        where, parts = self._where, _parts(self._where, tensors, most)
        if where in parts:
            old = where if where.exists() else None
        else:
            old = next(where.glob("*.safetensors*"), None)
        if old:
            raise value_error(f"{old} exists already; remove it, or give another place")
        for path, names in parts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._begin(path, {name: tensors[name] for name in names})
        if len(parts) > 1:
            total = sum(slot.bytes for slot in self.slots.values())
            weight_map = {name: path.name for path, names in parts.items() for name in names}
            self._open(where / "model.safetensors.index.json").write_text(
                json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
            )

    def _open(self, path: Path) -> Path:
        self._begun[path] = path.with_name(f".{path.name}.{os.getpid()}.part")
        return self._begun[path]

    def _begin(self, path: Path, tensors: Mapping[str, Kind]) -> None:
        begun, end = self._open(path), 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses others
        places: dict[str, Slot] = {}
        # The widest first: then each begins at a multiple of its width.
        for name in sorted(tensors, key=lambda name: -tensors[name][0].itemsize):
            dtype, shape = tensors[name]
            places[name] = slot = Slot(begun, end, dtype, shape)
            header[name] = {
                "dtype": KINDS[dtype],
                "shape": list(shape),
                "data_offsets": [end, end := end + slot.bytes],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with begun.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(file.tell() + end)
        for name, slot in places.items():
            self.slots[name] = replace(slot, start=8 + len(text) + slot.start)

    def finish(self) -> None:
        # An index comes last, when its files are there.
        for path in list(self._begun):
            self._begun.pop(path).rename(path)

    def remove(self) -> None:
        """Removes what is not finished."""
        for begun in self._begun.values():
            begun.unlink(missing_ok=True)


def _parts(where: Path, tensors: Mapping[str, Kind], most: int) -> dict[Path, list[str]]:
    """Returns the names in each file."""
    if where.suffix == ".safetensors":
        return {where: list(tensors)}
    parts: list[list[str]] = [[]]
    room = most
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * dtype.itemsize
        if parts[-1] and size > room:
            parts.append([])
            room = most
        parts[-1].append(name)
        room -= size
    if len(parts) == 1:
        return {where / "model.safetensors": parts[0]}
    return {
        where / f"model-{number:05}-of-{len(parts):05}.safetensors": names
        for number, names in enumerate(parts, 1)
    }
