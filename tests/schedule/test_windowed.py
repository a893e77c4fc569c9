"""Matmuls that the partitioner cuts into pieces are found, and told from what is only laid out."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.schedule import compile_for, explain, target, timeline
from jaxpar.tools.explain.edits import Edits
from jaxpar.tools.explain.exposed import Exposures
from jaxpar.tools.explain.windowed import windowed_einsums


def multiplied(x, w):
    return x @ w


def sharded_weight(chip, spec):
    """Compiles a matmul whose weight is gathered, as by FSDP: in pieces, and whole."""
    chosen = target(chip, "fsdp=-1")
    x = jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16, sharding=P("fsdp"))
    w = jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16, sharding=spec)
    options = jaxpar.compiler_options(chosen)
    del options["xla_jf_spmd_threshold_for_windowed_einsum_mib"]
    cut = compile_for(multiplied, chosen, x, w, compiler_options=options)
    return cut, compile_for(multiplied, chosen, x, w)


def test_matmuls_that_the_partitioner_cut_are_a_cause_and_whole_ones_the_edit():
    cut, whole = sharded_weight("v6e:2x4", P(None, "fsdp"))
    found = explain(cut, tries=1)
    (finding,) = [one for one in found.findings if one.cause == "windowed einsums"]
    assert finding.of.line.number == multiplied.__code__.co_firstlineno + 1
    assert "xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000" in finding.edit
    assert finding.gain == pytest.approx(timeline(cut).total - timeline(whole).total, rel=0.1)
    assert finding.gain > 0.05 * found.timeline.total
    assert "collective-permute" not in {getattr(f.of, "collective", "") for f in found.findings}
    said = " ".join(found.text().split())
    assert "windowed einsums, most of it at test_windowed.py" in said
    (untried,) = [f for f in explain(cut, tries=0).findings if f.cause == "windowed einsums"]
    assert "jaxpar's all_gather_matmul" in untried.edit
    assert "windowed einsums" not in {f.cause for f in explain(whole, tries=0).findings}


def test_matmuls_that_do_well_in_pieces_are_no_finding():
    cut, whole = sharded_weight("v5p:2x2x2", P("fsdp"))
    found = explain(cut, tries=1)
    assert found.overheads[0].kind == "windowed einsums"
    assert {one.of.collective for one in found.findings} <= {"collective-permute"}
    (edit,) = Edits(whole).cut_matmuls()
    assert "compile without xla_jf_spmd_threshold_for_windowed_einsum_mib" in edit.text
    pieces = timeline(edit.compiled()).total
    assert pieces == timeline(cut).total < timeline(whole).total
    assert list(Edits(cut).cut_matmuls()) == []


@pytest.mark.parametrize("unroll", [1, 2])
def test_a_permute_that_lays_an_operand_out_anew_cuts_nothing(unroll):
    def step(x, w):
        return lax.scan(lambda x, w: (multiplied(x, w), None), x, w, unroll=unroll)[0]

    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=P("a"))
    w = jax.ShapeDtypeStruct((4, 4096, 4096), jnp.bfloat16, sharding=P(None, "a"))
    program = compile_for(step, target("v5p:2x2x1", "a=2,b=2"), x, w, compiler_options={})
    exposures = Exposures(program, timeline(program))
    assert "collective-permute" in {one.collective for one in exposures.all()}
    assert windowed_einsums(exposures).permutes == frozenset()
