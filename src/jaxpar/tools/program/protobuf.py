"""Reads the fields of protobufs."""

from collections.abc import Iterator
from typing import Any


def number_at(data: Any, at: int) -> tuple[int, int]:
    """Returns the number at a place, and the place after it."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at


def numbers_of(packed: bytes) -> Iterator[int]:
    at = 0
    while at < len(packed):
        number, at = number_at(packed, at)
        yield number


def fields_of(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = number_at(data, at)
        width = {1: 8, 5: 4}.get(key & 7, 0)
        if key & 7 == 0:
            value, at = number_at(data, at)
        else:
            if not width:
                width, at = number_at(data, at)
            value, at = data[at : at + width], at + width
        yield key >> 3, value
