#!/usr/bin/env bash
# jax.nn.scaled_dot_general of a row of zeros is NaN outside of jit, and 0 inside
#
# jax.nn.scaled_dot_general with the "mxfp8" configuration quantizes blocks of 32 numbers by a power of two. A block of
# zeros has the scale 0, which e8m0 does not have: it becomes NaN. Called as it stands, one block of zeros makes the
# row's results NaN, although the row's other block is fine. The same call inside of jax.jit is right.
# The "nvfp4" configuration is right in both.
# The plausible guess: a block of zeros gets some scale and stays zero; jit changes no more than roundings.
# Why it matters: padded rows, masked tokens, one-hot inputs and unused experts are blocks of zeros; a check outside
# of jit shows NaN that training does not have, or training hides what an evaluation without jit meets.
# Seen on 2026-11-29 with jax 0.12.0.1 (CPU): finite of 4 rows, the second with a block of zeros:
#   mxfp8 3 outside, 4 inside of jit; nvfp4 4 and 4
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
import numpy as np

print("jax", jax.__version__)
key = jax.random.key(0)
lhs = jax.random.normal(key, (1, 4, 64)).at[0, 1, :32].set(0)
rhs = jax.random.normal(jax.random.fold_in(key, 1), (1, 32, 64))
dimensions = (((2,), (2,)), ((0,), (0,)))
seen = {}
for mode, options in (("mxfp8", {}), ("nvfp4", {"global_scale": jnp.float32(1)})):
    config = jax.nn.get_scaled_dot_general_config(mode, **options)

    def product(lhs, rhs, config=config):
        return jax.nn.scaled_dot_general(lhs, rhs, dimensions, configs=[config] * 3)

    for name, function in (("outside", product), ("inside", jax.jit(product))):
        result = np.asarray(function(lhs, rhs))[0]
        finite = np.isfinite(result).all(1)
        error = np.abs(result - np.asarray(lhs[0]) @ np.asarray(rhs[0]).T)[finite].max()
        seen[mode, name] = int(finite.sum())
        print(mode, name, "of jit: rows that are finite:", *finite, f"error of those {error:.2f}")
expected = {("mxfp8", "outside"): 3, ("mxfp8", "inside"): 4, ("nvfp4", "outside"): 4, ("nvfp4", "inside"): 4}
if seen != expected:
    raise SystemExit(f"differs: finite rows were {expected}")
END
