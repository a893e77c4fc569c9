"""An explanation as an offline page."""

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jaxpar.tools.explain.compare_instructions import alone, side, totals
from jaxpar.tools.explain.explanation_text import elsewhere, gain, heading, place, title, verdict
from jaxpar.tools.explain.verdict import CAUSES
from jaxpar.tools.toolkit_api import size_text as size
from jaxpar.tools.toolkit_api import us

_DATA = "/* data */"


def page_of(record: Mapping[str, Any]) -> str:
    page = files("jaxpar.tools.cli").joinpath("explain.html").read_text()
    # A text of the program's must not end, or begin, the script that it stands in.
    data = json.dumps(_shown(record)).replace("<", "\\u003c")
    return page.replace(_DATA, data)


def _shown(record: Mapping[str, Any]) -> dict[str, Any]:
    findings = [_finding(record, finding) for finding in record["findings"]]
    overheads = [
        {
            "kind": overhead["kind"],
            "seconds": us(overhead["seconds"]),
            "place": place(overhead),
            "what": overhead["what"],
        }
        for overhead in record["overheads"]
    ]
    at_peak = [
        {
            "size": size(buffer["bytes"]),
            "share": buffer["bytes"] / max(record["peak_bytes"], 1),
            "array": buffer["array"],
            "what": buffer["what"],
            "place": place({**buffer, "scopes": ()}),
        }
        for buffer in record["at_peak"]
    ]
    events = [
        [
            event["row"],
            event["kind"],
            event["name"],
            event["op"],
            event["start"] * 1e6,
            (event["end"] - event["start"]) * 1e6,
            event["is_matmul"],
            event["synchronous"],
        ]
        for event in record["events"]
        if event["end"] > event["start"]
    ]
    instructions: dict[str, Any] = {"rows": [], "alone": []}
    if record.get("instructions"):
        rows = [*totals(record), *map(side, record["instructions"])]
        instructions = {"rows": rows, "alone": [line.strip() for line in alone(record)]}
    return {
        "target": record["target"],
        "heading": heading(record),
        "verdict": verdict(record),
        "total": record["seconds"] * 1e6,
        "findings": findings,
        "overheads": overheads,
        "at_peak": at_peak,
        "instructions": instructions,
        "events": events,
    }


def _finding(record: Mapping[str, Any], finding: Mapping[str, Any]) -> dict[str, Any]:
    of = finding["of"]
    return {
        "title": title(of),
        "place": place(of),
        "elsewhere": elsewhere(of),
        "moved": of.get("moved", ""),
        "between": [of.get("before", ""), of.get("after", "")],
        "names": of.get("names", []),
        "seconds": us(of["seconds"]),
        "share": of["seconds"] / record["seconds"],
        "cause": finding["cause"],
        "meaning": CAUSES[finding["cause"]],
        "why": finding["why"],
        "edit": finding["edit"],
        "gain": gain(record, finding),
        "gains": bool(finding["gain"]),
        "tried": [{"edit": way["edit"], "seconds": us(way["seconds"])} for way in finding["tried"]],
    }
