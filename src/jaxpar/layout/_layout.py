"""The layout of a model on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxpar.arguments.calls import of_user, public, readable, type_error, value_error
from jaxpar.arguments.types import AnyMesh, Flag, Integer, PathLike
from jaxpar.axis.axis import AxisLike
from jaxpar.axis.checks import check_whole
from jaxpar.axis.padded_tables import PaddedTable, PaddedTables
from jaxpar.axis.padding import PaddedDim
from jaxpar.layout._apply_rules import Shaped, fit, shapes_in
from jaxpar.layout._array_layout import ArrayLayout
from jaxpar.layout._arrays import gather, pad, place, spread, unpad, zeros_of
from jaxpar.layout._batch import batch_part, batches, place_batch
from jaxpar.layout._checkpoint import restore, save
from jaxpar.layout._layout_error import refuse
from jaxpar.layout._mesh import axes_in, check_mesh
from jaxpar.layout._paths import arrays_of, part_of
from jaxpar.layout._rule import nearest
from jaxpar.layout._table import Table

if TYPE_CHECKING:
    from jaxpar.layout._map import LayoutMap
    from jaxpar.tools.layouts.layout_costs import LayoutCosts


@readable
class Layout(Mapping[str, ArrayLayout]):
    """A mapping from paths to `ArrayLayout`, for a pytree on a mesh, from `LayoutMap.layout`.

    Pytree properties have None for leaves that are no arrays. Methods that take parameters keep
    such leaves. `init`, `restore` and `read_safetensors` return those of the layout's parameters.

    Example:
      >>> rules = LayoutMap({"up": (None, "tp"), "down": (Padded("tp"),)})
      >>> params = {"up": jnp.ones((4, 8)), "down": jnp.arange(24.0).reshape(6, 4)}
      >>> layout = rules.layout(params, make_mesh("tp=8"))
      >>> layout["down"].local_shape
      (1, 4)
      >>> layout.place(params)["down"][5:, 0].tolist()
      [20.0, 0.0, 0.0]
    """

    def __init__(
        self,
        rules: LayoutMap,
        mesh: Mesh | AbstractMesh,
        arrays: Sequence[ArrayLayout | None],
        tree: Any,
        given: Sequence[Any],
        ruled: frozenset[str] = frozenset(),
    ) -> None:
        self._rules, self._mesh, self._tree = rules, mesh, tree
        self.ruled = ruled  # paths like a parameter's, with a rule of their own
        self._leaves = tuple(arrays)  # None: not an array
        # The leaves that are not arrays, such as functions and text.
        pairs = zip(self._leaves, given, strict=True)
        self._others = tuple(leaf if array is None else None for array, leaf in pairs)
        self._by_path = {array.path: array for array in arrays if array is not None}
        self._padded_tables = PaddedTables(
            table for array in self._by_path.values() for table in padded_tables(array)
        )

    @property
    def rules(self) -> LayoutMap:
        """Returns the map that made this layout."""
        return self._rules

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """Returns the mesh."""
        return self._mesh

    def __getitem__(self, path: str) -> ArrayLayout:
        if path not in self._by_path:
            raise KeyError(f"Layout: no array of path {path!r}{nearest(str(path), self._by_path)}")
        return self._by_path[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_path)

    def __len__(self) -> int:
        return len(self._by_path)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return (self._mesh, self._leaves, self._tree) == (other._mesh, other._leaves, other._tree)

    def __hash__(self) -> int:
        return hash((self._mesh, self._leaves, self._tree))

    def _lines_to_compare(self) -> list[str]:
        blocks = {
            path: "" if array.is_plain else f" {array.blocks}" for path, array in self.items()
        }
        arrays = (f"{p}: {a.dtype}{list(a.shape)} {a.spec}{blocks[p]}" for p, a in self.items())
        return [f"mesh {dict(self.mesh.shape)}", *arrays]

    def __repr__(self) -> str:
        return str(self.table())

    @cached_property
    def specs(self) -> Any:
        """Returns each array's `PartitionSpec`, for `jax.shard_map`."""
        return self.tree_of(lambda array: array.spec)

    @cached_property
    def shardings(self) -> Any:
        """Returns each padded array's `NamedSharding`, for `jax.jit` and `jax.device_put`."""
        return self.tree_of(lambda array: array.sharding)

    @cached_property
    def shapes(self) -> Any:
        """Returns each padded array's `jax.ShapeDtypeStruct`."""
        return self.tree_of(
            lambda a: jax.ShapeDtypeStruct(a.padded_shape, a.dtype, sharding=a.sharding)
        )

    @cached_property
    def logical_shardings(self) -> Any:
        """Returns shardings of unpadded arrays: dimensions that need padding are not sharded."""
        return self.tree_of(lambda array: array.logical_sharding)

    @cached_property
    def logical_shapes(self) -> Any:
        """Returns each `jax.ShapeDtypeStruct` without padding."""
        return self.tree_of(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.logical_sharding)
        )

    @cached_property
    def gradient_axes(self) -> Any:
        """Returns the axes over which to sum each gradient: those that do not shard it."""
        return self.tree_of(lambda array: array.gradient_axes)

    @public
    def under(self, path: str) -> Layout:
        """Returns the layout of the subtree at `path`, with paths relative to it.

        Raises:
          KeyError: no part has this path, or several have it (keys may contain slashes).

        Example:
          >>> params = {"layers": {"w": jnp.ones((3, 8))}, "scale": jnp.ones(8)}
          >>> rules = LayoutMap({"layers/w": (None, "fsdp"), "scale": ("fsdp",)})
          >>> rules.layout(params, make_mesh("fsdp=8")).under("layers").fsdp_dims(stacked=1)
          {'w': 0}
        """
        chosen, tree = jax.tree.flatten(
            part_of(jax.tree.unflatten(self._tree, range(len(self._leaves))), path)
        )
        start = len(path) + 1
        arrays = [self._leaves[index] for index in chosen]
        arrays = [array and replace(array, path=array.path[start:]) for array in arrays]
        others = [self._others[index] for index in chosen]
        return Layout(self._rules, self._mesh, arrays, tree, others)

    @public
    def fsdp_dims(self, axis: AxisLike = "fsdp", *, stacked: int = 0) -> Any:
        """Returns each array's dimension that `axis` shards, as the `dim` argument of `fsdp_scan`.

        Args:
          axis: mesh axes.
          stacked: leading dimensions that do not count: 1 for stacked layers.

        Returns:
          A pytree like the parameters, with None for arrays not sharded over `axis`.

        Raises:
          ValueError: an axis that the mesh lacks, or that shards a stacked dimension; axes that are
            not the last axes of a dimension.
        """
        names, stacked = axes_in(self._mesh, axis), check_whole("stacked", stacked, 0)

        def dim_of(array: ArrayLayout) -> int | None:
            dims = [d for d, axes in enumerate(array.axes) if set(names) & set(axes)]
            if not dims:
                return None
            (dim, *more), where = dims, f"{array.path!r} is sharded as {array.spec}"
            if more or array.axes[dim][-len(names) :] != names:
                raise value_error(
                    f"{where}, of which no one dimension can be gathered over {names}: they must "
                    "be the last axes of one dimension, in this order"
                )
            if dim < stacked:
                raise value_error(
                    f"{where}: {names} shards dimension {dim}, one of the {stacked} that are "
                    "stacked; shard a dimension of the layer itself"
                )
            return dim - stacked

        return self.tree_of(dim_of)

    @public
    def pad(self, params: Any) -> Any:
        """Pads arrays with zeros, and interleaves layers, also inside `jax.jit`.

        Args:
          params: arrays without padding and in the model's order, of any dtype.

        Returns:
          Padded arrays. Outside `jax.jit`, JAX arrays that change have the layout's shardings.

        Raises:
          LayoutError: arrays of other paths or shapes.
        """
        return self._noted(pad(self, params))

    @public
    def unpad(self, params: Any) -> Any:
        """Undoes `pad`. Dimensions that had padding are not sharded."""
        return unpad(self, params)

    @public
    def place(self, params: Any) -> Any:
        """Pads and interleaves arrays, and puts them on the devices.

        Args:
          params: arrays as for `pad`. Every process passes all arrays in full, and uploads its
            devices' blocks. 64-bit numbers become 32-bit unless `jax_enable_x64` is set.

        Returns:
          Global arrays with the layout's shardings.

        Raises:
          LayoutError: arrays of other paths, shapes or dtypes.
          TypeError: a layout of an `AbstractMesh`.
          ValueError: 64-bit integers that do not fit into 32 bits.
        """
        self._need_devices()
        return self._noted(place(self, params))

    @public
    def gather(self, params: Any) -> Any:
        """Returns NumPy arrays as they were before `place`.

        `jax.random` keys become JAX arrays on one device. All processes must call it.
        """
        self._need_devices()
        return gather(self, params)

    @public
    def init(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function that makes parameters; devices make their own shards.

        Args:
          function: returns arrays as for `pad`, structured like the parameters.

        Returns:
          As `place`. No device or host holds a full sharded array, except along padded dimensions.

        Example:
          >>> def init(key):
          ...     return {"w": jax.random.uniform(key, (8, 4))}
          >>> shapes = jax.eval_shape(init, jax.random.key(0))
          >>> layout = LayoutMap({"w": ("tp", None)}).layout(shapes, make_mesh("tp=8"))
          >>> layout.init(init, jax.random.key(0))["w"].sharding.spec == P("tp", None)
          True
        """
        self._need_devices()
        make = of_user(function, "function")
        full = {path: array.sharding for path, array in self.items() if prod(array.shape)}

        def padded(*args: Any, **kwargs: Any) -> dict[str, Any]:
            made = spread(self, make(*args, **kwargs))
            pairs, _ = arrays_of(pad(self, made, dtypes=True))
            return {path: x for path, x in filter(None, pairs) if path in full}

        empty = {
            path: zeros_of(array.padded_shape, array.dtype, array.sharding)
            for path, array in self.items()
            if path not in full
        }
        made = jax.jit(padded, out_shardings=full)(*args, **kwargs)
        return self._noted(self.filled(empty | made))

    @public
    def constrain(self, x: Array, path: str) -> Array:
        """Shards an intermediate result by the map's `results`, outside `jax.shard_map`.

        Args:
          x: a global array, under `jax.jit`.
          path: matched by a rule of `results`.

        Raises:
          LayoutError: no rule or several match, or the rule does not fit.
          ValueError: a map without `results`, or a rule that would pad x.
        """
        if self._rules.results is None:
            raise value_error(
                "the map has no rules for results; give some, LayoutMap(..., results={...})"
            )
        shaped = Shaped(path, tuple(jnp.shape(x)), jnp.result_type(x))
        (array,), problems = fit(self._rules.results, [shaped], self._mesh, strict=True)
        refuse([problem for problem in problems if problem.path is not None])
        if not array.is_plain:
            same = array.padded_shape == array.shape
            changed = "interleaved" if same else f"padded to {array.padded_shape}"
            raise value_error(
                f"{shaped} would be {changed}; results are not: name axes that divide it"
            )
        # The mesh in context may have other devices: the target of a compilation.
        context = jax.sharding.get_abstract_mesh()
        mesh = context if dict(context.shape) == dict(self._mesh.shape) else self._mesh
        sharding = NamedSharding(mesh, array.spec)
        constrained: Array = jax.lax.with_sharding_constraint(x, sharding)
        return constrained

    @public
    def place_batch(self, batch: Any, *, compare: Flag = True) -> Any:
        """Returns global arrays of this process's data, sharded by the map's `batch`.

        Args:
          batch: a pytree of host arrays with this process's rows (`batch_part`). Arrays of lower
            rank use the first entries of `batch`'s rule.
          compare: whether processes first compare their shapes, which waits for programs that run.
            False for a loader that always gives each process as many rows.

        Raises:
          LayoutError: sizes that the mesh axes do not divide (see `batches`).
          TypeError: a leaf that is no array, or an array of text.
          ValueError: a map without `batch`; processes make arrays of different shapes.

        Cost: with several processes and `compare`, 8 bytes from each to each.

        Example:
          >>> rules = LayoutMap({"w": ("tp",)}, batch=P("dp"))
          >>> layout = rules.layout({"w": jnp.ones(8)}, make_mesh("dp=2,tp=4"))
          >>> x = layout.place_batch({"x": np.arange(18.0).reshape(6, 3)})["x"]
          >>> x.sharding.spec == P("dp"), x[4].tolist()
          (True, [12.0, 13.0, 14.0])
        """
        self._need_devices()
        return place_batch(self, batch, compare=bool(compare))

    @public
    def batch_part(self) -> tuple[int, int]:
        """Returns the index of this process's part of the batch, and the number of parts.

        Processes whose devices hold the same rows share an index, and must read the same data.

        Raises:
          ValueError: a map without `batch`, or devices whose rows are not one of equal parts.

        Example:
          >>> rules = LayoutMap({"w": ("tp",)}, batch=P("dp"))
          >>> rules.layout({"w": jnp.ones(8)}, make_mesh("dp=2,tp=4")).batch_part()
          (0, 1)
        """
        self._need_devices()
        return batch_part(self)

    @public
    def batches(
        self, source: Iterable[Any], *, rows: Integer | None = None
    ) -> Iterator[tuple[Any, Array]]:
        """Yields placed batches, and each row's weight: 1, or 0 if it only fills up.

        Args:
          source: pytrees of host arrays with at most `rows` of this process's rows.
          rows: rows in each of this process's batches. None: as many as in the first.

        Yields:
          `(batch, weights)`, global arrays; float32 weights. The mean over all rows is
          `sum(weights * loss) / sum(weights)`. All processes yield equally many batches; those
          whose data ended yield weights of 0.

        Raises:
          LayoutError: rows that the mesh axes do not divide.
          ValueError: a map without `batch`; no first batch, or an empty batch; too many rows, or
            different numbers in a batch.

        Example:
          >>> rules = LayoutMap({"w": ("tp",)}, batch=P("dp"))
          >>> layout = rules.layout({"w": jnp.ones(8)}, make_mesh("dp=2,tp=4"))
          >>> data = np.arange(7.0).reshape(7, 1)
          >>> [weights.sum().item() for _, weights in layout.batches([data[:4], data[4:]])]
          [4.0, 3.0]
        """
        self._need_devices()
        most = None if rows is None else check_whole("rows", rows, 1)
        return batches(self, source, most)

    @public
    def like(self, tree: Any, rules: LayoutMap | None = None) -> Layout:
        """Returns the layout of a pytree like the parameters, such as optimizer states.

        An array is sharded like a parameter if its path ends in the parameter's. Its shape must be
        the parameter's (padded or not), or lack a dimension, as for factored moments. If it is
        unclear which of two equal dimensions is missing, neither is sharded. Arrays of one entry
        are replicated.

        Args:
          tree: such as `jax.eval_shape(optimizer.init, layout.shapes)`.
          rules: overrides for paths in `tree`. For ZeRO-1 they shard moments over the data axis.

        Raises:
          LayoutError: an array like no parameter, without a rule; a rule that matches no array or
            does not fit.

        Example:
          >>> layout = LayoutMap({"w": REPLICATED}, batch=P("dp")).layout(
          ...     {"w": jnp.ones((8, 4))}, make_mesh("dp=8"))
          >>> moments = {"mu": layout.shapes, "nu": layout.shapes}
          >>> state = layout.like(moments, LayoutMap({"(mu|nu)/w": ("dp", None)}))
          >>> state["mu/w"].local_shape, layout["w"].local_shape
          ((1, 4), (8, 4))

        Source: Rajbhandari et al., "ZeRO" (2020).
        """
        from jaxpar.layout._optimizer_state import like

        return like(self, tree, rules)

    @public
    def table(self) -> Table:
        """Returns each device's memory, the most replicated arrays first."""
        return Table(self)

    @public
    def save(self, folder: PathLike, params: Any) -> None:
        """Writes an Orbax checkpoint that any mesh can read: unpadded, in the model's order.

        `restore` returns the same bits, also of `jax.random` keys and empty arrays. The folder
        appears only when all is written. The next `save` removes the remains of an interrupted one.

        Args:
          folder: a new folder that all processes can reach, also as in `gs://bucket/folder`.
          params: arrays on the mesh. Other leaves are not stored.

        Raises:
          ImportError: without Orbax.
          LayoutError: arrays of other paths, shapes or dtypes, or outside of the mesh.
          ValueError: the folder exists.

        Cost: a copy of padded and interleaved arrays, unsharded along padded dimensions.

        Example:
          >>> layout = LayoutMap({"w": ("tp",)}).layout({"w": jnp.ones(8)}, make_mesh("tp=8"))
          >>> layout.save(folder, layout.place({"w": jnp.arange(8.0)}))
          >>> layout.restore(folder)["w"]
          Array([0., 1., 2., 3., 4., 5., 6., 7.], dtype=float32)
        """
        self._need_devices()
        save(self, folder, params)

    @public
    def restore(self, folder: PathLike) -> Any:
        """Reads a checkpoint onto this mesh; processes read their devices' shards.

        Args:
          folder: written by `save` on any mesh, from any pytree with the same paths; or a plain
            Orbax checkpoint with the layout's nesting.

        Returns:
          Padded arrays, as from `place`.

        Raises:
          ImportError: without Orbax.
          LayoutError: arrays of other paths, shapes or dtypes.
          ValueError: no such folder, or no checkpoint in it.
        """
        self._need_devices()
        return self._noted(restore(self, folder))

    @public
    def read_safetensors(
        self,
        files: Any,
        *,
        names: Any = None,
        transposed: Any = None,
        unused: str | None = None,
    ) -> Any:
        """Reads safetensors files onto this mesh; processes read their devices' parts.

        Args:
          files: one or several files, folders or indices (`model.safetensors.index.json`). A folder
            means the files of its index, or without an index all `*.safetensors`.
          names: a function or mapping from an array's path to its tensor's name. A list of names
            stacks tensors along a first dimension, a list of lists along two. None: the path, with
            dots for slashes.
          transposed: a pattern of full paths. The last two dimensions of these arrays are swapped
            in the files, as in PyTorch's linear layers. Or a mapping from patterns to axes for
            `numpy.transpose`, None for the last two: `{".*/conv/kernel": (2, 3, 1, 0)}` for
            PyTorch's convolutions. Stacked dimensions do not count.
          unused: a pattern of full names that may stay unread.

        Returns:
          As from `place`. 64-bit numbers become 32-bit unless `jax_enable_x64` is set.

        Raises:
          LayoutError: tensors that are missing, unread, or of another shape or dtype.
          ValueError: missing or damaged files; a name in two files without an index, or not where
            the index says; unknown paths in `names`; wrong axes in `transposed`; a pattern that
            matches nothing.

        Example:
          >>> from safetensors.numpy import save_file
          >>> numbers = np.arange(64, dtype="f").reshape(2, 4, 8)
          >>> weights = {f"h.{layer}.weight": numbers[layer] for layer in range(2)}
          >>> save_file(weights, f"{folder}.safetensors")
          >>> shapes = {"w": jax.ShapeDtypeStruct((2, 8, 4), "float32")}
          >>> layout = LayoutMap({"w": (None, "tp")}).layout(shapes, make_mesh("tp=8"))
          >>> names = {"w": ["h.0.weight", "h.1.weight"]}
          >>> w = layout.read_safetensors(f"{folder}.safetensors", names=names, transposed="w")["w"]
          >>> w[1, 2].tolist(), w.sharding.spec == P(None, "tp")
          ([34.0, 42.0, 50.0, 58.0], True)

        Source: https://github.com/huggingface/safetensors.
        """
        from jaxpar.layout._tensors import read_safetensors

        self._need_devices()
        return self._noted(read_safetensors(self, files, names, transposed, unused))

    @public
    def write_safetensors(
        self,
        where: PathLike,
        params: Any,
        *,
        names: Any = None,
        transposed: Any = None,
        file_bytes: Integer = 5_000_000_000,
    ) -> None:
        """Writes arrays as safetensors, which `read_safetensors` with these arguments reads back.

        The bits are the same, whatever the arrays' order in memory. Names appear when all is
        written. Call it in all processes: process 0 writes.

        Args:
          where: a new file `NAME.safetensors`, or a folder without such files, for
            `model.safetensors` or several files with an index.
          params: arrays on the mesh. Other leaves are not stored.
          names: as for `read_safetensors`. Two arrays may share a name if they are equal.
          transposed: as for `read_safetensors`.
          file_bytes: the most bytes of a file, if there are several, unless a tensor has more.

        Raises:
          LayoutError: arrays of other paths, shapes or dtypes; a dtype that files cannot have;
            different arrays of one name.
          ValueError: files exist already, or as for the arguments of `read_safetensors`.

        Cost: each host holds one array at a time, unsharded.

        Example:
          >>> params = {"w": jnp.arange(32.0).reshape(4, 8)}
          >>> layout = LayoutMap({"w": (None, "tp")}).layout(params, make_mesh("tp=8"))
          >>> theirs = {"names": {"w": "up.weight"}, "transposed": "w"}  # [8, 4] in the file
          >>> layout.write_safetensors(folder, layout.place(params), **theirs)
          >>> jnp.array_equal(layout.read_safetensors(folder, **theirs)["w"], params["w"]).item()
          True
        """
        from jaxpar.layout._tensors import write_safetensors

        self._need_devices()
        most = check_whole("file_bytes", file_bytes, 1)
        write_safetensors(self, where, params, names, transposed, most)

    @public
    def explain(
        self,
        step: Any,
        target: Any,
        *args: Any,
        compiler_options: dict[str, Any] | None = None,
        tries: Integer = 6,
        from_layout: Flag = False,
    ) -> LayoutCosts:
        """Predicts the cost of each weight in a step on a described chip, and finds cheaper rules.

        The compiled step is simulated on a model of the chip. Then changes of rules are tried in
        this order:

        1. Shard lookup tables by rows, if the batch's axis shards their features.
        2. Exchange dimensions in rules that disagree with the other factor of a product.
        3. Exchange dimensions in other rules, the most expensive first.

        Faster changes are kept for later ones. Last come plain maps: fully sharded, replicated.

        Args:
          step: `step(params, *args)` of global arrays. Results with a weight's path and shape get
            its layout. A `jax.shard_map` in it must leave out its mesh.
          target: a name such as `"v5p:4x4x4"` with as many devices as the mesh, or a
            `jaxpar.schedule.Target` with the mesh's axes.
          args: shapes or arrays; a `Layout` (`layout.like`) for states like the parameters. The
            map's `batch` shards arrays without a spec.
          compiler_options: as for `jaxpar.schedule.compile_for`.
          tries: the most changes to compile. 0 skips the plain maps, too.
          from_layout: True if `step` takes the layout, on the target's mesh, and returns the step,
            which may contain the layout's specs. Plain maps are not tried.

        Raises:
          ValueError: a target with other axes; arguments that their axes do not divide.

        Cost: `1 + tries` compilations of the step, and two of plain maps.

        Example:
          >>> def loss(params, x):
          ...     return jnp.sum(jnp.tanh(x @ params["up"]) @ params["down"])
          >>> shape = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
          >>> rules = LayoutMap({"up": ("tp", None), "down": ("tp", None)})  # up is exchanged
          >>> mesh = make_mesh("tp=4", devices=jax.devices()[:4])
          >>> layout = rules.layout({"up": shape, "down": shape}, mesh)
          >>> layout.explain(jax.grad(loss), "v5e:2x2", shape).flagged[0].rule
          'up'
        """
        from jaxpar import layout  # which imports the tool on demand

        tries, whole = check_whole("tries", tries, 0), bool(from_layout)
        return layout.explain_layout(self, step, target, args, compiler_options, tries, whole)

    def on(self, mesh: AnyMesh) -> Layout:
        moved = [array and replace(array, mesh=mesh) for array in self._leaves]
        return Layout(self._rules, mesh, moved, self._tree, self._others, self.ruled)

    def changed(self, arrays: Mapping[str, ArrayLayout]) -> Layout:
        leaves = [array and arrays.get(array.path, array) for array in self._leaves]
        return Layout(self._rules, self._mesh, leaves, self._tree, self._others, self.ruled)

    def tree_of(self, function: Callable[[ArrayLayout], Any]) -> Any:
        leaves = [None if array is None else function(array) for array in self._leaves]
        return jax.tree.unflatten(self._tree, leaves)

    def filled(self, arrays: Mapping[str, Any]) -> Any:
        leaves = [
            other if array is None else arrays[array.path]
            for array, other in zip(self._leaves, self._others, strict=True)
        ]
        return jax.tree.unflatten(self._tree, leaves)

    def _noted(self, params: Any) -> Any:
        padded = {table.path for table in self._padded_tables.tables}
        self._padded_tables.stay_with(
            x
            for path, x in filter(None, arrays_of(params)[0])
            if path in padded and isinstance(x, Array) and not isinstance(x, Tracer)
        )
        return params

    def _need_devices(self) -> None:
        if not isinstance(self._mesh, Mesh):
            raise type_error(f"the layout is of {self._mesh}, which has no devices; give a Mesh")


def padded_tables(array: ArrayLayout) -> Iterator[PaddedTable]:
    sizes = [{blocks.size, blocks.padded} for blocks in array.blocks]
    for dim, blocks in enumerate(array.blocks):
        widths = frozenset[int]().union(*sizes[:dim], *sizes[dim + 1 :])
        if blocks.size != blocks.padded and widths and type(blocks) is PaddedDim:
            at_the_end = blocks == PaddedDim.at_the_end(blocks.size, blocks.parts, blocks.block)
            yield PaddedTable(
                array.path, blocks.size, blocks.padded, widths, array.axes[dim], at_the_end
            )


def layout_of(rules: LayoutMap, params: Any, mesh: Any, *, strict: bool) -> Layout:
    check_mesh(mesh)
    shapes, tree = shapes_in(params)
    layouts, problems = fit(rules, list(filter(None, shapes)), mesh, strict=strict)
    refuse(problems)
    fitted = iter(layouts)
    arrays = [shape and next(fitted) for shape in shapes]
    return Layout(rules, mesh, arrays, tree, jax.tree.leaves(params))
