"""Time in which devices of a pipeline are idle, or wait for the one that computes the longest."""

import re
from collections.abc import Mapping
from functools import cache

from jaxpar.tools.private_names import us

# How `jaxpar.pipeline` names its passes.
_PASSES = re.compile(r"/passes\[bubble=([0-9.]+)\]/")
_MOST = 4  # places that are named
_NEAR = 0.01  # of the longest time: a smaller difference is not said


@cache
def idle_share(op: str) -> float:
    """Returns the share of an operation's runs that idle devices of a pipeline do."""
    found = _PASSES.search(op)
    return float(found[1]) if found else 0.0


def idle_lines(bubble: float, total: float, computed: Mapping[str, float]) -> list[str]:
    """Returns what to say of a pipeline's bubble, and of places that compute longer than others."""
    lines: list[str] = []
    if bubble:
        lines.append(
            f"a device of the pipeline is idle for {us(bubble)} ({bubble / total:.1%}), its bubble"
            "; more microbatches or virtual stages make it shorter"
        )
    longest = sorted(computed.items(), key=lambda item: -item[1])
    if longest and longest[0][1] - longest[-1][1] > _NEAR * longest[0][1]:
        named = [f"{place} computes {us(seconds)}" for place, seconds in longest[:_MOST]]
        others = len(longest) - _MOST
        more = f" (and {others} more)" if others > 0 else ""
        lines.append(
            "devices take different branches, and wait for the longest one: "
            f"{', '.join(named)}{more}; share the longest out among the devices"
        )
    return lines
