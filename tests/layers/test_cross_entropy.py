"""The cross-entropy over a sharded vocabulary against NumPy, and what it sends and keeps."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from wide import assert_alike, assert_rounded, wide

from jaxpar import Axis, make_mesh
from jaxpar.compiler.jaxprs import subjaxprs
from jaxpar.layers import (
    mean_value_and_grad,
    scatter_region,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)
from jaxpar.layout import LayoutMap, Padded, Split
from jaxpar.testing import assert_matches_reference, count_collectives

REPLICATED = P()
check = pytest.mark.parametrize("check_vma", [True, False])


def normal(*shape, dtype="float32"):
    return np.random.default_rng([*shape]).standard_normal(shape).astype(dtype)


def labels_below(vocabulary, *shape, ignore=-1):
    rng = np.random.default_rng([vocabulary, *shape])
    labels = rng.integers(0, vocabulary, shape).astype("int32")
    return np.where(rng.random(shape) < 0.25, np.int32(ignore), labels)


def mesh_of(text):
    size = int(np.prod([int(part.split("=")[1]) for part in text.split(",")]))
    return make_mesh(text, devices=jax.devices()[:size])


def reference(vocabulary=None, label_smoothing=0.0, z_loss=0.0, ignore_label=-1, softcap=None, **_):
    def losses(x, w, labels, bias=0.0):
        counts = labels != ignore_label
        logits = (np.where(counts[..., None], x, 0.0) @ w + bias)[..., :vocabulary]
        logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
        top = np.max(logits, axis=-1)
        z = top + np.log(np.sum(np.exp(logits - top[..., None]), axis=-1))
        aimed = np.take_along_axis(logits, np.where(counts, labels, 0)[..., None], -1)[..., 0]
        even = np.mean(logits, axis=-1)
        loss = z - (1 - label_smoothing) * aimed - label_smoothing * even + z_loss * z**2
        return np.where(counts, loss, 0.0)

    return losses


ALL = {"vocabulary": 13, "label_smoothing": 0.2, "z_loss": 0.05}


@pytest.mark.parametrize(
    ("mesh", "axis", "options", "check_vma"),
    [
        ("dp=2,tp=4", Axis("tp", mode="unidirectional"), {**ALL, "chunk": 4}, False),
        ("dp=2,tp=4", Axis("tp", mode="bidirectional"), {**ALL, "chunk": 5, "sequence_dim": -2},
         True),
        ("a=2,dp=1,b=4", ("b", "a"), {**ALL, "chunk": 7, "sequence_dim": 1}, False),
        ("a=2,dp=1,b=4", ("b", "a"), {"ignore_label": 3, "label_smoothing": 1.0}, True),
        ("tp=1,dp=2", "tp", {"sequence_dim": 0, "vocabulary": 15, "chunk": 1}, False),
    ],
)  # fmt: skip
def test_losses_and_gradients(mesh, axis, options, check_vma):
    """In two cases a device has padding only. Tokens that are ignored may be anything."""
    options = {"sequence_dim": None, **options}
    dim, names = options["sequence_dim"], axis.names if isinstance(axis, Axis) else axis
    labels = labels_below(
        options.get("vocabulary", 16), 2, 8, ignore=options.get("ignore_label", -1)
    )
    x = np.where((labels == -1)[..., None], np.float32(np.nan), normal(2, 8, 3))
    spec = {None: P("dp"), 0: P(("dp", "tp"))}.get(dim, P("dp", names))
    assert_matches_reference(
        lambda *args: vocab_parallel_cross_entropy(*args, axis, **options),
        reference(**options),
        *(x, normal(3, 16), labels),
        mesh=mesh_of(mesh),
        in_specs=(spec, P(None, names), spec),
        out_specs=spec,
        check_vma=check_vma,
        max_directions=4,
    )


# The numbers of operands: three are without a bias.
@pytest.mark.parametrize(
    ("mesh", "axis", "options", "check_vma", "count", "softcap"),
    [
        ("dp=2,tp=2", Axis("tp", mode="bidirectional"), {**ALL, "chunk": 5, "sequence_dim": -2},
         True, 3, 1.5),
        ("a=2,dp=1,b=4", ("b", "a"), {**ALL, "chunk": 4}, False, 4, 1.5),
        ("dp=2,tp=2", "tp", {"vocabulary": 9, "chunk": 64}, True, 4, None),
    ],
)  # fmt: skip
def test_bias_and_bound(mesh, axis, options, check_vma, count, softcap):
    """Tokens over dp share a bias, whose padding may be NaN; without one there is a bound."""
    options = {"sequence_dim": None, **options}
    dim, names = options["sequence_dim"], axis.names if isinstance(axis, Axis) else axis
    bias = normal(16)
    bias[options["vocabulary"] :] = np.nan
    spec = P("dp") if dim is None else P("dp", names)
    given = normal(2, 8, 3), normal(3, 16), labels_below(options["vocabulary"], 2, 8), bias

    def losses(x, w, labels, bias=None):
        return vocab_parallel_cross_entropy(
            *(x, w, labels, axis), bias=bias, softcap=softcap, **options
        )

    assert_matches_reference(
        losses,
        reference(**options, softcap=softcap),
        *given[:count],
        mesh=mesh_of(mesh),
        in_specs=(spec, P(None, names), spec, P(names))[:count],
        out_specs=spec,
        check_vma=check_vma,
        max_directions=4,
    )


@check
def test_gradient_of_a_narrow_bias_is_summed_in_float32(check_vma):
    """600 tokens on each of two devices add a half each, where bfloat16 itself stays at 128."""
    losses = jax.shard_map(
        lambda b, x, w, y: vocab_parallel_cross_entropy(
            x, w, y, "tp", bias=b, chunk=100, sequence_dim=None
        ),
        mesh=mesh_of("dp=2,tp=2"),
        in_specs=(P("tp"), P("dp"), P(None, "tp"), P("dp")),
        out_specs=P("dp"),
        check_vma=check_vma,
    )
    given = np.zeros((1200, 3), "float32"), np.zeros((3, 2), "float32"), np.zeros(1200, "int32")
    gradient = jax.jit(jax.grad(lambda *args: jnp.sum(losses(*args))))(
        jnp.zeros(2, "bfloat16"), *given
    )
    assert gradient.dtype == "bfloat16"
    np.testing.assert_array_equal(gradient.astype("float32"), [-600, 600])


def test_extreme_logits_below_a_bound():
    """All at one of its two ends: differences are its own, and gradients vanish there."""
    x = np.array([[1e18], [-1e18]], "float32")
    w = np.array([[1e18, -1e18, 1e18, -1e18]], "float32")

    def total(x, w):
        losses = losses_on("tp=2", softcap=30)(x, w, np.array([0, 0]))
        return jnp.sum(losses), losses

    (_, losses), grads = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(x, w)
    np.testing.assert_allclose(losses, [np.log(2), 60 + np.log(2)], rtol=1e-6)
    for grad in grads:
        np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("sequence_dim", [None, -2])
def test_logits_of_16_bit_operands_are_float32(sequence_dim):
    """So are the losses: precise to float32, where gradients are as precise as their dtype."""
    x, w = (jnp.asarray(a, "bfloat16") for a in (normal(8, 16), normal(16, 24)))
    spec = P() if sequence_dim is None else P("tp")

    def test(**options):
        assert_matches_reference(
            lambda *args: vocab_parallel_cross_entropy(
                *args, Axis("tp", wire_dtype="bfloat16"), sequence_dim=sequence_dim
            ),
            reference(),
            *(x, w, labels_below(24, 8)),
            mesh=mesh_of("tp=4"),
            in_specs=(spec, P(None, "tp"), spec),
            out_specs=spec,
            **options,
        )

    test(grad=False, rounding_dtype="float32", check_vma=False)
    test(check_vma=True, max_directions=4)


def losses_on(mesh, spec=REPLICATED, check_vma=True, sequence_dim=None, **options):
    return jax.shard_map(
        lambda *args: vocab_parallel_cross_entropy(
            *args, "tp", sequence_dim=sequence_dim, **options
        ),
        mesh=mesh_of(mesh),
        in_specs=(spec, P(None, "tp"), spec),
        out_specs=spec,
        check_vma=check_vma,
    )


def test_extreme_logits():
    """Up to 1e36 apart: a softmax of 0 and 1, and no infinity or NaN."""
    x = np.array([[1e18], [-1e18], [1e18], [0]], "float32")
    w = np.array([[1e18, -1e18, 0, 0, 1, 2, 3, 4]], "float32")
    labels = np.array([0, 0, 2, 7], "int32")

    def total(x, w):
        losses = losses_on("tp=4", vocabulary=6)(x, w, np.minimum(labels, 5))
        return jnp.sum(losses), losses

    (_, losses), (dx, dw) = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(x, w)
    np.testing.assert_allclose(losses, [0, 2e36, 1e36, np.log(6)], rtol=1e-6)
    np.testing.assert_allclose(dx[:3, 0], [0, -2e18, 1e18], rtol=1e-6)
    assert np.all(np.isfinite(dw))
    np.testing.assert_array_equal(dw[:, 6:], 0)


def test_large_logits_that_are_close():
    """Their size is not lost from a small difference: a million and a million are log(2) apart."""
    w = np.array([[1e3, 1e3, -1e3, 0]], "float32")
    losses = jax.jit(losses_on("tp=2"))(np.full((1, 1), 1e3, "float32"), w, np.array([1]))
    np.testing.assert_allclose(losses, np.log(2), rtol=1e-6)


@pytest.mark.parametrize(("check_vma", "softcap"), [(True, None), (False, 2.0)])
def test_columns_that_do_not_count(check_vma, softcap):
    """Padding may be NaN; a bias of -inf, which leaves a token out, does as much without a cap."""
    x, w, labels = normal(5, 3), normal(3, 8), jnp.array([0, 5, -1, 3, 2])
    bias = np.where(np.arange(8) < 6, normal(8), np.float32("nan"))

    @partial(jax.jit, static_argnums=2)
    def run(w, bias, vocabulary):
        losses = jax.shard_map(
            lambda *args: vocab_parallel_cross_entropy(
                *args[:2],
                labels,
                "tp",
                bias=args[2],
                softcap=softcap,
                vocabulary=vocabulary,
                sequence_dim=None,
            ),
            mesh=mesh_of("tp=2"),
            in_specs=(P(), P(None, "tp"), P("tp")),
            out_specs=P(),
            check_vma=check_vma,
        )
        out, pull = jax.vjp(losses, x, w, bias)
        return [out, *pull(out)]

    wanted = run(w, np.nan_to_num(bias), 6)
    dirty = run(np.where(np.arange(8) < 6, w, np.float32("nan")), bias, 6)
    jax.tree.map(np.testing.assert_array_equal, dirty, wanted)
    if softcap is None:
        left_out = run(w, np.nan_to_num(bias, nan=-np.inf), 8)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), left_out, wanted)


@check
def test_labels_out_of_range_are_nan(check_vma):
    labels = np.array([0, 6, -1, -2, 5], "int8")
    losses = losses_on("tp=4", vocabulary=6, check_vma=check_vma)

    @jax.jit
    def run(x, w):
        out, pull = jax.vjp(lambda x: losses(x, w, labels), x)
        return out, *pull(jnp.ones_like(out))

    found, dx = run(normal(5, 3), normal(3, 8))
    np.testing.assert_array_equal(np.isnan(found), [False, True, False, True, False])
    np.testing.assert_array_equal(np.isnan(dx[:, 0]), [False, True, False, True, False])


@pytest.mark.parametrize(
    ("sequence_dim", "dtype", "check_vma"),
    [(None, "float32", False), (-2, "float64", True)],
)
def test_tied_weights_inside_under_checkpoint_and_scan(sequence_dim, dtype, check_vma):
    """A language model without layers: what is looked up is compared with the same table."""
    tokens, labels = labels_below(16, 4, 2, 4, ignore=16), labels_below(13, 4, 2, 4)
    axes = ("dp",) if sequence_dim is None else ("tp", "dp")

    def local(table, tokens, labels):
        def step(total, batch):
            tokens, labels = batch
            x = vocab_parallel_embedding(tokens, table, "tp", sequence_dim=sequence_dim)
            if sequence_dim is not None:
                labels = scatter_region(labels, "tp", dim=1)
            losses = vocab_parallel_cross_entropy(
                *(jnp.sin(x), table.T, labels, "tp"),
                vocabulary=13,
                sequence_dim=sequence_dim,
                chunk=3,
            )
            return total + jnp.sum(losses), jnp.sum(labels >= 0)

        zero = jnp.zeros((), dtype)
        zero = jax.lax.pcast(zero, axes, to="varying") if check_vma else zero
        total, counts = jax.lax.scan(jax.checkpoint(step), zero, (tokens, labels))
        return total, jnp.sum(counts)

    step = jax.shard_map(
        mean_value_and_grad(local, axes, specs=P("tp")),
        mesh=mesh_of("dp=2,tp=2"),
        in_specs=(P("tp"), P(None, "dp"), P(None, "dp")),
        out_specs=(P(), P("tp")),
        check_vma=check_vma,
    )

    def alone(table):
        logits = jnp.sin(jnp.where((tokens < 16)[..., None], table[tokens % 16], 0)) @ table[:13].T
        picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - picked
        return jnp.sum(jnp.where(labels >= 0, losses, 0)) / float(np.sum(labels >= 0))

    with jax.enable_x64(dtype == "float64"):
        table = jnp.asarray(normal(16, 3), dtype)
        found = jax.jit(step)(table, tokens, labels)
        expected = jax.jit(jax.value_and_grad(alone))(table)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype == dtype
        np.testing.assert_allclose(a, b, atol=2e-6 if dtype == "float32" else 1e-14)


def test_twice_in_reverse(float64):
    labels = labels_below(13, 6)
    losses = losses_on("tp=4", vocabulary=13, z_loss=0.1, softcap=2)

    def alone(x, w, labels):
        logits = 2 * jnp.tanh(x @ w[:, :13] / 2)
        z = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], -1)[:, 0]
        return jnp.where(labels >= 0, z - picked + 0.1 * z**2, 0)

    def second(fn):
        def bend(x, w):
            dx, dw = jax.grad(lambda x, w: jnp.sum(jnp.sin(fn(x, w, labels))), (0, 1))(x, w)
            return jnp.sum(dx**2) + jnp.sum(dw**3)

        return jax.jit(jax.grad(bend, (0, 1)))(*wide((normal(6, 3), normal(3, 16))))

    assert_alike(second(losses), second(alone))


# -- what is sent, and held ---------------------------------------------------------------------


def shapes_in(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (var.aval.shape for var in eqn.outvars)
        for sub in subjaxprs(eqn.params):
            yield from shapes_in(sub)


@pytest.mark.parametrize("sequence_dim", [None, -2])
def test_only_logits_of_a_chunk_ever_exist(sequence_dim):
    tokens, features, columns, chunk = 64, 5, 24, 10
    losses = losses_on(
        "tp=4", P() if sequence_dim is None else P("tp"), chunk=chunk, sequence_dim=sequence_dim
    )
    args = normal(tokens, features), normal(features, columns * 4), labels_below(96, tokens)

    def gradients(x, w, labels):
        return jax.grad(lambda x, w: jnp.sum(losses(x, w, labels)), (0, 1))(x, w)

    shapes = list(shapes_in(jax.make_jaxpr(gradients)(*args).jaxpr))
    rows = {s[0] for s in shapes if len(s) == 2 and s[1] == columns and s[0] != features}
    assert rows == {1, 10}  # 64 tokens in 7 chunks: of 10, the last padded
    assert not any(np.prod(s) > tokens * features * 4 for s in shapes if columns in s)

    counts = count_collectives(losses, *args)
    statistics = {"pmax": 1, "psum": 1}
    kept = features * columns + 3 * tokens
    if sequence_dim is None:
        assert counts.forward == statistics
        assert counts.backward == {"psum": 1}
        assert counts.residual_bytes == 4 * (kept + tokens * features)
    else:
        assert counts.forward == {**statistics, "all_gather": 2}
        assert counts.backward == {"all_gather": 2, "psum_scatter": 1}
        assert counts.residual_bytes <= 4 * (4 * kept + tokens * features // 4)


# -- errors -------------------------------------------------------------------------------------


def error(kind, x=(6, 3), w=(3, 4), labels=(6,), spec=REPLICATED, axis="tp", **options):
    x, w = (a if hasattr(a, "dtype") else jnp.ones(a) for a in (x, w))
    labels = labels if hasattr(labels, "dtype") else jnp.zeros(labels, "int32")

    def body(labels):
        vocab_parallel_cross_entropy(x, w, labels, axis, **{"sequence_dim": None, **options})
        return 0

    mapped = jax.shard_map(body, mesh=make_mesh("dp=2,tp=4"), in_specs=spec, out_specs=P())
    with pytest.raises(kind) as caught:
        jax.eval_shape(mapped, labels)
    assert type(caught.value) is kind
    name, _, text = str(caught.value).partition(": ")
    assert name == "vocab_parallel_cross_entropy"
    return text


def test_operands_that_do_not_fit():
    assert error(ValueError, w=(4, 3)) == (
        "x has local shape (6, 3) and w (4, 3), but they must be [..., d] and [d, v/n]; if w is "
        "sharded over another axis, gather it there first"
    )
    assert error(ValueError, labels=(5,)) == (
        "labels have local shape (5,) and x (6, 3), but each token needs one; give labels of "
        "shape (6,), sharded like x"
    )
    assert error(TypeError, x=jnp.ones((6, 3), "bfloat16")) == (
        "x is bfloat16[6, 3] and w is float32[3, 4], but they must be floats of one dtype; cast "
        "one of them with .astype"
    )
    assert error(TypeError, labels=jnp.zeros(6)) == (
        "labels must be integers, got float32; cast them"
    )
    assert error(ValueError, labels=(24,), spec=P("tp")) == (
        "labels of local shape (6,) vary over ['tp'], but every device of axis 'tp' (4) "
        "needs the same; replicate them, by in_specs without that axis or by gather_region"
    )
    assert error(ValueError) == (
        "w of local shape (3, 4) is replicated over ['tp'], but each device of axis 'tp' (4) "
        "needs columns of its own; shard it in in_specs, or cut it with scatter_region. If "
        "each device does have its own, and they are equal, say so by jax.lax.pcast(..., ('tp',), "
        "to='varying')"
    )


def test_a_bias_that_does_not_fit():
    for bias in (jnp.ones(16), jnp.ones((1, 4))):
        assert error(ValueError, bias=bias) == (
            f"bias has local shape {bias.shape}, but w of local shape (3, 4) has 4 columns here; "
            "give one number a column, sharded like the columns"
        )
    assert error(TypeError, bias=jnp.ones(4, "int32")) == (
        "bias must be floats, got int32; cast it"
    )


def test_options_out_of_range():
    assert (
        error(ValueError, softcap=0) == "softcap=0 must be above 0; None leaves logits as they are"
    )
    assert error(ValueError, softcap=float("inf")) == (
        "softcap=inf must be finite; None leaves logits as they are"
    )
    assert error(ValueError, vocabulary=17) == (
        "vocabulary=17 must be at least 1 and at most 16, the columns of w on all devices"
    )
    assert error(ValueError, chunk=0) == "chunk=0 must be at least 1"
    assert error(TypeError, chunk=2.0) == "chunk must be an integer, got 2.0 of type float"
    assert error(ValueError, label_smoothing=1.5) == (
        "label_smoothing=1.5 must be at least 0 and at most 1.0"
    )
    assert error(ValueError, z_loss=-1) == "z_loss=-1 must be at least 0"
    assert error(TypeError, z_loss="0") == (
        "z_loss must be a number known while tracing, got '0' of type str"
    )
    assert error(ValueError, sequence_dim=1) == (
        "sequence_dim=1 is the last dimension of x, local shape (6, 3), which holds features; "
        "choose one before it, such as -2"
    )
    narrow = Axis("tp", wire_dtype="int32")
    assert error(TypeError, axis=narrow).startswith("wire_dtype=int32 cannot carry sums of")
    with pytest.raises(ValueError, match=r"^Axis: mode must be one of naive"):
        Axis("tp", mode="ring")


def losses_of(layout, x, labels, check_vma=True, **options):
    """The loss of each table of a layout, which has its rows or its columns on devices."""

    def local(params, x, labels):
        return {
            path: vocab_parallel_cross_entropy(
                *(x, w.T if path == "table" else w, labels, ("tp", "dp")),
                sequence_dim=None,
                **options,
            )
            for path, w in params.items()
        }

    step = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(layout.specs, P(), P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    given = {path: normal(*array.shape) for path, array in layout.items()}
    return jax.jit(step)(layout.place(given), x, labels)


# Of different widths: a layout of another test may still be there.
TABLES = {"table": normal(13, 6), "lm_head": normal(7, 13)}


@pytest.mark.parametrize(("path", "check_vma"), [("table", True), ("lm_head", False)])
def test_a_table_that_a_layout_pads_needs_its_vocabulary(path, check_vma):
    """Each row of padding would add exp(0): there the loss is refused until it is told."""
    w = TABLES[path].T if path == "table" else TABLES[path]
    over, x, labels = Padded(("tp", "dp")), normal(5, len(w)), labels_below(13, 5)
    rules = LayoutMap({path: (over, None) if path == "table" else (None, over)})
    layout = rules.layout({path: TABLES[path]}, mesh_of("dp=2,tp=4"))
    with pytest.raises(
        ValueError,
        match=f"vocab_parallel_cross_entropy: '{path}' has 13 rows, which a layout pads to 16 "
        r"over \('tp', 'dp'\), as many as here: each row of padding would count as a token; "
        "give vocabulary=13, or vocabulary=16 if this is another table",
    ):
        losses_of(layout, x, labels, check_vma)
    found = losses_of(layout, x, labels, check_vma, vocabulary=13)[path]
    assert_rounded(found, reference(), x, w, labels)
    assert losses_of(layout, x, labels, check_vma, vocabulary=16)[path].shape == (5,)


def test_a_table_with_padding_in_each_shard_is_refused():
    layout = LayoutMap({"table": Split(("tp", "dp"), 0)}).layout(
        {"table": normal(13, 9)}, mesh_of("dp=2,tp=4")
    )
    why = "would belong to other tokens; pad it at its end by Padded"
    for options in ({}, {"vocabulary": 13}):
        with pytest.raises(ValueError, match=f"vocab_parallel_cross_entropy: 'table' .*{why}"):
            losses_of(layout, normal(5, 9), labels_below(13, 5), **options)

    def rows(tokens, table):
        return vocab_parallel_embedding(tokens, table, ("tp", "dp"), sequence_dim=None)

    with pytest.raises(ValueError, match=f"vocab_parallel_embedding: 'table' has 13 .*{why}"):
        jax.shard_map(rows, mesh=layout.mesh, in_specs=(P(), layout.specs["table"]), out_specs=P())(
            jnp.arange(13), layout.place({"table": normal(13, 9)})["table"]
        )


@pytest.mark.parametrize("shape", [(2, 11, 3), (11, 2, 3), (11, 3)])
def test_tables_in_one_array_and_rows_cut_anew_are_known(shape):
    """Whatever the array is in which they are padded, and over whichever axis."""
    dim = shape.index(11)
    rules = LayoutMap({"tables": (*[None] * dim, Padded("dp"))})
    layout = rules.layout({"tables": normal(*shape)}, mesh_of("dp=4"))
    args = normal(5, 3), normal(3, 12), labels_below(11, 5)
    with pytest.raises(ValueError, match="'tables' has 11 rows, which a layout pads to 12 over "):
        losses_on("tp=4")(*args)
    del layout


def test_each_table_of_a_size_is_told():
    """Which of several it is, no size says."""
    layouts = [
        LayoutMap({path: (Padded("tp", size=20),)}).layout({path: normal(v, 3)}, mesh_of("tp=4"))
        for path, v in {"a": 17, "b": 18}.items()
    ]
    args = normal(5, 3), normal(3, 20), labels_below(17, 5)
    with pytest.raises(ValueError, match="vocabulary=18, or vocabulary=17, or vocabulary=20 if"):
        losses_on("tp=4")(*args)
    del layouts


def test_a_layout_that_is_gone_pads_nothing_but_arrays_that_are_there():
    rules = LayoutMap({"table": (Padded("tp"), None)})
    layout = rules.layout({"table": normal(7, 5)}, mesh_of("tp=4"))
    args = normal(3, 5), normal(5, 8), labels_below(8, 3)
    params = layout.place({"table": normal(7, 5)})
    del layout
    with pytest.raises(ValueError, match="give vocabulary=7, or vocabulary=8 if this is another"):
        losses_on("tp=4")(*args)
    del params
    assert_rounded(jax.jit(losses_on("tp=4"))(*args), reference(), *args)
