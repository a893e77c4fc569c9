"""How training ended, of the logs that `python benchmarks/language_model --log` writes."""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from jaxpar.tools.cli.console import UsageError
from language_model.wire import describe, from_json
from tables import Table

LAST = 20  # steps, of whose losses the mean is taken


def table(runs: Sequence[dict[str, Any]]) -> Table:
    """A row for each dtype and each way to gather: means over seeds, and what differs from none.

    Differences are those of runs of one seed, relative: their mean, and the least and the largest.

    Raises:
      UsageError: a run without its like that gathers exactly.
    """
    by_kind: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for run in runs:
        wire = describe(from_json(run.get("wire_dtype"))).removeprefix(", ") or "none"
        seeds = by_kind.setdefault((run["model"]["dtype"], wire), {})
        seeds[run["training"]["seed"]] = run
    rows: list[list[str]] = []
    for (dtype, wire), seeds in sorted(by_kind.items(), key=_exact_first):
        plain = by_kind.get((dtype, "none"), {})
        missing = [seed for seed in seeds if seed not in plain]
        if missing:
            raise UsageError(f"--logs have no exact {dtype} run of seed {missing[0]}; add it")
        row = [f"{dtype}, {wire.removeprefix('gathers in ')}", str(len(seeds))]
        for end in (_training, _held_out):
            values = [end(run) for run in seeds.values()]
            spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
            apart = [end(run) / end(plain[seed]) - 1 for seed, run in seeds.items()]
            row += [f"{mean(values):.4f}{spread}", "" if wire == "none" else _range(apart)]
        rows.append(row)
    titles = ["gathers", "seeds", f"last {LAST} steps", "from none", "held out", "from none"]
    return Table(titles, rows)


def _exact_first(item: tuple[tuple[str, str], Any]) -> tuple[bool, bool, str]:
    """The order of rows: float32 before others, and what gathers exactly before what does not."""
    (dtype, wire), _ = item
    return dtype != "float32", wire != "none", wire


def _training(run: dict[str, Any]) -> float:
    return mean(run["losses"][-LAST:])


def _held_out(run: dict[str, Any]) -> float:
    return run["validation"]


def _range(apart: Sequence[float]) -> str:
    ends = f" ({min(apart):+.2%} to {max(apart):+.2%})" if len(apart) > 1 else ""
    return f"{mean(apart):+.2%}{ends}"
