"""Real text that is on every machine: the sources of Python's standard library, byte by byte."""

import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random

import numpy as np

END = 256  # follows each file
VOCABULARY = 257
IGNORE = -1  # the label of a token whose next one is not to be predicted
PADDING = -2  # the label of what is no token

# Distributors split these off, or write their own paths into them.
_NOT_EVERYWHERE = {
    *("distutils", "ensurepip", "idlelib", "lib2to3", "msilib", "pydoc_data", "tkinter"),
    *("turtledemo", "venv", "site", "sitecustomize", "sysconfig", "turtle"),
}
_NOT_TEXT = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Text:
    """Tokens to learn from, and others to validate with."""

    train: np.ndarray  # uint16[tokens]
    validation: np.ndarray

    @cached_property
    def digest(self) -> str:
        """Tells texts apart; equal for equal sources."""
        both = (self.train, self.validation)
        return hashlib.sha256(b"|".join(t.tobytes() for t in both)).hexdigest()[:16]


def standard_library() -> Text:
    """Reads the public modules of the standard library that every distribution has.

    A twentieth of the files, chosen by their names, is for validation, so that the split is the
    same wherever the version of Python is.
    """
    parts: dict[bool, list[np.ndarray]] = {True: [], False: []}
    end = np.array([END], np.uint16)
    for name, path in sorted(_sources()):
        held_out = hashlib.sha256(name.encode()).digest()[0] % 20 == 0
        text = path.read_bytes().replace(b"\r\n", b"\n")
        parts[held_out] += [np.frombuffer(text, np.uint8).astype(np.uint16), end]
    return Text(train=np.concatenate(parts[False]), validation=np.concatenate(parts[True]))


def _sources() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    # By module names that Python fixes, not by what lies in the folder.
    names = {n for n in sys.stdlib_module_names if n[0] != "_"} - _NOT_EVERYWHERE
    for module in names:
        single, folder = root / f"{module}.py", root / module
        for path in [single] if single.is_file() else folder.rglob("*.py"):
            name = path.relative_to(root)
            if not _NOT_TEXT & set(name.parts):
                yield name.as_posix(), path


Batch = tuple[np.ndarray, np.ndarray]  # tokens and labels, int32[batch, sequence]


def training_batch(text: Text, batch: int, sequence: int, seed: int, step: int) -> Batch:
    """Returns the batch of one step: a function of the step, so that a resumed run goes on alike.

    `random.Random.random` is what Python promises never to change.
    """
    draw = Random(f"{seed} {step}")
    starts = len(text.train) - sequence
    if starts < 1:
        raise ValueError(
            f"sequences of {sequence} tokens and one to predict do not fit into a text of "
            f"{len(text.train)}"
        )
    return _windows(text.train, [int(draw.random() * starts) for _ in range(batch)], sequence)


def validation_batches(text: Text, batch: int, sequence: int, count: int) -> Iterator[Batch]:
    """Returns up to `count` batches that cover the held-out text from its beginning, once."""
    starts = range(0, len(text.validation) - 1, sequence)
    for first in range(0, min(len(starts), count * batch), batch):
        yield _windows(text.validation, list(starts[first : first + batch]), sequence)


def _windows(tokens: np.ndarray, starts: list[int], sequence: int) -> Batch:
    inputs = np.zeros((len(starts), sequence), np.int32)
    labels = np.full_like(inputs, IGNORE)
    for row, start in enumerate(starts):
        piece = tokens[start : start + sequence + 1]  # shorter at the end of the text
        inputs[row, : len(piece) - 1] = piece[:-1]
        labels[row, : len(piece) - 1] = piece[1:]
    return inputs, labels
