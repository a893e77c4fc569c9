"""Holds every prediction against a public measurement, and renews the bands that pages print.

    python benchmarks/accuracy

Compiles some 450 small programs for chips that need not be there (20 minutes, then from a cache),
and writes the table of `README.md` and the bands of `jaxpar.tools.accuracy`. Both compilers are
needed: `pip install 'jaxpar[tpu,gpu]'`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # whose folders are packages

from jaxpar.tools.accuracy import band
from jaxpar.tools.accuracy.measurement import measurements
from jaxpar.tools.accuracy.validate import TITLES, bands_from, table
from jaxpar.tools.cli.predict_validation import validated
from tables import Table, update

README = Path(__file__).with_name("README.md")
BANDS = Path(band.__file__).with_name("bands.json")
SECTION = "classes"


def main() -> int:
    """Writes the table and the bands."""
    chips = {one.chip for one in measurements()}
    found, failed = validated(chips, lambda name: print(name, file=sys.stderr))
    rows = Table(TITLES, table(found))
    rows.print()
    for name, reason in failed.items():
        print(f"{name}: {reason}", file=sys.stderr)
    if failed:
        return 1
    update(README, SECTION, rows.markdown())
    BANDS.write_text(band.text_of(bands_from(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
