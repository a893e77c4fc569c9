#!/usr/bin/env bash
# Orbax saves int4 and float4, but not uint4, which qwix's nf4 is made of
#
# qwix.quantize(array, "nf4") keeps its values as uint4, and "int4" as int4. Orbax's StandardCheckpointer saves and
# restores the latter, and float4_e2m1fn. For uint4 save returns as if all were well; the ValueError (TensorStore has
# no such type) comes out of wait_until_finished, and what is on disk is a folder with the suffix
# .orbax-checkpoint-tmp.
# The plausible guess: a library that keeps 4-bit integers keeps both kinds; what it cannot keep it refuses in save.
# Why it matters: the values of nf4, and the nibbles of GPTQ or AWQ held as uint4, must be cast to uint8 first; a run
# that saves asynchronously and does not wait before it exits ends without a checkpoint.
# Seen on 2026-11-29 with orbax-checkpoint 0.12.8, tensorstore 0.1.86, qwix 0.1.8, jax 0.12.0.1 (CPU):
#   int4: save returned, restored; float4_e2m1fn: save returned, restored; nf4 (uint4): save returned, ValueError
set -euo pipefail
PYTHON=${PYTHON:-python3.13}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -m venv "$folder/env"
"$folder/env/bin/pip" install -qq --no-compile --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 ml_dtypes==0.6.0 numpy==2.5.5 qwix==0.1.8 flax==0.12.12 orbax-checkpoint==0.12.8 tensorstore==0.1.86
export TMPDIR="$folder" JAX_PLATFORMS=cpu
"$folder/env/bin/python" - 2>"$folder/log" <<'END' || { tail -n 1 "$folder/log" && exit 1; }
import logging
import os
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import qwix

logging.disable(logging.CRITICAL)
print("jax", jax.__version__, "orbax-checkpoint", ocp.__version__)
weights = jax.random.normal(jax.random.key(0), (64, 32))
seen = []
for kind in ("int4", jnp.float4_e2m1fn, "nf4"):
    values = qwix.quantize(weights, kind, channelwise_axes=(1,)).qvalue
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "checkpoint")
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(path, {"values": values})
    try:
        checkpointer.wait_until_finished()
        same = np.array_equal(np.asarray(checkpointer.restore(path)["values"]), np.asarray(values))
        seen.append("restored" if same else "other numbers")
    except ValueError:
        seen.append("ValueError")
    print(values.dtype, "save returned,", seen[-1], os.listdir(folder))
sys.stdout.flush()
if seen != ["restored", "restored", "ValueError"]:
    raise SystemExit("differs: restored, restored, ValueError were expected")
END
