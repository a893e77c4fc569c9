"""In how many bits gathered arrays travel: as options, as JSON, and as text."""

import argparse
from dataclasses import asdict
from typing import Any

from jaxpar import LowBit
from jaxpar.tools.cli.console import UsageError


def from_options(args: argparse.Namespace) -> LowBit | None:
    """Reads --wire-dtype and what belongs to it.

    Raises:
      UsageError: what belongs to it, without it; fewer columns than 1.
    """
    if args.wire_columns is not None and args.wire_columns < 1:
        raise UsageError(f"--wire-columns must be at least 1, got {args.wire_columns}")
    if args.wire_dtype is None:
        for name in ("wire_columns", "exact_cotangents"):
            if getattr(args, name):
                option = name.replace("_", "-")
                raise UsageError(f"--{option} is of gathers in 8 bits; give --wire-dtype as well")
        return None
    return LowBit(args.wire_dtype, args.wire_columns, cotangents=not args.exact_cotangents)


def to_json(wire: LowBit | None) -> dict[str, Any] | None:
    """Returns what a log, or another process, has of it."""
    return None if wire is None else {**asdict(wire), "dtype": str(wire.dtype)}


def from_json(found: dict[str, Any] | None) -> LowBit | None:
    """The inverse of `to_json`."""
    return None if found is None else LowBit(**found)


def describe(wire: LowBit | None) -> str:
    """Says how it travels, behind a comma; nothing where it does as it is."""
    if wire is None:
        return ""
    columns = "" if wire.columns is None else f" in blocks of {wire.columns}"
    exact = "" if wire.cotangents else ", exact cotangents"
    return f", gathers in {wire.dtype}{columns}{exact}"
