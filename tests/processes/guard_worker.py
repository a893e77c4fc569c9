"""What each process of test_guard.py does: `guard_worker.py CASE RANK COUNT PORT`."""

import os
import signal
import sys
import time
from contextlib import redirect_stdout

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1 if sys.argv[1] == "pipeline" else 2)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jaxpar  # noqa: E402
from jaxpar.pipeline import interleaved_1f1b, value_and_grad  # noqa: E402
from jaxpar.tools.cli.workers import own_output  # noqa: E402

CASE, RANK, COUNT, PORT = sys.argv[1], *map(int, sys.argv[2:5])
ODD = 0 if CASE.endswith("_first") else 2 if CASE == "pipeline" else COUNT - 1
IS_ODD = RANK == ODD  # the one that does something else
LIMIT = 2
if CASE in (
    "frozen",
    "frozen_first",
    "partitioned",
    "lines",
):  # whose first calls must be within it
    LIMIT = 5
elif CASE not in ("missing", "slow", "tracing", "compiling"):  # told at once, or nothing is
    LIMIT = 300
LONG = 600  # seconds, longer than anyone waits


def fault():
    """Says when it happens."""
    print("fault", flush=True)


def load(seconds):
    """What a slow process is at."""
    fault()
    time.sleep(seconds)


def compiles(event, duration_secs, **kwargs):
    """Is called at the end of a compilation, as if that took longer."""
    if event == "/jax/core/compile/backend_compile_duration" and kwargs["fun_name"] == "jit(step)":
        load(LONG)


def train_pipeline():
    """Trains two stages on each device, as one device does, until a process is killed in a step."""
    mesh, specs = jaxpar.make_mesh(f"pp={COUNT}"), (P("pp"), P())
    schedule = interleaved_1f1b(COUNT, microbatches=4, virtual_stages=2)
    random = np.random.default_rng(0)
    layers, shared, x = (
        random.normal(size=shape).astype("float32") / 2
        for shape in ((2 * COUNT, 8, 8), (8, 8), (16, 8))
    )

    def placed(spec, x):
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])

    def losses(shared, y, x):
        return jnp.sum((y @ shared.T - 1) ** 2), y.size

    def loss_on_one_device(params, x):
        layers, shared = params
        y = x @ shared
        for w in layers:
            y = jnp.tanh(y @ w)
        loss, count = losses(shared, y, x)
        return loss / count

    def updated(value_and_grad):
        def step(layers, shared, x):
            loss, gradients = value_and_grad(layers, shared, x)
            return loss, jax.tree.map(lambda w, g: w - 0.1 * g, (layers, shared), gradients)

        return step

    @jax.jit
    @updated
    def alone(layers, shared, x):
        return jax.value_and_grad(loss_on_one_device)((layers, shared), x)

    gradients = value_and_grad(
        lambda w, x, batch: jnp.tanh(x @ w[0]), lambda shared, x: x @ shared, losses, schedule, "pp"
    )
    local = jax.shard_map(
        updated(gradients), mesh=mesh, in_specs=(*specs, P()), out_specs=(P(), specs)
    )
    step = jaxpar.guard(jax.jit(local), timeout_s=LIMIT, exit_code=7)
    # Device i has stages i and i + COUNT.
    order = np.arange(2 * COUNT).reshape(2, COUNT).T.ravel()
    params, given = (layers, shared), placed(P(), x)
    own = placed(P("pp"), layers[order]), placed(P(), shared)
    for number in range(1, 1000):  # more than the others come to
        found, own = step(*own, given)
        if IS_ODD and number == 3:
            fault()
            os.kill(os.getpid(), signal.SIGKILL)
        wanted, params = alone(*params, x)
        np.testing.assert_allclose(found.addressable_data(0), wanted, rtol=1e-5)
        print(f"loss {number} is that of one device", flush=True)


def main():
    if CASE == "compiling" and IS_ODD:
        jax.monitoring.register_event_duration_secs_listener(compiles)
    beat = {"heartbeat_timeout_seconds": 20} if CASE.startswith("stopped") else {}
    jaxpar.initialize(f"localhost:{PORT}", COUNT, RANK, timeout_s=300, **beat)
    if CASE == "pipeline":
        train_pipeline()
        return
    mesh = jaxpar.make_mesh(f"dp={COUNT},tp=2")
    sharding = NamedSharding(mesh, P("dp"))

    def array(rows):
        return jax.make_array_from_callback((rows, 8), sharding, lambda i: np.ones((rows, 8))[i])

    def make(reduce):
        def local(x):
            if CASE == "tracing" and IS_ODD:
                load(LONG)
            x = lax.psum(x, "tp")
            return reduce(x, "dp")  # the collective that needs the others

        def step(x):
            return jax.shard_map(local, mesh=mesh, in_specs=P("dp"), out_specs=P())(x)

        return jax.jit(step)

    @jax.jit
    def partitioned(x):
        return jnp.sum(x * 2)  # the sum that needs the others

    def guard(what):
        code = None if CASE in ("equal", "slow") else 7
        return jaxpar.guard(what, timeout_s=LIMIT, exit_code=code)

    plain = partitioned if CASE == "partitioned" else make(lax.psum)
    step = guard(plain)
    x = array(4 * COUNT)
    for number in range(1, 4):
        if IS_ODD and (CASE == "missing" or number == 3):
            match CASE:
                case "missing" | "partitioned":
                    load(LONG)
                case "slow":
                    fault()
                    sys.stdin.read()  # until the test has seen enough
                case "killed" | "killed_first":
                    fault()
                    os.kill(os.getpid(), signal.SIGKILL)
                case "frozen" | "frozen_first" | "stopped" | "stopped_first":
                    fault()
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "raises":
                    fault()
                    raise RuntimeError("no luck")
                case "operation":
                    fault()
                    step = guard(make(lax.pmax))
        if CASE == "lines":
            with guard("training") as guarded:
                if IS_ODD and number == 3:
                    load(LONG)
                out = plain(x)
                guarded.until(out)
            jax.block_until_ready(out)
        else:
            out = jax.block_until_ready(step(x))
    if CASE != "partitioned":
        np.testing.assert_array_equal(out.addressable_data(0), 2 * COUNT * np.ones((4, 8)))
    print("done", flush=True)


if __name__ == "__main__":
    with own_output() as lines, redirect_stdout(lines):
        main()
