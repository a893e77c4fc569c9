#!/usr/bin/env bash
# Seeds that differ by a multiple of 2**32 make the same key
#
# jax.random.key(2**32 + 5) is key(5): without jax_enable_x64 the upper half of a 64-bit seed is cut off, with no
# warning, for a Python integer and np.int64, for "threefry2x32" and "rbg". Its neighbours are strict. With the same
# Python integer jnp.asarray, jax.jit(jax.random.key) and jax.random.fold_in raise OverflowError. But fold_in of an
# np.int64 or np.uint64 is cut in silence again.
# The plausible guess: a key has 64 bits, so a seed of 64 bits fits; what does not fit raises, as jnp.asarray does.
# Why it matters: seeds made as (process << 32) + step, or by a 64-bit hash, give all processes or shards the same
# dropout masks and the same order of the data.
# Seen on 2026-11-29 with jax 0.12.0.1, numpy 2.5.5 (CPU): keys of 5, 2**32 + 5 and 7 * 2**32 + 5: [0 5] each.
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

print("jax", jax.__version__, "numpy", np.__version__)
LARGE = 2**32 + 5


def data(key):
    return np.asarray(jax.random.key_data(key)).tolist()


for implementation in ("threefry2x32", "rbg"):
    seeds = (5, LARGE, 7 * 2**32 + 5, np.int64(LARGE))
    keys = [data(jax.random.key(seed, impl=implementation)) for seed in seeds]
    print(implementation, keys)
    if any(key != keys[0] for key in keys):
        raise SystemExit("differs: the four keys were the same")
key = jax.random.key(0)
folded = [data(jax.random.fold_in(key, number)) for number in (5, np.int64(LARGE), np.uint64(LARGE))]
print("fold_in", folded)
if any(data != folded[0] for data in folded):
    raise SystemExit("differs: fold_in of NumPy's integers was cut")
strict = {
    "jnp.asarray": lambda: jnp.asarray(LARGE),
    "jit(key)": lambda: jax.jit(jax.random.key)(LARGE),
    "fold_in": lambda: jax.random.fold_in(key, LARGE),
}
for name, call in strict.items():
    try:
        call()
    except OverflowError:
        print(name, "of a Python integer: OverflowError")
    else:
        raise SystemExit(f"differs: {name} raised OverflowError")
END
