#!/usr/bin/env bash
# Iterating over a sharded array puts every row on device 0
#
# Weights of three layers [3, 8, 4] are sharded over eight devices along dimension 1. w[0] and jnp.unstack(w)[0] stay
# sharded. "for layer in w", list(w), zip(w, ...) and "a, b, c = w" give layers that lie whole on device 0, and
# jnp.stack of them is one array on device 0. Inside of jax.jit the same loop keeps the sharding. It is the same with
# Auto and Explicit axes.
# The plausible guess: iteration is indexing from 0 to n-1, so the rows lie where w[i] lies.
# Why it matters: turning stacked layers into a list, outside of jit as checkpoint converters do, gathers each layer
# in one device's memory, without a word; the model is on one device from there on.
# Seen on 2026-11-29 with jax 0.12.0.1 (CPU, eight devices), devices that a layer is on:
#   index 8, unstack 8, loop 1, unpacking 1, stacked again 1, loop in jit 8 (Auto and Explicit)
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
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

print("jax", jax.__version__)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    weights = np.arange(96.0, dtype=np.float32).reshape(3, 8, 4)
    w = jax.device_put(weights, NamedSharding(mesh, P(None, "x")))
    first, _, _ = w
    arrays = {
        "index": w[0],
        "unstack": jnp.unstack(w)[0],
        "loop": [layer for layer in w][0],
        "unpacking": first,
        "stacked again": jnp.stack(list(w)),
        "loop in jit": jax.jit(lambda w: [layer for layer in w])(w)[0],
    }
    seen = {name: len(array.sharding.device_set) for name, array in arrays.items()}
    print(kind.name, *(f"{name} {number}" for name, number in seen.items()))
    if list(seen.values()) != [8, 8, 1, 1, 1, 8]:
        raise SystemExit("differs: devices were 8, 8, 1, 1, 1, 8")
END
