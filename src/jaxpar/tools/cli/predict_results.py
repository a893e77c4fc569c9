"""A prediction's parts, as words and JSON."""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import jaxpar
from jaxpar.schedule import Event, Floor, Memory, Timeline
from jaxpar.tools.toolkit_api import write_text

NOTE = (
    "Predicted, not measured: the compiler's schedule is simulated on a model of the chip. In the "
    "model, transfers take no memory bandwidth from compute, since no figures of that are "
    "published."
)
MEASURED_NOTE = "Measured by jax.profiler: one run of the program on one device."
GPU_NOTE = (
    "~ Some or all of these times are rooflines: neither published times nor the installed CUDA "
    "plugin's tables have this GPU, or these sizes and transfers."
)

Tick = Callable[[str], None]  # called with the label of the compiled program


@dataclass(frozen=True)
class Request:
    target: str
    mesh: str
    axis: str | None
    function: str | None  # module:function; None: the operations below
    args: tuple[str, ...]  # the function's arguments, as on the command line
    ops: tuple[str, ...]
    shapes: tuple[str, ...]
    modes: tuple[str, ...]
    dtype: str
    wire_dtype: str | None
    grad: bool
    bare: bool  # without the chip's compiler options
    compiler_options: Mapping[str, Any]  # besides the chip's
    figures: Literal["measured", "book"]
    cache: bool  # use programs that were compiled before


@dataclass(frozen=True)
class Facts:
    platform: str
    device_kind: str
    devices: int
    mesh: dict[str, int]
    ring: tuple[str, ...]  # empty for a function
    links_apart: int  # the most links between neighbours of a ring
    disjoint: bool  # whether the ring has several axes that are closed rings of links
    not_closed: tuple[str, ...]  # why some axes on a torus are no closed rings
    chip: dict[str, Any]  # the figures used
    compiler_options: dict[str, Any]
    versions: dict[str, str]  # of jax and of the compiler


@dataclass(frozen=True)
class Prediction:
    case: str  # operation and global shape, or the function
    mode: str  # empty for a function
    timeline: Timeline
    floor: Floor
    memory: Memory
    compile_seconds: float
    same_as: str | None  # the mode that compiles to the same program
    intervals: tuple[str, ...] = ()  # of errors, of all and of its parts
    pipeline: tuple[str, ...] = ()  # its bubble, and where another is faster

    @property
    def exposed_share(self) -> float:
        return self.timeline.exposed / self.timeline.total if self.timeline.total else 0.0

    @property
    def ratio(self) -> float | None:
        return self.timeline.total / self.floor.total if self.floor.total else None

    @property
    def order(self) -> str:
        """Returns how many transfers overlap, and with matmuls."""
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
        return f"{self.case} {self.mode}".rstrip()


@dataclass(frozen=True)
class Failure:
    # An empty label means that the target failed.
    label: str
    reason: str
    usage: bool = False  # whether an argument is wrong


@dataclass
class TargetResults:
    target: str
    facts: Facts | None = None
    predictions: list[Prediction] = field(default_factory=list[Prediction])
    failures: list[Failure] = field(default_factory=list[Failure])
    begun: str = ""  # the label of the program that is being compiled

    @property
    def approximate(self) -> bool:
        return any("roofline" in prediction.timeline.estimate for prediction in self.predictions)

    @property
    def measured(self) -> bool:
        return any(prediction.timeline.estimate == "measured" for prediction in self.predictions)

    def take(self, record: Mapping[str, Any], tick: Tick) -> None:
        [(kind, what)] = record.items()
        match kind:
            case "facts":
                self.facts = facts_from(what)
            case "begin":
                self.begun = what
            case "prediction":
                self.predictions.append(prediction_from(what))
                tick(f"{self.target} {self.predictions[-1].label}")
            case _:
                self.failures.append(Failure(**what))
                tick(f"{self.target} {self.failures[-1].label}")


def header(report: TargetResults, request: Request) -> str:
    parts = [report.target]
    if facts := report.facts:
        mesh = ",".join(f"{name}={size}" for name, size in facts.mesh.items())
        ring = f", ring {','.join(facts.ring)}" if facts.ring else ""
        parts += [f"{facts.devices} x {facts.device_kind}", f"mesh {mesh}{ring}"]
    parts.append(phase(request) if request.function else f"{request.dtype} {phase(request)}")
    parts += ["the vendor's figures"] if request.figures == "book" else []
    return " | ".join(parts)


def compiled_by(report: TargetResults) -> str:
    facts = report.facts
    versions = {} if facts is None else facts.versions
    text = ", ".join(f"{name} {text}" for name, text in versions.items())
    options = {} if facts is None else facts.compiler_options
    settings = " ".join(f"{name}={value}" for name, value in options.items())
    return f"{text}, with {settings or 'its default options'}"


def phase(request: Request) -> str:
    return "forward+backward" if request.grad else "forward"


def notes(report: TargetResults) -> list[str]:
    lines: list[str] = []
    facts = report.facts
    if facts:
        lines += _notes_of_links(facts, report.predictions)
    if facts and report.predictions:
        most = max(p.timeline.peak_bytes for p in report.predictions)
        if most > facts.chip["capacity"]:
            lines.append(
                f"{most / 2**30:.1f} GiB do not fit the {facts.chip['capacity'] / 2**30:.0f} GiB "
                "of HBM of a device"
            )
    lines += dict.fromkeys(line for p in report.predictions for line in p.pipeline)
    loops = {name for p in report.predictions for name in p.timeline.loops_of_unknown_length}
    if loops:
        lines.append(f"loops of unknown length count as one iteration: {', '.join(sorted(loops))}")
    return lines


def _notes_of_links(facts: Facts, predictions: Sequence[Prediction]) -> list[str]:
    lines: list[str] = []
    names = ",".join(facts.ring)
    others = {p.same_as or p.mode for p in predictions} - {"naive", "multi-ring"}
    if facts.links_apart > 1 and (others or not facts.disjoint):
        lines.append(
            f"neighbours on the ring {names} are up to {facts.links_apart} links apart on this "
            "mesh, so transfers share links"
            + ("; transfers of multi-ring do not" if facts.disjoint else "")
        )
    if facts.not_closed and {p.mode for p in predictions} & {"auto", "multi-ring"}:
        lines.append(
            f"over {names}, no rings have hops of one link and share no link: "
            f"{', '.join(facts.not_closed)}; auto does not choose multi-ring"
        )
    return lines


def write_json(path: str, reports: Sequence[TargetResults], requests: Sequence[Request]) -> None:
    record = {
        "jaxpar": jaxpar.__version__,
        "python": platform.python_version(),
        "note": NOTE,
        "targets": [_entry(*pair) for pair in zip(reports, requests, strict=True)],
    }
    write_text(path, json.dumps(record, indent=1) + "\n")


def _entry(report: TargetResults, request: Request) -> dict[str, Any]:
    return {
        "target": report.target,
        "request": asdict(request),
        "facts": None if report.facts is None else asdict(report.facts),
        "notes": notes(report),
        "predictions": [
            {
                "ratio": prediction.ratio,
                "exposed_share": prediction.exposed_share,
                "order": prediction.order,
                **asdict(prediction),
            }
            for prediction in report.predictions
        ],
        "failures": [asdict(failure) for failure in report.failures],
    }


def prediction_from(record: Mapping[str, Any]) -> Prediction:
    """Inverts `dataclasses.asdict` of a prediction."""
    played = dict(record["timeline"])
    played["events"] = tuple(
        Event(**_with_tuples(event, "covers")) for event in played.pop("events")
    )
    fields = _with_tuples(record, "intervals", "pipeline")
    names = ("loops_of_unknown_length", "kernels_of_unknown_cost", "runs")
    fields["timeline"] = Timeline(**_with_tuples(played, *names))
    fields["floor"] = Floor(**record["floor"])
    fields["memory"] = Memory(**record["memory"])
    return Prediction(**fields)


def facts_from(record: Mapping[str, Any]) -> Facts:
    return Facts(**_with_tuples(record, "ring", "not_closed"))


def request_from(record: Mapping[str, Any]) -> Request:
    return Request(**_with_tuples(record, "args", "ops", "shapes", "modes"))


def _with_tuples(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    fields = dict(record)
    for name in names:
        fields[name] = tuple(fields[name])
    return fields
