"""The choice of mode: a roofline over static shapes, the ring's size and the chip."""

import jax

from jaxpar._chips import Chip, traced_chip
from jaxpar.collectives._plan import Plan, make_plan
from jaxpar.collectives._ring import Ring

# What a matmul costs beyond its FLOPs when it is cut into one more piece, in seconds. A ring must
# win by more than the model can be trusted for.
PIECE_OVERHEAD = 2e-6
MARGIN = 0.95


def choose_mode(ring: Ring, flops: float, block_bytes: int) -> str:
    """Returns the mode that a roofline predicts to be the fastest.

    Args:
      ring: the ring; on 1 or 2 devices there is at most one transfer, and naive is chosen.
      flops: of the whole local matmul, over all steps.
      block_bytes: what one device sends in one step.

    The model: `naive` is the collective at the speed of the links (both directions on a torus),
    then the matmul at peak. A ring's step takes the longer of its matmuls at peak and its transfers
    at one hop of latency plus bytes over one link, and a fixed overhead for each piece. On a chip
    that is not in the table, on CPU devices (which share cores, so that a transfer takes the time
    of a matmul instead of hiding behind it) and where the compiler makes permutes synchronous, the
    answer is naive.
    """
    chip = traced_chip()
    devices = jax.sharding.get_abstract_mesh().size
    if chip is None or ring.size <= 2:
        return "naive"
    if chip.synchronous_from is not None and devices >= chip.synchronous_from:
        return "naive"
    # Where every transfer is covered the times are equal, and half the traffic a link is better.
    modes = ("bidirectional", "unidirectional") if chip.torus else ("unidirectional",)
    times = {
        mode: ring_time(chip, make_plan(ring.size, mode), flops, block_bytes) for mode in modes
    }
    best = min(times, key=times.__getitem__)
    return (
        best if times[best] < MARGIN * naive_time(chip, ring.size, flops, block_bytes) else "naive"
    )


def naive_time(chip: Chip, size: int, flops: float, block_bytes: int) -> float:
    """Seconds for one collective and then one matmul."""
    ways = 2 if chip.torus else 1
    return flops / chip.flops + (size - 1) / ways * (block_bytes / chip.link + chip.latency)


def ring_time(chip: Chip, plan: Plan, flops: float, block_bytes: int) -> float:
    """Seconds for the steps of `plan`, each as long as its matmuls or its transfers."""
    lanes = len(plan.directions)
    pieces = 1 + plan.hops * lanes + plan.halves
    piece = flops / chip.flops / pieces + PIECE_OVERHEAD
    hop = block_bytes / chip.link + chip.latency
    # Work of each step: this device's own block, then what each hop brought, then the two halves.
    work = [piece, *[lanes * piece] * plan.hops, *[piece] * plan.halves]
    # Transfers under way during each: the last step has none left to cover.
    transfers = [*[hop] * plan.hops, *[hop / 2] * plan.halves, 0.0]
    return sum(max(w, t) for w, t in zip(work, transfers, strict=True))
