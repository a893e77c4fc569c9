"""Infers a map by following parameters through a function."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

from jax.sharding import PartitionSpec

from jaxpar.layout import LayoutMap, data_parallel
from jaxpar.tools.layouts.comparison import Compared, compare, others
from jaxpar.tools.layouts.layout_costs import FASTER
from jaxpar.tools.layouts.traced_dims import TracedDims
from jaxpar.tools.toolkit_api import (
    AnyMesh,
    Dims,
    Entry,
    Shaped,
    axes_of,
    check_mesh,
    extended,
    of_user,
    public,
    value_error,
    without_numbers,
)

Role = Literal["data", "fully sharded", "tensor", "expert", "pipeline"]
ROLES = ("data", "fully sharded", "tensor", "expert", "pipeline")
RESIDUAL = "residual"  # the path of activations between layers
CONSTRAINED = f"x = layout.constrain(x, {RESIDUAL!r})"
NAMES = {
    "data": r"dp|data|batch|replica.*",
    "fully sharded": r"fsdp.*|zero.*|f[xyz]",
    "tensor": r"tp|tensor|model|mp",
    "expert": r"ep|experts?",
    "pipeline": r"pp|pipe.*|stages?",
}


@public
def infer_layout(
    function: Any,
    params: Any,
    batch: Any,
    mesh: AnyMesh,
    *,
    roles: Mapping[str, Role] | None = None,
    target: Any = None,
    show: Callable[[str], object] | None = None,
) -> LayoutMap:
    r"""Infers a layout map from the matmuls of a function.

    Dimensions that the jaxpr of `function(params, batch)` forces to be sharded alike form a class.

    - Tensor axes shard the classes whose sums move the fewest bytes per FLOP, at most one dimension
      of each array: hidden features and heads before the width that layers share, as in
      Megatron-LM. A split, slice, concatenation or sort along a dimension adds the bytes that its
      parts move. Dimensions whose parts are used unsharded are not sharded.
    - Fully sharded axes take the largest other dimension of each matrix, and rows of lookup tables.
    - Pipeline axes take the first dimension of weights that a scan over layers takes apart. With
      virtual stages, write `Interleaved` in its place.

    Args:
      function: a loss or a forward pass on global arrays, without `jax.shard_map`.
      params: a pytree of arrays or shapes.
      batch: likewise for data. Data axes shard its first dimension.
      roles: the role of mesh axes: `"data"`, `"fully sharded"`, `"tensor"`, `"expert"` or
        `"pipeline"`. Other axes have roles by name (`dp`, `data`; `fsdp`; `tp`, `model`; `ep`;
        `pp`).
      target: described devices, as for `Layout.explain`. The loss and its gradient are compiled
        with the inferred map and with plain ones. The fastest map that fits the memory is returned;
        the inferred map is kept unless another is faster by more than 1%. None: no comparison. Not
        for pipelines, of which the function knows nothing.
      show: called with each line of the reasons, such as `print`. A line that begins with `unsure`
        names an operation that was not followed or moves data, and its weights.

    Returns:
      A map to edit. Layers share rules such as `layer_\d+/up`. If weights and data share an axis,
      the compiler may shard activations like the weights or the data. `results` then has a rule
      `"residual"`: use `x = layout.constrain(x, "residual")` in loop bodies, and before layers
      where activations move.

    Raises:
      ValueError: an axis of several devices without a role; a role of an unknown axis; a pipeline
        without a scan over layers, or whose devices do not divide them.

    Cost: one trace of the function, and with a target at most four compilations.

    Example:
      >>> def loss(params, x):
      ...     return jnp.sum(jnp.tanh(x @ params["a"]) @ params["b"])
      >>> params = {"a": jnp.ones((4, 32)), "b": jnp.ones((32, 4))}
      >>> rules = infer_layout(loss, params, jnp.ones((8, 4)), make_mesh("tp=8"))
      >>> rules.match("a") == P(None, "tp"), rules.match("b") == P("tp")
      (True, True)
    """
    check_mesh(mesh)
    by_role = _roles(mesh, roles)
    if target is not None and any(mesh.shape[name] > 1 for name in by_role["pipeline"]):
        raise value_error(
            f"target={target!r} would time programs without a pipeline, as the compiler makes "
            f"none of {by_role['pipeline']}; leave it out, and give the pipelined step to "
            "Layout.explain"
        )
    seen = TracedDims(of_user(function, "function"), params, batch)
    rules: LayoutMap | None = None
    reasons: dict[str, list[str]] = defaultdict(list)  # by path
    for role in ("pipeline", "expert", "tensor"):
        for name in by_role[role]:
            size = mesh.shape[name]
            of_layers = role == "pipeline"
            chosen = seen.stacks(name, size) if of_layers else seen.choose(size, role, rules)

            def dims(
                array: Shaped,
                taken: Sequence[Entry],
                name: str = name,
                chosen: dict[int, str] = chosen,
            ) -> Dims:
                for dim, key in enumerate(seen.classes[array.path]):
                    if key in chosen and not axes_of(taken[dim]):
                        reasons[array.path].append(f"{name}: {chosen[key]}")
                        return {dim: (name,)}
                return {}

            rules = extended(params, mesh, rules, dims, batch=(name,) if role == "expert" else ())
    before = rules
    for name in by_role["fully sharded"]:

        def largest(array: Shaped, taken: Sequence[Entry], name: str = name) -> Dims:
            sharded = seen.largest(array, taken, name, mesh)
            if sharded:
                reasons[array.path].append(f"{name}: the largest dimension that is left")
            return sharded

        rules = extended(params, mesh, rules, largest, batch=(name,))
    if by_role["data"]:
        rules = data_parallel(params, mesh, axis=by_role["data"], within=rules)
    if rules is None:
        raise value_error("the mesh has no axes; make one with axes to shard over")
    tell = show or (lambda line: None)
    for line in _told(rules, reasons, seen):
        tell(line)
    gathered = by_role["fully sharded"] + by_role["data"]
    whole = data_parallel(params, mesh, axis=gathered, within=before) if gathered else None
    compared: list[Compared] = []
    plain = others(params, mesh, whole if by_role["fully sharded"] and before else None)
    for trial in compare(function, params, batch, mesh, {"this map": rules, **dict(plain)}, target):
        tell(str(trial))
        compared.append(trial)
    best = _best(compared, target, tell)
    several = {name for name, size in mesh.shape.items() if size > 1} - set(by_role["expert"])
    return _constrained(best, seen, several, tell)


def _constrained(
    rules: LayoutMap, seen: TracedDims, names: set[Any], tell: Callable[[str], object]
) -> LayoutMap:
    # Weights and batch that share an axis need a rule for activations.
    over = names & set(rules.batch.mesh_axes if rules.batch else ())
    if rules.batch is None or not over & set(chain(*(rules.rule(key).mesh_axes for key in rules))):
        return rules
    spec = PartitionSpec(*[None] * seen.rows_carried(), rules.batch.mesh_axes)
    tell(
        "unsure: the compiler may shard activations as it does weights; begin each layer, and the "
        f"body of each loop, by {CONSTRAINED}, which is {spec}"
    )
    return rules | LayoutMap(results={RESIDUAL: spec})


def _best(compared: Sequence[Compared], target: Any, tell: Callable[[str], object]) -> LayoutMap:
    first, best = compared[0], compared[0]
    for trial in compared[1:]:
        if (
            trial.seconds is not None
            and trial.fits
            and (best.seconds is None or not best.fits or trial.seconds < FASTER * best.seconds)
        ):
            best = trial
    if best is not first:
        tell(f"taken: {best.name}, the fastest that fits the memory of {target}")
    return best.rules


def _told(rules: LayoutMap, reasons: Mapping[str, list[str]], seen: TracedDims) -> list[str]:
    lines: list[str] = []
    for key in rules:
        path = next(path for path in seen.classes if rules.pattern(key).fullmatch(path))
        otherwise = "as its values" if rules.rule(key).mesh_axes else "replicated"
        why = "; ".join(reasons.get(path, [])) or otherwise
        lines.append(f"{key}: {rules[key]}  # {why}")
    weights = {token for keys in seen.classes.values() for token in keys}
    for what, tokens in seen.flow.unsure.items():
        touched = {seen.flow.of(t) for t in tokens} & weights
        paths = sorted(
            {without_numbers(p) for p, keys in seen.classes.items() if touched & set(keys)}
        )
        if paths:
            lines.append(f"unsure: {what}: dimensions of {', '.join(paths[:6])}")
    return lines


def _roles(mesh: AnyMesh, roles: Mapping[str, str] | None) -> dict[str, tuple[str, ...]]:
    for name in roles or {}:
        if name not in mesh.axis_names:
            raise value_error(
                f"roles has {name!r}, and the mesh {dict(mesh.shape)}; name axes of the mesh"
            )
    by_role: dict[str, tuple[str, ...]] = dict.fromkeys(ROLES, ())
    for name in map(str, mesh.axis_names):
        role = (roles or {}).get(name) or next(
            (role for role, pattern in NAMES.items() if re.fullmatch(pattern, name)), None
        )
        if role is None and mesh.shape[name] == 1:
            continue  # shards nothing
        if role not in ROLES:
            raise value_error(
                f"mesh axis {name!r} has no role that its name tells; say it, "
                f"roles={{{name!r}: ...}}: one of {', '.join(map(repr, ROLES))}"
            )
        by_role[role] += (name,)
    return by_role
