"""Holds every prediction against a public measurement, and renews the intervals that are printed.

    python benchmarks/accuracy

Compiles some 500 small programs for chips that need not be there (20 minutes, then from a cache),
and writes the tables and the picture of `README.md` and the intervals of `jaxpar.tools.accuracy`.
It needs both compilers: `pip install 'jaxpar[bench,tpu,gpu]'`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # whose folders are packages

import numpy as np

from accuracy import calibrate
from accuracy.calibrate import LEFT_OUT, Calibration, errors_of, left_out
from accuracy.plot import draw
from jaxpar.tools.accuracy import interval
from jaxpar.tools.accuracy.interval import WHOLE
from jaxpar.tools.accuracy.measurement import measurements
from jaxpar.tools.accuracy.validate import TITLES, table
from jaxpar.tools.cli.predict_validation import validated
from steps.step import errors as errors_of_steps
from tables import Table, update

README = Path(__file__).with_name("README.md")
INTERVALS = Path(interval.__file__).with_name("intervals.json")
SECTION, COVERAGE = "classes", "coverage"
SOME = 10  # of the published times of GPUs, one in so many is predicted from the others


def coverage(made: Calibration) -> Table:
    """How many errors lie in intervals that are made without them, or without their source."""
    rows: list[list[str]] = []
    table = made.table()
    for platform in ("TPU", "GPU"):
        for is_large in (False, True):
            mine = [
                number
                for number, one in enumerate(made.errors)
                if (one.work.platform, one.work.is_large) == (platform, is_large)
                and one.work.kind != WHOLE
                and (one.source != LEFT_OUT or number % SOME == 0)
            ]
            shares = [float(np.mean(made.inside(mine, without))) for without in ("row", "source")]
            known = [table[made.errors[number].work.classes[-1]] for number in mine]
            width = float(np.median([one.high - one.low for one in known]))
            size = f"{platform}, {'20 us and more' if is_large else 'below 20 us'}"
            cells = [f"{shares[0]:.0%}", f"{shares[1]:.0%}", f"{100 * width:.0f}"]
            rows.append([size, str(len(mine)), *cells])
    titles = ["operations", "errors", "inside", "inside, without the source", "width, points"]
    return Table(titles, rows)


def main() -> int:
    """Writes the tables and the intervals."""
    chips = {one.chip for one in measurements()}
    found, failed = validated(chips, lambda name: print(name, file=sys.stderr))
    for name, reason in failed.items():
        print(f"{name}: {reason}", file=sys.stderr)
    if failed:
        return 1
    made = Calibration([*errors_of(found), *left_out(), *errors_of_steps().values()])
    INTERVALS.write_text(calibrate.text_of(made.table()))
    found, _ = validated(chips, lambda name: None)  # with these intervals
    for section, rows in ((SECTION, Table(TITLES, table(found))), (COVERAGE, coverage(made))):
        rows.print()
        update(README, section, rows.markdown())
    draw(found, README.with_name("accuracy.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
