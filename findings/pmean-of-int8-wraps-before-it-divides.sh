#!/usr/bin/env bash
# The mean over devices of int8 numbers wraps, and comes back as a float
#
# jax.lax.pmean of int8 over eight devices that all have 100 is 4.0: the sum is made in int8, where 800 is 32, and only
# the quotient is a float. jnp.mean of the same eight numbers is 100.0, as it sums in a wider type. The same holds for
# uint8 (255 -> 31.0) and int16. Booleans are treated in three ways: psum widens them to int32, pmean
# gives a float, and psum_scatter, which is the same sum, refuses them with a TypeError.
# The plausible guess: a function that turns integers into a float widens them first, as jnp.mean does.
# Why it matters: the mean of small counts, of labels that agree or of quantized values over data-parallel devices is
# wrong with a float's face, with no integer left in the result that would make one suspicious.
# Seen on 2026-11-29 with jax 0.12.0.1 (CPU, eight devices):
#   int8 100 -> pmean 4.0, mean 100.0; uint8 255 -> 31.0, 255.0; int16 30000 -> -2768.0, 30000.0; bool: psum int32 8,
#   pmean 1.0, psum_scatter TypeError
set -euo pipefail
PYTHON=${PYTHON:-python3.13}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -m venv "$folder/env"
"$folder/env/bin/pip" install -qq --no-compile --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 ml_dtypes==0.6.0 numpy==2.5.5
export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8
"$folder/env/bin/python" - 2>"$folder/log" <<'END' || { tail -n 1 "$folder/log" && exit 1; }
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

print("jax", jax.__version__)
mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def on_mesh(function, array, out):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=out))(array)


for dtype, number, expected in ((jnp.int8, 100, 4.0), (jnp.uint8, 255, 31.0), (jnp.int16, 30000, -2768.0)):
    array = jnp.full(8, number, dtype)
    mean = on_mesh(lambda a: lax.pmean(a, "x"), array, P())
    print(dtype.__name__, number, "-> pmean", mean.dtype, float(mean[0]), "mean", float(jnp.mean(array)))
    if float(mean[0]) != expected or float(jnp.mean(array)) != number:
        raise SystemExit(f"differs: pmean of {dtype.__name__} was {expected}, and jnp.mean {number}")
flags = jnp.ones(64, bool)
total = on_mesh(lambda a: lax.psum(a, "x"), flags, P())
mean = on_mesh(lambda a: lax.pmean(a, "x"), flags, P())
print("bool: psum", total.dtype, total[0], "pmean", mean.dtype, mean[0])
try:
    on_mesh(lambda a: lax.psum_scatter(a, "x", tiled=True), flags, P("x"))
    raise SystemExit("differs: psum_scatter refused booleans")
except TypeError as error:
    print("psum_scatter: TypeError:", str(error).splitlines()[0])
END
