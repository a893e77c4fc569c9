"""No silent hang: who is where is said soon, by every process that can speak."""

import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread, get_ident

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import environment, free_port

import jaxpar
from jaxpar.tools.guard.board import Board
from jaxpar.tools.guard.call import GuardedCall
from jaxpar.tools.guard.guarded_programs import first_difference, program_of
from jaxpar.tools.guard.report import report
from jaxpar.tools.guard.state import ProcessState
from jaxpar.tools.guard.watch import Watch, _line_of, watch

WORKER = Path(__file__).with_name("guard_worker.py")
SOON = 10.0  # seconds, on a machine that starts the processes in less than three


class Run:
    """The processes of a case: what each says, and when."""

    def __init__(self, case, count, forks):
        port = str(free_port())
        self.said = defaultdict(list)  # by process: seconds and line
        self.begun, self.fault = time.monotonic(), None
        commands = [[str(WORKER), case, str(rank), str(count), port] for rank in range(count)]
        if case == "equal":  # of other hash seeds and addresses, which must make no difference
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            self.processes = [
                subprocess.Popen([sys.executable, *one], env=environment(), text=True, **pipes)
                for one in commands
            ]
        else:
            self.processes = [forks.start(one) for one in commands]
        self.threads = [
            Thread(target=self._hear, args=(rank, stream))
            for rank, process in enumerate(self.processes)
            for stream in (process.stdout, process.stderr)
        ]
        for thread in self.threads:
            thread.start()

    def _hear(self, rank, stream):
        for line in stream:
            if line == "fault\n":
                self.fault = time.monotonic()
            self.said[rank].append((time.monotonic(), line.rstrip()))

    def wait(self, ranks, pattern, seconds=400):
        """Waits until these processes have said something, after the fault."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.fault and all(re.search(pattern, self.text(rank)) for rank in ranks):
                return
            time.sleep(0.05)
        raise AssertionError(f"not said: {pattern}\n" + self.all())

    def text(self, rank):
        return "\n".join(line for _, line in list(self.said[rank]))

    def all(self):
        return "\n".join(f"[{rank}] {self.text(rank)}" for rank in sorted(self.said))

    def is_soon(self, rank, pattern):
        """Whether the line that says it came soon after the fault, as fast as this machine is."""
        said = next(at for at, line in self.said[rank] if re.search(pattern, line))
        return said - self.fault < max(SOON, 4 * (self.fault - self.begun))

    def end(self):
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for thread in self.threads:
            thread.join()
        for process in self.processes:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                stream.close()


@pytest.fixture
def run(forks):
    runs = []

    def start(case, count):
        runs.append(Run(case, count, forks))
        return runs[-1]

    yield start
    for one in runs:
        one.end()


WAITS = r"waits for process {odd} in call {call} of 'step': the first collective that needs it is "
WAITS += r"psum over dp of float32\[4, 8\] at guard_worker.py:\d+ in local \(number 2 of 2\)"
ODD = "processes 0 and {odd}"
WHO = r"process {odd}(?: \(dp={odd}\))?"  # its place is told by who knows the mesh

# What is wrong, where the odd process is, and what the others wait in; who can say so.
CASES = {
    "missing": (
        r"call 1 of 'step' takes .* s, more than its limit of 2 s: process {odd} has not come",
        r"{who}: in no guarded call yet for .*Python is at guard_worker.py:\d+ in load",
        WAITS,
    ),
    "killed": (
        r"process {odd} is gone, killed or crashed: its connection was lost \d+\.\d s ago",
        r"{who}: gone for .*, killed or crashed; last heard of .* of 'step'",
        "",
    ),
    "frozen": (
        r"call 3 of 'step' takes .* s, more than its limit of 5 s: process {odd} has not come",
        r"{who}: not answering for .*; last heard of",
        WAITS,
    ),
    "raises": (
        r"process {odd} has ended",
        r"{who}: ended; it was .* 'step'",
        WAITS,
    ),
    "operation": (
        rf"{ODD} run different programs in call 3 of 'step': collective 2: process 0 has psum "
        r"over dp of float32\[4, 8\] at guard_worker.py:\d+ in local, process {odd} pmax over dp",
        r"{who}: (waiting for others to compare .* of 'step'|ended, after ValueError)",
        "",
    ),
    "tracing": (
        r"call 1 of 'step' takes .* s, more than .*: process {odd} has not finished tracing it",
        r"{who}: tracing call 1 of 'step' for .*; Python is at guard_worker.py:\d+ in load",
        WAITS,
    ),
    "compiling": (
        r"call 1 of 'step' takes .* s, more than .*: process {odd} has not finished compiling it",
        r"{who}: compiling call 1 of 'step' for .*; Python is at guard_worker.py:\d+ in ",
        WAITS,
    ),
    "partitioned": (
        r"call 3 of 'partitioned' takes .* s, more than its limit .*: process {odd} has not come",
        r"{who}: outside guarded calls, after call 2 of 'partitioned' for .* in load",
        r"waits for process {odd} in call 3 of 'partitioned': the first collective that needs it "
        r"is all-reduce over dp of 4 B at guard_worker.py:\d+ in partitioned",
    ),
    "lines": (
        r"call 3 of 'training' takes .* s, more than its limit of 5 s: all processes are in it",
        r"{who}: in call 3 of 'training' for .*; Python is at guard_worker.py:\d+ in load",
        "",
    ),
}
SPEECHLESS = ("killed", "frozen")  # the odd process
# Two wait for the odd one, of each kind of trouble; or one alone does.
COUNTED = [(case, 3) for case in ("missing", "killed", "frozen", "operation")]
COUNTED += [(case, 2) for case in CASES if case not in ("missing", "frozen", "operation")]


@pytest.mark.parametrize(("case", "count"), COUNTED)
def test_it_is_named(case, count, run):
    odd = count - 1
    call = 1 if case in ("missing", "tracing", "compiling") else 3
    what, where, waits = (
        text.replace("{who}", WHO).replace("{odd}", str(odd)).replace("{call}", str(call))
        for text in CASES[case]
    )
    # Any of the others may be the one that is compared with the odd one.
    what = what.replace("processes 0 and", r"processes \d and").replace(
        "process 0 ", r"process \d "
    )
    found = run(case, count)
    ranks = [rank for rank in range(count) if rank != odd or case not in SPEECHLESS]
    for pattern in (what, where):
        found.wait(ranks, pattern)
    for rank in ranks:
        assert found.is_soon(rank, what), found.all()
        assert found.is_soon(rank, where), found.all()
    if waits:
        others = [rank for rank in ranks if rank != odd]
        found.wait(others, waits)
        assert all(found.is_soon(rank, waits) for rank in others), found.all()
        assert "waits for" not in found.text(odd)  # itself
    if case == "operation":  # or it would compute garbage and end with status 0
        assert "done" not in found.text(odd)
        found.wait([odd], "ValueError: guard: processes .*; make them equal")
    for rank in set(ranks) - {odd}:  # the status that was asked for, or that of the error
        assert found.processes[rank].wait(400) != 0, found.all()


def test_the_stages_of_a_killed_process_are_named(run):
    """Of a pipeline over four processes, whose losses were those of one device."""
    found = run("pipeline", 4)
    for pattern in ("process 2 is gone, killed or crashed", r"process 2 \(pp=2\): gone for .*"):
        found.wait([0, 1, 3], pattern)
        assert all(found.is_soon(rank, pattern) for rank in (0, 1, 3)), found.all()
    for rank in (0, 1, 3):
        assert "loss 2 is that of one device" in found.text(rank), found.all()
        assert found.processes[rank].wait(400) != 0, found.all()


def test_nothing_is_said_of_equal_processes(run):
    found = run("equal", 3)
    assert [process.wait(400) for process in found.processes] == [0] * 3, found.all()
    assert all("done" in found.text(rank) for rank in range(3))
    assert "jaxpar.guard" not in found.all()


def test_a_slow_process_is_waited_for(run):
    found, late = run("slow", 2), r"takes (\S+) s, more than its limit of 2 s"
    found.wait([0, 1], f"(?s){late}.*{late}")
    found.processes[1].stdin.close()
    assert [process.wait(400) for process in found.processes] == [0, 0], found.all()
    for rank in (0, 1):
        assert "done" in found.text(rank)
        assert "process 1 has not come to it" in found.text(rank)
        said = re.findall(late, found.text(rank))
        for number, seconds in enumerate(said):  # after the limit, twice, four times the limit
            assert float(seconds) >= 2 * 2**number


def test_process_0_is_killed(run):
    """It has the board: the others know that it is gone, and where they are themselves."""
    found = run("killed_first", 2)
    found.wait([1], "process 0 is gone, killed or crashed: its connection was lost")
    assert found.is_soon(1, "process 0 is gone")
    assert "not known to the board" not in found.text(1)  # nothing is known of others


def test_silence_is_told_before_the_limit(run):
    """The limit is 300 s, JAX's own 20 s: it ends all, whatever `exit_code` says.

    Two cases wait at the same time: the last process is silent, or process 0.
    """
    runs = {2: run("stopped", 3), 0: run("stopped_first", 3)}
    for odd, found in runs.items():
        others = [rank for rank in range(3) if rank != odd]
        found.wait(
            others,
            rf"process {odd} has not answered for \d+\.\d s: if it, or its host, is stopped, JAX "
            "ends all processes 10 to 20 s after that",
        )
        found.wait(
            others, f"waits for process {odd} in call 3 of 'step': the first collective that"
        )
    for rank in (0, 1):
        assert runs[2].processes[rank].wait(400) not in (0, 7), runs[2].all()


def test_a_process_0_that_is_stopped_is_told_at_the_limit(run):
    found = run("frozen_first", 2)
    found.wait(
        [1], r"call 3 of 'step' takes \S+ s, more than its limit of 5 s: process 0 has not answ"
    )
    assert found.processes[1].wait(400) == 7


# -- alone ----------------------------------------------------------------------------------------


def test_what_it_is_around_is_as_before():
    step = jaxpar.guard(jax.jit(lambda x, scale=2.0: {"y": x * scale}))
    np.testing.assert_array_equal(step(jnp.ones(3))["y"], 2 * np.ones(3))
    np.testing.assert_array_equal(step(np.ones(3), scale=3.0)["y"], 3 * np.ones(3))
    np.testing.assert_array_equal(step(jnp.ones(5), scale=jnp.float32(4))["y"], 4 * np.ones(5))
    assert step.lower(jnp.ones(3)).compile() is not None
    assert jax.grad(lambda x: step(x)["y"].sum())(jnp.ones(3)).tolist() == [2.0] * 3
    assert jax.jit(step)(jnp.ones(3))["y"].tolist() == [2.0] * 3


def test_results_may_be_donated():
    step = jaxpar.guard(jax.jit(lambda state: state + 1, donate_argnums=0))
    state = jnp.zeros(4)
    for _ in range(5):
        state = step(state)
    assert state.tolist() == [5.0] * 4


def test_it_is_traced_and_compiled_once():
    events = []

    def listen(event, duration_secs, **kwargs):
        if kwargs.get("fun_name") in ("counted", "jit(counted)"):
            events.append(event.rpartition("/")[2])

    def counted(x):
        return x + 1

    step = jaxpar.guard(jax.jit(counted))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(3):
            step(jnp.ones(3))
        once = sorted(events)
        step(jnp.ones(4))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert once == [
        "backend_compile_duration",
        "jaxpr_to_mlir_module_duration",
        "jaxpr_trace_duration",
    ]
    assert sorted(events) == sorted([*once, *once])


def test_static_values_are_part_of_the_program():
    """Two processes with other values of them would compute garbage."""
    jitted = jax.jit(
        lambda x, k, mode, lr: lr * (x[:k].sum() if mode == "sum" else x[:k].max()),
        static_argnums=1,
        static_argnames="mode",
    )
    step, x = jaxpar.guard(jitted), jnp.arange(4.0)
    digests = []
    for k, mode, lr in ((3, "sum", 1.0), (3, "sum", 2.0), (2, "sum", 2.0), (2, "max", 3.0)):
        step(x, k, mode=mode, lr=lr)
        digests.append(watch().state().runs[-1][2])
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    for lr in range(20):  # it is not static: no program of its own
        step(x, 2, mode="max", lr=float(lr))
    assert len(step._programs) == len(step._traced) == 3


def test_results_are_not_held_once_they_are_computed():
    step, x = jaxpar.guard(jax.jit(lambda x: x + 1)), jnp.zeros(4)
    for _ in range(50):
        x = jax.block_until_ready(step(x))
    assert len(watch().pending) <= 2


def test_the_names_of_calls_within_calls():
    inner = jaxpar.guard(jax.jit(lambda x: x + 1))
    with jaxpar.guard("outer"):
        outer = watch().state()
        for _ in range(2):
            jax.block_until_ready(inner(jnp.ones(3)))
        watch()._settle()
        now = watch().state()
    assert (now.number, now.name, now.first, now.first_name) == (outer.number, "outer") * 2
    assert now.done == outer.number - 1
    assert now.entered == outer.number + 2


def test_compilation_is_not_counted(capfd):
    said = []

    def traced(x):
        time.sleep(1.5)
        said.append(capfd.readouterr().err)  # here: what comes after it may take long, too
        return x + 1

    jaxpar.guard(jax.jit(traced), timeout_s=0.5)(jnp.ones(3))
    assert said
    assert "jaxpar.guard" not in said[0]


def test_a_step_of_flax():
    import optax
    from flax import nnx

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @jaxpar.guard
    @nnx.jit
    def step(model, optimizer, x):
        loss, gradient = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, gradient)
        return loss

    losses = [float(step(model, optimizer, jnp.ones((2, 3)))) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert watch().state().runs[-1][2]  # its program is compared


def test_programs_that_differ_are_refused_again():
    alone = Watch()
    alone.count, alone.trouble = 2, {"kind": "programs", "what": "processes differ"}
    program = program_of("step", jax.jit(lambda x: x + 1).trace(1.0), (1.0,), {})
    for number in (1, 2):
        with pytest.raises(ValueError, match="processes differ"):
            GuardedCall(number, "step", 60.0, None, alone, is_jitted=True).run(program)
    alone._bell.close()
    alone._ear.close()


def test_of_processes_that_nothing_is_known_of_nothing_is_said(capfd):
    mesh = jaxpar.make_mesh("dp=1", devices=jax.devices()[:1])
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P()
    )
    x = np.ones(1, np.float32)
    program = program_of("step", jax.jit(total).trace(x), (x,), {})
    call = GuardedCall(1, "step", 60.0, 7, watch(), is_jitted=True, program=program)
    state = {**asdict(ProcessState(rank=1)), "ago": 0.0, "gone": None}
    report(1, 4, {"kind": "alone", "what": "process 0 is gone"}, [state], call, mesh)
    said = capfd.readouterr().err
    assert "waits for process 0 in call 1 of 'step': the first collective that needs it" in said
    assert not re.search(r"process(es)? [\d, ]*[23]", said)


def test_the_error_of_a_lost_connection_says_who_is_gone():
    alone = Watch()
    alone.count, alone.trouble = 2, {"kind": "out [1]", "what": "process 1 is gone"}
    call = GuardedCall(1, "step", 60.0, None, alone, is_jitted=True, doing="running")
    alone.active.append(call)
    raised = ValueError("UNKNOWN: connection closed by peer")
    alone.leave(call, raised)
    alone._bell.close()
    alone._ear.close()
    assert raised.__notes__ == ["jaxpar.guard: process 1 is gone"]


class Model:
    @jaxpar.guard
    def step(self, x):
        return x + 1

    @jaxpar.guard("of its own name", timeout_s=5)
    def other(self, x):
        raise ValueError("as before")


def test_methods_and_errors():
    assert Model().step(jnp.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="as before"):
        Model().other(1)


def test_a_step_that_takes_too_long_is_told(capfd):
    said, end = "", time.monotonic() + 60
    with jaxpar.guard("sleeping", timeout_s=0.2):
        while "Python is at" not in said and time.monotonic() < end:
            time.sleep(0.1)
            said += capfd.readouterr().err
    assert re.search(r"call \d+ of 'sleeping' takes .* s, more than its limit of 0.2 s", said)
    assert re.search(
        r"process 0: in call \d+ of 'sleeping' for .*at test_guard.py:\d+ in test", said
    )


def test_the_line_of_a_thread():
    def waits():
        go_on.wait()

    go_on = Event()
    thread = Thread(target=waits)
    thread.start()
    line = _line_of(thread.ident)
    assert (line.number, line.function) == (waits.__code__.co_firstlineno + 1, "waits")
    go_on.set()
    thread.join()
    assert _line_of(thread.ident) is None
    assert _line_of(get_ident()).function == "test_the_line_of_a_thread"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3,), TypeError, "what must be a function or the name of a step, got 3"),
        (("step", 0), ValueError, "timeout_s=0 must be more than 0"),
        (("step", -1), ValueError, "timeout_s=-1 must be"),
        (("step", 1, 256), ValueError, "exit_code=256 must be at least 0 and at most 255"),
        (("step", "x"), TypeError, "timeout_s must be"),
    ],
)
def test_refused(arguments, error, text):
    what, *more = arguments
    with pytest.raises(error, match=f"^guard: {re.escape(text)}"):
        jaxpar.guard(what, **dict(zip(("timeout_s", "exit_code"), more, strict=False)))


# -- the board ------------------------------------------------------------------------------------


def hear(board, **state):
    """What a process hears that says this of itself."""
    given = {"entered": 1, "known": 1, "name": "step", "runs": ((1, "step", "a"),), **state}
    return board.hear({"state": asdict(ProcessState(**given))})


def test_programs_agree_as_far_as_all_have_come():
    board = Board(3)
    assert hear(board, rank=0, entered=5, known=5)["agreed"] == 0
    assert hear(board, rank=1, entered=4, known=4)["agreed"] == 0
    assert hear(board, rank=2, entered=4, known=3)["agreed"] == 3
    assert hear(board, rank=2, entered=4, known=4)["agreed"] == 4


def test_a_program_that_differs_later_is_found():
    board = Board(2)
    later = ((1, "step", "a"), (7, "step", "b"))
    hear(board, rank=0, entered=7, known=7, runs=later)
    assert hear(board, rank=1, entered=6, known=6)["agreed"] == 6
    answer = hear(board, rank=1, entered=7, known=7)
    assert answer["agreed"] == 6
    assert board.unequal == (7, 0, 1)
    assert answer["want"] == "a"


def test_processes_in_different_functions():
    board = Board(2)
    for _ in range(2):  # in trouble all speak once more
        hear(board, rank=0, runs=((1, "step", "a"),))
        answer = hear(board, rank=1, runs=((1, "evaluate", "b"),))
    what = "processes 0 and 1 differ in call 1: process 0 is in 'step', process 1 in 'evaluate'"
    assert (answer["agreed"], answer["trouble"]["what"]) == (0, what)


def test_arguments_of_different_shapes():
    """Each process is asked for what its program is, and both hear the difference."""
    board, sharding = Board(2), jax.NamedSharding(jaxpar.make_mesh("dp=8"), P("dp"))
    for rank, rows in enumerate((8, 16)):
        x = jax.ShapeDtypeStruct((rows, 8), "float32", sharding=sharding)
        details = program_of("step", jax.jit(jnp.sin).trace(x), (x,), {}).details()
        state = {"rank": rank, "runs": ((1, "step", details["digest"]),)}
        hear(board, **state)
        assert rank == 0 or hear(board, **state)["want"] == details["digest"]
        given = {"entered": 1, "known": 1, "name": "step", **state}
        board.hear({"state": asdict(ProcessState(**given)), "details": details})
    for rank in (0, 1):  # in trouble all speak once more
        answer = hear(board, rank=rank, runs=board.seen[rank].state.runs)
    sharded = rf"sharded by {re.escape(str(P('dp')))}"
    assert re.fullmatch(
        "processes 0 and 1 run different programs in call 1 of 'step': process 0 has argument 0: "
        rf"float32\[8, 8\] {sharded}, process 1 argument 0: float32\[16, 8\] {sharded}",
        answer["trouble"]["what"],
    )


def test_silence_is_no_fault_of_those_that_wait():
    board = Board(2)
    hear(board, rank=1, waiting_s=9.0, timeout_s=1.0, doing="running")
    board.seen[1].at -= 25  # it was heard of so many seconds ago
    assert "trouble" not in hear(board, rank=0, entered=0, known=0, runs=())


def test_silence_is_told_before_jax_ends_all():
    """JAX does 50 s after a process is stopped, or later, with its default of 100."""
    board = Board(3)
    for rank in range(3):
        hear(board, rank=rank, timeout_s=120.0)
    for rank in (1, 2):
        board.seen[rank].at -= 40
    hear(board, rank=0, timeout_s=120.0)
    board.noticed = dict.fromkeys(board.noticed, 0.0)
    assert re.fullmatch(
        r"processes 1, 2 have not answered for 40\.\d s: if it, or its host, is stopped, JAX ends "
        r"all processes 50 to 100 s after that; jaxpar\.initialize\(heartbeat_timeout_seconds=.*\) "
        "sets the latter",
        hear(board, rank=0, timeout_s=120.0)["trouble"]["what"],
    )


def test_one_that_has_finished_a_call_is_not_in_it():
    board = Board(2)
    later = {"rank": 1, "entered": 2, "known": 2, "done": 1, "number": 2, "first": 2}
    hear(board, **later)
    late = {"number": 1, "first": 1, "first_name": "step", "doing": "running"}
    hear(board, rank=0, waiting_s=9.0, timeout_s=1.0, **late)
    board.seen[1].at += 1  # it has spoken since
    answer = hear(board, rank=0, waiting_s=9.0, timeout_s=1.0, **late)
    assert answer["trouble"]["what"].endswith(": process 1 has finished it")
    hear(board, **later, raised="KeyError in call 1 of 'step'")
    answer = hear(board, rank=0, waiting_s=9.0, timeout_s=1.0, **late)
    assert "process 1 has left it after KeyError in call 1 of" in answer["trouble"]["what"]


def test_a_difference_far_along_a_line_is_shown():
    same = {"arguments": [], "collectives": []}
    mine, others = ({**same, "operations": ["x" * 1000 + end]} for end in ("1 of mine", "2"))
    said = first_difference(0, mine, 3, others)
    assert re.fullmatch(r"line 1: process 0 has \.\.\.x+1 of mine, process 3 \.\.\.x+2", said)
    assert len(said) < 500
