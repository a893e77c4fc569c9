"""What `auto` means: every choice of a way over a ring, and all that it may depend on.

A `Problem` says what is to be done; `choose_ways` returns the ways over the ring of both passes,
those that are named or those of `auto`. The rules of `auto` are the functions of `RULES`, one for
each kind of work, and can be replaced here without touching anything else.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from jaxpar.arguments.types import Dispatch, Mode
from jaxpar.axis.axis import CHUNKED, Ring
from jaxpar.choose.cost_model import (
    KEPT_JOINED,
    KEPT_TOGETHER,
    kept_pieces,
    row_chunks_time,
    time_of,
)
from jaxpar.ring.costs import hop_time, joins
from jaxpar.ring.flow import Flow
from jaxpar.choose.problem import Kind, Problem
from jaxpar.choose.sites import ROW_CHUNKS, settled, settled_chunks, settled_dispatch
from jaxpar.compiler.options import traced_asynchronous
from jaxpar.mesh.chips import Chip, traced_chip, traced_for_cpu
from jaxpar.ring.in_turns import InTurns
from jaxpar.ring.order import traced_order
from jaxpar.ring.ways import InChunks, Naive, Stationary, Way

# Another way than a collective must win by more than the model can be trusted for.
MARGIN = 0.96

# The compiler of GPUs joins the sums of more than two chunks again, and of two that have fewer
# bytes than this together.
JOINED = 2**28

Ways = tuple[Way, Way]  # of the forward and of the backward pass


def choose_way(problem: Problem) -> Way:
    """Returns the way of the ring's mode, of `auto` that which is predicted to be the fastest."""
    return choose_ways(problem)[0]


def choose_ways(problem: Problem) -> tuple[Way, Way]:
    """Returns the ways of the forward and of the backward pass."""
    return _ways(settled(problem))


def _ways(problem: Problem) -> Ways:
    forward, backward = problem.ring.mode, problem.ring.backward or problem.ring.mode
    if problem.told is None and {forward, backward} & CHUNKED.keys():
        traced_asynchronous()  # warns where nothing says so, and each chunk may be waited for
    if "auto" not in (forward, backward):
        return (
            way_of(problem, forward, problem.forward),
            way_of(problem, backward, problem.backward),
        )
    first, second = RULES[problem.kind](problem)
    return (
        first if forward == "auto" else way_of(problem, forward, problem.forward),
        second if backward == "auto" else way_of(problem, backward, problem.backward),
    )


def way_of(problem: Problem, mode: Mode, flows: tuple[Flow, ...] = ()) -> Way:
    """Returns the way of a mode that is named, for the flows of a pass."""
    if mode == "naive":
        return Naive(problem.ring)
    if mode == "stationary":
        return Stationary(problem.ring)
    if mode in CHUNKED:
        return InChunks(problem.ring, CHUNKED[mode])
    if problem.near is not None and mode != "multi-ring":
        directions, reach = problem.near
        return InTurns(problem.ring, directions, traced_order(), reach=reach)
    rings = problem.ring.disjoint() if mode == "multi-ring" else None
    one_way = mode == "unidirectional" or (rings and rings[0].crosses_a_cube)
    directions = (1,) if one_way else (1, -1)
    covered = _opposite_is_covered(problem, flows)
    way = InTurns(problem.ring, directions, traced_order(), covered, rings)
    return way if mode != "multi-ring" else with_phases(problem, way, flows)


def with_phases(problem: Problem, way: InTurns, flows: tuple[Flow, ...]) -> InTurns:
    """Returns a way of disjoint rings with what blocks and sums had better go by.

    Along one dimension after the other pieces are larger by the side of the torus; but less of
    the transfers is beside work.
    """
    chip, sides = problem.chip, tuple(ring.size for ring in problem.ring.stages())
    if chip is None or len(sides) < 2 or min(sides) < 3 or len(set(sides)) > 1:
        return way
    messages = problem.messages[True]

    def seconds(flows: list[Flow], way: InTurns) -> float:
        # Turns need permutes alone: a mode that is named does not ask for compiler options.
        return time_of(chip, flows, way, frozenset(), messages=messages)

    scattered = [flow for flow in flows if flow.kind != "gather"]
    gathered = [flow for flow in flows if flow.kind == "gather"]
    sums, blocks = replace(way, sums_along=sides), replace(way, blocks_along=sides)
    if seconds(scattered, sums) < seconds(scattered, way):
        way = sums
    # Of blocks the model is less sure: copies between dimensions are laid out as a compiler likes.
    if seconds(gathered, blocks) < MARGIN * seconds(gathered, way):
        way = replace(way, blocks_along=sides)
    return way


def choose_stages(problem: Problem) -> tuple[Way, ...]:
    """Returns the ways of weights over a ring of several axes, one after the other.

    A collective takes all axes at once, and so do disjoint rings; in turns, blocks of the last
    axis, which are neighbours, go round before those of the others. Axes of one device have no
    stage.
    """
    problem = settled(problem)
    rings = problem.ring.stages()
    if not rings:
        return ()
    if problem.ring.mode == "multi-ring":
        return (_ways(problem)[0],)
    longest = max(rings, key=lambda ring: ring.size)
    if isinstance(_ways(replace(problem, ring=longest))[0], Naive):
        return (_ways(problem)[0],)
    return tuple(_ways(replace(problem, ring=ring))[0] for ring in rings)


def by_time(problem: Problem) -> Ways:
    """The rule of work beside which something travels: whatever is predicted to be the fastest.

    Naive it is on a chip that is not in the table, on CPU devices (which share cores, so that a
    transfer takes the time of a matmul instead of hiding behind it), and on one device. Rings are
    left out on 2 devices, which have at most one transfer, beyond one switch, where each hop that
    leaves a host waits for one port, and where the compiler makes permutes synchronous; chunks
    where it makes collectives so.
    """
    chip, ring = problem.chip, problem.ring
    naive = Naive(ring)
    if chip is None or ring.size == 1:
        return naive, naive
    beyond = chip.switched is not None and ring.size > chip.switched
    rings = ring.size > 2 and not beyond and not _synchronous(problem)
    # Of ways that take the same, the one that comes first; both ways round half goes over a link.
    chunked: list[Mode] = ["chunked-2", "chunked-4", "chunked-8"]
    turned: list[Mode] = ["bidirectional", "unidirectional"]
    stays: list[Mode] = ["stationary"] if _may_stay(problem) else []
    modes: list[Mode] = ["naive", *stays]
    # Blocks of attention are used one by one: a chunk of each of them is of no use.
    chunks = problem.kind != "attention" and problem.beside
    modes += (chunked if chip.torus else chunked[:1]) if chunks else []
    modes += turned[0 if chip.torus else 1 :] if rings else []
    # One ring hides behind attention, whose matmuls are far from peak; shares of blocks only cost.
    if rings and problem.spans_a_torus and problem.kind != "attention":
        modes.append("multi-ring")

    def ways(flows: tuple[Flow, ...], named: Mode = "auto") -> list[Way]:
        if named != "auto":
            return [way_of(problem, named, flows)]
        found = [way_of(problem, mode, flows) for mode in modes]
        # What a GPU's compiler would join again, or have wait for what it multiplies before.
        sent = sum(flow.block_bytes * ring.size for flow in flows if flow.kind == "scatter")
        waits = any(f.kind == "all-reduce" or (f.kind == "gather" and f.sums) for f in flows)
        joined = not chip.torus and (0 < sent < JOINED or waits)
        # Across a cube, thirds that are not rows take more passes over memory than predicted.
        rows = not any(f.sums or f.minor for f in flows)
        kinds = {f.kind for f in flows}
        cube = rows and kinds in ({"gather"}, {"scatter"})
        return [
            way
            for way in found
            if not (joined and way.chunks > 1) and (cube or not way.crosses_a_cube)
        ]

    def seconds(flows: tuple[Flow, ...], way: Way, kept: int = 0) -> float:
        time = time_of(
            chip,
            flows,
            way,
            problem.beside,
            kept=kept,
            devices=problem.devices,
            messages=problem.messages[way.mode == "multi-ring"],
        )
        # Of rings that take the same but for rounding, the one that sends half over a link; and of
        # those that nearly do, the one ring, whose pieces are larger.
        alike = {"unidirectional": 1 + 1e-9, "multi-ring": 1.05}.get(way.mode, 1.0)
        return time if way == naive else time / MARGIN * alike

    if not problem.backward:
        best = min(ways(problem.forward), key=lambda way: seconds(problem.forward, way))
        return best, best

    def both(pair: Ways) -> float:
        first, second = pair
        # A forward pass by collectives keeps what it gathers for a backward pass that is alike.
        by_jax = problem.keeps_by_jax and first == second and first.derived_by_jax
        gathered = problem.forward[0].kind == "gather"
        keeps = gathered and (by_jax or (problem.keeps and first.keeps))
        kept = kept_pieces(problem.backward[-1], first, second) if keeps else 0
        return seconds(problem.forward, first) + seconds(problem.backward, second, kept)

    # What is named for one of the passes is what the other one goes with.
    forward = ways(problem.forward, ring.mode)
    backward = ways(problem.backward, ring.backward or ring.mode)
    return min(product(forward, backward), key=both)


def by_reach(problem: Problem) -> Ways:
    """The rule of attention: only blocks of near devices, if a window needs no others.

    They are fewer bytes than a collective brings. Otherwise the way with the shortest prediction.
    """
    if problem.near is None:
        return by_time(problem)
    way = way_of(problem, "unidirectional")
    return way, way


def in_a_layer(problem: Problem) -> Ways:
    """The rule of a layer's matmuls: at once, but for sums in chunks of another label.

    Where the compiler makes collectives asynchronous, what is before and behind a matmul hides them
    as well as its own pieces would. And pieces cost copies to and from the layouts of their
    neighbours, on every TPU: two layers of Llama 3 8B by `by_time` took 6% longer on v6e, four of
    them 5% longer on v4 and v5e, where a collective is waited for. Sums that are scattered may go
    in chunks of another label than the sequence's, which cost next to nothing (1% less time on
    v6e); not on GPUs, whose compiler joins the chunks' collectives again.
    """
    naive, chip = Naive(problem.ring), problem.chip
    # Two chunks are predicted to be as fast where four are, but leave more of the sums exposed.
    chunked = InChunks(problem.ring, 4)
    cut_across = all(
        flow.kind == "scatter" and flow.in_chunks(chunked.chunks).along != flow.along
        for flow in problem.forward
    )
    if chip is None or not chip.torus or not cut_across or not _asynchronous(problem):
        return naive, naive
    ways = naive, chunked
    return min(ways, key=lambda way: time_of(chip, problem.forward, way, problem.beside)), naive


def by_links(problem: Problem) -> Ways:
    """The rule of a ring collective by itself: the ring that uses the chip's links best.

    On a torus both directions have links of their own. Behind a switch permutes are slower than
    one collective.
    """
    mode: Mode = "multi-ring" if problem.spans_a_torus else "bidirectional"
    if problem.chip is None or not problem.chip.torus:
        mode = "naive" if problem.chip else "unidirectional"
    way = way_of(problem, mode)
    return way, way


def naively(problem: Problem) -> Ways:
    """The rule of what has nothing to hide behind."""
    return Naive(problem.ring), Naive(problem.ring)


RULES: dict[Kind, Callable[[Problem], Ways]] = {
    "matmul": by_time,
    "projection": in_a_layer,
    "attention": by_reach,
    "collective": by_links,
    "weights": naively,
    "loss": naively,
    "experts": naively,
}


def joining_is_cheaper(length: int) -> bool:
    """Whether two blocks of `length` are better joined along it, contracted, than added."""
    chip = traced_chip()
    return chip is not None and joins(chip, length)


def may_keep(ring: Ring) -> bool:
    """Whether a matmul may keep what it gathered for a derivative of its own, whatever its ways.

    `auto` on a TPU alone: a GPU adds sums in passes of their own, and gathers again beside other
    work (8192x8192x28672 over 8 H100: 1510 us, 1770 by what was kept).
    """
    if ring.keep_gathered is not None:
        return ring.keep_gathered
    chip = traced_chip()
    return ring.mode == "auto" and chip is not None and chip.torus


def joins_kept(lengths: Sequence[int]) -> bool:
    """Whether blocks that were kept, of these lengths, are better joined with one more."""
    chip = traced_chip()
    few = len(lengths) < KEPT_TOGETHER and sum(lengths) <= KEPT_JOINED
    return chip is not None and chip.torus and few


def choose_dispatch(problem: Problem) -> Dispatch:
    """Returns how tokens get to experts: all to all devices where that costs no more.

    It is so where nearly every token needs nearly every device. Around a ring of links, which an
    axis is on slices of two dimensions, a row goes n/4 places to each device that it needs, and
    one way or the other past all of them in n - 1. Behind a switch a row leaves once for each
    device, and copies for a ragged exchange cost their passes over memory.
    """
    if tuned := settled_dispatch(problem):
        return tuned
    needed, n, chip = problem.needed, problem.ring.size, problem.chip
    if chip is not None and not chip.torus:
        return _dispatch_behind_a_switch(problem, chip)
    around = chip is not None and chip.dimensions == 2 and needed * n / 4 > n - 1
    return "all_gather" if around or needed > 0.9 * n else "ragged"


def _dispatch_behind_a_switch(problem: Problem, chip: Chip) -> Dispatch:
    """The dispatch that is faster by seconds a token and byte of a row, there and back."""
    needed, n = problem.needed, problem.ring.size
    link = chip.link if chip.switched is None or n <= chip.switched else chip.network
    copies = min([n, *(shape[1] for shape in problem.shapes[1:])])  # as many as there can be
    # Copies are written and read, rows read and sums written; what arrives is masked on one of two
    # ways.
    ragged = 2 * needed * (n - 1) / n / link + (2 * copies + 2 + needed) / chip.hbm
    return "ragged" if ragged < 2 * (n - 1) / link else "all_gather"


def applies_experts_in_stages(chunks: int) -> bool:
    """Whether each of two exchanges gets half of the experts' work to hide behind.

    A TPU has one ragged all-to-all under way at a time, so that each needs work of its own.
    """
    chip = traced_chip()
    return chunks > 1 and chip is not None and chip.torus


def applies_experts_in_slots(average: float) -> bool:
    """Whether experts that have `average` rows each are applied to a static number of rows at once.

    A TPU has a kernel for groups of any size; what is in no table may have one too. Slots read the
    weights of experts that have no rows, which most have where the average is below one.
    """
    chip = traced_chip()
    without_kernel = traced_for_cpu() if chip is None else not chip.torus
    return without_kernel and average >= 1


def gathers_apart() -> bool:
    """Whether rows that are summed are better gathered by an instruction of their own.

    A TPU gathers rows by itself; elsewhere a gather is part of the loop that adds.
    """
    chip = traced_chip()
    return not traced_for_cpu() if chip is None else chip.torus


def choose_row_chunks(problem: Problem) -> int:
    """Returns in how many chunks the rows of a block of layers had better go through all of it.

    The block gathers rows, multiplies, and scatters sums, which are two flows; a chunk of the rows
    needs no other. So all collectives but those of the first and of the last chunk are beside
    matmuls, forward and backward, and nothing is placed: but each chunk reads all weights.
    """
    chip, ring = problem.chip, problem.ring
    named = ring.mode != "auto" or ring.backward not in (None, "auto")
    if not named and (tuned := settled_chunks(problem)):
        return tuned
    if named or chip is None or not chip.torus or ring.size == 1 or not _asynchronous(problem):
        return 1

    def seconds(chunks: int) -> float:
        return row_chunks_time(chip, problem.forward, ring.size, chunks)

    return min(ROW_CHUNKS, key=seconds)


def _asynchronous(problem: Problem) -> bool:
    """Whether the compiler runs what gathers and scatters beside other work."""
    return {"all-gather", "reduce-scatter"} <= problem.beside


def _synchronous(problem: Problem) -> bool:
    """Whether the compiler makes permutes synchronous there, so that a ring can only lose.

    Tracing does not see where devices are. A slice of eight times the dimension has it; a ring of
    all of it closes over its wrap-around links, and so does a shorter one with gaps. What is longer
    turns corners, and what is shorter has links of its own.
    """
    chip, size = problem.chip, problem.ring.size
    around = None if chip is None else chip.synchronous_around
    if around is None or problem.devices < 8 * around:
        return False
    return size == around or (size < around and not problem.innermost)


def _may_stay(problem: Problem) -> bool:
    """Whether a matmul gathers an operand in the place of which others can travel."""
    return any(flow.partners + flow.exchanged for flow in problem.forward)


def _opposite_is_covered(problem: Problem, flows: tuple[Flow, ...]) -> bool:
    """Whether the last block of an even ring had better come whole, not in halves."""
    chip = problem.chip
    if problem.kind == "weights":  # cutting costs two passes over memory, and nothing is beside
        return True
    flows = flows or problem.forward
    # Halves of 8 bits save half of the time on the wire, and cutting them takes what wide ones do.
    if any(flow.quantized and flow.kind == "gather" for flow in flows):
        return True
    if chip is None or not all(flow.flops for flow in flows) or not flows:
        return False
    # The work of one turn both ways, two blocks, covers a transfer of a whole block.
    return all(
        2 * flow.flops / problem.ring.size / chip.flops >= hop_time(chip, flow.block_bytes)
        for flow in flows
    )
