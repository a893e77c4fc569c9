"""What was found, as tables for the terminal and for README.md."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

from jaxpar.tools.cli.ops import OPS
from overlap.peers import PEERS
from overlap.worker import GPUS, Case
from tables import Table, made_by

NAMES = {
    "naive": "naive",
    "chunked-4": "4 chunks",
    "chunked-8": "8 chunks",
    "unidirectional": "one way",
    "bidirectional": "both ways",
}


@dataclass(frozen=True)
class Result:
    """A case with what was found: times over the floor, None where something failed."""

    case: Case
    found: dict[str, Any]

    @property
    def label(self) -> str:
        """What the case is, without remarks."""
        name = self.case.name.partition(", permutes")[0]
        return f"{name}, {self.case.op} (fallback)" if self.case.fallback else name

    def record(self, kind: str, variant: str) -> dict[str, Any]:
        """What was found of a peer or mode, empty where it failed."""
        for record in self.found["records"]:
            if (record["kind"], record["variant"]) == (kind, variant) and "total" in record:
                return record
        return {}

    def ratio(self, kind: str, variant: str) -> float | None:
        """Time over floor."""
        record = self.record(kind, variant)
        return record["total"] / self.found["floor"] if record else None

    @property
    def best_peer(self) -> float | None:
        """The least time over floor of any peer."""
        return min((x for peer in PEERS if (x := self.ratio("peer", peer))), default=None)

    @property
    def best_mode(self) -> float | None:
        """The least time over floor of any mode that is chosen by name."""
        return min((x for mode in NAMES if (x := self.ratio("mode", mode))), default=None)


def results(found: Sequence[dict[str, Any]]) -> list[Result]:
    """The cases among what was found."""
    return [Result(Case(**each["case"]), each) for each in found if "case" in each]


def main_table(cases: Sequence[Result]) -> Table:
    """A line a case, then the geometric mean and the worst of those that are not a fallback."""
    peers = [peer for peer in PEERS if peer != "guide one way"]
    titles = ["case", "floor, ms", *peers, "jaxpar both ways", "jaxpar auto"]
    titles += ["auto / best peer", "auto / best mode"]
    columns = [("peer", peer) for peer in peers] + [("mode", "bidirectional"), ("mode", "auto")]
    ratios = [[each.ratio(*column) for column in columns] for each in cases]
    over = [_over(each.ratio("mode", "auto"), each.best_peer) for each in cases]
    of_best = [_over(each.ratio("mode", "auto"), each.best_mode) for each in cases]
    rows = []
    for number, each in enumerate(cases):
        cells = [_number(x) for x in ratios[number]]
        cells[-1] = f"**{cells[-1]}**{_pick(each.record('mode', 'auto'))}"
        floor = each.found.get("floor")
        name = f"{each.label}; {each.case.chip}"
        rest = [_number(over[number]), _number(of_best[number])]
        rows.append([name, f"{floor * 1e3:.3f}" if floor else "-", *cells, *rest])
    counted = [n for n, each in enumerate(cases) if not each.case.fallback]
    for title, reduce in (("geometric mean, no fallback", geometric_mean), ("worst", max)):
        lines = zip(*(ratios[n] for n in counted), strict=True)
        cells = [_number(reduce([x for x in line if x] or [0.0]) or None) for line in lines]
        pair = [[column[n] for n in counted if column[n]] for column in (over, of_best)]
        rest = [_number(reduce(x) if x else None) for x in pair]
        if counted:
            rows.append([f"**{title}**", "", *cells, *rest])
    return Table(titles, rows)


def gpu_table(found: Sequence[dict[str, Any]]) -> Table:
    """The transfers of every operation on GPUs; where these differ, of one after the other."""
    hosts = [
        {(r["op"], r["grad"]): r for r in each["records"] if "total" in r}
        for chip in GPUS
        for each in found
        if each.get("gpu") == chip
    ]

    def cell(op: str, grad: bool) -> str:
        return ", ".join(dict.fromkeys(_transfers(records.get((op, grad))) for records in hosts))

    rows = [[op, cell(op, False), cell(op, True)] for op in OPS]
    return Table(["op", "forward", "forward + backward"], rows if hosts else [])


def failures(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for everything that has no number."""
    for each in found:
        if "failure" in each:
            yield f"{each['label']}: {each['failure']}"
        for record in each["records"]:
            if "failure" in record:
                what = " ".join(str(record[k]) for k in ("kind", "op") if k in record)
                yield f"{each['label']}: {what} {record['variant']}: {record['failure']}"


def tables(found: Sequence[dict[str, Any]]) -> str:
    """All that stands between the markers of README.md."""
    parts = [
        made_by("python benchmarks/overlap", "libtpu", "jax-cuda13-pjrt"),
        "Time over floor:\n\n" + main_table(results(found)).markdown(),
        f'{" and ".join(GPUS)}, `mode="auto"`, bfloat16, M x K x N = 8192x8192x28672, default '
        "flags and wire. Transfers: asynchronous / of these, around at least one matmul / "
        "synchronous:"
        "\n\n" + gpu_table(found).markdown(),
    ]
    if missing := list(failures(found)):
        parts.append("\n".join(f"- {line}" for line in missing))
    return "\n\n".join(parts)


def print_tables(found: Sequence[dict[str, Any]]) -> None:
    """Prints the tables, and what failed."""
    cases = results(found)
    for table in (main_table(cases), gpu_table(found)):
        table.print(width=180)
    for line in failures(found):
        print(f"- {line}")


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean; 0 where one is."""
    return 0.0 if min(values) <= 0 else exp(sum(map(log, values)) / len(values))


def _over(value: float | None, other: float | None) -> float | None:
    return value / other if value and other else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _pick(record: dict[str, Any]) -> str:
    same = record.get("same_as", "auto")
    return f" ({NAMES[same]})" if same in NAMES else ""


def _transfers(record: dict[str, Any] | None) -> str:
    if record is None:
        return "-"
    counts = (record[kind] for kind in ("asynchronous", "bracketing", "synchronous"))
    return f"{' / '.join(map(str, counts))}{_pick(record)}"
