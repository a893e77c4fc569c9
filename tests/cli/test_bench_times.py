"""What the numbers mean: bytes sent, fair turns, and a tolerance that a lost block exceeds."""

from itertools import permutations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.tools.cli.bench_times import (
    error,
    make_problem,
    measure,
    place,
    quartiles,
    time_interleaved,
    tolerance,
)
from jaxpar.tools.cli.ops import MODES, OPS

M, K, N = 16, 32, 64


def _measured(op, phase):
    mesh = jaxpar.make_mesh("tp=8")
    problem = make_problem((M, K, N), "float32")
    rows, refusals = measure(OPS[op], problem, phase, mesh, ("tp",), MODES, 1, lambda: None)
    assert not refusals
    assert [row.mode for row in rows] == list(MODES)
    return rows


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_right_and_sends_the_least(op):
    """Each of the eight devices sends seven eighths of what is gathered or scattered."""
    elements = {"lhs": M * K, "rhs": K * N, "rows": M * N, "cols": M * N, "reduce": 2 * M * N}
    kind = op.split("-")[1]
    for row in _measured(op, "forward"):
        assert row.sent_bytes == elements[kind] * 4 * 7 / 8


def test_backward_sends_are_counted():
    """Gather lhs: a naive backward scatters dlhs, once more the bytes of the forward."""
    naive = _measured("gather-lhs-rows", "forward+backward")[0]
    assert naive.sent_bytes >= 2 * M * K * 4 * 7 / 8
    assert sum(naive.collectives.values()) >= 2


def test_functions_take_turns_in_rotated_order():
    calls, ticks = [], []
    functions = [lambda i=i: calls.append(i) for i in range(3)]
    seconds = time_interleaved(functions, [], 6, lambda: ticks.append(None))
    assert [len(s) for s in seconds] == [6, 6, 6]
    rounds = [tuple(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert len(rounds) == len(ticks) == 7
    assert sorted(rounds[1:]) == list(permutations(range(3)))  # the first one warms up


def test_quartiles():
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_lost_block_exceeds_the_tolerance(dtype, platform):
    """One of eight partial sums missing is an error of sqrt(1 / 8) rms in a typical element."""
    assert tolerance(dtype, 4096, 8, platform) < 8**-0.5


def test_error_sees_one_wrong_copy_and_nan():
    mesh = jaxpar.make_mesh("tp=8")
    want = np.ones((8, 8))
    assert error(place(np.ones((8, 8), np.float32), mesh, P("tp")), want) == 0
    copies = [np.full((8, 8), 3 if i == 5 else 1, np.float32) for i in range(8)]
    x = jax.make_array_from_single_device_arrays(
        (8, 8),
        jax.NamedSharding(mesh, P()),
        [jax.device_put(c, d) for c, d in zip(copies, mesh.devices.flat, strict=True)],
    )
    assert error(x, want) == 2
    nan = np.where(np.arange(8) == 3, np.nan, np.ones((8, 8))).astype(np.float32)
    assert not error(place(nan, mesh, P()), want) <= 1e9
    assert error(place(np.ones((4, 8), np.float32), mesh, P()), want) == float("inf")
