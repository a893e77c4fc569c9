"""How far matmuls are from float64 where what they gather travels in 8 bits.

    python benchmarks/low_bit [--parts drawn,rings] [--steps 300] [--json F]
    python benchmarks/low_bit --logs runs/*.json

Sixteen CPU devices compute matmuls of drawn operands, and of activations, weights and cotangents of
a language model that is trained first, in every wire dtype; and the tables of README.md are
rewritten. With --logs, it is that of training, of what `python benchmarks/language_model --log`
wrote.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path

import jax

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # whose folders are packages

from jaxpar.tools.cli.console import status_of
from language_model import curves
from low_bit import errors, trained, training
from low_bit.operands import Case, drawn
from tables import Table, made_by, rewrite, update
from workers import choose, require_positive, write_json

README = Path(__file__).with_name("README.md")
TRAINING = "training"
DEVICES, SIZES = 16, (4, 8, 16)
DTYPE = "bfloat16"  # of operands
PARTS = ("drawn", "rings", "trained")  # and sections of README.md
GRADIENT_WIRES = ("none", "int8", *errors.EXACT, "int8 / 128", "float8_e4m3fn")
EIGHT_BITS = ("int8", "float8_e4m3fn")
GRADIENTS = ("gather, dw", "scatter, dx", "scatter, dw")  # that something in 8 bits is part of


def forward_table(title: str, cases: Sequence[Case], dtype: str) -> Table:
    """A row for each case: how large the largest numbers are, and the error in each wire dtype."""
    rows = [
        [
            case.name,
            f"{case.largest:.1f}",
            *(_cell(errors.forward(case, dtype, wire)) for wire in errors.WIRES),
        ]
        for case in cases
    ]
    return Table([f"{title}, {dtype}", "largest / rms", *errors.WIRES], rows)


def gradient_table(
    title: str, cases: Sequence[Case], dtype: str, of: Sequence[str] = GRADIENTS
) -> Table:
    """Rows for each case: the gradients that something in 8 bits is part of.

    Raises:
      AssertionError: one that no such thing is part of differs between wires.
    """
    rows: list[list[str]] = []
    for case in cases:
        found = {wire: errors.gradients(case, dtype, wire) for wire in GRADIENT_WIRES}
        untouched = {wire: gradients["gather, dx"] for wire, gradients in found.items()}
        _require_alike(untouched, f"dx of a gather, {case.name}, {dtype}")
        rows += [
            [f"{case.name}: {name}", *(_cell(found[wire][name]) for wire in GRADIENT_WIRES)]
            for name in of
        ]
    return Table([f"{title}, {dtype}", *GRADIENT_WIRES], rows)


def extremes(table: Table) -> Table:
    """The rows with the least and the largest rms error in each column of 8 bits."""
    kept: list[list[str]] = []
    for column in range(table.titles.index("int8"), len(table.titles)):
        rms = [float(row[column].split()[0]) for row in table.rows]
        for value in (min(rms), max(rms)):
            if not any(float(row[column].split()[0]) == value for row in kept):
                kept.append(table.rows[rms.index(value)])
    return replace(table, rows=[row for row in table.rows if row in kept])


def check_rings(case: Case, dtype: str, sizes: Sequence[int] = SIZES) -> None:
    """Compares the errors of one case over rings of all sizes, in all modes.

    Raises:
      AssertionError: a size or a mode rounds what it gathers otherwise.
    """
    rings = list(product(sizes, errors.MODES))
    for wire in EIGHT_BITS:
        found = {f"{ring}": errors.forward(case, dtype, wire, *ring) for ring in rings}
        _require_alike(found, f"{case.name}, {wire}, {dtype}")
    gradients = {f"{ring}": errors.gradients(case, dtype, "int8", *ring) for ring in rings}
    for of in GRADIENTS:
        alike = {ring: found[of] for ring, found in gradients.items()}
        _require_alike(alike, f"{of}, {dtype}")


def step_table(model: trained.Trained) -> Table:
    """A row for each dtype and wire: a step of the trained model, next to float32 as it is."""
    kinds = [*product(["float32"], EIGHT_BITS), *product(["bfloat16"], ("none", *EIGHT_BITS))]
    rows = [
        [f"{dtype}, {wire}", f"{loss:+.1e}", f"{gradient:.2g}"]
        for (dtype, wire), (loss, gradient) in zip(kinds, trained.steps(model, kinds), strict=True)
    ]
    return Table(["step of the trained model", "held-out loss", "gradient"], rows)


def _require_alike(found: dict[str, errors.Error], what: str) -> None:
    """Raises unless all errors, as rms, are within 2% of each other."""
    rms = {name: error[0] for name, error in found.items()}
    if max(rms.values()) > 1.02 * min(rms.values()):
        raise AssertionError(f"{what}: errors differ, {rms}")


def _cell(error: errors.Error) -> str:
    return f"{error[0]:.2g} ({error[1]:.2g})"


def sums_table(case: Case, dtype: str, sizes: Sequence[int] = SIZES) -> Table:
    """A row for each size of a ring: errors of sums, scattered by a collective or by a ring."""
    wires = {"": "none", "int8, ": "int8, sums", "float8_e4m3fn, ": "float8_e4m3fn, sums"}
    kinds = [(text, wire, mode) for text, wire in wires.items() for mode in errors.MODES[::2]]
    rows = [
        [
            str(size),
            *(_cell(errors.scattered(case, dtype, wire, size, mode)) for _, wire, mode in kinds),
        ]
        for size in sizes
    ]
    return Table(
        [f"sums over a ring, {dtype}", *(f"{text}{mode}" for text, _, mode in kinds)], rows
    )


def tables_of(part: str, steps: int) -> list[Table]:
    """Measures, and returns a table after the other."""
    if part == "drawn":
        cases = drawn()
        return [
            forward_table(part, cases, DTYPE),
            gradient_table(part, [cases[0], cases[-1]], DTYPE),
        ]
    if part == "rings":
        case = drawn()[0]
        for dtype in (DTYPE, "float32"):
            check_rings(case, dtype)
        return [sums_table(case, DTYPE)]
    model = trained.train(training=replace(trained.TRAINING, steps=steps))
    of = trained.cases(model)
    inputs, weights = (
        extremes(forward_table(part, of[kind], DTYPE)) for kind in ("activations", "weights")
    )
    return [
        replace(inputs, rows=inputs.rows + weights.rows),
        extremes(gradient_table("cotangents", of["cotangents"], DTYPE, GRADIENTS[1:])),
        step_table(model),
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the arguments, or exits with what is wrong with them."""
    parser = argparse.ArgumentParser(prog="low_bit", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", help=f"some of {','.join(PARTS)} (default: all)")
    parser.add_argument("--steps", type=int, default=300, help="of training (default: %(default)s)")
    parser.add_argument("--logs", nargs="+", metavar="F", help="make the table of these runs alone")
    parser.add_argument("--json", metavar="F", help="write all that was found to this file")
    args = parser.parse_args(argv)
    require_positive(parser, args, "steps")
    args.parts = choose(parser, "--parts", args.parts, {part: part for part in PARTS})
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    return status_of("low_bit", partial(_main, parse(argv)))


def _main(args: argparse.Namespace) -> int:
    for section in (*PARTS, TRAINING):
        rewrite(README.read_text(), section, "")  # before minutes of work: it has the markers
    if args.logs:
        shown = training.table([curves.read(path) for path in args.logs])
        shown.print()
        update(README, TRAINING, shown.markdown())
        return 0
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    found: dict[str, list[Table]] = {}
    for part in args.parts:
        found[part] = tables_of(part, args.steps)
        for table in found[part]:
            table.print(width=140)
        line = made_by(f"python benchmarks/low_bit --parts {part}")
        update(README, part, "\n\n".join([line, *(table.markdown() for table in found[part])]))
    write_json(args.json, {part: [asdict(table) for table in of] for part, of in found.items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
