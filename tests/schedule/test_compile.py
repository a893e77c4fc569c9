"""Compiling for a target, the floors of what was compiled, and its FLOPs against hand counts."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.layout import LayoutMap
from jaxpar.schedule import (
    Memory,
    Target,
    compile_for,
    matmul_floor,
    program_floor,
    target,
    timeline,
)
from jaxpar.tools.program.flops import device_flops
from jaxpar.tools.timeline.timeline import program_of

V5E = target("v5e:2x2")
ROWS = P("tp")
PRODUCT = 2 * 512**3  # FLOPs of two matrices of 512 x 512


def square(spec, size=512, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((size, size), dtype, sharding=spec)


def gather(x):
    return jax.shard_map(
        lambda x: lax.all_gather(x, "tp", tiled=True),
        in_specs=ROWS,
        out_specs=P(),
        check_vma=False,
    )(x)


@pytest.mark.parametrize("jitted", [False, True])
def test_the_targets_mesh_is_the_context(jitted):
    fn = jax.jit(gather) if jitted else gather
    program = compile_for(fn, V5E, square(ROWS))
    assert program.target is V5E
    assert program.module.hlo.is_scheduled
    assert program.seconds > 0
    assert jax.sharding.get_abstract_mesh().empty  # as before
    (transfer,) = timeline(program).transfers
    assert (transfer.row, transfer.bytes) == ("tp all-gather", 512 * 512 * 2 * 3 / 4)


def test_operands_may_name_their_mesh():
    program = compile_for(gather, V5E, square(NamedSharding(V5E.mesh, ROWS)))
    assert program.memory.arguments == 512 * 512 * 2 // 4


def test_memory_of_one_device():
    add = jax.jit(lambda x, y: (x + y, x.sum()), donate_argnums=1)
    memory = compile_for(add, V5E, square(ROWS), square(ROWS)).memory
    block = 512 * 512 * 2 // 4
    assert memory.arguments == 2 * block
    assert block <= memory.outputs <= block + 4096  # and a number, padded
    assert memory.aliased == block
    assert memory.temporaries >= 0
    assert memory.peak >= 2 * block


def test_compiler_options_reach_the_compiler():
    with pytest.raises(Exception, match="no_such_option"):
        compile_for(gather, V5E, square(ROWS), compiler_options={"no_such_option": "1"})


def test_what_tracing_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        compile_for(lambda x: x / (1 // 0), V5E, square(ROWS))


def test_floor_of_a_matmul():
    floor = matmul_floor(V5E, "mk,kn->mn", (2048, 2048), (2048, 2048), 9e6)
    chip = V5E.chip
    assert floor.transfer == pytest.approx(9e6 / (2 * chip.link))
    peak = 2 * 2048**3 / chip.flops
    assert peak <= floor.compute <= 1.5 * peak
    assert floor.total == max(floor.compute, floor.transfer)
    both = matmul_floor(V5E, "mk,kn->mn", (2048, 2048), (2048, 2048), 9e6, grad=True)
    assert both.transfer == 2 * floor.transfer
    assert 3 * peak <= both.compute <= 4.5 * peak


def test_floor_of_a_matmul_on_gpu_is_a_measured_time_or_a_roofline():
    h100 = target("h100:4")
    floor = matmul_floor(h100, "mk,kn->mn", (4096, 4096), (4096, 4096), 9e6)
    assert floor.transfer == pytest.approx(9e6 / h100.chip.link)
    # XLA's tables, which jax 0.12 has, reach four fifths of the peak.
    assert 0.95 < floor.compute / (2 * 4096**3 / h100.chip.flops) < 1.3


def test_floor_of_a_program_and_figures_of_ones_own():
    fn = jax.shard_map(
        lambda x, y: lax.all_gather(x, "tp", tiled=True) @ y,
        in_specs=(ROWS, P(None, "tp")),
        out_specs=P(None, "tp"),
        check_vma=False,
    )
    program = compile_for(fn, V5E, square(ROWS), square(P(None, "tp")))
    chip = V5E.chip
    floor = program_floor(program)
    assert floor.compute == pytest.approx(PRODUCT / 4 / chip.flops)
    # 2 x 2: a device has a link to each of two neighbours.
    assert floor.transfer == pytest.approx(512 * 512 * 2 * 3 / 4 / (2 * chip.link))
    slow = replace(chip, link=chip.link / 2, latency=0.0, start=0.0)
    fast = replace(chip, latency=0.0, start=0.0)
    (one,), (two,) = (timeline(program, c).transfers for c in (fast, slow))
    assert two.seconds == pytest.approx(2 * one.seconds)
    assert program_floor(program, timeline(program, slow)) == floor
    assert program_floor(program, chip=slow).transfer == pytest.approx(2 * floor.transfer)


def test_floors_need_figures():
    unknown = Target("x:4", V5E.mesh, None)
    with pytest.raises(ValueError, match=r"_floor: no figures are known of 'TPU v5 lite' \(x:4\)"):
        matmul_floor(unknown, "mk,kn->mn", (64, 64), (64, 64), 1.0)
    known = replace(unknown, chip=V5E.chip)
    assert matmul_floor(known, "mk,kn->mn", (64, 64), (64, 64), 1.0).compute > 0


@pytest.mark.parametrize(
    "subscripts", ["mk,kn", "mk->m", "mk,kn,no->mo", "m,kn->mn", "mk,kno->mno"]
)
def test_a_floor_of_two_operands(subscripts):
    with pytest.raises(ValueError, match=r"matmul_floor: subscripts=.* must be like 'mk,kn->mn'"):
        matmul_floor(V5E, subscripts, (64, 64), (64, 64), 1.0)


def scanned(x):
    return lax.scan(lambda c, _: (c @ c, None), x, None, length=5)[0]


def branched(x):
    return lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)


def repeated(x):
    return lax.while_loop(lambda c: c[0, 0] > 0, lambda c: c @ c, x)


def batched(x):
    return jnp.einsum("abk,ack->abc", x.reshape(4, 128, 512), x.reshape(4, 128, 512))


def local(x):
    """A quarter of the rows with all of the columns, on each of four devices."""
    return jax.shard_map(lambda x: x @ x.T, in_specs=ROWS, out_specs=ROWS)(x)


@pytest.mark.parametrize(
    ("fn", "flops"),
    [
        (lambda x: x + x, 0),
        (lambda x: x @ x, PRODUCT / 4),
        (jax.jit(lambda x: x @ x), PRODUCT / 4),
        (lambda x: jax.jit(lambda y: y @ y)(x) @ x, 2 * PRODUCT / 4),
        (jax.checkpoint(lambda x: x @ x), PRODUCT / 4),
        (jax.grad(lambda x: (x @ x).sum()), 2 * PRODUCT / 4),
        (scanned, 5 * PRODUCT / 4),
        (branched, 2 * PRODUCT / 4),
        (repeated, PRODUCT / 4),
        (batched, 4 * 2 * 128 * 128 * 512 / 4),
        (local, 2 * 128 * 512 * 128),
        (lambda x: local(x) @ local(x).T + x @ x,
         2 * 2 * 128 * 512 * 128 + (2 * 512 * 128 * 512 + PRODUCT) / 4),
        (lambda x: lax.ragged_dot(x, jnp.stack([x, x]), jnp.array([256, 256])), PRODUCT / 4),
    ],
)  # fmt: skip
def test_flops_of_one_device(fn, flops):
    with jax.set_mesh(V5E.mesh):
        jaxpr = jax.jit(fn).trace(jax.ShapeDtypeStruct((512, 512), jnp.float32)).jaxpr
    assert device_flops(jaxpr, 4) == flops


def test_flops_of_a_shard_map_over_some_axes():
    """Over tp by hand, over dp by the compiler: half of the rows of every block."""
    described = target("v5e:2x4", "dp=2,tp=4")

    def fn(x):
        return jax.shard_map(lambda x: x @ x.T, in_specs=ROWS, out_specs=ROWS, axis_names={"tp"})(x)

    with jax.set_mesh(described.mesh):
        jaxpr = jax.jit(fn).trace(jax.ShapeDtypeStruct((512, 512), jnp.float32)).jaxpr
    assert device_flops(jaxpr, 8) == 2 * 128 * 512 * 128 / 2


def test_sums_of_the_matmul_beside_a_gather_are_sent_too():
    """The compiler of v5e fuses the matmul with the gather, but not the scatter of its sums."""
    described = target("v5e:2x4")

    def local(x, a, b, c):
        y = lax.all_gather(x, "tp", tiled=True)
        return lax.psum_scatter(a @ b, "tp", tiled=True), y @ c

    def array(rows, cols, spec=None):
        return jax.ShapeDtypeStruct((rows, cols), jnp.bfloat16, sharding=spec or P())

    function = jax.shard_map(
        local, in_specs=(P("tp"), P(), P(), P()), out_specs=(P("tp"), P()), check_vma=False
    )
    arrays = array(4096, 2048, P("tp")), array(8192, 1024), array(1024, 2048), array(2048, 512)
    played = timeline(compile_for(function, described, *arrays))
    sent = {e.row: (e.bytes, e.synchronous, bool(e.covers)) for e in played.transfers}
    assert sent["tp all-gather"] == (4096 * 2048 * 2 * 7 / 8, False, True)
    assert sent["tp reduce-scatter"] == (8192 * 2048 * 2 * 7 / 8, True, False)


def test_a_backend_that_tells_nothing_of_memory():
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    traced = jax.jit(jnp.sin).trace(x)
    compiled = SimpleNamespace(
        memory_analysis=lambda: None, as_text=traced.lower().compile().as_text
    )
    program = program_of(target("v5e:2x2"), traced, compiled, {})
    assert program.memory == Memory(0, 0, 0, 0, 0)
    assert timeline(program).peak_bytes == 0


@pytest.mark.parametrize("jit", [jax.jit, jaxpar.jit])
def test_a_step_with_shardings_on_the_devices_at_hand_is_refused(jit):
    here = NamedSharding(jaxpar.make_mesh("tp=8"), P("tp"))
    step = jit(lambda x: 2 * x, out_shardings=here)
    text = "compile_for: the step has shardings on other devices .* before jax.jit"
    with pytest.raises(ValueError, match=text):
        compile_for(step, target("v5e:2x4", "tp=8"), jax.ShapeDtypeStruct((64,), jnp.float32))


def test_a_layout_refuses_such_a_step():
    layout = LayoutMap({"w": ("tp", None)}).layout(
        {"w": jnp.ones((8, 8))}, jaxpar.make_mesh("tp=8")
    )
    step = jax.jit(lambda params: params, out_shardings=layout.shardings)
    with pytest.raises(ValueError, match="the step has shardings on other devices"):
        layout.explain(step, "v5e:2x4")


@pytest.mark.parametrize("looped", [False, True])
def test_a_compiler_without_scaled_dot(looped):
    """Compilers for TPUs have it. Those for GPUs do not, and get both edits of the message."""
    low, scales = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
    shapes = ((128, 256), low), ((256, 128), low), ((128, 8), scales), ((8, 128), scales)
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=P()) for shape, dtype in shapes]

    def step(product):
        def run(*args):
            if not looped:
                return product(*args)
            added = lax.scan(
                lambda x, _: (x + product(*args), None), jnp.zeros((128, 128)), None, 2
            )
            return added[0]

        return run

    def wide(a, s):
        return a.astype(jnp.float32) * s.astype(jnp.float32)

    products = {
        "lax.scaled_dot": lambda a, b, s, t: lax.scaled_dot(
            a, b, lhs_scale=s, rhs_scale=t, preferred_element_type=jnp.float32
        ),
        "jax.nn.scaled_matmul": lambda a, b, s, t: jax.nn.scaled_matmul(
            a[None], b.T[None], s[None], t.T[None], preferred_element_type=jnp.float32
        )[0],
        "jnp.matmul": lambda a, b, s, t: (
            wide(a, jnp.repeat(s, 32, axis=1)) @ wide(b, jnp.repeat(t, 32, axis=0))
        ),
    }
    flops = (2 if looped else 1) * 2 * 128 * 256 * 128
    narrow = compile_for(step(products["lax.scaled_dot"]), V5E, *args).flops
    assert narrow == flops / V5E.mesh.size / 2  # in 8 bits they are twice as fast
    with pytest.raises(ValueError, match=r"^compile_for: .* no jax\.lax\.scaled_dot") as refusal:
        compile_for(step(products.pop("lax.scaled_dot")), target("h100:2"), *args)
    for name, product in products.items():
        assert name in str(refusal.value)
        counted = compile_for(step(product), target("h100:2"), *args).flops
        assert counted == flops / 2 / (2 if "scaled" in name else 1)
