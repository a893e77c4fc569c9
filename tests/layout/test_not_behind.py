"""No map that is shipped, taught or inferred is slower than a plain one without saying so.

Plain maps are those that anybody would try first: fully sharded over all axes, and whole on every
device. All are compiled for one described slice, each program once.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from notebooks import layouts

from jaxpar import make_mesh
from jaxpar.layout import (
    LayoutMap,
    data_parallel,
    fully_sharded,
    infer_layout,
    tensor_parallel,
)
from jaxpar.schedule import compile_for
from jaxpar.tools.layouts import explain_layout
from jaxpar.tools.layouts.layout_costs import FASTER

TARGET, MESH = "v5p:2x2x2", make_mesh("fsdp=2,tp=4")
PLAIN = ("fully sharded over all axes", "replicated")
NOTEBOOK = layouts(WORDS=64)
LOSS = NOTEBOOK["loss"]
BF16 = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
BLOCK = {"norm": BF16((64,)), "up": BF16((64, 256)), "down": BF16((256, 64))}
PARAMS = {"embedding": BF16((64, 64)), "blocks": [BLOCK]}
TOKENS = jax.ShapeDtypeStruct((16, 13), jnp.int32)


def maps():
    axes = NOTEBOOK["MESHES"]["fsdp=2,tp=4"]
    return {
        "shipped": fully_sharded(PARAMS, MESH, within=tensor_parallel(PARAMS, MESH)),
        "taught": LayoutMap(NOTEBOOK["RULES"], axes=axes, batch=P("fsdp")),
        "inferred": infer_layout(LOSS, PARAMS, TOKENS, MESH),
    }


MAPS = maps()


@pytest.fixture(scope="module")
def inferred():
    """The map for a target, and what was said: microseconds of each map that was compiled."""
    said = []
    rules = infer_layout(LOSS, PARAMS, TOKENS, MESH, target=TARGET, show=said.append)
    lines = [re.match(r"(.*): .* a device, a step takes (\S+) us", line) for line in said]
    times = {found[1]: found[2] for found in lines if found}
    return rules, times, [line for line in said if line.startswith("taken: ")]


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """What is said of a map; layouts and programs that are the same, once."""
    kept = partial(compile_for, cache=tmp_path_factory.mktemp("programs"))
    step = jax.value_and_grad(LOSS)
    known = {}

    def explanation(rules):
        layout = rules.layout(PARAMS, MESH)
        if layout not in known:
            known[layout] = layout.explain(step, TARGET, TOKENS, tries=1)
        return known[layout]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(explain_layout, "compile_for", kept)
        yield explanation


def test_the_map_for_a_target_is_the_fastest_of_them(inferred):
    rules, times, taken = inferred
    assert set(times) == {"this map", "without fully sharding", *PLAIN}
    best = min(times, key=lambda name: float(times[name]))
    assert best == "replicated"  # of so few numbers
    assert taken == [f"taken: {best}, the fastest that fits the memory of {TARGET}"]
    assert rules == data_parallel(PARAMS, MESH, axis=("fsdp", "tp"))


@pytest.mark.parametrize("name", MAPS)
def test_a_map_that_is_behind_plain_ones_is_said_to_be(name, inferred, explained):
    found, (_, times, _) = explained(MAPS[name]), inferred
    best = min([found.timeline.total, *(e.seconds_after for e in found.tried)])
    assert name != "inferred" or f"{found.timeline.total * 1e6:.4g}" == times["this map"]
    assert best > FASTER * found.timeline.total or "dimensions swapped:" in str(found)
    for plain in PLAIN:
        text = f"plainer and faster: {plain}, the step takes {times[plain]} us"
        assert (text in str(found)) == (float(times[plain]) < FASTER * best * 1e6)
    assert float(times[PLAIN[1]]) < FASTER * best * 1e6
