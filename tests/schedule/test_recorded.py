"""The parser against modules that both compilers made, recorded with each jax and compiled now.

What is expected was counted from the programs in `record.py`, and by searching the texts.
"""

import re
from dataclasses import dataclass

import pytest
from record import FOLDER, PROGRAMS, SIZE, TRIPS

from jaxpar.platforms.chips import REACHED
from jaxpar.schedule import Assumptions, CompiledProgram, Memory, Timeline, target, timeline
from jaxpar.tools.program.hlo import parse
from jaxpar.tools.program.operations import Loop

BLOCK = SIZE * SIZE // 4 * 2  # bytes of a quarter of an operand in bfloat16
HALF = BLOCK // 2
FLOATS = SIZE * SIZE * 4  # bytes of the whole result in float32
VERSIONS = ("0.10.0", "0.10.2", "0.12.0.1")


@dataclass(frozen=True)
class Facts:
    """What must be found in a module: transfers in the order of their starts, as played."""

    computations: int
    rows: tuple[str, ...]
    sent: tuple[int, ...]  # bytes of each transfer
    synchronous: bool = False  # all of them, or none
    covers: tuple[int, ...] = ()  # at least so many matmuls beside each
    trips: tuple[int, ...] = ()


RING = ("tp +1",) * 3
FACTS = {
    "tpu-ring-one-way": Facts(13, RING, (BLOCK,) * 3, covers=(1, 1, 1)),
    "tpu-ring-both-ways": Facts(
        13,
        ("tp +1", "tp -1", "tp +1", "tp -1"),
        (BLOCK, BLOCK, HALF, HALF),
        covers=(1, 1, 1, 1),
    ),
    "tpu-loop": Facts(6, ("tp +1",) * 5, (BLOCK,) * 5, covers=(1,) * 5, trips=(TRIPS,)),
    "tpu-all-gather": Facts(4, ("tp all-gather",), (3 * BLOCK,), synchronous=True),
    # A start, four matmuls with the same all-gather inside them, a done.
    "tpu-beside-matmuls": Facts(26, ("tp all-gather",), (3 * BLOCK,), covers=(4,)),
    "tpu-reduce-scatter": Facts(5, ("tp reduce-scatter",), (FLOATS * 3 // 4,), synchronous=True),
    # XLA's own rings, both ways: a loop of one trip with two sends each way, and one send more.
    "tpu-gather-rewritten": Facts(
        15, ("tp +1",) * 2 + ("tp -1",) * 3, (BLOCK,) * 5, covers=(0,) * 5, trips=(1,)
    ),
    "tpu-scatter-rewritten": Facts(
        16, ("tp +1",) * 3 + ("tp -1",) * 2, (FLOATS // 4,) * 5, covers=(0,) * 5, trips=(1,)
    ),
    "tpu-all-to-all": Facts(7, ("tp all-to-all",), (BLOCK * 3 // 4,), synchronous=True),
    "gpu-all-to-all": Facts(7, ("tp all-to-all",), (BLOCK * 3 // 4,), covers=(1,)),
    "gpu-ragged": Facts(13, ("tp ragged-all-to-all",), (BLOCK * 3 // 4,), covers=(1,)),
    "gpu-ring-one-way": Facts(14, RING, (BLOCK,) * 3, covers=(1, 1, 1)),
    "gpu-all-gather": Facts(4, ("tp all-gather",), (3 * BLOCK,), synchronous=True),
    "gpu-loop": Facts(9, ("tp +1",) * 5, (BLOCK,) * 5, covers=(1,) * 5, trips=(TRIPS,)),
    "gpu-without-barriers": Facts(4, RING, (BLOCK,) * 3, synchronous=True),
}
OTHERS = ("tpu-all-reduce-scatter", "tpu-ragged", "tpu-ragged-sparse-core")


def recorded(version: str, name: str) -> CompiledProgram:
    text = (FOLDER / version / f"{name}.hlo.txt").read_text()
    described = target(PROGRAMS[name].target)
    return CompiledProgram(described, text, Memory(0, 0, 0, 0, 0), 0.0, None)


def trips(program: CompiledProgram) -> tuple[int | None, ...]:
    return tuple(
        operation.trips
        for schedule in program.module.schedules
        for operation in schedule.operations
        if isinstance(operation, Loop)
    )


def check(program: CompiledProgram, facts: Facts) -> Timeline:
    played = timeline(program)
    transfers = sorted(played.transfers, key=lambda e: (-e.bytes, e.row))
    assert program.module.hlo.is_scheduled
    assert trips(program) == facts.trips
    assert not played.loops_of_unknown_length
    assert tuple(e.row for e in transfers) == facts.rows
    assert tuple(e.bytes for e in transfers) == facts.sent
    assert {e.synchronous for e in transfers} == {facts.synchronous}
    if not facts.synchronous:
        assert all(len(e.covers) >= n for e, n in zip(transfers, facts.covers, strict=True))
    else:
        assert not any(e.covers for e in transfers)
        assert played.exposed == pytest.approx(played.transfer)
    assert played.sent_bytes == sum(facts.sent)
    return played


def starts_and_dones(program: CompiledProgram, kind: str) -> list[int]:
    computations = parse(program.text).computations.values()
    opcodes = [i.opcode for computation in computations for i in computation.instructions]
    return [opcodes.count(f"{kind}-{end}") for end in ("start", "done")]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FACTS)
def test_recorded_module(version, name):
    program = recorded(version, name)
    check(program, FACTS[name])
    assert len(parse(program.text).computations) == FACTS[name].computations
    found = starts_and_dones(program, "collective-permute")
    assert found == [len(re.findall(rf" collective-permute-{end}\(", program.text))
                     for end in ("start", "done")]  # fmt: skip
    assert found[0] == found[1]


@pytest.mark.parametrize("name", FACTS)
def test_module_compiled_now(name):
    check(PROGRAMS[name].compile(), FACTS[name])


@pytest.mark.parametrize("version", [*VERSIONS, "now"])
def test_all_reduce_scatter_fusion(version):
    """v5p rounds the rows up to its tiles, and a permute then moves 48 of them on."""
    name, size = "tpu-all-reduce-scatter", 2048
    program = PROGRAMS[name].compile() if version == "now" else recorded(version, name)
    fused, mended = timeline(program).transfers
    assert (fused.row, fused.bytes) == ("tp reduce-scatter", size * size * 4 * 3 / 4)
    assert fused.synchronous
    assert (mended.row, mended.bytes, mended.synchronous) == ("tp +1", 48 * size * 2, False)


@pytest.mark.parametrize("version", [*VERSIONS, "now"])
@pytest.mark.parametrize("name", ["tpu-ragged", "tpu-ragged-sparse-core"])
def test_ragged_all_to_all_beside_matmuls(version, name):
    """Its operand is sent, not what it writes over; then four groups of 512 rows, of 128 a tile."""
    size, rows = 2048, 512
    program = PROGRAMS[name].compile() if version == "now" else recorded(version, name)
    played = timeline(program)
    (exchange,) = played.transfers
    assert (exchange.row, exchange.bytes) == ("tp ragged-all-to-all", rows * size * 2 * 3 / 4)
    if name == "tpu-ragged-sparse-core":
        assert not exchange.synchronous
    elif version != "now":  # the compiler of jax 0.12 does without the option
        assert exchange.synchronous == version.startswith("0.10")
    matmul, grouped = (e for e in played.events if e.is_matmul)
    flops = program.target.chip.flops
    # Twice the rows of one device, and the three tiles that two groups can share.
    assert grouped.seconds == pytest.approx(2 * (2 * rows + 3 * 128) * size**2 / flops)
    assert 1.0 < matmul.seconds / (2 * rows * size**2 / flops) < 1.5
    half = timeline(program, assumed=Assumptions(sent_rows=rows / 2, grouped_rows=rows))
    (exchange,) = half.transfers
    assert exchange.bytes == rows * size * 3 / 4
    (_, grouped) = (e for e in half.events if e.is_matmul)
    (kernel,) = (x.work for x in program.module.entry.operations if x.name == grouped.name)
    read = kernel.moved / (REACHED * program.target.chip.hbm)  # mostly weights
    assert grouped.seconds == pytest.approx(max(read, 2 * (rows + 3 * 128) * size**2 / flops))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["tpu-loop", "gpu-loop"])
def test_trips_are_counted_without_the_compilers_annotation(version, name):
    program = recorded(version, name)
    bare = program.text.replace("known_trip_count", "unknown")
    assert trips(CompiledProgram(program.target, bare, program.memory, 0.0, None)) == (TRIPS,)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_recorded_instruction_is_parsed(version):
    for path in (FOLDER / version).iterdir():
        text = path.read_text()
        found = sum(len(c.instructions) for c in parse(text).computations.values())
        assert found == len(re.findall(r"^ +(?:ROOT )?%[\w.\-]+ = ", text, re.MULTILINE))


def test_recordings_are_complete():
    assert {path.name for path in FOLDER.iterdir()} == set(VERSIONS)
    for version in VERSIONS:
        names = {path.name.removesuffix(".hlo.txt") for path in (FOLDER / version).iterdir()}
        assert names == set(PROGRAMS) == {*FACTS, *OTHERS}
