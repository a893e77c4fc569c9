"""Checkpoints: no padding and no mesh in them, and each process reads its shards alone."""

import json
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh
from jaxpar.layout import REPLICATED, LayoutError, LayoutMap, Padded, Split

F32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
SHAPES = {
    "embedding": F32((10, 8)),
    "layers": [{"w": F32((8, 6)), "b": F32((6,))} for _ in range(2)],
    "count": jax.ShapeDtypeStruct((), jnp.int32),
    "half": jax.ShapeDtypeStruct((6, 4), jnp.bfloat16),
}
RULES = {
    "embedding": (Padded("tp"), "fsdp"),
    "layers/.*/w": ("fsdp", Padded("tp")),
    "layers/.*/b": Split("tp", 0),
    "count": REPLICATED,
    "half": (Padded("tp"),),
}
MESHES = {"fsdp=2,tp=4": 8, "fsdp=1,tp=8": 8, "fsdp=4,tp=2": 8, "fsdp=1,tp=3": 3, "fsdp=1,tp=1": 1}


def laid(axes, rules=RULES, shapes=SHAPES):
    mesh = make_mesh(axes, devices=jax.devices()[: MESHES[axes]])
    return LayoutMap(rules).layout(shapes, mesh)


def values():
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: np.asarray(10 * rng.normal(size=s.shape)).astype(s.dtype), SHAPES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "one"
    layout = laid("fsdp=2,tp=4")
    layout.save(folder, layout.place(values()))
    return folder


@pytest.mark.parametrize("axes", MESHES)
def test_onto_any_mesh(saved, axes):
    layout = laid(axes)
    params = layout.restore(saved)
    assert jax.tree.map(lambda x: x.sharding, params) == layout.shardings
    jax.tree.map(np.testing.assert_array_equal, layout.gather(params), values())


def test_into_other_containers(saved):
    shapes = {**SHAPES, "layers": dict(enumerate(SHAPES["layers"]))}
    layout = laid("fsdp=4,tp=2", shapes=shapes)
    found = layout.gather(layout.restore(saved))
    jax.tree.map(np.testing.assert_array_equal, found["layers"][1], values()["layers"][1])


def test_the_file_has_logical_shapes_and_no_mesh(saved):
    assert not (saved / "_sharding").exists()
    texts = [path.read_bytes() for path in Path(saved).rglob("*") if path.is_file()]
    assert not any(re.search(rb"fsdp|NamedSharding", text) for text in texts)
    metadata = json.loads((saved / "_METADATA").read_text())
    assert any("embedding" in key for key in metadata["tree_metadata"])


def test_another_model_is_refused(saved, tmp_path):
    shapes = {**SHAPES, "embedding": F32((11, 8)), "more": F32((8,)), "count": F32(())}
    shapes.pop("half")
    rules = {key: value for key, value in RULES.items() if key != "half"} | {"more": REPLICATED}
    layout = laid("fsdp=2,tp=4", rules, shapes)
    with pytest.raises(LayoutError, match=r"Layout\.restore: 4 problems") as found:
        layout.restore(saved)
    text = str(found.value)
    assert "'embedding' is float32[10,8] in checkpoint" in text
    assert "and float32[11,8] here" in text
    assert "'count' is int32[] in checkpoint" in text
    assert "'more' is not in checkpoint" in text
    assert "'half' of checkpoint" in text
    with pytest.raises(ValueError, match=r"Layout\.restore: there is no folder"):
        layout.restore(tmp_path / "none")


def test_checkpoints_in_folders_inside(saved, tmp_path):
    """As Orbax's managers write them, and its newer functions: the folder to give is named."""
    import orbax.checkpoint as ocp

    layout = LayoutMap({"w": ("tp",)}).layout({"w": F32((8,))}, make_mesh("tp=8"))
    w = layout.place({"w": np.arange(8, dtype="f")})
    with ocp.CheckpointManager(tmp_path / "manager") as manager:
        for step in (3, 7):
            manager.save(step, args=ocp.args.Composite(weights=ocp.args.StandardSave(w)))
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(
        tmp_path / "folder" / "state", args=ocp.args.PyTreeSave(w)
    )
    inside = (
        f"in {tmp_path}/manager itself, but in its '3/weights', '7/weights'; give one of them, "
    )
    for folder, text in {
        "folder": f"in {tmp_path}/folder itself, but in its 'state'; give {tmp_path}/folder/state",
        "manager/3": f"but in its 'weights'; give {tmp_path}/manager/3/weights",
        "manager": f"{inside}such as {tmp_path}/manager/7/weights",
    }.items():
        with pytest.raises(ValueError, match=re.escape(text)) as error:
            layout.restore(tmp_path / folder)
        said = Path(re.split("give |such as ", str(error.value))[-1])
        np.testing.assert_array_equal(layout.restore(said)["w"], np.arange(8))


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        (
            Path("gs://b/x"),
            "folder='gs:/b/x' has lost a slash in pathlib; give text, 'gs://bucket/f",
        ),
        (
            "http://b/x",
            "folder='http://b/x' is no path of this host; copy it to this host with `curl",
        ),
    ],
)
def test_folders_of_other_hosts(folder, text):
    layout = laid("fsdp=2,tp=4")
    for act in (layout.restore, lambda folder: layout.save(folder, layout.place(values()))):
        with pytest.raises(ValueError, match=re.escape(text)):
            act(folder)


def test_states_of_optimizers_too(tmp_path):
    import optax

    layout, optimizer = laid("fsdp=2,tp=4"), optax.adam(1e-2)
    params = layout.place(values())
    state = layout.like(jax.eval_shape(optimizer.init, params))
    made = jax.jit(optimizer.init, out_shardings=state.shardings)(params)
    state.save(tmp_path / "state", made)
    other = laid("fsdp=4,tp=2")
    shapes = jax.eval_shape(optimizer.init, other.shapes)
    back = other.like(shapes).restore(tmp_path / "state")
    assert jax.tree.structure(back) == jax.tree.structure(made)
    assert back[0].mu["embedding"].shape == (10, 8)


@pytest.fixture
def tensors(tmp_path):
    from safetensors.numpy import save_file

    found = {
        "model.embed": values()["embedding"],
        "count": values()["count"],
        "half": values()["half"],
    }
    for number, layer in enumerate(values()["layers"]):
        found[f"model.{number}.weight"] = np.ascontiguousarray(layer["w"].T)
        found[f"model.{number}.bias"] = layer["b"]
    names = sorted(found)
    save_file({name: found[name] for name in names[:3]}, tmp_path / "a.safetensors")
    save_file({name: found[name] for name in names[3:]}, tmp_path / "b.safetensors")
    return tmp_path


def name_there(path):
    found = re.fullmatch(r"layers/(\d+)/(w|b)", path)
    if found:
        return f"model.{found[1]}.{'weight' if found[2] == 'w' else 'bias'}"
    return {"embedding": "model.embed"}.get(path, path)


@pytest.mark.parametrize("axes", MESHES)
def test_safetensors_straight_into_shards(tensors, axes):
    layout = laid(axes)
    params = layout.read_safetensors(tensors, names=name_there, transposed=".*/w")
    assert jax.tree.map(lambda x: x.sharding, params) == layout.shardings
    assert params["half"].dtype == ml_dtypes.bfloat16
    jax.tree.map(np.testing.assert_array_equal, layout.gather(params), values())


def test_layers_of_a_file_are_stacked(tensors):
    shapes = {"w": F32((2, 8, 6)), "b": F32((2, 6))}
    layout = LayoutMap({"w": ("tp", None, "fsdp"), "b": (None, "fsdp")}).layout(
        shapes, make_mesh("fsdp=2,tp=2", devices=jax.devices()[:4])
    )
    names = {"w": ["model.0.weight", "model.1.weight"], "b": ["model.0.bias", "model.1.bias"]}
    one = {**names, "b": ["model.0.bias"]}
    with pytest.raises(LayoutError, match=r"'b' is float32\[1,6\] in .*, and float32\[2,6\] here"):
        layout.read_safetensors(tensors, names=one, transposed="w")
    params = layout.read_safetensors(
        tensors, names=names, transposed="w", unused="count|half|model.embed"
    )
    for number, layer in enumerate(values()["layers"]):
        np.testing.assert_array_equal(params["w"][number], layer["w"])
        np.testing.assert_array_equal(params["b"][number], layer["b"])


def test_tensors_that_are_not_there(tensors, tmp_path):
    layout = laid("fsdp=2,tp=4")
    with pytest.raises(ValueError, match=r"no tensor 'layers.0.b', for 'layers/0/b'"):
        layout.read_safetensors(tensors, names={"embedding": "model.embed"})
    with pytest.raises(
        LayoutError, match=r"'layers/0/w' is float32\[6,8\] in .*, and float32\[8,6"
    ):
        layout.read_safetensors(tensors, names=name_there)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no safetensors files in"):
        layout.read_safetensors(tmp_path / "empty")
    with pytest.raises(TypeError, match="names must be a function or a mapping of paths, got 3"):
        layout.read_safetensors(tensors, names=3)


def test_specs_are_as_given():
    assert laid("fsdp=2,tp=4").specs["layers"][0]["w"] == P("fsdp", "tp")
