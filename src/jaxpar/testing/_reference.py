"""`assert_matches_reference`: a function of local blocks against NumPy, values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxpar.arguments.calls import readable
from jaxpar.choose.jit import jit
from jaxpar.testing._compare import Report, coarser
from jaxpar.testing._oracle import (
    Expected,
    Leaf,
    Leaves,
    directions,
    expected_projections,
    expected_values,
    is_float,
)


@dataclass(frozen=True)
class ExpectedGradient:
    """The reference's gradient of an argument.

    Attributes:
      at: its position among all leaves.
      along: the directions of projection; None if entries are compared.
    """

    at: int
    along: Sequence[Leaf] | None
    expected: Expected

    def place(self, index: tuple[int, ...]) -> str:
        if self.along is None:
            return f"entry {index}"
        entries = np.argwhere(self.along[index[0]])
        places = ", ".join(str(tuple(int(i) for i in entry)) for entry in entries[:3])
        return f"direction {index[0]}, over {len(entries)} random entries such as {places}"

    def project(self, gradient: Leaf) -> Leaf:
        if self.along is None:
            return gradient
        wide = np.asarray(gradient, np.float64)
        # Only entries that a direction moves: a NaN elsewhere is not its error.
        return np.array([np.sum(wide[v != 0] * v[v != 0]) for v in self.along])


def pullback(function: Callable[..., Any], args: Any) -> Callable[[Leaves, Leaves], Any]:
    """Returns `(leaves, cotangents) -> (outputs, gradients)`, of floats only."""
    treedef = jax.tree.structure(args)

    def run(leaves: Leaves, cotangents: Leaves) -> tuple[Any, Leaves]:
        floats = [i for i, leaf in enumerate(leaves) if is_inexact(leaf)]

        def of_floats(moving: Leaves) -> tuple[Leaves, Any]:
            merged = list(leaves)
            for i, leaf in zip(floats, moving, strict=True):
                merged[i] = leaf
            out = function(*treedef.unflatten(merged))
            return [leaf for leaf in jax.tree.leaves(out) if is_inexact(leaf)], out

        _, pull, out = jax.vjp(of_floats, [leaves[i] for i in floats], has_aux=True)
        return out, pull(cotangents)[0]

    return run


def expected_gradients(
    reference: Callable[[Leaves], Leaves],
    leaves: Leaves,
    cotangents: Leaves,
    max_directions: int,
    rng: np.random.Generator,
) -> list[ExpectedGradient]:
    """Returns float leaves' gradients, by central differences."""
    gradients: list[ExpectedGradient] = []
    for at, leaf in enumerate(leaves):
        if not is_float(leaf):
            continue
        along = directions(leaf, max_directions, rng)
        expected = expected_projections(reference, leaves, cotangents, at, along, rng)
        if len(along) < leaf.size:
            gradients.append(ExpectedGradient(at, along, expected))
        else:
            gradients.append(ExpectedGradient(at, None, expected.reshape(leaf.shape)))
    return gradients


def gradients_of(
    vjp: Callable[[Leaves, Leaves], Leaves],
    leaves: Leaves,
    cotangents: Leaves,
    rng: np.random.Generator,
) -> list[ExpectedGradient]:
    count = len(leaves)
    wanted = expected_values(
        lambda both: vjp(both[:count], both[count:]), [*leaves, *cotangents], rng
    )
    return [
        ExpectedGradient(at, None, expected)
        for at, (leaf, expected) in enumerate(zip(leaves, wanted, strict=True))
        if is_float(leaf)
    ]


def is_inexact(leaf: Any) -> bool:
    """Returns whether it is a float, bfloat16 included."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


@readable
def assert_matches_reference(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    *args: Any,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    grad: bool = True,
    check_vma: bool | Sequence[bool] = (True, False),
    reduction_depth: int | None = None,
    rounding_dtype: Any = None,
    reference_vjp: Callable[..., Any] | None = None,
    max_directions: int = 32,
    seed: int = 0,
) -> None:
    """Checks that `fn` of local blocks equals a NumPy `reference` of global arrays.

    `fn` is jitted under `jax.shard_map`. Integers must be equal. Floats may differ by
    `tolerance(dtype, reduction_depth)` times the size of their terms. That size is measured: the
    root mean square of the entry's derivatives along random relative changes of all arguments.

    Gradients are those of `jax.vjp` outside `shard_map`, for a random cotangent of all float
    outputs. They are compared with central differences of `reference`: entry by entry for arguments
    of at most `max_directions` entries, along that many random directions for larger ones.

    Args:
      fn: as for `jax.shard_map`.
      reference: the same in NumPy. It gets read-only float64 copies of float arguments, and
        integers as they are. It must compute in float64 and return the pytree of `fn`.
      *args: pytrees of global arrays, NumPy's or JAX's. Floats may be NaN where `reference` does
        not read them.
      mesh: explicit axes are taken as Auto.
      in_specs: as for `jax.shard_map`.
      out_specs: as for `jax.shard_map`.
      grad: whether to compare gradients.
      check_vma: one or several settings.
      reduction_depth: how many terms an entry sums, on all devices. None: the largest array's size,
        an upper bound for a matmul.
      rounding_dtype: dtype of intermediate results. None: the coarsest float dtype of arguments and
        outputs. Pass float32 if 16-bit arguments must not lower the precision of float32 results.
      reference_vjp: `(args, cotangent) -> gradients`, in NumPy: a tuple like `args`, compared entry
        by entry instead of central differences. Integer outputs have cotangent 0, and gradients of
        integers are ignored.
      max_directions: the most per argument. Each costs twenty evaluations of `reference`.
      seed: for all random numbers.

    Raises:
      AssertionError: structures or arrays differ; each array is listed with its worst entry.
      TypeError: arguments or outputs are complex.
      ValueError: `reference` returns NaN, is discontinuous, or does not compute in float64.

    Example:
      >>> mesh = make_mesh("x=8")
      >>> assert_matches_reference(
      ...     lambda x, w: jax.lax.psum(x @ w, "x"),
      ...     lambda x, w: x @ w,
      ...     np.arange(32, dtype="f").reshape(4, 8), np.arange(16, dtype="f").reshape(8, 2),
      ...     mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P(),
      ... )
    """
    settings = (check_vma,) if isinstance(check_vma, bool) else tuple(check_vma)
    if not settings:
        raise ValueError("assert_matches_reference: check_vma=() runs nothing; give True or False")
    rng = np.random.default_rng(seed)
    paths, in_tree = jax.tree_util.tree_flatten_with_path(args)
    leaves = [np.asarray(jnp.asarray(leaf)) for _, leaf in paths]
    inputs = in_tree.unflatten(leaves)
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    mapped = {
        vma: jax.shard_map(fn, mesh=auto, in_specs=in_specs, out_specs=out_specs, check_vma=vma)
        for vma in settings
    }
    values = {vma: _run(vma, mesh, function, *inputs) for vma, function in mapped.items()}
    out_paths, out_tree = jax.tree_util.tree_flatten_with_path(values[settings[0]])
    outputs = [np.asarray(out) for _, out in out_paths]
    _refuse_complex("args", paths)
    _refuse_complex("output", out_paths)

    exact = [_float64(leaf) for leaf in leaves]
    flat_reference = _flat(reference, in_tree, out_tree)
    wanted = expected_values(flat_reference, exact, rng)
    for (path, _), expected in zip(out_paths, wanted, strict=True):
        if np.any(np.isnan(expected.value)):
            name = f"output{jax.tree_util.keystr(path)}"
            raise ValueError(
                f"assert_matches_reference: the reference returns NaN in {name}; compare with "
                "inputs for which it returns numbers"
            )
    arrays = [*leaves, *outputs]
    floats = [leaf.dtype for leaf in arrays if is_inexact(leaf)]
    report = Report(
        rounding=reduce(coarser, floats, np.float64) if rounding_dtype is None else rounding_dtype,
        depth=max([1, *(a.size for a in arrays)]) if reduction_depth is None else reduction_depth,
    )

    def compare_values(what: str, returned: Any) -> None:
        for (path, _), leaf, expected in zip(
            out_paths, jax.tree.leaves(returned), wanted, strict=True
        ):
            report.compare(f"{what} of output{jax.tree_util.keystr(path)}", leaf, expected)

    for vma, returned in values.items():
        compare_values(f"check_vma={vma}: value", returned)

    cotangents = [_normal(out, rng) for out in outputs]
    floating = [ct for ct in cotangents if is_inexact(ct)]
    if grad and floating and any(is_float(leaf) for leaf in exact) and not report.shapes_differ:
        wide = [_float64(ct) for ct in cotangents]
        expect = (
            expected_gradients(flat_reference, exact, wide, max_directions, rng)
            if reference_vjp is None
            else gradients_of(_flat_vjp(reference_vjp, in_tree, out_tree), exact, wide, rng)
        )
        for vma, function in mapped.items():
            returned, pulled = _run(vma, mesh, pullback(function, inputs), leaves, floating)
            compare_values(f"check_vma={vma}: value under jax.vjp", returned)
            for gradient, truth in zip(pulled, expect, strict=True):
                name = f"args{jax.tree_util.keystr(paths[truth.at][0])}"
                what = f"check_vma={vma}: gradient of {name}"
                report.compare(what, gradient, truth.expected, truth.project, truth.place)
    if report.wrong:
        raise AssertionError(
            f"assert_matches_reference: {len(report.wrong)} of {report.compared} comparisons fail\n"
            + "".join(f"  {line}\n" for line in report.wrong)
            + f"  mesh {dict(mesh.shape)} of devices {[d.id for d in mesh.devices.flat]}, "
            f"in_specs={in_specs}, out_specs={out_specs}"
        )


def _run(vma: bool, mesh: Mesh, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return jit(function, mesh=mesh)(*args)
    except Exception as error:
        error.add_note(f"assert_matches_reference: this happened under check_vma={vma}")
        raise


def _refuse_complex(what: str, paths: Any) -> None:
    for path, leaf in paths:
        leaf = np.asarray(leaf)
        if np.iscomplexobj(leaf):
            raise TypeError(
                f"assert_matches_reference: {what}{jax.tree_util.keystr(path)} is "
                f"{leaf.dtype}{list(leaf.shape)}; compare real and imaginary parts, as two floats"
            )


def _float64(leaf: Leaf) -> Leaf:
    wide = leaf.astype(np.float64) if is_inexact(leaf) else leaf.copy()
    # A reference that works in place would change what later evaluations see.
    wide.setflags(write=False)
    return wide


def _normal(out: Leaf, rng: np.random.Generator) -> Leaf:
    if not is_inexact(out):
        return np.zeros(out.shape, np.int32)
    return np.asarray(rng.standard_normal(out.shape)).astype(out.dtype)


def _flat(reference: Callable[..., Any], in_tree: Any, out_tree: Any) -> Callable[[Leaves], Leaves]:
    def flat_reference(leaves: Leaves) -> Leaves:
        out = reference(*in_tree.unflatten(leaves))
        if jax.tree.structure(out) != out_tree:
            raise AssertionError(
                f"assert_matches_reference: fn returns {out_tree}, and the reference "
                f"{jax.tree.structure(out)}"
            )
        return [np.asarray(leaf) for leaf in jax.tree.leaves(out)]

    return flat_reference


def _flat_vjp(
    reference_vjp: Callable[..., Any], in_tree: Any, out_tree: Any
) -> Callable[[Leaves, Leaves], Leaves]:
    def flat_vjp(leaves: Leaves, cotangents: Leaves) -> Leaves:
        gradients = reference_vjp(in_tree.unflatten(leaves), out_tree.unflatten(cotangents))
        if jax.tree.structure(gradients) != in_tree:
            raise AssertionError(
                f"assert_matches_reference: args are {in_tree}, and reference_vjp returns "
                f"{jax.tree.structure(gradients)}"
            )
        return [np.asarray(leaf) for leaf in jax.tree.leaves(gradients)]

    return flat_vjp
