"""Layers of pipelines: in the order of devices on the mesh, and in the model's elsewhere."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file
from wide import assert_alike

from jaxpar import make_mesh
from jaxpar.axis.padding import PaddedDim
from jaxpar.layout import (
    REPLICATED,
    Interleaved,
    LayoutError,
    LayoutMap,
    Padded,
    expert_parallel,
    fully_sharded,
    infer_layout,
    tensor_parallel,
)
from jaxpar.pipeline import interleaved_1f1b

F32 = jax.ShapeDtypeStruct


def in_order_of_devices(layers, p, v):
    return np.arange(layers).reshape(v, p, layers // (v * p)).transpose(1, 0, 2).ravel()


def mesh_of(p, axis_types=AxisType.Auto):
    return make_mesh({"pp": p, "tp": 8 // p}, axis_types=axis_types)


def a_model(layers=48):
    numbers = np.arange(layers, dtype=np.float32)[:, None, None]
    return {
        "layers": {
            "up": numbers + np.arange(40, dtype=np.float32).reshape(5, 8) / 64,
            "scale": np.arange(layers * 8, dtype=np.int8).reshape(layers, 8),
        },
        "table": np.arange(60.0, dtype=np.float32).reshape(10, 6),
    }


def rules(v):
    stack = Interleaved("pp", v) if v else None
    return LayoutMap(
        {"layers/up": (stack, None, "tp"), "layers/scale": (stack,), "table": (Padded("tp"),)}
    )


def laid(p, v):
    """The layout of a pipeline; of no pipeline if v is 0."""
    return rules(v).layout(a_model(), mesh_of(p), strict=False)


def check(layout, placed, p, v):
    """Each device has its stages, in their order."""
    model = a_model()
    order = in_order_of_devices(48, p, v) if v else np.arange(48)
    for name, x in model["layers"].items():
        on_mesh = placed["layers"][name]
        assert on_mesh.dtype == x.dtype
        assert on_mesh.sharding.is_equivalent_to(layout[f"layers/{name}"].sharding, x.ndim)
        np.testing.assert_array_equal(on_mesh, x[order])
    jax.tree.map(np.testing.assert_array_equal, layout.gather(placed), model)


@pytest.mark.parametrize(("p", "v"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (8, 1), (8, 4)])
def test_devices_have_their_stages(p, v):
    layers = p * v * 3
    w = np.arange(layers * 4, dtype=np.float32).reshape(layers, 4)
    layout = LayoutMap({"w": (Interleaved("pp", v),)}).layout({"w": w}, mesh_of(p), strict=False)
    order = in_order_of_devices(layers, p, v)
    for given_ in (w, jnp.asarray(w)):
        np.testing.assert_array_equal(layout.place({"w": given_})["w"], w[order])
        padded = layout.pad({"w": given_})["w"]
        np.testing.assert_array_equal(padded, w[order])
        assert isinstance(padded, np.ndarray) == isinstance(given_, np.ndarray)
    np.testing.assert_array_equal(jax.jit(layout.pad)({"w": w})["w"], w[order])
    np.testing.assert_array_equal(jax.jit(layout.unpad)({"w": w[order]})["w"], w)
    placed = layout.place({"w": w})
    unpadded = layout.unpad(placed)["w"]
    np.testing.assert_array_equal(unpadded, w)
    assert unpadded.sharding.spec == P("pp")  # as large as before on each device
    np.testing.assert_array_equal(layout.gather(placed)["w"], w)
    for shard in placed["w"].addressable_shards:
        stages = {int(n) // 3 for n in np.asarray(shard.data)[:, 0] // 4}
        device = shard.index[0].indices(layers)[0] // (3 * v)
        assert stages == {device + p * r for r in range(v)}


@examples(60)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(0, 2),
    st.sampled_from(["float32", "bfloat16", "int8", "bool"]),
)
def test_any_order_and_back(p, v, k, dim, dtype):
    layers = p * v * k
    blocks = Interleaved("pp", v).blocks(layers, p)
    shape = [2, 2, 2]
    shape[dim] = layers
    x = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    padded = blocks.pad(x, dim)
    np.testing.assert_array_equal(padded, x.take(in_order_of_devices(layers, p, v), axis=dim))
    np.testing.assert_array_equal(jax.jit(lambda x: blocks.pad(x, dim))(x), padded)
    np.testing.assert_array_equal(blocks.unpad(padded, dim), x)
    found = [blocks.within(slice(d * v * k, (d + 1) * v * k)) for d in range(p)]
    assert [after for _, after in found] == [0] * p
    order = [entry for entries, _ in found for entry in entries]
    assert order == in_order_of_devices(layers, p, v).tolist()
    assert blocks.is_plain == (min(p, v) == 1)


@examples(60)
@given(st.integers(0, 20), st.integers(1, 6), st.integers(0, 2), st.booleans())
def test_entries_within_padded_blocks(size, parts, extra, evenly):
    block = -(-size // parts) + extra
    blocks = PaddedDim.evenly(size, parts) if evenly else PaddedDim.at_the_end(size, parts, block)
    x = np.arange(1, size + 1)
    for part in blocks.pad(x, 0).reshape(parts, blocks.block) if blocks.padded else []:
        at = next(iter(np.flatnonzero((blocks.pad(x, 0).reshape(parts, -1) == part).all(1))))
        entries, after = blocks.within(slice(at * blocks.block, (at + 1) * blocks.block))
        np.testing.assert_array_equal(x[list(entries)], part[part > 0])
        assert after == np.sum(part == 0)


# Pipelines that are saved; the stages of the same devices, and the other pipelines, to move to.
MOVES = [
    ((1, 1), 3, [(8, 0), (4, 2)]),
    ((2, 1), 2, [(2, 3), (8, 2)]),
    ((2, 4), 1, [(1, 0), (8, 2)]),
    ((4, 2), 3, [(4, 2), (8, 0)]),
    ((8, 1), 2, [(2, 3), (1, 0)]),
    ((2, 3), 2, [(8, 2), (4, 2)]),
    ((8, 2), 3, [(2, 3), (8, 0)]),
    ((1, 4), 1, [(1, 0), (4, 2)]),
]


@pytest.mark.parametrize(("first", "stages", "others"), MOVES)
def test_checkpoints_move_between_pipelines(first, stages, others, tmp_path):
    layout = laid(*first)
    placed = layout.place(a_model())
    check(layout, placed, *first)
    layout.save(tmp_path / "one", placed)
    p, _ = first  # on devices
    check(laid(p, stages), laid(p, stages).pad(layout.unpad(placed)), p, stages)
    for p, v in others:
        other = laid(p, v)
        check(other, other.restore(tmp_path / "one"), p, v)
        check(other, other.place(layout.gather(placed)), p, v)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("in_context", [False, True])
def test_init_makes_layers_where_they_belong(kind, in_context):
    model, mesh = a_model(), mesh_of(4, kind)

    def init(key):
        return {**jax.tree.map(jnp.asarray, model), "keys": jax.random.split(key, 8)}

    shapes = jax.eval_shape(init, jax.random.key(0))
    with_keys = rules(2) | LayoutMap({"keys": (Interleaved("pp", 2),)})
    layout = with_keys.layout(shapes, mesh)
    if in_context:
        with jax.set_mesh(mesh):
            made = layout.init(init, jax.random.key(0))
    else:
        made = layout.init(init, jax.random.key(0))
    keys = made.pop("keys")
    order = in_order_of_devices(8, 4, 2)
    wanted = jax.random.key_data(jax.random.split(jax.random.key(0), 8))
    np.testing.assert_array_equal(jax.random.key_data(keys), wanted[order])
    for name, x in model["layers"].items():
        np.testing.assert_array_equal(made["layers"][name], x[in_order_of_devices(48, 4, 2)])


def test_init_needs_no_whole_stack():
    layout = LayoutMap({"w": (Interleaved("pp", 2),)}).layout(
        {"w": F32((64, 64, 64), "float32")}, make_mesh("pp=8")
    )
    seen = []

    def init(key):
        return {"w": jax.random.normal(key, (64, 64, 64))}

    def noted(function, **options):
        program = jax_jit(function, **options)
        seen.append(program.lower(jax.random.key(0)).compile().memory_analysis())
        return program

    jax_jit, jax.jit = jax.jit, noted
    try:
        layout.init(init, jax.random.key(0))
    finally:
        jax.jit = jax_jit
    block = 64 * 64 * 64 * 4 // 8
    assert seen[0].temp_size_in_bytes < 6 * block  # 32 if the compiler exchanged whole arrays


def test_moments_lie_like_their_parameters(tmp_path, float64):
    model = {"layers": {"w": np.arange(64.0).reshape(8, 8)}}
    optimizer = optax.adam(1e-1)

    def step(params, state):
        gradients = jax.grad(lambda p: jnp.sum(jnp.sin(p["layers"]["w"])))(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"):
        expected = step(*step(model, optimizer.init(model)))
    layout = LayoutMap({"layers/.*": (Interleaved("pp", 2), None)}).layout(
        model, mesh_of(4), strict=False
    )
    of_state = layout.like(jax.eval_shape(optimizer.init, layout.shapes))
    params = layout.place(model)
    with jax.numpy_dtype_promotion("standard"):
        found = jax.jit(step)(*jax.jit(step)(params, optimizer.init(params)))
    for one, x, wanted in zip((layout, of_state), found, expected, strict=True):
        assert_alike(one.gather(x), wanted)
    of_state.save(tmp_path / "state", found[1])
    plain = LayoutMap({"layers/.*": ("pp", "tp")}).layout(model, mesh_of(2))
    back = plain.like(jax.eval_shape(optimizer.init, plain.shapes)).restore(tmp_path / "state")
    assert_alike(back, expected[1])


@pytest.mark.parametrize(("p", "v"), [(2, 1), (2, 4), (4, 2)])
def test_a_schedule_says_how_many_stages(p, v):
    """Of a rule and of a schedule that it is given, neither can have others."""
    schedule = interleaved_1f1b(p, 4, v)
    assert Interleaved("pp", schedule) == Interleaved("pp", v)
    layers = np.arange(48)
    rules = LayoutMap({"w": (Interleaved("pp", schedule),)})
    layout = rules.layout({"w": layers}, mesh_of(p), strict=False)
    order = np.asarray(layout.place({"w": layers})["w"])
    np.testing.assert_array_equal(schedule.order(48), order)
    np.testing.assert_array_equal(order, in_order_of_devices(48, p, v))


@pytest.mark.parametrize(
    ("rule", "spec"),
    [((("pp", "dp"),), P(("pp", "dp"))), (("pp", "dp"), P("pp", "dp")), (("dp",), P("dp"))],
)
def test_zero_keeps_the_order_of_the_parameters(rule, spec):
    layers = np.arange(16.0, dtype=np.float32)[:, None] + np.zeros((1, 4), np.float32)
    layout = LayoutMap({"w": (Interleaved("pp", 2),)}, batch=P("dp")).layout(
        {"w": layers}, make_mesh("pp=4,dp=2")
    )
    state = layout.like({"mu": layout.shapes}, LayoutMap({"mu/w": rule}))
    assert state["mu/w"].spec == spec
    placed = state.place({"mu": {"w": layers}})["mu"]["w"]
    np.testing.assert_array_equal(placed, layers[in_order_of_devices(16, 4, 2)])
    np.testing.assert_array_equal(placed, layout.place({"w": layers})["w"])
    np.testing.assert_array_equal(state.gather({"mu": {"w": placed}})["mu"]["w"], layers)


def test_states_in_another_order_are_refused():
    mesh = mesh_of(4)
    params = {"w": F32((16, 16), "float32"), "u": F32((16, 2), "float32")}
    rules = LayoutMap({"w": (Interleaved("pp", 2),), "u": ("pp",)})
    layout = rules.layout(params, mesh, strict=False)
    for path, v in {"mu/w": 4, "mu/u": 2}.items():
        with pytest.raises(LayoutError) as found:
            layout.like({"mu": layout.shapes}, LayoutMap({path: (Interleaved("pp", v),)}))
        assert (
            f"'{path}' is interleaved along dimension 0 by rule '{path}', and its parameter is "
            "not, or otherwise: an update would add other layers; write the axes alone, ('pp',), "
            "as its order is the parameter's"
        ) in str(found.value)
    same = layout.like({"mu": layout.shapes}, LayoutMap({"mu/w": (Interleaved("pp", 2), "tp")}))
    assert same["mu/w"].blocks[0] == layout["w"].blocks[0]
    factored = {"row": {"w": F32((16,), "float32")}}
    with pytest.raises(LayoutError, match=r"is like no parameter: 'w' has shape \(16, 16\)"):
        layout.like(factored)  # which dimension is missing decides its order
    clear = {"row": {"u": F32((16,), "float32")}, "column": {"u": F32((2,), "float32")}}
    rules = LayoutMap({"u": (Interleaved("pp", 2), "tp")})
    state = rules.layout({"u": params["u"]}, mesh).like(clear)
    assert [block.order for block in state["row/u"].blocks] == [(4, 2)]
    assert [block.order for block in state["column/u"].blocks] == [(1, 1)]


@pytest.mark.parametrize("stacked", [True, False])
def test_layers_of_published_files(stacked, tmp_path):
    w = np.arange(8 * 6 * 4, dtype=np.float32).reshape(8, 6, 4)
    each = {f"h.{layer}": w[layer] for layer in range(8)}
    save_file({"w": w} if stacked else each, tmp_path / "model.safetensors")
    layout = LayoutMap({"w": (Interleaved("pp", 2), Padded("tp"))}).layout(
        {"w": F32((8, 4, 6), "float32")}, make_mesh("pp=2,tp=4")
    )
    names = None if stacked else {"w": list(each)}
    order = {"w": (0, 2, 1)} if stacked else "w"
    read = layout.read_safetensors(tmp_path, names=names, transposed=order)
    wanted = w.transpose(0, 2, 1)[in_order_of_devices(8, 2, 2)]
    np.testing.assert_array_equal(np.asarray(read["w"]), wanted)
    np.testing.assert_array_equal(layout.gather(read)["w"], w.transpose(0, 2, 1))


@pytest.mark.parametrize(
    ("layers", "p", "v", "text"),
    [
        (
            12,
            2,
            4,
            "2 devices x 4 virtual stages do not divide 12 layers: 12 = 1 x 8 + 4; use 16 layers, "
            "or virtual_stages=1 or 2 or 3 or 6",
        ),
        (
            6,
            4,
            2,
            "4 devices x 2 virtual stages do not divide 6 layers: 6 = 0 x 8 + 6; use 8 layers, or "
            "fewer devices",
        ),
    ],
)
def test_layers_that_stages_do_not_divide(layers, p, v, text):
    with pytest.raises(LayoutError) as found:
        LayoutMap({"layers/.*": (Interleaved("pp", v),)}).layout(
            {"layers": {"up": F32((layers, 3), "float32")}}, mesh_of(p), strict=False
        )
    start = f"'layers/up' float32[{layers},3]: rule 'layers/.*': dimension 0: Interleaved: "
    assert start + text in str(found.value)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: Interleaved("pp", 0),
            ValueError,
            "Interleaved: virtual_stages=0 must be at least",
        ),
        (lambda: Interleaved("pp", 1.5), TypeError, "Interleaved: virtual_stages must be an int"),
        (lambda: Interleaved(2, 2), TypeError, "Interleaved: axes must be a mesh axis name"),
        (
            lambda: LayoutMap({"w": (Interleaved("pp", 2), "pp")}),
            ValueError,
            "shards over the mesh axis 'pp' twice",
        ),
    ],
)
def test_wrong_values(make, error, text):
    with pytest.raises(error) as found:
        make()
    assert text in str(found.value)


def test_results_are_not_interleaved():
    rules = LayoutMap({"w": ("pp",)}, results={"x": (Interleaved("pp", 2),)})
    layout = rules.layout({"w": F32((8,), "float32")}, make_mesh("pp=8"))
    with pytest.raises(ValueError, match=r"would be interleaved; results are not: name axes"):
        layout.constrain(jnp.ones((16, 2)), "x")


def test_tables_tell_the_stages():
    layout = laid(4, 2)
    assert "float32[48,5,8]  pp (2 stages), -, tp  [12,5,4]" in str(layout)
    by_path = {row["path"]: row["virtual_stages"] for row in layout.table().rows}
    assert by_path == {"layers/up": [2, 1, 1], "layers/scale": [2, 1], "table": [1, 1]}
    assert layout != laid(4, 1)
    assert layout == laid(4, 2)


def a_transformer():
    return {
        "layers": {
            "query": {"kernel": F32((8, 16, 32), "float32"), "bias": F32((8, 32), "float32")},
            "up": {"kernel": F32((8, 16, 64), "float32")},
            "down": {"kernel": F32((8, 64, 16), "float32")},
            "experts": {"w": F32((8, 4, 16, 16), "float32")},
        },
        "embed": {"embedding": F32((32, 16), "float32")},
    }


def test_ready_made_maps_know_the_stack():
    params, stack = a_transformer(), Interleaved("pp", 2)
    pipeline = LayoutMap({"layers/.*": (stack,), "embed/.*": REPLICATED})
    mesh = make_mesh("pp=2,fsdp=2,tp=2")
    split = tensor_parallel(params, mesh, within=pipeline, whole=".*experts/w")
    both = fully_sharded(params, mesh, within=split)
    assert both.match("layers/query/kernel") == P(stack, "fsdp", "tp")
    assert both.match("layers/query/bias") == P(stack, ("tp", "fsdp"))
    assert both.match("layers/down/kernel") == P(stack, "tp", "fsdp")
    assert both.match("layers/experts/w") == P(stack, None, "fsdp")
    assert both.match("embed/embedding") == P(("tp", "fsdp"))
    experts = expert_parallel(params, make_mesh("pp=2,ep=4"), within=pipeline)
    assert experts.match("layers/experts/w") == P(stack, "ep")
    second = LayoutMap({"up": (None, stack)})
    with pytest.raises(LayoutError) as found:
        tensor_parallel({"up": F32((6, 8), "float32")}, mesh, columns="up", within=second)
    assert (
        "('tp',) would shard dimension 1, too, which `within` has as "
        "Interleaved(axes=('pp',), virtual_stages=2): its layers would change places; let "
        "`within` interleave the first dimension"
    ) in str(found.value)


def loss(params, tokens):
    x = params["embed"][tokens] + params["positions"]

    def layer(x, w):
        return x + jnp.tanh((x * w["scale"]) @ w["up"]) @ w["down"], None

    def over_time(total, xs):
        return total + jnp.sum(xs[0] * xs[1]), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    more, _ = jax.lax.scan(over_time, 0.0, (jnp.swapaxes(x, 0, 1), params["positions"]))
    return jnp.sum(x @ params["embed"].T) + more


def a_scanned_model(layers=8):
    sizes = {"up": (16, 64), "down": (64, 16), "scale": (16,)}
    return {
        "layers": {name: F32((layers, *size), "float32") for name, size in sizes.items()},
        "embed": F32((32, 16), "float32"),
        "positions": F32((12, 16), "float32"),
    }


def test_inferred_maps_shard_what_a_scan_over_layers_takes_apart():
    tokens, said = F32((4, 12), "int32"), []
    mesh = make_mesh("dp=2,pp=2,tp=2")
    rules = infer_layout(loss, a_scanned_model(), tokens, mesh, show=said.append)
    assert rules.match("layers/up") == P("pp", None, "tp")
    assert rules.match("layers/down") == P("pp", "tp")
    assert rules.match("layers/scale") == P("pp")
    assert rules.match("positions") == P()  # a scan over time
    assert any("layers/scale: P('pp',)  # pp: a scan over 8 layers" in line for line in said)
    named = make_mesh("depth=2,fsdp=4")
    rules = infer_layout(loss, a_scanned_model(), tokens, named, roles={"depth": "pipeline"})
    assert rules.match("layers/up") == P("depth", None, "fsdp")


@pytest.mark.parametrize(
    ("function", "layers", "more", "text"),
    [
        (
            loss,
            6,
            {},
            "4 devices of 'pp' do not divide the 6 layers of 'layers/down': 6 = 1 x 4 + 2; choose",
        ),
        (
            lambda params, tokens: jnp.sum(params["embed"][tokens] @ params["layers"]["up"][0]),
            8,
            {},
            "'pp' is a pipeline's axis, and no scan of the function takes the layers of weights; "
            "stack them along a first dimension, and call jax.lax.scan over it, or give the axis "
            "another role, roles={'pp': ...}",
        ),
        (
            loss,
            8,
            {"target": "v5e:2x2"},
            "target='v5e:2x2' would time programs without a pipeline, as the compiler makes none "
            "of ('pp',); leave it out, and give the pipelined step to Layout.explain",
        ),
    ],
)
def test_pipelines_that_cannot_be_inferred(function, layers, more, text):
    mesh = make_mesh("pp=4,tp=2")
    with pytest.raises(ValueError, match=re.escape(text)):
        infer_layout(function, a_scanned_model(layers), F32((4, 12), "int32"), mesh, **more)
