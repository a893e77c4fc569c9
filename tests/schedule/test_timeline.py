"""Exact arithmetic: small modules written by hand, on a chip with round figures."""

from dataclasses import replace

import pytest
from jax.sharding import Mesh
from texts import rooted

from jaxpar.platforms.chips import REACHED
from jaxpar.schedule import Assumptions, Chip, CompiledProgram, Memory, Target, target, timeline
from jaxpar.tools.timeline import player
from jaxpar.tools.timeline.player import (
    FIRST_BYTE,
    REACHED_BY_GPUS,
    SLOWEST,
    UNALIGNED,
)

# One cycle a second, one byte a second over a link, and ten bytes a second in memory, of the more
# that are published.
TORUS = Chip(
    "TPU test",
    flops=1.0,
    hbm=10.0 / REACHED,
    capacity=1e3,
    link=1.0,
    torus=True,
    clock=1.0,
    latency=0.0,
)
SWITCH = replace(
    TORUS, kind="GPU test", hbm=10.0 / REACHED_BY_GPUS, torus=False, clock=None, flops=2.0
)
ROW = [device for device in target("v5e:4x4").mesh.devices.flat if device.coords[1] == 0]
LINE = Mesh(sorted(ROW, key=lambda device: device.coords), ("tp",))
FORWARD = "{{0,1},{1,2},{2,3}}"
BACKWARD = "{{1,0},{2,1},{3,2}}"
ADD = """
%add (a: s8[], b: s8[]) -> s8[] {
  %a = s8[] parameter(0)
  %b = s8[] parameter(1)
  ROOT %sum = s8[] add(%a, %b)
}
"""
DOT = """
%product (x: s8[2,5], y: s8[5,1]) -> s8[2,1] {
  %x = s8[2,5] parameter(0)
  %y = s8[5,1] parameter(1)
  ROOT %dot = s8[2,1] dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def play(entry, computations="", chip=TORUS, assumed=None):
    """Plays an entry computation on a line of four devices."""
    text = f"HloModule test, is_scheduled=true, num_partitions=4\n{ADD}{DOT}{computations}\n"
    text += "ENTRY %main (p: s8[10]) -> s8[10] {\n  %p = s8[10] parameter(0)\n"
    text += "  %q = s8[2,5] parameter(1)\n  %r = s8[5,1] parameter(2)\n" + rooted(entry) + "}\n"
    program = CompiledProgram(
        Target("test", LINE, chip), text, Memory(0, 0, 0, 0, peak=7), 0.0, None
    )
    return timeline(program, assumed=assumed)


def work(name, cycles, operand="%q", second="%r"):
    return (
        f"  %{name} = s8[2,1] fusion({operand}, {second}), kind=kOutput, calls=%product, "
        f'metadata={{op_name="jit(f)/{name}"}}, '
        f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}\n'
    )


def start(name, pairs=FORWARD, operand="%p", size=10):
    return (
        f"  %{name} = (s8[{size}], s8[{size}], u32[], u32[]) collective-permute-start({operand}), "
        f"channel_id=1, source_target_pairs={pairs}\n"
    )


def done(name, of, size=10):
    return f"  %{name} = s8[{size}] collective-permute-done(%{of})\n"


def test_a_transfer_hides_behind_a_matmul():
    played = play(start("s") + work("w", 12) + done("d", "s"))
    (transfer,) = played.transfers
    assert (transfer.start, transfer.end, transfer.bytes) == (0, 10, 10)
    assert (transfer.row, transfer.covers, transfer.synchronous) == ("tp +1", ("w",), False)
    assert (played.total, played.compute, played.exposed, played.transfer) == (12, 12, 0, 10)
    assert played.hidden_share == 1
    assert played.sent_bytes == 10
    assert played.peak_bytes == 7
    assert played.link_utilisation == pytest.approx(10 / 12)
    assert played.estimate == "the compiler's cycles"
    assert [e.op for e in played.events if e.kind == "compute"] == ["jit(f)/w"]


def test_what_a_matmul_does_not_cover_is_exposed():
    played = play(start("s") + work("w", 4) + done("d", "s") + work("v", 5))
    assert (played.total, played.compute, played.exposed) == (15, 9, 6)
    assert played.hidden_share == pytest.approx(0.4)
    (wait,) = (e for e in played.events if e.kind == "wait")
    assert (wait.name, wait.start, wait.end) == ("s", 4, 10)


def test_transfers_that_share_a_link_take_turns():
    two = start("s") + start("t") + work("w", 3) + done("d", "s") + done("e", "t")
    played = play(two)
    assert [(e.start, e.end) for e in played.transfers] == [(0, 10), (10, 20)]
    assert (played.total, played.exposed, played.transfer) == (20, 17, 20)
    assert [e.covers for e in played.transfers] == [("w",), ("w",)]


def test_opposite_directions_have_links_of_their_own():
    two = start("s") + start("t", BACKWARD) + work("w", 3) + done("d", "s") + done("e", "t")
    played = play(two)
    assert [(e.row, e.start, e.end) for e in played.transfers] == [
        ("tp +1", 0, 10),
        ("tp -1", 0, 10),
    ]
    assert (played.total, played.exposed, played.transfer) == (10, 7, 10)


def test_the_longest_way_and_the_busiest_link_count():
    """0 to 2 crosses two links; 1 to 3 shares the second of them."""
    slow = replace(TORUS, latency=3.0)
    played = play(start("s", "{{0,2},{1,3}}") + done("d", "s"), chip=slow)
    assert played.total == 2 * 10 + 2 * 3
    assert played.link_utilisation == pytest.approx((10 + 20 + 10) / 3 / 26)


LOOP = """
%body (state: (s32[], s8[10])) -> (s32[], s8[10]) {{
  %state = (s32[], s8[10]) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %block = s8[10] get-tuple-element(%state), index=1
  %one = s32[] constant(1)
  %q = s8[2,5] constant({{...}})
  %r = s8[5,1] constant({{...}})
  %next = s32[] add(%n, %one), backend_config={{"estimated_cycles":"0"}}
{steps}
  ROOT %result = (s32[], s8[10]) tuple(%next, %{last})
}}

%condition (other: (s32[], s8[10])) -> pred[] {{
  %other = (s32[], s8[10]) parameter(0)
  %m = s32[] get-tuple-element(%other), index=0
  %limit = s32[] constant({limit})
  ROOT %less = pred[] compare(%m, %limit), direction=LT
}}
"""
RUN_LOOP = """
  %zero = s32[] constant(0)
  %initial = (s32[], s8[10]) tuple(%zero, %p)
  %loop = (s32[], s8[10]) while(%initial), condition=%condition, body=%body
"""


def test_a_loop_of_three_trips():
    steps = start("s", operand="%block") + work("w", 4) + done("d", "s")
    played = play(RUN_LOOP, LOOP.format(steps=steps, last="d", limit=3))
    assert [(e.start, e.end) for e in played.transfers] == [(0, 10), (10, 20), (20, 30)]
    assert (played.total, played.compute, played.exposed) == (30, 12, 18)
    assert played.sent_bytes == 30
    assert played.loops_of_unknown_length == ()


def test_a_loop_of_unknown_length_counts_once_and_is_named():
    limit = "%limit = s32[] constant(3)"
    loop = LOOP.format(steps=work("w", 4), last="block", limit=3)
    loop = loop.replace(limit, "%limit = s32[] get-tuple-element(%other), index=1")
    played = play(RUN_LOOP, loop)
    assert (played.total, played.loops_of_unknown_length) == (4, ("loop",))


def test_the_length_of_a_loop_can_be_assumed():
    limit = "%limit = s32[] constant(3)"
    loop = LOOP.format(steps=work("w", 4), last="block", limit=3)
    loop = loop.replace(limit, "%limit = s32[] get-tuple-element(%other), index=1")
    run = RUN_LOOP.rstrip() + ', metadata={op_name="jit(f)/blocks/while"}\n'
    named = play(run, loop, assumed=Assumptions(trips={"rows": 2, "blocks": 5}))
    assert (named.total, named.loops_of_unknown_length) == (20, ())
    other = play(run, loop, assumed=Assumptions(trips={"rows": 2}))
    assert (other.total, other.loops_of_unknown_length) == (4, ("loop",))


def test_a_loop_of_known_length_needs_no_assumption():
    loop = LOOP.format(steps=work("w", 4), last="block", limit=3)
    assert play(RUN_LOOP, loop, assumed=Assumptions(trips={"": 7})).total == 12


@pytest.mark.parametrize("start_first", [False, True])
def test_a_transfer_is_awaited_in_the_next_trip(start_first):
    """Three trips, each waiting for what the trip before started; one more start before."""
    begin, end = start("s", operand="%block"), done("d", "block")
    steps = begin + end if start_first else end + begin
    loop = LOOP.format(steps=steps + work("w", 12), last="s", limit=3)
    played = play(start("first") + RUN_LOOP.replace("%p", "%first") + done("last", "loop"), loop)
    names = [(e.name, e.start, e.end) for e in played.transfers]
    # A trip takes 12, the first one after waiting for 10. The link carries one transfer at a time.
    assert names == [("first", 0, 10), ("s", 10, 20), ("s", 22, 32), ("s", 34, 44)]
    assert played.total == 10 + 3 * 12
    assert played.exposed == 10
    assert played.sent_bytes == 40


BRANCHES = "".join(
    f"%{name} ({name}.p: s8[10]) -> s8[2,1] {{\n  %{name}.p = s8[10] parameter(0)\n"
    f"  %{name}.x = s8[2,5] bitcast(%{name}.p)\n  %{name}.y = s8[5,1] constant({{...}})\n"
    + "  ROOT" + work(f"{name}.w", cycles, f"%{name}.x", f"%{name}.y")[1:] + "}\n\n"
    for name, cycles in (("short", 3), ("long", 8))
)  # fmt: skip
# Scalars that devices differ in, or not: half of the index, a remainder that is 0, constants.
INDEX = """
  %id = u32[] partition-id()
  %one = u32[] constant(1)
  %half = u32[] shift-right-logical(%id, %one)
  %rest = u32[] remainder(%id, %one)
  %zero = u32[] constant(0)
  %minus = s32[] constant(-1)
  %three = s32[] constant(3)
"""


@pytest.mark.parametrize(
    ("predicate", "runs"),
    [
        ("%which = pred[] constant(true)", "short"),
        ("%which = pred[] constant(false)", "long"),
        ("%which = pred[] compare(%half, %zero), direction=GE", "short"),  # on all devices
        ("%which = pred[] compare(%rest, %zero), direction=NE", "long"),  # on none
        ("%which = pred[] compare(%half, %zero), direction=EQ", "long"),  # on two of four
        ("%which = pred[] compare(%p, %zero), direction=EQ", "long"),  # as data say
    ],
)
def test_the_branch_that_all_devices_run(predicate, runs):
    """Where they differ, or data decide, the longer one."""
    played = play(
        f"{INDEX}  {predicate}\n  %c = s8[2,1] conditional(%which, %p, %p), "
        "true_computation=%short, false_computation=%long\n",
        BRANCHES,
    )
    seconds = {"short": 3, "long": 8}[runs]
    (matmul,) = (e for e in played.events if e.is_matmul)
    assert (matmul.name, matmul.seconds) == (f"{runs}.w", pytest.approx(seconds))


@pytest.mark.parametrize(
    ("index", "runs"), [("zero", "short"), ("three", "long"), ("minus", "long")]
)
def test_a_branch_by_its_number(index, runs):
    """One that is out of range is the last."""
    played = play(
        f"{INDEX}  %c = s8[2,1] conditional(%{index}, %p, %p), "
        "branch_computations={%short, %long}\n",
        BRANCHES,
    )
    assert [e.name for e in played.events if e.is_matmul] == [f"{runs}.w"]


def test_a_call_runs_what_it_calls():
    called = (
        "%called (c.p: s8[2,5], c.q: s8[5,1]) -> s8[2,1] {\n  %c.p = s8[2,5] parameter(0)\n"
        "  %c.q = s8[5,1] parameter(1)\n  ROOT" + work("c.w", 6, "%c.p", "%c.q")[1:] + "}\n"
    )
    played = play("  %c = s8[2,1] call(%q, %r), to_apply=%called\n", called)
    assert (played.total, played.events[0].name) == (6, "c.w")


def test_a_synchronous_collective_lets_nothing_run_beside_it():
    played = play(
        work("w", 4)
        + f"  %s = s8[10] collective-permute(%p), source_target_pairs={FORWARD}\n"
        + work("v", 5)
    )
    (transfer,) = played.transfers
    assert (transfer.start, transfer.end, transfer.synchronous, transfer.covers) == (
        4,
        14,
        True,
        (),
    )
    assert (played.total, played.exposed, played.hidden_share) == (19, 10, 0)


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"])
def test_bytes_and_time_of_collectives(kind):
    """A line of four, whose ends have a link; nothing hops for free."""
    reduces = ", to_apply=%add" if "reduce" in kind else ""
    played = play(f"  %s = s8[10] {kind}(%p), replica_groups={{{{0,1,2,3}}}}{reduces}\n")
    seconds = {"all-gather": 40 * 3 / 4, "reduce-scatter": 10 * 3 / 4,
               "all-reduce": 2 * 10 * 3 / 4, "all-to-all": 4 * 10 / 4}[kind]  # fmt: skip
    sent = {"all-gather": 30, "reduce-scatter": 7.5, "all-reduce": 15, "all-to-all": 7.5}[kind]
    (transfer,) = played.transfers
    assert transfer.row == f"tp {kind}"
    assert transfer.bytes == played.sent_bytes == sent
    assert played.total == pytest.approx(seconds)


RAGGED = "ragged-all-to-all(%{0}, %{1}, %{2}, %{2}, %{2}, %{2}), replica_groups={{{{0,1,2,3}}}}"
ROWS = """  %x = s8[10,2] bitcast(%p)
  %over = s8[40,2] constant({...})
  %sizes = s32[4] constant({1,2,3,4})
"""


def test_a_ragged_all_to_all_sends_its_operand():
    """All 20 bytes, or as many rows as are assumed; where it writes is no matter."""
    ragged = ROWS + f"  %s = s8[40,2] {RAGGED.format('x', 'over', 'sizes')}\n"
    (transfer,) = play(ragged).transfers
    assert (transfer.row, transfer.bytes) == ("tp ragged-all-to-all", 20 * 3 / 4)
    assert (transfer.seconds, transfer.synchronous) == (4 * 20 / 4, True)
    (fewer,) = play(ragged, assumed=Assumptions(sent_rows=4)).transfers
    assert (fewer.bytes, fewer.seconds) == (8 * 3 / 4, 8)
    (more,) = play(ragged, assumed=Assumptions(sent_rows=40)).transfers
    assert more.bytes == transfer.bytes


SPARSE_CORE = (
    "%exchange (e.x: s8[10,2], e.over: s8[40,2], e.sizes: s32[4]) -> s8[40,2] {\n"
    "  %e.x = s8[10,2] parameter(0)\n  %e.over = s8[40,2] parameter(1)\n"
    "  %e.sizes = s32[4] parameter(2)\n"
    f"  ROOT %e.s = s8[40,2] {RAGGED.format('e.x', 'e.over', 'e.sizes')}\n}}\n"
)
THREAD = 'async_execution_thread="sparsecore"'
OPERANDS = "%x, %over, %sizes"


@pytest.mark.parametrize(
    "begin",
    [
        f"  %s = ((), (), (s32[])) call-start(), {THREAD}, to_apply=%exchange\n"
        f"  %u = ((s8[10,2]), s8[40,2]) call-update(%s, {OPERANDS})\n",
        f"  %u = ((s8[10,2]), s8[40,2]) call-start({OPERANDS}), {THREAD}, to_apply=%exchange\n",
        f"  %u = ((s8[10,2]), s8[40,2]) async-start({OPERANDS}), {THREAD}, calls=%exchange\n",
        f"  %s = ((s8[10,2]), s8[40,2]) async-start({OPERANDS}), {THREAD}, calls=%exchange\n"
        "  %u = ((s8[10,2]), s8[40,2]) async-update(%s)\n",
        f"  %u = ((s8[10,2]), s8[40,2]) {RAGGED.format('x', 'over', 'sizes')}\n".replace(
            "to-all(", "to-all-start("
        ),
    ],
    ids=["sparse core in two parts", "sparse core", "wrapped", "updated", "of its own"],
)
def test_an_asynchronous_ragged_all_to_all(begin):
    kind = next(
        k
        for k in ("call-update", "call", "async", "ragged-all-to-all")
        if f"{k}-" in begin or f"{k}(" in begin
    )
    end = f"  %d = s8[40,2] {kind.removesuffix('-update')}-done(%u)\n"
    played = play(ROWS + begin + work("w", 12) + end, SPARSE_CORE)
    (transfer,) = played.transfers
    assert (transfer.bytes, transfer.start, transfer.end) == (15, 0, 20)
    assert (transfer.synchronous, transfer.covers) == (False, ("w",))
    assert (played.total, played.exposed) == (20, 8)


def test_what_another_core_gathers_runs_beside_matmuls():
    """A transfer on its way is not taken for it."""
    gather = (
        "%gather (g.x: s8[10]) -> s8[10] {\n  %g.x = s8[10] parameter(0)\n"
        "  ROOT %g.y = s8[10] copy(%g.x)\n}\n"
    )
    begin = (
        f"  %b = ((), (), (s32[])) call-start(), {THREAD}, to_apply=%gather\n"
        "  %u = ((s8[10]), s8[10]) call-update(%b, %p)\n"
    )
    end = "  %c = s8[10] call-done(%u)\n"
    played = play(start("s") + begin + work("w", 2) + end + work("v", 2) + done("d", "s"), gather)
    copies = [(e.start, e.end) for e in played.events if e.kind == "copy"]
    assert copies == [(0, 2)]  # 10 bytes in and 10 out, at 10 a second
    (transfer,) = played.transfers
    assert (transfer.bytes, transfer.end, transfer.covers) == (10, 10, ("w", "v"))
    assert (played.total, played.exposed) == (10, 6)


LOOKUP = "%f.s = s8[2,10] gather(%f.p, %f.i), slice_sizes={1,10}"
ADDED = "%f.s = s8[90,10] scatter(%f.p, %f.i, %f.r), to_apply=%add"
PLACED = "%f.s = s8[90,10] dynamic-update-slice(%f.p, %f.r, %f.i)"


@pytest.mark.parametrize("opcode", ["call-update", "call-start", "async-start"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    ("made", "moved"),
    [
        (LOOKUP, 20 + 2 + 20),
        (ADDED, 20 + 2 + 2 * 20),  # what is added to is read
        (PLACED, 20 + 2 + 20),
        ("%f.s = s8[90,10] sort(%f.p), dimensions={0}, to_apply=%add", 900 + 900),
    ],
    ids=["lookup", "scatter", "update", "sort"],
)
def test_work_on_another_core_takes_what_it_moves(made, moved, depth, opcode):
    """Ten bytes a second, of a table of 900 bytes, in fusions and calls of calls."""
    operands = "(f.p: s8[90,10], f.i: s8[2], f.r: s8[2,10])"
    result = made.split()[2]
    names = "  %f.p = s8[90,10] parameter(0)\n  %f.i = s8[2] parameter(1)\n"
    names += "  %f.r = s8[2,10] parameter(2)\n"
    fused = f"%c0 {operands} -> {result} {{\n{names}{rooted(f'  {made}')}\n}}\n"
    for n in range(1, depth + 1):
        kind = "fusion" if n == 1 else "call-start"
        called = f"calls=%c{n - 1}" if n == 1 else f"to_apply=%c{n - 1}"
        inner = f"  %f.c = {result} {kind}(%f.p, %f.i, %f.r), {called}\n"
        if kind == "call-start":
            types = f"((s8[90,10], s8[2], s8[2,10]), {result}, u32[])"
            inner = inner.replace(f"= {result} ", f"= {types} ")
            inner += f"  %f.d = {result} call-done(%f.c)\n"
        fused += f"%c{n} {operands} -> {result} {{\n{names}{rooted(inner)}}}\n"
    given = "  %t = s8[90,10] constant({...})\n  %i = s8[2] constant({...})\n"
    given += "  %r = s8[2,10] constant({...})\n"
    types = f"((s8[90,10], s8[2], s8[2,10]), {result}"
    begin = f"  %b = ((), (), (s32[])) call-start(), {THREAD}, to_apply=%c{depth}\n"
    begin += f"  %u = {types}) call-update(%b, %t, %i, %r)\n"
    if opcode != "call-update":
        called = "to_apply" if opcode == "call-start" else "calls"
        begin = f"  %u = {types}, u32[]) {opcode}(%t, %i, %r), {called}=%c{depth}\n"
    end = f"  %d = {result} {opcode.partition('-')[0]}-done(%u)\n"
    played = play(given + begin + end, fused)
    (copied,) = [event for event in played.events if event.kind == "copy"]
    assert copied.seconds == pytest.approx(moved / 10)
    assert played.total == copied.end


KERNEL = (
    '  %k = s8[2,1] custom-call(%q, %r), custom_call_target="tpu_custom_call", '
    'backend_config={"custom_call_config":{"cost_estimate":{"flops":"40","bytes_accessed":"300"}}}\n'
)


def test_a_kernel_takes_what_it_estimates():
    """40 FLOPs at 2 a second in one byte a number, or 300 bytes at 10 or 100 a second."""
    (kernel,) = play(KERNEL).events
    assert (kernel.seconds, kernel.is_matmul) == (30, True)
    assert play(KERNEL, chip=replace(TORUS, hbm=100.0 / REACHED)).total == 20


def test_a_grouped_matmul_multiplies_shared_tiles_twice():
    """8 rows in tiles of 4, and two more visits: 16 rows; or 4 rows and the two visits."""
    grouped = (
        "  %visits = s32[4] constant({0,0,1,1})\n  %rows = s8[8,5] constant({...})\n"
        "  %groups = s8[3,5,1] constant({...})\n  %g = s8[8,1] custom-call(%visits, %rows, "
        '%groups), custom_call_target="tpu_custom_call", frontend_attributes={ragged_dot_tiling='
        '"4,5,1"}, backend_config={"cost_estimate":{"flops":"80","bytes_accessed":"8"}}\n'
    )
    assert play(grouped).total == 2 * 80 / 2
    assert play(grouped, assumed=Assumptions(grouped_rows=4)).total == (4 + 8) / 8 * 80 / 2
    assert play(grouped, assumed=Assumptions(grouped_rows=100)).total == 2 * 80 / 2


def test_copies_between_memories_are_no_transfers():
    copy = "  %cs = (s8[10]{0:S(1)}, s8[10], u32[]) copy-start(%p)\n"
    wait = "  %cd = s8[10] copy-done(%cs)\n"
    played = play(copy + wait + work("w", 2))
    assert (played.total, played.exposed, played.transfer) == (3, 0, 0)
    assert [(e.kind, e.row, e.end) for e in played.events] == [
        ("copy", "memory", 1),
        ("wait", "memory", 1),
        ("compute", "compute", 3),
    ]


def test_an_all_reduce_scatter_fusion_sends_what_a_reduce_scatter_does():
    fused = (
        "%all-reduce-scatter (f.p: s8[12]) -> s8[3] {\n  %f.p = s8[12] parameter(0)\n"
        "  %f.r = s8[12] all-reduce(%f.p), replica_groups={{0,1,2,3}}, to_apply=%add\n"
        "  ROOT %f.s = s8[3] slice(%f.r), slice={[0:3]}\n}\n"
    )
    played = play(
        "  %b = s8[12] bitcast(%p)\n"
        "  %s = s8[3] fusion(%b), kind=kCustom, calls=%all-reduce-scatter\n",
        fused,
    )
    (transfer,) = played.transfers
    assert (transfer.row, transfer.bytes, transfer.synchronous) == ("tp reduce-scatter", 9, True)
    assert played.total == 9


def test_a_gpus_transfers_take_turns_whichever_way_they_go():
    two = start("s") + start("t", BACKWARD) + done("d", "s") + done("e", "t")
    played = play(two, chip=SWITCH)
    assert [(e.start, e.end) for e in played.transfers] == [(0, 10), (10, 20)]
    assert (played.total, played.estimate) == (20, "roofline")


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("TRITON_ONE_SHOT", " (XLA's one-shot)"),
        ("TRITON_TWO_SHOT", " (XLA's two-shot)"),
        ("DEFAULT", ""),
    ],
)
def test_a_gpus_small_sums_are_fusions_that_are_started(strategy, said):
    """In kernels of XLA's own, or in NCCL's."""
    fused = (
        "%small (f.p: s8[10]) -> s8[10] {\n  %f.p = s8[10] parameter(0)\n"
        "  ROOT %f.r = s8[10] all-reduce(%f.p), replica_groups={{0,1,2,3}}, to_apply=%add, "
        f'backend_config={{"kernel_strategy":"KERNEL_STRATEGY_{strategy}"}}\n}}\n'
    )
    begin = "  %s = ((s8[10]), s8[10]) fusion-start(%p), kind=kCustom, calls=%small\n"
    end = "  %d = s8[10] fusion-done(%s)\n"
    played = play(begin + work("w", 1) + end, fused, chip=SWITCH)
    (transfer,) = played.transfers
    assert (transfer.row, transfer.bytes) == (f"tp{said} all-reduce", 15)
    assert (transfer.synchronous, transfer.covers) == (False, ("w",))
    assert played.total == transfer.end == 15


def test_a_gpu_takes_a_slice_of_a_stack_beside_what_computes():
    """Of a scan's weights it copies one layer a trip, and does not read them all."""
    fused = (
        "%cut (f.p: s8[10,60], f.i: s32[]) -> s8[1,60] {\n  %f.p = s8[10,60] parameter(0)\n"
        "  %f.i = s32[] parameter(1)\n  %zero = s32[] constant(0)\n"
        "  ROOT %f.r = s8[1,60] dynamic-slice(%f.p, %f.i, %zero), dynamic_slice_sizes={1,60}\n}\n"
    )
    stack = "  %w = s8[10,60] constant({...})\n  %i = s32[] constant(3)\n"
    begin = "  %s = ((s8[10,60], s32[]), s8[1,60], u32[]) fusion-start(%w, %i), calls=%cut\n"
    end = "  %d = s8[1,60] fusion-done(%s)\n"
    played = play(stack + begin + work("v", 1) + end, fused, chip=SWITCH)
    (copied,) = [event for event in played.events if event.kind == "copy"]
    assert copied.seconds == pytest.approx((60 + 60) / 10)  # read and written
    assert copied.covers == ("v",)


def test_a_gpus_start_may_be_synchronous():
    begin = start("s").rstrip() + ', backend_config={"is_sync":true}\n'
    played = play(begin + work("w", 1) + done("d", "s"), chip=SWITCH)
    (transfer,) = played.transfers
    assert (transfer.synchronous, transfer.covers) == (True, ())
    assert (played.exposed, played.transfer) == (10, 10)


def test_a_roofline_where_the_compiler_gives_no_cycles():
    """20 FLOPs at 4 a second in one byte a number; and 17 bytes at 10 or at 1 a second."""
    bare = "  %w = s8[2,1] fusion(%q, %r), kind=kOutput, calls=%product\n"
    assert play(bare, chip=SWITCH).total == UNALIGNED * 20 / 4  # rows of five bytes
    assert play(bare, chip=replace(SWITCH, hbm=1 / REACHED_BY_GPUS)).total == pytest.approx(17)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("used", "moved"),
    [
        ("%f.s = s8[10] dynamic-slice(%f.b, %f.i), dynamic_slice_sizes={10}", 10 + 10),
        ("%f.s = s8[10] gather(%f.b, %f.i), slice_sizes={10}", 10 + 10),
        (
            "%f.w = f32[90] convert(%f.b)\n"
            "  %f.s = f32[10] dynamic-slice(%f.w, %f.i), dynamic_slice_sizes={10}",
            40 + 10,
        ),
        ("%f.s = s8[10] add(%f.b, %f.b)", 10 + 90),
    ],
    ids=["slice", "gather", "wider slice", "whole"],
)
def test_of_what_is_sliced_only_the_slice_is_read(used, moved, depth):
    """Ten bytes a second; single numbers, as an index, are not in HBM. Fusions lie in fusions."""
    names = "(f.p: s8[9,10], f.i: s32[]) -> s8[10] {\n  %f.p = s8[9,10] parameter(0)\n"
    names += "  %f.i = s32[] parameter(1)\n"
    view = "%view (v: s8[9,10]) -> s8[90] {\n  %v = s8[9,10] parameter(0)\n"
    view += "  ROOT %v.b = s8[90] bitcast(%v)\n}\n"
    viewed = "%f.b = s8[90] fusion(%f.p), kind=kLoop, calls=%view"
    fused = view + "%cut1 " + names + rooted(f"  {viewed}\n  {used}\n") + "}\n"
    for outer in range(2, depth + 1):
        inner = f"fusion(%f.p, %f.i), kind=kLoop, calls=%cut{outer - 1}"
        fused += f"%cut{outer} {names}  ROOT %f.c = s8[10] {inner}\n}}\n"
    operands = "  %w = s8[9,10] constant({...})\n  %i = s32[] constant(3)\n"
    fusion = f"  %c = s8[10] fusion(%w, %i), kind=kLoop, calls=%cut{depth}\n"
    assert play(operands + fusion, fused, chip=SWITCH).total == pytest.approx(moved / 10)
    if used.startswith("%f.s = s8[10] dynamic-slice("):
        bare = "  %b = s8[90] bitcast(%w)\n  %c = s8[10] dynamic-slice(%b, %i)\n"
        assert play(operands + bare, chip=SWITCH).total == pytest.approx(moved / 10)


def test_of_buffers_that_are_updated_only_the_updates_are_written():
    """Ten bytes are read, and written into each of two buffers of 90, in fusions of fusions."""
    names = "(f.p: s8[90], f.s: s8[10], f.i: s32[]) -> s8[90] {\n  %f.p = s8[90] parameter(0)\n"
    names += "  %f.s = s8[10] parameter(1)\n  %f.i = s32[] parameter(2)\n"
    update = "ROOT %f.u = s8[90] dynamic-update-slice(%f.p, %f.s, %f.i)"
    both = names.replace("-> s8[90]", "-> (s8[90], s8[90])").replace("f.s:", "f.q: s8[90], f.s:")
    both = both.replace("parameter(2)", "parameter(3)").replace("parameter(1)", "parameter(2)")
    fused = f"%one {names}  {update}\n}}\n%two {both}  %f.q = s8[90] parameter(1)\n"
    for buffer in "pq":
        called = f"fusion(%f.{buffer}, %f.s, %f.i), kind=kLoop, calls=%one"
        fused += f"  %f.{buffer}u = s8[90] {called}\n"
    fused += "  ROOT %f.t = (s8[90], s8[90]) tuple(%f.pu, %f.qu)\n}\n"
    operands = "  %v = s8[90] constant({...})\n  %w = s8[90] constant({...})\n"
    operands += "  %s = s8[10] constant({...})\n  %i = s32[] constant(3)\n"
    fusion = "  %c = (s8[90], s8[90]) fusion(%v, %w, %s, %i), kind=kLoop, calls=%two\n"
    assert play(operands + fusion, fused, chip=SWITCH).total == pytest.approx((10 + 2 * 10) / 10)
    bare = "  %c = s8[90] dynamic-update-slice(%w, %s, %i)\n"
    assert play(operands + bare, chip=SWITCH).total == pytest.approx((10 + 10) / 10)
    added = "  %c = (s8[90], s8[90]) scatter(%v, %w, %i, %s, %s)\n"  # what is added to is read
    assert play(operands + added, chip=SWITCH).total == pytest.approx((2 * 10 + 2 * 2 * 10) / 10)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("buffer", "moved"),
    [
        ("f.z: s8[], ", 90 + 10 + 2 * 10),  # zeros that the fusion makes are written
        ("f.z: s8[90], ", 10 + 2 * 10),
    ],
    ids=["made", "given"],
)
def test_what_an_update_inside_of_a_fusion_writes(buffer, moved, depth):
    """Ten bytes a second; of two updates of one buffer both count."""
    kind = buffer.split()[1].rstrip(",")
    names = f"({buffer}f.r: s8[10], f.i: s32[]) -> s8[90] {{\n  %f.z = {kind} parameter(0)\n"
    names += "  %f.r = s8[10] parameter(1)\n  %f.i = s32[] parameter(2)\n"
    zeros = "  %f.p = s8[90] broadcast(%f.z), dimensions={}\n" if kind == "s8[]" else ""
    first = "%f.p" if zeros else "%f.z"
    updates = f"{zeros}  %f.u = s8[90] dynamic-update-slice({first}, %f.r, %f.i)\n"
    updates += "  %f.v = s8[90] dynamic-update-slice(%f.u, %f.r, %f.i)\n"
    fused = f"%c1 {names}{rooted(updates)}}}\n"
    if depth == 2:
        fused += f"%c2 {names}  ROOT %f.c = s8[90] fusion(%f.z, %f.r, %f.i), calls=%c1\n}}\n"
    given = f"  %z = {kind} constant({{...}})\n  %r = s8[10] constant({{...}})\n"
    given += "  %i = s32[] constant(3)\n"
    fusion = f"  %c = s8[90] fusion(%z, %r, %i), kind=kLoop, calls=%c{depth}\n"
    assert play(given + fusion, fused, chip=SWITCH).total == pytest.approx(moved / 10)


@pytest.mark.parametrize(
    ("alias", "moved"),
    [(", output_to_operand_aliasing={{}: (0, {})}", 10 + 10), ("", 90 + 90 + 10 + 10)],
    ids=["in place", "copied"],
)
def test_another_tiling_of_a_buffer_that_is_updated(alias, moved):
    """As TPU7x keeps what layers save: the buffer is not copied, though a copy is written."""
    fused = "%tiled (t.p: s8[90]) -> s8[90] {\n  %t.p = s8[90]{0:T(16)} parameter(0)\n"
    fused += "  ROOT %t.c = s8[90]{0:T(8)} copy(%t.p)\n}\n"
    fused += "%c1 (f.z: s8[90], f.r: s8[10], f.i: s32[]) -> s8[90] {\n"
    fused += "  %f.z = s8[90] parameter(0)\n  %f.r = s8[10] parameter(1)\n"
    fused += f"  %f.p = s8[90] fusion(%f.z), kind=kLoop{alias}, calls=%tiled\n"
    fused += "  %f.i = s32[] parameter(2)\n"
    fused += "  ROOT %f.u = s8[90] dynamic-update-slice(%f.p, %f.r, %f.i)\n}\n"
    operands = "  %z = s8[90] constant({...})\n  %r = s8[10] constant({...})\n"
    operands += "  %i = s32[] constant(3)\n"
    fusion = "  %c = s8[90] fusion(%z, %r, %i), kind=kLoop, calls=%c1\n"
    assert play(operands + fusion, fused, chip=SWITCH).total == pytest.approx(moved / 10)


def test_what_the_compiler_calls_a_prefetch_across_programs_is_waited_for():
    """As in six public measurements of single products."""
    copy = "  %cs = (s8[10]{0:S(1)}, s8[10], u32[]) copy-start(%p)"
    wait = "  %cd = s8[10]{0:S(1)} copy-done(%cs)\n"
    assert play(f"{copy}\n{wait}{work('w', 2)}").total == 3
    assert play(f"{copy}, cross_program_prefetch_index=0\n{wait}{work('w', 2)}").total == 3


def passed(cycles, dtype="bf16", places=("", "")):
    """Seconds of a sum of 400 numbers, in memories that HLO numbers."""
    mine, its = (f"{dtype}[400]{{0{place}}}" for place in places)
    entry = f"  %x = {mine} parameter(3)\n  %y = {its} add(%x, %x), backend_config="
    entry += f'{{"estimated_cycles":"{cycles}"}}\n'
    return play(entry).total


def test_a_pass_over_memory_takes_what_its_bytes_do(monkeypatch):
    """Three arrays: of 400 numbers each; the compiler's cycles are never exceeded."""
    monkeypatch.setattr("jaxpar.tools.timeline.player.FIRST_BYTE", 5.0)
    assert passed(900) == 240 + 5
    assert passed(900, "f32") == 480 + 5
    assert passed(900, "s8") == 120 + 5
    assert passed(243) == 243  # within what the first byte takes
    assert passed(200) == 240  # HBM is not faster
    assert passed(2000) == 2000 / 4  # of 16 bits a quarter, of 32 half of the cycles
    assert passed(2000, "f32") == 2000 / 2
    assert passed(200, places=("S(1)", "S(1)")) == 200  # VMEM is
    assert passed(900, places=("S(1)", "S(1)")) == 245  # and is no slower
    assert passed(70, places=("S(1)", "")) == 80  # the result alone


def test_numbers_that_are_taken_out_of_order_keep_their_cycles():
    entry = "  %x = bf16[400] parameter(3)\n  %y = bf16[400] sort(%x), "
    assert play(entry + 'backend_config={"estimated_cycles":"9000"}\n').total == 9000


def multiplied(cycles, result="bf16[512,200]", more="", chip=TORUS, dtype="bf16"):
    """Seconds of a product of 512 x 100 by 100 x 200, of tiles of 256 each way."""
    entry = f"  %x = {dtype}[512,100] parameter(3)\n  %y = {dtype}[100,200] parameter(4)\n"
    entry += f"  %z = {result} convolution(%x, %y), {more}dim_labels=bf_io->bf"
    entry += f', backend_config={{"estimated_cycles":"{cycles}"}}\n'
    return play(entry, chip=chip).total


def test_a_matmul_is_not_as_slow_as_the_compiler_says():
    """Where its tiles take so long; the compiler's cycles are never exceeded."""
    longest = SLOWEST * 2 * 512 * 256 * 256
    assert multiplied(10**9) == pytest.approx(longest + FIRST_BYTE)
    assert multiplied(10**7) == 10**7
    read = (512 * 100 + 100 * 200 + 512 * 200) * 2  # ten bytes a second
    fast = replace(TORUS, flops=1e9)
    assert multiplied(10**5, chip=fast) == pytest.approx(read / 10 + FIRST_BYTE)
    assert multiplied(10**3, chip=fast) == pytest.approx(read / 10)
    for dtype, result in (("s8", "s32"), ("f8e5m2", "bf16"), ("s4", "s32"), ("f32", "f32")):
        found = multiplied(10**9, f"{result}[512,200]", dtype=dtype)
        assert found == pytest.approx(longest + FIRST_BYTE)
    # Of these the FLOPs are not known.
    assert multiplied(10**9, more="operand_precision={highest,highest}, ") == 10**9
    assert multiplied(10**9, dtype="f32") == pytest.approx(longest + FIRST_BYTE)


def product(more="", dtype="bf16", columns=64):
    entry = f"  %x = {dtype}[64,64] parameter(3)\n  %y = {dtype}[64,{columns}] parameter(4)\n"
    entry += f"  %z = {dtype}[64,{columns}] dot(%x, %y), lhs_contracting_dims={{1}}, "
    return play(entry + f"rhs_contracting_dims={{0}}{more}\n", chip=SWITCH).total


def test_a_gpu_multiplies_slowly_what_its_tensor_cores_do_not_take():
    flops = 2 * 64 * 64 * 64 / 2
    assert product() == flops
    assert product(columns=63) == pytest.approx(UNALIGNED * flops * 63 / 64)
    assert product(dtype="f32") == 2 * flops
    assert product(", operand_precision={highest,highest}", "f32") == 16 * flops


def test_a_gpu_multiplies_single_numbers_in_a_loop_without_tensor_cores():
    fused = (
        "%one (f.x: bf16[64,64], f.y: bf16[64,64]) -> bf16[64,64] {\n"
        "  %f.x = bf16[64,64] parameter(0)\n  %f.y = bf16[64,64] parameter(1)\n"
        "  ROOT %f.z = bf16[64,64] dot(%f.x, %f.y), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={0}\n}\n"
    )
    operands = "  %x = bf16[64,64] constant({...})\n  %y = bf16[64,64] constant({...})\n"
    fast = replace(SWITCH, hbm=1e9)
    for kind, flops in (("kCustom", 2.0), ("kLoop", 2.0 / 16)):
        fusion = f"  %z = bf16[64,64] fusion(%x, %y), kind={kind}, calls=%one\n"
        played = play(operands + fusion, fused, chip=fast)
        assert played.total == pytest.approx(2 * 64**3 / flops)


def test_a_kernel_of_a_gpu_takes_a_while():
    fast = replace(SWITCH, hbm=1e12, flops=1e12)
    bare = "  %w = s8[2,1] fusion(%q, %r), kind=kOutput, calls=%product\n"
    assert play(bare, chip=fast).total == player.KERNEL
    assert play("  %w = s8[5,2] bitcast(%q)\n", chip=fast).total == 0


def test_a_transfer_that_nothing_waits_for_still_takes_its_time():
    played = play(start("s") + work("w", 3))
    assert (played.total, played.exposed, played.transfer) == (10, 0, 10)


def test_unknown_chips_are_refused_unless_given():
    text = "ENTRY %main (p: s8[]) -> s8[] {\n  ROOT %p = s8[] parameter(0)\n}\n"
    program = CompiledProgram(Target("x:4", LINE, None), text, Memory(0, 0, 0, 0, 0), 0.0, None)
    with pytest.raises(
        ValueError, match=r"timeline: no figures are known of 'TPU v5 lite' \(x:4\); choose"
    ):
        timeline(program)
    assert timeline(program, TORUS).total == 0
