#!/usr/bin/env bash
# safetensors.flax saves float8 that neither it nor the NumPy reader can read
#
# safetensors.flax.save_file takes float8_e4m3fn, float8_e5m2 and float8_e8m0fnu. safetensors.flax.load_file,
# safetensors.numpy.load_file and safe_open with either framework raise AttributeError on the same file: they look the
# type up in NumPy, which has no such name, though ml_dtypes is there and the writer just used it. bfloat16 depends on
# the function: load_file reads it, load of the same bytes raises KeyError.
# The plausible guess: what a library's writer accepts, its reader of the same framework reads; load and load_file
# differ in where the bytes come from.
# Why it matters: a checkpoint of quantized weights and scales is written without a word and cannot be opened with
# JAX; the bytes are all right, and reading them needs the header and ml_dtypes by hand.
# Seen on 2026-11-29 with safetensors 0.8.0, jax 0.12.0.1, ml_dtypes 0.6.0, numpy 2.5.5:
#   float8: load_file AttributeError, load KeyError; bfloat16: load_file right, load KeyError
set -euo pipefail
PYTHON=${PYTHON:-python3.13}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -m venv "$folder/env"
"$folder/env/bin/pip" install -qq --no-compile --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 ml_dtypes==0.6.0 numpy==2.5.5 safetensors==0.8.0
export TMPDIR="$folder" JAX_PLATFORMS=cpu
"$folder/env/bin/python" - 2>"$folder/log" <<'END' || { tail -n 1 "$folder/log" && exit 1; }
import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.flax
import safetensors.numpy

print("safetensors", safetensors.__version__, "jax", jax.__version__, "numpy", np.__version__)
path = os.path.join(tempfile.mkdtemp(), "a.safetensors")
readers = {
    "flax.load_file": lambda: safetensors.flax.load_file(path),
    "numpy.load_file": lambda: safetensors.numpy.load_file(path),
    "flax.load": lambda: safetensors.flax.load(open(path, "rb").read()),
    "numpy.load": lambda: safetensors.numpy.load(open(path, "rb").read()),
}
expected = {
    "float32": ["right"] * 4,
    "bfloat16": ["right", "right", "KeyError", "KeyError"],
    "float8_e4m3fn": ["AttributeError", "AttributeError", "KeyError", "KeyError"],
    "float8_e5m2": ["AttributeError", "AttributeError", "KeyError", "KeyError"],
    "float8_e8m0fnu": ["AttributeError", "AttributeError", "KeyError", "KeyError"],
}
for name, results in expected.items():
    array = 2.0 ** jnp.arange(4.0)
    safetensors.flax.save_file({"a": array.astype(name)}, path)
    seen = []
    for read in readers.values():
        try:
            same = np.array_equal(np.asarray(read()["a"]).astype(np.float32), array)
            seen.append("right" if same else "wrong")
        except (AttributeError, KeyError) as error:
            seen.append(type(error).__name__)
    print(name, dict(zip(readers, seen)))
    if seen != results:
        raise SystemExit(f"differs: for {name} it was {results}")
END
