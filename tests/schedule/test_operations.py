"""What instructions are, before there is a clock; and operations made by hand, played."""

from collections import Counter
from math import prod

import pytest
from jax.sharding import Mesh
from record import FOLDER, SIZE, TRIPS
from texts import rooted

from jaxpar.platforms.chips import REACHED
from jaxpar.schedule import Assumptions, Chip, target
from jaxpar.tools.program.costs import Demand, Matmul, Message
from jaxpar.tools.program.hlo import parse
from jaxpar.tools.program.operations import (
    Collective,
    Compute,
    Conditional,
    Copy,
    Done,
    Loop,
    Schedule,
    read,
)
from jaxpar.tools.timeline.links import ADDED, Links
from jaxpar.tools.timeline.per_device import Places
from jaxpar.tools.timeline.player import Player

# Two FLOPs a second, ten bytes a second in memory, and one over a link.
CHIP = Chip("test", flops=2.0, hbm=10.0 / REACHED, capacity=1e3, link=1.0, torus=True, latency=0.0)
ROW = [device for device in target("v5e:4x4").mesh.devices.flat if device.coords[1] == 0]
LINE = Mesh(sorted(ROW, key=lambda device: device.coords), ("tp",))
BLOCK = 2.0 * SIZE * SIZE / 4  # bytes of a quarter of an operand in bfloat16


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "HloModule nothing\n",
            "parse: the text has no ENTRY computation; pass compiled.as_text()",
        ),
        ("ENTRY %m (p: s8[]) -> s8[] {\n  ROOT %p = s8[]\n}\n", "parse: no opcode in the"),
        (
            "ENTRY %m (p: s8[]) -> s8[] {\n  %p = s8[] parameter(0)\n}\n",
            r"parse: the computation %m has no ROOT; pass compiled.as_text\(\)",
        ),
        (
            "ENTRY %m (p: s8[]) -> s8[] {\n  ROOT %a = s8[] negate(%p)\n}\n",
            "parse: %a uses %p, which is not defined; pass compiled.as_text\\(\\)",
        ),
        (
            "ENTRY %m (p: s8[]) -> s8[] {\n  %p = s8[] parameter(0)\n"
            "  ROOT %a = s8[] call(%p), to_apply=%gone\n}\n",
            "parse: %a calls %gone, which is not defined; pass compiled.as_text\\(\\)",
        ),
        (
            "ENTRY %m (p: s8[]) -> s8[] {\n  ROOT %p = s8[] parameter(0)\n",
            "parse: the computation %m does not end; pass",
        ),
        (
            "ENTRY %m (p: s8[]) -> s8[] {\n  ROOT %p = s8[] parameter(0), metadata={\n}\n}}\n",
            "parse: '}}' is no instruction; pass",
        ),
        (
            "ENTRY %m (p: s8[]) -> s8[] {\n  ROOT %p = s8[] parameter(0), metadata={\n",
            r"parse: the instruction '  ROOT %p = s8\[\] parameter.* does not end; pass",
        ),
    ],
)
def test_texts_that_are_no_modules(text, said):
    with pytest.raises(ValueError, match=said):
        parse(text)


def test_attributes_of_several_lines():
    """A kernel's metadata, as JAX has it printed; its words may have braces and quotes."""
    kernel = (
        '  %k = s8[8] custom-call(%p), custom_call_target="tpu_custom_call", '
        'frontend_attributes={kernel_metadata={\n"b":"}",\n"x":"{\\n \\"block\\": 128\\n"\n}}, '
        'metadata={op_name="jit(f)/kernel"}\n'
    )
    constant = "  %c = s8[2,2] constant({\n  {1, 2},\n  {3, 4}\n})\n"
    found = entry("  %p = s8[8] parameter(0)\n" + kernel + constant + "  %a = s8[8] add(%k, %p)\n")
    assert [*found] == ["p", "k", "c", "a"]
    assert found["k"].op == "jit(f)/kernel"
    assert found["a"].operands == (found["k"], found["p"])


def recorded(name):
    return read((FOLDER / "0.10.2" / f"{name}.hlo.txt").read_text())


def entry(instructions, computations=""):
    """The operations of an entry computation, by name."""
    text = (
        f"HloModule test, is_scheduled=true\n{computations}\nENTRY %main (p: s8[8]) -> s8[8] {{\n"
    )
    module = read(text + rooted(instructions) + "}\n")
    return {operation.name: operation for operation in module.entry.operations}


def kinds(schedule):
    return Counter(type(operation).__name__ for operation in schedule.operations)


def test_a_loop_has_its_trips_and_both_of_its_schedules():
    module = recorded("tpu-loop")
    (loop,) = (x for x in module.entry.operations if isinstance(x, Loop))
    condition, body = loop.runs
    assert loop.trips == TRIPS
    assert module.schedules == (condition, body, module.entry)
    assert kinds(body) == {"Free": 10, "Compute": 4, "Collective": 1, "Done": 1}
    (sent,) = (x for x in body.operations if isinstance(x, Collective))
    ring = ((0, 1), (1, 2), (2, 3), (3, 0))
    assert sent.message == Message("collective-permute", BLOCK, pairs=ring)
    assert (sent.has_done, sent.is_synchronous, sent.is_fused) == (True, False, False)
    (matmul,) = (x for x in body.operations if x.work.is_matmul)
    assert matmul.work.cycles == 5967  # as in the text


def test_a_fusion_is_a_start_a_matmul_or_a_done():
    """All have the same all-gather in them. Every matmul of the program has, but the last one."""
    operations = recorded("tpu-beside-matmuls").entry.operations
    fused = [x for x in operations if x.work.is_matmul or x.name.startswith("async-collective")]
    start, *matmuls, done, last = fused
    assert isinstance(start, Collective)
    assert start.message == Message("all-gather", BLOCK, groups=[[0, 1, 2, 3]])
    assert (start.has_done, start.is_fused) == (True, False)
    assert [type(x) for x in (*matmuls, last)] == [Compute] * 5
    assert isinstance(done, Done)
    assert done.pair == start.pair


def test_flops_and_bytes():
    found = entry(
        "  %x = s8[2,5] parameter(0)\n  %y = s8[5,1] parameter(1)\n  %w = f32[4,6,2] parameter(2)\n"
        "  %dot = s8[2,1] dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "  %sum = s8[2,5] add(%x, %x)\n"
        "  %tanh = s8[2,5] tanh(%x), backend_config={\"estimated_cycles\":\"70\"}\n"
        "  %two = f32[4,4] dot(%w, %w), lhs_contracting_dims={1,2}, rhs_contracting_dims={1,2}\n"
    )  # fmt: skip
    narrow = Matmul(20.0, 1.0, (1, 2, 1, 5), "s8xs8->s8", is_aligned=False)
    assert found["dot"].work == Demand(None, (narrow,), 17, elements=17, is_matmul=True)
    assert found["sum"].work == Demand(None, (), 30, elements=30)
    assert found["tanh"].work == Demand(70, (), 20, elements=20)
    assert found["two"].work.matmuls == (
        Matmul(2.0 * 4 * 4 * 6 * 2, 4.0, (1, 4, 4, 12), "f32xf32->f32", is_aligned=False),
    )
    assert found["x"].work == Demand()


def test_what_a_collective_sends_and_among_whom():
    found = entry(
        "  %p = s8[8] parameter(0)\n"
        "  %a = s8[8] all-reduce(%p), replica_groups={{0,1},{2,3}}, "
        'backend_config={"debug":"StrategyND{colors:2 phases:2"}\n'
        "  %b = s8[32] all-gather(%p), replica_groups={}, dimensions={0}\n"
        "  %s = (s8[8]{0:S(1)}, s8[8]) copy-start(%p)\n"  # into VMEM
        "  %c = s8[8] copy-done(%s)\n"
    )
    assert found["a"].message == Message(
        "all-reduce", 8.0, groups=[[0, 1], [2, 3]], ways=4, phases=2
    )
    assert found["b"].message == Message("all-gather", 8.0, groups=[])
    assert (type(found["s"]), found["s"].bytes) == (Copy, 8)
    assert (type(found["c"]), found["c"].pair) == (Done, found["s"].pair)


@pytest.mark.parametrize(
    ("said", "ways", "phases"),
    [
        ('"strategy":"StrategyRing{colors:1 phases:1 cores:{8}"', 2, 1),
        (r'"strategy":"\nUniDirection1DRingStrategy{colors:2 phases:1"', 2, 1),
        (r'"strategy":"\nUniDirectionNDRingStrategy{colors:6 phases:3"', 6, 3),
        (r'"strategy":"\nStrategyND{colors:2 phases:2"', 4, 2),
        ('"color_strategies":[{"phase_rings":[{"x":1}]},{"phase_rings":[{"y":1}]}]', 2, 1),
        ('"phase_rings":[{"x":1}], "use_n_dimension_strategy":true', 1, 2),
        ("", 2, 1),  # one dimension, both ways
    ],
)
def test_links_that_a_collective_uses_at_a_time(said: str, ways: int, phases: int):
    found = entry(
        "  %p = s8[8] parameter(0)\n"
        f"  %a = s8[8] all-reduce(%p), replica_groups={{}}, backend_config={{{said}}}\n"
    )
    message = found["a"].message
    assert (message.ways, message.phases) == (ways, phases)
    seconds = Links(LINE, CHIP).transfer(message, 1.0).route.seconds
    reached = ADDED if phases > 1 else 1.0
    # Those at the ends of a line have one, whatever the compiler says.
    assert seconds == pytest.approx(2 * 8 * 3 / 4 / CHIP.link / reached)


def test_all_devices_take_part_where_no_groups_are_named():
    links = Links(LINE, CHIP)
    named = links.transfer(Message("all-gather", 8.0, groups=[[0, 1, 2, 3]]), 1.0)
    unnamed = links.transfer(Message("all-gather", 8.0), 1.0)
    assert (unnamed.row, unnamed.sent) == (named.row, named.sent) == ("tp all-gather", 24.0)
    assert unnamed.route.seconds.tolist() == named.route.seconds.tolist() != []


def test_a_module_prints_a_line_an_operation():
    text = (FOLDER / "0.10.2" / "tpu-loop.hlo.txt").read_text()
    lines = repr(read(text)).splitlines()
    assert "main.4_spmd:" in lines
    assert "  Collective  collective-permute-start: collective-permute of 131072 bytes" in lines
    numbers = "6.71e+07 FLOPs, 917505 bytes, 5967 cycles"
    assert f"  Compute     convolution_add_fusion.2: matmul, {numbers}" in lines
    (loop,) = (line for line in lines if line.startswith("  Loop "))
    assert loop.endswith(f"trips: {TRIPS}")


def operation(kind, name, *operands, moved=0, **more):
    return kind(name, f"jit(f)/{name}", operands, Demand(moved=moved), **more)


def run(*operations):
    player = Player(Links(LINE, CHIP), Assumptions())
    Places(player, LINE.size, 1, lambda op: None).run(Schedule("main", operations))
    return player.finish(), player.now


def test_operations_are_played_without_a_text():
    """A transfer of 8 seconds, beside 3 seconds of computing; a copy of one second."""
    message = Message("collective-permute", 8.0, pairs=((0, 1), (1, 2)))
    ways = {"has_done": True, "is_synchronous": False, "is_fused": False}
    sent = operation(Collective, "s", message=message, pair="permute", **ways)
    copied = operation(Copy, "c", bytes=10, pair="copy")
    events, now = run(
        sent,
        operation(Compute, "w", moved=30),
        copied,
        operation(Done, "d", sent, pair="permute"),
        operation(Done, "e", copied, pair="copy"),
    )
    assert [(e.name, e.kind, e.row, e.start, e.end) for e in events] == [
        ("w", "compute", "compute", 0, 3),
        ("s", "transfer", "tp +1", 0, 8),
        ("c", "copy", "memory", 3, 4),
        ("s", "wait", "compute", 3, 8),
    ]
    assert now == 8


@pytest.mark.parametrize(("begun", "kinds"), [(True, ["compute"]), (False, ["transfer", "wait"])])
def test_a_fused_collective_goes_on_with_one_that_is_under_way(begun, kinds):
    message = Message("all-gather", 8.0)
    start = operation(Collective, "s", message=message, pair="fusion", has_done=True,
                      is_synchronous=False, is_fused=False)  # fmt: skip
    fused = operation(Collective, "f", start, moved=10, message=message, pair="fusion",
                      has_done=False, is_synchronous=True, is_fused=True)  # fmt: skip
    events, _ = run(*([start] if begun else []), fused)
    assert [e.kind for e in events if e.name == "f"] == kinds


def test_the_branch_that_computes_the_longest_is_taken():
    branches = (
        Schedule("short", (operation(Compute, "a", moved=10),)),
        Schedule("long", (operation(Compute, "b", moved=20), operation(Compute, "c", moved=20))),
        Schedule("middle", (operation(Compute, "d", moved=30),)),
    )
    events, now = run(operation(Conditional, "which", runs=branches))
    assert ([e.name for e in events], now) == (["b", "c"], 4)


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "said", "sizes"),
    [
        ("2,6,5", "5,7,1", "2,6,7", "window={size=1}, dim_labels=0bf_io0->0bf", (1, 12, 7, 5)),
        ("2,6,5", "2,6,7", "5,7,1", "window={size=2}, dim_labels=0fb_0io->bf0", (1, 5, 7, 12)),
        (  # two heads, of one operand
            "6,5,1",
            "2,7,5",
            "6,2,7",
            "window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=bf0_0oi->b0f",
            (1, 6, 14, 5),
        ),
        (  # a batch of four, and two heads of both
            "4,6,2,5",
            "4,7,2,5",
            "4,2,6,7",
            "window={size=4x2 stride=3x1 lhs_dilate=4x2}, dim_labels=0b1f_0o1i->01bf",
            (8, 6, 7, 5),
        ),
        ("9,5,1", "3,5,7", "7,7,1", "window={size=3}, dim_labels=0fb_0io->0fb", (1, 7, 7, 15)),
    ],
    ids=["rows", "contracted", "columns", "batches", "places"],
)
def test_a_product_as_a_convolution(lhs, rhs, out, said, sizes):
    """As the compiler of TPUs writes products of arrays of three dimensions and more."""
    found = entry(
        f"  %x = bf16[{lhs}] parameter(0)\n  %y = bf16[{rhs}] parameter(1)\n"
        f"  %z = bf16[{out}] convolution(%x, %y), {said}\n"
    )
    (matmul,) = found["z"].work.matmuls
    assert (matmul.sizes, matmul.flops) == (sizes, 2.0 * prod(sizes))


def test_a_product_of_two_vectors():
    found = entry(
        "  %p = f32[64] parameter(0)\n"
        "  %d = f32[] dot(%p, %p), lhs_contracting_dims={0}, rhs_contracting_dims={0}\n"
    )
    (product,) = found["d"].work.matmuls
    assert product.sizes == (1, 1, 1, 64)
    assert product.is_aligned
