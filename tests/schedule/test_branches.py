"""Branches that constants, trips and places decide: each device takes its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.schedule import Assumptions, compile_for, explain, target, timeline
from jaxpar.tools.explain.pipelines import pipeline_lines
from jaxpar.tools.program.costs import Message
from jaxpar.tools.program.hlo import parse
from jaxpar.tools.program.known_values import LoopState, Scope, UnknownError
from jaxpar.tools.timeline.links import Links
from jaxpar.tools.timeline.per_device import Places, _name
from jaxpar.tools.timeline.player import Player

CHIPS = ["v5e:2x2", "h100:4"]
RING = [(i, (i + 1) % 4) for i in range(4)]
RANDOM = np.random.default_rng(0)


@pytest.fixture(params=CHIPS)
def chips(request):
    return target(request.param, "pp=4")


def matmuls(count):
    """Does `count` matmuls."""

    def run(x):
        for _ in range(count):
            x = jnp.tanh(x @ x)
        return x

    return run


def played(function, chips, *more):
    """Plays a function of one square matrix a device."""
    local = jax.shard_map(
        lambda x, *more: function(x[0], *more)[None],
        mesh=chips.mesh,
        in_specs=(P("pp"), *(P() for _ in more)),
        out_specs=P("pp"),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.bfloat16, sharding=P("pp"))
    return timeline(compile_for(local, chips, x, *more))


def count(found):
    """How many matmuls run."""
    return sum(event.is_matmul for event in found.events)


def test_a_branch_that_a_table_decides_in_each_trip(chips):
    table = RANDOM.integers(0, 3, 20)

    def scanned(x):
        step = lambda x, number: (lax.switch(number, list(map(matmuls, range(3))), x), None)  # noqa: E731
        return lax.scan(step, x, jnp.asarray(table))[0]

    found = played(scanned, chips)
    assert not found.compute_by_place
    assert count(found) == table.sum()


def test_a_branch_of_an_inner_loop_that_the_outer_one_decides(chips):
    def inner(i, j, x):
        return lax.cond((i + j) % 3 == 0, matmuls(1), lambda x: x, x)

    def outer(i, x):
        return lax.fori_loop(0, 4, lambda j, x: inner(i, j, x), x)

    found = played(lambda x: lax.fori_loop(0, 5, outer, x), chips)
    right = sum((i + j) % 3 == 0 for i in range(5) for j in range(4))
    assert count(found) == right


def test_a_loop_whose_length_the_outer_one_decides(chips):
    def outer(i, x):
        return lax.fori_loop(0, i, lambda _, x: matmuls(1)(x), x)

    found = played(lambda x: lax.fori_loop(0, 5, outer, x), chips)
    assert not found.loops_of_unknown_length
    assert count(found) == 10


def test_places_take_their_own_branches(chips):
    """The first and the last device work at the same time, not one after the other."""

    def ends(x):
        place = lax.axis_index("pp")
        x = lax.cond(place == 0, matmuls(2), lambda x: x, x)
        return lax.cond(place == 3, matmuls(3), lambda x: x, x)

    found, one = played(ends, chips), played(matmuls(1), chips)
    assert 2.7 * one.total < found.total < 4 * one.total
    longest, shorter, shortest = sorted(found.compute_by_place.items(), key=lambda x: -x[1])
    assert [longest[0], shorter[0], shortest[0]] == ["pp=3", "pp=0", "pp=1,2"]
    assert longest[1] == found.compute
    (said,) = pipeline_lines(found, chips)
    assert said.startswith("devices take different branches, and wait for the longest one: pp=3 ")


def test_places_that_wait_for_one_another(chips):
    """A ring's permute in each trip: a trip takes as long as its longest device."""
    table = np.array([[n <= trip or trip < m for n, m in ((9, 0), (3, 0), (12, 5), (12, 7))]
                      for trip in range(12)], int)  # fmt: skip

    def scanned(x):
        def step(x, row):
            number = row[lax.axis_index("pp")]
            x = lax.cond(number > 0, matmuls(1), lambda x: x, x)
            return lax.ppermute(x, "pp", RING), None

        return lax.scan(step, x, jnp.asarray(table))[0]

    found = played(scanned, chips)
    assert len(found.compute_by_place) == 4
    matmul = max(event.seconds for event in found.events if event.is_matmul)
    assert count(found) == 9  # of the timeline's device, which computes in most trips
    assert found.total > table.max(axis=1).sum() * matmul > 10 * matmul
    longest = sorted(found.compute_by_place, key=lambda place: found.compute_by_place[place])
    assert longest == [f"pp={place}" for place in np.argsort(table.sum(axis=0))]


def test_collectives_of_a_place_alone_do_not_wait_for_others():
    chips = target("v5e:2x4", "pp=2,tp=4")

    def local(x):
        work = lambda x: lax.psum(matmuls(2)(x[0]), "tp")[None]  # noqa: E731
        return lax.cond(lax.axis_index("pp") == 1, work, lambda x: x, x)

    step = jax.shard_map(
        local, in_specs=P(("pp", "tp")), out_specs=P(("pp", "tp")), check_vma=False
    )
    x = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.bfloat16, sharding=P(("pp", "tp")))
    found = timeline(compile_for(step, chips, x))
    assert sorted(found.compute_by_place) == ["pp=0", "pp=1"]
    assert found.compute_by_place["pp=1"] > 5 * found.compute_by_place["pp=0"]


def test_branches_that_a_slice_decides():
    """Each slice runs the same program, and asks for its number."""
    chips = target("2xv5e:2x2", "pp=2,tp=4")

    def local(x):
        y = lax.cond(lax.axis_index("pp") == 1, matmuls(3), lambda x: x, x[0])
        return lax.ppermute(y, "pp", [(0, 1), (1, 0)])[None]

    step = jax.shard_map(
        local, in_specs=P(("pp", "tp")), out_specs=P(("pp", "tp")), check_vma=False
    )
    x = jax.ShapeDtypeStruct((8, 1024, 1024), jnp.bfloat16, sharding=P(("pp", "tp")))
    found = timeline(compile_for(step, chips, x))
    assert sorted(found.compute_by_place) == ["pp=0", "pp=1"]
    assert count(found) == 3


def test_data_that_decide_count_as_the_longest_branch(chips):
    def chosen(x, number):
        return lax.switch(number, list(map(matmuls, range(3))), x)

    found = played(chosen, chips, jax.ShapeDtypeStruct((), jnp.int32, sharding=P()))
    assert count(found) == 2


def test_explain_says_that_places_differ():
    def ends(x):
        return lax.cond(lax.axis_index("pp") == 3, matmuls(3), lambda x: x, x)

    chips = target("v5e:2x2", "pp=4")
    local = jax.shard_map(
        lambda x: ends(x[0])[None], in_specs=P("pp"), out_specs=P("pp"), check_vma=False
    )
    x = jax.ShapeDtypeStruct((4, 512, 512), jnp.bfloat16, sharding=P("pp"))
    text = " ".join(explain(compile_for(local, chips, x), tries=0).text().split())
    assert "devices take different branches, and wait for the longest one: pp=3 computes" in text


# -- integers by hand ------------------------------------------------------------------------------

HEAD = "HloModule m, is_scheduled=true, num_partitions=4\n"


def values(lines, name, parameters=None):
    text = f"{HEAD}ENTRY %e (p: s32[3]) -> s32[] {{\n  %p = s32[3] parameter(0)\n{lines}\n}}\n"
    entry = parse(text).entry
    (i,) = (i for i in entry.instructions if i.name == name)
    return Scope(4, parameters=parameters).value(i)


TABLE = "  %t = s32[2,3] constant({ {0, -1, 2}, {3, 4, 5} })\n  %i = u32[] partition-id()\n"


@pytest.mark.parametrize(
    ("lines", "right"),
    [
        ("%x = s32[3] iota(), iota_dimension=0", [[0, 1, 2]]),
        ("%x = u32[] multiply(%i, %i)", [0, 1, 4, 9]),
        ("%x = s32[1,3] slice(%t), slice={[1:2], [0:3]}", [[[3, 4, 5]]]),
        ("%x = s32[3,2] transpose(%t), dimensions={1,0}", [[[0, 3], [-1, 4], [2, 5]]]),
        ("%x = s32[6] reshape(%t)", [[0, -1, 2, 3, 4, 5]]),
        ("%z = s32[] constant(1)\n  %x = s32[1,1] dynamic-slice(%t, %z, %i)",
         [[[3]], [[4]], [[5]], [[5]]]),  # the last device's place is clamped
        ("%z = s32[] constant(-7)\n  %u = s32[] constant(2)\n  %x = s32[] divide(%z, %u)", [-3]),
        ("%z = s32[] constant(-8)\n  %u = s32[] constant(28)\n"
         "  %x = s32[] shift-right-logical(%z, %u)", [15]),
        ("%z = s32[] constant(9)\n  %b = s32[2] broadcast(%z), dimensions={}\n"
         "  %x = s32[4] concatenate(%b, %b), dimensions={0}", [[9, 9, 9, 9]]),
        ("%z = u32[] constant(2)\n  %c = pred[] compare(%i, %z), direction=LT\n"
         "  %x = u32[] select(%c, %i, %z)", [0, 1, 2, 2]),
        ("%z = s32[2] constant({5, 6})\n  %x = s32[2,3] broadcast(%z), dimensions={0}",
         [[[5, 5, 5], [6, 6, 6]]]),
        ("%x = s32[] iota(), iota_dimension=0", [0]),
        ("%z = u64[] constant(18446744073709551615)\n  %u = u64[] constant(3)\n"
         "  %x = u64[] divide(%z, %u)", [6148914691236517205]),
        ("%z = u32[] constant(2)\n  %c = pred[] compare(%i, %z), direction=LT\n"
         "  %a = s32[4] constant({1, 2, 3, 4})\n  %b = s32[4] negate(%a)\n"
         "  %x = s32[4] select(%c, %a, %b)", [[1, 2, 3, 4]] * 2 + [[-1, -2, -3, -4]] * 2),
    ],
)  # fmt: skip
def test_integers(lines, right):
    lines = TABLE + f"  {lines}\n  ROOT %r = s32[] constant(0)"
    assert values(lines, "x").tolist() == right


@pytest.mark.parametrize(
    "lines",
    [
        "%x = s32[3] copy(%p)",
        "%x = s32[40] constant({...})",
        "%z = s32[] constant(0)\n  %u = s32[] constant(2)\n  %x = s32[] divide(%u, %z)",
        "%s = s32[2,2]{1,0} iota(), iota_dimension=1\n  %x = s32[2,2]{0,1} bitcast(%s)",  # turned
        "%z = s32[] constant(1)\n  %s = (s32[], s32[], u32[]) copy-start(%z)\n"
        "  %x = s32[] get-tuple-element(%s), index=1",
        "%z = f32[] constant(2)\n  %x = s32[] convert(%z)",
    ],
)
def test_integers_that_are_not_known(lines):
    lines = TABLE + f"  {lines}\n  ROOT %r = s32[] constant(0)"
    with pytest.raises(UnknownError):
        values(lines, "x")


def test_a_number_that_a_thousand_trips_change():
    """First asked late: no recursion through all trips."""
    text = (
        HEAD
        + """
%body (s: (s32[], s32[])) -> (s32[], s32[]) {
  %s = (s32[], s32[]) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %m = s32[] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  %sum = s32[] add(%m, %n)
  ROOT %r = (s32[], s32[]) tuple(%next, %sum)
}

%condition (o: (s32[], s32[])) -> pred[] {
  %o = (s32[], s32[]) parameter(0)
  %k = s32[] get-tuple-element(%o), index=0
  %limit = s32[] constant(1500)
  ROOT %less = pred[] compare(%k, %limit), direction=LT
}

ENTRY %e () -> (s32[], s32[]) {
  %zero = s32[] constant(0)
  %start = (s32[], s32[]) tuple(%zero, %zero)
  ROOT %loop = (s32[], s32[]) while(%start), condition=%condition, body=%body
}
"""
    )
    module = parse(text)
    state = LoopState(Scope(4), module.entry.root)
    assert state.trips() == 1500
    (m,) = (i for i in module.computations["body"].instructions if i.name == "m")
    assert state.at(1400).value(m).tolist() == [sum(range(1400))]


def test_a_long_chain_of_integers():
    lines = ["%c0 = s32[] constant(0)", "%one = s32[] constant(1)"]
    lines += [f"%c{n + 1} = s32[] add(%c{n}, %one)" for n in range(5000)]
    text = "\n".join(f"  {line}" for line in [*lines, "ROOT %r = s32[] constant(0)"])
    assert values(text, "c5000").tolist() == [5000]


def test_a_loop_whose_state_is_a_number():
    text = (
        HEAD
        + """
%body (s: s32[]) -> s32[] {
  %s = s32[] parameter(0)
  %one = s32[] constant(1)
  ROOT %next = s32[] add(%s, %one)
}

%condition (o: s32[]) -> pred[] {
  %o = s32[] parameter(0)
  %limit = s32[] constant(3)
  ROOT %less = pred[] compare(%o, %limit), direction=LT
}

ENTRY %e () -> s32[] {
  %zero = s32[] constant(0)
  ROOT %loop = s32[] while(%zero), condition=%condition, body=%body
}
"""
    )
    assert LoopState(Scope(4), parse(text).entry.root).trips() == 3


def test_a_player_waits_for_those_of_its_groups_alone():
    chips = target("v5e:2x2", "pp=4")
    places = Places(Player(Links(chips.mesh, chips.chip), Assumptions()), 6, 1, lambda op: None)
    places.players += [places.players[0].clone(), places.players[0].clone()]
    for player, now in zip(places.players, (1.0, 5.0, 2.0), strict=True):
        player.now = now
    places.place[:] = [0, 1, 0, 1, 2, 2]
    places.active = [0, 1, 2]
    message = Message("all-reduce", 8.0, groups=[[0, 1], [2, 3], [4, 5]])
    assert places._begins(message) == {0: 5.0, 1: 5.0, 2: 2.0}
    assert places._begins(Message("all-reduce", 8.0)) == {0: 5.0, 1: 5.0, 2: 5.0}


def test_names_of_places_are_their_own():
    nine = target("v5e:4x4").mesh.devices.flat[:9]
    mesh = jax.sharding.Mesh(nine.reshape(3, 3), ("a", "b"))
    names = [_name(mesh, np.array(own)) for own in ([0, 4], [1, 3], [2, 5, 6, 7, 8], [0, 1, 2])]
    assert names == ["devices 0, 4", "devices 1, 3", "devices 2, 5, 6, 7 and 1 more", "a=0"]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "bool"])
def test_tables_are_in_the_text(dtype, chips):
    """Also those that the compiler stores in another order."""
    table = RANDOM.integers(0, 2 if dtype == "bool" else 100, (12, 5)).astype(dtype)
    table = -table if dtype.startswith("int") else table
    if dtype != "bool":
        table[3] = np.iinfo(dtype).max, np.iinfo(dtype).min, 0, 1, np.iinfo(dtype).max - 1

    def step(x):
        def trip(i, x):
            row = jnp.asarray(table)[i].astype(x.dtype)
            return x + row[0] * row

        return lax.fori_loop(0, 12, trip, x)

    dtype = jnp.int32 if dtype == "bool" else dtype
    x = jax.ShapeDtypeStruct((5,), dtype, sharding=P())
    text = compile_for(step, chips, x).text
    assert "{...}" not in text
    instructions = (i for c in parse(text).computations.values() for i in c.instructions)
    constants = (i for i in instructions if i.opcode == "constant")
    read = [Scope(4).value(i)[0] for i in constants if i.arrays[0].shape == (12, 5)]
    assert read
    for one in read:
        np.testing.assert_array_equal(one, table.astype(one.dtype))
