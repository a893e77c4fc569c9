"""Loss and gradients on some meshes of 8 devices; `sweep.py` beside it does all.

Those of dp=2,fsdp=2,tp=2 are what the curve of `test_training.py` is made of.
"""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxpar.tools.cli.console import UsageError
from language_model.data import PADDING
from language_model.parallel import AXES, build_mesh, mesh_axes, pad_batch, padded_sizes
from language_model.tests.cases import (
    ONE_DEVICE,
    check_float32,
    check_float64,
    draw_weights,
    model,
    quick_experts,
)
from language_model.weights import count, initialise, lay_out


def test_equals_one_device():
    chosen = model(heads=4, kv_heads=4, tied=False, layers=1)
    with jax.enable_x64(True):
        check_float64("tp=2,fsdp=2,cp=2", chosen, mode="bidirectional", sequence=16)


def test_experts_equal_one_device():
    """By all-gathers; those of the pipeline below are sent their tokens."""
    chosen = model(experts=5, top_k=1, layers=1)
    with jax.enable_x64(True):
        check_float64("fsdp=2,ep=2,tp=2", chosen, dispatch="all_gather", mode="unidirectional")


@pytest.mark.parametrize(
    ("mesh", "sizes", "how"),
    [
        ("pp=2,tp=2,dp=2", {"layers": 4}, {"microbatches": 3}),
        (
            "pp=2,cp=2,tp=2",
            {"layers": 4, "tied": False},
            {"microbatches": 2, "virtual_stages": 2, "mode": "naive"},
        ),
        ("pp=2,fsdp=2,ep=2", {"experts": 5}, {"dispatch": "ragged"}),
    ],
)
def test_pipelines_equal_one_device(mesh, sizes, how, monkeypatch):
    quick_experts(monkeypatch)
    with jax.enable_x64(True):
        check_float64(mesh, model(**sizes), **how)


def test_float32_is_off_by_its_roundings():
    with jax.enable_x64(True):  # of the reference
        check_float32("fsdp=2,tp=2", model(dtype="float32", layers=1))


def test_every_mesh_starts_from_the_same_weights():
    chosen = model(tied=False, dtype="float32")
    starts = []
    for mesh in ("dp=1", "fsdp=2,tp=4"):
        layout = lay_out(chosen, build_mesh(mesh))
        starts.append(layout.gather(initialise(chosen, layout, 7)))
    jax.tree.map(np.testing.assert_array_equal, *starts)
    query = starts[0]["layers"]["query"]
    assert query.shape == (2, 16, 24)
    assert 0.015 < np.std(query) < 0.025
    assert np.all(starts[0]["final_norm"] == 1)


def test_padding():
    chosen = model(heads=3, kv_heads=1)
    layout = lay_out(chosen, build_mesh("fsdp=2,tp=4"))
    assert layout["embedding"].padded_shape == (24, 16)
    assert layout["layers/query"].padded_shape == (2, 16, 16)
    assert layout["layers/key"].padded_shape == layout["layers/key"].shape
    assert layout["layers/down"].padded_shape == (2, 16, 16)
    assert layout["layers/query"].logical_spec == P("pp", "fsdp", None)
    params = jax.tree.map(np.float32, draw_weights(chosen))
    jax.tree.map(np.testing.assert_array_equal, layout.unpad(layout.pad(params)), params)
    assert count(chosen) == sum(x.size for x in jax.tree.leaves(params))


def of_sizes(**sizes):
    sizes = ONE_DEVICE | sizes
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def test_experts_that_ep_does_not_divide():
    chosen = model(layers=3, hidden=5, experts=6)
    layout = lay_out(chosen, of_sizes(ep=4, fsdp=2, tp=2))
    router, up, gate, down = (layout[f"layers/{name}"] for name in ("router", "up", "gate", "down"))
    assert router.padded_shape == router.shape == (3, 16, 6)
    assert up.shape == gate.shape == (3, 6, 16, 5)
    assert up.padded_shape == gate.padded_shape == (3, 8, 16, 6)
    assert down.padded_shape == (3, 8, 6, 16)
    assert up.spec == P("pp", "ep", "fsdp", "tp")
    assert down.spec == P("pp", "ep", "tp", "fsdp")
    assert down.logical_spec == P("pp", None, None, "fsdp")


def test_a_width_that_fsdp_does_not_divide():
    message = (
        r"the mesh does not fit the model: .*'fsdp' \(3\) does not divide .* \('width'\): 16 ="
    )
    with pytest.raises(UsageError, match=message):
        lay_out(model(), of_sizes(fsdp=3))


@pytest.mark.parametrize(
    ("given", "padded"),
    [
        ((5, 13, 1, (1, 1, 1, 1, 1, 1)), (5, 13)),
        ((5, 13, 2, (1, 2, 2, 1, 1, 1)), (8, 13)),
        ((5, 13, 1, (1, 2, 1, 4, 1, 1)), (8, 13)),
        ((5, 13, 1, (1, 1, 1, 1, 2, 1)), (5, 16)),
        ((5, 13, 1, (1, 1, 1, 1, 2, 3)), (5, 24)),
        ((5, 13, 1, (1, 1, 1, 1, 1, 4)), (5, 16)),
        ((8, 16, 1, (1, 2, 2, 1, 2, 4)), (8, 16)),
        ((5, 13, 2, (3, 1, 1, 1, 1, 2)), (6, 18)),
    ],
)
def test_padded_batches(given, padded):
    batch, sequence, microbatches, sizes = given
    shape = padded_sizes(batch, sequence, microbatches, dict(zip(AXES, sizes, strict=True)))
    assert shape == padded
    tokens, labels = pad_batch((np.ones((batch, sequence), np.int32),) * 2, shape)
    assert tokens.shape == labels.shape == shape
    assert (labels == PADDING).sum() == tokens.size - batch * sequence


def test_meshes():
    assert mesh_axes("tp=2, dp=-1") == ONE_DEVICE | {"tp": 2, "dp": -1}
    assert dict(build_mesh("tp=2,dp=-1").shape) == ONE_DEVICE | {"tp": 2, "dp": 4}
    assert build_mesh("tp=2").size == 2  # of 8 devices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sp=2", "'sp=2' is not one of pp, dp, fsdp, ep, cp, tp, each once"),
        ("tp=2,tp=4", "'tp=4' is not one of"),
        ("tp", "'tp' is not one of"),
        ("dp=16", "--mesh dp=16 takes 16 devices, but there are 8; use --mesh dp=8"),
        ("dp=-1,tp=-1", "are -1; give the sizes of all of them but one"),
        ("dp=3,tp=-1", "take 3, which does not divide 8"),
    ],
)
def test_refuses_meshes(text, message):
    with pytest.raises(UsageError, match=message):
        build_mesh(text)
