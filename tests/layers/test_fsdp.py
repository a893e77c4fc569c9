"""FSDP: linear layers whose weights are gathered, and the scan that gathers them again."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from wide import assert_alike, wide

from jaxpar import Axis, make_mesh
from jaxpar.compiler.jaxprs import subjaxprs
from jaxpar.layers import fsdp_gather, fsdp_linear, fsdp_scan
from jaxpar.testing import assert_matches_reference, count_collectives

MODES = ("naive", "unidirectional", "bidirectional")


@pytest.fixture(autouse=True)
def smallest(request, monkeypatch):
    """Leaves travel by themselves, though they are small, but in the tests of buckets."""
    if "bucket" not in request.node.name:
        monkeypatch.setattr("jaxpar.ring.blocks.SMALL", 0)


def normal(*shape, dtype="float32"):
    return np.random.default_rng([*shape]).standard_normal(shape).astype(dtype)


def mesh_of(text):
    sizes = [int(part.split("=")[1]) for part in text.split(",")]
    return make_mesh(text, devices=jax.devices()[: int(np.prod(sizes))])


@pytest.mark.parametrize(
    ("mode", "dim", "sharded_bias", "check_vma"),
    [
        ("naive", 0, True, True),
        ("unidirectional", 1, False, True),
        ("bidirectional", 0, False, False),
        ("auto", 1, True, False),
    ],
)
def test_linear(mode, dim, sharded_bias, check_vma):
    spec = P("f") if dim == 0 else P(None, "f")
    assert_matches_reference(
        lambda x, w, b: fsdp_linear(x, w, Axis("f", mode=mode), bias=b, dim=dim),
        lambda x, w, b: x @ w + b,
        normal(4, 2, 8),
        normal(8, 12),
        normal(12),
        mesh=mesh_of("f=4"),
        in_specs=(P("f"), spec, P("f") if sharded_bias else P()),
        out_specs=P("f"),
        check_vma=check_vma,
        max_directions=4,
    )


@pytest.mark.parametrize(
    ("mesh", "axes", "mode", "check_vma"),
    [
        ("a=2,b=3", ("b", "a"), "naive", False),
        ("a=2,b=2,c=2", ("c", "a"), "unidirectional", True),
        ("a=2,b=3", ("b", "a"), "bidirectional", True),
    ],
)
def test_linear_over_several_axes(mesh, axes, mode, check_vma):
    assert_matches_reference(
        lambda x, w: fsdp_linear(x, w, Axis(axes, mode=mode)),
        lambda x, w: x @ w,
        normal(12, 2, 12),
        normal(12, 4),
        mesh=mesh_of(mesh),
        in_specs=(P(axes), P(axes)),
        out_specs=P(axes),
        check_vma=check_vma,
        max_directions=4,
    )


def saved_by(function, mesh, *args, in_specs):
    """The local shapes of what autodiff keeps."""

    def residuals(*args):
        _, pullback = jax.vjp(function, *args)
        return jax.tree.leaves(pullback)

    shapes = []

    def look(*args):
        shapes.extend(x.shape for x in residuals(*args))
        return args[0]

    jax.jit(jax.shard_map(look, mesh=mesh, in_specs=in_specs, out_specs=in_specs[0])).trace(*args)
    return shapes


@pytest.mark.parametrize("mode", MODES)
def test_linear_keeps_the_shards(mode):
    shapes = saved_by(
        lambda x, w: fsdp_linear(x, w, Axis("f", mode=mode)),
        mesh_of("f=4"),
        normal(4, 24),
        normal(24, 12),
        in_specs=(P("f"), P("f")),
    )
    assert sorted(s for s in shapes if len(s) == 2) == [(1, 24), (6, 12)]


over_meshes = pytest.mark.parametrize(
    ("mesh", "axes", "mode", "check_vma"),
    [
        ("a=2,b=3", ("b", "a"), "naive", True),
        ("a=2,b=3", ("b", "a"), "bidirectional", False),
        ("a=4", "a", "unidirectional", True),
        ("a=1", "a", "unidirectional", False),
    ],
)


@over_meshes
def test_gather(mesh, axes, mode, check_vma):
    size = mesh_of(mesh).size
    assert_matches_reference(
        lambda tree: jax.tree.map(
            lambda x: x[None], fsdp_gather(tree, Axis(axes, mode=mode), dim={"w": -1, "b": None})
        ),
        lambda tree: {"w": np.stack([tree["w"]] * size), "b": np.stack([tree["b"]] * size)},
        {"w": normal(3, 2, 24), "b": normal(5)},
        mesh=mesh_of(mesh),
        in_specs=({"w": P(None, None, axes), "b": P()},),
        out_specs={"w": P(axes), "b": P(axes)},
        check_vma=check_vma,
        max_directions=4,
    )


@over_meshes
def test_a_bucket_of_small_leaves(mesh, axes, mode, check_vma):
    """Leaves of any shapes, cut along any dimensions, and what a bucket cannot hold."""
    size = mesh_of(mesh).size
    cut = {"w": 1, "b": 0, "v": -1, "whole": None}
    specs = {"w": P(None, axes), "b": P(axes), "v": P(None, None, axes), "whole": P()}
    assert_matches_reference(
        lambda tree: jax.tree.map(
            lambda x: x[None], fsdp_gather(tree, Axis(axes, mode=mode), dim=cut)
        ),
        lambda tree: jax.tree.map(lambda x: np.stack([x] * size), tree),
        {"w": normal(3, 24, 2), "b": normal(24), "v": normal(2, 1, 48), "whole": normal(5)},
        mesh=mesh_of(mesh),
        in_specs=(specs,),
        out_specs=dict.fromkeys(cut, P(axes)),
        check_vma=check_vma,
        max_directions=4,
    )


def test_a_bucket_is_one_collective_of_a_dtype():
    """Its members share one each way; large leaves, and those of another dtype, have their own."""
    leaves = {"a": (8,), "b": (16, 3), "c": (8, 2), "large": (2048, 128)}
    tree = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in leaves.items()}
    tree["half"] = jax.ShapeDtypeStruct((8,), "bfloat16")

    def squares(tree):
        whole = fsdp_gather(tree, Axis("a", mode="naive"))
        return sum(jnp.sum(x.astype("float32") ** 2) for x in jax.tree.leaves(whole))[None]

    run = jax.shard_map(squares, mesh=mesh_of("a=8"), in_specs=(P("a"),), out_specs=P("a"))
    found = count_collectives(run, tree)
    assert found.forward == {"all_gather": 3}
    assert sum(found.backward.values()) == 3


def layer(weights, x):
    return x + jnp.tanh(x @ weights["w"] + weights["b"]) @ weights["v"]


def network_in_numpy(stack, x):
    for w, b, v in zip(stack["w"], stack["b"], stack["v"], strict=True):
        x = x + np.tanh(x @ w + b) @ v
    return x


SHARDED = {"w": 0, "b": None, "v": 1}


def stack_of(layers, k=6, hidden=4):
    shapes = {"w": (k, hidden), "b": (hidden,), "v": (hidden, k)}
    return {name: normal(layers, *shape) / 4 for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("mode", "layers", "check_vma"),
    [
        ("naive", 1, True),
        ("auto", 2, False),
        ("unidirectional", 2, True),
        ("bidirectional", 4, False),
    ],
)
def test_scan(mode, layers, check_vma):
    check_scan(layer, layers, check_vma, mode=mode)


def check_scan(layer, layers, check_vma, *, mode="auto", policy=None):
    axis = Axis("f", mode=mode)
    assert_matches_reference(
        lambda stack, x: fsdp_scan(layer, stack, x, axis, dim=SHARDED, policy=policy),
        network_in_numpy,
        stack_of(layers),
        normal(4, 6),
        mesh=mesh_of("f=2"),
        in_specs=({"w": P(None, "f"), "b": P(), "v": P(None, None, "f")}, P("f")),
        out_specs=P("f"),
        check_vma=check_vma,
        max_directions=4,
    )


@pytest.mark.parametrize(("mode", "check_vma"), [("naive", True), ("bidirectional", False)])
def test_scan_twice_in_reverse(mode, check_vma, float64):
    stack, x = wide((stack_of(3), normal(4, 6)))

    def penalty(network):  # of the gradient of the network's sum of squares
        def gradient(stack):
            return jax.grad(lambda stack: jnp.sum(network(stack, x) ** 2))(stack)

        return lambda stack: sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient(stack)))

    mapped = jax.shard_map(
        lambda stack, x: fsdp_scan(layer, stack, x, Axis("f", mode=mode), dim=SHARDED),
        mesh=mesh_of("f=2"),
        in_specs=({"w": P(None, "f"), "b": P(), "v": P(None, None, "f")}, P("f")),
        out_specs=P("f"),
        check_vma=check_vma,
    )

    def plain(stack, x):
        return jax.lax.scan(lambda x, weights: (layer(weights, x), None), x, stack)[0]

    found, wanted = (jax.jit(jax.grad(penalty(f)))(stack) for f in (mapped, plain))
    assert_alike(found, wanted)


@pytest.mark.parametrize(
    ("mesh", "axes", "data", "mode", "check_vma"),
    [
        ("d=2,f=2", "f", ("d", "f"), "unidirectional", False),
        ("a=3,b=2", ("b", "a"), ("a", "b"), "naive", True),
        ("a=2,b=2,c=2", ("c", "a"), ("b", "a", "c"), "bidirectional", True),
    ],
)
def test_scan_over_several_axes(mesh, axes, data, mode, check_vma):
    assert_matches_reference(
        lambda stack, x: fsdp_scan(layer, stack, x, Axis(axes, mode=mode), dim=SHARDED),
        network_in_numpy,
        stack_of(3, k=12),
        normal(24, 12),
        mesh=mesh_of(mesh),
        in_specs=({"w": P(None, axes), "b": P(), "v": P(None, None, axes)}, P(data)),
        out_specs=P(data),
        check_vma=check_vma,
        max_directions=4,
    )


def test_scan_of_a_layer_that_closes_over_arrays():
    """Floats get gradients; a tracer of an index works, under jit, scan and jax.checkpoint."""

    def fn(stack, scale, x):
        offset = lax.axis_index("f") * 0

        @jax.checkpoint
        def network(stack, scale, x):
            return fsdp_scan(
                lambda w, x: jnp.sin(x @ w) * scale + offset.astype(x.dtype), stack, x, "f"
            )

        return lax.scan(lambda x, _: (network(stack, scale, x), None), x, None, length=2)[0]

    def reference(stack, scale, x):
        for _ in range(2):
            for w in stack:
                x = np.sin(x @ w) * scale
        return x

    assert_matches_reference(
        fn,
        reference,
        normal(3, 4, 4),
        normal(4),
        normal(4, 4),
        mesh=mesh_of("f=4"),
        in_specs=(P(None, "f"), P(), P("f")),
        out_specs=P("f"),
        check_vma=True,
        max_directions=4,
    )


def test_scan_hands_on_a_pytree_with_integers():
    def counted(w, state):
        x, count = state
        return jnp.tanh(x @ w["w"]) * w["use"].astype(x.dtype), count + w["use"]

    stack = {"w": normal(3, 4, 4), "use": np.array([1, 0, 1], "int32")}

    def fn(stack, x):
        return fsdp_scan(counted, stack, (x, jnp.int32(0)), "f", dim={"w": 0, "use": None})

    def reference(stack, x):
        for w, use in zip(stack["w"], stack["use"], strict=True):
            x = np.tanh(x @ w) * use
        return x, stack["use"].sum()

    assert_matches_reference(
        lambda stack, x: jax.tree.map(lambda x: x[None], fn(stack, x)),
        lambda stack, x: (reference(stack, x)[0][None], np.full(4, 2)),
        stack,
        normal(1, 4),
        mesh=mesh_of("f=4"),
        in_specs=({"w": P(None, "f"), "use": P()}, P()),
        out_specs=(P(None, None, None), P("f")),
        check_vma=False,
    )


def test_what_layers_hand_on_replicated_stays_so():
    """A mean over all devices beside what each device has, with its gradient."""

    def layer(w, state):
        x, means = state
        x = jnp.sin(x @ w)
        return x, jnp.concatenate([means[1:], lax.pmean(x, "f").sum()[None]])

    def fn(stack, x):
        x, means = fsdp_scan(layer, stack, (x, jnp.zeros(3, x.dtype)), "f")
        return x, means * means

    def reference(stack, x):
        means = []
        for w in stack:
            x = np.sin(x @ w)
            means.append(x.mean(axis=0).sum() ** 2)
        return x, np.array(means)

    assert_matches_reference(
        fn,
        reference,
        normal(3, 4, 4),
        normal(4, 4),
        mesh=mesh_of("f=4"),
        in_specs=(P(None, "f"), P("f")),
        out_specs=(P("f"), P()),
        max_directions=4,
    )


def test_gradients_beside_integers():
    tree = {"w": normal(8, 4), "use": np.arange(32, dtype="int32").reshape(8, 4) % 3}

    def apply(tree, x):
        return x @ (tree["w"] * tree["use"].astype(x.dtype))

    def fn(tree, x):  # what no gradient travels for, wire_dtype says nothing about
        axis = Axis("f", mode="bidirectional", wire_dtype="float32")
        return apply(fsdp_gather(tree, axis), x)

    specs = {"w": P("f"), "use": P("f")}
    assert_matches_reference(
        fn,
        apply,
        tree,
        normal(4, 8),
        mesh=mesh_of("f=2"),
        in_specs=(specs, P("f")),
        out_specs=P("f"),
        check_vma=False,
    )


def test_scan_sends_no_gradients_of_integers():
    def layer(tree, x):
        return jnp.tanh(x @ (tree["w"] * tree["use"].astype(x.dtype)))

    specs = {"w": P(None, "f"), "use": P(None, "f")}
    run = jax.shard_map(
        partial(fsdp_scan, layer, axis=Axis("f", mode="naive", wire_dtype="float32")),
        mesh=mesh_of("f=4"),
        in_specs=(specs, P("f")),
        out_specs=P("f"),
    )
    stack = {"w": normal(2, 8, 8), "use": np.ones((2, 8, 8), "int32")}
    counts = count_collectives(
        lambda w, x: run({"w": w, "use": stack["use"]}, x), stack["w"], normal(8, 8)
    )
    assert counts.forward == {"all_gather": 4}
    assert counts.backward == {"all_gather": 4, "psum_scatter": 2}


def test_scan_keeps_inputs_and_shards_only():
    stack, x = stack_of(4, k=24, hidden=10), normal(8, 24)
    shapes = saved_by(
        lambda stack, x: fsdp_scan(layer, stack, x, "f", dim=SHARDED),
        mesh_of("f=4"),
        stack,
        x,
        in_specs=({"w": P(None, "f"), "b": P(), "v": P(None, None, "f")}, P("f")),
    )
    # shards [4, 24/4, 10], [4, 10], [4, 10, 24/4]; the states of four layers
    assert sorted(shapes) == sorted([(4, 6, 10), (4, 10), (4, 10, 6), (4, 2, 24)])


def test_scan_gathers_each_layer_once_forward_and_once_backward():
    mesh, layers = mesh_of("f=4"), 5
    run = jax.shard_map(
        partial(fsdp_scan, lambda w, x: jnp.tanh(x @ w), axis=Axis("f", mode="naive")),
        mesh=mesh,
        in_specs=(P(None, "f"), P("f")),
        out_specs=P("f"),
    )
    args = normal(layers, 8, 8), normal(8, 8)
    counts = count_collectives(run, *args)
    assert counts.forward == {"all_gather": layers}
    assert counts.backward == {"all_gather": layers, "psum_scatter": layers}


# -- what a policy keeps of layers ----------------------------------------------------------------

POLICIES = {
    "none": None,
    "a name": jax.checkpoint_policies.save_only_these_names("hidden"),
    "another name": jax.checkpoint_policies.save_only_these_names("other"),
    "everything": jax.checkpoint_policies.everything_saveable,
}


@jax.jit
def inner(w, x):
    return jnp.einsum("bk,kh->bh", x, w)


def named_layer(weights, x):
    hidden = checkpoint_name(inner(weights["w"], x) + weights["b"][None], "hidden")
    return x + jnp.tanh(hidden) @ weights["v"]


def scan_by(policy, layer=named_layer, check_vma=True):
    return jax.shard_map(
        lambda stack, x: fsdp_scan(
            layer, stack, x, Axis("f", mode="naive"), dim=SHARDED, policy=policy
        ),
        mesh=mesh_of("f=2"),
        in_specs=({"w": P(None, "f"), "b": P(), "v": P(None, None, "f")}, P("f")),
        out_specs=P("f"),
        check_vma=check_vma,
    )


@pytest.mark.parametrize(("policy", "check_vma"), [("a name", True), ("everything", False)])
def test_a_policy_of_scan(policy, check_vma):
    check_scan(named_layer, 3, check_vma, policy=POLICIES[policy])


def matmuls(jaxpr):
    total = 0
    for eqn in jaxpr.eqns:
        inside = sum(matmuls(sub) for sub in subjaxprs(eqn.params))
        total += inside * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        total += eqn.primitive.name == "dot_general"
    return total


@pytest.mark.parametrize(
    ("policy", "extra", "repeated"),
    [("none", 0, 6), ("a name", 3 * 2 * 4, 0), ("another name", 0, 3), ("everything", None, 0)],
)
def test_what_a_policy_keeps_of_scan(policy, extra, repeated):
    """Weights are gathered again under any; hidden features, [3, 2, 4], are not made again."""
    stack, x, mapped = stack_of(3), normal(4, 6), scan_by(POLICIES[policy])
    counts = count_collectives(mapped, stack, x)
    assert counts.forward == {"all_gather": 6}
    assert counts.backward == {"all_gather": 6, "psum_scatter": 6, "psum": 1}
    out, pull = jax.vjp(jax.jit(mapped), stack, x)
    shapes = [leaf.shape for leaf in jax.tree.leaves(pull)]  # over two devices, one behind other
    assert not {(6, 6, 4), (6, 4, 6)} & set(shapes)  # whole weights
    sizes = 3 * (3 * 4 + 4 + 4 * 3) + 3 * 2 * 6  # shards, inputs
    if extra is not None:
        assert counts.residual_bytes == 4 * (sizes + extra)
    else:
        assert counts.residual_bytes > 4 * (sizes + 3 * 2 * 4)
    # Two gradients for each of two a layer.
    assert matmuls(jax.make_jaxpr(pull)(out).jaxpr) == 3 * 4 + repeated


def test_a_policy_of_scan_beside_integers_and_what_a_layer_closes_over(float64):
    """And twice in reverse."""
    stack, x, scale = wide((stack_of(3), normal(4, 6), normal(6)))
    stack["step"] = np.arange(3, dtype="int32")

    def network(scale, stack, x, policy=None, plain=False):
        def layer(weights, state):
            x, count = state
            own = {name: weights[name] for name in "wbv"}
            x = named_layer(own, x) * (scale * (1 + weights["step"]).astype(x.dtype))[None]
            return x, count + weights["step"]

        state = x, jnp.int32(0)
        if plain:
            return lax.scan(lambda s, w: (layer(w, s), None), state, stack)[0][0]
        return fsdp_scan(layer, stack, state, "f", dim={**SHARDED, "step": None}, policy=policy)[0]

    def second(network):
        def total(scale, floats):
            return jnp.sum(jnp.sin(network(scale, {**floats, "step": stack["step"]}, x)))

        def penalty(*given):
            gradients = jax.grad(total, (0, 1))(*given)
            return sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients))

        return jax.jit(jax.grad(penalty, (0, 1)))(scale, {name: stack[name] for name in "wbv"})

    specs = {"w": P(None, "f"), "b": P(), "v": P(None, None, "f"), "step": P()}
    mapped = jax.shard_map(
        partial(network, policy=POLICIES["a name"]),
        mesh=mesh_of("f=2"),
        in_specs=(P(), specs, P("f")),
        out_specs=P("f"),
    )
    assert_alike(second(mapped), second(partial(network, plain=True)))


def test_what_is_no_policy():
    with pytest.raises(TypeError, match=r"fsdp_scan: policy must be a function, one of jax\.check"):
        run_scan(keep, normal(2, 4), normal(4), policy="everything_saveable")


@pytest.mark.parametrize(("layers", "check_vma"), [(1, True), (2, False), (5, True)])
def test_scan_of_integers_among_the_weights(layers, check_vma, float64):
    stack, x, scale = wide((stack_of(layers, k=8, hidden=12), normal(8, 8), normal(8)))
    stack["step"] = jnp.arange(layers * 8).reshape(layers, 8)  # gathered too, without a gradient
    specs = {"w": P(None, "f"), "b": P(), "v": P(None, None, "f"), "step": P(None, "f")}

    def scaled(w, x, scale):
        return layer({name: w[name] for name in "wbv"}, x) * scale + w["step"].astype(x.dtype)

    def loss(stack, x, scale):
        dims, axis = {**SHARDED, "step": 0}, Axis("f", mode="naive")
        y = fsdp_scan(lambda w, x: scaled(w, x, scale), stack, x, axis, dim=dims)
        return lax.psum(jnp.sum(jnp.sin(y)), "f")

    def on_one_device(stack, x, scale):
        y, _ = lax.scan(lambda x, w: (scaled(w, x, scale), None), x, stack)
        return jnp.sum(jnp.sin(y))

    mapped = jax.shard_map(
        loss,
        mesh=mesh_of("f=4"),
        in_specs=(specs, P("f"), P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    (value, (of_stack, *others)), (wanted, (of_stack_wanted, *others_wanted)) = (
        jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2), allow_int=True))(stack, x, scale)
        for fn in (mapped, on_one_device)
    )
    for gradients in (of_stack, of_stack_wanted):
        assert gradients.pop("step").dtype == jax.dtypes.float0
    assert_alike((value, of_stack, others), (wanted, of_stack_wanted, others_wanted))


def test_bf16_gradients_are_summed_in_float32():
    assert_matches_reference(
        lambda stack, x: fsdp_scan(lambda w, x: jnp.tanh(x @ w), stack, x, "f"),
        lambda stack, x: np.tanh(np.tanh(x @ stack[0]) @ stack[1]),
        normal(2, 16, 16, dtype=jnp.bfloat16) / 4,
        normal(16, 16, dtype=jnp.bfloat16),
        mesh=mesh_of("f=8"),
        in_specs=(P(None, "f"), P("f")),
        out_specs=P("f"),
        check_vma=True,
        max_directions=4,
    )


NARROW = Axis("f", wire_dtype="int32")


def run_scan(layer_fn, stack, x, axis="f", **options):
    return jax.shard_map(
        lambda stack, x: fsdp_scan(layer_fn, stack, x, axis, **options),
        mesh=mesh_of("f=4"),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )(stack, x)


def keep(w, x):
    return x


@pytest.mark.parametrize(
    ("error", "text", "layer_fn", "shapes", "options"),
    [
        (TypeError, r"float32\[4\], and it returned float32\[2\]", lambda w, x: x[:2], (2, 4), {}),
        (ValueError, r"at least 1, got local shapes \[\(0, 4\)\]", keep, (0, 4), {}),
        (ValueError, r"dim=1 is out of range for a local shape \(4,\)", keep, (2, 4), {"dim": 1}),
        (
            ValueError,
            r"dim=\(0, 1\) is no prefix of the pytree",
            keep,
            (2, 4),
            {"dim": (0, 1)},
        ),
        (TypeError, r"wire_dtype=int32 cannot carry", keep, (2, 4), {"axis": NARROW}),
    ],
)
def test_errors_of_scan(error, text, layer_fn, shapes, options):
    with pytest.raises(error, match=f"fsdp_scan: .*{text}"):
        run_scan(layer_fn, normal(*shapes), normal(4), **options)


def test_an_unknown_mode():
    with pytest.raises(ValueError, match=r"^Axis: mode must be one of"):
        run_scan(keep, normal(2, 4), normal(4), axis=Axis("f", mode="fast"))


def test_stacks_of_different_lengths():
    with pytest.raises(ValueError, match=r"one number of layers.* \[\(2, 3\), \(3, 3\)\]"):
        run_scan(keep, (normal(2, 3), normal(3, 3)), normal(4))


def test_errors_of_linear():
    run = jax.shard_map(
        lambda x, w, b: fsdp_linear(x, w, "f", bias=b),
        mesh=mesh_of("f=4"),
        in_specs=(P("f"), P("f"), P()),
        out_specs=P("f"),
    )
    text = r"bias of w has local shape \(5,\), but the result has 12 columns .* or 3 over axis 'f'"
    with pytest.raises(ValueError, match=f"fsdp_linear: the {text}"):
        jax.eval_shape(run, normal(4, 8), normal(8, 12), normal(5))


@pytest.mark.parametrize("over", ["a", "b", ("a", "b"), None])
def test_a_bias_over_fewer_axes_than_its_weight(over, float64):
    """Types say over which it is sharded."""
    x, w, b = wide((normal(8, 6), normal(6, 8), normal(8)))
    mapped = jax.shard_map(
        lambda x, w, b: fsdp_linear(x, w, ("a", "b"), bias=b, dim=1),
        mesh=mesh_of("a=2,b=2"),
        in_specs=(P(("a", "b")), P(None, ("a", "b")), P(over)),
        out_specs=P(("a", "b")),
    )
    grad = jax.jit(jax.grad(lambda b: jnp.sum(jnp.sin(mapped(x, w, b)))))(b)
    assert_alike((jax.jit(mapped)(x, w, b), grad), (x @ w + b, np.cos(x @ w + b).sum(0)))


def test_a_bias_of_fractions_of_a_result_of_integers():
    run = jax.shard_map(
        lambda x, w, b: fsdp_linear(x, w, "f", bias=b),
        mesh=mesh_of("f=4"),
        in_specs=(P("f"), P("f"), P()),
        out_specs=P("f"),
    )
    given = [np.ones(shape, np.int8) for shape in ((4, 8), (8, 12))]
    with pytest.raises(TypeError, match="the bias is float32, but the result int32; cast one"):
        jax.eval_shape(run, *given, np.ones(12, np.float32))


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [("naive", "int32"), ("unidirectional", "float32"), ("bidirectional", "int32")],
)
def test_a_counter_stays_replicated(mode, dtype):
    """What is handed on beside what varies keeps its own type, forward and in a gradient."""

    def run(w, x):
        def layer(w, state):
            h, count = state
            return jnp.tanh(h @ w), count + jnp.ones((), dtype)

        return fsdp_scan(layer, w, (x, jnp.zeros((), dtype)), Axis("f", mode=mode))

    mapped = jax.shard_map(
        run, mesh=mesh_of("f=4"), in_specs=(P(None, "f"), P("f")), out_specs=(P("f"), P())
    )
    w, x = normal(3, 4, 4), normal(8, 4)

    def total(w):
        out, count = mapped(w, x)
        return jnp.sum(out), count

    grad, count = jax.jit(jax.grad(total, has_aux=True))(w)
    assert count == 3
    assert np.all(np.isfinite(grad))


def test_a_complex_bias_of_a_real_result():
    x, w, b = normal(8, 4), normal(4, 4), np.ones(4, np.complex64)
    mapped = jax.shard_map(
        lambda x, w, b: fsdp_linear(x, w, "f", bias=b),
        mesh=mesh_of("f=4"),
        in_specs=(P("f"), P("f"), P()),
        out_specs=P("f"),
    )
    with pytest.raises(TypeError, match=r"^fsdp_linear: the bias is complex64, but the result"):
        jax.eval_shape(mapped, x, w, b)
