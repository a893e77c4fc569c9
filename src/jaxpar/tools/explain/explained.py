"""An explanation in plain numbers and text: as a record, in words, and beside another one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from jaxpar.tools.accuracy.band import bands_of
from jaxpar.tools.private_names import size_text as size
from jaxpar.tools.private_names import us
from jaxpar.tools.program.sources import Line, chain_text
from jaxpar.tools.timeline.measured_instructions import side_by_side

if TYPE_CHECKING:
    from jaxpar.tools.explain.explain import Explanation, Finding
    from jaxpar.tools.explain.exposed import ExposedCollective
    from jaxpar.tools.explain.overheads import Overhead
    from jaxpar.tools.timeline.measured_instructions import MeasuredInstruction
    from jaxpar.tools.timeline.timeline import Timeline

Record = Mapping[str, Any]

MOST_LIVE = 10
MOST_PLACES = 3  # of collectives that are alike, beside the first
FAR = 2.0  # times the floor: a step that takes longer has something to mend
WORTH = 0.01  # of the step: what is exposed for less is not worth compiling for
_LEAST = 0.005  # of the step: overheads of less are not shown


def record_of(found: Explanation) -> dict[str, Any]:
    """The numbers of an explanation, as JSON can hold them."""
    program, played = found.program, found.timeline
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
        "predicted": None if found.predicted is None else _of_timeline(found.predicted),
        "instructions": [_of_instruction(one) for one in found.instructions],
        "sent_bytes": played.sent_bytes,
        "floor": asdict(found.floor),
        "utilisation": found.utilisation,
        "peak_bytes": played.peak_bytes,
        "capacity": program.target.chip.capacity if program.target.chip else 0,
        "loops_of_unknown_length": list(played.loops_of_unknown_length),
        "kernels_of_unknown_cost": list(played.kernels_of_unknown_cost),
        "bands": [str(one) for one in bands_of(found.predicted or played, program.target)],
        "findings": [_of_finding(finding) for finding in found.findings],
        "overheads": [
            asdict(one) for one in found.overheads if one.seconds >= _LEAST * played.total
        ],
        "at_peak": [
            {**asdict(one), "line": _of_line(one.line)} for one in found.at_peak[:MOST_LIVE]
        ],
        "refused": dict(found.refused),
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


def _of_instruction(one: MeasuredInstruction) -> dict[str, Any]:
    return {**asdict(one), "line": _of_line(one.line), "ratio": one.ratio}


def _of_line(line: Line | None) -> dict[str, Any] | None:
    return None if line is None else asdict(line)


# -- in words -------------------------------------------------------------------------------------


def text_of(record: Record, rows: int = 10, width: int = 100) -> str:
    """The step, its worst findings, its overheads and its memory, in lines of a width."""
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
    """A line in as many as it takes, the further ones indented to where its text begins."""
    start = re.match(r" *(\w+: +|\d+\. )?", line)
    indent = " " * (start.end() if start else 0)
    return wrap(line, max(width, 40), subsequent_indent=indent, break_long_words=False) or [""]


def heading(record: Record) -> list[str]:
    """The step in a few lines."""
    total = record["seconds"]
    takes, waits = ("took", "waited") if is_measured(record) else ("takes", "waits")
    lines = [
        f"a step on {_devices(record)} {takes} {us(total)}; {us(record['exposed'])} "
        f"({_share(record['exposed'], total)}) of that it {waits} for transfers",
    ]
    held = f"it needs {size(record['peak_bytes'])}"
    if record["capacity"]:
        floor = max(record["floor"].values())
        least = (
            f"no schedule of it takes less than {us(floor)}; its matmuls use "
            f"{record['utilisation']:.0%} of the chip's peak"
            if floor
            else "it has no matmuls and sends nothing: it has no floor"
        )
        lines.append(f"{least}; {held} of {size(record['capacity'])} of memory")
    else:
        lines.append(f"{held} of memory")
    lines.append(f"({_source(record)})")
    lines += map(at_least, record["kernels_of_unknown_cost"])
    bands = record["bands"]
    lines += [f"errors of such predictions (predicted / measured - 1): {band}" for band in bands]
    if loops := record["loops_of_unknown_length"]:
        lines.append(f"loops whose trips depend on data count once: {', '.join(loops)}")
    return lines


def at_least(kernel: str) -> str:
    """That a kernel may take longer than it is said to."""
    return (
        f"at least: what the kernel {kernel} multiplies is not known, and every figure that it is "
        "in is a lower bound; give it cost_estimate=pl.CostEstimate(...)"
    )


def _devices(record: Record) -> str:
    """The target and its mesh."""
    mesh = ", ".join(f"{name}={length}" for name, length in record["mesh"].items())
    return f"{record['target']} ({mesh})"


def is_measured(record: Record) -> bool:
    """Whether its times were measured."""
    return record["estimate"] == "measured"


def _source(record: Record) -> str:
    """Where the times come from."""
    if not is_measured(record):
        return (
            f"the compiler's schedule on a model of the chip, by {record['estimate']}: not a "
            "measurement"
        )
    runs, predicted = record["runs"], record["predicted"]
    text = "measured"
    if len(runs) > 1:
        text += f", one of {len(runs)} runs, which took {us(min(runs))} to {us(max(runs))}"
    if predicted is None:
        return f"{text}; no figures are published of the chip, so that nothing is predicted"
    return f"{text}; {us(predicted['seconds'])} are predicted, by {predicted['estimate']}"


def paragraph(record: Record, finding: Record, number: int) -> list[str]:
    """One finding."""
    of, total = finding["of"], record["seconds"]
    lines = [f"{number}. {us(of['seconds'])} ({_share(of['seconds'], total)}): {title(of)}"]
    lines.append(f"   where: {place(of)}")
    lines += [f"   and:   {others}"] if (others := elsewhere(of)) else []
    if "collective" in of:
        lines.append(f"   moves: {of['moved']}")
        lines.append(f"   between {of['before']} and {of['after']}")
    lines.append(f"   why:   {finding['cause']}: {finding['why']}")
    mended = (one["edit"] if one["gain"] else None for one in record["findings"])
    if finding["gain"] and (first := 1 + [*mended].index(finding["edit"])) < number:
        return [*lines, f"   edit:  that of {first}, which mends this, too"]
    lines.append(f"   edit:  {finding['edit']}")
    lines.append(f"   gain:  {gain(record, finding)}")
    return lines


def title_of(of: ExposedCollective | Overhead) -> str:
    """What costs the time, in a line."""
    return title(asdict(of))


def place_of(of: ExposedCollective | Overhead) -> str:
    """The line, the scopes and the phase."""
    return place(asdict(of))


def title(of: Record) -> str:
    """What costs the time, in a line."""
    runs = f"{of['runs']} run{'s' * (of['runs'] != 1)}"
    if "collective" not in of:
        return f"{of['kind']}{' in a loop' * of['in_loop']}, {runs}, {of['what']}"
    return (
        f"{of['collective']} over {of['over']}, {runs}, {size(of['bytes'])} sent by a device over "
        f"{of['links']:.2g} of its {of['links_there']} links"
        + (", put in by the partitioner" if of["inserted"] else "")
    )


def place(of: Record) -> str:
    """The lines, the scopes and the phase."""
    line = Line(**of["line"]) if of["line"] else None
    chain = [Line(**one) for one in of.get("chain") or [of["line"]] if one]
    parts = [chain_text(chain, line) or "no line of the program's"]
    parts += [f"in {'/'.join(of['scopes'])}"] if of["scopes"] else []
    parts += [of["phase"]] if "phase" in of else []
    return ", ".join(parts)


def elsewhere(of: Record) -> str:
    """The other places of collectives that are alike; empty without any."""
    first, *others = of.get("places", ()) or ("",)
    if not others:
        return ""
    line, _, _ = first.partition(", in ")
    told = [one.removeprefix(f"{line}, ") for one in others[:MOST_PLACES]]
    more = f"; and {len(others) - MOST_PLACES} more" if len(others) > MOST_PLACES else ""
    return f"alike at {len(others) + 1} places: also {'; '.join(told)}{more}"


def gain(record: Record, finding: Record) -> str:
    """What the edit brings, or that it was not tried; of a measured step, what is predicted."""
    before = record
    if is_measured(record):
        before = record["predicted"]
        if before is None:
            return "cannot be told: nothing is predicted for this chip"
    if finding["gain"] is None:
        return f"not tried: {_why_not(record, finding)}"
    total = before["seconds"]
    best = min(finding["tried"], key=lambda one: one["seconds"])
    predicted = f" in place of {us(total)}, both predicted" if before is not record else ""
    if not finding["gain"]:
        more = f", the best of {len(finding['tried'])}" if len(finding["tried"]) > 1 else ""
        text = f"none; tried{more}: {best['edit']}: {us(best['seconds'])}{predicted}"
        return text + (f"; {_more_tries(finding)}" if finding["left"] else "")
    less = f"{_share(finding['gain'], total)} less"
    return f"the step then takes {us(best['seconds'])}{predicted}, {less}"


def _why_not(record: Record, finding: Record) -> str:
    """Why no edit of a finding was tried."""
    if finding["of"]["seconds"] < WORTH * record["seconds"]:
        return "less than a percent of the step is not worth compiling for"
    if finding["left"]:
        return _more_tries(finding)
    return "it cannot be by itself"


def _more_tries(finding: Record) -> str:
    left = finding["left"]
    return f"{left} edit{'s' * (left != 1)} would take more tries"


def verdict(record: Record) -> list[str]:
    """Whether there is anything to do."""
    if not record["findings"]:
        return [f"{_nothing(record)}; what it waits for is less than half a percent at any line"]
    gains = [finding for finding in record["findings"] if finding["gain"]]
    tried = {one["edit"] for finding in record["findings"] for one in finding["tried"]}
    lines = [f"edits tried, each by itself: {len(tried)}; findings with a gain: {len(gains)}"]
    lines += [f"not tried: {edit} ({why})" for edit, why in record["refused"].items()]
    return lines


def _nothing(record: Record) -> str:
    """That there is nothing to mend; far from the floor only that no transfer is to blame."""
    total = record["seconds"]
    floor = max(record["floor"].values()) if record["capacity"] else 0.0
    if not floor:
        return f"nothing to mend here: {us(total)}"
    if total < FAR * floor:
        return f"nothing to mend here: {us(total)}, and no schedule takes less than {us(floor)}"
    return (
        f"no transfer to mend, though the step takes {us(total)}, {total / floor:,.1f} times its "
        f"floor of {us(floor)}: its matmuls are slower than the peak, or several devices run the "
        "same ones (their operands are whole on a mesh axis), or most of it is other work"
    )


def _overheads(record: Record) -> Iterator[str]:
    kinds: dict[str, list[Any]] = defaultdict(list)
    for one in record["overheads"]:
        kinds[one["kind"]].append(one)
    total = record["seconds"]
    for kind, found in sorted(kinds.items(), key=lambda item: -_seconds(item[1])):
        worst = max(found, key=lambda one: one["seconds"])
        yield (
            f"  {us(_seconds(found)):>10}  {_share(_seconds(found), total):>4}  {kind}, most of it "
            f"at {place(worst)} ({worst['what']})"
        )


def _seconds(found: Sequence[Record]) -> float:
    return sum(one["seconds"] for one in found)


def _at_peak(record: Record) -> Iterator[str]:
    for one in record["at_peak"]:
        if one["bytes"] < 0.001 * record["peak_bytes"]:
            continue
        where = f" at {Line(**one['line'])}" if one["line"] else ""
        yield f"  {size(one['bytes']):>10}  {one['array']}  {one['what']}{where}, {one['phase']}"


# -- beside another one ---------------------------------------------------------------------------

COMPARED = ("findings", "target", "mesh", "seconds", "exposed", "peak_bytes")  # what it reads


def compared(before: Record, after: Record) -> str:
    """What got better and what worse, line by line; lines are told by file and function."""
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
        found = sorted((c for c in changes if sign * c[0] > least), key=lambda c: -abs(c[0]))
        lines += [f"{word}:"] * bool(found)
        lines += [
            f"  {us(new.get(key, 0.0)):>10}  before {us(old.get(key, 0.0)):>10}  {key}"
            for _, key in found
        ]
    return "\n".join(lines)


def _by_place(record: Record) -> dict[str, float]:
    """Seconds by what and where, without numbers of lines, which an edit moves."""
    found: dict[str, float] = defaultdict(float)
    for finding in record["findings"]:
        of = finding["of"]
        what = f"{of['collective']} over {of['over']}" if "collective" in of else of["kind"]
        lines = of.get("chain") or [of["line"]]
        named = (f"{one['file'].rpartition('/')[2]}, {one['function']}" for one in lines if one)
        where = " < ".join(named) or "no line"
        found[f"{what}, {where}, {of.get('phase', 'in a loop')}"] += of["seconds"]
    return dict(found)


def _share(part: float, total: float) -> str:
    return f"{part / total if total else 0.0:.0%}"
