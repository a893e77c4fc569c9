"""What a run is: the model, and how it is trained. Neither knows of any mesh."""

from dataclasses import dataclass

from jaxpar.tools.cli.console import UsageError

DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class Model:
    """A decoder transformer's sizes, all of them logical: no padding is in them."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int  # of the gated MLP, or of each expert
    tied: bool = True  # one table for the embedding and for the logits
    dtype: str = "float32"  # of the arithmetic
    rotary_base: float = 10000.0
    experts: int = 0  # of each layer, in the place of its MLP; 0: none
    top_k: int = 2  # experts of each token
    capacity_factor: float | None = None  # None: no token is dropped

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "kv_heads", "head_size", "hidden"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise UsageError(
                f"{self.heads} heads do not divide among {self.kv_heads} key-value heads; "
                "choose a multiple"
            )
        if self.experts < 0:
            raise UsageError(f"experts must not be negative, got {self.experts}")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise UsageError(
                f"top_k must be from 1 to the {self.experts} experts, got {self.top_k}"
            )
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise UsageError(f"capacity_factor must be positive, got {self.capacity_factor}")
        if self.head_size % 2:
            raise UsageError(
                f"rotary positions turn pairs of features, and the head size {self.head_size} is "
                "odd; choose an even one"
            )
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype {self.dtype!r} is not among {', '.join(DTYPES)}")

    @property
    def weight_dtype(self) -> str:
        """The dtype in which weights are kept, and updated."""
        return "float64" if self.dtype == "float64" else "float32"


@dataclass(frozen=True)
class Training:
    """What is done to the model. Two runs of equal `Model` and `Training` have one loss curve."""

    steps: int = 200
    batch: int = 16  # sequences a step, on all devices together
    sequence: int = 256
    learning_rate: float = 3e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0  # of the gradient's global norm
    seed: int = 0
    validation_batches: int = 4
    balance_loss: float = 0.01  # coefficients of the losses of experts' routers
    router_z_loss: float = 0.001

    def __post_init__(self) -> None:
        for name in ("batch", "sequence"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            *("steps", "warmup", "weight_decay", "seed", "validation_batches"),
            *("balance_loss", "router_z_loss"),
        ):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be positive, got {getattr(self, name)}")
