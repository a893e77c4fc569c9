"""The page on dropout: its programs run as pasted, and masks are as it says."""

import re
from pathlib import Path

from programs import printed

PAGE = Path(__file__).parents[1] / "docs" / "dropout.md"
CHECKS = """
import numpy as np

def folded(key, axes):  # the mask of a device, by its own key
    return dropout(jnp.ones(64), key, axes, rate=0.5)[None, None]

def added(key):
    own = jax.random.fold_in(key, jax.lax.axis_index("dp") + jax.lax.axis_index("tp"))
    return 1.0 * jax.random.bernoulli(own, 0.5, (64,))[None, None]

def masks(key):
    return folded(key, "dp"), folded(key, ("dp", "tp")), added(key)

all_masks = jax.shard_map(masks, mesh=mesh, in_specs=P(), out_specs=P("dp", "tp"), check_vma=False)
same, apart, repeating = map(np.asarray, jax.jit(all_masks)(key))  # [dp, tp, 64]
assert np.all(same == same[:, :1]) and np.any(same[0] != same[1])
assert [len(np.unique(m.reshape(8, -1), axis=0)) for m in (apart, repeating)] == [8, 5]

try:
    jax.eval_shape(jax.shard_map(lambda *a: mlp(*a, axes_out=("dp", "tp")), **how), key, *args)
except ValueError as error:
    assert "out_specs" in str(error)
else:
    raise AssertionError("copies differ")

whole = jax.tree.map(np.asarray, jax.jit(init)(key))
np.testing.assert_allclose(weights["w"], whole["w"], rtol=1e-6)

def total(w):
    return jnp.sum(scan(key, {**weights, "w": w}, jnp.ones((16, 8))))

# Linear in each layer's weights: with another mask in the backward pass this would not hold.
value, gradient = map(np.asarray, jax.jit(jax.value_and_grad(total))(weights["w"]))
np.testing.assert_allclose(np.sum(gradient * whole["w"], (1, 2)), 3 * [value], rtol=1e-4)
"""


def test_programs_run_as_pasted_and_masks_are_as_said():
    program = "".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    assert printed(program + CHECKS).split("\n") == ["(4, 3, 8)", "(16, 8)", ""]
