"""Overlap itself: in every ring form of every matmul, transfers run beside matmuls.

A small set of real compiles, forward and backward, so that a change which makes XLA serialise a
ring does not pass.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from jaxpar.bench._ops import OPS
from jaxpar.schedule import CompiledProgram, compile_for, target, timeline

SIZE = 2048
TARGETS = [
    ("v5p:2x2x2", "unidirectional"),
    ("v5p:2x2x2", "bidirectional"),
    ("h100:8", "unidirectional"),
    ("b200:8", "unidirectional"),
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


@pytest.mark.parametrize(("name", "mode"), TARGETS)
@pytest.mark.parametrize("op", OPS)
def test_transfers_run_beside_matmuls(op, name, mode):
    played = timeline(compiled(op, name, mode))
    permutes = [transfer for transfer in played.transfers if "permute" in transfer.name]
    assert permutes
    assert not [transfer.name for transfer in permutes if transfer.synchronous]
    assert not [transfer.name for transfer in permutes if not transfer.covers]
