"""The choice of plan: a roofline over static shapes, the ring's size and the chip."""

import jax

from jaxpar._chips import Chip, traced_chip
from jaxpar.collectives._plan import Plan, make_plan
from jaxpar.collectives._ring import Ring

# What a matmul costs beyond its FLOPs when it is cut into one more piece, in seconds. A ring must
# win by more than the model can be trusted for.
PIECE_OVERHEAD = 2e-6
MARGIN = 0.95


def choose_plan(ring: Ring, mode: str, flops: float, block_bytes: int) -> Plan | None:
    """Returns the plan of a mode, None for naive.

    Args:
      ring: the ring; for `auto`, on 1 or 2 devices there is at most one transfer, and naive wins.
      mode: one of `jaxpar.Mode`. `auto` is the one that a roofline predicts to be the fastest.
      flops: of the whole local matmul, over all steps.
      block_bytes: what one device sends in one step.

    The model: `naive` is the collective at the speed of the links (both directions on a torus),
    then the matmul at peak. A ring's step takes the longer of its matmuls at peak and its transfers
    at one hop of latency plus bytes over one link, and a fixed overhead for each piece. On a chip
    that is not in the table, on CPU devices (which share cores, so that a transfer takes the time
    of a matmul instead of hiding behind it), beyond one switch and where the compiler makes
    permutes synchronous, `auto` is naive.
    """
    if mode == "naive":
        return None
    chip = traced_chip()
    if mode != "auto":
        return _plan(chip, ring.size, mode, flops, block_bytes)
    devices = jax.sharding.get_abstract_mesh().size
    if chip is None or ring.size <= 2:
        return None
    if chip.synchronous_from is not None and devices >= chip.synchronous_from:
        return None
    if chip.switched is not None and ring.size > chip.switched:
        return None  # each hop that leaves a host waits for one port, a collective uses all of them
    # Where every transfer is covered the times are equal, and half the traffic a link is better.
    modes = ("bidirectional", "unidirectional") if chip.torus else ("unidirectional",)
    plans = [_plan(chip, ring.size, mode, flops, block_bytes) for mode in modes]
    times = [ring_time(chip, plan, flops, block_bytes) for plan in plans]
    best = min(times)
    wins = best < MARGIN * naive_time(chip, ring.size, flops, block_bytes)
    return plans[times.index(best)] if wins else None


def _plan(chip: Chip | None, size: int, mode: str, flops: float, block_bytes: int) -> Plan:
    # The matmuls of one step both ways, two blocks, cover a transfer of a whole block.
    covered = chip is not None and 2 * flops / size / chip.flops >= block_bytes / chip.link
    return make_plan(size, mode, whole_opposite=covered)


def sums_cost_more_than_joining(length: int) -> bool:
    """Whether adding to a float32 sum costs a matmul over `length` more than it can hide.

    A sum of M x N is read and written, 8 M N bytes, while 2 M N `length` FLOPs run. Beyond half of
    their time, two arrivals are better joined and multiplied as one, where a compiler joins for
    nothing, within the matmul (TPU).
    """
    chip = traced_chip()
    return chip is not None and chip.torus and 8 * chip.flops / chip.hbm > length


def naive_time(chip: Chip, size: int, flops: float, block_bytes: int) -> float:
    """Seconds for one collective and then one matmul."""
    ways = 2 if chip.torus else 1
    return flops / chip.flops + (size - 1) / ways * (block_bytes / chip.link + chip.latency)


def ring_time(chip: Chip, plan: Plan, flops: float, block_bytes: int) -> float:
    """Seconds for the steps of `plan`, each as long as its matmuls or its transfers."""
    lanes = len(plan.directions)
    last = plan.opposite != "none"
    pieces = 1 + plan.hops * lanes + last
    piece = flops / chip.flops / pieces + PIECE_OVERHEAD
    hop = block_bytes / chip.link + chip.latency
    # Work of each step: this device's own block, then what each hop brought, then what is left.
    work = [piece, *[lanes * piece] * plan.hops, *[piece] * last]
    # Transfers under way during each: the last step has none left to cover.
    final = hop / 2 if plan.opposite == "halves" else hop
    transfers = [*[hop] * plan.hops, *[final] * last, 0.0]
    return sum(max(pair) for pair in zip(work, transfers, strict=True))
