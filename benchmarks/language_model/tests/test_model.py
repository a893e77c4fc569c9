"""Loss and gradients on some meshes of 8 devices; `nox -s language_model_sweep` does all."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.cli._console import UsageError
from language_model.data import PADDING
from language_model.parallel import AXES, build_mesh, mesh_axes, pad_batch, padded_sizes
from language_model.tests.cases import ONE_DEVICE, check_float32, check_float64, draw_weights, model
from language_model.weights import count, initialise, pad, unpad, weights


@pytest.mark.parametrize(
    ("mesh", "sizes", "how"),
    [
        ("dp=2,fsdp=2,tp=2", {"heads": 3, "kv_heads": 1}, {"microbatches": 2}),
        ("tp=2,dp=2,cp=2", {"tied": False, "layers": 1}, {"mode": "bidirectional", "sequence": 16}),
        ("fsdp=2,cp=2", {"heads": 4, "kv_heads": 4, "layers": 1}, {"mode": "unidirectional"}),
    ],
)
def test_equals_one_device(mesh, sizes, how):
    with jax.enable_x64(True):
        check_float64(mesh, model(**sizes), **how)


@pytest.mark.parametrize(
    ("mesh", "sizes", "how"),
    [
        ("dp=2,ep=4", {"experts": 8}, {}),
        ("fsdp=2,ep=2,tp=2", {"experts": 5, "top_k": 1, "layers": 1}, {"dispatch": "all_gather"}),
    ],
)
def test_experts_equal_one_device(mesh, sizes, how):
    with jax.enable_x64(True):
        check_float64(mesh, model(**sizes), **how)


def test_float32_is_off_by_its_roundings():
    with jax.enable_x64(True):  # of the reference
        check_float32("fsdp=2,tp=2", model(dtype="float32", layers=1))


def test_every_mesh_starts_from_the_same_weights():
    chosen = model(tied=False, dtype="float32")
    starts = []
    for mesh in ("dp=1", "fsdp=2,tp=4"):
        built = build_mesh(mesh)
        table = weights(chosen, dict(built.shape))
        starts.append(jax.tree.map(unpad, table, initialise(chosen, built, 7)))
    jax.tree.map(np.testing.assert_array_equal, *starts)
    query = starts[0]["layers"]["query"]
    assert query.shape == (2, 16, 24)
    assert 0.015 < np.std(query) < 0.025
    assert np.all(starts[0]["final_norm"] == 1)


def test_padding():
    table = weights(model(heads=3, kv_heads=1), ONE_DEVICE | {"fsdp": 2, "tp": 4})
    assert table["embedding"].padded == (24, 16)
    assert table["layers"]["query"].padded == (2, 16, 16)
    assert table["layers"]["key"].padded == table["layers"]["key"].shape
    assert table["layers"]["down"].padded == (2, 16, 16)
    assert table["layers"]["query"].logical_spec == P(None, "fsdp", None)
    params = jax.tree.map(np.float32, draw_weights(model(heads=3, kv_heads=1)))
    padded = jax.tree.map(pad, table, params)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(unpad, table, padded), params)
    assert count(table) == sum(x.size for x in jax.tree.leaves(params))


def test_experts_that_ep_does_not_divide():
    chosen = model(layers=3, hidden=5, experts=6)
    of_layer = weights(chosen, ONE_DEVICE | {"ep": 4, "fsdp": 2, "tp": 2})["layers"]
    assert of_layer["router"].padded == of_layer["router"].shape == (3, 16, 6)
    assert of_layer["up"].shape == of_layer["gate"].shape == (3, 6, 16, 5)
    assert of_layer["up"].padded == of_layer["gate"].padded == (3, 8, 16, 6)
    assert of_layer["down"].padded == (3, 8, 6, 16)
    assert of_layer["up"].spec == P(None, "ep", "fsdp", "tp")
    assert of_layer["down"].spec == P(None, "ep", "tp", "fsdp")
    assert of_layer["down"].logical_spec == P(None, None, None, "fsdp")


def test_a_width_that_fsdp_does_not_divide():
    with pytest.raises(UsageError, match=r"fsdp=3 .* width 16, .* choose a width of 18"):
        weights(model(), dict.fromkeys(AXES, 1) | {"fsdp": 3})


@pytest.mark.parametrize(
    ("given", "padded"),
    [
        ((5, 13, 1, (1, 1, 1, 1, 1)), (5, 13)),
        ((5, 13, 2, (2, 2, 1, 1, 1)), (8, 13)),
        ((5, 13, 1, (2, 1, 4, 1, 1)), (8, 13)),
        ((5, 13, 1, (1, 1, 1, 2, 1)), (5, 16)),
        ((5, 13, 1, (1, 1, 1, 2, 3)), (5, 24)),
        ((5, 13, 1, (1, 1, 1, 1, 4)), (5, 16)),
        ((8, 16, 1, (2, 2, 1, 2, 4)), (8, 16)),
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
        ("pp=2", "'pp=2' is not one of dp, fsdp, ep, cp, tp, each once"),
        ("tp=2,tp=4", "'tp=4' is not one of"),
        ("tp", "'tp' is not one of"),
        ("dp=16", "dp=16 x .* = 16 devices, but there are 8; a size of -1"),
        ("dp=-1,tp=-1", "only one size may be -1"),
        ("dp=3,tp=-1", "take 3, which does not divide 8"),
    ],
)
def test_refuses_meshes(text, message):
    with pytest.raises(UsageError, match=message):
        build_mesh(text)
