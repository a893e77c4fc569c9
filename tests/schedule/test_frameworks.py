"""Steps as frameworks write them: jitted by theirs, and with what is computed while tracing."""

import equinox
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.schedule import compile_for, explain, program_floor, target
from jaxpar.tools.explain.edits import Edits

CHIPS = target("v5e:2x2", "fsdp=2,tp=2")
FLOPS = 5 * 256 * 2 * 512 * 2048 / 4  # of a step on one device; the batch has no gradient


def of(*shape, spec=()):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(CHIPS.mesh, P(*spec)))


X = of(256, 512, spec=("fsdp",))


class Mlp(nnx.Module):
    def __init__(self, rngs):
        how = {"use_bias": False, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": rngs}
        self.up = nnx.Linear(512, 2048, **how)
        self.down = nnx.Linear(2048, 512, **how)

    def __call__(self, x):
        h = jax.lax.with_sharding_constraint(self.up(x), NamedSharding(CHIPS.mesh, P()))
        return self.down(nnx.relu(h))


def loss_of(model, x):
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


@nnx.jit
def step(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, gradients)
    return loss


def abstract(make):
    """With all matrices sharded over `tp`, wherever an abstract module has them."""

    def laid(x):
        return of(*x.shape, spec=(None, "tp")) if x.ndim == 2 else x

    return jax.tree.map(laid, nnx.eval_shape(make))


def model_and_optimizer():
    model = Mlp(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


@pytest.fixture(scope="module")
def compiled():
    return compile_for(step, CHIPS, *abstract(model_and_optimizer), X)


def test_a_step_of_flax(compiled):
    """What it changes in place is among what is compiled."""
    assert program_floor(compiled).compute == pytest.approx(FLOPS / CHIPS.chip.flops, rel=0.01)
    names = list(Edits(compiled).arguments.leaves)
    assert names[0] == "model.down.kernel.value" or names[0] == "model.down.kernel"
    assert any(name.startswith("optimizer.opt_state[0].trace") for name in names)
    assert names[-1] == "x"


def test_edits_of_it_keep_all_its_work(compiled):
    (without,) = Edits(compiled).constraints()
    edited = without.compiled()
    assert program_floor(edited).compute == pytest.approx(FLOPS / CHIPS.chip.flops, rel=0.01)
    assert edited.memory.outputs == pytest.approx(compiled.memory.outputs, rel=0.01)
    found = explain(compiled, tries=1)
    assert not found.refused


def test_its_donations():
    donating = nnx.jit(step.__wrapped__, donate_argnums=(0, 1))
    program = compile_for(donating, CHIPS, *abstract(model_and_optimizer), X)
    assert program.memory.aliased > 0.9 * program.memory.outputs


def test_modules_that_share_weights():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.mlp = Mlp(rngs)
            self.up = self.mlp.up

        def __call__(self, x):
            return self.mlp(x) + self.mlp(x * 2)

    run = nnx.jit(lambda model, x: loss_of(model, x))
    program = compile_for(
        run, CHIPS, abstract(lambda: Tied(nnx.Rngs(0))), of(16, 512, spec=("fsdp",))
    )
    assert len(program.jaxpr.jaxpr.invars) in (3, 4)


class Layer(equinox.Module):
    linear: equinox.nn.Linear

    def __call__(self, x):
        with jax.ensure_compile_time_eval():  # as Equinox has it in its rotary embedding
            scale = jnp.arange(4.0).sum()
        return self.linear(x) * scale.astype(x.dtype)


def layer():
    made = equinox.filter_eval_shape(
        lambda key: Layer(equinox.nn.Linear(512, 512, use_bias=False, key=key)),
        jax.random.key(0),
    )
    return jax.tree.map(lambda x: of(*x.shape, spec=("tp",)), made)


def train(model, x):
    gradients = equinox.filter_grad(lambda m, x: jnp.mean(jax.vmap(m)(x)))(model, x)
    return equinox.apply_updates(model, gradients)


def test_a_step_of_equinox_that_donates():
    program = compile_for(equinox.filter_jit(train, donate="all-except-first"), CHIPS, layer(), X)
    assert program.memory.aliased == 0  # the batch has no result of its size
    program = compile_for(equinox.filter_jit(train, donate="all"), CHIPS, layer(), X)
    assert program.memory.aliased >= 512 * 512 * 2 / 2
    assert list(Edits(program).arguments.leaves) == ["model.linear.weight", "x"]


def test_errors_of_tracing_are_the_users():
    def wrong(x):
        raise AttributeError("no such thing")

    with pytest.raises(AttributeError, match="no such thing"):
        compile_for(wrong, CHIPS, X)


def test_a_jit_that_flattens_in_an_order_of_its_own():
    class Reversed:
        def __init__(self):
            self.__wrapped__ = lambda x, y: x

        def trace(self, x, y):
            inner = jax.jit(lambda y, x: (y, x)).trace(y, x)
            return type("Stage", (), {"traced": inner})()

    with pytest.raises(ValueError, match=r"argument 0 of the traced program, bfloat16\[256, 512\]"):
        compile_for(Reversed(), CHIPS, of(8, 8), X)
