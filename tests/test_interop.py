"""Models of Flax NNX and Equinox with layers of jaxpar, against one device and against NumPy."""

import importlib.util
from functools import cache, partial
from math import prod
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh
from jaxpar.layers import mean_value_and_grad

EXAMPLES = Path(__file__).parents[1] / "examples"
FEATURES, HIDDEN, OUTPUTS = 8, 16, 6
NAMES = ("scale", "gate", "up", "down", "head")


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Flax:
    example = load("flax_nnx")
    differentiate = staticmethod(nnx.value_and_grad)
    jit = staticmethod(nnx.jit)

    def make(self):
        return self.example.Network(FEATURES, HIDDEN, OUTPUTS, rngs=nnx.Rngs(0))

    def split(self, model):
        """The parameters, and the model of such parameters."""
        graph, params = nnx.split(model)
        return graph, params, partial(nnx.merge, graph)

    def array(self, tree, name):
        return getattr(tree, name)[...]


class Equinox:
    example = load("equinox_model")
    differentiate = staticmethod(eqx.filter_value_and_grad)
    jit = staticmethod(eqx.filter_jit)

    def make(self):
        return self.example.Network(FEATURES, HIDDEN, OUTPUTS, key=jax.random.key(0))

    def split(self, model):
        params, static = eqx.partition(model, eqx.is_array)
        return static, params, lambda params: eqx.combine(params, static)

    def array(self, tree, name):
        return getattr(tree, name)


def placed(library, mesh):
    """A layout on the mesh, what goes with the parameters, and these."""
    static, params, rebuild = library.split(library.make())
    layout = library.example.RULES.layout(params, mesh)
    return layout, static, layout.place(params), rebuild


FLAX, EQUINOX = Flax(), Equinox()


def data():
    rng = np.random.default_rng(0)
    return (rng.standard_normal((8, 4, size)).astype("float32") for size in (FEATURES, OUTPUTS))


def a_mesh(sizes):
    return make_mesh(sizes, devices=jax.devices()[: prod(sizes.values())])


def close(found, expected):
    """Within 2e-5 of the largest entry: float32, sums of some hundred terms."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.max(np.abs(b)))


def numpy_loss(library, model, x, y):
    weights = (np.asarray(library.array(model, name), "float64") for name in NAMES)
    scale, gate, up, down, head = weights
    normed = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale
    gated = normed @ gate
    x = x + (gated / (1 + np.exp(-gated)) * (normed @ up)) @ down
    return np.mean((x @ head - y) ** 2)


@cache
def of_one_device(library):
    layout, static, params, _ = placed(library, a_mesh({"dp": 1, "fsdp": 1, "tp": 1}))
    step = partial(library.example.loss_and_gradients, layout, static)
    return jax.jit(step)(params, *data())


@pytest.mark.parametrize(
    ("library", "sizes"),
    [(FLAX, {"dp": 2, "fsdp": 2, "tp": 2}), (EQUINOX, {"tp": 4, "fsdp": 2, "dp": 1})],
)
def test_the_example_computes_what_one_device_does(library, sizes):
    layout, static, params, _ = placed(library, a_mesh(sizes))
    x, y = data()
    step = partial(library.example.loss_and_gradients, layout, static)
    loss, grads = jax.jit(step)(params, *layout.place_batch((x, y)))
    np.testing.assert_allclose(loss, numpy_loss(library, library.make(), x, y), rtol=1e-5)
    for name in NAMES:
        grad, weight = library.array(grads, name), library.array(params, name)
        assert grad.sharding.is_equivalent_to(weight.sharding, weight.ndim)
        assert grad.sharding.shard_shape(grad.shape) == layout[name].local_shape
    close((loss, grads), of_one_device(library))


@pytest.mark.parametrize("library", [FLAX, EQUINOX])
def test_the_example_learns(library, capsys):
    with jax.numpy_dtype_promotion("standard"):  # as optax relies on it
        losses = library.example.train(a_mesh({"dp": 2, "fsdp": 2, "tp": 2}), 50)
    assert losses[-1] < 0.7 * losses[0]
    shown = capsys.readouterr().out
    assert "5 arrays on 8 devices (dp=2, fsdp=2, tp=2)" in shown
    assert f"step 50: loss {losses[-1]:.4f}" in shown


@pytest.mark.parametrize(
    ("library", "where", "check_vma"),
    [
        (FLAX, "inside", True),
        (FLAX, "outside", False),
        (EQUINOX, "inside", False),
        (EQUINOX, "outside", True),
    ],
)
def test_every_way_to_differentiate(library, where, check_vma):
    """By jaxpar's function inside `shard_map`, in microbatches, or by the library's outside."""
    example, batch = library.example, library.example.BATCH

    layout, _, params, rebuild = placed(library, a_mesh({"dp": 2, "fsdp": 2, "tp": 2}))
    specs = layout.specs

    def summed(params, x, y):
        return jnp.sum((rebuild(params)(x) - y) ** 2), y.size

    def inside(params, x, y):
        return jax.shard_map(
            mean_value_and_grad(summed, ("dp", "fsdp", "tp"), specs=specs, microbatches=2),
            mesh=layout.mesh,
            in_specs=(specs, batch, batch),
            out_specs=(P(), specs),
            check_vma=check_vma,
        )(params, x, y)

    def outside(params, x, y):
        def loss(params, x, y):
            return jax.shard_map(
                lambda params, x, y: example.loss_fn(rebuild(params), x, y),
                mesh=layout.mesh,
                in_specs=(specs, batch, batch),
                out_specs=P(),
                check_vma=check_vma,
            )(params, x, y)

        return library.differentiate(loss)(params, x, y)

    # Each library's own jit.
    found = library.jit(inside if where == "inside" else outside)(params, *data())
    close(found, of_one_device(library))
