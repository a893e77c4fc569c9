"""What is refused where arrays are placed, saved and read: before it is done, with path, remedy."""

import json
import re

import equinox
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from etils import epath
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from jaxpar import make_mesh
from jaxpar.layout import REPLICATED, LayoutError, LayoutMap, Padded


def laid(tree, rules=None, axes="tp=2"):
    mesh = make_mesh(axes, devices=jax.devices()[:2])
    return LayoutMap(rules or {}).layout(tree, mesh, strict=False)


def test_arrays_of_other_dtypes_are_not_placed(tmp_path):
    layout = laid({"w": jax.ShapeDtypeStruct((4,), "bfloat16")})
    text = r"'w' is float32\[4\], and bfloat16\[4\] in the layout; cast it, or make the layout"
    with pytest.raises(LayoutError, match=r"Layout\.place: a problem:\n  " + text):
        layout.place({"w": np.ones(4, "f")})
    with pytest.raises(LayoutError, match=r"Layout\.init: a problem:\n  " + text):
        layout.init(lambda: {"w": jnp.ones(4)})
    with pytest.raises(LayoutError, match=r"Layout\.save: a problem:\n  " + text):
        layout.save(tmp_path / "one", {"w": jnp.ones(4)})
    assert not list(tmp_path.iterdir())
    assert layout.unpad({"w": jnp.ones(4)})["w"].dtype == jnp.float32  # gradients may be wider


def test_whole_numbers_of_64_bits_must_fit():
    layout = laid({"step": np.int64(3), "count": 0})
    assert layout["step"].dtype == jnp.int32
    placed = layout.place({"step": np.int64(5), "count": 2**31 - 1})
    assert (placed["step"], placed["count"]) == (5, 2**31 - 1)
    text = "'step' is int64 and has 1099511627776, which is no int32; set jax_enable_x64, or give"
    with pytest.raises(ValueError, match=text):
        layout.place({"step": np.int64(2**40), "count": 1})
    with pytest.raises(LayoutError, match=r"'count' is float32\[\], and int32\[\] in the layout"):
        layout.place({"step": np.int64(2), "count": 1.5})
    with pytest.raises(
        TypeError, match=r"'names' is an array of dtype <U1 .ndarray., which no array"
    ):
        laid({"names": np.array(["a", "b"])})


def test_nothing_is_written_where_something_can_not_be(tmp_path):
    layout = laid({"w": jnp.ones(4), "v": jnp.ones(4)})
    placed = layout.place({"w": np.ones(4, "f"), "v": np.ones(4, "f")})
    donated = layout.place({"w": np.ones(4, "f"), "v": np.ones(4, "f")})
    donated["v"].delete()
    folder = tmp_path / "one"
    for params, text in [
        (
            {**placed, "w": np.ones(4, "f")},
            "'w' is a ndarray outside of the mesh; save what `Layout.place`",
        ),
        (donated, "'v' has been donated or deleted; save the array that took its place"),
        ({"w": placed["w"]}, "'v' is missing; give all arrays of the layout"),
    ]:
        with pytest.raises(LayoutError, match=text):
            layout.save(folder, params)
    with pytest.raises(LayoutError, match=r"'w' is traced; call it outside of jax\.jit"):
        jax.jit(lambda w: layout.save(folder, {**placed, "w": w}))(placed["w"])
    odd = laid({"\ud800": jnp.ones(4)})
    with pytest.raises(LayoutError, match="has a name that is no Unicode text; rename it"):
        odd.save(folder, odd.place({"\ud800": jnp.ones(4)}))
    assert not list(tmp_path.iterdir())


def test_folders(tmp_path):
    layout, folder = laid({"w": jnp.ones(4)}), tmp_path / "one"
    placed = layout.place({"w": np.ones(4, "f")})
    left = tmp_path / "one.orbax-checkpoint-tmp"
    left.mkdir()
    (left / "some").write_text("")
    with pytest.raises(
        ValueError, match="give the one that `save` wrote; a save into it was interr"
    ):
        layout.restore(folder)
    layout.save(folder, placed)
    assert list(tmp_path.iterdir()) == [folder]
    with pytest.raises(ValueError, match=r"one exists already; give a folder that does not"):
        layout.save(folder, placed)
    with pytest.raises(
        ValueError, match=r"there is no checkpoint in .*; give a folder that `save`"
    ):
        layout.restore(folder / "d")
    np.testing.assert_array_equal(layout.restore(folder)["w"], placed["w"])
    store = epath.testing.mock_epath(exists=lambda *_: True)
    with store, pytest.raises(ValueError, match="one exists already; give a folder"):
        layout.save("gs://bucket/one", placed)


def test_of_nested_dicts_that_orbax_wrote(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "one", {"a": {"w": jnp.arange(4.0)}, "b": [jnp.arange(2)]})
        checkpointer.save(tmp_path / "more", {"w": jnp.arange(4.0), "text": "a", "step": 3})
    layout = laid({"a": {"w": jnp.ones(4)}, "b": [jnp.arange(2)]}, {"a/w": ("tp",)})
    found = layout.restore(tmp_path / "one")
    np.testing.assert_array_equal(found["a"]["w"], np.arange(4.0))
    np.testing.assert_array_equal(found["b"][0], [0, 1])
    tree = {"w": jnp.ones(4), "text": "b", "step": 1}
    text = r"'step' is int64\[\] in .*, and int32\[\] here; set jax_enable_x64, make the layout"
    with pytest.raises(LayoutError, match=text):
        laid(tree).restore(tmp_path / "more")
    with jax.enable_x64(True):
        found = laid(tree, {"w": ("tp",)}).restore(tmp_path / "more")
    assert (found["step"].item(), found["text"]) == (3, "b")
    np.testing.assert_array_equal(found["w"], np.arange(4.0))


@pytest.mark.parametrize("tree", [{}, {"f": jax.nn.relu, "n": None}])
def test_of_no_arrays(tmp_path, tree):
    layout = laid(tree)
    layout.save(tmp_path / "one", layout.place(tree))
    assert layout.restore(tmp_path / "one") == tree
    with pytest.raises(LayoutError, match="'w' is not in checkpoint"):
        laid({"w": jnp.ones(4)}).restore(tmp_path / "one")


def test_models_with_functions_are_made_and_restored(tmp_path):
    def make(key):
        return equinox.nn.MLP(8, 8, 8, 1, key=key), key, jnp.zeros((0, 3))

    layout = laid(equinox.filter_eval_shape(make, jax.random.key(0)), {"0/.*weight": ("tp",)})
    made = layout.init(make, jax.random.key(1))
    layout.save(tmp_path / "one", made)
    back, expected = layout.restore(tmp_path / "one"), make(jax.random.key(1))
    for found in (made, back, layout.under("0").place(expected[0])):
        model = found[0] if isinstance(found, tuple) else found
        np.testing.assert_allclose(model(jnp.ones(8)), expected[0](jnp.ones(8)), rtol=1e-5)
    assert jax.random.key_data(back[1]).tolist() == jax.random.key_data(expected[1]).tolist()


def test_keys_are_padded_and_counted():
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
    layout = laid({"k": keys}, {"k": (Padded("tp"),)})
    assert layout["k"].bytes_per_device == 2 * 16
    placed = layout.place({"k": keys})
    assert placed["k"].shape == (4,)
    padded = layout.pad({"k": keys})["k"]
    for found in (
        placed["k"][:3],
        padded[:3],
        layout.gather(placed)["k"],
        layout.unpad(placed)["k"],
    ):
        np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))


def test_keys_with_slashes_have_parts():
    layout = laid({"mlp/~/linear": {"w": jnp.ones(8)}, "mlp": {"w": jnp.ones(4), "b": None}})
    assert {path: a.shape for path, a in layout.under("mlp/~/linear").items()} == {"w": (8,)}
    assert layout.under("mlp")["w"].shape == (4,)
    with pytest.raises(KeyError, match="'mlp/~/x' has no part '~', but 'b', 'w'"):
        layout.under("mlp/~/x")
    twice = laid({"a/b": {"x": jnp.ones(2)}, "a": {"b": {"y": jnp.ones(2)}}})
    with pytest.raises(KeyError, match="'a/b' is the path of 2 parts; rename one"):
        twice.under("a/b")


def test_every_dtype_of_the_format(tmp_path):
    names = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16"]
    dtypes = [np.dtype(getattr(ml_dtypes, name)) for name in names]
    dtypes += [np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    dtypes += map(np.dtype, ["bool", "float16", "float32", "float64", "complex64"])
    rng = np.random.default_rng(0)
    tree = {dtype.name: rng.integers(0, 2, (4, 3)).astype(dtype) for dtype in dtypes}
    save_file(tree, tmp_path / "a.safetensors")
    layout = laid(tree, {".*": (Padded("tp"), Padded("tp"))[1:]})
    found = layout.read_safetensors(tmp_path)
    for name, x in tree.items():
        assert found[name].dtype == jnp.asarray(x).dtype
        np.testing.assert_array_equal(np.asarray(found[name]).astype("D"), x.astype("D"))


def written(path, header, data=b""):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_damaged_files_are_named(tmp_path):
    layout, path = laid({"w": jnp.ones(4)}), tmp_path / "a.safetensors"
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    for header, data, why in [
        ({"w": entry}, bytes(8), r"'w' float32\[4\] ends at byte 16 of 8"),
        ({"w": {**entry, "shape": [5]}}, bytes(16), r"'w' float32\[5\] has 16 bytes"),
        (b"{", b"", "Expecting property name"),
        ({"w": {"dtype": "F32"}}, b"", "'shape'"),
        ({"w": {**entry, "shape": [-2, -2]}}, bytes(16), r"'w' has shape \[-2, -2\] and bytes"),
        ({"w": {**entry, "shape": [4.5]}}, bytes(16), r"'w' has shape \[4.5\] and bytes"),
        ({"w": entry, "v": entry}, bytes(16), "a tensor ends at byte 16, and the next begins at 0"),
        ({"w": {**entry, "data_offsets": [4, 20]}}, bytes(20), "ends at byte 0, and the next"),
        ({"w": entry}, bytes(17), "ends at byte 16, and the next begins at 17"),
        (b'{"w": 1, "w": 2}', b"", "its header has a name twice"),
        (b"[" * 100_000, b"", "recursion"),
    ]:
        written(path, header, data)
        with pytest.raises(
            ValueError, match=f"a.safetensors is no complete safetensors file .*{why}"
        ):
            layout.read_safetensors(path)
    path.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=r"its header ends at byte \d+ of 42.; copy or download"):
        layout.read_safetensors(path)
    packed = {"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    written(path, packed, bytes(2))
    with pytest.raises(
        LayoutError, match=r"'w' is F4\[4\] in .*; unpack it first: numbers of 4 and"
    ):
        layout.read_safetensors(path)
    with pytest.raises(
        ValueError, match=r"there is no file .*b.safetensors; give safetensors files"
    ):
        layout.read_safetensors(tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=r"files is \[\]; name files, or folders"):
        layout.read_safetensors([])
    for files in (None, 3, [3], b"a"):
        with pytest.raises(
            TypeError, match=f"files must be a path, or several, got {re.escape(repr(files))}"
        ):
            layout.read_safetensors(files)


class OtherPath:
    """A path of another kind than pathlib's."""

    def __init__(self, folder):
        self.folder = folder

    def __fspath__(self):
        return f"{self.folder}/1.safetensors"


def test_indices_say_which_files(tmp_path):
    layout = laid({"w": jnp.ones(4), "v": jnp.ones(4)})
    one, two = {"w": np.full(4, 1, "f")}, {"v": np.full(4, 2, "f")}
    save_file(one, tmp_path / "1.safetensors")
    save_file(two, tmp_path / "2.safetensors")
    save_file({**one, **two}, tmp_path / "all.safetensors")
    with pytest.raises(ValueError, match=r"tensor 'v' is in both .*2\.safetensors and .*all\.safe"):
        layout.read_safetensors(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "1.safetensors", "v": "2.safetensors"}}))
    for files in (tmp_path, index, [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]):
        found = layout.read_safetensors(files)
        assert (found["w"][0], found["v"][0]) == (1, 2)
    found = laid({"w": jnp.ones(4)}).read_safetensors([OtherPath(tmp_path), OtherPath(tmp_path)])
    assert found["w"][0] == 1
    save_file({**one, **two, "w": two["v"]}, tmp_path / "2.safetensors")  # a copy that is no more
    assert layout.read_safetensors(tmp_path)["w"][0] == 1
    index.write_text(json.dumps({"weight_map": {"v": "1.safetensors", "w": "1.safetensors"}}))
    text = r"the index of .*index\.json says that 'v' is in .*1\.safetensors, which has no such"
    with pytest.raises(ValueError, match=text):
        layout.read_safetensors(index)
    (tmp_path / "other.safetensors.index.fp16.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has 2 indices, model.*, other.*; give one"):
        layout.read_safetensors(tmp_path)
    with pytest.raises(ValueError, match=r"other.* is no index of safetensors files: KeyError"):
        layout.read_safetensors(tmp_path / "other.safetensors.index.fp16.json")


def test_names_and_patterns_are_checked(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"w": np.arange(12.0, dtype="f").reshape(3, 4), "b": np.ones(3, "f")}, path)
    layout = laid({"w": jnp.ones((4, 3)), "b": jnp.ones(3)}, {"w": P("tp"), "b": REPLICATED})
    for said, error, text in [
        (
            {"transposed": "ww"},
            ValueError,
            "transposed='ww' matches no path; it must match a full",
        ),
        ({"transposed": {"w": (1, 0), ".": (0,)}}, ValueError, "'w' is matched by two patterns of"),
        (
            {"transposed": ".*"},
            ValueError,
            "exchanges the last two of the axes of 'b', whose tensors",
        ),
        ({"transposed": {"w": (2, 1, 0)}}, ValueError, r"exchanges \(2, 1, 0\) of the axes of 'w'"),
        ({"transposed": "("}, ValueError, r"transposed='\(' is no regular expression: missing"),
        ({"transposed": ["w"]}, TypeError, r"transposed must be a pattern, got \['w'\]"),
        ({"transposed": {"w": "10"}}, TypeError, "transposed has '10' for 'w'; give the order of"),
        ({"names": {3: "w"}}, ValueError, "names has 3, which is no path of the layout"),
        ({"unused": 3}, TypeError, "unused must be a pattern, got 3"),
        ({"names": {"x": "w"}}, ValueError, "names has 'x', which is no path of the layout"),
        ({"names": {"w": 3}}, TypeError, "names has 3 for 'w'; give a name, or a list of names"),
        (
            {"names": {"w": [["w"], "w"]}},
            ValueError,
            r"names has a list of 2 parts for 'w', of sha",
        ),
        ({"names": {"w": []}}, ValueError, "names has a list of 0 parts for 'w', of shapes"),
        (
            {"names": {"w": ["w", "w"]}},
            LayoutError,
            r"'w' is float32\[2,3\] in .*name as many tenso",
        ),
    ]:
        with pytest.raises(error, match=text):
            layout.read_safetensors(path, **said)
    for order in ("w", {"w": (1, 0)}, {re.escape("w"): None}):
        found = layout.read_safetensors(path, transposed=order)["w"]
        np.testing.assert_array_equal(found, np.arange(12.0).reshape(3, 4).T)


def test_hints_are_looked_up_once_for_layers(tmp_path, monkeypatch):
    count, asked = 200, []
    tensors = {f"model.{i}.weight": np.ones(2, "f") for i in range(count)}
    save_file(tensors, tmp_path / "a.safetensors")
    layout = laid({"w": jnp.ones((count, 2))})
    monkeypatch.setattr("difflib.get_close_matches", lambda *args: asked.append(args) or [])
    names = [f"model.{i}.kernel" for i in range(count)]
    with pytest.raises(LayoutError, match=f"{2 * count} problems"):
        layout.read_safetensors(tmp_path, names={"w": names})
    assert [args[:2] for args in asked] == [("model.0.kernel", ["model.0.weight"])]
