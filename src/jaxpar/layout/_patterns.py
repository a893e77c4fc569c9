"""Arguments that are patterns of paths. Each must match some path."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from jaxpar.arguments.calls import type_error, value_error
from jaxpar.layout._paths import pattern_of


class Pattern:
    def __init__(self, argument: str, text: Any, paths: Sequence[str]) -> None:
        if not isinstance(text, str):
            raise type_error(f"{argument} must be a pattern, got {text!r}")
        self._argument, self._text, self._all = argument, text, paths
        try:
            pattern = re.compile(text)
        except re.error as reason:
            raise value_error(
                f"{argument}={text!r} is no regular expression: {reason}; use re.escape(path) if "
                "the path has special characters"
            ) from None
        self._paths = {path for path in paths if text and pattern.fullmatch(path)}

    def check(self) -> Pattern:
        if self._text and not self._paths:
            raise value_error(
                f"{self._argument}={self._text!r} matches no path; it must match a full one, and "
                f"`.*` matches anything{_some(self._text, self._all)}"
            )
        return self

    def __contains__(self, path: str) -> bool:
        return path in self._paths


def _some(text: str, paths: Sequence[str]) -> str:
    kinds = list({pattern_of(path): path for path in reversed(paths)}.values())[::-1][:1000]
    near = difflib.get_close_matches(text, kinds, 3, 0.4) or kinds[:3]
    return f": there are {', '.join(map(repr, near))}" if near else ""
