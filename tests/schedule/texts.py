"""HLO written by hand."""

import re


def rooted(instructions):
    """The instructions of a computation whose last one is its result, where none says so."""
    if "ROOT " in instructions:
        return instructions
    *_, last = re.finditer(r"^  (?=%)", instructions, re.MULTILINE)
    return f"{instructions[: last.end()]}ROOT {instructions[last.end() :]}"
