"""A guarded call of this process."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any

import jax

from jaxpar.tools.guard.guarded_programs import TracedProgram
from jaxpar.tools.guard.state import MAKING

if TYPE_CHECKING:
    from jaxpar.tools.guard.watch import Watch


@dataclass(eq=False)
class GuardedCall:
    number: int
    name: str
    limit: float
    exit_code: int | None
    watch: Watch = field(repr=False)
    is_jitted: bool
    thread: int = field(default_factory=get_ident)
    entered: float = field(default_factory=monotonic)
    doing: str = "python"
    since: float = field(default_factory=monotonic)
    program: TracedProgram | None = None
    compiled: list[str] = field(default_factory=list[str])
    result: Any = None  # its smallest array

    @property
    def is_made(self) -> bool:
        # A program that is still made needs no other process.
        return self.is_jitted and self.doing in MAKING

    def do(self, what: str) -> None:
        self.doing, self.since = what, monotonic()

    def run(self, program: TracedProgram) -> None:
        # A new program waits until those of all are equal.
        self.program = self.watch.programs.setdefault(program.digest, program)
        self.watch.know(self, program.digest)
        if is_new := not self.program.is_agreed:
            self.do("comparing")
            self.watch.wait_agreed(self.number)
            self.program.is_agreed = True
        self.do("compiling" if is_new else "running")

    def wait_for(self, arrays: Any) -> None:
        """Makes the call last until its smallest array is computed."""
        leaves = jax.tree.leaves(arrays)
        place = None if self.program is None else self.program.result
        if place is None:
            sizes = {n: x.nbytes for n, x in enumerate(leaves) if isinstance(x, jax.Array)}
            place = min(sizes, key=sizes.__getitem__, default=None)
            if self.program is not None:
                self.program.result = place
        self.result = None if place is None else leaves[place]
