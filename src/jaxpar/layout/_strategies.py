"""Maps made from the parameters themselves: data, fully sharded, tensor and expert parallel."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar._calls import called, public, value_error
from jaxpar._checks import check_whole
from jaxpar._types import AnyMesh, AxisLike, Integer
from jaxpar.layout._fit import Shaped
from jaxpar.layout._map import LayoutMap
from jaxpar.layout._mesh import axes_in, check_mesh, size_of
from jaxpar.layout._paths import arrays_of
from jaxpar.layout._problem import LayoutError, Problem
from jaxpar.layout._rule import Axes, Entry, axes_of, shown
from jaxpar.layout._split import Padded

# Names of weights in published models, by what tensor parallelism does with them.
COLUMNS = (
    r"query|key|value|[qkv]|w[qkv]|[qkv]_proj|qkv|qkv_proj|c_attn|in_proj|gate|up|gate_proj|up_proj"
    r"|w1|w3|wi|wi_[01]|fc1|c_fc|dense_h_to_4h|linear1|logits|lm_head|unembed(ding)?"
)
ROWS = r"out|output|o|wo|o_proj|out_proj|c_proj|down|down_proj|w2|fc2|dense_4h_to_h|linear2"
VOCABULARY = r"embedding|embed|embeddings|embed_tokens|token_embed(ding)?s?|tok_embeddings|wte"
WHOLE = r".*norm.*|ln.*|.*layernorm.*|.*position.*|wpe|router|scale"

Dims = dict[int, Axes]  # the axes that a strategy adds to a dimension


@public
def data_parallel(
    params: Any, mesh: AnyMesh, *, axis: AxisLike = "dp", within: LayoutMap | None = None
) -> LayoutMap:
    """Returns a map by which data lie over `axis`, and all devices along it hold the same arrays.

    Args:
      params: arrays or their shapes, any pytree.
      mesh: has the axis.
      axis: of the batch's first dimension: one, or several.
      within: a map of another strategy for the same parameters, to which this one is added.

    Returns:
      A `LayoutMap`, to be used as it is or edited. Layers that differ in an index share a rule.

    Raises:
      ValueError: an axis that the mesh lacks.
      LayoutError: parameters that `within` does not say all of.

    Cost: sums of gradients, 2 (n-1)/n of the parameters' bytes a step.

    Example:
      >>> rules = data_parallel({"w": jnp.ones((4, 8))}, make_mesh("dp=8"))
      >>> rules.match("w") == P(), rules.batch.layout == P("dp")
      (True, True)
    """
    check_mesh(mesh)
    names = axes_in(mesh, axis)
    return extended(params, mesh, within, lambda array, free: {}, batch=names)


@public
def fully_sharded(
    params: Any,
    mesh: AnyMesh,
    *,
    axis: AxisLike = "fsdp",
    within: LayoutMap | None = None,
    stacked: str = "",
    min_size: Integer = 0,
) -> LayoutMap:
    """Returns a map that shards the largest dimension of each array which `axis` divides.

    Of tables of a vocabulary, which their names tell, it is that of the words or none: what is
    looked up would be sharded as the table's features are, and not as the batch.

    Args:
      params: arrays or their shapes, any pytree.
      mesh: has the axis.
      axis: over which arrays are sharded, and the batch too.
      within: a map of another strategy, whose dimensions are left to it where another one divides.
      stacked: a pattern of the paths whose first dimension counts layers, which is not sharded.
      min_size: arrays with fewer entries are replicated.

    Returns:
      A `LayoutMap`. Vectors that the axis does not divide are replicated.

    Raises:
      ValueError: an axis that the mesh lacks.
      LayoutError: arrays of two dimensions and more of which the axis divides none.

    Cost: each use gathers an array, (n-1)/n of its bytes, and its gradient is scattered as much.

    Example:
      >>> rules = fully_sharded({"w": jnp.ones((6, 16))}, make_mesh("fsdp=8"))
      >>> rules.match("w") == P(None, "fsdp")
      True
    """
    check_mesh(mesh)
    names, least = axes_in(mesh, axis), check_whole("min_size", min_size, 0)
    layers = _pattern("stacked", stacked)

    def dims(array: Shaped, taken: Sequence[Entry]) -> Dims | Problem:
        count = size_of(mesh, names)
        first = 1 if layers.fullmatch(array.path) else 0
        if prod(array.shape) < least or not array.shape[first:]:
            return {}

        def rank(dim: int) -> tuple[bool, int]:
            """Free dimensions first, of those the largest."""
            return bool(axes_of(taken[dim])), -array.shape[dim]

        fitting = [
            dim
            for dim in range(first, len(array.shape))
            if not isinstance(taken[dim], Padded)
            and array.shape[dim]
            and not array.shape[dim] % (count * size_of(mesh, axes_of(taken[dim])))
        ]
        if _role(array.path) == "vocabulary" and len(array.shape) - first > 1:
            return {first: names} if first in fitting else {}
        if fitting:
            return {min(fitting, key=rank): names}
        if len(array.shape) - first < 2:
            return {}
        return Problem(
            array.path,
            None,
            f"{array}: {names} ({count}) divides none of its dimensions"
            + (", the first of which counts layers" if first else ""),
            f"choose other sizes, a smaller axis, or a rule of its own: Padded({names[0]!r})",
        )

    return extended(params, mesh, within, dims, batch=names)


@public
def tensor_parallel(
    params: Any,
    mesh: AnyMesh,
    *,
    axis: AxisLike = "tp",
    within: LayoutMap | None = None,
    columns: str = "",
    rows: str = "",
    vocabulary: str = "",
    whole: str = "",
    stacked: str = "",
) -> LayoutMap:
    """Returns Megatron's map: columns of what goes into a block, rows of what comes out of it.

    Roles are found by names: `query`, `up` and the like are columns, `output`, `down` rows,
    `embedding` by vocabulary, norms whole. An array of two dimensions and more that has none is
    refused, not replicated. An array `kernel`, or of any other name, is taken for [in, out]; one
    `weight` for [out, in], as in Equinox and PyTorch. Of [in, heads, size] and of
    [heads, size, out] the heads are sharded.

    Args:
      params: arrays or their shapes, any pytree.
      mesh: has the axis.
      axis: over which arrays are sharded.
      within: a map of another strategy, to which this one is added.
      columns: a pattern of further paths, whose *whole* path it must match; goes before names.
      rows: the same for rows.
      vocabulary: the same for tables of a vocabulary, [v, d].
      whole: the same for arrays that all devices hold whole.
      stacked: a pattern of the paths whose first dimension counts layers.

    Returns:
      A `LayoutMap`. `LayoutMap.layout` refuses dimensions that the axis does not divide, with the
      ways out.

    Raises:
      ValueError: an axis that the mesh lacks; a pattern that is none.
      LayoutError: arrays without a role.

    Example:
      >>> params = {"up": {"kernel": jnp.ones((4, 16)), "bias": jnp.ones(16)},
      ...           "down": {"kernel": jnp.ones((16, 4)), "bias": jnp.ones(4)}}
      >>> rules = tensor_parallel(params, make_mesh("tp=8"))
      >>> [rules.match(path) == P(*spec) for path, spec in
      ...  {"up/kernel": (None, "tp"), "up/bias": ("tp",), "down/bias": ()}.items()]
      [True, True, True]

    Source: M. Shoeybi et al., "Megatron-LM" (2019), arXiv:1909.08053.
    """
    check_mesh(mesh)
    names = axes_in(mesh, axis)
    given = {"columns": columns, "rows": rows, "vocabulary": vocabulary, "whole": whole}
    patterns = {role: _pattern(role, text) for role, text in given.items()}
    layers = _pattern("stacked", stacked)

    def dims(array: Shaped, taken: Sequence[Entry]) -> Dims | Problem:
        first = 1 if layers.fullmatch(array.path) else 0
        rank = len(array.shape) - first
        roles = [role for role, pattern in patterns.items() if pattern.fullmatch(array.path)]
        role = roles[0] if roles else _role(array.path)
        name = array.path.split("/")[-1]
        vector = rank == 1 or name == "bias"  # of heads: [heads, size]
        if rank < 1 or role == "whole" or (vector and role != "columns"):
            return {}
        if role is None:
            return Problem(
                array.path,
                None,
                f"{array} has no role that its name tells",
                f"say it: columns={array.path!r}, or rows, vocabulary or whole",
            )
        if role == "vocabulary" or vector:
            dim = 0
        elif name == "weight":
            dim = 0 if role == "columns" else rank - 1
        else:
            dim = 1 if role == "columns" else 0
        return {first + dim: names}

    return extended(params, mesh, within, dims)


@public
def expert_parallel(
    params: Any,
    mesh: AnyMesh,
    *,
    axis: AxisLike = "ep",
    within: LayoutMap | None = None,
    experts: str = r"(.*/)?experts?(/.*)?",
    stacked: str = "",
) -> LayoutMap:
    """Returns a map that shards experts over `axis`: the first dimension of their arrays.

    Args:
      params: arrays or their shapes, any pytree.
      mesh: has the axis.
      axis: over which experts are sharded, and the batch too.
      within: a map of another strategy, to which this one is added.
      experts: a pattern of the paths of experts' arrays.
      stacked: a pattern of the paths whose first dimension counts layers: the second is experts'.

    Returns:
      A `LayoutMap`.

    Raises:
      ValueError: an axis that the mesh lacks, a pattern that matches no path.

    Example:
      >>> params = {"experts": {"up": jnp.ones((8, 4, 16))}, "router": jnp.ones((4, 8))}
      >>> rules = expert_parallel(params, make_mesh("ep=8"))
      >>> rules.match("experts/up") == P("ep"), rules.match("router") == P()
      (True, True)
    """
    check_mesh(mesh)
    names, pattern = axes_in(mesh, axis), _pattern("experts", experts)
    layers, found = _pattern("stacked", stacked), list[str]()

    def dims(array: Shaped, taken: Sequence[Entry]) -> Dims | Problem:
        first = 1 if layers.fullmatch(array.path) else 0
        if not pattern.fullmatch(array.path) or len(array.shape) <= first:
            return {}
        found.append(array.path)
        return {first: names}

    rules = extended(params, mesh, within, dims, batch=names)
    if not found:
        raise value_error(f"experts={experts!r} matches no path; give a pattern of experts' arrays")
    return rules


def extended(
    params: Any,
    mesh: AnyMesh,
    within: LayoutMap | None,
    dims: Callable[[Shaped, Sequence[Entry]], Dims | Problem],
    batch: Axes = (),
) -> LayoutMap:
    """A rule for each array, or for all layers of one: what `within` says, and what `dims` adds."""
    leaves, _ = arrays_of(params)
    problems: list[Problem] = []
    specs: dict[str, dict[str, tuple[Any, ...]]] = {}  # by path without indices, and path
    for leaf in leaves:
        if leaf is None:
            continue
        array = Shaped(leaf[0], tuple(jnp.shape(leaf[1])), jnp.result_type(leaf[1]))
        taken = _taken(within, array, problems)
        added = dims(array, taken)
        if isinstance(added, Problem):
            problems.append(added)
            continue
        entries = [(*axes_of(e), *added[d]) if d in added else e for d, e in enumerate(taken)]
        while entries and not entries[-1]:
            entries.pop()
        alike = re.sub(r"(?<![^/])\d+(?![^/])", "#", array.path)
        specs.setdefault(alike, {})[array.path] = tuple(map(shown, entries))
    if problems:
        raise LayoutError(called(), problems)
    rules: dict[str, Any] = {}
    for alike, of_paths in specs.items():
        if len(of_paths) > 1 and len(set(of_paths.values())) == 1:
            key = re.escape(alike).replace(r"\#", r"\d+")
            rules[key] = PartitionSpec(*next(iter(of_paths.values())))
        else:
            rules |= {re.escape(path): PartitionSpec(*spec) for path, spec in of_paths.items()}
    before = within.batch.mesh_axes if within is not None and within.batch else ()
    over = (*before, *(name for name in batch if name not in before))
    return LayoutMap(rules, batch=PartitionSpec(over) if over else None)


def _taken(within: LayoutMap | None, array: Shaped, problems: list[Problem]) -> list[Entry]:
    """What another strategy's map says of each dimension."""
    whole: list[Entry] = [()] * len(array.shape)
    if within is None:
        return whole
    keys = within.matching(array.path)
    if len(keys) != 1:
        problems.append(
            Problem(
                array.path,
                None,
                f"{array} is matched by {len(keys)} rules of `within`",
                "make both maps from the same parameters",
            )
        )
        return whole
    rule = within.rule(keys[0])
    if rule.action is not None:
        problems.append(
            Problem(
                array.path,
                keys[0],
                f"{array}: rule {keys[0]!r} of `within` is {rule.given!r}, to which no axis "
                "can be added",
                "write a spec in its place, with Padded where the axis does not divide",
            )
        )
        return whole
    entries = rule.entries
    return [*entries, *whole[len(entries) :]]


def _role(path: str) -> str | None:
    """What the last name of a path that has a role says."""
    names = {"columns": COLUMNS, "rows": ROWS, "vocabulary": VOCABULARY, "whole": WHOLE}
    for part in reversed(path.lower().split("/")):
        for role, pattern in names.items():
            if re.fullmatch(pattern, part):
                return role
    return None


def _pattern(argument: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as reason:
        raise value_error(
            f"{argument}={text!r} is no regular expression: {reason}; write re.escape of a path "
            "that has signs of its own"
        ) from None
