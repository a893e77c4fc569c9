"""The process of `jaxpar explain`: compiles a program, and the same program with edits."""

from collections.abc import Iterator
from dataclasses import asdict
from queue import SimpleQueue
from threading import Thread
from typing import Any

from jaxpar.schedule import CompiledProgram, Target, Timeline, compile_for, explain, read_trace
from jaxpar.tools.cli.console import UsageError
from jaxpar.tools.cli.predict_programs import PlannedProgram, programs, requested_options
from jaxpar.tools.cli.predict_results import Failure, Prediction, Request, request_from
from jaxpar.tools.cli.predict_worker import Record, facts_of, target_of, where
from jaxpar.tools.cli.workers import answer
from jaxpar.tools.explain.explain import require_known
from jaxpar.tools.program.cache import default_folder


def serve(task: dict[str, Any]) -> Iterator[Record]:
    """Yields `facts`, `trying` before each compilation, and `prediction` and `explained`."""
    request = request_from(task["request"])
    try:
        target = target_of(request, needs_figures=task["measured"] is None)
        (program,) = programs(request, target, ())
        yield {"facts": asdict(facts_of(request, target, (), [program]))}
        yield {"begin": program.case}
    except UsageError as reason:
        yield {"failure": asdict(Failure("", str(reason), usage=True))}
        return
    except Exception as reason:
        yield {"failure": asdict(Failure("", where(reason)))}
        return
    said: SimpleQueue[Record | None] = SimpleQueue()

    def work() -> None:
        try:
            _explained(program, request, task, target, said)
        except UsageError as reason:
            said.put({"failure": asdict(Failure("", str(reason), usage=True))})
        except Exception as reason:
            said.put({"failure": asdict(Failure(program.case, where(reason)))})
        said.put(None)

    # Edits are told of while they are compiled: in a thread of its own, as `explain` calls back.
    Thread(target=work, daemon=True).start()
    while (record := said.get()) is not None:
        yield record


def _explained(
    program: PlannedProgram,
    request: Request,
    task: dict[str, Any],
    target: Target,
    said: SimpleQueue[Record | None],
) -> None:
    compiled = compile_for(
        program.function,
        target,
        *program.args,
        compiler_options=requested_options(request, target),
        cache=default_folder() if task["cache"] else None,
    )
    found = explain(
        compiled,
        tries=task["tries"],
        findings=task["findings"],
        own=_own(task["own"], compiled),
        measured=_measured(task["measured"], compiled),
        progress=lambda edit: said.put({"trying": f"trying: {edit}"}),
    )
    prediction = Prediction(
        case=program.case,
        mode="",
        timeline=found.timeline,
        floor=found.floor,
        memory=compiled.memory,
        compile_seconds=compiled.seconds,
        same_as=None,
    )
    said.put({"prediction": asdict(prediction)})
    said.put({"explained": found.record()})


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
    answer(serve)
