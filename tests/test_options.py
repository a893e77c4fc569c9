"""Compiler options: what each chip gets, that its compiler takes them, and who is told."""

import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.platforms.async_options import traced_asynchronous
from jaxpar.platforms.chips import compiler_of
from jaxpar.schedule import compile_for, target, timeline
from jaxpar.testing import count_collectives

SLICES = {
    "TPU v4": "v4:2x2x2",
    "TPU v5 lite": "v5e:2x2",
    "TPU v5": "v5p:2x2x1",
    "TPU v6 lite": "v6e:2x2",
    "TPU7x": "tpu7x:2x2x1",
}
X = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16, sharding=P("tp"))


def _gather(x, axis="tp"):
    return lax.all_gather(x, axis, tiled=True)


def _exchange(x):
    n = lax.axis_size("tp")
    counts = jnp.full(n, 8, jnp.int32)
    mine = jnp.full(n, 8 * lax.axis_index("tp"), jnp.int32)
    theirs = 8 * jnp.arange(n, dtype=jnp.int32)
    operands = x, jnp.zeros_like(x), theirs, counts, mine, counts
    return lax.ragged_all_to_all(*operands, axis_name="tp")


PROGRAMS = {
    "all-gather": (_gather, P(None)),
    "reduce-scatter": (
        lambda x: lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True),
        P("tp", None),
    ),
    "all-reduce": (lambda x: lax.psum(x, "tp"), P(None)),
    "ragged-all-to-all": (_exchange, P("tp")),
}


@pytest.mark.parametrize("kind", SLICES)
def test_the_compiler_takes_the_options_and_frees_the_collectives(kind):
    described = target(SLICES[kind])
    options = jaxpar.compiler_options(described)
    compiler = compiler_of(kind)
    assert options == {option.name: option.value for option in compiler.options}
    freed = compiler.frees | {option.frees for option in compiler.options if option.frees}
    locals_, outs = zip(*PROGRAMS.values(), strict=True)
    function = jax.shard_map(
        lambda x, w: ([local(x) for local in locals_], w @ w),
        in_specs=(P("tp"), P()),
        out_specs=(list(outs), P()),
        check_vma=False,
    )
    w = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=P())
    transfers = timeline(compile_for(function, described, X, w)).transfers
    assert transfers
    for name in freed:
        of_kind = [transfer for transfer in transfers if transfer.row.endswith(f" {name}")]
        assert of_kind, (name, transfers)
        assert not any(transfer.synchronous for transfer in of_kind), name


@pytest.mark.parametrize("kind", ["TPU v5", "TPU v6 lite"])
def test_without_the_options_collectives_are_synchronous(kind):
    gather = jax.shard_map(_gather, in_specs=P("tp"), out_specs=P(None), check_vma=False)
    scatter = jax.shard_map(
        lambda x: lax.psum_scatter(x, "tp", tiled=True), in_specs=P(None), out_specs=P("tp")
    )
    for function in (gather, scatter):
        bare = compile_for(function, target(SLICES[kind]), X, compiler_options={})
        assert any(transfer.synchronous for transfer in timeline(bare).transfers)


def test_the_gpu_compiler_takes_its_options():
    pytest.importorskip("jax_plugins.xla_cuda13")
    code = (
        "import jax, jax.numpy as jnp, jaxpar\n"
        "from jax.sharding import PartitionSpec as P\n"
        "from jaxpar.schedule import compile_for, target\n"
        "h100 = target('h100:8')\n"
        "assert jaxpar.compiler_options(h100), 'none'\n"
        "x = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=P('tp'))\n"
        "print(len(compile_for(lambda x: 2 * x, h100, x).text) > 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "True", done.stderr[-2000:]


def test_options_of_a_mesh_a_device_a_target_and_the_context():
    v5p = target("v5p:2x2x1")
    options = jaxpar.compiler_options(v5p)
    assert "true" in options.values()
    assert jaxpar.compiler_options(v5p.mesh) == options
    assert jaxpar.compiler_options(v5p.mesh.abstract_mesh) == options
    assert jaxpar.compiler_options(v5p.mesh.devices.flat[0]) == options
    assert jaxpar.compiler_options() == {}  # of CPU devices
    with jax.set_mesh(v5p.mesh):
        assert jaxpar.compiler_options() == options
    options.clear()
    assert jaxpar.compiler_options(v5p)
    with pytest.raises(TypeError, match=r"compiler_options: devices must be a mesh.*got 'v5p'"):
        jaxpar.compiler_options("v5p")


@pytest.mark.parametrize("slice_name", ["v5p:2x2x2", "v6e:2x4", "v5e:2x4"])
def test_few_bytes_are_not_sent_by_sparse_cores(slice_name):
    place = target(slice_name)
    usual = jaxpar.compiler_options(place)
    few = jaxpar.compiler_options(place, largest=8 * 8192 * 2)
    assert few.keys() == usual.keys()
    assert {name for name in few if few[name] != usual[name]} == {
        name for name in usual if "sparse_core" in name
    }
    assert jaxpar.compiler_options(place, largest=2**22 + 1) == usual
    with jax.set_mesh(place.mesh), jaxpar.compiled_with(few):
        free = traced_asynchronous()
    assert not free & {"reduce-scatter", "all-reduce"}
    # Given to a program, they take the place of those of its chip.
    step = jaxpar.jit(lambda x: x, compiler_options=few)
    with jax.set_mesh(place.mesh), step.ready():
        assert traced_asynchronous() == free
    for wrong in (-1, 2.5, "many"):
        with pytest.raises((TypeError, ValueError), match="compiler_options: largest"):
            jaxpar.compiler_options(place, largest=wrong)


def _seen(described, trace):
    """The collectives that are asynchronous where a function is traced."""
    found = []

    def local(x):
        found.append(traced_asynchronous())
        return x

    with jax.set_mesh(described.mesh):
        trace(jax.shard_map(local, in_specs=P("tp"), out_specs=P("tp")))
    return found[-1]


ALL = {"all-gather", "reduce-scatter", "all-reduce", "ragged-all-to-all"}


def test_a_program_is_told_of_the_options_that_it_gets():
    v5p = target("v5p:2x2x1")
    assert _seen(v5p, lambda f: jaxpar.jit(f).trace(X)) == ALL
    assert _seen(v5p, lambda f: jaxpar.jit(f).lower(X)) == ALL
    assert _seen(v5p, lambda f: jaxpar.jit(f).eval_shape(X)) == ALL
    assert _seen(v5p, lambda f: jaxpar.jit(f, mesh=v5p.mesh).trace(X)) == ALL
    assert _seen(v5p, lambda f: compile_for(f, v5p, X)) == ALL
    assert _seen(v5p, lambda f: compile_for(f, v5p, X, compiler_options={})) == set()
    [gathers] = [name for name in jaxpar.compiler_options(v5p) if name.endswith("d_all_gather")]
    off = {gathers: "false"}
    assert _seen(v5p, lambda f: jaxpar.jit(f, compiler_options=off).trace(X)) == ALL - {
        "all-gather"
    }
    with jaxpar.compiled_with({gathers: True}):
        assert _seen(v5p, lambda f: jax.jit(f).trace(X)) == {"all-gather"}
    assert _seen(target("v5e:2x2"), lambda f: jax.jit(f).trace(X)) == {"all-gather"}
    assert _seen(target("tpu7x:2x2x1"), lambda f: jax.jit(f).trace(X)) == ALL


def test_a_program_is_traced_again_with_other_options():
    """What was traced with some is not taken for the same with others, or with none."""
    v6e, modes = target("v6e:2x2"), []
    options = jaxpar.compiler_options(v6e)

    def local(x):
        modes.append(traced_asynchronous())
        return x

    f = jax.shard_map(local, mesh=v6e.mesh, in_specs=P("tp"), out_specs=P("tp"))
    inner = jax.jit(f)
    with jax.set_mesh(v6e.mesh):
        for given in (options, {}, options):
            with jaxpar.compiled_with(given):
                inner.trace(X)
        jaxpar.jit(lambda x: inner(x)).trace(X)
        jaxpar.jit(f, compiler_options=dict.fromkeys(options, "false")).trace(X)
        jaxpar.jit(f).trace(X)
    # The third one is the first again; `jaxpar.jit` says of which chip options are.
    assert modes == [ALL, set(), ALL, set()]


def test_options_of_another_chip_are_refused():
    v6e = target("v6e:2x2")
    f = jax.shard_map(
        lambda x, w: jaxpar.all_gather_matmul(x, w, "tp"),
        mesh=v6e.mesh,
        in_specs=(P("tp"), P(None, "tp")),
        out_specs=P(None, "tp"),
    )
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    said = r"for 'TPU v6 lite' is traced with the compiler options of 'cpu'; give its mesh"
    with pytest.raises(ValueError, match=said):
        jaxpar.jit(f).trace(x, x)
    jaxpar.jit(f, mesh=v6e.mesh).trace(x, x)


def test_given_options_take_the_place_of_the_chips_in_a_program_of_jit():
    v5p = target("v5p:2x2x1")
    own = {"xla_tpu_enable_sparse_core_collective_offload_all_gather": "true"}

    def compiled(options, **more):
        return _seen(v5p, lambda f: compile_for(jaxpar.jit(f, **more), v5p, X, **options))

    assert compiled({}) == ALL
    assert compiled({"compiler_options": {}}) == set()
    assert compiled({"compiler_options": {}}, compiler_options=own) == {"all-gather"}


def test_a_program_that_is_not_told_warns_and_the_environment_tells(monkeypatch):
    v6e = target("v6e:2x2")
    with pytest.warns(UserWarning, match=r"jaxpar\.jit in place of jax\.jit") as caught:
        assert _seen(v6e, lambda f: jax.jit(f).trace(X)) == set()
    assert "src/jaxpar" not in caught[0].filename
    [gathers] = [name for name in jaxpar.compiler_options(v6e) if name.endswith("d_all_gather")]
    for text in (f"--{gathers}=true", f"--{gathers}"):
        monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_other=3 {text}")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert _seen(v6e, lambda f: jax.jit(f).trace(X)) == {"all-gather"}


@pytest.mark.parametrize(
    "modes", [{"mode": "chunked-2"}, {"mode": "naive", "backward": "chunked-4"}]
)
def test_chunks_that_are_named_warn_where_nothing_says_how_they_are_compiled(modes):
    v6e = target("v6e:2x2")
    gathered = jax.shard_map(
        lambda x: jaxpar.all_gather_matmul(
            x, jnp.ones((2048, 8), x.dtype), jaxpar.Axis("tp", **modes)
        ),
        mesh=v6e.mesh,
        in_specs=P("tp"),
        out_specs=P(),
        check_vma=False,
    )
    with jax.set_mesh(v6e.mesh):
        with pytest.warns(UserWarning, match=r"jaxpar\.jit in place of jax\.jit") as caught:
            jax.jit(gathered).trace(X)
        assert {warning.filename for warning in caught} == {__file__}  # the line of the call
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jaxpar.jit(gathered).trace(X)


def test_rings_that_are_named_ask_for_no_options():
    v5p = target("v5p:4x4x4", "dp=4,x=4,y=4")

    axis = jaxpar.Axis(("x", "y"), "multi-ring")

    def loss(x):
        out = jaxpar.all_gather_matmul(x, jnp.ones((2048, 8), x.dtype), axis)
        return jnp.sum(out.astype("float32"))

    gradients = jax.shard_map(
        jax.grad(loss),
        mesh=v5p.mesh,
        in_specs=P(("x", "y")),
        out_specs=P(("x", "y")),
        check_vma=False,
    )
    rows = jax.ShapeDtypeStruct(X.shape, X.dtype)
    with jax.set_mesh(v5p.mesh), warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(gradients).trace(rows)


def test_a_function_of_jit_has_the_options_of_the_one_that_calls_it():
    v6e = target("v6e:2x2")
    inner = jaxpar.jit(jax.shard_map(_gather, mesh=v6e.mesh, in_specs=P("tp"), out_specs=P("tp")))
    gathers = "xla_tpu_enable_sparse_core_collective_offload_all_gather"

    def sums(x):
        return jnp.sum(inner(x).astype("float32"))

    def step(x):
        return jax.grad(jax.checkpoint(sums))(x)

    def events(program):
        return [(event.name, event.seconds) for event in timeline(program).events]

    found = events(compile_for(step, v6e, X))
    assert events(compile_for(jaxpar.jit(step), v6e, X)) == found
    assert events(compile_for(step, v6e, X, compiler_options={})) != found
    with jax.set_mesh(v6e.mesh):
        assert jaxpar.jit(step).trace(X).lower().compile() is not None
        assert _seen(v6e, lambda f: jaxpar.jit(lambda x: jaxpar.jit(f)(x)).trace(X)) == ALL
        assert jaxpar.jit(sums).eval_shape(X).shape == ()
        assert count_collectives(inner, X).forward == {"all_gather": 1}
    own = jaxpar.jit(lambda x: 2 * x, compiler_options={gathers: "false"})
    text = rf"jit: <lambda> has compiler options that .* caller lacks: {{'{gathers}': 'false'}}"
    with pytest.raises(ValueError, match=text):
        compile_for(lambda x: own(x), v6e, X)
    compile_for(lambda x: own(x), v6e, X, compiler_options={gathers: "false"})


def test_jit_runs_and_refuses_what_is_no_function_or_mesh():
    calls = []

    @jaxpar.jit
    def double(x):
        """Doubles."""
        calls.append(x)
        return 2 * x

    assert double(jnp.float32(2)) == double(jnp.float32(2)) == 4
    assert len(calls) == 1
    assert (double.__name__, double.__doc__) == ("double", "Doubles.")
    double.clear_cache()
    assert double(jnp.float32(3)) == 6
    assert len(calls) == 2
    for static in (
        jaxpar.jit(jnp.ones, static_argnums=0),
        jaxpar.jit(static_argnums=0)(lambda n: jnp.ones(n)),
    ):
        assert static(3).shape == (3,)
    with pytest.raises(TypeError, match="nonsense"):
        jaxpar.jit(jnp.ones, nonsense=1)
    for options in (3, "abc"):
        with pytest.raises(TypeError, match=r"jit: compiler options must be a mapping of names"):
            jaxpar.jit(jnp.ones, compiler_options=options)
    with pytest.raises(TypeError, match=r"compiled_with: compiler options must be a mapping"):
        jaxpar.compiled_with(None).__enter__()
    with pytest.raises(TypeError, match=r"jit: fun must be a function, got 3"):
        jaxpar.jit(3)
    with pytest.raises(TypeError, match=r"jit: mesh must be a mesh"):
        jaxpar.jit(lambda x: x, mesh="tp=8")

    class Model:
        scale = 3.0

        @jaxpar.jit
        def apply(self, x):
            return self.scale * x

    with pytest.raises(TypeError, match="Model"):  # no pytree, as with jax.jit
        Model().apply(jnp.float32(2))
    jax.tree_util.register_static(Model)
    assert Model().apply(jnp.float32(2)) == Model.apply(Model(), jnp.float32(2)) == 6
    refused = jaxpar.jit(lambda x: x, compiler_options={"xla_no_such_option": "1"})
    with pytest.raises(Exception, match="xla_no_such_option"):
        refused(jnp.float32(1))
