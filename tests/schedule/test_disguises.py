"""Sums that are gathers or reduce-scatters in disguise, and sums that only look so."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from texts import rooted

from jaxpar.schedule import compile_for, explain, target
from jaxpar.tools.explain.disguises import Disguises
from jaxpar.tools.program.hlo import parse
from jaxpar.tools.program.values import Values

OPERATIONS = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%greater (c: f32[], d: f32[]) -> f32[] {
  %c = f32[] parameter(0)
  %d = f32[] parameter(1)
  ROOT %max = f32[] maximum(%c, %d)
}
"""
ALL = "replica_groups={{0,1,2,3}}"
PAIRS = "replica_groups={{0,1},{2,3}}"
APART = "replica_groups={{0,2},{1,3}}"
SUM = f"%s = bf16[16,8] all-reduce(%d), {ALL}, to_apply=%add"
START = """
  %x = bf16[4,8] parameter(0)
  %data = s32[] parameter(1)
  %me = u32[] partition-id()
  %zero = bf16[] constant(0)
  %none = s32[] constant(0)
  %rows = s32[] constant(4)
  %zeros = bf16[16,8] broadcast(%zero), dimensions={}
  %m = s32[] convert(%me)
  %at = s32[] multiply(%m, %rows)
"""
PLACED = "%d = bf16[16,8] dynamic-update-slice(%zeros, %x, %at, %none)"


def found(*lines, computations=""):
    """What the last all-reduce of a module of four devices really is."""
    entry = rooted(START + "".join(f"  {line}\n" for line in lines))
    text = f"HloModule test, is_scheduled=true, num_partitions=4\n{OPERATIONS}{computations}\n"
    hlo = parse(f"{text}ENTRY %main (x: bf16[4,8], data: s32[]) -> bf16[16,8] {{{entry}}}\n")
    everything = [i for c in hlo.computations.values() for i in c.instructions]
    (*_, sums) = [i for i in everything if i.opcode.startswith("all-reduce") and i.called]
    disguise = Disguises(Values(hlo)).of(sums)
    return disguise and (disguise.really, str(disguise.part.arrays[0]))


def scaled(how):
    return f"%at2 = s32[] {how}", PLACED.replace("%at,", "%at2,"), SUM


GATHERS = {
    "as it is": (PLACED, SUM),
    "of columns": (
        "%y = f32[16,2] constant(1)",
        "%columns = s32[] constant(2)",
        "%at2 = s32[] multiply(%m, %columns)",
        "%wide = f32[] constant(0)",
        "%empty = f32[16,8] broadcast(%wide), dimensions={}",
        "%d = f32[16,8] dynamic-update-slice(%empty, %y, %none, %at2)",
        f"%s = f32[16,8] all-reduce(%d), {ALL}, to_apply=%add",
    ),
    "converted and laid out anew": (
        PLACED,
        "%f = f32[16,8] convert(%d)",
        "%t = f32[8,16] transpose(%f), dimensions={1,0}",
        "%b = f32[128] bitcast(%t)",
        f"%s = f32[128] all-reduce(%b), {ALL}, to_apply=%add",
    ),
    "padded": (
        PLACED,
        "%p = bf16[24,8] pad(%d, %zero), padding=0_8x0_0",
        f"%s = bf16[24,8] all-reduce(%p), {ALL}, to_apply=%add",
    ),
    "by a start and a done": (
        PLACED,
        f"%b = bf16[16,8] all-reduce-start(%d), {ALL}, to_apply=%add",
        "%s = bf16[16,8] all-reduce-done(%b)",
    ),
    "among smaller sums": (
        PLACED,
        f"%b = (bf16[4,8], bf16[16,8]) all-reduce(%x, %d), {ALL}, to_apply=%add",
        "%s = bf16[16,8] get-tuple-element(%b), index=1",
    ),
    "over pairs": (
        "%two = s32[] constant(2)",
        *scaled("remainder(%m, %two)")[:1],
        "%at3 = s32[] multiply(%at2, %rows)",
        "%d = bf16[16,8] dynamic-update-slice(%zeros, %x, %at3, %none)",
        f"%s = bf16[16,8] all-reduce(%d), {PAIRS}, to_apply=%add",
    ),
    "in another order": scaled("subtract(%rows, %at)"),
    "where a table says": (
        "%table = s32[4] constant({8, 0, 12, 4})",
        "%entry = s32[1] dynamic-slice(%table, %m), dynamic_slice_sizes={1}",
        *scaled("reshape(%entry)"),
    ),
}
SUMS = {
    "of what is not placed": (f"%s = bf16[4,8] all-reduce(%x), {ALL}, to_apply=%add",),
    "at one place": (PLACED.replace("%at,", "%none,"), SUM),
    "where data say": (PLACED.replace("%at,", "%data,"), SUM),
    "where device and data say": scaled("add(%at, %data)"),
    "of parts that overlap": (PLACED.replace("%at,", "%m,"), SUM),
    "over the other axis": (
        # Devices 0 and 2 write the same rows: those are summed.
        "%two = s32[] constant(2)",
        "%side = s32[] remainder(%m, %two)",
        "%at2 = s32[] multiply(%side, %rows)",
        "%d = bf16[16,8] dynamic-update-slice(%zeros, %x, %at2, %none)",
        f"%s = bf16[16,8] all-reduce(%d), {APART}, to_apply=%add",
    ),
    "of what was something before": (
        "%one = bf16[] constant(1)",
        "%ones = bf16[16,8] broadcast(%one), dimensions={}",
        PLACED.replace("%zeros", "%ones"),
        SUM,
    ),
    "that is a maximum": (PLACED, SUM.replace("%add", "%greater")),
    "with something added": (
        PLACED,
        "%more = bf16[16,8] add(%d, %d)",
        SUM.replace("%d)", "%more)"),
    ),
    "padded with ones": (
        PLACED,
        "%one = bf16[] constant(1)",
        "%p = bf16[24,8] pad(%d, %one), padding=0_8x0_0",
        f"%s = bf16[24,8] all-reduce(%p), {ALL}, to_apply=%add",
    ),
}


@pytest.mark.parametrize("name", GATHERS)
def test_a_gather_in_disguise(name):
    part = "f32[16,2]" if name == "of columns" else "bf16[4,8]"
    assert found(*GATHERS[name]) == ("gather", part)


@pytest.mark.parametrize("name", SUMS)
def test_a_sum(name):
    assert found(*SUMS[name]) is None


def test_what_is_placed_in_a_fusion():
    fusion = """
%placing (z: bf16[16,8], y: bf16[4,8], n: s32[]) -> bf16[16,8] {
  %z = bf16[16,8] parameter(0)
  %y = bf16[4,8] parameter(1)
  %n = s32[] parameter(2)
  %o = s32[] constant(0)
  ROOT %u = bf16[16,8] dynamic-update-slice(%z, %y, %n, %o)
}
"""
    call = "%d = bf16[16,8] fusion(%zeros, %x, {}), kind=kLoop, calls=%placing"
    assert found(call.format("%at"), SUM, computations=fusion) == ("gather", "bf16[4,8]")
    assert found(call.format("%data"), SUM, computations=fusion) is None


def test_what_is_placed_in_a_loop():
    loop = f"""
%body (t: (s32[], s32[], bf16[4,8], bf16[16,8])) -> (s32[], s32[], bf16[4,8], bf16[16,8]) {{
  %t = (s32[], s32[], bf16[4,8], bf16[16,8]) parameter(0)
  %trip = s32[] get-tuple-element(%t), index=0
  %mine = s32[] get-tuple-element(%t), index=1
  %y = bf16[4,8] get-tuple-element(%t), index=2
  %o = s32[] constant(0)
  %i = s32[] constant(1)
  %next = s32[] add(%trip, %i)
  %n = bf16[] constant(0)
  %z = bf16[16,8] broadcast(%n), dimensions={{}}
  %u = bf16[16,8] dynamic-update-slice(%z, %y, AT, %o)
  %all = bf16[16,8] all-reduce(%u), {ALL}, to_apply=%add
  ROOT %r = (s32[], s32[], bf16[4,8], bf16[16,8]) tuple(%next, %mine, %y, %all)
}}

%more (v: (s32[], s32[], bf16[4,8], bf16[16,8])) -> pred[] {{
  %v = (s32[], s32[], bf16[4,8], bf16[16,8]) parameter(0)
  %at2 = s32[] get-tuple-element(%v), index=0
  %most = s32[] constant(3)
  ROOT %less = pred[] compare(%at2, %most), direction=LT
}}
"""
    lines = (
        "%state = (s32[], s32[], bf16[4,8], bf16[16,8]) tuple(%none, %at, %x, %zeros)",
        "%w = (s32[], s32[], bf16[4,8], bf16[16,8]) while(%state), condition=%more, body=%body",
        "%out = bf16[16,8] get-tuple-element(%w), index=3",
    )
    inside = found(*lines, computations=loop.replace("AT", "%mine"))
    assert inside == ("gather", "bf16[4,8]")
    assert found(*lines, computations=loop.replace("AT", "%trip")) is None


WHOLE = (
    "%big = bf16[16,8] broadcast(%zero), dimensions={}",
    "%one = bf16[] constant(1)",
    "%ones = bf16[16,8] broadcast(%one), dimensions={}",
    f"%s = bf16[16,8] all-reduce(%ones), {ALL}, to_apply=%add",
)


def kept(operand, at, name="%k"):
    sizes = "dynamic_slice_sizes={4,8}"
    return f"{name} = bf16[4,8] dynamic-slice({operand}, {at}, %none), {sizes}"


def test_a_reduce_scatter_in_disguise():
    assert found(*WHOLE, kept("%s", "%at")) == ("reduce-scatter", "bf16[4,8]")
    moved = ("%c = bf16[16,8] copy(%s)", "%b = bf16[16,8] bitcast(%c)")
    assert found(*WHOLE, *moved, kept("%b", "%at")) == ("reduce-scatter", "bf16[4,8]")


def test_sums_of_which_more_is_used():
    again = "%square = bf16[16,8] multiply(%s, %s)"
    assert found(*WHOLE, kept("%s", "%at"), again) is None
    assert found(*WHOLE, kept("%s", "%data")) is None
    assert found(*WHOLE, kept("%s", "%none")) is None
    assert found(*WHOLE, kept("%s", "%at"), "ROOT %c = bf16[16,8] copy(%s)") is None


def test_sums_of_two_arrays_on_another_core():
    """Each result goes through the start, the update and the done of the call."""
    both = "(bf16[16,8], bf16[8])"
    called = f"""
%on_sparse_core (p: bf16[16,8], q: bf16[8]) -> {both} {{
  %p = bf16[16,8] parameter(0)
  %q = bf16[8] parameter(1)
  ROOT %s = {both} all-reduce(%p, %q), {ALL}, to_apply=%add
}}
"""
    lines = (
        WHOLE[1],
        WHOLE[2],
        "%few = bf16[8] broadcast(%one), dimensions={}",
        "%start = ((), (), s32[1]) call-start(), to_apply=%on_sparse_core",
        f"%update = ({both}, {both}) call-update(%start, %ones, %few)",
        f"%done = {both} call-done(%update)",
        "%first = bf16[16,8] get-tuple-element(%done), index=0",
    )
    second = "%second = bf16[8] get-tuple-element(%done), index=1"
    sliced = kept("%first", "%at")
    assert found(*lines, sliced, computations=called) == ("reduce-scatter", "bf16[4,8]")
    used = "%twice = bf16[8] add(%second, %second)"  # of which nothing is asked
    assert found(*lines, second, used, sliced, computations=called) is not None
    whole = "%square = bf16[16,8] multiply(%first, %first)"
    assert found(*lines, sliced, whole, computations=called) is None


def test_the_compiler_s_gather_by_a_sum():
    chosen = target("v5p:4x4x4", "fsdp=64")
    x = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16, sharding=P("fsdp"))
    w = jax.ShapeDtypeStruct((2048, 4096), jnp.bfloat16, sharding=P("fsdp"))
    (finding, *_) = explain(compile_for(lambda x, w: x @ w, chosen, x, w), tries=0).findings
    assert (finding.of.collective, finding.cause) == ("all-reduce", "in disguise")
    assert "it is a gather in disguise" in finding.why
    assert "writes its bf16[32,4096] into zeros, and the full bf16[2048,4096]" in finding.why
    assert "twice the bytes" in finding.why
    assert "all_gather over b, then over a" in finding.edit
    assert "make_mesh('a=16,b=4')" in finding.edit
    assert finding.of.moved.startswith("bf16[32,4096] of each device, w; it is sharded")
