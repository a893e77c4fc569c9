#!/usr/bin/env bash
# e8m0 scales have no zero, so whatever fills with zeros breaks them
#
# float8_e8m0fnu, the type of MXFP4's and MXFP8's block scales, has powers of two and NaN, and neither a zero nor a
# sign. Each library answers a request for zero in its own way. np.zeros gives the smallest number, 2**-127 (bits of
# zero). jnp.zeros gives NaN, and so do jnp.pad, what a permute leaves on a device that nothing was sent to, jnp.sum
# of ones, and jnp.max of ones (its start, minus infinity, is NaN too). jax.lax.pmax over eight devices of the same
# ones is 1: it needs no start. A cast of a block's maximum 0 is NaN as well.
# The plausible guess: zeros are zeros, or at least the smallest number everywhere; a maximum of positive numbers is
# one of them.
# Why it matters: padding scales to a multiple of the devices, or a block of zeros, turns weights into NaN, and the
# NumPy version of the same code is quietly right.
# Seen on 2026-11-29 with jax 0.12.0.1, ml_dtypes 0.6.0, numpy 2.5.5 (CPU):
#   numpy zeros 5.877472e-39; zeros nan; pad nan; permute nan; sum nan; max nan; pmax 1.0; cast of 0 nan
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
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

print("jax", jax.__version__, "ml_dtypes", ml_dtypes.__version__, "numpy", np.__version__)
E8M0 = jnp.float8_e8m0fnu
ones = jnp.ones(8, E8M0)
mesh = jax.make_mesh((8,), ("x",))


def on_mesh(function):
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return np.asarray(jax.jit(mapped)(jax.device_put(ones, jax.NamedSharding(mesh, P("x")))))


results = {
    "numpy zeros": np.zeros(3, E8M0)[0],
    "zeros": jnp.zeros(3, E8M0)[0],
    "pad": jnp.pad(ones, 1)[0],
    "permute": on_mesh(lambda a: jax.lax.ppermute(a, "x", [(0, 1)]))[5],
    "sum": jnp.sum(ones),
    "max": jnp.max(ones),
    "pmax": on_mesh(lambda a: jax.lax.pmax(a, "x"))[0],
    "cast of 0": jnp.zeros(3).astype(E8M0)[0],
}
results = {name: float(np.float32(value)) for name, value in results.items()}
print("; ".join(f"{name} {value:.7g}" for name, value in results.items()))
expected_nan = {"zeros", "pad", "permute", "sum", "max", "cast of 0"}
if {name for name, value in results.items() if np.isnan(value)} != expected_nan or results["pmax"] != 1:
    raise SystemExit(f"differs: NaN was expected of {sorted(expected_nan)}, and pmax 1")
if results["numpy zeros"] != 2.0**-127:
    raise SystemExit("differs: numpy's zeros were 2**-127")
END
