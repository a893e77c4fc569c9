"""What was measured on the slow network, as a table, as JSON and as a picture."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import jax

# The Okabe-Ito palette, which colour-blind readers tell apart; greys are controls.
COLOURS = {
    "naive": "0.8",
    "unidirectional": "#0072B2",
    "bidirectional": "#56B4E9",
    "serial": "0.35",
    "memory scheduler": "0.6",
}
CONTROLS = "naive", "serial", "fsdp"  # what others are as fast as, so many times


@dataclass(frozen=True)
class Run:
    """What every row has in common."""

    rate: str
    shape: str
    processes: int
    rounds: int

    def __str__(self) -> str:
        rate = "no limit" if self.rate == "none" else self.rate
        return (
            f"{self.processes} CPU processes, {rate}, {self.shape} float32, "
            f"medians of {self.rounds} rounds, jax {jax.__version__}"
        )


@dataclass(frozen=True)
class Row:
    """One variant of one case. Milliseconds are of one process and call, from the trace."""

    case: str
    variant: str
    seconds: list[float]  # one a round
    transfer_ms: float
    matmul_ms: float
    both_ms: float

    @property
    def covered(self) -> float:
        """The share of transfer time during which a matmul ran."""
        return self.both_ms / self.transfer_ms if self.transfer_ms else 0.0


def print_table(rows: Sequence[Row]) -> None:
    """Prints one case: a line a variant."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column(rows[0].case, width=28)
    controls = list(speeds(rows, rows[0]))
    titles = {"ms": 6, **{f"x {name}": 8 for name in controls}}
    titles |= {"covered": 7, "transfers": 9, "matmuls": 7}
    for title, width in titles.items():
        table.add_column(title, justify="right", width=width)
    for row in rows:
        table.add_row(
            f"  {row.variant}",
            f"{median(row.seconds) * 1e3:.0f}",
            *(f"{speed:.2f}" for speed in speeds(rows, row).values()),
            f"{row.covered:.0%}",
            f"{row.transfer_ms:.0f}",
            f"{row.matmul_ms:.0f}",
        )
    Console(width=88).print(table, highlight=False)


def speeds(rows: Sequence[Row], row: Row) -> dict[str, float]:
    """How many times as fast as each control: the median of the ratios round by round."""
    controls = [one for one in rows if one.case == row.case and one.variant in CONTROLS]
    return {
        one.variant: median(a / b for a, b in zip(one.seconds, row.seconds, strict=True))
        for one in controls
    }


def write_json(path: str, run: Run, rows: Sequence[Row]) -> None:
    """Writes what was measured, and with what."""
    record = {
        "jax": jax.__version__,
        **asdict(run),
        "rows": [
            asdict(row) | {"speeds": speeds(rows, row), "covered": row.covered} for row in rows
        ],
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def write_plot(path: str, run: Run, rows: Sequence[Row]) -> None:
    """Draws a group of bars a matmul: speed over naive, and the share of transfers covered."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.variant in COLOURS]
    cases = list(dict.fromkeys(row.case for row in rows))
    variants = list(dict.fromkeys(row.variant for row in rows))
    figure = Figure(figsize=(11, 6.4), layout="constrained", dpi=200)
    speed, share = figure.subplots(2, 1, sharex=True)
    width = 0.84 / len(variants)
    for number, variant in enumerate(variants):
        chosen = [row for row in rows if row.variant == variant]
        places = [n + (number - (len(variants) - 1) / 2) * width for n in range(len(chosen))]
        for panel, values, text in (
            (speed, [speeds(rows, row)["naive"] for row in chosen], "{:.2f}"),
            (share, [100 * row.covered for row in chosen], "{:.0f}"),
        ):
            bars = panel.bar(places, values, width * 0.94, color=COLOURS[variant], label=variant)
            panel.bar_label(bars, [text.format(v) for v in values], fontsize=7, padding=1)
    speed.axhline(1, color="0.3", linewidth=1, linestyle="--")
    speed.set_title("times as fast as naive", fontsize=10, loc="left")
    share.set_title("share of transfer time covered by matmuls, %", fontsize=10, loc="left")
    share.set_ylim(0, 108)
    share.set_xticks(range(len(cases)), [c.replace(", ", "\n") for c in cases], fontsize=9)
    for panel in (speed, share):
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
    figure.legend(
        *speed.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(variants),
        fontsize=9,
        frameon=False,
    )
    figure.suptitle(str(run), fontsize=9, x=0.01, ha="left")
    figure.savefig(path)
