#!/usr/bin/env bash
# equinox saves float8 and int4 leaves that it cannot load, and loads sharded ones to one device
#
# eqx.tree_serialise_leaves writes jax.Arrays of float8, float4 and int4 without complaint. eqx.tree_deserialise_leaves
# with the very same tree raises a RuntimeError about a changed type: the file says "raw bytes" where NumPy's format
# has no name for the dtype, and only bfloat16 is put right. And the tree that says what is to be loaded gives shape
# and dtype, not the place: sharded over eight devices, its leaves come back on device 0, whole.
# The plausible guess: what was written with a tree can be read with that tree; a template with shardings is obeyed,
# as Orbax does.
# Why it matters: a checkpoint of quantized weights looks fine until the restart, and a model that fits only when
# sharded does not fit when it is loaded with its own sharded template.
# Seen on 2026-11-29 with equinox 0.13.8, jax 0.12.0.1 (CPU, eight devices):
#   float32, bfloat16: loaded, SingleDeviceSharding; float8_e4m3fn, float8_e8m0fnu, float4_e2m1fn, int4: RuntimeError
set -euo pipefail
PYTHON=${PYTHON:-python3.13}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -m venv "$folder/env"
"$folder/env/bin/pip" install -qq --no-compile --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 ml_dtypes==0.6.0 numpy==2.5.5 equinox==0.13.8
export TMPDIR="$folder" JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8
"$folder/env/bin/python" - 2>"$folder/log" <<'END' || { tail -n 1 "$folder/log" && exit 1; }
import os
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

print("jax", jax.__version__, "equinox", eqx.__version__)
mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
path = os.path.join(tempfile.mkdtemp(), "tree.eqx")
for name in ("float32", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn", "int4"):
    values = (2.0 ** (jnp.arange(16) % 3)).astype(name)
    tree = {"w": jax.device_put(values, NamedSharding(mesh, P("x")))}
    eqx.tree_serialise_leaves(path, tree)
    try:
        loaded = eqx.tree_deserialise_leaves(path, tree)["w"]
        same = np.array_equal(np.asarray(loaded), np.asarray(values))
        seen = f"loaded, {'same' if same else 'other'} numbers, on {len(loaded.sharding.device_set)} device"
    except RuntimeError:
        seen = "RuntimeError"
    print(name, seen)
    expected = "loaded, same numbers, on 1 device" if name in ("float32", "bfloat16") else "RuntimeError"
    if seen != expected:
        raise SystemExit(f"differs: {name} was: {expected}")
END
