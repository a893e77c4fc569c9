"""An explanation as JSON, as text, and compared with another."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from jaxpar.tools.accuracy.interval import SENTENCE, lines_of, texts_of
from jaxpar.tools.explain.compare_instructions import side_by_side
from jaxpar.tools.explain.pipelines import pipeline_lines
from jaxpar.tools.program.sources import Line, chain_text
from jaxpar.tools.toolkit_api import size_text as size
from jaxpar.tools.toolkit_api import us

if TYPE_CHECKING:
    from jaxpar.tools.explain.compare_instructions import MeasuredInstruction
    from jaxpar.tools.explain.explain import Explanation, Finding
    from jaxpar.tools.explain.exposed import ExposedCollective
    from jaxpar.tools.explain.overheads import Overhead
    from jaxpar.tools.timeline.timeline import Timeline

Record = Mapping[str, Any]

MOST_LIVE = 10
MOST_PLACES = 3  # of collectives that are alike, besides the first
NEAR = 1.05  # times the floor: a step that takes longer is not said to be at its best
FAR = 2.0  # times the floor: a step that takes longer gets a hint
SMALL = 0.01  # of the step: shorter parts are not printed
WORTH = 0.01  # of the step: a shorter wait is not worth a compilation
_LEAST = 0.005  # of the step: smaller overheads are not shown


def record_of(reasons: Explanation) -> dict[str, Any]:
    program, played = reasons.program, reasons.timeline
    return {
        "target": program.target.name,
        "mesh": dict(program.target.mesh.shape),
        "compiler_options": dict(program.compiler_options),
        "estimate": played.estimate,
        "seconds": played.total,
        "exposed": played.exposed,
        "compute": played.compute,
        "transfer": played.transfer,
        "runs": list(played.runs),
        "predicted": None if reasons.predicted is None else _of_timeline(reasons.predicted),
        "instructions": [_of_instruction(entry) for entry in reasons.instructions],
        "sent_bytes": played.sent_bytes,
        "floor": asdict(reasons.floor),
        "utilisation": reasons.utilisation,
        "peak_bytes": played.peak_bytes,
        "capacity": program.target.chip.capacity if program.target.chip else 0,
        "pipeline": pipeline_lines(played, program.target),
        "loops_of_unknown_length": list(played.loops_of_unknown_length),
        "kernels_of_unknown_cost": list(played.kernels_of_unknown_cost),
        "intervals": texts_of(reasons.predicted or played, program.target),
        "findings": [_of_finding(finding) for finding in reasons.findings],
        "overheads": [
            asdict(cost) for cost in reasons.overheads if cost.seconds >= _LEAST * played.total
        ],
        "at_peak": [
            {**asdict(live), "line": _of_line(live.line)} for live in reasons.at_peak[:MOST_LIVE]
        ],
        "refused": dict(reasons.refused),
        "events": [asdict(event) for event in played.events],
    }


def _of_finding(finding: Finding) -> dict[str, Any]:
    of = asdict(finding.of)
    of["line"] = _of_line(finding.of.line)
    of["chain"] = [asdict(line) for line in finding.of.chain]
    of["lines"] = [_of_line(line) for line in getattr(finding.of, "lines", ())]
    return {
        "cause": finding.cause,
        "why": finding.why,
        "edit": finding.edit,
        "gain": finding.gain if finding.is_tried else None,
        "left": finding.left,
        "of": of,
        "tried": [
            {"edit": tried.edit, "seconds": tried.seconds, "peak": tried.peak}
            for tried in finding.tried
        ],
    }


def _of_timeline(played: Timeline) -> dict[str, Any]:
    numbers = ("compute", "exposed", "transfer", "estimate")
    return {"seconds": played.total, **{name: getattr(played, name) for name in numbers}}


def _of_instruction(entry: MeasuredInstruction) -> dict[str, Any]:
    return {**asdict(entry), "line": _of_line(entry.line), "ratio": entry.ratio}


def _of_line(line: Line | None) -> dict[str, Any] | None:
    return None if line is None else asdict(line)


# -- in words -------------------------------------------------------------------------------------


def text_of(record: Record, rows: int = 10, width: int = 100) -> str:
    lines = [*heading(record), ""]
    shown = record["findings"][:rows]
    for number, finding in enumerate(shown, 1):
        lines += [*paragraph(record, finding, number), ""]
    lines += [*verdict(record), ""]
    if record.get("instructions"):
        lines += ["predicted and measured:", *side_by_side(record, rows), ""]
    if record["overheads"]:
        lines += ["beyond transfers:", *_overheads(record), ""]
    lines += ["in memory at the peak:", *_at_peak(record)]
    return "\n".join(folded for line in lines for folded in _folded(line, width))


def _folded(line: str, width: int) -> list[str]:
    start = re.match(r" *(\w+: +|\d+\. )?", line)
    indent = " " * (start.end() if start else 0)
    return wrap(line, max(width, 40), subsequent_indent=indent, break_long_words=False) or [""]


def heading(record: Record) -> list[str]:
    total = record["seconds"]
    takes, waits = ("took", "waited") if is_measured(record) else ("takes", "waits")
    lines = [
        f"a step on {_devices(record)} {takes} {us(total)}; it {waits} {us(record['exposed'])} "
        f"({_share(record['exposed'], total)}) for transfers",
    ]
    held = f"it needs {size(record['peak_bytes'])}"
    if record["capacity"]:
        floor = max(record["floor"].values())
        least = (
            f"no schedule of it takes less than {us(floor)} (its floor); its matmuls use "
            f"{record['utilisation']:.0%} of the chip's peak"
            if floor
            else "it has no matmuls and sends nothing: it has no floor"
        )
        lines.append(f"{least}; {held} of {size(record['capacity'])} of memory")
    else:
        lines.append(f"{held} of memory")
    lines += record.get("pipeline", ())
    lines.append(f"({_source(record)})")
    lines += map(at_least, record["kernels_of_unknown_cost"])
    lines += [f"{SENTENCE}: {text}" for text in lines_of(record["intervals"])]
    if loops := record["loops_of_unknown_length"]:
        lines.append(f"loops of unknown length count as one iteration: {', '.join(loops)}")
    return lines


def at_least(kernel: str) -> str:
    return (
        f"at least: the FLOPs of the kernel {kernel} are unknown, so its figures are lower bounds; "
        "give it cost_estimate=pl.CostEstimate(...)"
    )


def _devices(record: Record) -> str:
    mesh = ", ".join(f"{name}={length}" for name, length in record["mesh"].items())
    return f"{record['target']} ({mesh})"


def is_measured(record: Record) -> bool:
    return record["estimate"] == "measured"


def _source(record: Record) -> str:
    if not is_measured(record):
        return (
            "predicted, not measured: the compiler's schedule is simulated, with compute times by "
            f"{record['estimate']}"
        )
    runs, predicted = record["runs"], record["predicted"]
    text = "measured"
    if len(runs) > 1:
        text += f", one of {len(runs)} runs, which took {us(min(runs))} to {us(max(runs))}"
    if predicted is None:
        return f"{text}; no figures of the chip are published, so nothing is predicted"
    return f"{text}; the prediction is {us(predicted['seconds'])}, by {predicted['estimate']}"


def paragraph(record: Record, finding: Record, number: int) -> list[str]:
    of, total = finding["of"], record["seconds"]
    lines = [f"{number}. {us(of['seconds'])} ({_share(of['seconds'], total)}): {title(of)}"]
    lines.append(f"   where: {place(of)}")
    lines += [f"   and:   {others}"] if (others := elsewhere(of)) else []
    if "collective" in of:
        lines.append(f"   moves: {of['moved']}")
        lines.append(f"   between {of['before']} and {of['after']}")
    lines.append(f"   why:   {finding['cause']}: {finding['why']}")
    mended = (other["edit"] if other["gain"] else None for other in record["findings"])
    if finding["gain"] and (first := 1 + [*mended].index(finding["edit"])) < number:
        return [*lines, f"   edit:  the edit of finding {first} mends this, too"]
    lines.append(f"   edit:  {finding['edit']}")
    lines.append(f"   gain:  {gain(record, finding)}")
    return lines


def title_of(of: ExposedCollective | Overhead) -> str:
    return title(asdict(of))


def place_of(of: ExposedCollective | Overhead) -> str:
    return place(asdict(of))


def title(of: Record) -> str:
    runs = f"{of['runs']} run{'s' * (of['runs'] != 1)}"
    if "collective" not in of:
        return f"{of['kind']}{' in a loop' * of['in_loop']}, {runs}, {of['what']}"
    return (
        f"{of['collective']} over {of['over']}, {runs}, {size(of['bytes'])} sent by a device over "
        f"{of['links']:.2g} of its {of['links_there']} links{' on average' * (of['links'] % 1 > 0)}"
        + (", put in by the partitioner" if of["inserted"] else "")
    )


def place(of: Record) -> str:
    line = Line(**of["line"]) if of["line"] else None
    chain = [Line(**caller) for caller in of.get("chain") or [of["line"]] if caller]
    parts = [chain_text(chain, line) or "no line of the program"]
    parts += [f"in {'/'.join(of['scopes'])}"] if of["scopes"] else []
    parts += [of["phase"]] if "phase" in of else []
    return ", ".join(parts)


def elsewhere(of: Record) -> str:
    first, *others = of.get("places", ()) or ("",)
    if not others:
        return ""
    line, _, _ = first.partition(", in ")
    told = [other.removeprefix(f"{line}, ") for other in others[:MOST_PLACES]]
    more = f"; and {len(others) - MOST_PLACES} more" if len(others) > MOST_PLACES else ""
    return f"alike at {len(others) + 1} places: also {'; '.join(told)}{more}"


def gain(record: Record, finding: Record) -> str:
    before = record
    if is_measured(record):
        before = record["predicted"]
        if before is None:
            return "unknown: nothing is predicted for this chip"
    if finding["gain"] is None:
        return f"not tried: {_why_not(record, finding)}"
    total = before["seconds"]
    best = min(finding["tried"], key=lambda trial: trial["seconds"])
    predicted = f" in place of {us(total)}, both predicted" if before is not record else ""
    if not finding["gain"]:
        count = len(finding["tried"])
        which = f"the best of {count} tried edits" if count > 1 else "the tried edit"
        text = f"none; {which}: {best['edit']}: {us(best['seconds'])}{predicted}"
        return text + (f"; {_more_tries(finding)}" if finding["left"] else "")
    less = f"{_share(finding['gain'], total)} less"
    return f"the step then takes {us(best['seconds'])}{predicted}, {less}"


def _why_not(record: Record, finding: Record) -> str:
    if finding["of"]["seconds"] < WORTH * record["seconds"]:
        return "it costs less than 1% of the step, too little for a compilation"
    if finding["left"]:
        return _more_tries(finding)
    return "jaxpar cannot make this edit itself"


def _more_tries(finding: Record) -> str:
    left = finding["left"]
    return f"{left} more edit{'s' * (left != 1)} can be tried: raise tries"


def verdict(record: Record) -> list[str]:
    """Returns how many edits help, or what else costs."""
    if not record["findings"]:
        return [f"{_nothing(record)}. No line waits for transfers longer than 0.5% of the step"]
    gains = [finding for finding in record["findings"] if finding["gain"]]
    tried = {trial["edit"] for finding in record["findings"] for trial in finding["tried"]}
    lines = [f"edits tried, each by itself: {len(tried)}; findings with a gain: {len(gains)}"]
    lines += [f"not tried: {edit} ({why})" for edit, why in record["refused"].items()]
    return lines


def _nothing(record: Record) -> str:
    total = record["seconds"]
    floor = max(record["floor"].values()) if record["capacity"] else 0.0
    if not floor:
        return f"no transfer to mend: the step takes {us(total)}, and it has no known floor"
    if total <= NEAR * floor:
        return f"nothing to mend here: {us(total)}, and no schedule takes less than {us(floor)}"
    above = f"{total / floor - 1:.0%} above its floor"
    if total >= FAR * floor:
        above = f"{total / floor:,.1f} times its floor"
    text = f"no transfer to mend: the step takes {us(total)}, {above} of {us(floor)}"
    if spent := _spent(record):
        text += f". {spent}"
    if total >= FAR * floor:
        text += (
            ". Matmuls far below the peak may run on several devices alike: see whether their "
            "operands are unsharded on a mesh axis"
        )
    return text


def _spent(record: Record) -> str:
    spent: dict[str, float] = defaultdict(float)
    for event in record["events"]:
        kind, seconds = event["kind"], event["end"] - event["start"]
        if kind == "compute":
            spent["matmuls" if event["is_matmul"] else "other work"] += seconds
        elif kind == "wait":
            is_copy = event["row"] == "memory"
            spent["waits for copies" if is_copy else "waits for transfers"] += seconds
    if not spent["matmuls"] + spent["other work"]:
        return ""
    total, best = record["seconds"], us(record["floor"]["compute"])
    spent["gaps"] = total - sum(spent.values())
    others = (
        f"{what} {us(took)}"
        for what, took in spent.items()
        if what != "matmuls" and took >= SMALL * total
    )
    took = f"Matmuls take {us(spent['matmuls'])} ({best} at the chip's peak)"
    return ", ".join((took, *others))


def _overheads(record: Record) -> Iterator[str]:
    kinds: dict[str, list[Any]] = defaultdict(list)
    for cost in record["overheads"]:
        kinds[cost["kind"]].append(cost)
    total = record["seconds"]
    for kind, costs in sorted(kinds.items(), key=lambda item: -_seconds(item[1])):
        worst = max(costs, key=lambda cost: cost["seconds"])
        yield (
            f"  {us(_seconds(costs)):>10}  {_share(_seconds(costs), total):>4}  {kind}, most of it "
            f"at {place(worst)} ({worst['what']})"
        )


def _seconds(costs: Sequence[Record]) -> float:
    return sum(cost["seconds"] for cost in costs)


def _at_peak(record: Record) -> Iterator[str]:
    for live in record["at_peak"]:
        if live["bytes"] < 0.001 * record["peak_bytes"]:
            continue
        at = f" at {Line(**live['line'])}" if live["line"] else ""
        yield f"  {size(live['bytes']):>10}  {live['array']}  {live['what']}{at}, {live['phase']}"


# -- beside another record ------------------------------------------------------------------------

COMPARED = ("findings", "target", "mesh", "seconds", "exposed", "peak_bytes")  # what it reads


def compared(before: Record, after: Record) -> str:
    """Returns improvements and regressions by file and function."""
    change = after["seconds"] / before["seconds"] - 1
    lines = [
        f"the step takes {us(after['seconds'])}, before {us(before['seconds'])} ({change:+.1%}); "
        f"exposed {us(after['exposed'])}, before {us(before['exposed'])}; memory "
        f"{size(after['peak_bytes'])}, before {size(before['peak_bytes'])}"
    ]
    if (was := _devices(before)) != (now := _devices(after)):
        lines.append(f"on other devices: {now}, before {was}")
    old, new = _by_place(before), _by_place(after)
    changes = [(new.get(key, 0.0) - old.get(key, 0.0), key) for key in dict.fromkeys((*old, *new))]
    least = 0.001 * before["seconds"]
    for word, sign in (("better", -1), ("worse", 1)):
        changed = sorted((c for c in changes if sign * c[0] > least), key=lambda c: -abs(c[0]))
        lines += [f"{word}:"] * bool(changed)
        lines += [
            f"  {us(new.get(key, 0.0)):>10}  before {us(old.get(key, 0.0)):>10}  {key}"
            for _, key in changed
        ]
    return "\n".join(lines)


def _by_place(record: Record) -> dict[str, float]:
    # Places have no line numbers, because an edit moves them.
    seconds: dict[str, float] = defaultdict(float)
    for finding in record["findings"]:
        of = finding["of"]
        what = f"{of['collective']} over {of['over']}" if "collective" in of else of["kind"]
        lines = of.get("chain") or [of["line"]]
        named = (f"{line['file'].rpartition('/')[2]}, {line['function']}" for line in lines if line)
        where = " < ".join(named) or "no line"
        seconds[f"{what}, {where}, {of.get('phase', 'in a loop')}"] += of["seconds"]
    return dict(seconds)


def _share(part: float, total: float) -> str:
    return f"{part / total if total else 0.0:.0%}"
