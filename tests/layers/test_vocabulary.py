"""The embedding from a sharded table against NumPy, and what it sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh
from jaxpar.layers import vocab_parallel_embedding
from jaxpar.testing import assert_matches_reference, count_collectives

check = pytest.mark.parametrize("check_vma", [True, False])


def normal(*shape, dtype="float32"):
    return np.random.default_rng([*shape]).standard_normal(shape).astype(dtype)


def reference(tokens, table):
    known = (tokens >= 0) & (tokens < len(table))
    return np.where(known[..., None], table[np.clip(tokens, 0, len(table) - 1)], 0.0)


def mesh_of(text):
    size = int(np.prod([int(part.split("=")[1]) for part in text.split(",")]))
    return make_mesh(text, devices=jax.devices()[:size])


@pytest.mark.parametrize(
    ("mesh", "names", "sequence_dim", "dtype", "check_vma"),
    [
        ("dp=2,tp=3", "tp", None, "float32", False),
        ("dp=2,tp=3", "tp", -2, "bfloat16", True),
        ("a=2,b=2,dp=2", ("b", "a"), 1, "float32", False),
        ("tp=1,dp=2", "tp", 0, "float32", True),
    ],
)
def test_embedding(mesh, names, sequence_dim, dtype, check_vma):
    """The table is replicated over dp, whose devices have tokens of their own."""
    tokens = np.random.default_rng(0).integers(-2, 16, (4, 12)).astype("int32")
    table = jnp.asarray(normal(12, 5), dtype)
    out_specs = {None: P("dp"), 0: P(("dp", "tp"))}.get(sequence_dim, P("dp", names))
    assert_matches_reference(
        lambda t, w: vocab_parallel_embedding(t, w, names, sequence_dim=sequence_dim),
        reference,
        *(tokens, table),
        mesh=mesh_of(mesh),
        in_specs=(P("dp"), P(names)),
        out_specs=out_specs,
        check_vma=check_vma,
        max_directions=8,
    )


@check
def test_rows_of_16_bits_are_added_up_wide(check_vma):
    """600 ones are 600, where bfloat16 itself stays at 256."""
    embed = jax.shard_map(
        lambda t, w: vocab_parallel_embedding(t, w, "tp", sequence_dim=None),
        mesh=make_mesh("tp=8"),
        in_specs=(P(), P("tp")),
        out_specs=P(),
        check_vma=check_vma,
    )
    tokens = jnp.full((600,), 9, "uint8")
    loss = lambda table: jnp.sum(embed(tokens, table).astype("float32"))  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(jnp.ones((16, 1), "bfloat16"))
    assert gradient.dtype == "bfloat16"
    np.testing.assert_array_equal(gradient[:, 0].astype("float32"), 600 * (np.arange(16) == 9))


def test_what_is_sent():
    def sent(out_specs, **options):
        embed = jax.shard_map(
            lambda t, w: vocab_parallel_embedding(t, w, "tp", **options),
            mesh=make_mesh("tp=8"),
            in_specs=(P(), P("tp")),
            out_specs=out_specs,
        )
        return count_collectives(embed, np.zeros(16, "int32"), jnp.ones((16, 4), "bfloat16"))

    whole, blocks = sent(P(), sequence_dim=None), sent(P("tp"))
    assert (dict(whole.forward), dict(whole.backward)) == ({"psum": 1}, {})
    assert blocks.forward == {"psum_scatter": 1}
    assert blocks.backward == {"all_gather": 1}
    assert whole.forward_bytes == 2 * blocks.forward_bytes == 2 * 16 * 4 * 2 * 7 / 8


# -- errors -------------------------------------------------------------------------------------


def error(kind, tokens, table, spec=None, **options):
    def body(tokens):
        vocab_parallel_embedding(tokens, table, "tp", **{"sequence_dim": None, **options})
        return 0

    mapped = jax.shard_map(body, mesh=make_mesh("dp=2,tp=4"), in_specs=spec or P(), out_specs=P())
    with pytest.raises(kind) as caught:
        jax.eval_shape(mapped, tokens)
    name, _, text = str(caught.value).partition(": ")
    assert name == "vocab_parallel_embedding"
    return text


def test_errors():
    tokens, table = jnp.zeros((2, 6), "int32"), jnp.ones((3, 4))
    assert error(TypeError, jnp.zeros((2, 6)), table) == (
        "tokens must be integers, got float32; cast them"
    )
    assert error(ValueError, tokens, jnp.ones(3)) == "table must be [v/n, d], got local shape (3,)"
    assert error(ValueError, jnp.zeros((2, 8), "int32"), table, P(None, ("dp", "tp"))) == (
        "tokens of local shape (2, 1) vary over ['tp'], but every device of axis 'tp' (4) "
        "needs the same; replicate them, by in_specs without that axis or by gather_region"
    )
    assert error(ValueError, tokens, table, sequence_dim=-2) == (
        "the result has local shape (2, 6, 4), whose dimension 1 axis 'tp' (4) does not divide: "
        "6 = 1 x 4 + 2; pad it to 8, or choose another dimension"
    )
    assert error(ValueError, tokens, table) == (
        "table of local shape (3, 4) is replicated over ['tp'], but each device of axis 'tp' (4) "
        "needs rows of its own; shard it in in_specs, or cut it with scatter_region. If "
        "each device does have its own, and they are equal, say so by jax.lax.pcast(..., ('tp',), "
        "to='varying')"
    )
    assert error(ValueError, tokens, table, sequence_dim=2) == (
        "sequence_dim=2 is the last dimension of the result, local shape (2, 6, 4), which holds "
        "features; choose one before it, such as -2"
    )
