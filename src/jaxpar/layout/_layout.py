"""Where a model's arrays lie on a mesh: specs, shards and padding follow from one value."""

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

from jaxpar.arguments.calls import called, of_user, public, readable, type_error, value_error
from jaxpar.arguments.checks import check_whole
from jaxpar.arguments.types import AnyMesh, Flag, Integer, PathLike
from jaxpar.axis.axis import AxisLike
from jaxpar.axis.padded_tables import PaddedTable, PaddedTables
from jaxpar.axis.padding import PaddedDim
from jaxpar.layout._array_layout import ArrayLayout
from jaxpar.layout._arrays import gather, pad, place, unpad, zeros_of
from jaxpar.layout._batch import batch_part, batches, place_batch
from jaxpar.layout._checkpoint import restore, save
from jaxpar.layout._fit import Shaped, fit
from jaxpar.layout._layout_error import LayoutError
from jaxpar.layout._like import like
from jaxpar.layout._mesh import axes_in, check_mesh
from jaxpar.layout._paths import arrays_of, described, part_of
from jaxpar.layout._rule import nearest
from jaxpar.layout._table import Table
from jaxpar.layout._tensors import read_safetensors

if TYPE_CHECKING:
    from jaxpar.layout._map import LayoutMap
    from jaxpar.tools.layouts.layout_costs import LayoutCosts


@readable
class Layout(Mapping[str, ArrayLayout]):
    """How the arrays of one pytree lie on one mesh; made by `LayoutMap.layout`.

    A mapping from paths to what is known of each array (`ArrayLayout`). Properties that are
    pytrees have the structure of the parameters, with None for leaves that are no arrays.
    Parameters that it makes (`init`, `restore`, `read_safetensors`) have the leaves themselves.

    Example:
      >>> rules = LayoutMap({"up": (None, "tp"), "down": (Padded("tp"),)})
      >>> params = {"up": jnp.ones((4, 8)), "down": jnp.ones((6, 4))}
      >>> mesh = make_mesh("tp=8")
      >>> layout = rules.layout(params, mesh)
      >>> layout["down"].local_shape
      (1, 4)
      >>> layout.place(params)["down"].shape
      (8, 4)
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
        self.ruled = ruled  # paths that are like a parameter, and have a rule of their own
        self._leaves = tuple(arrays)  # None: no array
        # The leaves of the pytree that are no arrays: functions, text.
        pairs = zip(self._leaves, given, strict=True)
        self._others = tuple(leaf if array is None else None for array, leaf in pairs)
        self._by_path = {array.path: array for array in arrays if array is not None}
        self._padded_tables = PaddedTables(
            table for array in self._by_path.values() for table in padded_tables(array)
        )

    @property
    def rules(self) -> LayoutMap:
        """The map that it was made from."""
        return self._rules

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The mesh."""
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

    def __repr__(self) -> str:
        return str(self.table())

    @cached_property
    def specs(self) -> Any:
        """The `PartitionSpec` of each array: `in_specs` and `out_specs` of `jax.shard_map`."""
        return self.tree_of(lambda array: array.spec)

    @cached_property
    def shardings(self) -> Any:
        """The `NamedSharding` of each array, padded: for `jax.jit` and `jax.device_put`."""
        return self.tree_of(lambda array: array.sharding)

    @cached_property
    def shapes(self) -> Any:
        """Shape, dtype and sharding of each array, padded (`jax.ShapeDtypeStruct`)."""
        return self.tree_of(
            lambda a: jax.ShapeDtypeStruct(a.padded_shape, a.dtype, sharding=a.sharding)
        )

    @cached_property
    def logical_shardings(self) -> Any:
        """As `shardings`, of arrays without padding: whole along dimensions that have some."""
        return self.tree_of(lambda array: array.logical_sharding)

    @cached_property
    def logical_shapes(self) -> Any:
        """As `shapes`, of arrays without padding."""
        return self.tree_of(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.logical_sharding)
        )

    @cached_property
    def gradient_axes(self) -> Any:
        """The mesh axes over which each gradient is summed: those that do not shard the array."""
        return self.tree_of(lambda array: array.gradient_axes)

    @public
    def under(self, path: str) -> Layout:
        """Returns the layout of a part of the pytree, with paths from there.

        Raises:
          KeyError: there is no such part, or two parts have this path, as keys may have slashes.

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
        """Returns the dimension of each array that `axis` shards: `dim` of `fsdp_scan`.

        Args:
          axis: the mesh axis, or axes.
          stacked: leading dimensions that are not counted: 1 where layers are stacked, of which
            `fsdp_scan` takes one at a time (`under` gives the layout of a part).

        Returns:
          A pytree like the parameters, None for arrays that it does not shard.

        Raises:
          ValueError: an axis that the mesh lacks; one that shards a stacked dimension; axes of
            which only some shard an array, or that are not the last ones of a dimension.
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
        """Adds the zeros that the mesh needs, inside of `jax.jit` or not.

        Args:
          params: arrays without padding, with the structure of the parameters, of any dtype:
            gradients may be wider.

        Returns:
          The padded arrays. Outside of `jax.jit`, JAX arrays that have padding get the shardings of
          the layout.

        Raises:
          LayoutError: arrays of other paths or shapes.
        """
        return self._noted(pad(self, params))

    @public
    def unpad(self, params: Any) -> Any:
        """Takes the zeros away: the inverse of `pad`; whole along dimensions that had some."""
        return unpad(self, params)

    @public
    def place(self, params: Any) -> Any:
        """Pads arrays and puts them on the devices of the mesh.

        Args:
          params: arrays without padding, of NumPy or JAX, with the structure of the parameters. In
            several processes each has all of them, and uploads what its own devices hold. 64-bit
            numbers become 32-bit unless `jax_enable_x64` is set, as in the layout.

        Returns:
          Global arrays with the shardings of the layout. Leaves that are no arrays are as given.

        Raises:
          LayoutError: arrays of other paths, shapes or dtypes.
          TypeError: shapes in the place of arrays; a layout of an `AbstractMesh`.
          ValueError: whole numbers of 64 bits that do not fit into 32.
        """
        self._need_devices()
        return self._noted(place(self, params))

    @public
    def gather(self, params: Any) -> Any:
        """Returns the arrays without padding, as NumPy arrays: the inverse of `place`.

        Keys of `jax.random`, which NumPy lacks, become JAX arrays on one device. Leaves that are no
        arrays are as given. In several processes all must call it.
        """
        self._need_devices()
        return gather(self, params)

    @public
    def init(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function that makes parameters, each device making its own shards.

        Args:
          function: returns arrays without padding, in the structure of the parameters: that of
            `jax.eval_shape` from which the layout was made.
          args: what it is called with, a key for instance.
          kwargs: the same, by name.

        Returns:
          Global arrays with the shardings of the layout, in its containers. Leaves that are no
          arrays are the layout's own. No device and no host holds a sharded array whole, except
          along dimensions that have padding.

        Raises:
          LayoutError: arrays of other paths, shapes or dtypes come back.

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
            found, _ = arrays_of(pad(self, make(*args, **kwargs), dtypes=True))
            return {path: x for path, x in filter(None, found) if path in full}

        empty = {
            path: zeros_of(array.padded_shape, array.dtype, array.sharding)
            for path, array in self.items()
            if path not in full
        }
        made = jax.jit(padded, out_shardings=full)(*args, **kwargs)
        return self._noted(self.filled(empty | made))

    @public
    def constrain(self, x: Array, path: str) -> Array:
        """Shards an intermediate result as the rules of `results` say, outside of `jax.shard_map`.

        Args:
          x: a global array, under `jax.jit`.
          path: its path, which one rule of `results` must match.

        Returns:
          x, with a sharding that the compiler keeps to.

        Raises:
          LayoutError: no rule, or several; a rule that does not fit.
        """
        if self._rules.results is None:
            raise value_error(
                "the map has no rules for results; give some, LayoutMap(..., results={...})"
            )
        shaped = Shaped(path, tuple(jnp.shape(x)), jnp.result_type(x))
        (array,), problems = fit(self._rules.results, [shaped], self._mesh, strict=True)
        problems = [problem for problem in problems if problem.path is not None]
        if problems:
            raise LayoutError(called(), problems)
        if array.padded_shape != array.shape:
            raise value_error(
                f"{shaped} would be padded to {array.padded_shape}; results are not: name axes "
                "that divide it"
            )
        # A mesh in context may be of other devices, for which the step is compiled.
        context = jax.sharding.get_abstract_mesh()
        mesh = context if dict(context.shape) == dict(self._mesh.shape) else self._mesh
        sharding = NamedSharding(mesh, array.spec)
        constrained: Array = jax.lax.with_sharding_constraint(x, sharding)
        return constrained

    @public
    def place_batch(self, batch: Any) -> Any:
        """Puts data on the devices as the map's `batch` says, each process giving its part.

        Args:
          batch: a pytree of host arrays: in one process the whole batch, in several the rows of
            the devices of this one (`batch_part` says which). Arrays of fewer dimensions than
            `batch` has use its first ones.

        Returns:
          Global arrays.

        Raises:
          LayoutError: sizes that the mesh axes do not divide (`batches` fills up the last batch).
          ValueError: a map without `batch`.

        Example:
          >>> rules = LayoutMap({"w": ("tp",)}, batch=P("dp"))
          >>> layout = rules.layout({"w": jnp.ones(8)}, make_mesh("dp=2,tp=4"))
          >>> layout.place_batch({"x": np.ones((6, 3))})["x"].sharding.spec == P("dp")
          True
        """
        self._need_devices()
        return place_batch(self, batch)

    @public
    def batch_part(self) -> tuple[int, int]:
        """Returns which part of the batch's rows this process gives, and how many parts there are.

        Processes whose devices hold the same rows have the same part: they read the same data.

        Raises:
          ValueError: a map without `batch`; devices of this process whose rows are no such part.

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
        """Yields placed batches and the weight of each row: 0 for rows that fill up the last batch.

        Args:
          source: pytrees of host arrays, each process having its own rows, as for `place_batch`;
            any of them may have fewer rows than the first.
          rows: of each process's batches. None: those of the first.

        Yields:
          `(batch, weights)`: global arrays; weights are float32, 1 for each row that was given. The
          mean over all rows is `sum(weights * loss) / sum(weights)`. All processes yield as often,
          those that have run out with weights of 0.

        Raises:
          LayoutError: rows that the mesh axes do not divide.
          ValueError: a batch of more rows; arrays of one batch with different numbers of rows.

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
        """Returns the layout of what is made like the parameters: an optimizer's state, averages.

        An array is sharded like a parameter if its path ends in the parameter's path, and its shape
        is the same (padded or not) or lacks one dimension, as factored moments do. If the lacking
        dimension may be either of two of one size, neither is sharded. Scalars and arrays of one
        entry are replicated. `rules` decide for the arrays that they match: replicated weights may
        have moments that are sharded over the data's axis (ZeRO-1).

        Args:
          tree: arrays or shapes: `jax.eval_shape(optimizer.init, layout.shapes)`.
          rules: patterns of paths in `tree`, which take precedence over the parameters' rules.

        Returns:
          A `Layout` of the tree, whose arrays have the padding of their parameters.

        Raises:
          LayoutError: arrays that are like no parameter and match no rule; rules that match no
            array, or do not fit.

        Example:
          >>> layout = LayoutMap({"w": REPLICATED}, batch=P("dp")).layout(
          ...     {"w": jnp.ones((8, 4))}, make_mesh("dp=8"))
          >>> moments = {"mu": layout.shapes, "nu": layout.shapes}
          >>> state = layout.like(moments, LayoutMap({"(mu|nu)/w": ("dp", None)}))
          >>> state["mu/w"].local_shape, layout["w"].local_shape
          ((1, 4), (8, 4))

        Source: S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion
        parameter models" (2020).
        """
        return like(self, tree, rules)

    @public
    def table(self) -> Table:
        """Returns what each device holds, the arrays that are replicated most first."""
        return Table(self)

    @public
    def save(self, folder: PathLike, params: Any) -> None:
        """Writes a checkpoint with Orbax that any mesh can read: it has neither padding nor mesh.

        `restore` returns it bit by bit, also keys of `jax.random` and empty arrays. The folder
        appears when all is written. An interrupted save leaves a folder of another name, which the
        next save into this folder removes.

        Args:
          folder: a new one, which all processes see; each writes its own shards. It may be in a
            store that Orbax knows (`gs://bucket/folder`).
          params: arrays as they are on the mesh, of the layout's structure. Leaves that are no
            arrays are not stored: `restore` gives the layout's own.

        Raises:
          ImportError: without Orbax.
          LayoutError: arrays of other paths, shapes or dtypes, or outside of the mesh. Nothing is
            written then.
          ValueError: a folder that exists already.

        Cost: arrays that have padding are copied without it, whole along that dimension.

        Example:
          >>> layout = LayoutMap({"w": ("tp",)}).layout({"w": jnp.ones(8)}, make_mesh("tp=8"))
          >>> layout.save(folder, layout.place({"w": jnp.arange(8.0)}))
          >>> other = LayoutMap({"w": ("tp",)}).layout({"w": jnp.ones(8)}, make_mesh("tp=8"))
          >>> other.restore(folder)["w"]
          Array([0., 1., 2., 3., 4., 5., 6., 7.], dtype=float32)
        """
        self._need_devices()
        save(self, folder, params)

    @public
    def restore(self, folder: PathLike) -> Any:
        """Reads a checkpoint of `save` onto this mesh: each process the shards of its devices.

        Args:
          folder: as given to `save`, on any mesh and in any containers with the same paths; or a
            checkpoint that Orbax wrote without jaxpar, if its arrays are nested as in the layout.

        Returns:
          Global arrays with the shardings of the layout, padded; the layout's own leaves where it
          has no arrays.

        Raises:
          ImportError: without Orbax.
          LayoutError: arrays of other paths, shapes or dtypes: all of them.
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
        """Reads safetensors files onto this mesh: each process the parts that its devices hold.

        Args:
          files: a path, a folder, an index (`model.safetensors.index.json`), or several. A folder
            means the files that its index names, or all `*.safetensors` without an index. If
            several files have a tensor, the one that the index names is read.
          names: an array's name in the files: a function or a mapping from its path to a name or a
            list of names. Tensors of a list are stacked along a first dimension, those of a list of
            lists along two, layers and experts. None: the path, with dots for slashes.
          transposed: a pattern of the paths whose last two dimensions are swapped in the files, as
            in PyTorch's linear layers. Or a mapping from patterns to the order of a tensor's axes,
            as for `numpy.transpose`, or to None for the last two swapped:
            `{".*/conv/kernel": (2, 3, 1, 0)}` for PyTorch's [out, in, height, width]. Stacked
            dimensions do not count.
          unused: a pattern of the names of tensors that need not be read. Patterns match whole
            paths and names.

        Returns:
          Global arrays with the shardings of the layout, padded; the layout's own leaves where it
          has no arrays. 64-bit numbers become 32-bit unless `jax_enable_x64` is set.

        Raises:
          LayoutError: lists all tensors that are missing, that nothing reads, or that have another
            shape or dtype, in every layer.
          TypeError: files, names, patterns or orders of axes of another type.
          ValueError: no files, or damaged ones; a name in two files, or not where an index says; a
            path in `names` that the layout lacks; a pattern in `transposed` that matches no path,
            or axes that its arrays lack.

        Example:
          >>> from safetensors.numpy import save_file
          >>> weights = {f"h.{layer}.weight": np.full((4, 8), layer, "f") for layer in range(2)}
          >>> save_file(weights, f"{folder}.safetensors")
          >>> shapes = {"w": jax.ShapeDtypeStruct((2, 8, 4), "float32")}
          >>> layout = LayoutMap({"w": (None, "tp")}).layout(shapes, make_mesh("tp=8"))
          >>> names = {"w": ["h.0.weight", "h.1.weight"]}
          >>> w = layout.read_safetensors(f"{folder}.safetensors", names=names, transposed="w")["w"]
          >>> w.shape, w.sharding.spec == P(None, "tp")
          ((2, 8, 4), True)

        Source: the format is described at https://github.com/huggingface/safetensors.
        """
        self._need_devices()
        return self._noted(read_safetensors(self, files, names, transposed, unused))

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
        """Returns what a step costs on a described chip weight by weight, and what costs less.

        The step is compiled for the target with the layout, and played on a model of the chip. Each
        collective is listed under its weight. Then the step is compiled with other dimensions
        sharded, one rule after the other. First come lookup tables whose features are sharded over
        the batch's axis: they are sharded by rows instead. Then two dimensions of a rule are
        exchanged, first where it disagrees with the arrays that it is multiplied with (as a square
        weight the wrong way round does), then where it costs most. A change that makes the step
        faster is kept for the later ones. Last come plain maps: fully sharded, and whole.

        Args:
          step: called as `step(params, *args)` with global arrays; returns anything. Results whose
            paths end in a weight's and that have its shape, as new parameters and gradients do,
            keep the weight's layout. It must not name another mesh than the one in context
            (`jax.set_mesh`): a `jax.shard_map` in it leaves out its mesh.
          target: a name such as `"v5p:4x4x4"` of as many devices as the mesh has, or a
            `jaxpar.schedule.Target` with a mesh of the same axes.
          args: shapes or arrays. For states like the parameters, a `Layout` (`layout.like`). Others
            keep the spec of their sharding; without one they lie as the map's `batch` says.
          compiler_options: as for `jaxpar.schedule.compile_for`.
          tries: how many changes of rules are compiled at most; with 0 no plain maps either.
          from_layout: `step` is called with the layout on the target's mesh and returns the step:
            for steps that have its specs in them.

        Returns:
          `LayoutCosts`: printed, a table of the most exposed collectives, and what is flagged.

        Raises:
          TypeError: a step that is no function, a target that is neither.
          ValueError: a target whose mesh has other axes; arguments that their axes do not divide.
          Exception: what tracing or the compiler raises.

        Cost: `1 + tries` compilations of the step, and two of plain maps.

        Example:
          >>> def loss(params, x):
          ...     return jnp.sum(jnp.tanh(x @ params["up"]) @ params["down"])
          >>> shape = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
          >>> rules = LayoutMap({"up": ("tp", None), "down": ("tp", None)})  # up is exchanged
          >>> mesh = make_mesh("tp=4", devices=jax.devices()[:4])
          >>> layout = rules.layout({"up": shape, "down": shape}, mesh)
          >>> found = layout.explain(jax.grad(loss), "v5e:2x2", shape)
          >>> found.flagged[0].rule, found.flagged[0].after == P(None, "tp")
          ('up', True)
        """
        from jaxpar.tools.layouts.explain_layout import explain

        tries = check_whole("tries", tries, 0)
        return explain(self, step, target, args, compiler_options, tries, bool(from_layout))

    def on(self, mesh: AnyMesh) -> Layout:
        """Returns the same on another mesh of the same axes."""
        moved = [array and replace(array, mesh=mesh) for array in self._leaves]
        return Layout(self._rules, mesh, moved, self._tree, self._others, self.ruled)

    def changed(self, arrays: Mapping[str, ArrayLayout]) -> Layout:
        """Returns the same with other layouts of some arrays, by path."""
        leaves = [array and arrays.get(array.path, array) for array in self._leaves]
        return Layout(self._rules, self._mesh, leaves, self._tree, self._others, self.ruled)

    def tree_of(self, function: Callable[[ArrayLayout], Any]) -> Any:
        """Returns a pytree like the parameters of what a function makes of each array's layout."""
        found = [None if array is None else function(array) for array in self._leaves]
        return jax.tree.unflatten(self._tree, found)

    def filled(self, arrays: Mapping[str, Any]) -> Any:
        """Returns a pytree like the parameters of arrays by path, the other leaves as they are."""
        found = [
            other if array is None else arrays[array.path]
            for array, other in zip(self._leaves, self._others, strict=True)
        ]
        return jax.tree.unflatten(self._tree, found)

    def _noted(self, params: Any) -> Any:
        """The same arrays, whose padding is known while they are there."""
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
    """An array as a table, once for each dimension that is padded."""
    sizes = [{blocks.size, blocks.padded} for blocks in array.blocks]
    for dim, blocks in enumerate(array.blocks):
        widths = frozenset[int]().union(*sizes[:dim], *sizes[dim + 1 :])
        if blocks.size != blocks.padded and widths:
            at_the_end = blocks == PaddedDim.at_the_end(blocks.size, blocks.parts, blocks.block)
            yield PaddedTable(
                array.path, blocks.size, blocks.padded, widths, array.axes[dim], at_the_end
            )


def layout_of(rules: LayoutMap, params: Any, mesh: Any, *, strict: bool) -> Layout:
    """Fits the rules, or raises all that is wrong."""
    check_mesh(mesh)
    leaves, tree = arrays_of(params)
    shaped = [Shaped(*described(*found)) for found in leaves if found is not None]
    found, problems = fit(rules, shaped, mesh, strict=strict)
    if problems:
        raise LayoutError(called(), problems)
    fitted = iter(found)
    arrays = [None if leaf is None else next(fitted) for leaf in leaves]
    return Layout(rules, mesh, arrays, tree, jax.tree.leaves(params))
