"""Passes of a pipeline, some of which idle devices do."""

import re
from functools import cache

# How `jaxpar.pipeline` names its passes.
_PASSES = re.compile(r"/passes\[bubble=([0-9.]+)\]/")


@cache
def idle_share(op: str) -> float:
    """Returns the share of an operation's runs that idle devices of a pipeline do."""
    found = _PASSES.search(op)
    return float(found[1]) if found else 0.0
