"""What to say of a pipeline, of the longest stage, and where a pipeline would be faster."""

from math import floor

from jaxpar.tools.timeline.links import Links
from jaxpar.tools.timeline.target import Target
from jaxpar.tools.timeline.timeline import Timeline
from jaxpar.tools.toolkit_api import us

_MOST = 4  # places that are named
_NEAR = 0.01  # of the longest time: a smaller difference is not said
_LEAST = 0.05  # of the step: shorter waits for a slow network suggest no pipeline


def pipeline_lines(played: Timeline, target: Target) -> tuple[str, ...]:
    lines = [_bubble(played, target), _longest(played), _faster(played, target)]
    return tuple(filter(None, lines))


def _bubble(played: Timeline, target: Target) -> str:
    if not played.bubble or not played.total:
        return ""
    text = (
        f"a device of the pipeline is idle for {us(played.bubble)} "
        f"({played.bubble / played.total:.0%}), its bubble; more microbatches or virtual stages "
        "make it shorter"
    )
    if target.chip and Links(target.mesh, target.chip).apart == 1:
        text += "; behind one fast network, FSDP has none"
    return text


def _longest(played: Timeline) -> str:
    places = sorted(played.compute_by_place.items(), key=lambda item: -item[1])
    if not places or places[0][1] - places[-1][1] <= _NEAR * places[0][1]:
        return ""
    named = [f"{place} computes {us(seconds)}" for place, seconds in places[:_MOST]]
    more = f" (and {len(places) - _MOST} more)" if len(places) > _MOST else ""
    return (
        "devices take different branches, and wait for the longest one: "
        f"{', '.join(named)}{more}; share the longest out among the devices"
    )


def _faster(played: Timeline, target: Target) -> str:
    """Returns from how many microbatches on a pipeline over slices or hosts is faster.

    It would send activations in the place of weights and gradients. With p of them and m
    microbatches its bubble is (p - 1) / (m + p - 1), and the waits must be a larger share.
    """
    if played.bubble or target.chip is None:
        return ""
    links = Links(target.mesh, target.chip)
    slow = {
        transfer.name
        for transfer in played.transfers
        if transfer.slow and transfer.row.endswith(("gather", "scatter", "reduce"))
    }
    waits = (e.seconds for e in played.events if e.kind == "wait" and e.name in slow)
    seconds = sum(waits, 0.0)
    share = seconds / played.total if played.total else 0.0
    if share < _LEAST:
        return ""
    count = floor((links.apart - 1) * (1 - share) / share) + 1
    what = "slices" if target.chip.torus else "hosts"
    least = f"from {count} microbatches on" if count > 1 else "with any number of microbatches"
    return (
        f"waits for gathers and sums between {links.apart} {what} take {us(seconds)} "
        f"({share:.0%}): a pipeline over the {what} sends activations alone, and is faster {least} "
        f"if its hops are hidden, as its bubble is then below {share:.0%}"
    )
