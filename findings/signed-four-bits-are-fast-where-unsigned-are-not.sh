#!/usr/bin/env bash
# On TPU signed 4-bit products are fast where unsigned and float ones are not
#
# By libtpu's own estimated_cycles a product of 4096 x 4096 int4 matrices takes half of bfloat16's cycles on v5e,
# and one of uint4 or float4_e2m1fn takes all of them (v5p alike, v6e 0.77). tpu7x is another matter: int8 gains nothing
# there, int4 and uint4 take half, and float4 takes all.
# The plausible guess: a sign is a matter of interpretation, uint4 runs as int4 does; int4 cannot beat int8.
# Why it matters: GPTQ, AWQ and Keras store unsigned nibbles with a zero point; moved by 8 to signed ones, products
# with 4-bit operands take half the cycles on v5e and v5p.
# Seen on 2026-11-29 with jax 0.12.0.1, libtpu 0.0.50.1, compiled for chips that need not be there, share of bfloat16:
#   v5e int4 0.50, uint4 1.00, float4 1.00, int8 0.50; tpu7x 0.50, 0.50, 1.01, 1.01
set -euo pipefail
PYTHON=${PYTHON:-python3.13}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -m venv "$folder/env"
"$folder/env/bin/pip" install -qq --no-compile --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 ml_dtypes==0.6.0 numpy==2.5.5 libtpu==0.0.50.1
export JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1
"$folder/env/bin/python" - 2>"$folder/log" <<'END' || { tail -n 1 "$folder/log" && exit 1; }
import re

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

print("jax", jax.__version__)
CHIPS = {"v5e": "v5e:2x2", "tpu7x": "tpu7x:2x2x1"}
EXPECTED = {
    "v5e": [0.50, 1.00, 1.00, 0.50],
    "tpu7x": [0.50, 0.50, 1.01, 1.01],
}


def cycles(chip, dtype):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices
    place = SingleDeviceSharding(devices[0])
    matrix = jax.ShapeDtypeStruct((4096, 4096), dtype)
    sums = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32

    def product(a, b):
        return jnp.dot(a, b, preferred_element_type=sums).astype(jnp.bfloat16)

    text = jax.jit(product, in_shardings=place, out_shardings=place).lower(matrix, matrix).compile().as_text()
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text[text.index("ENTRY"):])))


for chip, expected in EXPECTED.items():
    base = cycles(chip, jnp.bfloat16)
    dtypes = (jnp.int4, jnp.uint4, jnp.float4_e2m1fn, jnp.int8)
    seen = [cycles(chip, dtype) / base for dtype in dtypes]
    print(chip, *(f"{dtype.__name__} {share:.2f}" for dtype, share in zip(dtypes, seen)))
    if any(abs(a - b) > 0.02 for a, b in zip(seen, expected)):
        raise SystemExit(f"differs: shares on {chip} were {expected}")
END
