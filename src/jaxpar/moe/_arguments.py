"""What `moe_layer` checks of its arguments, and the axes that it works over."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxpar._axis import Ring, bind
from jaxpar._calls import type_error, value_error
from jaxpar._types import AxisLike
from jaxpar.layers._checks import check_number, check_sharded, check_whole
from jaxpar.moe._mlp import Experts

DISPATCHES = ("ragged", "all_gather", "auto")


@dataclass(frozen=True)
class Axes:
    """The rings of a layer: over experts, their hidden features, and shards of their weights."""

    expert: Ring
    data: tuple[str, ...]
    tensor: Ring | None
    sharded: bool  # tokens are sharded over `tensor` too
    fsdp: Ring | None

    @property
    def gathered_tensor(self) -> Ring | None:
        """The ring over which tokens are gathered where they meet experts."""
        return self.tensor if self.sharded else None

    @property
    def summed_tensor(self) -> Ring | None:
        """The ring over which tokens are replicated, and results summed."""
        return None if self.sharded else self.tensor

    @property
    def counted(self) -> tuple[str, ...]:
        """All axes over which tokens are sharded."""
        tensor = self.gathered_tensor
        return self.expert.names + self.data + (tensor.names if tensor else ())


def bind_axes(
    axis: AxisLike,
    data_axis: AxisLike,
    tp_axis: AxisLike | None,
    sequence_dim: Any,
    fsdp_axis: AxisLike | None,
) -> Axes:
    """Returns the rings, or raises where one cannot be had here or two share an axis."""
    rings = {"axis": bind(axis)}
    for key, name in (("data_axis", data_axis), ("tp_axis", tp_axis)):
        if name is not None and name != ():
            rings[key] = bind(name)
    fsdp = None if fsdp_axis is None else bind(fsdp_axis)
    # Tokens are often sharded over the axes of fsdp, which are data axes then.
    weights = {key: ring for key, ring in rings.items() if key != "data_axis"}
    for several in (rings, weights | ({"fsdp_axis": fsdp} if fsdp else {})):
        seen: dict[str, str] = {}
        for key, ring in several.items():
            for name in ring.names:
                if name in seen:
                    raise value_error(
                        f"{seen[name]} and {key} both have the axis {name!r}; each "
                        "divides something else, so name different axes"
                    )
                seen[name] = key
    if sequence_dim is not None:
        check_whole("sequence_dim", sequence_dim)
    data = rings.get("data_axis")
    return Axes(
        rings["axis"],
        data.names if data else (),
        rings.get("tp_axis"),
        sequence_dim is not None,
        fsdp,
    )


def check_tokens(tokens: Array, router: Array, mask: Array | None) -> None:
    """Raises unless the router has a row for each feature, and the mask a bit for each token."""
    if tokens.ndim < 2:
        raise value_error(
            f"tokens must be [..., d], got local shape {tokens.shape}; give a single "
            "token as tokens[None]"
        )
    if not jnp.issubdtype(tokens.dtype, jnp.floating):
        raise type_error(f"tokens must be floats, got {tokens.dtype}; embed them first")
    if router.ndim != 2 or router.shape[0] != tokens.shape[-1]:
        raise value_error(
            f"router has local shape {router.shape}, but must be [d, E] = "
            f"[{tokens.shape[-1]}, E] for tokens of local shape {tokens.shape}: a row for each "
            "feature, a column for each expert of all devices"
        )
    if mask is not None and (mask.shape != tokens.shape[:-1] or mask.dtype != jnp.bool_):
        raise value_error(
            f"mask is {mask.dtype}{list(mask.shape)}, but must be "
            f"bool{list(tokens.shape[:-1])}, one for each of the tokens of local shape "
            f"{tokens.shape}"
        )


def check_experts(
    tokens: Array,
    router: Array,
    experts: Experts,
    shared: Experts | None,
    axes: Axes,
) -> None:
    """Raises unless the device has its share of the experts, for tokens of this width."""
    count, ring = router.shape[1], axes.expert
    share = -(-count // ring.size)
    for name, w in experts._asdict().items():
        if w is None:
            continue
        rank = 2 if name.endswith("bias") else 3
        if w.ndim != rank or w.shape[0] != share:
            raise value_error(
                f"experts.{name} has local shape {w.shape}, but needs {rank} "
                f"dimensions, the first of {share}: {count} experts (columns of router) over "
                f"{ring} are ceil({count} / {ring.size}) = {share} a device; append missing ones "
                f"with pad_experts(experts, {ring.size}), and shard along the first dimension"
            )
        check_sharded(f"experts.{name}", w, "experts", ring)
    of_shared = {} if shared is None else shared._asdict()
    for kind, tree in (("experts", experts._asdict()), ("shared", of_shared)):
        for name, w in tree.items():
            if w is not None and w.dtype != tokens.dtype:
                raise type_error(
                    f"tokens are {tokens.dtype}{list(tokens.shape)} and {kind}.{name} "
                    f"{w.dtype}{list(w.shape)}; cast one of them with .astype"
                )
    for name, w in of_shared.items():
        rank = 1 if name.endswith("bias") else 2
        if w is not None and w.ndim != rank:
            raise value_error(
                f"shared.{name} has local shape {w.shape}, but must have {rank} "
                "dimensions; shared experts are one wider expert: join them along their hidden "
                "features"
            )


def check_widths(width: int, experts: Experts, kind: str) -> None:
    """Raises unless whole (gathered) experts take and return rows of `width`."""
    up, down = experts.up.shape, experts.down.shape
    if up[-2] != width or down[-1] != width or up[-1] != down[-2]:
        raise value_error(
            f"{kind}.up has local shape {up} and {kind}.down {down} (gathered over "
            f"fsdp_axis), but must end in [d, f] and [f, d] with d = {width}, the width of "
            "the tokens"
        )
    hidden = up[-1]
    wanted = {
        "gate": up[-2:],
        "up_bias": (hidden,),
        "gate_bias": (hidden,),
        "down_bias": (width,),
    }
    for name, shape in wanted.items():
        w = getattr(experts, name)
        if w is not None and w.shape[-len(shape) :] != shape:
            raise value_error(
                f"{kind}.{name} has local shape {w.shape}, but must end in {shape} to "
                f"fit {kind}.up of {up}"
            )


def check_options(
    tokens: int, dispatch: Any, chunks: Any, buffer_factor: Any
) -> tuple[int, float | None]:
    """Returns the number of chunks and the factor, or raises."""
    if not isinstance(dispatch, str) or dispatch not in DISPATCHES:
        raise value_error(f"dispatch must be one of {', '.join(DISPATCHES)}, got {dispatch!r}")
    chunks = check_whole("chunks", chunks, 1, max(1, tokens), "the number of local tokens")
    if buffer_factor is None:
        return chunks, None
    return chunks, check_number("buffer_factor", buffer_factor)


def fsdp_dims(experts: Experts, dim: Any) -> Experts:
    """Returns the dimension along which each array is gathered: `dim` counts that of experts."""
    if dim not in (1, 2):
        raise value_error(f"fsdp_dim={dim!r} must be 1 or 2, of matrices [e, d, f]")
    matrix = dim - 3

    def of(name: str, w: Array | None) -> int | None:
        return None if w is None else w.ndim - 1 if name.endswith("bias") else w.ndim + matrix

    return Experts(**{name: of(name, w) for name, w in experts._asdict().items()})  # type: ignore
