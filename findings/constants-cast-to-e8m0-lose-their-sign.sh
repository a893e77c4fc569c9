#!/usr/bin/env bash
# XLA casts a constant to e8m0 by another rule than a variable
#
# float8_e8m0fnu has neither sign nor zero. Where the number is known only at run time, the cast of -0.3 and of 0 is
# NaN, in jit and outside of it, as in NumPy with ml_dtypes. Where the compiler knows the number, it evaluates the cast
# itself: -0.3 becomes 0.25, its sign lost, and 0 becomes 2**-127, a positive scale.
# The plausible guess: constant folding gives what the program would have given.
# Why it matters: a test with numbers written into the jitted function shows that scales of zeros and of negative
# numbers are fine, and the same function of an argument gives NaN.
# Seen on 2026-11-29 with jax 0.12.0.1, ml_dtypes 0.6.0 (CPU): number: outside of jit, argument, constant
#   -0.3: nan, nan, 0.25; 0: nan, nan, 5.877472e-39; 1.5: 2, 2, 2
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

print("jax", jax.__version__, "ml_dtypes", ml_dtypes.__version__)


def cast(x):
    return x.astype(jnp.float8_e8m0fnu)


for number, expected in ((-0.3, [np.nan, np.nan, 0.25]), (0.0, [np.nan, np.nan, 2.0**-127]), (1.5, [2, 2, 2])):
    numbers = jnp.full(4, number)
    results = cast(numbers), jax.jit(cast)(numbers), jax.jit(lambda n=number: cast(jnp.full(4, n)))()
    seen = [float(np.asarray(result).astype(np.float32)[0]) for result in results]
    print(f"{number}: outside of jit, argument, constant:", *(f"{value:.7g}" for value in seen))
    if not np.array_equal(seen, np.float32(expected).astype(float), equal_nan=True):
        raise SystemExit(f"differs: {number} was cast to {expected}")
END
