#!/usr/bin/env bash
# An int8 cache is copied twice to write one row
#
# A cache of keys [8, 8192, 1024] is donated, and one position of each sequence is written at a traced index by
# jax.lax.dynamic_update_slice. In bfloat16 libtpu writes the rows in place. In int8 and in int4 it copies the whole
# cache from its layout of 32 (int4: 64) rows a tile, T(32,128)(4,1), to one of 8 rows, T(8,128)(4,1), writes the rows,
# and copies all of it back: two passes over the cache for each token, donated or not. Reading 64 rows at a traced
# index by a dynamic slice copies all of it once. On tpu7x SparseCores make the int8 copies, each in two calls
# (sparse-core-data-format-call).
# The plausible guess: half the bytes of bfloat16, so at most half the time; an update in place stays one.
# Why it matters: quantizing a cache, or the array that a ring writes its blocks into, may make each step dearer than
# bfloat16 by the size of the whole array.
# Seen on 2026-11-29 with jax 0.12.0.1 and libtpu 0.0.50.1, compiled for chips that need not be there. Copies of the
# whole array: bfloat16 update 0, int8 update 2, int4 update 2, int8 slice 1 on v5e, v5p and v6e; on tpu7x 0, 4 calls,
# 2, 2 calls.
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
from jax import lax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

print("jax", jax.__version__)
CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
INDEX = jax.ShapeDtypeStruct((), jnp.int32)


def copies(chip, function, dtype, *others, **options):
    """Counts copies of the whole array in what libtpu compiles for the chip."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices
    place = SingleDeviceSharding(devices[0])
    whole = jax.ShapeDtypeStruct((8, 8192, 1024), dtype)
    jitted = jax.jit(function, in_shardings=place, out_shardings=place, **options)
    text = jitted.lower(whole, *others).compile().as_text()
    on_sparse_cores = len(re.findall(r"%sparse-core-data-format-call\S* = .*? call-start\(", text))
    return on_sparse_cores + len(re.findall(r"\w+\[8,8192,1024\]\S* copy\(", text))


def write(cache, row, i):
    return lax.dynamic_update_slice_in_dim(cache, row, i, 1)


def read(cache, i):
    return lax.dynamic_slice_in_dim(cache, i, 64, 1)


for chip in CHIPS:
    seen = []
    for dtype in (jnp.bfloat16, jnp.int8, jnp.int4):
        row = jax.ShapeDtypeStruct((8, 1, 1024), dtype)
        seen.append(copies(chip, write, dtype, row, INDEX, donate_argnums=0))
    seen.append(copies(chip, read, jnp.int8, INDEX))
    print(chip, "updates in bfloat16, int8, int4:", *seen[:3], "; int8 slice:", seen[3])
    expected = [0, 4, 2, 2] if chip == "tpu7x" else [0, 2, 2, 1]
    if seen != expected:
        raise SystemExit(f"differs: copies on {chip} were {expected}, and are {seen}")
END
