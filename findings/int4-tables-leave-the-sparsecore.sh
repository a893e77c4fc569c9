#!/usr/bin/env bash
# Which lookups go to a SparseCore depends on dtype, width and size, and for bfloat16 on the chip
#
# libtpu gives table[ids] to a SparseCore without being asked, and keeps it on the TensorCore for reasons that the
# program does not show. 2048 ids in 65536 rows of 1024 numbers: float32, bfloat16 and int8 go, int4 does not. Rows of
# 128 numbers: float32 goes, bfloat16 goes on v5p and not on v6e. 4096 rows of 1024 numbers: float32 goes, bfloat16
# does not. With 128 ids instead of 2048 not even float32 goes.
# The plausible guess: what counts is the size of the table, or the number of ids; smaller types follow the larger.
# Why it matters: a SparseCore's lookup runs beside the matmuls; quantizing an embedding to int4, sharding its rows,
# or a smaller batch moves it back into the TensorCore's own queue, so that a step may get longer with fewer bytes.
# Seen on 2026-11-29 with jax 0.12.0.1, libtpu 0.0.50.1, compiled for v5p and v6e that need not be there (S, T:
# SparseCore, TensorCore): 65536 x 1024, 2048 ids, float32, bfloat16, int8, int4: SSST, SSST;
#   65536 x 128, float32, bfloat16: SS, ST; 4096 x 1024: ST, ST; 65536 x 1024, 128 ids, float32: T, T
set -euo pipefail
PYTHON=${PYTHON:-python3.13}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -m venv "$folder/env"
"$folder/env/bin/pip" install -qq --no-compile --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 ml_dtypes==0.6.0 numpy==2.5.5 libtpu==0.0.50.1
export JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1
"$folder/env/bin/python" - 2>"$folder/log" <<'END' || { tail -n 1 "$folder/log" && exit 1; }
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

print("jax", jax.__version__)
PLACES = {
    name: SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0])
    for name in ("v5p:2x2x1", "v6e:2x2")
}
DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.int4)
CASES = {  # rows, width, ids: the core of each dtype's lookup, on each chip
    (65536, 1024, 2048): ["SSST", "SSST"],
    (65536, 128, 2048): ["SS", "ST"],
    (4096, 1024, 2048): ["ST", "ST"],
    (65536, 1024, 128): ["T", "T"],
}


def core(place, rows, width, ids, dtype):
    table = jax.ShapeDtypeStruct((rows, width), dtype)
    jitted = jax.jit(lambda t, i: jnp.take(t, i, axis=0, mode="clip"), in_shardings=place, out_shardings=place)
    text = jitted.lower(table, jax.ShapeDtypeStruct((ids,), jnp.int32)).compile().as_text()
    return "S" if 'async_execution_thread="sparsecore"' in text else "T"


for (rows, width, ids), expected in CASES.items():
    dtypes = DTYPES[: len(expected[0])]
    seen = ["".join(core(place, rows, width, ids, dtype) for dtype in dtypes) for place in PLACES.values()]
    names = ", ".join(dtype.__name__ for dtype in dtypes)
    print(f"{rows} x {width}, {ids} ids, {names}:", *(f"{chip} {cores}" for chip, cores in zip(PLACES, seen)))
    if seen != expected:
        raise SystemExit(f"differs: for {(rows, width, ids)} it was {expected}")
END
