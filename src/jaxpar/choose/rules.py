"""The rules of `auto`: for each kind of work, why a mode may not be taken.

A rule is given a problem, a mode and the flows of one pass. It returns why the mode is out, in
words for a user, or nothing: then the mode is in the table, and the fastest of those is taken.
"""

from collections.abc import Callable

from jaxpar.arguments.types import Mode
from jaxpar.axis.axis import CHUNKED
from jaxpar.choose.problem import Kind, Problem
from jaxpar.ring.flow import Flow

# The compiler of GPUs joins the sums of more than two chunks again, and of two that have fewer
# bytes than this together.
JOINED = 2**28

Flows = tuple[Flow, ...]
Rule = Callable[[Problem, Mode, Flows], str]


def beside_a_matmul(problem: Problem, mode: Mode, flows: Flows) -> str:
    """The rule of work beside which something travels."""
    chip, size = problem.chip, problem.ring.size
    if mode == "naive":
        return ""
    if size == 1:
        return "one device"
    if chip is None:
        return "nothing is known of the chip"
    if mode == "stationary":
        return "" if _may_stay(problem) else "no other operand can travel"
    if mode in CHUNKED:
        return _not_in_chunks(problem, CHUNKED[mode], flows)
    return _not_in_turns(problem) or (
        _not_by_disjoint_rings(problem, flows)
        if mode == "multi-ring"
        else "both directions leave by one port"
        if mode == "bidirectional" and not chip.torus
        else ""
    )


def of_attention(problem: Problem, mode: Mode, flows: Flows) -> str:
    """The rule of attention: only blocks of near devices, if a window needs no others.

    They are fewer bytes than a collective brings.
    """
    if problem.near is None:
        return beside_a_matmul(problem, mode, flows)
    return "" if mode == "unidirectional" else "the blocks of near devices are fewer bytes"


def in_a_layer(problem: Problem, mode: Mode, flows: Flows) -> str:
    """The rule of a layer's matmuls: at once, but for sums in chunks of another label.

    Where the compiler makes collectives asynchronous, what is before and behind a matmul hides them
    as well as its own pieces would. And pieces cost copies to and from the layouts of their
    neighbours, on every TPU: two layers of Llama 3 8B by `beside_a_matmul` took 6% longer on v6e,
    four of them 5% longer on v4 and v5e, where a collective is waited for. Sums that are scattered
    may go in chunks of another label than the sequence's, which cost next to nothing (1% less time
    on v6e); not on GPUs, whose compiler joins the chunks' collectives again.
    """
    if mode == "naive":
        return ""
    # Two chunks are predicted to be as fast where four are, but leave more of the sums exposed.
    scatters = bool(flows) and all(flow.kind == "scatter" for flow in flows)
    chip = problem.chip
    if mode != "chunked-4" or not scatters or chip is None or not chip.torus:
        return "a layer's other matmuls hide its collectives"
    if not is_asynchronous(problem):
        return "the compiler runs no collective beside other work"
    across = all(flow.in_chunks(CHUNKED[mode]).along != flow.along for flow in flows)
    return "" if across else "chunks of rows are placed apart"


def by_links(problem: Problem, mode: Mode, flows: Flows) -> str:
    """The rule of a ring collective by itself: the ring that uses the chip's links best.

    On a torus both directions have links of their own. Behind a switch permutes are slower than
    one collective.
    """
    chip = problem.chip
    best: Mode = "multi-ring" if problem.spans_a_torus else "bidirectional"
    if chip is None or not chip.torus:
        best = "naive" if chip else "unidirectional"
    return "" if mode == best else f"{best} uses the links best"


def naively(problem: Problem, mode: Mode, flows: Flows) -> str:
    """The rule of what has nothing to hide behind."""
    return "" if mode == "naive" else "it has no work of its own to hide behind"


RULES: dict[Kind, Rule] = {
    "matmul": beside_a_matmul,
    "projection": in_a_layer,
    "attention": of_attention,
    "collective": by_links,
    "weights": naively,
    "loss": naively,
    "experts": naively,
}


def is_asynchronous(problem: Problem) -> bool:
    """Whether the compiler runs what gathers and scatters beside other work."""
    return {"all-gather", "reduce-scatter"} <= problem.beside


def _may_stay(problem: Problem) -> bool:
    """Whether a matmul gathers an operand in the place of which others can travel."""
    return any(flow.partners + flow.exchanged for flow in problem.forward)


def _not_in_chunks(problem: Problem, chunks: int, flows: Flows) -> str:
    if problem.kind == "attention":
        return "blocks are used one by one"
    if not problem.beside:
        return "the compiler runs no collective beside other work"
    if problem.figures.torus:
        return ""
    if chunks > 2:
        return "the compiler joins more than two chunks again"
    sent = sum(flow.block_bytes * problem.ring.size for flow in flows if flow.kind == "scatter")
    if 0 < sent < JOINED:
        return f"the compiler joins sums of less than {JOINED >> 20} MiB again"
    # A gather that adds has each chunk wait for what is multiplied before.
    waits = any(f.kind == "all-reduce" or (f.kind == "gather" and f.sums) for f in flows)
    return "each chunk would wait for the one before" if waits else ""


def _not_in_turns(problem: Problem) -> str:
    """Why no ring can win."""
    chip, size = problem.figures, problem.ring.size
    if size == 2:
        return "two devices have one transfer, and nothing that hides it"
    if chip.switched is not None and size > chip.switched:
        return f"beyond one switch, of {chip.switched} devices, all hops wait for one port"
    if _is_synchronous(problem):
        return f"the compiler makes permutes synchronous on dimensions of {chip.synchronous_around}"
    return ""


def _not_by_disjoint_rings(problem: Problem, flows: Flows) -> str:
    if not problem.spans_a_torus:
        return "its axes are not known to have the links of more than one ring"
    # One ring hides behind attention, whose matmuls are far from peak; shares of blocks only cost.
    if problem.kind == "attention":
        return "one ring hides"
    # Across a cube, thirds that are not rows take more passes over memory than predicted.
    rows = not any(flow.sums or flow.minor for flow in flows)
    if (rows and {flow.kind for flow in flows} in ({"gather"}, {"scatter"})) or (
        not problem.ring.disjoint()[0].crosses_a_cube
    ):
        return ""
    return "across a cube thirds of what is not rows cost more than they save"


def _is_synchronous(problem: Problem) -> bool:
    """Whether the compiler makes permutes synchronous there, so that a ring can only lose.

    Tracing does not see where devices are. A slice of eight times the dimension has it; a ring of
    all of it closes over its wrap-around links, and so does a shorter one with gaps. What is longer
    turns corners, and what is shorter has links of its own.
    """
    around, size = problem.figures.synchronous_around, problem.ring.size
    if around is None or problem.devices < 8 * around:
        return False
    return size == around or (size < around and not problem.innermost)
