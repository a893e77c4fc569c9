"""Maps made from parameters."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from jax.sharding import PartitionSpec

from jaxpar.arguments.calls import public
from jaxpar.arguments.types import AnyMesh, Integer
from jaxpar.axis.axis import AxisLike
from jaxpar.axis.checks import check_whole
from jaxpar.layout._apply_rules import Shaped, shapes_in
from jaxpar.layout._layer_groups import Alike
from jaxpar.layout._layout_error import LayoutProblem, refuse
from jaxpar.layout._map import LayoutMap
from jaxpar.layout._mesh import axes_in, check_mesh, size_of
from jaxpar.layout._paths import key_of, pattern_of, without_numbers
from jaxpar.layout._patterns import Pattern
from jaxpar.layout._roles import WeightGroups
from jaxpar.layout._rule import Axes, Entry, axes_of, shown, trimmed
from jaxpar.layout._split import Interleaved
from jaxpar.layout._tensor_dims import TensorDims
from jaxpar.layout._weight_formats import shares

Dims = dict[int, Axes]  # the axes that a strategy adds to a dimension


@public
def data_parallel(
    params: Any, mesh: AnyMesh, *, axis: AxisLike = "dp", within: LayoutMap | None = None
) -> LayoutMap:
    """Returns a map that shards data over `axis` and replicates parameters.

    Args:
      params: a pytree of arrays or shapes.
      mesh: a mesh that has the axis.
      axis: axes of the batch.
      within: another strategy's map, to extend.

    Raises:
      ValueError: an axis that the mesh lacks.
      LayoutError: in `within`, a parameter has no rule, several rules, or a `Split` or `Replicate`.

    Cost: summing gradients sends 2 (n-1)/n of the parameters' bytes a step.

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
    """Returns a map that shards each array along its largest dimension that `axis` divides.

    Vocabulary tables, found by name, are sharded by rows: with sharded features, lookups would move
    activations. Rows that the axis does not divide are refused, unless `within` shards them.
    Vectors, and scales beside values, that it does not divide are replicated. Of a `Quantized`,
    dimensions come first along which no scale must be repeated. Other arguments are as in
    `data_parallel`.

    Args:
      axis: axes of arrays and batch.
      within: a map to extend. Arrays that it shards over `axis` stay unchanged. A dimension that it
        shards is taken only if `axis` divides no other.
      stacked: a pattern of paths whose first dimension counts layers; not sharded. Those that
        `within` interleaves count as such, too.
      min_size: arrays with fewer entries are replicated.

    Raises:
      ValueError: an axis that the mesh lacks, or a pattern that is invalid or matches nothing.
      LayoutError: as in `data_parallel`; an array of rank 2 or more without a dimension that the
        axis divides.

    Cost: each use of an array gathers (n-1)/n of its bytes; its gradient sends as much.

    Example:
      >>> rules = fully_sharded({"w": jnp.ones((6, 16))}, make_mesh("fsdp=8"))
      >>> rules.match("w") == P(None, "fsdp")
      True
    """
    check_mesh(mesh)
    names, least = axes_in(mesh, axis), check_whole("min_size", min_size, 0)
    arrays = shaped(params)
    layers = _layers(stacked, arrays, within)
    shapes = {array.path: array.shape for array in arrays}
    tables = {table.array.path for table in WeightGroups(arrays, {}, layers).tables}
    scales = {array.values.path: array.shape for array in arrays if array.values is not None}

    def dims(array: Shaped, taken: Sequence[Entry]) -> Dims | LayoutProblem:
        count = size_of(mesh, names)
        first = int(array.path in layers)
        done = {name for entry in taken for name in axes_of(entry)}
        if not array.shape[first:] or prod(array.shape) < max(least, 1) or done & set(names):
            return {}

        def rank(dim: int) -> tuple[bool, bool, int]:
            return bool(axes_of(taken[dim])), repeats(dim), -array.shape[dim]

        def repeats(dim: int) -> bool:
            size, parts = array.shape[dim], count * size_of(mesh, axes_of(taken[dim]))
            several = [n for n in scales.get(array.path, ())[dim : dim + 1] if 1 < n < size]
            return any(n % parts or size % n for n in several)

        fitting = [
            dim
            for dim in range(first, len(array.shape))
            if isinstance(taken[dim], tuple)
            and not array.shape[dim] % (count * size_of(mesh, axes_of(taken[dim])))
        ]
        if array.path in tables and fitting and first not in fitting:
            if axes_of(taken[first]):
                return {}
            rows = array.shape[first]
            return array.problem(
                f"{array}: {names} ({count}) does not divide its {rows} rows; if its features were "
                "sharded, a lookup's result would be sharded like them, and not like the batch",
                f"give it {-(-rows // count) * count} rows, choose a smaller axis, or "
                + _own_rule(array, first, names, taken, within),
            )
        if fitting:
            return {first if array.path in tables else min(fitting, key=rank): names}
        if len(array.shape) - first < 2:
            return {}
        longest = min(range(first, len(taken)), key=rank)
        if shares(array.path, longest, shapes):
            return {}
        return array.problem(
            f"{array}: {names} ({count}) divides none of its dimensions"
            + (", the first of which counts layers" if first else ""),
            "choose other sizes, a smaller axis, or "
            + _own_rule(array, longest, names, taken, within),
        )

    return extended(params, mesh, within, dims, batch=names)


def _layers(stacked: str, arrays: Sequence[Shaped], within: LayoutMap | None) -> set[str]:
    """Returns the paths of arrays whose first dimension counts layers."""
    paths = [array.path for array in arrays]
    pattern = Pattern("stacked", stacked, paths).check()

    def is_interleaved(path: str) -> bool:
        rules = [within.rule(key) for key in within.matching(path)] if within else []
        return any(isinstance(entry, Interleaved) for rule in rules for entry in rule.entries[:1])

    return {path for path in paths if path in pattern or is_interleaved(path)}


def _own_rule(
    array: Shaped, dim: int, names: Axes, taken: Sequence[Entry], within: LayoutMap | None
) -> str:
    """Returns an edit of `within` that pads a dimension."""
    before = "within" if within else f"data_parallel(params, mesh, axis={shown(names)!r})"
    padded = f"Padded({shown((*axes_of(taken[dim]), *names))!r})"
    entries = [padded if d == dim else repr(shown(entry)) for d, entry in enumerate(taken)]
    rule = f"{key_of(array.path)!r}: ({', '.join(entries)})"
    return f"a rule of its own in `within`, {before} | {{{rule}}}"


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
    head_size: Integer | None = None,
) -> LayoutMap:
    """Returns Megatron-LM's map: a block's first weights are sharded by columns, its last by rows.

    An array's role follows from its name, as in published models, and from neighbouring arrays. A
    matrix without a role is refused, as is an array of several projections: a block of its columns
    would mix queries, keys and values. A `gate` as large as its MLP is sharded by columns. Other
    gates (routers), norms and position tables are replicated.

    Arrays that hold a weight (a `Quantized`, or packed numbers with scales as in files of GPTQ,
    AWQ, MXFP4, NVFP4, compressed-tensors and MLX) are sharded as this weight is. Refused are sizes
    whose blocks devices would cut, and formats whose blocks mix rows. Where a `g_idx` numbers the
    groups, scales and zeros of weights by rows are replicated. A vector beside a matrix belongs to
    its inputs or outputs by name, or by length.

    Sizes of biases, norms and tables show the input dimension. Without them, `weight` is [out, in],
    as in Equinox and PyTorch, and an array of another name is [in, out]. Heads are sharded in [in,
    heads, size] and [heads, size, out]. Below `experts`, a first dimension that counts experts is
    not sharded. In a low-rank adapter (`lora_a`, `lora_b`), only the array with the weight's
    sharded dimension is sharded.

    Other arguments are as in `data_parallel`.

    Args:
      axis: axes of arrays.
      columns: a pattern of full paths to shard by columns; it overrides names.
      rows: a pattern to shard by rows.
      vocabulary: a pattern of vocabulary tables, [v, d].
      whole: a pattern to replicate.
      stacked: as in `fully_sharded`.
      head_size: entries of a head in weights [d, heads * size]. Heads that the axis does not divide
        are refused. None: the length of query and key norms, if there are any.

    Raises:
      ValueError: as in `fully_sharded`.
      LayoutError: as in `data_parallel`; arrays whose role is unclear, each with the edit that
        decides it. `LayoutMap.layout` refuses dimensions that the axis does not divide.

    Example:
      >>> params = {"up": {"kernel": jnp.ones((4, 16)), "bias": jnp.ones(16)},
      ...           "down": {"kernel": jnp.ones((16, 4)), "bias": jnp.ones(4)}}
      >>> rules = tensor_parallel(params, make_mesh("tp=8"))
      >>> rules.match("up/bias") == P("tp"), rules.match("down/bias") == P()
      (True, True)

    Source: Shoeybi et al., "Megatron-LM" (2019).
    """
    check_mesh(mesh)
    names = axes_in(mesh, axis)
    arrays = shaped(params)
    paths = [array.path for array in arrays]
    roles = {"columns": columns, "rows": rows, "vocabulary": vocabulary, "whole": whole}
    patterns = {role: Pattern(role, text, paths).check() for role, text in roles.items()}
    tensor_dims = TensorDims(
        arrays,
        patterns,
        _layers(stacked, arrays, within),
        axes=names,
        count=size_of(mesh, names),
        head_size=None if head_size is None else check_whole("head_size", head_size, 1),
    )

    def dims(array: Shaped, taken: Sequence[Entry]) -> Dims | LayoutProblem:
        several = [role for role, pattern in patterns.items() if array.path in pattern]
        if len(several) > 1:
            return array.problem(
                f"{array} is matched by {' and '.join(f'{role}=' for role in several)}",
                "let only one of them match it",
            )
        dim = tensor_dims.of(array.path)
        if isinstance(dim, LayoutProblem):
            return dim
        return {} if dim is None else {dim: names}

    return extended(params, mesh, within, dims)


@public
def expert_parallel(
    params: Any,
    mesh: AnyMesh,
    *,
    axis: AxisLike = "ep",
    within: LayoutMap | None = None,
    experts: str = r"(.*[./])?experts?([./].*)?",
    stacked: str = "",
) -> LayoutMap:
    """Returns a map that shards experts, their arrays' first dimension, over `axis`.

    Other arguments are as in `data_parallel`.

    Args:
      axis: axes of experts and batch.
      experts: a pattern of paths of arrays that stack all experts.
      stacked: a pattern of paths whose first dimension counts layers, the second experts.

    Raises:
      ValueError: as in `fully_sharded`.
      LayoutError: as in `data_parallel`; an array for each expert; different numbers of experts in
        one layer.

    Example:
      >>> params = {"experts": {"up": jnp.ones((8, 4, 16))}, "router": jnp.ones((4, 8))}
      >>> rules = expert_parallel(params, make_mesh("ep=8"))
      >>> rules.match("experts/up") == P("ep"), rules.match("router") == P()
      (True, True)
    """
    check_mesh(mesh)
    names, arrays = axes_in(mesh, axis), shaped(params)
    paths = [array.path for array in arrays]
    pattern = Pattern("experts", experts, paths)
    layers = _layers(stacked, arrays, within)
    # All arrays of a layer must have the same number of experts.
    of_layer: dict[str, list[Shaped]] = defaultdict(list)
    for array in arrays:
        if array.path in pattern:
            of_layer[_layer_of(array.path)].append(array)

    def dims(array: Shaped, taken: Sequence[Entry]) -> Dims | LayoutProblem:
        first = int(array.path in layers)
        if array.path not in pattern or len(array.shape) <= first:
            return {}
        wrong = _no_experts(array, of_layer[_layer_of(array.path)], first)
        return wrong or {first: names}

    rules = extended(params, mesh, within, dims, batch=names)
    pattern.check()
    return rules


def _layer_of(path: str) -> str:
    before = re.match(r"(?:.*[./])?experts?(?=[./]|$)", path)
    return before[0] if before else path


def _no_experts(array: Shaped, others: Sequence[Shaped], first: int) -> LayoutProblem | None:
    path, layer = array.path, _layer_of(array.path)
    if number := re.match(r"[./](expert_?)?\d+(?=[./]|$)", path[len(layer) :]):
        return array.problem(
            f"{array} is of one expert, and has no dimension that counts experts",
            f"stack the arrays of all experts, {pattern_of(path)!r}, along a first dimension, as "
            f"{layer + path[len(layer) + number.end() :]!r}",
        )
    matrices = [len(other.shape) for other in others if not other.path.endswith("bias")]
    if first == 0 and min(matrices, default=0) > 3:
        return array.problem(
            f"{array} and the arrays beside it have one dimension more than [experts, in, out]",
            f"give stacked={pattern_of(path)!r} if the first one counts layers",
        )
    if array.shape[first] != others[0].shape[first]:
        return array.problem(
            f"{array} has {array.shape[first]} entries along dimension {first}, and {others[0]} "
            f"has {others[0].shape[first]}: not both count experts",
            "let experts= match only arrays that stack experts, and stacked= those of all layers",
        )
    return None


def shaped(params: Any) -> list[Shaped]:
    return list(filter(None, shapes_in(params)[0]))


def extended(
    params: Any,
    mesh: AnyMesh,
    within: LayoutMap | None,
    dims: Callable[[Shaped, Sequence[Entry]], Dims | LayoutProblem],
    batch: Axes = (),
) -> LayoutMap:
    problems: list[LayoutProblem] = []
    specs: dict[str, tuple[Any, ...]] = {}
    groups: dict[str, Alike] = defaultdict(lambda: Alike(in_keys=True))
    for array in shaped(params):
        if array.values is not None:  # scales are laid out as their values are
            sizes = zip(specs.get(array.values.path, ()), array.shape, strict=False)
            specs[array.path] = trimmed(entry if size > 1 else None for entry, size in sizes)
            groups[without_numbers(array.path)].add(array.path, specs[array.path])
            continue
        taken = _taken(within, array, problems)
        added = dims(array, taken)
        if isinstance(added, LayoutProblem):
            problems.append(added)
            continue
        fixed = [dim for dim in added if isinstance(taken[dim], Interleaved)]
        if fixed:
            problems.append(
                array.problem(
                    f"{array}: {added[fixed[0]]} would shard dimension {fixed[0]}, too, which "
                    f"`within` has as {taken[fixed[0]]!r}: its layers would change places",
                    "let `within` interleave the first dimension, which must count layers",
                )
            )
            continue
        entries = [_with(entry, added.get(dim, ())) for dim, entry in enumerate(taken)]
        specs[array.path] = trimmed(map(shown, entries))
        groups[without_numbers(array.path)].add(array.path, specs[array.path])
    refuse(problems)
    rules = {groups[without_numbers(p)].pattern(p): PartitionSpec(*s) for p, s in specs.items()}
    before = list(within.batch.entries) if within is not None and within.batch else []
    done = {name for entry in before for name in axes_of(entry)}
    if more := tuple(name for name in batch if name not in done):
        before[:1] = [(*(axes_of(before[0]) if before else ()), *more)]
    return LayoutMap(
        rules,
        batch=PartitionSpec(*map(shown, before)) if before else None,
        results=dict(within.results) if within is not None and within.results else None,
    )


def _with(entry: Entry, axes: Axes) -> Entry:
    both = (*axes_of(entry), *axes)
    return both if isinstance(entry, tuple) else replace(entry, axes=both)


def _taken(within: LayoutMap | None, array: Shaped, problems: list[LayoutProblem]) -> list[Entry]:
    whole: list[Entry] = [()] * len(array.shape)
    if within is None:
        return whole
    keys = within.matching(array.path)
    if len(keys) != 1:
        problems.append(
            array.problem(
                f"{array} is matched by {len(keys)} rules of `within`",
                "make both maps from the same parameters",
            )
        )
        return whole
    rule = within.rule(keys[0])
    if rule.action is not None:
        problems.append(
            LayoutProblem(
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
