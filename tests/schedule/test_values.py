"""Where values come from: through tuples, fusions, loops, branches, and what runs beside others."""

import pytest

from jaxpar.tools.layouts.owners import Owners
from jaxpar.tools.program.hlo import parse
from jaxpar.tools.program.values import Values, reached

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
NAMES = {"params['w']": "w", "params['v']": "v"}
PARAMETERS = """
  %w = f32[4,4] parameter(0), metadata={op_name="params[\\'w\\']"}
  %v = f32[4,4] parameter(1), metadata={op_name="params[\\'v\\']"}
  %x = f32[4,4] parameter(2), metadata={op_name="args[0]"}
"""
DIMS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
NO_WEIGHT = {(None, None): 1.0}
GROUPS = "replica_groups={{0,1}}"


def module(entry, computations="", results="f32[4,4]"):
    text = f"HloModule test, is_scheduled=true, num_partitions=2\n{ADD}{computations}\n"
    return f"{text}ENTRY %main (p: f32[4,4]) -> {results} {{{PARAMETERS}{entry}}}\n"


def causes(entry, computations="", results=(None,)):
    return Owners(module(entry, computations), NAMES, list(results))


def test_a_weight_that_is_gathered_after_it_was_moved():
    found = causes(f"""
  %half = f32[2,4] slice(%w), slice={{[0:2], [0:4]}}
  %narrow = bf16[2,4] convert(%half)
  %gathered = bf16[4,4] all-gather(%narrow), {GROUPS}, dimensions={{0}}
  ROOT %y = f32[4,4] dot(%x, %gathered), {DIMS}
""")
    assert found.of("gathered") == {("w", "the weight"): 1.0}
    assert found.of("y") == NO_WEIGHT == found.of("nothing")


def test_products_and_inputs():
    found = causes(f"""
  %all = f32[4,4] all-gather(%x), {GROUPS}, dimensions={{0}}
  %bent = f32[4,4] tanh(%all)
  %y = f32[4,4] dot(%bent, %w), {DIMS}
  %doubled = f32[4,4] add(%y, %y)
  %summed = f32[4,4] all-reduce(%doubled), {GROUPS}, to_apply=%add
  %z = f32[4,4] tanh(%summed)
  %product = f32[4,4] dot(%z, %v), {DIMS}
  %kept = f32[4,4] tanh(%product)
  ROOT %loss = f32[4,4] all-reduce(%kept), {GROUPS}, to_apply=%add
""")
    assert found.of("all") == {("w", "its input"): 1.0}
    assert found.of("summed") == {("w", "its product"): 1.0}
    assert found.of("loss") == NO_WEIGHT  # the sum of what is no product any more


def test_a_weight_that_is_gathered_with_its_input():
    found = causes(f"""
  %both = (f32[4,4], f32[4,4]) all-gather(%x, %w), {GROUPS}, dimensions={{0}}
  %input = f32[4,4] get-tuple-element(%both), index=0
  %weight = f32[4,4] get-tuple-element(%both), index=1
  ROOT %y = f32[4,4] dot(%input, %weight), {DIMS}
""")
    assert found.of("both") == {("w", "its input"): 0.5, ("w", "the weight"): 0.5}


def test_gradients_that_are_summed_together_have_shares_of_their_own():
    found = causes(
        f"""
  %dw = f32[4,4] dot(%x, %x), {DIMS}
  %dv = f32[4,4] multiply(%dw, %x)
  %more = f32[32] parameter(3)
  %both = (f32[4,4], f32[4,4], f32[32]) all-reduce(%dw, %dv, %more), {GROUPS}, to_apply=%add
  %first = f32[4,4] get-tuple-element(%both), index=0
  %second = f32[4,4] get-tuple-element(%both), index=1
  %norm = f32[] constant(2)
  %spread = f32[4,4] broadcast(%norm), dimensions={{}}
  %step = f32[4,4] divide(%first, %spread)
  %new = f32[4,4] subtract(%w, %step)
  ROOT %out = (f32[4,4], f32[4,4]) tuple(%new, %second)
""",
        results=["w", "v"],
    )
    assert found.of("both") == {
        ("w", "its gradient"): 0.25,
        ("v", "its gradient"): 0.25,
        (None, None): 0.5,
    }


LOOP = f"""
%condition (s: (s32[], f32[4,4], f32[4,4])) -> pred[] {{
  %s = (s32[], f32[4,4], f32[4,4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %most = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %most), direction=LT
}}

%body (t: (s32[], f32[4,4], f32[4,4])) -> (s32[], f32[4,4], f32[4,4]) {{
  %t = (s32[], f32[4,4], f32[4,4]) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  %carried = f32[4,4] get-tuple-element(%t), index=1
  %weight = f32[4,4] get-tuple-element(%t), index=2
  %whole = f32[4,4] all-gather(%weight), {GROUPS}, dimensions={{0}}
  %h = f32[4,4] dot(%carried, %whole), {DIMS}
  %added = f32[4,4] all-reduce(%h), {GROUPS}, to_apply=%add
  ROOT %u = (s32[], f32[4,4], f32[4,4]) tuple(%next, %added, %weight)
}}
"""


def test_loops_carry_weights_and_what_becomes_of_them():
    found = causes(
        """
  %zero = s32[] constant(0)
  %start = (s32[], f32[4,4], f32[4,4]) tuple(%zero, %x, %v)
  %loop = (s32[], f32[4,4], f32[4,4]) while(%start), condition=%condition, body=%body
  ROOT %y = f32[4,4] get-tuple-element(%loop), index=1
""",
        LOOP,
        results=["w"],
    )
    assert found.of("whole") == {("v", "the weight"): 1.0}
    # What the loop carries becomes w's new value.
    assert found.of("added") == {("w", "its gradient"): 1.0}


def test_branches_and_fusions():
    found = causes(
        f"""
  %which = s32[] constant(0)
  %taken = f32[4,4] conditional(%which, %w, %v), branch_computations={{%kept, %gathered}}
  %start = (f32[4,4], f32[8,4]) all-gather-start(%taken), {GROUPS}, dimensions={{0}}
  %done = f32[8,4] all-gather-done(%start)
  ROOT %y = f32[4,4] fusion(%x, %done), kind=kOutput, calls=%inside
""",
        f"""
%kept (a0: f32[4,4]) -> f32[4,4] {{
  ROOT %a0 = f32[4,4] parameter(0)
}}

%gathered (b0: f32[4,4]) -> f32[4,4] {{
  %b0 = f32[4,4] parameter(0)
  ROOT %b1 = f32[4,4] all-gather(%b0), {GROUPS}, dimensions={{0}}
}}

%inside (c0: f32[4,4], c1: f32[8,4]) -> f32[4,4] {{
  %c0 = f32[4,4] parameter(0)
  %c1 = f32[8,4] parameter(1)
  ROOT %c2 = f32[4,4] dot(%c0, %c1), {DIMS}
}}
""",
    )
    assert found.of("b1") == {("v", "the weight"): 1.0}
    assert found.of("start") == {("w", "the weight"): 0.5, ("v", "the weight"): 0.5}


@pytest.mark.parametrize("added", [True, False])
def test_a_rings_permutes(added):
    """A reduce-scatter's go from product to product, an all-gather's come from what is moved."""
    after = (
        "%other = f32[4,4] add(%moved, %product)"
        if added
        else f"%other = f32[4,4] dot(%moved, %v), {DIMS}"
    )
    found = causes(f"""
  %product = f32[4,4] dot(%x, %w), {DIMS}
  %send = (f32[4,4], f32[4,4]) collective-permute-start(%product), source_target_pairs={{{{0,1}}}}
  %moved = f32[4,4] collective-permute-done(%send)
  ROOT {after}
""")
    assert found.of("send") == ({("w", "its product"): 1.0} if added else {("v", "its input"): 1.0})


def test_values_are_followed_once():
    values = Values(parse(module("  ROOT %y = f32[4,4] add(%w, %w)\n")))
    (result,) = values.results()
    assert [v.instruction.name for v in reached([result], values.sources)] == ["y", "w"]
    assert values.users[values.value(values.instructions["w"])] == [result, result]
