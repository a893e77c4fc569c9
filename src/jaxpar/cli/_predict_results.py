"""What a prediction consists of, and its way through JSON from the process that made it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxpar.schedule import Event, Floor, Memory, Timeline

NOTE = (
    "This is the compiler's schedule played on a model of the chip with published figures, "
    "not a measurement."
)
GPU_NOTE = (
    "~ GPU times are rooflines: its compiler gives no times without a device. The order of "
    "transfers and matmuls is the compiler's own."
)


@dataclass(frozen=True)
class Request:
    """What one process compiles: programs for one target."""

    target: str
    mesh: str
    axis: str | None
    function: str | None  # module:function; None: the operations below
    args: tuple[str, ...]  # of the function, as on the command line
    ops: tuple[str, ...]
    shapes: tuple[str, ...]
    modes: tuple[str, ...]
    dtype: str
    wire_dtype: str | None
    grad: bool
    compiler_options: Mapping[str, Any]


@dataclass(frozen=True)
class Facts:
    """What all programs of a target have in common."""

    platform: str
    device_kind: str
    devices: int
    mesh: dict[str, int]
    ring: tuple[str, ...]  # empty for a function, which has rings of its own
    links_apart: int  # at most, from one device of a ring to the next
    chip: dict[str, Any]  # the figures used
    versions: dict[str, str]  # of jax and of the compiler


@dataclass(frozen=True)
class Prediction:
    """One program: its schedule, and the time that no schedule of it beats."""

    case: str  # operation and global shape, or the function
    mode: str  # empty for a function
    timeline: Timeline
    floor: Floor
    memory: Memory
    compile_seconds: float
    same_as: str | None  # the mode that compiles to the same program

    @property
    def exposed_share(self) -> float:
        """The share of the time in which the device waits for transfers."""
        return self.timeline.exposed / self.timeline.total if self.timeline.total else 0.0

    @property
    def ratio(self) -> float | None:
        """The time over the floor."""
        return self.timeline.total / self.floor.total if self.floor.total else None

    @property
    def order(self) -> str:
        """How many transfers the compiler runs beside other work, and beside matmuls."""
        transfers = self.timeline.transfers
        if not transfers:
            return "no transfers"
        behind = sum(not event.synchronous for event in transfers)
        if not behind:
            return f"{len(transfers)} synchronous"
        covered = sum(bool(event.covers) for event in transfers)
        return f"async {behind}/{len(transfers)}, over matmuls {covered}/{len(transfers)}"

    @property
    def label(self) -> str:
        """Case and mode."""
        return f"{self.case} {self.mode}".rstrip()


@dataclass(frozen=True)
class Failure:
    """A program, or with an empty label a target, that gave no prediction."""

    label: str
    reason: str
    usage: bool = False  # an argument that cannot be served, not something that went wrong


@dataclass
class Report:
    """All that came of one target."""

    target: str
    facts: Facts | None = None
    predictions: list[Prediction] = field(default_factory=list[Prediction])
    failures: list[Failure] = field(default_factory=list[Failure])

    @property
    def approximate(self) -> bool:
        """Whether times are rooflines."""
        return self.facts is not None and self.facts.platform != "tpu"


def prediction_record(prediction: Prediction) -> dict[str, Any]:
    """A prediction as JSON holds it."""
    return asdict(prediction)


def prediction_from(record: Mapping[str, Any]) -> Prediction:
    """The inverse of `prediction_record`."""
    played = dict(record["timeline"])
    played["events"] = tuple(
        Event(**_with_tuples(event, "covers")) for event in played.pop("events")
    )
    fields = dict(record)
    fields["timeline"] = Timeline(**_with_tuples(played, "loops_of_unknown_length"))
    fields["floor"] = Floor(**record["floor"])
    fields["memory"] = Memory(**record["memory"])
    return Prediction(**fields)


def facts_from(record: Mapping[str, Any]) -> Facts:
    """The inverse of `dataclasses.asdict` of `Facts`."""
    return Facts(**_with_tuples(record, "ring"))


def request_from(record: Mapping[str, Any]) -> Request:
    """The inverse of `dataclasses.asdict` of a request."""
    return Request(**_with_tuples(record, "args", "ops", "shapes", "modes"))


def _with_tuples(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """JSON has lists only."""
    fields = dict(record)
    for name in names:
        fields[name] = tuple(fields[name])
    return fields
