"""Traces: of CPU devices as they are recorded here, of TPUs and GPUs as their format is defined."""

import gzip
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.profiler import ProfileData
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from record import FOLDER, PROGRAMS
from traces import NS, Core, Plane, Streams, write

from jaxpar.compiler.compat import reading_profiles
from jaxpar.schedule import (
    CompiledProgram,
    Memory,
    compile_for,
    read_trace,
    target,
    timeline,
)
from jaxpar.tools.program.costs import Demand, Message
from jaxpar.tools.program.operations import Collective, Compute, Control, Done, Free, Schedule
from jaxpar.tools.timeline.command_buffers import with_instructions
from jaxpar.tools.timeline.timeline import covered
from jaxpar.tools.timeline.trace_events import Ran
from jaxpar.tools.timeline.trace_to_timeline import Measured

TRIPS, RUNS = 3, 3


def step(x, w):
    """A gather and a matmul, then a loop of a matmul and a sum over the other axis."""
    h = lax.all_gather(x, "tp", axis=1, tiled=True) @ w

    def body(h, _):
        h = jnp.tanh(h @ h.T) @ h
        return h, lax.psum(h.sum(), "dp")

    h, sums = lax.scan(body, h, length=TRIPS)
    return h, sums


@pytest.fixture(scope="module")
def here():
    return target("here", "dp=2,tp=4")


@pytest.fixture(scope="module")
def program(here):
    mapped = jax.shard_map(
        step, mesh=here.mesh, in_specs=(P("dp", "tp"), P()), out_specs=(P("dp"), P()),
        check_vma=False,
    )  # fmt: skip
    sizes = ((128, 64), P("dp", "tp")), ((64, 32), P())
    args = [
        jax.device_put(np.ones(shape, np.float32), NamedSharding(here.mesh, spec))
        for shape, spec in sizes
    ]
    return compile_for(mapped, here, *args)


def record(folder, *calls):
    """Records calls, all of which have run before."""
    for function, args in calls:
        jax.block_until_ready(function(*args))
    with jax.profiler.trace(folder):
        for function, args in calls:
            jax.block_until_ready(function(*args))


@pytest.fixture(scope="module")
def folder(here, program, tmp_path_factory):
    """Some runs of it, and one of another program."""
    folder = tmp_path_factory.mktemp("trace")
    other = jax.jit(lambda x: (x @ x.T).sum()), program.args[:1]
    with jax.set_mesh(here.mesh):
        record(folder, other, *RUNS * [(jax.jit(program.function), program.args)])
    return folder


# -- CPU devices of one process --------------------------------------------------------------------


@pytest.mark.parametrize("device", ["CPU:0", "CPU:5"])
def test_devices_of_one_process(folder, program, device):
    measured = read_trace(folder, program, device=device)
    assert measured.estimate == "measured"
    assert len(measured.runs) == RUNS
    assert measured.total == sorted(measured.runs)[RUNS // 2]
    assert measured.peak_bytes == program.memory.peak > 0
    rows = Counter(event.row for event in measured.transfers)
    assert rows == {"tp all-gather": 1, "dp all-reduce": TRIPS}
    (gather,) = [e for e in measured.transfers if e.row == "tp all-gather"]
    assert gather.bytes == 64 * 16 * 4 * 3
    assert gather.op.endswith("all_gather")
    assert not gather.synchronous
    assert measured.sent_bytes == gather.bytes + TRIPS * 4

    events = measured.events
    assert [e.start for e in events] == sorted(e.start for e in events)
    assert all(0 <= e.start <= e.end <= measured.total * (1 + 1e-9) for e in events)
    computed = Counter(e.name for e in events if e.kind == "compute")
    once = {
        one.name
        for one in program.module.entry.operations
        if not isinstance(one, (Free, Control)) and one.work.is_matmul
    }
    assert once
    assert all(computed[name] == 1 for name in once)
    assert sum(e.is_matmul for e in events) == 1 + 2 * TRIPS
    assert not set(computed) & {
        one.name
        for schedule in program.module.schedules
        for one in schedule.operations
        if isinstance(one, Control)
    }


def test_what_waits_is_what_is_not_computed(folder, program):
    measured = read_trace(folder, program)
    computing = [e for e in measured.events if e.kind == "compute"]
    waiting = [e for e in measured.events if e.kind == "wait"]
    assert measured.compute == pytest.approx(covered(computing))
    assert measured.transfer == pytest.approx(covered(measured.transfers))
    # Together they are as long as both are apart, and with what is hidden they are the transfers.
    apart = covered([*computing, *waiting])
    assert apart == pytest.approx(measured.compute + measured.exposed)
    assert apart == pytest.approx(covered([*computing, *measured.transfers]))
    assert 0 < measured.exposed <= measured.transfer < measured.total
    named = {e.name for e in measured.transfers}
    assert {e.name for e in waiting} <= named


def test_runs_can_be_chosen(folder, program):
    runs = read_trace(folder, program).runs
    assert [read_trace(folder, program, run=n).total for n in range(RUNS)] == list(runs)
    with pytest.raises(
        ValueError, match=r"read_trace: run must be one of the 3 in the trace, from 0, got 3"
    ):
        read_trace(folder, program, run=3)


def test_without_a_program(here, program, tmp_path):
    """The program that took the longest, in the words of the trace."""
    folder = tmp_path
    with jax.set_mesh(here.mesh):
        record(folder, *RUNS * [(jax.jit(program.function), program.args)])
    known, found = (read_trace(folder, of) for of in (program, None))
    assert found.runs == known.runs
    assert [e.name for e in found.transfers] == [e.name for e in known.transfers]
    assert Counter(e.row for e in found.transfers) == {"all-gather": 1, "all-reduce": TRIPS}
    # What uses a result, and so when an instruction ends at the latest, only the program tells.
    assert known.compute <= found.compute * (1 + 1e-9) <= found.total * (1 + 1e-9)
    assert found.sent_bytes == found.peak_bytes == 0


def test_what_a_trace_has_not(folder, program, here, tmp_path):
    wrong = r"read_trace: device='CPU:9' is not in the trace; choose from CPU:0, CPU:1, "
    with pytest.raises(ValueError, match=wrong):
        read_trace(folder, program, device="CPU:9")
    with pytest.raises(
        ValueError, match=r"read_trace: no \*\.xplane\.pb under .*; pass the folder"
    ):
        read_trace(tmp_path, program)
    with pytest.raises(TypeError, match="read_trace: program must be what compile_for returns"):
        read_trace(folder, program.text)
    other = compile_for(jnp.sin, here, jax.ShapeDtypeStruct((8,), jnp.float32))
    wrong = r"read_trace: no instruction of jit_sin is in the trace, which has .*jit_step\("
    with pytest.raises(ValueError, match=wrong):
        read_trace(folder, other)
    with jax.profiler.trace(tmp_path / "idle"):
        pass
    with pytest.raises(ValueError, match="the trace names no instructions that a device ran; "):
        read_trace(tmp_path / "idle", program)
    broken = tmp_path / "broken.xplane.pb"
    broken.write_bytes(b"no trace")
    with pytest.raises(ValueError, match=r"broken\.xplane\.pb is no trace \(.+\); name what jax"):
        read_trace(broken, program)
    for name in ("host.trace.json.gz", "perfetto_trace.json.gz", "a.perfetto-trace"):
        for_viewer = tmp_path / name
        for_viewer.write_bytes(gzip.compress(b'{"traceEvents": []}'))
        text = f"{name} is no trace (it is for a viewer, and names no instructions); give {broken}"
        with pytest.raises(ValueError, match=re.escape(text)):
            read_trace(for_viewer, program)
    broken.unlink()
    with pytest.raises(
        ValueError, match=r"; give the \*\.xplane\.pb that jax\.profiler\.trace wro"
    ):
        read_trace(for_viewer, program)
    with pytest.raises(
        ValueError, match="is no path of this host; copy it to this host with `gclou"
    ):
        read_trace("gs://bucket/traces", program)


# -- CPU devices of two processes ------------------------------------------------------------------

# Microseconds of three calls, as the reader of the network benchmark that came before this one
# measured them in the same recordings: of transfers, of matmuls, and of both at a time.
TWO_PROCESSES = {
    "0.10.2": (7391.551, 902.974, 534.062),
    "0.12.0.1": (1948.021, 1790.895, 646.810),
}


@pytest.mark.parametrize("version", TWO_PROCESSES)
def test_one_of_two_processes(version, tmp_path):
    recorded = Path(__file__).parent / "traced" / version
    text = gzip.decompress((recorded / "ring.hlo.txt.gz").read_bytes()).decode()
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(gzip.decompress((recorded / "ring.xplane.pb.gz").read_bytes()))
    # Two devices are enough to read by: what ran had a process each.
    mesh = target("here", "rest=4,tp=2")
    program = CompiledProgram(mesh, text, Memory(0, 0, 0, 0, 0), 0.0, None)
    first = read_trace(file, program, run=0)
    runs = [first, *(read_trace(file, program, run=n) for n in (1, 2))]
    assert len(first.runs) == 3
    transfer = sum(run.transfer for run in runs)
    matmuls = [[e for e in run.events if e.is_matmul] for run in runs]
    matmul = sum(map(covered, matmuls))
    either = sum(covered([*m, *run.transfers]) for m, run in zip(matmuls, runs, strict=True))
    found = np.array([transfer, matmul, transfer + matmul - either]) * 1e6
    np.testing.assert_allclose(found, TWO_PROCESSES[version], atol=2e-3)
    for run, beside in zip(runs, matmuls, strict=True):
        (sent,) = run.transfers
        assert sent.row == "tp +1"
        assert sent.bytes == 256 * 256 * 4
        at_a_time = [m.name for m in beside if m.start < sent.end and m.end > sent.start]
        assert list(sent.covers) == at_a_time


HLO = """HloModule jit_f, is_scheduled=true, num_partitions=2

ENTRY %main (x: f32[2,4], w: f32[4,2]) -> f32[2,2] {
  %x = f32[2,4]{1,0} parameter(0)
  %w = f32[4,2]{1,0} parameter(1)
  %dot.7 = f32[2,2]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %bitcast.1 = f32[2,2]{1,0} bitcast(%dot.7)
  %ppermute.9 = f32[2,4]{1,0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1}}
  ROOT %add.3 = f32[2,2]{1,0} add(%bitcast.1, %bitcast.1)
}
"""


@pytest.mark.parametrize(("added", "ends"), [(400, 350), (200, 200)])
def test_a_thread_that_returns_before_its_work_is_done(added, ends, here, tmp_path):
    """It is done when a thread notices, or when what uses its result begins."""
    plane = Plane("/host:CPU")

    def ran(name, start, length, number, noticed, thread="a", **more):
        said = {"hlo_op": name, "hlo_module": "jit_f", "program_id": 1, "run_id": -5}
        plane.add(thread, name, start, length, **said, device_ordinal=3, _p=number, **more)
        plane.add("b", f"end: {name}", noticed, 1, _c=number)

    ran("dot.7", 100, 10, 1, noticed=350)
    ran("ppermute.9", 120, 20, 2, noticed=300)
    ran("add.3", added, 50, 3, noticed=added + 49)
    plane.add("b", "Rendezvous", 130, 10)
    program = CompiledProgram(here, HLO, Memory(0, 0, 0, 0, 0), 0.0, None)
    measured = read_trace(write(tmp_path, plane), program)
    found = {e.name: (round(e.start * 1e9), round(e.end * 1e9)) for e in measured.events}
    assert found["dot.7"] == (0, ends - 100)
    assert found["add.3"] == (added - 100, added - 50)
    (sent,) = measured.transfers
    assert (round(sent.start * 1e9), round(sent.end * 1e9)) == (20, 200)
    assert (sent.row, sent.bytes, sent.covers) == ("tp +1", 32.0, ("dot.7",))
    hidden = covered([e for e in measured.events if e.kind == "compute"])
    either = covered([e for e in measured.events if e.kind != "wait"])
    assert measured.exposed == pytest.approx(either - hidden)


# -- TPU and GPU, as the format is defined ---------------------------------------------------------


def recorded(version, name):
    text = (FOLDER / version / f"{name}.hlo.txt").read_text()
    described = target(PROGRAMS[name].target)
    return CompiledProgram(described, text, Memory(0, 0, 0, 0, 0), 0.0, None)


TPU = sorted(name for name in PROGRAMS if name.startswith("tpu-"))
GPU = sorted(name for name in PROGRAMS if name.startswith("gpu-"))


def facts(found):
    transfers = sorted(found.transfers, key=lambda e: (e.name, e.start))
    return [(e.name, e.op, e.row, e.bytes, e.synchronous, e.covers) for e in transfers]


@pytest.mark.parametrize("version", ["0.10.0", "0.12.0.1"])
@pytest.mark.parametrize("name", TPU)
def test_a_tpu_core_does_one_thing_after_the_other(version, name, tmp_path):
    program = recorded(version, name)
    core = Core(program, Plane("/device:TPU:0"))
    end = core.run(5_000)
    measured = read_trace(write(tmp_path, core.plane), program)
    assert measured.total * 1e9 == pytest.approx(end - 5_000)
    assert measured.runs == (measured.total,)
    # What ran is what is predicted to run: the same transfers beside the same matmuls.
    predicted = timeline(program)
    assert facts(measured) == facts(predicted)
    assert measured.sent_bytes == predicted.sent_bytes
    kinds = Counter(e.kind for e in predicted.events)
    found = Counter(e.kind for e in measured.events)
    assert (found["compute"], found["transfer"]) == (kinds["compute"], kinds["transfer"])
    waits = [e for e in measured.events if e.kind == "wait" and e.row == "compute"]
    assert measured.exposed == pytest.approx(sum(e.seconds for e in waits))
    # All that the core did is accounted for, but for the starts of copies.
    copies = sum(e.seconds for e in measured.events if e.row == "memory" and e.kind == "wait")
    begun = len([e for e in measured.events if e.kind == "copy"]) * NS["start"]
    assert (measured.compute + measured.exposed + copies) * 1e9 + begun == pytest.approx(
        measured.total * 1e9
    )


def test_times_of_a_tpu(tmp_path):
    program = recorded("0.12.0.1", "tpu-ring-one-way")
    core = Core(program, Plane("/device:TPU:0"))
    for number, start in enumerate((1_000, 90_000)):
        core.run(start, number)
    measured = read_trace(write(tmp_path, core.plane), program)
    assert len(measured.runs) == 2
    assert measured.compute * 1e9 == pytest.approx(core.spent["compute", ""] / 2)
    waited = sum(core.spent[kind, "collective-permute"] for kind in ("start", "done"))
    assert measured.exposed * 1e9 == pytest.approx(waited / 2)
    one = measured.transfers[0]
    waits = [e for e in measured.events if e.kind == "wait" and e.name == one.name]
    assert [round(e.seconds * 1e9) for e in waits] == [NS["start"], NS["done"]]
    assert (waits[0].start, waits[1].end) == pytest.approx((one.start, one.end))
    assert one.latency > 0
    assert one.links == 1.0
    assert measured.link_utilisation > 0


def test_a_tpu_says_when_an_asynchronous_transfer_arrived(tmp_path):
    program = recorded("0.12.0.1", "tpu-ring-one-way")
    found = []
    for beside in (False, True):
        core = Core(program, Plane("/device:TPU:0"))
        core.run(1_000, beside=beside)
        found.append(read_trace(write(tmp_path / str(beside), core.plane), program))
    until_done, own = found
    for later, sooner in zip(until_done.transfers, own.transfers, strict=True):
        assert (later.end - sooner.end) * 1e9 == pytest.approx(100)
        assert (sooner.start - later.start) * 1e9 == pytest.approx(5)
    assert own.exposed == pytest.approx(until_done.exposed)


@pytest.mark.parametrize("begun", [False, True])
def test_a_fused_collective_goes_on_with_one_that_is_under_way(begun):
    message = Message("all-gather", 8.0)
    start = Collective("s", "", (), Demand(), message, "fusion", True, False, False)
    fused = Collective("f", "", (start,), Demand(moved=1), message, "fusion", False, True, True)
    done = Done("d", "", (start,), Demand(), "fusion")
    ran = [Ran("f", 10.0, 30.0, "core", "jit_f"), Ran("d", 30.0, 50.0, "core", "jit_f")]
    ran = [Ran("s", 0.0, 10.0, "core", "jit_f"), *ran] if begun else ran
    events = Measured(ran, 0.0, {one.name: one for one in (start, fused, done)}, None).events()
    found = {(e.name, e.kind, round(e.start * 1e9), round(e.end * 1e9)) for e in events}
    beside = {("f", "compute", 10, 30), ("s", "transfer", 0, 50)}
    waits = {("s", "wait", 0, 10), ("s", "wait", 30, 50)}
    alone = {("f", "transfer", 10, 30), ("f", "wait", 10, 30)}
    assert found == (beside | waits if begun else alone)


def test_runs_of_a_tpu_and_other_programs(tmp_path):
    program = recorded("0.12.0.1", "tpu-loop")
    core = Core(program, Plane("/device:TPU:1"))
    ends = [core.run(0, 1)]
    core.ns = {**NS, "compute": 2_000}
    ends.append(core.run(100_000, 2))
    core.ns = {**NS, "compute": 5_000}
    ends.append(core.run(300_000, 3))
    core.plane.add("XLA Modules", "jit_other(1)", 900_000, 1_000_000)
    core.plane.add("XLA Ops", "%dot.1 = f32[2,2]{1,0} dot(%a, %b)", 900_000, 1_000_000)
    core.plane.add("Steps", "0", 0, 2_000_000)
    of_no_run = core.texts["collective-permute-start"]
    core.plane.add("XLA Ops", of_no_run, ends[1] + 5, 100_000)
    sparse = Plane("/device:TPU:1 SparseCore 0")
    sparse.add("Sparse Core Ops", "%copy.1 = f32[2] copy(%x)", 0, 10)
    write(tmp_path, sparse, core.plane)
    measured = read_trace(tmp_path, program)
    lengths = [ends[0], ends[1] - 100_000, ends[2] - 300_000]
    assert [round(seconds * 1e9) for seconds in measured.runs] == lengths
    assert measured.total * 1e9 == pytest.approx(lengths[1])
    assert len(measured.transfers) == 5
    other = read_trace(tmp_path)  # the longest program
    assert [(e.name, e.is_matmul, e.kind) for e in other.events] == [("dot.1", True, "compute")]
    with pytest.raises(ValueError, match=r"device='TPU:0' is not in the trace; choose from TPU:1$"):
        read_trace(tmp_path, program, device="TPU:0")


def test_words_of_a_tpu_without_a_program(tmp_path):
    program = recorded("0.12.0.1", "tpu-loop")
    core = Core(program, Plane("/device:TPU:0"))
    core.run(0)
    known, found = (read_trace(write(tmp_path, core.plane), of) for of in (program, None))
    assert [e.row for e in found.transfers] == ["collective-permute"] * 5
    assert [e.name for e in found.transfers] == [e.name for e in known.transfers]
    times = [(e.start, e.end) for e in found.transfers]
    assert times == [(e.start, e.end) for e in known.transfers]
    assert (found.compute, found.exposed) == (known.compute, known.exposed)


@pytest.mark.parametrize("version", ["0.10.0", "0.12.0.1"])
@pytest.mark.parametrize("name", GPU)
def test_kernels_of_a_gpu(version, name, tmp_path):
    program = recorded(version, name)
    streams = Streams(program, Plane("/device:GPU:0"))
    end = 0
    for _ in range(2):
        end = streams.run(end + 50_000)
    streams.plane.add(Streams.COMPUTE, "memset", 0, 10)  # of no program
    kernel, start, length, said = streams.plane.lines[Streams.COMPUTE][-2]
    streams.plane.add("XLA Ops", kernel, start, length, **said)  # derived from its stream
    measured = read_trace(write(tmp_path, streams.plane), program, run=1)
    assert len(measured.runs) == 2
    assert measured.total == pytest.approx(measured.runs[0])
    predicted = timeline(program)
    named = [(e.name, e.row, e.bytes, e.synchronous) for e in measured.transfers]
    assert sorted(named) == sorted(
        (e.name, e.row, e.bytes, e.synchronous) for e in predicted.transfers
    )
    assert measured.compute * 1e9 == pytest.approx(streams.computed / 2)
    assert measured.exposed * 1e9 == pytest.approx(streams.waited / 2)
    computed = [e.name for e in measured.events if e.kind == "compute"]
    assert len(computed) * NS["compute"] == streams.computed / 2
    assert measured.transfer * 1e9 == pytest.approx(len(named) * streams.sending)
    for event in measured.transfers:
        beside = [
            e.name
            for e in measured.events
            if e.is_matmul and e.start < event.end and e.end > event.start
        ]
        assert event.synchronous or list(event.covers) == beside


def read_recorded(name, tmp_path):
    """What one H100 did, by jax 0.11.2: the program, and a run of it."""
    folder = Path(__file__).parent / "traced/h100"
    text = gzip.decompress((folder / f"{name}.hlo.txt.gz").read_bytes()).decode()
    program = CompiledProgram(target("h100:1"), text, Memory(0, 0, 0, 0, 0), 0.0, None)
    file = tmp_path / f"{name}.xplane.pb"
    file.write_bytes(gzip.decompress((folder / f"{name}.xplane.pb.gz").read_bytes()))
    return program, read_trace(file, program)


def test_kernels_that_a_command_buffer_launched_have_their_instructions(tmp_path):
    """Of attention with its gradients: kernels of a library, and one for two instructions."""
    program, found = read_recorded("attend_graphs", tmp_path)
    assert found.runs == pytest.approx([4754e-6, 4748e-6, 4741e-6], abs=1e-6)
    launched = [
        one.name
        for one in program.module.entry.operations
        if not isinstance(one, (Control, Done, Free))
    ]
    assert sorted({e.name for e in found.events}, key=launched.index) == launched
    # The library's matmuls, each with what sets its memory: 1499 us of that run.
    library = sum(e.seconds for e in found.events if e.name.startswith("custom-call"))
    assert library == pytest.approx(1499e-6, abs=1e-6)


def test_a_loop_s_kernels_are_the_same_in_command_buffers_and_out_of_them(tmp_path):
    """The compiler's copies to and from a stack have other names there."""
    times = []
    for name in ("scanned_plain", "scanned_graphs"):
        _, found = read_recorded(name, tmp_path)
        taken = Counter()
        for event in found.events:
            taken[event.name] += event.seconds
        times.append(taken)
    plain, graphs = times
    both = {"custom-call.1", "gemm_fusion_dot_general.1", "input_reduce_fusion", "loop_add_fusion"}
    assert both <= plain.keys() & graphs.keys()
    for name in plain.keys() & graphs.keys():
        assert graphs[name] == pytest.approx(plain[name], rel=0.25, abs=1e-6)  # two runs


def schedule_of(*names):
    """A schedule of instructions that each launch something."""
    return Schedule("main", tuple(Compute(name, "", (), Demand()) for name in names))


def launched(*kernels, buffer="command_buffer_1", launch=1, start=0):
    """What one launch of a command buffer ran."""
    return [
        Ran(buffer, start + i, start + i + 1, "stream", "jit_f(1)", kind=kernel, launch=launch)
        for i, kernel in enumerate(kernels)
    ]


@pytest.mark.parametrize(
    ("kernels", "names"),
    [
        (["a_1", "b", "gemm", "c"], ["a.1", "b", "custom-call.7", "c"]),
        # The memory of a matmul, and of a fusion, is set in front of them.
        (["a_1", "b", "Memset", "gemm", "Memset", "c"], "a.1 b custom-call.7 custom-call.7 c c"),
        (["a_1", "b", "gemm", "reduce", "c"], "a.1 b custom-call.7 custom-call.7 c"),
        (["a_1", "a_1", "gemm", "c"], ["a.1", "b", "custom-call.7", "c"]),  # alike: one kernel
        (["gemm", "c"], ["custom-call.7", "c"]),  # others ran in front of the buffer
        (["b", "gemm"], ["b", "custom-call.7"]),
        (["more", "and", "more", "than", "one", "a_1"], ["a.1"] * 6),
        (["unknown"], ["unknown"]),
    ],
)
def test_the_instruction_of_each_kernel_of_a_launch(kernels, names):
    found = with_instructions(launched(*kernels), [schedule_of("a.1", "b", "custom-call.7", "c")])
    assert [one.name for one in found] == (names.split() if isinstance(names, str) else names)


def test_each_launch_of_a_command_buffer_stands_for_itself():
    """One whose beginning the trace has not, one of another program, and one in a loop."""
    schedules = [schedule_of("a", "custom-call", "b"), schedule_of("x", "dot.2", "y")]
    ran = launched("gemm", "b", launch=1)
    ran += launched("x", "gemm", "y", launch=2, start=10)
    ran += launched("a", "gemm", "b", launch=3, start=20)
    plain = Ran("copy.3", 30, 31, "stream", "jit_f(1)")
    found = [one.name for one in with_instructions([plain, *ran], schedules)]
    assert found == ["custom-call", "b", "x", "dot.2", "y", "a", "custom-call", "b", "copy.3"]


def test_kernels_of_a_gpu_without_a_program(tmp_path):
    program = recorded("0.12.0.1", "gpu-ring-one-way")
    streams = Streams(program, Plane("/device:GPU:0"))
    streams.run(0)
    found = read_trace(write(tmp_path, streams.plane))
    assert [e.row for e in found.transfers] == ["collective-permute"] * 3
    assert found.exposed * 1e9 == pytest.approx(streams.waited)


TWO_SENT = """HloModule jit_f, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[8,8], y: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %y = f32[8,8]{1,0} parameter(1)
  %a = f32[8,8]{1,0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{2,3}}
  %b = f32[8,8]{1,0} collective-permute(%y), channel_id=2, source_target_pairs={{0,1},{2,3}}
  %c = f32[8,8]{1,0} collective-permute(%y), channel_id=3, source_target_pairs={{1,0},{3,2}}
  ROOT %add.1 = f32[8,8]{1,0} add(%x, %y)
}
"""


def on_streams(*kernels, module="jit_f", program_id=1):
    """A GPU's plane of kernels, each by its instruction, its start and its length."""
    plane = Plane("/device:GPU:0")
    for number, (name, start, length) in enumerate(kernels):
        said = {"hlo_op": name, "hlo_module": module, "program_id": program_id}
        plane.add(f"Stream #{number}(Compute)", f"kernel_{name}", start, length, **said)
    return plane


@pytest.fixture(scope="module")
def two_sent():
    return CompiledProgram(target("h100:4"), TWO_SENT, Memory(0, 0, 0, 0, 0), 0.0, None)


def test_of_several_transfers_the_first_to_arrive_is_waited_for(two_sent, tmp_path):
    plane = on_streams(("a", 0, 500), ("b", 120, 180), ("c", 100, 50), ("add.1", 400, 50))
    measured = read_trace(write(tmp_path, plane), two_sent)
    waits = [
        (e.name, round(e.start * 1e9), round(e.end * 1e9))
        for e in measured.events
        if e.kind == "wait"
    ]
    # Until c has arrived it is the first, then b; then a, and again when nothing computes any more.
    assert waits == [
        *(("a", 0, 100), ("c", 100, 150), ("b", 150, 300), ("a", 300, 400), ("a", 450, 500)),
    ]
    assert measured.exposed * 1e9 == pytest.approx(450)
    # b has the links of a, on which that was started before it; c goes the other way.
    queued = {e.name: round(e.queued * 1e9) for e in measured.transfers}
    assert queued == {"a": 0, "b": 180, "c": 0}


def test_an_instruction_may_launch_several_kernels(two_sent, tmp_path):
    plane = on_streams(*((name, 10 * n, 10) for n, name in enumerate("aabca")))
    runs = read_trace(write(tmp_path, plane), two_sent).runs
    assert [round(seconds * 1e9) for seconds in runs] == [40, 10]


def test_of_programs_of_one_name_the_one_that_fits(two_sent, tmp_path):
    """Two programs are called jit_f; of the other one only one instruction has a name in this."""
    other = on_streams(("a", 0, 100), ("of.the.other", 100, 900), program_id=2)
    plane = on_streams(("a", 2000, 100), ("b", 2100, 100), ("add.1", 2200, 100))
    for line, events in plane.lines.items():
        other.lines[f"Stream #1{line}"] += events
    measured = read_trace(write(tmp_path, other), two_sent)
    assert [e.name for e in measured.events if e.kind != "wait"] == ["a", "b", "add.1"]
    assert len(measured.runs) == 1


def test_the_newest_recording_of_several_hosts(tmp_path):
    program = recorded("0.12.0.1", "tpu-all-gather")
    for when, host, start in (
        ("2026_11_23_12_00_00", "a", 7),
        ("2026_11_24_12_00_00", "a", 9),
        ("2026_11_24_12_00_00", "b", 11),
    ):
        core = Core(program, Plane("/device:TPU:0"), {**NS, "synchronous": 100 * start})
        core.run(start)
        write(tmp_path, core.plane, host=host, when=when)
    found = {
        device: read_trace(tmp_path, program, device=device)
        for device in (None, "a TPU:0", "b TPU:0")
    }
    times = [round(measured.exposed * 1e9) for measured in found.values()]
    assert times == [900, 900, 1100]
    with pytest.raises(ValueError, match=r"choose from a TPU:0, b TPU:0$"):
        read_trace(tmp_path, program, device="TPU:0")


def test_it_is_the_format_that_jax_reads(tmp_path):
    plane = Plane("/device:TPU:0")
    plane.add("XLA Ops", "%copy.1 = f32[2] copy(%x)", 3, 5, run_id=2)
    (file,) = Path(write(tmp_path, plane)).rglob("*.xplane.pb")
    with reading_profiles():
        (found,) = ProfileData.from_file(str(file)).planes
        (line,) = found.lines
        (event,) = line.events
        assert (line.name, event.start_ns, event.duration_ns) == ("XLA Ops", 3, 5)
        assert dict(event.stats) == {"run_id": 2}
