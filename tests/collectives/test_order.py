"""Every trick of every platform's order: what its compiler makes of a program with it and without.

A test that fails because a program is as good without a trick says that the trick can go.
"""

from dataclasses import dataclass
from itertools import count
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

from jaxpar import make_mesh
from jaxpar.ring.order import (
    ClusterOrder,
    CpuOrder,
    Order,
    TpuOrder,
    order_of,
    written_after,
)
from jaxpar.schedule import compile_for, target, timeline
from jaxpar.tools.cli.ops import OPS
from jaxpar.tools.program.hlo import parse

V5P = order_of("TPU v5")


@pytest.fixture
def compiled(monkeypatch):
    """Compiles a matmul of bfloat16 as an order has it."""

    def compile_as(order, name, op, m, k, n, *, mode="bidirectional", gradients=False):
        for module in ("of_mode", "order"):
            monkeypatch.setattr(f"jaxpar.ring.{module}.traced_order", lambda: order)
        jax.clear_caches()
        described = target(name)
        shapes = ((m, k), (k, n), (m, n))
        args = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(described.mesh, spec))
            for shape, spec in zip(shapes, OPS[op].specs(("tp",)), strict=True)
        ]
        function = OPS[op].bind(described.mesh, ("tp",), mode, wire_dtype=jnp.bfloat16)
        if gradients:  # of a cotangent that is there before the result, as in no model

            def mixed(lhs, rhs, cotangent):
                out, pull_back = jax.vjp(function, lhs, rhs)
                return (out, *pull_back(cotangent))

            return compile_for(mixed, described, *args, compiler_options={})
        return compile_for(function, described, *args[:2], compiler_options={})

    return compile_as


def bare(played):
    """The transfers that nothing is computed beside."""
    return [transfer.name for transfer in played.transfers if not transfer.covers]


@pytest.fixture
def barriers(monkeypatch):
    """Takes all barriers away when called."""

    def remove():
        monkeypatch.setattr(lax, "optimization_barrier", lambda tree: tree)

    return remove


@pytest.mark.parametrize("op", ["gather-lhs-rows", "scatter-rows"])
def test_a_gpu_merges_matmuls_without_a_barrier(op, compiled, barriers):
    case = (Order(), "h100:8", op, 2048, 2048, 2048)
    ordered = timeline(compiled(*case, mode="unidirectional"))
    barriers()
    free = timeline(compiled(*case, mode="unidirectional"))
    assert sum(event.is_matmul for event in ordered.events) == 8
    assert not any(transfer.synchronous for transfer in ordered.transfers)
    assert sum(event.is_matmul for event in free.events) < 8
    assert all(transfer.synchronous for transfer in free.transfers)


def test_a_tpu_starts_all_transfers_first_without_a_barrier(compiled, barriers):
    case = (V5P, "v5p:2x2x2", "gather-lhs-rows", 4096, 4096, 4096)
    ordered = timeline(compiled(*case))
    barriers()
    free = timeline(compiled(*case))
    assert not bare(ordered)
    assert len(bare(free)) > len(free.transfers) / 2


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the TPU compiler never does there")
def test_what_is_placed_is_written_by_its_matmul(compiled):
    played = timeline(compiled(V5P, "v5p:2x2x2", "gather-lhs-rows", 4096, 4096, 4096))
    passes = [
        event.name
        for event in played.events
        if event.kind == "compute" and not event.is_matmul and event.seconds > 1e-6
    ]
    assert len(passes) <= 3, passes  # the opposite block: cut in halves twice, and joined


@dataclass(frozen=True)
class CutsFirst(TpuOrder):
    def for_sums(self, flops):
        return self


def test_sums_in_two_pieces_are_added_while_others_travel(compiled):
    class OnePiece(CutsFirst):
        pieces = 1

    shape = (4096, 4096, 4096)
    two, one = (
        timeline(compiled(order, "v5p:2x2x2", "scatter-rows", *shape))
        for order in (of(V5P.delays_transfers, V5P.cuts_first) for of in (CutsFirst, OnePiece))
    )
    assert two.exposed < 0.9 * one.exposed
    assert two.total < 0.85 * one.total


@dataclass(frozen=True)
class WithoutConditional(TpuOrder):
    def beside(self, index, leaving, send, work):
        return super().beside(index, leaving, send, work._replace(like=None))


@pytest.mark.parametrize(("op", "share"), [("scatter-rows", 0.97), ("gather-rhs-k", 0.75)])
def test_a_conditional_adds_in_the_epilogue_of_the_matmul(op, share, compiled):
    shape = (4096, 4096, 4096)
    as_one, apart = (
        timeline(compiled(order, "v5p:2x2x2", op, *shape))
        for order in (V5P, WithoutConditional(V5P.delays_transfers, V5P.cuts_first))
    )
    assert as_one.compute < share * apart.compute
    assert as_one.total < 0.97 * apart.total


def test_a_conditional_has_transfers_start_before_the_turn(compiled):
    shape = (16384, 2048, 16384)
    late = TpuOrder(delays_transfers=False)
    as_one, apart = (
        timeline(compiled(order, "v5p:2x2x2", "gather-lhs-rows", *shape)) for order in (V5P, late)
    )
    assert V5P.delays_transfers
    assert as_one.exposed < 0.5 * apart.exposed
    assert as_one.total < 0.95 * apart.total


def test_an_operand_is_cut_before_its_matmul(compiled):
    shape = (8192, 28672, 8192)
    within = TpuOrder(delays_transfers=True, cuts_first=False)
    first, inside = (
        timeline(compiled(order, "v5p:2x2x2", "scatter-rows", *shape)) for order in (V5P, within)
    )
    assert V5P.for_sums(2.0 * prod(shape) / 8 / 16).cuts_first
    assert first.compute < inside.compute
    assert first.total < inside.total


def test_sums_of_one_size_are_not_late(compiled, monkeypatch):
    case = (V5P, "v5p:2x2x2", "scatter-rows", 4104, 4096, 4096)  # 513 rows
    alike = timeline(compiled(*case))
    monkeypatch.setattr("jaxpar.ring.stepwise.equal_pieces", lambda *_: [(0, 257), (257, 256)])
    uneven = timeline(compiled(*case))
    assert alike.total < 0.95 * uneven.total


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="cut first, it is faster there")
def test_the_operand_of_a_short_matmul_is_cut_within(compiled):
    inside, first = (
        timeline(compiled(order, "v5p:2x2x2", "scatter-rows", 2048, 14336, 4096)).total
        for order in (V5P, CutsFirst(V5P.delays_transfers, V5P.cuts_first))
    )
    assert inside < 0.98 * first  # with libtpu 0.0.50.1 it is 0.970


def test_the_backward_pass_stays_behind_the_forward_pass(compiled):
    class Mixed(TpuOrder):
        def forward_first(self, out, residuals):
            return out, residuals

    def overlap(played):
        """How long the first transfer backward starts before the last one forward ends."""
        backward, forward = [], []
        for transfer in played.transfers:
            (backward if "transpose" in transfer.op else forward).append(transfer)
        return max(t.start + t.seconds for t in forward) - min(t.start for t in backward)

    shape = (2048, 2048, 2048)
    behind, mixed = (
        compiled(order, "v5p:2x2x1", "scatter-rows", *shape, gradients=True)
        for order in (TpuOrder(), Mixed())
    )
    # With jax 0.10.0 the cotangent, which waits for nothing, leaves while the last sum arrives.
    early = 1.5 * behind.target.chip.latency if jax.__version_info__ < (0, 10, 2) else 0
    assert overlap(timeline(behind)) < early < overlap(timeline(mixed))
    assert behind.memory.temporaries < 0.8 * mixed.memory.temporaries


@pytest.fixture
def on_cpu(monkeypatch):
    """Compiles a matmul of float32, one way round, for CPU devices."""

    def compile_as(order, op, n, size):
        for module in ("of_mode", "order"):
            monkeypatch.setattr(f"jaxpar.ring.{module}.traced_order", lambda: order)
        jax.clear_caches()
        mesh = make_mesh({"tp": n}, devices=jax.devices()[:n])
        args = [
            jax.ShapeDtypeStruct((size, size), np.float32, sharding=NamedSharding(mesh, spec))
            for spec in OPS[op].specs(("tp",))[:2]
        ]
        function = OPS[op].bind(mesh, ("tp",), "unidirectional")
        return jax.jit(function).lower(*args).compile()

    return compile_as


def temporaries(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


class WithoutIndexTie(CpuOrder):
    def beside(self, index, leaving, send, work):
        _, made, arrived = super().beside(index, leaving, send, work)
        return index, made, arrived


class WithoutSumsTie(CpuOrder):
    def beside(self, index, leaving, send, work):
        return super().beside(index, leaving, send, work._replace(sums=None))


def test_on_cpu_the_next_matmul_waits_by_its_index(on_cpu):
    """Of 8 blocks of sums, not all are there at once."""
    tied, free = (
        temporaries(on_cpu(order, "scatter-rows", 8, 1024))
        for order in (CpuOrder(), WithoutIndexTie())
    )
    assert tied < 0.4 * free


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="the CPU compiler keeps barriers there")
def test_on_cpu_the_next_transfer_waits_for_sums(on_cpu):
    """Of 8 products that are added, not all are there at once."""
    tied, free = (
        temporaries(on_cpu(order, "gather-lhs-k", 8, 1024))
        for order in (CpuOrder(), WithoutSumsTie())
    )
    assert tied < 0.6 * free


def needs(instruction):
    """All that an instruction waits for."""
    found, left = [], [instruction]
    while left:
        for operand in left.pop().operands:
            if operand not in found:
                found.append(operand)
                left.append(operand)
    return found


class Program:
    """A compiled matmul whose blocks of rhs travel, and whose lhs is cut for each of them."""

    def __init__(self, compiled):
        self.all = parse(compiled.as_text()).entry.instructions
        self.transfers = [i for i in self.all if i.opcode == "collective-permute"]
        self.lhs = next(i for i in self.all if i.opcode == "parameter" and i.operand_text == "0")

    def cuts(self):
        return [i for i in self.all if self.lhs in i.operands]

    def matmuls_before(self, instruction):
        return sum(
            i.opcode == "dot" or "dot" in [j.opcode for j in i.inside] for i in needs(instruction)
        )


class Untied(ClusterOrder):
    def beside(self, index, leaving, send, work):
        _, made, arrived = super().beside(index, leaving, send, work)
        return index, made, arrived


def without_tie(monkeypatch, number):
    """Has `ClusterOrder` leave out one of the two ties of a step: what leaves, or what arrived."""
    calls, tied = count(), written_after

    def tie(before, tree):
        return tree if next(calls) % 2 == number else tied(before, tree)

    monkeypatch.setattr("jaxpar.ring.order.written_after", tie)


def waits(program):
    """Whether the first transfer needs what its matmul cuts; how many matmuls each needs."""
    behind = [program.matmuls_before(transfer) for transfer in program.transfers]
    return program.lhs in needs(program.transfers[0]), behind


def test_on_a_cluster_nothing_leaves_before_the_matmul_beside_it_can_start(on_cpu, monkeypatch):
    case = (ClusterOrder(), "gather-rhs-k", 4, 64)
    assert waits(Program(on_cpu(*case))) == (True, [0, 1, 2])
    without_tie(monkeypatch, 0)
    first_waits, behind = waits(Program(on_cpu(*case)))
    assert not first_waits
    assert behind < [0, 1, 2]


def test_on_a_cluster_the_next_turn_waits_for_the_matmul(on_cpu):
    assert waits(Program(on_cpu(Untied(), "gather-rhs-k", 4, 64))) == (True, [0, 0, 0])


# Before jax 0.12 the CPU compiler drops the barrier around a cut, and fusion has its ties cut, too.
cuts_stay = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="no cut is kept apart there")


@cuts_stay
def test_on_a_cluster_a_tie_does_not_cut_for_itself(on_cpu, barriers):
    case = (ClusterOrder(), "gather-rhs-k", 4, 64)
    assert len(Program(on_cpu(*case)).cuts()) == 4
    barriers()
    assert len(Program(on_cpu(*case)).cuts()) > 4


@cuts_stay
def test_on_a_cluster_a_cut_is_in_use_until_its_transfer_is_over(on_cpu, monkeypatch):
    def held(program):
        """For each transfer, whether something needs it and the cut of the matmul beside it."""
        return [
            any(cut in i.operands and transfer in needs(i) for i in program.all)
            for cut, transfer in zip(program.cuts(), program.transfers, strict=False)
        ]

    case = (ClusterOrder(), "gather-rhs-k", 4, 64)
    assert held(Program(on_cpu(*case))) == [True] * 3
    without_tie(monkeypatch, 1)
    assert held(Program(on_cpu(*case))) == [False] * 3
