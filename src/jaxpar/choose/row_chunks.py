"""Chooses the number of chunks in which rows go through a block of layers."""

from jaxpar.choose.choice import is_asynchronous
from jaxpar.choose.problem import Problem
from jaxpar.choose.sites import ROW_CHUNKS, notes, settled_chunks
from jaxpar.platforms.chips import fitted_to
from jaxpar.ring.seconds import collective_time, work_time


def choose_row_chunks(problem: Problem) -> int:
    """Returns the number of chunks in which rows should go through a block of layers."""
    # Collectives of inner chunks overlap with matmuls, but each chunk reads all weights.
    chip, ring = problem.chip, problem.ring
    named = ring.mode != "auto" or ring.backward not in (None, "auto")
    out = "its algorithms are named" if named else _not_in_chunks(problem)

    def seconds(chunks: int) -> float:
        return row_chunks_time(problem, chunks)

    tuned = None if named else settled_chunks(problem)
    taken = tuned or (1 if out else min(ROW_CHUNKS, key=seconds))
    if notes.value is not None:
        from jaxpar.choose.record import WayRow

        known = chip is not None and bool(problem.forward)
        rows = [
            WayRow(str(n), seconds(n) if known else None, out if n > 1 else "") for n in ROW_CHUNKS
        ]
        notes.value.part(problem, "row chunks", rows, str(taken), bool(tuned))
    return taken


def _not_in_chunks(problem: Problem) -> str:
    chip = problem.chip
    if problem.ring.size == 1:
        return "one device"
    if chip is None:
        return "the chip is not in the table"
    if not chip.torus:
        return "the compiler joins the collectives of chunks again"
    return "" if is_asynchronous(problem) else "the compiler overlaps no collective with other work"


def row_chunks_time(problem: Problem, chunks: int) -> float:
    chip, flows, size = problem.figures, problem.forward, problem.ring.size
    shared = problem.messages("collective")
    work = sum((work_time(chip, flow, chunks, 0.0) for flow in flows), 0.0)
    sent = sum((collective_time(chip, flow, size, shared) for flow in flows), 0.0)
    beside = sent * (chunks - 1) / chunks
    # In the backward pass, each chunk adds gradients of all weights: a third of three passes.
    passes = fitted_to(chip.kind).chunk_passes
    added = (chunks - 1) * sum(flow.whole for flow in flows) / chip.hbm * passes
    starts = (chunks - 1) * len(flows) * chip.start
    return sent - beside + max(work, beside) + added + starts
