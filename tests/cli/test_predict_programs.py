"""What is compiled: operands as text, the floors of the operations, gradients of functions."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import all_gather_matmul, make_mesh
from jaxpar.schedule import Floor, Target
from jaxpar.tools.cli import predict_programs as programs
from jaxpar.tools.cli.console import UsageError
from jaxpar.tools.cli.ops import OPS, with_gradients
from jaxpar.tools.cli.predict_programs import operand
from jaxpar.tools.cli.predict_results import Request

REQUEST = Request(
    target="cpu",
    mesh="tp=-1",
    axis=None,
    function=None,
    args=(),
    ops=("gather-lhs-rows",),
    shapes=("16x32x64",),
    modes=("naive", "unidirectional"),
    dtype="bfloat16",
    wire_dtype=None,
    grad=False,
    bare=False,
    compiler_options={},
    figures="book",
    cache=False,
)


def replaced(**changes):
    return Request(**{**vars(REQUEST), **changes})


@pytest.fixture
def target():
    return Target("cpu", jaxpar.make_mesh("dp=2,tp=4"), None)


@pytest.mark.parametrize(
    ("text", "dtype", "shape", "spec"),
    [
        ("bf16[16,8]@tp,-", jnp.bfloat16, (16, 8), P("tp", None)),
        ("f32[16, 8]@-,dp+tp", jnp.float32, (16, 8), P(None, ("dp", "tp"))),
        ("int8[16,8]@tp", jnp.int8, (16, 8), P("tp")),
        ("f8e4m3fn[4]", jnp.float8_e4m3fn, (4,), P()),
        ("f32[]", jnp.float32, (), P()),
    ],
)
def test_operand(text, dtype, shape, spec, target):
    found = operand(text, target.mesh)
    assert (found.dtype, found.shape) == (dtype, shape)
    wanted = jax.NamedSharding(target.mesh, spec)
    assert found.sharding.is_equivalent_to(wanted, len(shape))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("f32[8]@mp", "'mp' is not an axis of the mesh, which has dp, tp"),
        (
            "f32[8,6]@-,tp",
            "dimension 1 of 6 is sharded over tp of 4 devices, which does not divide it; use 4 or "
            "8, or another --mesh",
        ),
        ("f32[3]@tp", "does not divide it; use 4, or another"),
    ],
)
def test_operand_that_does_not_fit(text, reason, target):
    with pytest.raises(UsageError) as caught:
        operand(text, target.mesh)
    assert reason in str(caught.value)


# Local sizes on a ring of 4, and the least elements that travel, of 16x32x64.
FLOORS = {
    "gather-lhs-rows": ((16, 32, 16), 16 * 32),
    "gather-lhs-k": ((16, 32, 16), 16 * 32),
    # A part of lhs is exchanged for one of its depth, and the result is scattered.
    "gather-rhs-k": ((4, 32, 64), 16 * 32 // 4 + 16 * 64),
    # All of lhs is gathered, and parts of the result are exchanged.
    "gather-rhs-cols": ((4, 32, 64), 16 * 32 + 16 * 64 // 4),
    "scatter-rows": ((16, 8, 64), 16 * 64),
    "scatter-cols": ((16, 8, 64), 16 * 64),
    "all-reduce": ((16, 8, 64), 2 * 16 * 64),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("wire", "grad", "gathers", "sums", "all_reduces"),
    [
        (None, False, 2, 2, 2),
        ("float32", False, 2, 2, 2),
        ("int8", False, 1, 2, 2),  # what is gathered travels in 8 bits, and sums as they are
        ("float8_e4m3fn", True, 1.5, 1.5, 1),  # of both passes one gathers, and one sums
    ],
)
def test_floor_of_an_operation(name, wire, grad, gathers, sums, all_reduces, target, monkeypatch):
    asked = {}

    def matmul_floor(target, subscripts, lhs, rhs, sent, *, axis, dtype, grad):
        asked.update(subscripts=subscripts, lhs=lhs, rhs=rhs, sent=sent, dtype=dtype, grad=grad)
        asked.update(axis=axis)
        return Floor(1.0, 2.0)

    monkeypatch.setattr(programs, "matmul_floor", matmul_floor)
    request = replaced(wire_dtype=wire, grad=grad)
    width = {"gather": gathers, "scatter": sums, "all": all_reduces}[name.split("-")[0]]
    assert programs.op_floor(target, OPS[name], (16, 32, 64), ("tp",), request).total == 2
    (rows, depth, cols), moved = FLOORS[name]
    assert asked == {
        "subscripts": "mk,kn->mn",
        "lhs": (rows, depth),
        "rhs": (depth, cols),
        "sent": moved * width * 3 / 4,
        "dtype": jnp.bfloat16,
        "grad": grad,
        "axis": ("tp",),
    }


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("grad", [False, True])
def test_of_equal_sizes_no_other_form_sends_less(name, grad):
    op = OPS[name]
    sizes, moved = op.on_one_device((64, 64, 64), 4)
    assert op.least_sent((64, 64, 64), 4, grad) == op.sent(moved, 4, grad)
    assert op.pieces((64, 64, 64), 4)[-1] == sizes
    assert sorted(op.pieces((64, 64, 64), 4)) == [(16, 64, 64), (64, 16, 64), (64, 64, 16)]
    assert op.pieces((16, 3, 20), 4)[:-1] == [
        piece for piece in ((4, 3, 20), (16, 3, 5)) if piece != op.pieces((16, 3, 20), 4)[-1]
    ]


def test_operations_that_do_not_fit_are_refused(target):
    request = replaced(ops=("scatter-rows",), shapes=("6x32x64",))
    with pytest.raises(UsageError, match="scatter-rows shards M = 6 of 6x32x64 over the ring tp"):
        programs.programs(request, target, ("tp",))


@pytest.mark.parametrize("grad", [False, True])
def test_operations_compute_what_the_bench_computes(grad, target):
    found = programs.programs(replaced(dtype="float32", grad=grad), target, ("tp",))
    assert [(p.case, p.mode) for p in found] == [
        ("gather-lhs-rows 16x32x64", "naive"),
        ("gather-lhs-rows 16x32x64", "unidirectional"),
    ]
    rng = np.random.default_rng(0)
    for program in found:
        assert [arg.shape for arg in program.args] == [(16, 32), (32, 64), (16, 64)][: 2 + grad]
        values = [
            jax.device_put(rng.standard_normal(arg.shape, np.float32), arg.sharding)
            for arg in program.args
        ]
        got = jax.jit(program.function)(*values)
        lhs, rhs = values[:2]
        wanted = (lhs @ rhs, values[2] @ rhs.T, lhs.T @ values[2]) if grad else lhs @ rhs
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), got, wanted)


def test_nothing_backward_is_computed_before_the_result():
    """A second gather of what is kept as a shard, too, waits for it."""
    matmul = partial(all_gather_matmul, axis="tp", mode="unidirectional")
    mapped = jax.shard_map(
        matmul,
        mesh=make_mesh("tp=4", devices=jax.devices()[:4]),
        in_specs=(P("tp"), P(None, "tp")),
        out_specs=P(None, "tp"),
    )
    given = [jnp.ones(shape) for shape in ((8, 4), (4, 8), (8, 8))]
    equations = jax.make_jaxpr(with_gradients(mapped))(*given).eqns
    names = [equation.primitive.name for equation in equations]
    place = names.index("optimization_barrier")
    assert names[:place] == ["shard_map"]
    assert names.count("shard_map") > 1
    held = set(equations[place].outvars)
    for equation in equations[place + 1 :]:
        assert held & set(equation.invars)
        held |= set(equation.outvars)
        assert not set(equations[0].outvars) & set(equation.invars)


def test_gradients_of_a_function_are_those_of_all_floats(target, monkeypatch, tmp_path):
    (tmp_path / "a_model.py").write_text(
        "import jax.numpy as jnp\n"
        "def loss(params, labels):\n"
        "    return jnp.sum(params**2 * labels.astype(params.dtype)), labels\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    args = ("f32[8]@tp", "s32[8]")
    request = replaced(function="a_model:loss", args=args, grad=True)
    [program] = programs.programs(request, target, ())
    params, labels = jnp.arange(8.0), jnp.arange(8)
    (value, _), (gradient,) = program.function(params, labels, [jnp.float32(2.0)])
    np.testing.assert_allclose(value, np.sum(np.arange(8.0) ** 3))
    np.testing.assert_allclose(gradient, 4 * np.arange(8.0) ** 2)
    assert [leaf.shape for leaf in jax.tree.leaves(program.args)] == [(8,), (8,), ()]
