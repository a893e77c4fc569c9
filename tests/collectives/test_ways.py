"""The flows over a ring, every way, and the loop that long rings run instead of unrolled steps."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar import all_gather, all_reduce, make_mesh, reduce_scatter
from jaxpar.axis.axis import bind
from jaxpar.ring.chunked import InChunks
from jaxpar.ring.naive import Naive
from jaxpar.ring.order import ClusterOrder, CpuOrder, Order, TpuOrder
from jaxpar.ring.stepwise import Stepwise
from jaxpar.ring.ways import Round, Use, as_it_is
from jaxpar.testing import assert_matches_reference, count_collectives


@pytest.fixture
def loops(request, monkeypatch):
    """Whether rings of more than one step run a loop."""
    if request.param == "loop":
        monkeypatch.setattr("jaxpar.ring.run.UNROLLED", 1)
    return request.param == "loop"


def on_a_ring(function, n, **options):
    mesh = make_mesh({"x": n}, devices=jax.devices()[:n])
    return jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), **options)


@pytest.fixture(autouse=True)
def cut_first(monkeypatch):
    """Has operands cut first where an order does, however short their matmuls are."""
    monkeypatch.setattr("jaxpar.ring.order.cuts_within_matmuls", lambda: False)


ORDERS = (
    *(Order(), CpuOrder(), ClusterOrder(), TpuOrder()),
    *(TpuOrder(delays_transfers=True), TpuOrder(delays_transfers=True, cuts_first=True)),
)


def ways(mode):
    """Every way of a mode, also those that are for other chips than a CPU."""
    ring = bind("x", wire_dtype="int32")
    if mode == "naive":
        return [Naive(ring), InChunks(ring, 2), InChunks(ring, 3), InChunks(ring, 8)]
    directions = {"unidirectional": (1,), "bidirectional": (1, -1)}[mode]
    stepwise = [Stepwise(ring, directions, order) for order in ORDERS]
    return [*stepwise, Stepwise(ring, directions, Order(), whole_opposite=True)]


# Rings of 1, 2, odd and even, with a step between the first and the last, for which both ways five
# are needed. A loop needs 7 or more both ways, and one way 5. The naive way has none.
UNROLLED = [
    *product(["naive", "unidirectional"], [1, 2, 3, 4], ["unrolled"]),
    *product(["bidirectional"], [1, 2, 5, 6], ["unrolled"]),
]
LOOPS = [
    *product(["unidirectional"], [5, 6], ["loop"]),
    *product(["bidirectional"], [7, 8], ["loop"]),
]
case = ("mode", "n", "loops")
every_case = pytest.mark.parametrize(case, UNROLLED + LOOPS, indirect=["loops"])
# Where nothing is cut for a dimension, a loop is alike on odd and even rings.
most_cases = pytest.mark.parametrize(case, UNROLLED + LOOPS[::3], indirect=["loops"])
# Each length in each mode, on each ring, and in loops.
LENGTHS = [
    *((*one, (1, 2, 5)[i % 3]) for i, one in enumerate(UNROLLED)),
    *(
        (*one, length)
        for one, some in zip(LOOPS, [(1, 5), (2,)] * 2, strict=True)
        for length in some
    ),
]


@most_cases
def test_a_gather_says_whose_block_it_brings(n, mode, loops):
    def run(x):
        def seen(way):
            def consume(carry, arrivals):
                if carry is None:
                    assert len(arrivals) == 1
                    carry = jnp.zeros((n, 2), jnp.int32) + 0 * x[0]
                for block, owner, _ in arrivals:
                    assert jax.tree.structure(block) == jax.tree.structure({"a": 0, "b": [0]})
                    # Adding would show a block that came twice.
                    row = jnp.stack([block["a"][0], block["b"][0][0, 2]])
                    carry = carry.at[owner].add(row)
                return carry

            block = {"a": x, "b": [jnp.full((1, 3), -1, jnp.int32) * x]}
            return way.gather(block, Use(consume, sums=as_it_is))

        return tuple(seen(way) for way in ways(mode))

    each = np.arange(1, n + 1)
    for found in jax.jit(on_a_ring(run, n))(np.arange(1, n + 1, dtype=np.int32)):
        np.testing.assert_array_equal(found, np.tile(np.stack([each, -each], 1), (n, 1)))


@every_case
def test_a_gather_says_which_positions_it_brings(n, mode, loops):
    """The product of a whole with what stays at home, as a dot product over all positions."""

    def run(x):
        home = jnp.arange(3 * n, dtype=jnp.int32) + 1

        def dotted(way):
            def consume(total, arrivals):
                parts = [jnp.sum(block * weights) for block, _, weights in arrivals]
                return sum(parts, start=0 * x[0] if total is None else total)

            def take(positions):
                return positions.cut(home, 0)

            return way.gather(x, Use(consume, take, as_it_is), dim=0)[None]

        return tuple(dotted(way) for way in ways(mode))

    x = np.arange(3 * n, dtype=np.int32) - 4
    for found in jax.jit(on_a_ring(run, n))(x):
        np.testing.assert_array_equal(found, [x @ np.arange(1, 3 * n + 1)] * n)


@pytest.mark.parametrize(("mode", "n", "loops", "length"), LENGTHS, indirect=["loops"])
def test_a_scatter_adds_what_every_device_made_for_an_owner(n, length, mode, loops):
    """Column `c` of device `i`'s partial sum is `100 i + c`: the value says whose it is."""

    def run(x):
        columns = jnp.arange(n * length, dtype=jnp.int32) + 100 * x[0]

        def take(positions):
            return positions.cut(columns, 0)

        def produce(part):
            return jnp.stack([part, -part])

        return tuple(
            way.scatter(produce, take, dim=1, length=length, dtype="int32")[0] for way in ways(mode)
        )

    total = 100 * n * (n - 1) // 2
    wanted = np.stack([total + n * np.arange(n * length), -total - n * np.arange(n * length)])
    scattered = jax.shard_map(
        run,
        mesh=make_mesh({"x": n}, devices=jax.devices()[:n]),
        in_specs=P("x"),
        out_specs=P(None, "x"),
    )
    for found in jax.jit(scattered)(np.arange(n, dtype=np.int32)):
        np.testing.assert_array_equal(found, wanted)


@most_cases
def test_sums_follow_a_block_home(n, mode, monkeypatch, loops):
    """Device j adds `10^j` times what it sees, and keeps a count weighted by whose it was."""
    if loops:
        monkeypatch.setattr("jaxpar.ring.stepwise.UNROLLED_CIRCULATING", 1)

    def run(x):
        index = lax.axis_index("x")
        place = 10 ** (index + 0 * x[0])

        def once(way):
            def begin(seen, own):
                return seen, own + x * place

            def end(seen, own):
                return seen + jnp.sum(x) * (index + 1), own + 7

            def visit(seen, visits):
                for part, owner in visits:
                    seen = seen + jnp.sum(part) * (owner + 1)
                return seen, [part * place for part, _ in visits]

            steps = Round(
                *(begin, visit, end),
                split=lambda x, parts: list(x.reshape(parts, -1)),
                join=jnp.concatenate,
            )
            seen, sums = way.circulate(x, 0 * x[0], 0 * x, steps)
            return jnp.concatenate([seen[None], sums])[None]

        return tuple(once(way) for way in ways(mode))

    each = np.arange(1, n + 1, dtype=np.int32)
    seen = 4 * np.sum(each * each)
    sums = each * int("1" * n) + 7
    for found in jax.jit(on_a_ring(run, n))(np.repeat(each, 4)):
        wanted = [[seen, *[total] * 4] for total in sums]
        np.testing.assert_array_equal(found, wanted)


def all_three(mode):
    def run(x):
        return (
            all_gather(x, "x", tiled=True, mode=mode),
            reduce_scatter(x, "x", dim=1, tiled=True, mode=mode),
            all_reduce(x, "x", mode=mode),
        )

    return run


@pytest.mark.parametrize(
    ("n", "mode"),
    [(5, "unidirectional"), (6, "unidirectional"), (7, "bidirectional"), (8, "bidirectional")],
)
def test_a_loop_gives_the_same_values_and_gradients(n, mode, monkeypatch):
    monkeypatch.setattr("jaxpar.ring.run.UNROLLED", 1)
    mesh = make_mesh({"x": n}, devices=jax.devices()[:n])
    assert_matches_reference(
        all_three(mode),
        lambda x: (
            np.concatenate([x] * n),
            np.concatenate(np.split(x.reshape(n, 3, n).sum(0), n, 1)),
            x.reshape(n, 3, n).sum(0),
        ),
        np.random.default_rng(n).standard_normal((3 * n, n)).astype(np.float32),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=(P("x"), P("x"), P()),
        check_vma=n in (6, 8),
    )


@pytest.mark.parametrize(
    ("n", "check_vma", "mode"),
    [
        (5, True, "unidirectional"),
        (6, False, "unidirectional"),
        (7, False, "bidirectional"),
        (8, True, "bidirectional"),
    ],
)
def test_a_loop_sends_what_unrolled_steps_send(n, check_vma, mode, monkeypatch):
    def traced():
        run = on_a_ring(all_three(mode), n, check_vma=check_vma)
        x = jax.ShapeDtypeStruct((3 * n, n), np.float32)
        return str(jax.make_jaxpr(run)(x)), count_collectives(run, x)

    unrolled, wanted = traced()
    assert "scan[" not in unrolled
    assert "while[" not in unrolled
    monkeypatch.setattr("jaxpar.ring.run.UNROLLED", 1)
    loop, found = traced()
    assert "scan[" in loop or "while[" in loop
    assert found == wanted
