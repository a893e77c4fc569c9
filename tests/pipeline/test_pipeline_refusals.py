"""What a pipeline refuses, in its own words: closed-over parameters, rows, specs, options."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from staged import normal

import jaxpar
from jaxpar import Axis
from jaxpar.pipeline import interleaved_1f1b, value, value_and_grad

BOTH = pytest.mark.parametrize("check_vma", [True, False])
LAYERS, SHARED = {"w": normal(1, 2, 4, 4)}, {"w": normal(2, 4, 4), "b": normal(3, 4)}
BATCH = {"x": normal(4, 8, 4), "y": normal(5, 8, 4)}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def stage(layers, x, batch):
    return jnp.tanh(x @ layers["w"][0])


def first(shared, batch):
    return batch["x"] @ shared["w"] + shared["b"]


def last(shared, x, batch):
    """The errors of this device's part of each row's features."""
    labels = batch["y"]
    if labels.shape != x.shape:
        start = lax.axis_index("pp") * x.shape[1]
        labels = lax.dynamic_slice_in_dim(labels, start, x.shape[1], 1)
    return jnp.sum((x - labels) ** 2), x.size


PARAMETERS = P("pp"), P()
GRADIENTS, ARGUMENTS = (P(), PARAMETERS), (*PARAMETERS, P())
FUNCTIONS = {"stage_fn": stage, "first_fn": first, "last_fn": last}


def on_one_device(params):
    layers, shared = params
    x = first(shared, BATCH)
    for w in layers["w"]:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - BATCH["y"]) ** 2)


def mapped(local, *, check_vma=True, specs=ARGUMENTS, axes="pp=2", out=GRADIENTS):
    mesh = jaxpar.make_mesh(axes, devices=jax.devices()[: 4 if "dp" in axes else 2])
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)


def pipeline_of(of=value_and_grad, schedule=None, axis="pp", specs=PARAMETERS, **options):
    functions = [options.pop(name, function) for name, function in FUNCTIONS.items()]
    how = {"specs": specs, "last_dim": 1, **options}
    return of(*functions, schedule or interleaved_1f1b(2, 2), axis, **how)


def traced(fn, layers=LAYERS, shared=SHARED, batch=BATCH, **options):
    return jax.eval_shape(mapped(fn, **options), layers, shared, batch)


def close(found, wanted, most=1e-10):
    for one, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, right, rtol=0, atol=most)


# -- what functions close over --------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("place", ["layers['w']", "shared['w']", "shared['b']"])
def test_parameters_that_a_function_closes_over(name, place, check_vma):
    def local(of, hidden, layers, shared, batch):
        params = {"layers": layers, "shared": shared}
        argument, _, key = place.partition("['")
        closed = hidden(params[argument][key.removesuffix("']")])

        def closing(*args):
            result, more = FUNCTIONS[name](*args), jnp.sum(closed)
            return (result[0] + more, result[1]) if name == "last_fn" else result + more

        return pipeline_of(of, **{name: closing})(layers, shared, batch)

    own = "layers" if name == "stage_fn" else "shared"
    remedy = f"read it from {own}, its argument"
    if not place.startswith(own):
        remedy = "give each stage a copy in layers" if own == "layers" else "put it into shared"
    text = (
        f"value_and_grad: {name} closes over {place}, which gets no gradient there; {remedy}, or "
        "close over jax.lax.stop_gradient of it"
    )
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        traced(partial(local, value_and_grad, lambda x: x), check_vma=check_vma)
    assert str(caught.value) == text
    traced(partial(local, value_and_grad, lax.stop_gradient), check_vma=check_vma)
    # The loss alone has no gradient to lose.
    traced(partial(local, value, lambda x: x), check_vma=check_vma, out=P())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_eager_call_is_seen_too(name):
    def local(layers, shared, batch):
        def closing(*args):
            assert shared["b"] is not None
            return jax.tree.map(lambda x: x + 0 * jnp.sum(shared["b"]), FUNCTIONS[name](*args))

        return pipeline_of(**{name: closing})(layers, shared, batch)

    with pytest.raises(ValueError, match=rf"{name} closes over shared\['b'\], which gets no grad"):
        mapped(local)(LAYERS, SHARED, BATCH)


# -- rows of the batch ----------------------------------------------------------------------------


@pytest.mark.parametrize("of", [value_and_grad, value])
@pytest.mark.parametrize(
    ("spec", "axes", "shape"),
    [
        (P("pp"), "pp=2", (4, 4)),
        (P(("dp", "pp")), "dp=2,pp=2", (2, 4)),
        ({"x": P("pp"), "y": P()}, "pp=2", (4, 4)),  # only what enters
    ],
)
def test_rows_over_the_pipeline(of, spec, axes, shape):
    fn = pipeline_of(of, batch_axes="dp" if "dp" in axes else ())
    out = GRADIENTS if of is value_and_grad else P()
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        traced(fn, specs=(P("pp"), P(), spec), axes=axes, out=out)
    assert str(caught.value) == (
        f"{of.__name__}: batch['x'] of local shape {shape} varies over ['pp'], and first_fn reads "
        "it, but device 0 of axis 'pp' (2) computes what enters the pipeline, for all devices; "
        "leave ['pp'] out of its in_specs, or gather in first_fn what it reads"
    )


@pytest.mark.parametrize("of", [value_and_grad, value])
def test_parts_of_rows_beside_whole_ones(of):
    """Shapes fit, as only a number of each row is read, or rows are few enough."""
    out = GRADIENTS if of is value_and_grad else P()
    batch = {**BATCH, "scale": normal(6, 8)}
    start = rf"^{of.__name__}: batch\['scale'\] of local shape \(4,\) varies over \['pp'\], "

    def check(match, where="scale", **functions):
        spec = {"x": P(), "y": P(), "scale": P(), where: P("pp")}
        fn, specs = pipeline_of(of, **functions), (P("pp"), P(), spec)
        if match is None:
            traced(fn, batch=batch, specs=specs, out=out)
            return
        with pytest.raises(ValueError, match=match):
            traced(fn, batch=batch, specs=specs, out=out)

    def scaled(*args):
        return first(*args) * args[-1]["scale"][0]

    check(start + "and first_fn reads it, but device 0", first_fn=scaled)
    text = r"and stage_fn reads it, but each stage computes all \[4\] rows of a microbatch; leave"
    check(start + text, stage_fn=lambda *args: stage(*args) * args[-1]["scale"][0])
    rows = {"last_fn": lambda shared, x, batch: (jnp.sum((x - batch["y"]) ** 2), x.size)}
    text = (
        r"batch\['y'\] of local shape \(4, 4\) varies over \['pp'\], so that its microbatches are "
        r"of other rows than what last_fn gets by last_dim={}, the rows of each microbatch; leave"
    )
    for dim in (0, -2):
        check(text.format(dim), "y", last_dim=dim, **rows)
    # One microbatch has all rows.
    check(None, "y", last_dim=0, schedule=interleaved_1f1b(2, 1), **rows)


@BOTH
@pytest.mark.parametrize("gathers", [False, True])
def test_what_is_cut_over_the_pipeline_rightly(gathers, check_vma):
    """Labels along `last_dim`, and features that `first_fn` gathers."""

    def gathering(shared, batch):
        x = lax.all_gather(batch["x"], "pp", axis=1, tiled=True)
        return first(shared, {"x": x})

    spec = {"x": P(None, "pp") if gathers else P(), "y": P(None, "pp")}
    fn = pipeline_of(first_fn=gathering if gathers else first)
    found = jax.jit(mapped(fn, specs=(P("pp"), P(), spec), check_vma=check_vma))(
        LAYERS, SHARED, BATCH
    )
    close(found, jax.value_and_grad(on_one_device)((LAYERS, SHARED)))


def test_rows_over_one_device():
    fn = pipeline_of(schedule=interleaved_1f1b(1, 2, 2))
    mesh = jaxpar.make_mesh("pp=1", devices=jax.devices()[:1])
    specs = P("pp"), P(), P("pp")
    local = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=(P(), (P("pp"), P())))
    found = jax.jit(local)(LAYERS, SHARED, BATCH)
    close(found, jax.value_and_grad(on_one_device)((LAYERS, SHARED)))


# -- specs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [value_and_grad, value])
def test_layers_that_are_replicated(of):
    out = (P(), (P(), P())) if of is value_and_grad else P()
    start = rf"^{of.__name__}: "
    with pytest.raises(ValueError, match=start + r"layers\['w'\] of local shape .* is replicated"):
        traced(pipeline_of(of, specs=None), specs=(P(),) * 3, out=out)
    for specs in (P(), (P(), P()), ({"w": P()}, P())):
        text = (
            rf"{start}the spec of layers\['w'\] lacks \['pp'\], but each device of axis 'pp' \(2\) "
            "needs layers of its own; shard dimension 0 in in_specs"
        )
        with pytest.raises(ValueError, match=text):
            traced(pipeline_of(of, specs=specs), out=out, check_vma=False, specs=(P(),) * 3)
    with pytest.raises(ValueError, match=start + "under check_vma=False types do not say"):
        traced(pipeline_of(of, specs=None), out=out, check_vma=False)


@pytest.mark.parametrize("of", [value_and_grad, value])
@BOTH
def test_layers_that_are_sharded_otherwise(of, check_vma):
    """Each device would have a part of all layers, or layers of other stages."""
    both = ("pp", "dp")
    for axis, spec, names in (("pp", P(None, "pp"), "'pp'"), (both, P(both[::-1]), "'pp', 'dp'")):
        fn = pipeline_of(of, interleaved_1f1b(2 * len(names.split()), 2), axis, (spec, P()))
        text = rf"^{of.__name__}: the spec of layers is P.* must shard dimension 0, which stacks "
        with pytest.raises(ValueError, match=text + rf"layers, and over \[{names}\] in this order"):
            traced(
                fn,
                layers={"w": normal(1, 4, 4, 4)},
                axes="dp=2,pp=2",
                specs=(spec, P(), P()),
                out=(P(), (spec, P())) if of is value_and_grad else P(),
                check_vma=check_vma,
            )


@pytest.mark.parametrize(
    ("specs", "error", "text"),
    [
        (
            (P("pp"), P("pp")),
            ValueError,
            r"shared\['b'\] varies over \[\], but its spec shards it over \['pp'\]; give the in_sp"
            r"ecs of the tree, or leave out specs=, which check_vma=True does not need(\n|$)",
        ),
        ((P("pp"),), TypeError, r"specs must be a pair, of the specs of layers and of shared"),
        ({"layers": P("pp")}, TypeError, r"specs must be a pair"),
        (({"v": P("pp")}, P()), ValueError, r"specs are no pytree prefix"),
    ],
)
def test_specs_that_do_not_fit(specs, error, text):
    with pytest.raises(error, match=r"^value_and_grad: " + text):
        traced(pipeline_of(specs=specs))


# -- words ----------------------------------------------------------------------------------------


def test_integers_and_keys_among_parameters():
    numbered = {**LAYERS, "n": np.arange(2)}
    with pytest.raises(TypeError) as caught:
        traced(pipeline_of(), layers=numbered)
    assert str(caught.value) == (
        "value_and_grad: layers['n'] is int64[1], which has no gradient; give numbers of layers as "
        "floats, and keys as a leaf of the batch, by rows"
    )
    with pytest.raises(TypeError) as caught:
        traced(pipeline_of(), shared={**SHARED, "key": jax.random.key(0)})
    assert str(caught.value) == (
        "value_and_grad: shared['key'] is key<fry>[], which has no gradient; give it as a leaf of "
        "the batch, by rows"
    )
    # In an evaluation there is none to have.
    traced(pipeline_of(value), layers=numbered, out=P())


@pytest.mark.parametrize("of", [value_and_grad, value])
def test_arguments_of_other_kinds(of):
    out = GRADIENTS if of is value_and_grad else P()
    check = partial(traced, out=out)
    start = rf"^{of.__name__}: "
    with pytest.raises(TypeError, match=start + r"schedule must be a PipelineSchedule, got '1f1b'"):
        check(pipeline_of(of, "1f1b"))
    text = r"last_fn must return \(loss_sum, weight\), got no tuple; return the sum of the losses"
    with pytest.raises(TypeError, match=start + text):
        check(pipeline_of(of, last_fn=lambda shared, x, batch: jnp.sum(x)))
    with pytest.raises(TypeError, match=start + r"last_fn returned .*aux\); pass has_aux=True"):
        check(pipeline_of(of, last_fn=lambda shared, x, batch: ((jnp.sum(x), 1), 2)))
    with pytest.raises(ValueError, match=start + r"loss_sum must be a scalar, got local shape"):
        check(pipeline_of(of, last_fn=lambda shared, x, batch: (x, x.size)))
    for name in FUNCTIONS:
        with pytest.raises(TypeError, match=start + rf"{name} must be a function, got None"):
            check(pipeline_of(of, **{name: None}))
    with pytest.raises(ValueError, match=start + r"batch\['s'\] is a scalar, .* let functions"):
        check(pipeline_of(of), batch={**BATCH, "s": np.float64(1)})


@pytest.mark.parametrize("of", [value_and_grad, value])
def test_axes_of_the_batch(of):
    """Rows over an axis that is not said, and an axis over which they are the same."""
    out, axes = GRADIENTS if of is value_and_grad else P(), "dp=2,pp=2"
    text = rf"^{of.__name__}: loss_sum varies over \['dp'\], which batch_axes lacks; add them"
    with pytest.raises(ValueError, match=text) as caught:
        traced(pipeline_of(of), specs=(*PARAMETERS, P("dp")), axes=axes, out=out)
    assert "groups" not in str(caught.value)
    found = jax.jit(mapped(pipeline_of(of, batch_axes="dp"), axes=axes, out=out))(
        LAYERS, SHARED, BATCH
    )
    right = jax.value_and_grad(on_one_device)((LAYERS, SHARED))
    close(found, right if of is value_and_grad else right[0])


# -- options of axes ------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [value_and_grad, value])
def test_options_that_have_no_effect(of):
    out = GRADIENTS if of is value_and_grad else P()
    check = partial(traced, axes="dp=2,pp=2", out=out)
    start = rf"^{of.__name__}: "
    for options in ({"mode": "bidirectional"}, {"backward": "chunked-2"}, {"keep_gathered": True}):
        ((option, given),) = options.items()
        for names in ({"axis": "pp"}, {"batch_axes": "dp"}):
            ((argument, name),) = names.items()
            text = start + rf"{argument} has {option}={given}, which has no effect here; give its"
            with pytest.raises(ValueError, match=text):
                check(pipeline_of(of, **{"batch_axes": "dp", argument: Axis(name, **options)}))
    for argument, name in {"axis": "pp", "batch_axes": "dp"}.items():
        narrow = {argument: Axis(name, wire_dtype="bfloat16")}
        with pytest.raises(ValueError, match=start + r"axis has wire_dtype=.* the same to both"):
            check(pipeline_of(of, **{"batch_axes": "dp", **narrow}))
    with pytest.raises(ValueError, match=start + r"axis and batch_axes both have \['pp'\]"):
        check(pipeline_of(of, batch_axes=("dp", "pp")))


@BOTH
def test_the_wire_of_both_axes(check_vma):
    """Gradients are rounded to bfloat16, and not the loss."""
    axis, batch_axes = (Axis(name, wire_dtype="bfloat16") for name in ("pp", "dp"))
    fn = pipeline_of(axis=axis, batch_axes=batch_axes)
    step = mapped(fn, specs=(P("pp"), P(), P("dp")), axes="dp=2,pp=2", check_vma=check_vma)
    loss, found = jax.jit(step)(LAYERS, SHARED, BATCH)
    right, wanted = jax.value_and_grad(on_one_device)((LAYERS, SHARED))
    np.testing.assert_allclose(loss, right, rtol=1e-12)
    for one, truth in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        worst = np.abs(one - truth).max() / np.abs(truth).max()
        assert 1e-5 < worst < 4 * 2**-8


# -- flags and specs ------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [value, value_and_grad])
@pytest.mark.parametrize("flag", [None, 1, "", np.True_])
def test_has_aux_is_a_flag(of, flag):
    with pytest.raises(TypeError, match=f"^{of.__name__}: has_aux must be True or False, got"):
        traced(pipeline_of(of, has_aux=flag))


@pytest.mark.parametrize("of", [value, value_and_grad])
@pytest.mark.parametrize("dim", [None, 1.0, True])
def test_last_dim_is_an_integer(of, dim):
    with pytest.raises(TypeError, match=f"^{of.__name__}: last_dim must be an integer, got {dim}"):
        traced(pipeline_of(of, last_dim=dim))


@pytest.mark.parametrize("specs", [(P("pp"), None), (None, P()), (None, None), None])
def test_specs_of_one_of_the_two(specs):
    """Types say the rest under `check_vma=True`, in both functions alike."""
    loss = jax.jit(mapped(pipeline_of(value, specs=specs), out=P()))(LAYERS, SHARED, BATCH)
    found = jax.jit(mapped(pipeline_of(specs=specs)))(LAYERS, SHARED, BATCH)
    wanted = jax.value_and_grad(on_one_device)((LAYERS, SHARED))
    close((loss, found), (wanted[0], wanted))


@BOTH
@pytest.mark.parametrize("of", [value, value_and_grad])
def test_parameters_of_which_the_first_device_has_a_part(of, check_vma):
    specs = P("pp"), {"w": P(), "b": P("pp")}
    shared = {**SHARED, "b": np.stack([SHARED["b"], 2 * SHARED["b"]])}
    how = {"check_vma": check_vma, "specs": (*specs, P())}
    how["out"] = P() if of is value else (P(), specs)

    def of_parts(total):
        def entering(shared, batch):
            return batch["x"] @ shared["w"] + total(shared["b"][0])

        return mapped(pipeline_of(of, specs=specs, first_fn=entering), **how)

    with pytest.raises(
        ValueError,
        match=rf"^{of.__name__}: shared\['b'\] is sharded over \['pp'\], and first_fn reads it, "
        r"but device 0 .* leave \['pp'\] out of its spec, or gather in first_fn what it reads",
    ):
        jax.eval_shape(of_parts(lambda b: b), LAYERS, shared, BATCH)

    def summed(params):
        layers, shared = params
        return on_one_device((layers, {**shared, "b": shared["b"].sum(0)}))

    found = jax.jit(of_parts(lambda b: lax.psum(b, "pp")))(LAYERS, shared, BATCH)
    wanted = jax.value_and_grad(summed)((LAYERS, shared))
    close(found, wanted[0] if of is value else wanted)
