"""What stages and losses return beside themselves, and the loss alone, against one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from staged import normal

import jaxpar
from jaxpar.moe import route, routing_statistics, update_router_bias
from jaxpar.pipeline import gpipe, interleaved_1f1b, value, value_and_grad
from jaxpar.testing import poisoned_rows

WIDTH, WORDS, SEQUENCE, EXPERTS, LAYERS = 4, 8, 4, 6, 8


@pytest.fixture(autouse=True)
def float64():
    """Memory that is read before it is written shows as NaN."""
    with jax.enable_x64(True), poisoned_rows():
        yield


def parameters():
    layers = {
        "w": normal(1, LAYERS, WIDTH, WIDTH) / 2,
        "router": normal(2, LAYERS, WIDTH, EXPERTS),
        "bias": normal(3, LAYERS, EXPERTS) / 5,
    }
    return layers, {"table": normal(4, WORDS, WIDTH)}


def drawn(rows):
    random = np.random.default_rng(5)
    return {name: random.integers(0, WORDS, (rows, SEQUENCE)) for name in ("tokens", "labels")}


def first(shared, batch):
    return shared["table"][batch["tokens"]]


def layer(x, w, axes=()):
    """A layer and how many tokens each expert would get, of all devices."""
    rows = x.reshape(-1, WIDTH)
    routing = route(rows @ w["router"], 2, scoring="sigmoid", bias=w["bias"])
    statistics = routing_statistics(routing, axes)
    mean = lax.pmean(rows.mean(), axes) if axes else rows.mean()
    return x + jnp.tanh(x @ w["w"]), {"counts": statistics.tokens_per_expert, "mean": mean}


def stage(layers, x, batch):
    return lax.scan(partial(layer, axes="dp"), x, layers)


def last(shared, x, batch, axes=("pp",)):
    labels = batch["labels"]
    if axes:
        size = x.shape[1]
        labels = lax.dynamic_slice_in_dim(labels, lax.axis_index("pp") * size, size, 1)
    logits = x @ shared["table"].T
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    right = jnp.sum(jnp.argmax(logits, -1) == labels)
    return (losses.sum(), labels.size), {"right": right, "losses": losses[..., 0]}


def counted(layers, x):
    """As `layer` counts, in NumPy, without ties."""
    logits = np.asarray(x).reshape(-1, WIDTH) @ np.asarray(layers["router"])
    scores = 1 / (1 + np.exp(-logits)) + np.asarray(layers["bias"])
    chosen = np.argsort(-scores, axis=-1)[:, :2]
    return np.bincount(chosen.ravel(), minlength=EXPERTS)


def on_one_device(layers, shared, batch):
    """The loss, counts `[layers, experts]`, means `[layers]` and what is beside the loss."""
    x, counts, means = first(shared, batch), [], []
    for number in range(LAYERS):
        own = jax.tree.map(lambda leaf, number=number: leaf[number], layers)
        counts.append(counted(own, x))
        means.append(np.mean(x))
        x = _layer(x, own)
    (loss, weight), aux = _last(shared, x, batch)
    return loss / weight, np.array(counts), np.array(means), aux


# Operations one by one take longer to compile than together.
_layer = jax.jit(lambda x, w: layer(x, w)[0])
_last = jax.jit(partial(last, axes=()))


def by_microbatch(x, count):
    """Rows of each microbatch, of both devices of dp."""
    return x.reshape(2, count, -1, *x.shape[1:]).swapaxes(0, 1).reshape(count, -1, *x.shape[1:])


# A last group that is not full, and one that is.
@pytest.mark.parametrize(("count", "check_vma"), [(3, True), (2, False)])
def test_what_is_returned_beside_the_loss(count, check_vma):
    (layers, shared), batch = parameters(), drawn(4 * count)
    mesh = jaxpar.make_mesh("dp=2,pp=2", devices=jax.devices()[:4])
    schedule = interleaved_1f1b(2, count, 2)
    specs, options = (P("pp"), P()), {"batch_axes": "dp", "last_dim": 1, "has_aux": True}
    out = P(), (P(None, "pp"), {"right": P(), "losses": P(None, "dp", "pp")})

    def local(layers, shared, batch):
        given = stage, first, last, schedule, "pp"
        (loss, aux), gradients = value_and_grad(*given, specs=specs, **options)(
            layers, shared, batch
        )
        evaluated = value(*given, specs=specs, **options)(layers, shared, batch)
        for of_last in (aux[1], evaluated[1][1]):
            of_last["right"] = lax.psum(of_last["right"], ("dp", "pp"))
        return (loss, aux), evaluated, gradients

    step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(*specs, P("dp")),
        out_specs=(out, out, specs),
        check_vma=check_vma,
    )
    order = np.array(schedule.order(LAYERS))
    stacked = jax.tree.map(lambda w: w[order], layers)
    found, evaluated, gradients = jax.jit(step)(stacked, shared, batch)
    cut = {name: by_microbatch(x, count) for name, x in batch.items()}
    truth = [
        on_one_device(layers, shared, {name: x[number] for name, x in cut.items()})
        for number in range(count)
    ]
    back = np.argsort(order)
    for loss, (of_stages, of_last) in (found, evaluated):
        losses, counts, means, aux = zip(*truth, strict=True)
        np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-12)
        np.testing.assert_array_equal(of_stages["counts"][:, back], np.array(counts))
        np.testing.assert_allclose(of_stages["mean"][:, back], np.array(means), atol=1e-12)
        np.testing.assert_array_equal(of_last["right"], [one["right"] for one in aux])
        each = np.array([one["losses"] for one in aux])
        np.testing.assert_allclose(of_last["losses"], each, rtol=1e-10)

    def mean(params):
        return jnp.mean(lax.map(partial(_loss, *params), cut))

    wanted = jax.jit(jax.grad(mean))((layers, shared))
    of_layers = jax.tree.map(lambda g: g[back], gradients[0])
    for one, right in zip(
        jax.tree.leaves((of_layers, gradients[1])), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(one, right, rtol=0, atol=1e-10)

    # The bias of each layer, of all microbatches.
    counts = of_stages["counts"][:, back].sum(0)
    bias = update_router_bias(layers["bias"], counts, rate=0.1)
    total = counts.sum(-1, keepdims=True)
    moved = layers["bias"] + 0.1 * np.sign(total - EXPERTS * counts)
    np.testing.assert_allclose(bias, moved, rtol=1e-12)


def _loss(layers, shared, batch):
    x, _ = lax.scan(lambda x, w: (layer(x, w)[0], None), first(shared, batch), layers)
    (loss, weight), _ = last(shared, x, batch, ())
    return loss / weight


def traced(function, stage_fn, last_fn):
    """The types of a function's results, on two devices."""
    given = stage_fn, lambda shared, x: x @ shared, last_fn, interleaved_1f1b(2, 2), "pp"
    fn = function(*given, has_aux=True)
    mesh = jaxpar.make_mesh("pp=2", devices=jax.devices()[:2])
    local = jax.shard_map(
        lambda *args: fn(*args)[0], mesh=mesh, in_specs=(P("pp"), P(), P()), out_specs=P()
    )
    return jax.eval_shape(local, np.ones((2, 4, 4)), np.eye(4), np.ones((8, 4)))


@pytest.mark.parametrize("function", [value, value_and_grad])
def test_what_functions_must_return(function):
    def stage_fn(w, x, batch):
        return x @ w[0], None

    def last_fn(shared, x, batch):
        return (jnp.sum(x), x.size), None

    name = f"^{function.__name__}: "
    with pytest.raises(
        TypeError, match=name + r"with has_aux stage_fn must return \(x, aux\), got"
    ):
        traced(function, lambda w, x, batch: x @ w[0], last_fn)
    with pytest.raises(TypeError, match=name + r"with has_aux last_fn must return \(\(loss_sum"):
        traced(function, stage_fn, lambda shared, x, batch: (jnp.sum(x), x.size))
    with pytest.raises(TypeError, match=name + "aux.* is of type str, and no array"):
        traced(function, stage_fn, lambda shared, x, batch: ((jnp.sum(x), 1), {"a": "text"}))


@pytest.mark.parametrize(("function", "check_vma"), [(value, False), (value_and_grad, True)])
def test_kinds_of_outputs(function, check_vma):
    """Numbers of Python, arrays without entries, and arrays that are not of layers."""

    def run(of_stage):
        fn = function(
            lambda w, x, batch: (x @ w[0] @ w[1], of_stage),
            lambda shared, x: x @ shared,
            lambda shared, x, batch: ((jnp.sum(x), 1), {"n": 2.5, "none": np.ones((1, 0))}),
            interleaved_1f1b(2, 2),
            "pp",
            specs=(P("pp"), P()),
            has_aux=True,
        )

        def local(*args):
            result = fn(*args)
            aux = result[1] if function is value else result[0][1]
            return jax.tree.map(lambda x: x[None], aux)

        mesh = jaxpar.make_mesh("pp=2", devices=jax.devices()[:2])
        specs = P("pp"), P(), P()
        step = jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=P("pp"), check_vma=check_vma
        )
        return jax.jit(step)(np.ones((4, 4, 4)), np.eye(4), np.ones((8, 4)))

    of_stages, of_last = run({"a": np.arange(2), "b": True, "none": np.ones((2, 0))})
    np.testing.assert_array_equal(of_stages["a"], [[[0, 1]] * 2] * 2)  # by device and microbatch
    np.testing.assert_array_equal(of_stages["b"], [[[True]] * 2] * 2)
    assert of_stages["none"].shape == (2, 2, 2, 0)
    np.testing.assert_array_equal(of_last["n"], [[2.5] * 2] * 2)
    assert of_last["none"].shape == (2, 2, 1, 0)
    text = r"aux\['a'\] of stage_fn has local shape \(3,\), whose dimension 0 must be that of a sta"
    with pytest.raises(ValueError, match=text):
        run({"a": np.ones(3)})


def test_gpipe_evaluates():
    """Backward passes do not matter, and neither do dtypes of parameters."""
    fn = value(
        lambda w, x, batch: x * w[0].astype(x.dtype),
        lambda shared, x: x + shared.astype(x.dtype),
        lambda shared, x, batch: (jnp.sum(x), x.size),
        gpipe(2, 2),
        "pp",
    )
    mesh = jaxpar.make_mesh("pp=2", devices=jax.devices()[:2])
    step = jax.shard_map(fn, mesh=mesh, in_specs=(P("pp"), P(), P()), out_specs=P())
    assert jax.jit(step)(np.array([2, 3]), np.int32(1), np.arange(8.0).reshape(4, 2)) == 27.0
