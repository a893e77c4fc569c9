"""The process of `jaxpar explain`, which compiles the programs."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from jaxpar.schedule import CompiledProgram, Timeline, explain, read_trace
from jaxpar.tools.cli.console import UsageError
from jaxpar.tools.cli.predict_programs import programs
from jaxpar.tools.cli.predict_results import Failure, Prediction, request_from
from jaxpar.tools.cli.predict_worker import Record, compiled_program, facts_of, target_of, where
from jaxpar.tools.cli.workers import answering
from jaxpar.tools.explain.explain import require_known


def serve(task: dict[str, Any], say: Callable[[Record], None]) -> None:
    # All work stays in one thread: contexts and frameworks keep settings by thread.
    try:
        _serve(task, say)
    except UsageError as reason:
        say({"failure": asdict(Failure("", str(reason), usage=True))})
    except Exception as reason:
        say({"failure": asdict(Failure("", where(reason)))})


def _serve(task: dict[str, Any], say: Callable[[Record], None]) -> None:
    request = request_from(task["request"])
    target = target_of(request, needs_figures=task["measured"] is None)
    (program,) = programs(request, target, ())
    say({"facts": asdict(facts_of(request, target, (), [program]))})
    say({"begin": program.case})
    compiled = compiled_program(program, request, target)
    explanation = explain(
        compiled,
        tries=task["tries"],
        findings=task["findings"],
        own=_own(task["own"], compiled),
        measured=_measured(task["measured"], compiled),
        progress=lambda edit: say({"trying": f"trying: {edit}"}),
    )
    prediction = Prediction(
        case=program.case,
        mode="",
        timeline=explanation.timeline,
        floor=explanation.floor,
        memory=compiled.memory,
        compile_seconds=compiled.seconds,
        same_as=None,
    )
    say({"prediction": asdict(prediction)})
    say({"explained": explanation.record()})


def _measured(folder: str | None, compiled: CompiledProgram) -> Timeline | None:
    if folder is None:
        return None
    try:
        return read_trace(folder, compiled)
    except ValueError as reason:
        said = str(reason).removeprefix("read_trace: ")
        raise UsageError(f"--measured {folder}: {said}") from None


def _own(packages: list[str], compiled: CompiledProgram) -> list[str]:
    try:
        require_known(compiled, packages)
    except ValueError as reason:
        raise UsageError(f"--own {str(reason).partition('own=')[2]}") from None
    return packages


if __name__ == "__main__":
    with answering() as (task, say):
        serve(task, say)
