"""What ends a benchmark with one line instead of a traceback."""


class UsageError(Exception):
    """An argument that cannot be served; the text says why, and what to write instead."""
