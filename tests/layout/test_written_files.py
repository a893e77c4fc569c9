"""Safetensors files that a layout writes: what it reads back, and what others read in them."""

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpar import Quantized, make_mesh
from jaxpar.layout import REPLICATED, Interleaved, LayoutError, LayoutMap, Padded, Split

SHAPES = {
    "w": (8, 10),
    "stack": (4, 6, 8),
    "experts": (2, 4, 6, 5),
    "conv": (3, 2, 4),
    "bias": (10,),
    "count": (),
    "none": (0, 3),
}
NAMES = {
    "stack": [f"h.{i}.weight" for i in range(4)],
    "experts": [[f"h.{i}.e.{j}" for j in range(4)] for i in range(2)],
    "bias": "b",
}
ORDERS = {"w|stack|experts": None, "conv": (2, 1, 0)}
RULES = {
    "sharded": {"w": ("tp", "fsdp"), "stack": (None, "fsdp", "tp"), "experts": (None, "tp")},
    "padded": {"w": (None, Padded("tp")), "stack": (Padded(("fsdp", "tp")),), "bias": Split("tp")},
    "interleaved": {"stack": (Interleaved("fsdp", 2), None, "tp"), "conv": (None, "fsdp", "tp")},
}


def laid(arrays, rules, axes="fsdp=2,tp=4"):
    count = int(np.prod([int(part.split("=")[1]) for part in axes.split(",")]))
    rest = "|".join(
        re.escape(path) for path in arrays if not any(re.fullmatch(r, path) for r in rules)
    )
    mesh = make_mesh(axes, devices=jax.devices()[:count])
    return LayoutMap({**rules, **({rest: REPLICATED} if rest else {})}).layout(
        arrays, mesh, strict=False
    )


def numbers(dtype="float32"):
    rng = np.random.default_rng(0)
    return {path: (100 * rng.normal(size=shape)).astype(dtype) for path, shape in SHAPES.items()}


def in_file(arrays):
    """What others find in the file: each tensor by name."""
    there = {path: arrays[path] for path in ("count", "none")} | {"b": arrays["bias"]}
    there["w"], there["conv"] = arrays["w"].T, arrays["conv"].transpose(2, 1, 0)
    there |= {f"h.{i}.weight": arrays["stack"][i].T for i in range(4)}
    return there | {f"h.{i}.e.{j}": arrays["experts"][i, j].T for i in range(2) for j in range(4)}


def same_bits(left, right):
    assert left.keys() == right.keys()
    for name, x in left.items():
        assert (x.dtype, x.shape) == (right[name].dtype, right[name].shape), name
        assert x.tobytes() == np.asarray(right[name]).tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("file_bytes", [None, 100, 700])
def test_others_read_the_values(tmp_path, rules, dtype, file_bytes):
    arrays = numbers(getattr(jnp, dtype))
    layout = laid(arrays, RULES[rules])
    where = tmp_path / ("model.safetensors" if file_bytes is None else "folder")
    said = {"names": NAMES, "transposed": ORDERS}
    more = {} if file_bytes is None else {"file_bytes": file_bytes}
    layout.write_safetensors(where, layout.place(arrays), **said, **more)
    files = sorted(where.glob("*.safetensors")) if file_bytes else [where]
    found = {name: x for file in files for name, x in load_file(file).items()}
    same_bits(found, in_file(arrays))
    same_bits(layout.gather(layout.read_safetensors(where, **said)), arrays)
    other = laid(arrays, {"w": (Padded("tp"),), "stack": (None, Padded("tp"))}, "tp=3")
    same_bits(other.gather(other.read_safetensors(where, **said)), arrays)
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("file_bytes", [120, 10**6])
def test_several_files_have_an_index(tmp_path, file_bytes):
    arrays = {f"layers/{i}": np.arange(10.0, dtype="f") + i for i in range(7)}
    layout = laid(arrays, {})
    layout.write_safetensors(tmp_path, layout.place(arrays), file_bytes=file_bytes)
    files = sorted(path.name for path in tmp_path.iterdir())
    if file_bytes == 10**6:
        assert files == ["model.safetensors"]
        return
    assert files == [
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / files[-1]).read_text())
    assert index["metadata"]["total_size"] == 7 * 40
    assert index["weight_map"] == {
        f"layers.{i}": f"model-0000{i // 3 + 1}-of-00003.safetensors" for i in range(7)
    }
    same_bits(layout.gather(layout.read_safetensors(tmp_path)), arrays)


DTYPES = [
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("bfloat16", "float16", "float32", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("bool", "complex64"),
]


@pytest.mark.parametrize("rule", [("tp",), (None, Padded("tp"))])
def test_every_dtype_keeps_its_bits(tmp_path, rule):
    """NaNs with their payloads and negative zeros among them, transposed in memory."""
    rng, arrays = np.random.default_rng(0), {}
    for name in DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        most = 2 if name == "bool" else 256
        bits = rng.integers(0, most, (8, 6 * dtype.itemsize)).astype(np.uint8)
        arrays[name] = bits.view(dtype)
    layout = laid(arrays, {".*": rule}, "tp=4")
    params = layout.place(arrays)
    layout.write_safetensors(tmp_path / "a.safetensors", params, transposed=".*")
    back = layout.read_safetensors(tmp_path / "a.safetensors", transposed=".*")
    same_bits(layout.gather(back), arrays)
    names = [name for name in DTYPES if not name.startswith("float8")]
    there = laid({name: arrays[name].T for name in DTYPES}, {".*": REPLICATED}, "tp=4")
    found = there.gather(there.read_safetensors(tmp_path / "a.safetensors"))
    same_bits({n: found[n] for n in names}, {n: np.ascontiguousarray(arrays[n].T) for n in names})


def test_arrays_of_any_order_in_memory(tmp_path):
    arrays = {"t": np.arange(24.0, dtype="f").reshape(4, 6).T, "step": np.arange(40)[::2]}
    arrays["step"] = arrays["step"].astype(np.int32).reshape(4, 5)[:, ::-1]
    layout = laid(arrays, {"t": (None, "tp")}, "tp=4")
    for number, params in enumerate(
        [arrays, layout.place(arrays), jax.tree.map(jnp.asarray, arrays)]
    ):
        path = tmp_path / f"{number}.safetensors"
        layout.write_safetensors(path, params)
        same_bits(load_file(path), {k: np.ascontiguousarray(x) for k, x in arrays.items()})


@pytest.mark.parametrize("values", ["int8", "float8_e4m3fn"])
def test_quantized_weights(tmp_path, values):
    rng = np.random.default_rng(0)
    q = Quantized(
        rng.integers(-100, 100, (2, 256, 384)).astype(getattr(ml_dtypes, values, values)),
        rng.uniform(1, 2, (2, 2, 3)).astype("f"),
    )
    tree = {"q": q}
    layout = LayoutMap({"q/.*": (None, "tp")}).layout(
        tree, make_mesh("tp=2", devices=jax.devices()[:2])
    )
    said = {
        "names": {
            "q/values": [f"{i}.weight" for i in range(2)],
            "q/scales": [f"{i}.weight_scale_inv" for i in range(2)],
        },
        "transposed": "q/.*",
    }
    layout.write_safetensors(tmp_path, layout.place(tree), **said)
    back = layout.read_safetensors(tmp_path, **said)["q"]
    assert isinstance(back, Quantized)
    np.testing.assert_array_equal(back.dequantized("float32"), q.dequantized("float32"))
    there = layout.under("q")  # the arrays as in the file
    assert set(there) == {"values", "scales"}


def test_one_name_for_two_arrays(tmp_path):
    table = np.arange(40.0, dtype="f").reshape(8, 5)
    tied = {"embed": table, "head": np.ascontiguousarray(table.T)}
    layout = laid(tied, {"embed": ("tp",)}, "tp=4")
    said = {"names": lambda path: "table", "transposed": "head"}
    layout.write_safetensors(tmp_path / "a.safetensors", layout.place(tied), **said)
    same_bits(load_file(tmp_path / "a.safetensors"), {"table": table})
    other = {**tied, "head": tied["head"] + 1}
    text = (
        "tensor 'table' is written for two arrays, and 'head' has other numbers than the first; g"
    )
    with pytest.raises(ValueError, match=text):
        layout.write_safetensors(tmp_path / "b.safetensors", layout.place(other), **said)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    text = (
        r"'head' is float32\[5,8\] in .*\('table'\), and another is float32\[8,5\]; give each a na"
    )
    with pytest.raises(LayoutError, match=text):
        layout.write_safetensors(tmp_path / "c", layout.place(tied), names=said["names"])


def test_what_cannot_be_written(tmp_path):
    cases = {
        "k": (
            jax.random.key(0),
            r"'k' is key<fry>\[\], a dtype that no .*; make the layout of jax.ra",
        ),
        "i": (
            jnp.arange(4).astype(jnp.int4),
            r"'i' is int4\[4\], a dtype .*; cast it to int8, and",
        ),
        "u": (
            jnp.arange(3).astype(jnp.uint4),
            r"'u' is uint4\[3\], .*; cast it to uint8, and make",
        ),
        "f": (jnp.ones(2, jnp.float8_e4m3b11fnuz), r"'f' is .*; cast it to bfloat16, and make the"),
        "__metadata__": (
            jnp.ones(2),
            "'__metadata__' cannot be named '__metadata__'; give another",
        ),
    }
    for path, (x, text) in cases.items():
        layout = laid({path: x}, {})
        with pytest.raises(LayoutError, match=rf"Layout\.write_safetensors: a problem:\n +{text}"):
            layout.write_safetensors(tmp_path / "a", layout.place({path: x}))
    layout = laid({"w": jnp.arange(8.0)}, {"w": ("tp",)})
    params = layout.place({"w": jnp.arange(8.0)})
    with pytest.raises(
        LayoutError, match=r"'w' is float32\[3\] in .*, and float32\[8\] here; name as"
    ):
        layout.write_safetensors(tmp_path / "a", params, names={"w": ["a", "b", "c"]})
    with pytest.raises(
        LayoutError, match=r"'w' is bfloat16\[8\], and float32\[8\] in the layout; c"
    ):
        layout.write_safetensors(tmp_path / "a", {"w": params["w"].astype(jnp.bfloat16)})
    assert not list(tmp_path.iterdir())


def test_no_file_is_written_over(tmp_path):
    layout = laid({"w": jnp.arange(8.0)}, {"w": ("tp",)})
    params = layout.place({"w": jnp.arange(8.0)})
    (tmp_path / "config.json").write_text("{}")
    layout.write_safetensors(tmp_path, params)
    layout.write_safetensors(tmp_path / "a.safetensors", params)
    before = sorted(path.name for path in tmp_path.iterdir())
    for where, old in [
        (tmp_path, r"(model|a)\.safetensors"),
        (tmp_path / "a.safetensors", r"a\.safetensors"),
    ]:
        text = f"{old} exists already; remove it, or give another place"
        with pytest.raises(ValueError, match=text):
            layout.write_safetensors(where, params)
    with pytest.raises(ValueError, match="file_bytes=0 must be"):
        layout.write_safetensors(tmp_path / "b", params, file_bytes=0)
    with pytest.raises(OSError, match="Not a directory"):
        layout.write_safetensors(tmp_path / "config.json" / "b", params)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("path", "read", "write"),
    [
        ("gs://b/m", "`gcloud storage cp -r gs://b/m .`", "`gcloud storage cp -r FOLDER gs://b/m`"),
        (
            "s3://b/m",
            "`aws s3 cp --recursive s3://b/m .`",
            "`aws s3 cp --recursive FOLDER s3://b/m`",
        ),
        ("hf://o/n", "`hf download o/n --local-dir .`", "`hf upload o/n FOLDER`"),
        ("https://a.b/m", "`curl -LO https://a.b/m`", None),
        ("az://b/m", None, None),
    ],
)
def test_paths_of_other_hosts(path, read, write):
    layout = laid({"w": jnp.arange(8.0)}, {"w": ("tp",)})
    how = f" with {read}" if read else ""
    text = (
        f"read_safetensors: files={path!r} is no path of this host; copy it to this host{how}, and"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        layout.read_safetensors([path])
    how = f" with {write}" if write else ""
    text = f"where={path!r} is no path of this host; write to a folder of this host, and copy th"
    text += f"at{how}"
    with pytest.raises(ValueError, match=re.escape(text)):
        layout.write_safetensors(path, {"w": jnp.arange(8.0)})


def test_what_is_no_path():
    """The tree in place of the folder, and the reverse."""
    layout = laid({"w": jnp.arange(8.0)}, {"w": ("tp",)})
    for path in ({"w": jnp.arange(8.0)}, b"folder"):
        text = f"where must be a path, a str say, got {type(path).__name__}"
        with pytest.raises(TypeError, match=f"^Layout.write_safetensors: {text}"):
            layout.write_safetensors(path, "folder")


def test_file_urls_and_collapsed_paths(tmp_path):
    layout = laid({"w": jnp.arange(8.0)}, {"w": ("tp",)})
    with pytest.raises(ValueError, match=re.escape("is no path of this host; give '/a/b'")):
        layout.read_safetensors("file:///a/b")
    with pytest.raises(ValueError, match=re.escape("`gcloud storage cp -r gs://b/m .`")):
        layout.read_safetensors(tmp_path.__class__("gs://b/m"))


def test_padded_weights_of_other_shapes_in_the_file(tmp_path):
    """As the page says: heads are one dimension in the file, and both layouts pad."""
    w = np.random.default_rng(0).normal(size=(8, 3, 4)).astype("f")
    save_file({"q.weight": np.ascontiguousarray(w.reshape(8, 12).T)}, tmp_path / "a.safetensors")
    params = {"w": jax.ShapeDtypeStruct(w.shape, "float32")}
    flat = {"w": jax.ShapeDtypeStruct((8, 12), "float32")}
    layout, file_layout = (
        laid(params, {"w": (None, Padded("tp"))}),
        laid(flat, {"w": (Padded("tp", 3),)}),
    )
    said = {"names": {"w": "q.weight"}, "transposed": "w"}

    def like(x, other):
        return x.reshape(other.shape).astype(other.dtype)

    @jax.jit
    def to_ours(read):
        return layout.pad(jax.tree.map(like, file_layout.unpad(read), params))

    @jax.jit
    def to_theirs(ours):
        there = file_layout.logical_shapes
        return file_layout.pad(jax.tree.map(like, layout.unpad(ours), there))

    ours = to_ours(file_layout.read_safetensors(tmp_path, **said))
    np.testing.assert_array_equal(layout.gather(ours)["w"], w)
    file_layout.write_safetensors(tmp_path / "b", to_theirs(ours), **said)
    same_bits(load_file(tmp_path / "b/model.safetensors"), load_file(tmp_path / "a.safetensors"))
