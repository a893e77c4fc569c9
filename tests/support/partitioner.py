"""What XLA's partitioner makes of shardings: what it warns of, and batches that it gathers."""

import os
import re
import sys
import tempfile
from contextlib import contextmanager

WARNING = "Involuntary full rematerialization"
MOVES = re.compile(
    r"= (\S+|\(.*?\)) (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)


@contextmanager
def standard_error():
    """Gives a function of what has been written to standard error, by C++ too."""
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)

        def text():
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield text
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)


def compiled(function, *args):
    """A jitted function's program, and the lines in which the partitioner warns of it."""
    with standard_error() as text:
        program = function.lower(*args).compile().as_text()
        lines = text().splitlines()
    return program, [line for line in lines if WARNING in line]


def whole_batches(program, rows, features):
    """The shapes of activations that a collective of a program brings together for all rows."""
    shapes = [
        found for moved in MOVES.findall(program) for found in re.findall(r"\[[\d,]+\]", moved)
    ]
    sizes = [tuple(map(int, shape[1:-1].split(","))) for shape in shapes]
    return [shape for shape in sizes if rows in shape and features & set(shape)]
