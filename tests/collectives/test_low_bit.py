"""What is gathered in 8 bits, over meshes of 3 to 36 devices, and compiled for TPUs."""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from programs import run_worker

import jaxpar
from jaxpar import Axis, LowBit
from jaxpar.axis.axis import bind
from jaxpar.choose.problem import Problem
from jaxpar.choose.sites import site_of
from jaxpar.schedule import compile_for, target, timeline

ROW = jax.ShapeDtypeStruct((8,), "float32")
HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "meshes",
    [
        (
            "True,int8,naive,3",
            "True,int8,bidirectional,3",
            "False,float8_e4m3fn,few:chunked-2,4",
            "False,float8_e4m3fn,bidirectional,4",
        ),
        (
            "False,int8,few:multi-ring,3,3",
            "True,float8_e4m3fn,multi-ring,2,2",
            "False,int8,unidirectional,3,1,2",
            "True,int8,few:multi-ring,6,6",  # in loops, whose programs are long
        ),
    ],
)
def test_values_and_gradients(meshes):
    run_worker(HERE / "low_bit.py", *meshes)


@cache
def played(topology, mesh, axes, columns, mode, wire_dtype=None):
    """The timeline of a matmul of gathered rows, in bfloat16, compiled for a slice."""
    chips = target(topology, mesh)
    step = jax.shard_map(
        lambda x, w: jaxpar.all_gather_matmul(x, w, axes, mode=mode, wire_dtype=wire_dtype),
        mesh=chips.mesh,
        in_specs=(P(axes), P(None, axes)),
        out_specs=P(None, axes),
    )
    shapes = {(8192, 4096): P(axes), (4096, columns): P(None, axes)}
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(chips.mesh, spec))
        for shape, spec in shapes.items()
    ]
    found = timeline(compile_for(step, chips, *args))
    assert not any(event.synchronous for event in found.transfers)
    return found


@pytest.mark.parametrize(
    ("slice_of", "columns", "mode", "most"),
    [
        (("v5p:4x4x4", "dp=4,x=4,y=4", ("x", "y")), 8192, "naive", 0.65),
        (("v5p:4x4x4", "dp=8,tp=8", "tp"), 4096, "bidirectional", 0.65),
        # Of which the matmul is 0.30.
        (("v6e:16x16", "dp=16,tp=16", "tp"), 28672, "naive", 0.71),
    ],
)
def test_a_matmul_that_waits_for_its_blocks_takes_less(slice_of, columns, mode, most):
    wide, narrow = (played(*slice_of, columns, mode, wire) for wire in (None, "int8"))
    assert narrow.total <= most * wide.total


def test_two_rings_of_8_bits_against_a_collective_of_16():
    slice_of = "v5p:4x4x4", "dp=4,x=4,y=4"
    wide = played(*slice_of, ("x", "y"), 8192, "naive")
    narrow = played(*slice_of, ("x", "y"), 8192, "multi-ring", "int8")
    assert narrow.total <= 0.40 * wide.total


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (None, ""),
        ("bfloat16", ", sums in bfloat16"),
        ("int8", ", int8 on the wire"),
        (LowBit("int8"), ", int8 on the wire"),
        (
            LowBit("float8_e4m3fn", columns=64),
            ", float8_e4m3fn on the wire, a scale for 64 columns",
        ),
        (
            LowBit("int8", sums="bfloat16", cotangents=False),
            ", int8 on the wire, sums in bfloat16, cotangents as they are",
        ),
    ],
)
def test_the_name_of_a_site_tells_the_wire(wire, text):
    names = []

    def local(x):
        ring = bind(Axis("tp", wire_dtype=wire))
        names.append(site_of(Problem("collective", ring, (x.shape,), what="all-gather of float32")))
        return x

    mesh = jaxpar.make_mesh("tp=8")
    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")), ROW)
    assert names == [f"collective over tp=8: all-gather of float32{text}; 1"]
