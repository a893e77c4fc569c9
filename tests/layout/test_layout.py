"""What follows from a layout: specs, shards, padding, dimensions of FSDP, states of optimizers."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from wide import assert_alike

from jaxpar import make_mesh
from jaxpar.layers import fsdp_scan
from jaxpar.layout import REPLICATED, LayoutError, LayoutMap, Padded, Split

F32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
F64 = partial(jax.ShapeDtypeStruct, dtype=np.float64)


def a_model():
    return {
        "embedding": F32((50, 8)),
        "layers": {"norm": F32((3, 8)), "up": F32((3, 8, 16)), "down": F32((3, 16, 8))},
        "scale": F32(()),
    }


def its_rules(**more):
    return LayoutMap(
        {
            "embedding": "vocab embed",
            "layers/norm": REPLICATED,
            "layers/up": "layers embed hidden",
            "layers/down": "layers hidden embed",
            "scale": REPLICATED,
        },
        axes={"vocab": Padded("tp"), "embed": "fsdp", "hidden": "tp", "layers": None},
        **more,
    )


def filled(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(s.dtype), shapes)


MESH = "fsdp=2,tp=4"


def test_everything_of_one_array():
    layout = its_rules().layout(a_model(), make_mesh(MESH))
    array = layout["embedding"]
    assert array.shape == (50, 8)
    assert array.padded_shape == (52, 8)
    assert array.local_shape == (13, 4)
    assert array.bytes_per_device == 13 * 4 * 4
    assert array.spec == P("tp", "fsdp")
    assert array.logical_spec == P(None, "fsdp")
    assert array.copies == 1
    assert array.rule == "embedding"
    assert layout["layers/norm"].copies == 8
    with pytest.raises(KeyError, match="no array of path 'layers/nrm'; did you mean 'layers/norm'"):
        layout["layers/nrm"]
    assert set(layout) == {"embedding", "layers/norm", "layers/up", "layers/down", "scale"}
    assert len(layout) == 5


def test_trees_for_everything():
    mesh = make_mesh(MESH)
    layout = its_rules().layout(a_model(), mesh)
    assert layout.mesh is mesh
    assert layout.specs["layers"] == {
        "norm": P(),
        "up": P(None, "fsdp", "tp"),
        "down": P(None, "tp", "fsdp"),
    }
    assert layout.shardings["embedding"] == NamedSharding(mesh, P("tp", "fsdp"))
    assert layout.logical_shardings["embedding"] == NamedSharding(mesh, P(None, "fsdp"))
    assert layout.shapes["embedding"].shape == (52, 8)
    assert layout.shapes["embedding"].sharding == NamedSharding(mesh, P("tp", "fsdp"))
    assert layout.logical_shapes["embedding"].shape == (50, 8)
    assert layout.gradient_axes["layers"] == {"norm": ("fsdp", "tp"), "up": (), "down": ()}


@pytest.mark.parametrize("as_jax", [False, True])
def test_placed_and_gathered(as_jax):
    layout = its_rules().layout(a_model(), make_mesh(MESH))
    params = filled(a_model())
    given = jax.tree.map(jnp.asarray, params) if as_jax else params
    placed = layout.place(given)
    for shape, x in zip(jax.tree.leaves(layout.shapes), jax.tree.leaves(placed), strict=True):
        assert x.shape == shape.shape
        assert x.sharding == shape.sharding
    assert (np.asarray(placed["embedding"])[50:] == 0).all()
    back = layout.gather(placed)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    inside = jax.jit(lambda p: layout.unpad(layout.pad(p)))(given)
    jax.tree.map(np.testing.assert_array_equal, inside, params)


def test_arrays_of_another_model_are_not_placed():
    layout = its_rules().layout(a_model(), make_mesh(MESH))
    params = filled(a_model())
    params["embedding"] = params["embedding"][:49]
    params["more"] = params.pop("scale")
    with pytest.raises(LayoutError, match=r"Layout.place: 3 problems") as found:
        layout.place(params)
    text = str(found.value)
    assert "'scale' is missing; give all arrays of the layout" in text
    assert "'more' is not in the layout" in text
    assert "'embedding' is float32[49,8], but has shape (50, 8) here, without padding" in text
    with pytest.raises(LayoutError, match=r"has shape \(52, 8\) here, with padding"):
        layout.unpad(filled(a_model()))
    with pytest.raises(TypeError, match=r"Layout.place: 'embedding' is a shape, ShapeDtypeStruct"):
        layout.place(a_model())


def test_born_on_their_devices():
    mesh = make_mesh(MESH)
    layout = its_rules().layout(a_model(), mesh)

    def init(key, scale, *, shift=0.0):
        return jax.tree.map(
            lambda s: jax.random.uniform(key, s.shape, s.dtype) * scale + shift, a_model()
        )

    made = layout.init(init, jax.random.key(1), 2.0, shift=1.0)
    assert jax.tree.map(lambda x: x.sharding, made) == layout.shardings
    wanted = init(jax.random.key(1), 2.0, shift=1.0)
    jax.tree.map(np.testing.assert_array_equal, layout.gather(made), wanted)
    with pytest.raises(LayoutError, match=r"Layout.init: 4 problems"):
        layout.init(lambda: {"embedding": jnp.ones((50, 8))})


def test_init_holds_no_whole_array():
    """What the compiled program has in memory, on one of 8 devices."""
    mesh, size = make_mesh("fsdp=8"), 1 << 20
    layout = LayoutMap({"w": ("fsdp",)}).layout({"w": F32((size,))}, mesh)

    def init(key):
        return {"w": jax.random.normal(key, (size,))}

    compiled = (
        jax.jit(lambda key: layout.pad(init(key)), out_shardings=layout.shardings)
        .lower(jax.random.key(0))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes < 4 * size / 7
    assert memory.temp_size_in_bytes < 4 * size


@pytest.mark.parametrize("axes", ["fsdp=8", "fsdp=4,tp=2", "tp=8", "fsdp=2,tp=4", "fsdp=1,tp=1"])
def test_the_same_numbers_on_every_mesh(axes):
    names = [part.split("=")[0] for part in axes.split(",")]
    devices = jax.devices()[: 1 if axes == "fsdp=1,tp=1" else 8]
    mesh = make_mesh(axes, devices=devices)
    rule = ("fsdp" if "fsdp" in names else None, "tp" if "tp" in names else None)

    def init(key):
        return {"w": jax.random.uniform(key, (16, 24))}

    shapes = jax.eval_shape(init, jax.random.key(0))
    made = LayoutMap({"w": rule}).layout(shapes, mesh).init(init, jax.random.key(3))
    np.testing.assert_array_equal(made["w"], init(jax.random.key(3))["w"])


def test_dimensions_of_fsdp():
    layout = its_rules().layout(a_model(), make_mesh(MESH))
    dims = layout.fsdp_dims(stacked=1)
    assert dims["layers"] == {"norm": None, "up": 0, "down": 1}
    assert layout.fsdp_dims()["embedding"] == 1
    assert layout.fsdp_dims("tp")["embedding"] == 0
    with pytest.raises(ValueError, match=r"Layout.fsdp_dims: axis 'dp' is not an axis of the mesh"):
        layout.fsdp_dims("dp")


@pytest.mark.parametrize(
    ("spec", "axis", "stacked", "text"),
    [
        (("fsdp", None), "fsdp", 1, "shards dimension 0, one of the 1 that are stacked"),
        ((("fsdp", "tp"), None), "fsdp", 0, "the last axes of one dimension, in this order"),
        (("fsdp", "tp"), ("fsdp", "tp"), 0, "no one dimension can be gathered over"),
    ],
)
def test_what_fsdp_cannot_gather(spec, axis, stacked, text):
    layout = LayoutMap({"w": spec}).layout({"w": F32((8, 8))}, make_mesh(MESH), strict=False)
    with pytest.raises(ValueError, match=text):
        layout.fsdp_dims(axis, stacked=stacked)


def test_parts_of_a_layout():
    layout = its_rules().layout(a_model(), make_mesh(MESH))
    part = layout.under("layers")
    assert list(part) == ["down", "norm", "up"]
    assert part.specs == layout.specs["layers"]
    assert part.fsdp_dims(stacked=1) == {"down": 1, "norm": None, "up": 0}
    with pytest.raises(KeyError, match="'layer' has no part 'layer', but 'embedding', "):
        layout.under("layer")
    params = {"a": [Block(jnp.ones(8), jnp.ones(8))] * 2}
    blocks = LayoutMap({".*": ("tp",)}).layout(params, make_mesh("tp=8"))
    assert blocks.under("a/1").specs == Block(P("tp"), P("tp"))


def test_fsdp_over_two_axes_and_behind_tp():
    mesh = make_mesh("fx=2,fy=2,tp=2")
    rules = LayoutMap({"w": (None, ("tp", "fx", "fy"))})
    layout = rules.layout({"w": F32((4, 16))}, mesh)
    assert layout.fsdp_dims(("fx", "fy")) == {"w": 1}


def test_a_scan_with_its_dimensions(float64):
    """Nothing but the layout is written for shard_map and fsdp_scan."""
    mesh = make_mesh("fsdp=8")
    shapes = {"up": F64((3, 8, 16)), "down": F64((3, 16, 8))}
    rules = LayoutMap(
        {"up": "layers a b", "down": "layers b a"}, axes={"layers": None, "a": "fsdp", "b": None}
    )
    layout = rules.layout(shapes, mesh)
    params, x = filled(shapes), np.ones((8, 8))

    def layer(w, x):
        return jnp.tanh(x @ w["up"]) @ w["down"]

    def model(params, x):
        return fsdp_scan(layer, params, x, "fsdp", dim=layout.fsdp_dims(stacked=1))

    y = jax.shard_map(model, mesh=mesh, in_specs=(layout.specs, P("fsdp")), out_specs=P("fsdp"))(
        layout.place(params), x
    )
    wanted = x
    for index in range(3):
        wanted = layer(jax.tree.map(lambda w, i=index: w[i], params), wanted)
    assert_alike(y, wanted)


def of_matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(1e-3),
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(1e-3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        ),
        optax.sgd(1e-3, momentum=0.9),
        optax.lion(1e-3),
        optax.partition(
            {"a": optax.adam(1e-3), "b": optax.sgd(1e-3)},
            lambda p: jax.tree.map(lambda m: "a" if m else "b", of_matrices(p)),
        ),
        optax.adafactor(1e-3, min_dim_size_to_factor=8),
        optax.MultiSteps(optax.adam(1e-3), 2),
        optax.contrib.schedule_free_adamw(1e-3),
    ],
    ids=["adam", "masked", "momentum", "lion", "partition", "adafactor", "steps", "free"],
)
def test_states_of_optimizers(optimizer):
    layout = its_rules().layout(a_model(), make_mesh(MESH))
    params = layout.place(filled(a_model()))
    shapes = jax.eval_shape(optimizer.init, params)
    state = layout.like(shapes)
    made = jax.jit(optimizer.init, out_shardings=state.shardings)(params)
    assert jax.tree.structure(made) == jax.tree.structure(state.shardings)
    assert jax.tree.map(lambda x: x.shape, made) == jax.tree.map(lambda s: s.shape, state.shapes)
    for path, array in state.items():
        own = [layout[name] for name in layout if path.endswith(name)]
        if own and array.shape == own[0].shape:
            assert array.spec == own[0].spec
    assert state.table().bytes_per_device < sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(made)
    )


def test_factored_moments_lack_a_dimension():
    layout = its_rules().layout(a_model(), make_mesh(MESH))
    shapes = jax.eval_shape(optax.adafactor(1e-3, min_dim_size_to_factor=8).init, layout.shapes)
    state = layout.like(shapes)
    of = {path: array for path, array in state.items() if path.endswith("layers/up")}
    found = {path.split("/")[-3]: array.spec for path, array in of.items()}
    assert found["v_row"] == P(None, "fsdp")
    assert found["v_col"] == P(None, "tp")
    rows = [a for path, a in state.items() if path.endswith("embedding") and a.shape == (50,)]
    assert [a.padded_shape for a in rows] == [(52,)]


def test_factored_moments_of_square_weights_are_sharded_as_both_dimensions_allow():
    """Either may be gone: of layers' weights the dimension of the layers is there for certain."""
    params = {"w": F32((8, 8)), "layers": F32((4, 8, 8)), "padded": F32((7, 8))}
    rules = {"w": (None, "tp"), "layers": ("fsdp", "tp"), "padded": (Padded("tp"), None)}
    layout = LayoutMap(rules).layout(params, make_mesh("fsdp=2,tp=4"))
    state = layout.like({"v_row": {"w": F32((8,)), "layers": F32((4, 8))}})
    assert state["v_row/w"].spec == P(None)
    assert state["v_row/layers"].spec == P("fsdp", None)
    assert state["v_row/layers"].local_shape == (2, 8)
    both = LayoutMap({"w": (Padded("fsdp"), Padded("tp"))}).layout(
        {"w": F32((3, 3))}, make_mesh("fsdp=4,tp=2")
    )
    moment = both.like({"w": F32((3,))})["w"]
    assert (moment.shape, moment.padded_shape, moment.spec) == ((3,), (4,), P(None))
    with pytest.raises(LayoutError, match=r"'v_row/padded' float32\[8\] is like no parameter"):
        layout.like({"v_row": {"padded": F32((8,))}})  # of 7 entries or of 8


def test_arrays_that_are_like_no_parameter():
    layout = its_rules().layout(a_model(), make_mesh(MESH))
    tree = {"ema": a_model(), "step": 3, "noise": F32((4, 8)), "layers": {"up": F32((7, 7))}}
    with pytest.raises(LayoutError, match=r"Layout.like: 2 problems") as found:
        layout.like(tree)
    assert "'noise' float32[4,8] is like no parameter: its path ends in none" in str(found.value)
    assert "'layers/up' float32[7,7] is like no parameter: 'layers/up' has" in str(found.value)
    rules = LayoutMap({"noise": (None, "tp"), "layers/up": REPLICATED})
    state = layout.like(tree, rules)
    assert state.specs["noise"] == P(None, "tp")
    assert state.specs["ema"] == layout.specs
    with pytest.raises(LayoutError, match=r"'layers/up' float32.7,7. is matched by no rule"):
        layout.like(tree, LayoutMap({"noise": (None, "tp")}))


def test_moments_have_the_padding_of_their_parameters():
    """Two sizes could not be added up, or, of one entry, would be as if they could."""
    layout = LayoutMap({"w": (None, "tp")}, batch=P("dp")).layout(
        {"w": F32((1, 8))}, make_mesh("dp=2,tp=4")
    )
    rules = LayoutMap({"mu/w": (Padded("dp"), "tp")})
    with pytest.raises(
        LayoutError, match=r"is padded to \(2, 8\) by rule 'mu/w', but its parameter to \(1, 8\)"
    ):
        layout.like({"mu": layout.shapes}, rules)


def test_moments_over_the_axis_of_the_data(float64):
    """ZeRO-1: weights whole on all devices, moments in parts; the steps are those of one device."""
    params = {"embedding": F64((10, 6)), "layers": [{"w": F64((6, 8))} for _ in range(2)]}
    rules = {"embedding": (Padded("tp"), None), r"layers/\d/w": REPLICATED}
    layout = LayoutMap(rules, batch=P("dp")).layout(params, make_mesh("dp=2,tp=4"))
    optimizer = optax.adam(1e-2)
    shapes = jax.eval_shape(optimizer.init, layout.shapes)
    moments = LayoutMap({r".*/layers/\d/w": ("dp", "tp"), ".*/embedding": ("dp", None)})
    state = layout.like(shapes, moments)
    mu = state["0/mu/layers/1/w"]
    assert (mu.spec, mu.local_shape, mu.rule) == (P("dp", "tp"), (3, 2), r".*/layers/\d/w")
    assert state["0/count"].spec == P()
    # The parameter's padding: what is written has 10 rows, and what is on devices 12, in 2 parts.
    of_table = state["0/nu/embedding"]
    assert (of_table.shape, of_table.padded_shape, of_table.local_shape) == (
        (10, 6),
        (12, 6),
        (6, 6),
    )

    def step(params, moments):
        def loss(params):
            return jnp.sum(jnp.sin(params["embedding"])) + sum(
                jnp.sum(jnp.sin(layer["w"])) for layer in params["layers"]
            )

        gradients = jax.grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    start = filled(params)
    with jax.numpy_dtype_promotion("standard"):
        expected = step(*step(start, optimizer.init(start)))
        made = jax.jit(optimizer.init, out_shardings=state.shardings)(layout.place(start))
        run = jax.jit(step, out_shardings=(layout.shardings, state.shardings))
        found = run(*run(layout.place(start), made))
    assert found[1][0].mu["layers"][0]["w"].addressable_shards[0].data.shape == (3, 2)
    assert_alike((layout.gather(found[0]), state.gather(found[1])), expected)


def test_rules_of_states_hold_or_are_refused():
    params = {"w": F32((10, 8))}
    mesh = make_mesh("dp=2,tp=4")
    layout = LayoutMap({"w": Split("tp", 0)}, batch=P("dp")).layout(params, mesh)
    moments = {"mu": params, "count": F32(())}
    for rules, text in {
        "muu/w": r"rule 'muu/w' matches no array; the nearest path is 'mu/w'",
        ".*": r"'count' float32\[\]: rule '.\*': .* is of 2 dimensions, and the array has 0; give",
        "mu/w": r"sharded along dimension 0 by rule .* unlike its parameter, each of whose shards",
    }.items():
        with pytest.raises(LayoutError, match=text):
            layout.like(moments, LayoutMap({rules: ("dp", None)}))
    several = LayoutMap({"mu/.*": ("dp",), ".*/w": ("dp",)})
    with pytest.raises(LayoutError, match=r"'mu/w' float32.* is matched by 2 rules"):
        layout.like(moments, several)
    state = layout.like(moments, LayoutMap({"mu/w": ("tp", "dp")}))
    assert state["mu/w"].blocks[0] == layout["w"].blocks[0]
    assert state["mu/w"].local_shape == (3, 4)


def test_results_outside_of_shard_map():
    rules = its_rules(results={"block/.*": ("fsdp", "tp"), "wrong": ("fsdp", None, "tp")})
    layout = rules.layout(a_model(), make_mesh(MESH))
    y = jax.jit(lambda x: layout.constrain(x * 2, "block/3"))(jnp.ones((4, 8)))
    assert y.sharding.is_equivalent_to(NamedSharding(layout.mesh, P("fsdp", "tp")), 2)
    for path, text in {
        "blok/3": "'blok/3' float32[4,8] is matched by no rule; the nearest rule is 'block/.*'",
        "wrong": "is of 3 dimensions, and the array has 2",
    }.items():
        with pytest.raises(LayoutError) as found:
            layout.constrain(jnp.ones((4, 8)), path)
        assert text in str(found.value)
    with pytest.raises(LayoutError, match=r"'tp' .4. does not divide dimension 1: 6 = 1 x 4 . 2"):
        layout.constrain(jnp.ones((4, 6)), "block/0")
    padded = its_rules(results={"block": (Padded("tp"), None)}).layout(a_model(), make_mesh(MESH))
    with pytest.raises(
        ValueError, match=r"would be padded to \(8, 8\); results are not: name axes"
    ):
        padded.constrain(jnp.ones((5, 8)), "block")
    with pytest.raises(ValueError, match="the map has no rules for results"):
        its_rules().layout(a_model(), make_mesh(MESH)).constrain(jnp.ones(2), "block/0")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_meshes_of_either_type_and_abstract_ones(kind):
    mesh = make_mesh(MESH, axis_types=kind)
    layout = its_rules().layout(a_model(), mesh)
    back = layout.gather(layout.place(filled(a_model())))
    jax.tree.map(np.testing.assert_array_equal, back, filled(a_model()))
    abstract = its_rules().layout(a_model(), AbstractMesh((2, 4), ("fsdp", "tp")))
    assert abstract.specs == layout.specs
    with pytest.raises(TypeError, match="which has no devices; give a Mesh"):
        abstract.place(filled(a_model()))
    with pytest.raises(
        TypeError, match=r"mesh must be a jax.sharding.Mesh, got 'tp=8' of type str"
    ):
        its_rules().layout(a_model(), "tp=8")


def test_equal_by_value():
    mesh = make_mesh(MESH)
    one, same = (its_rules().layout(a_model(), mesh) for _ in range(2))
    assert one == same
    assert len({one, same}) == 1
    assert one != its_rules().layout(a_model(), make_mesh("fsdp=4,tp=2"))


def test_the_table_has_the_worst_first():
    table = its_rules().layout(a_model(), make_mesh(MESH)).table()
    assert [row["path"] for row in table.rows][:2] == ["layers/norm", "scale"]
    assert table.rows[0]["replicated_per_device"] == 96 * 7 / 8
    lines = str(table).splitlines()
    assert lines[0].split("  ")[0] == "path"
    assert any("vocab" not in line and "2,0" in line for line in lines)  # padding
    assert lines[-1].startswith("5 arrays on 8 devices (fsdp=2, tp=4): ")
    assert "... and 3 arrays more" in table.text(2)
    assert '"bytes_per_device"' in table.json()


def test_leaves_that_are_no_arrays_have_no_layout():
    layout = LayoutMap({"w": ("tp",)}).layout({"w": jnp.ones(8), "name": "text"}, make_mesh("tp=8"))
    assert layout.specs == {"w": P("tp"), "name": None}
    placed = layout.place({"w": np.ones(8), "name": "text"})
    assert placed["name"] == "text"


def test_empty_and_scalar_arrays():
    rules = LayoutMap(
        {"none": ("tp",), "scalar": REPLICATED, "one": (Padded("tp"),), "s": Split("tp", 0)}
    )
    params = {
        "none": np.zeros((0, 3)),
        "scalar": np.float32(2),
        "one": np.ones(1),
        "s": np.ones((0, 2)),
    }
    layout = rules.layout(params, make_mesh("tp=8"))
    assert layout["one"].padded_shape == (8,)
    assert layout["none"].local_shape == (0, 3)
    back = layout.gather(layout.place(params))
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_padding_in_whole_heads():
    rules = LayoutMap({"q": (None, Padded("tp", multiple=3)), "k": (None, Padded("tp", size=32))})
    layout = rules.layout({"q": F32((4, 15)), "k": F32((4, 9))}, make_mesh("tp=8"))
    assert layout["q"].padded_shape == (4, 24)
    assert layout["k"].padded_shape == (4, 32)
    with pytest.raises(LayoutError, match=r"Padded: size=12 must be at least the dimension's 9"):
        LayoutMap({"k": (Padded("tp", size=12),)}).layout({"k": F32((9,))}, make_mesh("tp=8"))


@jax.tree_util.register_dataclass
@dataclass
class Block:
    value: jax.Array  # a name that boxes of Flax have too
    bias: jax.Array


def test_paths_of_plain_containers():
    params = {"a": [Block(jnp.ones(8), jnp.ones(2))], "t": (jnp.ones(1), {"x": jnp.ones(3)})}
    layout = LayoutMap({".*": REPLICATED}).layout(params, make_mesh("tp=8"), strict=False)
    assert list(layout) == ["a/0/value", "a/0/bias", "t/0", "t/1/x"]


def test_paths_of_flax_and_equinox():
    import equinox as eqx
    import flax.linen as nn
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.blocks = nnx.List([nnx.Linear(4, 8, rngs=rngs) for _ in range(2)])

    rules = LayoutMap({".*": REPLICATED})
    mesh = make_mesh("tp=8")
    names = ["blocks/0/bias", "blocks/0/kernel", "blocks/1/bias", "blocks/1/kernel"]
    state = nnx.state(Net())
    assert list(rules.layout(state, mesh, strict=False)) == names
    assert list(rules.layout(nnx.to_pure_dict(state), mesh, strict=False)) == names
    assert list(rules.layout(Net(), mesh, strict=False)) == names

    boxed = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "tp")))
    shapes = jax.eval_shape(boxed.init, jax.random.key(0), jnp.ones((2, 4)))
    assert list(rules.layout(shapes, mesh, strict=False)) == ["params/bias", "params/kernel"]

    mlp = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    found = rules.layout(mlp, mesh, strict=False)
    assert list(found) == ["layers/0/weight", "layers/0/bias", "layers/1/weight", "layers/1/bias"]
    assert jax.tree.structure(found.specs) == jax.tree.structure(eqx.filter(mlp, eqx.is_array))

    sharded = LayoutMap({".*kernel": (None, "tp"), ".*bias": ("tp",)}).layout(state, mesh)
    placed = sharded.place(state)
    assert placed["blocks"][0]["kernel"].get_value().sharding.spec == P(None, "tp")


def test_two_arrays_of_one_path():
    with pytest.raises(ValueError, match="params has two arrays of path 'a/b'"):
        LayoutMap({}).layout({"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(2)}, make_mesh("tp=8"))
