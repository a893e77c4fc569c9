#!/usr/bin/env bash
# jax.random.bits of uint4 hands out bytes
#
# jax.random.bits(key, shape, jnp.uint4) neither refuses the type nor obeys it: the result is uint8, with numbers up
# to 255. jax.random.randint obeys the same request (uint4, 0 to 15), and jax.random.uniform of float4_e2m1fn refuses.
# The plausible guess: four random bits a number in an array of uint4, as every other width from 8 to 64 is obeyed.
# Why it matters: random 4-bit weights that a test of packing or of a collective is made from are 8-bit numbers, so
# that the test runs on another type, and never packs anything.
# Seen on 2026-11-29 with jax 0.12.0.1, ml_dtypes 0.6.0, numpy 2.5.5 (CPU):
#   bits: uint8, maximum 255; randint: uint4, maximum 15; bytes on the device 4096 and 2048
set -euo pipefail
PYTHON=${PYTHON:-python3.13}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -m venv "$folder/env"
"$folder/env/bin/pip" install -qq --no-compile --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 ml_dtypes==0.6.0 numpy==2.5.5
export JAX_PLATFORMS=cpu
"$folder/env/bin/python" - 2>"$folder/log" <<'END' || { tail -n 1 "$folder/log" && exit 1; }
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

print("jax", jax.__version__, "ml_dtypes", ml_dtypes.__version__, "numpy", np.__version__)
key = jax.random.key(0)
bits = jax.random.bits(key, (4096,), jnp.uint4)
drawn = jax.random.randint(key, (4096,), 0, 16, jnp.uint4)
for name, array in (("bits", bits), ("randint", drawn)):
    size = array.addressable_shards[0].data.on_device_size_in_bytes()
    print(f"{name}: {array.dtype}, maximum {np.asarray(array).astype(int).max()}, {size} bytes on the device")
if bits.dtype != jnp.uint8 or int(bits.max()) <= 15 or drawn.dtype != jnp.uint4:
    raise SystemExit("differs: bits of uint4 were uint8 beyond 15, and randint was uint4")
END
