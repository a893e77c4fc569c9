"""Predictions as JSON: all that was asked, used and found."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jaxpar
from jaxpar.predict._results import NOTE, Report, Request, prediction_record
from jaxpar.predict._table import notes


def write_json(path: str, reports: Sequence[Report], requests: Sequence[Request]) -> None:
    """Writes one object, with an entry a target."""
    record = {
        "jaxpar": jaxpar.__version__,
        "python": platform.python_version(),
        "note": NOTE,
        "targets": [_entry(*pair) for pair in zip(reports, requests, strict=True)],
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def _entry(report: Report, request: Request) -> dict[str, Any]:
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
                **prediction_record(prediction),
            }
            for prediction in report.predictions
        ],
        "failures": [asdict(failure) for failure in report.failures],
    }
