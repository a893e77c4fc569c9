"""The process of `jaxpar ways`, which traces a program."""

from collections.abc import Iterator
from typing import Any

from jaxpar import ways
from jaxpar.tools.cli.console import UsageError
from jaxpar.tools.cli.predict_programs import programs, requested_options
from jaxpar.tools.cli.predict_results import request_from
from jaxpar.tools.cli.predict_worker import target_of, where
from jaxpar.tools.cli.workers import answer


def serve(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        request = request_from(task)
        target = target_of(request)
        [program] = programs(request, target, ())
        options = requested_options(request, target)
        table = ways(program.function, *program.args, target=target, compiler_options=options)
        yield {"text": str(table), "json": table.json()}
    except UsageError as reason:
        yield {"failure": str(reason), "usage": True}
    except Exception as reason:
        yield {"failure": where(reason), "usage": False}


if __name__ == "__main__":
    answer(serve)
