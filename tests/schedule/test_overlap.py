"""Overlap itself: in every ring form of every matmul, and in attention, transfers run beside work.

A small set of real compiles, forward and backward, so that a change which makes XLA serialise a
ring does not pass.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.compiler.compat import cuts_within_matmuls
from jaxpar.layers import ring_attention
from jaxpar.schedule import CompiledProgram, compile_for, target, timeline
from jaxpar.tools.cli.ops import OPS

SIZE = 1024
# Each op on TPUs both ways, and on one of two GPUs, which have one compiler and its options. Rings
# of four compile in half the time of those of eight, which have more steps of the same kind.
TARGETS = [
    *((op, "v5p:2x2x1", "unidirectional") for op in OPS),
    *((op, "v5p:2x2x2", "bidirectional") for op in OPS),
    ("gather-lhs-rows", "h100:8", "unidirectional"),
    ("gather-lhs-k", "b200:4", "unidirectional"),
    ("gather-rhs-k", "h100:4", "unidirectional"),
    ("gather-rhs-cols", "b200:4", "unidirectional"),
    ("scatter-rows", "h100:4", "unidirectional"),
    ("scatter-cols", "b200:4", "unidirectional"),
    ("all-reduce", "h100:4", "unidirectional"),
]


def compiled(op: str, name: str, mode: str) -> CompiledProgram:
    """Compiles a matmul and its gradients, as one program."""
    described = target(name)
    mesh = described.mesh
    lhs, rhs, out = (
        jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for spec in OPS[op].specs(("tp",))
    )
    matmul = OPS[op].bind(mesh, ("tp",), mode)

    def both(lhs, rhs, cotangent):
        result, pullback = jax.vjp(matmul, lhs, rhs)
        return result, *pullback(cotangent)

    return compile_for(both, described, lhs, rhs, out)


def test_each_op_is_on_a_gpu():
    assert {op for op, name, _ in TARGETS if name.startswith(("h100", "b200"))} == set(OPS)


@pytest.mark.parametrize(("op", "name", "mode"), TARGETS)
def test_transfers_run_beside_matmuls(op, name, mode):
    played = timeline(compiled(op, name, mode))
    permutes = [transfer for transfer in played.transfers if "permute" in transfer.name]
    assert permutes
    assert not [transfer.name for transfer in permutes if transfer.synchronous]
    bare = [transfer.name for transfer in permutes if not transfer.covers]
    chip = name.partition(":")[0]
    # One has a cut beside it and no matmul, where matmuls that cut by themselves save a tenth.
    beside_a_cut = chip == "v5p" and mode == "bidirectional" and op.startswith("gather")
    if beside_a_cut and cuts_within_matmuls():
        assert len(bare) <= 1, bare
    else:
        assert not bare


def test_transfers_hide_behind_attention_on_tpus():
    """A local length of 4096, a head of 128, 4 devices: auto is a ring, and exposes nothing."""
    described = target("v5p:2x2x1", "cp=4")
    fn = jax.shard_map(
        lambda *args: ring_attention(*args, "cp"), in_specs=P("cp"), out_specs=P("cp")
    )
    sharding = NamedSharding(described.mesh, P("cp"))
    x = jax.ShapeDtypeStruct((4 * 4096, 1, 128), jnp.bfloat16, sharding=sharding)
    played = timeline(compile_for(fn, described, x, x, x))
    permutes = [transfer for transfer in played.transfers if "permute" in transfer.name]
    assert permutes
    assert all(transfer.covers and not transfer.synchronous for transfer in permutes)
    assert played.exposed <= 0.01 * played.total
