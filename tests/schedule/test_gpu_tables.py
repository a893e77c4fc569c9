"""Tables of measured times: read from a plugin, between their sizes and beyond them."""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.platforms.chips import chip_of
from jaxpar.schedule import compile_for, target, timeline
from jaxpar.tools.program.costs import Message
from jaxpar.tools.timeline import target as targets
from jaxpar.tools.timeline.gpu_tables import GpuTables, tables_of
from jaxpar.tools.timeline.links import Links
from jaxpar.tools.timeline.target import measured_of

RING = [(n, (n + 1) % 8) for n in range(8)]
SWAPS, ONE_WAY = [(n, n ^ 1) for n in range(8)], [(n, n + 4) for n in range(4)]
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def measured_chip(kind):
    return targets._with_measured_links(chip_of(kind))


def varint(number):
    low = [number >> shift & 127 for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([part | 128 for part in low[:-1]] + low[-1:])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def collective(kind, group, elements, rate):
    shape = field(2, 11) + field(3, varint(elements)) + field(5, field(1, b"\0"))
    if kind == "collective-permute":  # pairs of sources and targets in place of groups
        among = b"".join(field(52, field(1, a) + field(2, b)) for a, b in group)
    else:
        among = field(92, field(1, 8 // group) + field(2, group) + field(3, b"\x08"))
    return field(1, field(1, field(2, kind) + field(3, shape) + among) + field(6, rate))


def matmul(b, m, n, k, rate):
    sizes = f"    entries {{\n      b: {b}\n      m: {m}\n      n: {n}\n      k: {k}\n"
    return f'{sizes}      flops {{ key: "bf16xbf16->bf16" value: {rate} }}\n    }}\n'


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A plugin whose library has small tables of two GPUs."""
    grid = [(b, m, n, k) for b in (1, 2) for m in (256, 512) for n in (256, 512) for k in (256,)]
    known = "".join(matmul(*sizes, 2 * 10**12) for sizes in grid)
    other = matmul(1, 256, 256, 256, 1)
    text = "# proto-file: x\n# proto-message: xla.GemmPerfTable\n\n"
    for key, entries in (("sm_107", other), ("sm_90", known), ("gfx90a", other)):
        text += f'entries {{\n  key: "{key}"\n  value {{\n{entries}  }}\n}}\n'
    # Of these the smaller array is said to take longer.
    rows = [("all-gather", 8, 256, 5 * 10**8), ("all-gather", 8, 1024, 4 * 10**9)]
    rows += [("reduce-scatter", 4, 64, 10**9)]
    for rate, pairs in enumerate((RING, SWAPS, ONE_WAY), 1):
        rows.append(("collective-permute", pairs, 256, rate * 10**9))
    profiles = field(2, b"".join(collective(*row) for row in rows))
    one = field(1, "sm_90") + profiles
    folder = tmp_path / "some_plugin"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "xla_cuda_plugin.so").write_bytes(
        b"\x7fELF\0" + text.encode() + b"\0\0" + field(1, one) + b"\0"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(targets, "gpu_of", lambda kind: None)  # XLA's tables alone
    for kept in (tables_of, targets._as_fast_as):
        kept.cache_clear()
    yield "some_plugin"
    for kept in (tables_of, targets._as_fast_as):
        kept.cache_clear()
    sys.modules.pop("some_plugin", None)


def test_tables_of_a_plugin(plugin):
    tables = tables_of(plugin, H100)
    assert tables.matmuls.keys() == {"bf16xbf16->bf16"}
    assert len(tables.matmuls["bf16xbf16->bf16"]) == 8
    assert tables.collectives == {
        ("all-gather", 8): {(1024,): 1024e-9, (4096,): 1024e-9},
        ("reduce-scatter", 4): {(1024,): 1024e-9},
        ("collective-permute", 0): {(1024,): 1024e-9},
        ("collective-permute, swapping", 0): {(1024,): 1024 / 2e9},
        ("collective-permute, one way", 0): {(1024,): 1024 / 3e9},
    }
    assert tables_of("no_such_plugin", H100) is None
    assert tables_of(plugin, "Tesla V100") is None
    assert tables_of(plugin, "NVIDIA B200") is None  # nothing of its own


def test_a_gpu_without_a_table_takes_that_of_another_one(plugin, monkeypatch):
    """By the ratio of their peaks, and of their links where these are of the same kind."""
    monkeypatch.setattr(targets, "find_plugin", lambda: plugin)
    h100, a100, on_a_bus = map(measured_chip, (H100, A100, "NVIDIA H100 PCIe"))
    own, found, slow = map(measured_of, (h100, a100, on_a_bus))
    sizes = "bf16xbf16->bf16", (2, 512, 512, 256)
    assert found.matmul(*sizes) / own.matmul(*sizes) == pytest.approx(h100.flops / a100.flops)
    assert found.collective("all-gather", 8, 1024) == pytest.approx(1024e-9 * 4.5 / 3)
    assert slow.collectives == {}
    assert slow.matmul(*sizes) > own.matmul(*sizes)
    assert measured_of(measured_chip("Tesla V100")) is None


def test_times_between_sizes_and_beyond_them():
    grid = {
        (b, m, n, 256): b * m * n * 1e-9 for b in (1, 2) for m in (256, 512) for n in (256, 512)
    }
    tables = GpuTables({"bf16xbf16->bf16": grid}, {("all-gather", 8): {(64,): 1.0, (256,): 2.0}})
    for sizes in ((1, 256, 256, 256), (1, 300, 400, 256), (2, 512, 512, 256)):
        for dtypes in ("bf16xbf16->bf16", "bf16xbf16->f32", "f16xf16->f16"):
            assert tables.matmul(dtypes, sizes) == pytest.approx(np.prod(sizes[:3]) * 1e-9)
    assert tables.matmul("bf16xbf16->bf16", (4, 1024, 512, 512)) == pytest.approx(
        2 * 512 * 512 * 1e-9 * 8
    )
    assert tables.matmul("bf16xbf16->bf16", (1, 8, 256, 256)) is None
    assert tables.matmul("f64xf64->f64", (1, 256, 256, 256)) is None
    assert tables.matmul("", ()) is None
    eight = tables.matmul("f8e4m3fnxf8e4m3fn->f8e4m3fn", (1, 256, 256, 256))
    assert eight == pytest.approx(256 * 256 * 1e-9 / 2)  # half of 16 bits
    assert tables.collective("all-gather", 8, 128) == pytest.approx(2**0.5)
    assert tables.collective("all-gather", 8, 512) == pytest.approx(4)
    assert tables.collective("all-gather", 8, 8) == 1  # as long as the smallest one
    assert tables.collective("all-gather", 4, 128) is None
    # The largest size has 128 bytes a second. What the others take beyond that is latency.
    for size, latency in ((8, 1 - 8 / 128), (64, 0.5), (128, 2**0.5 - 1), (256, 0), (512, 0)):
        assert tables.latency("all-gather", 8, size) == pytest.approx(latency)
    for sizes, inside in (((1, 300, 400, 256), True), ((4, 512, 512, 256), False), ((), False)):
        assert tables.has("bf16xbf16->f32", sizes) == tables.has("s8xs8->s32", sizes) == inside
    assert not tables.has("f64xf64->f64", (1, 256, 256, 256))
    assert tables.has_collective("all-gather", 8, 8)
    assert not tables.has_collective("all-gather", 8, 512)
    assert not tables.has_collective("all-gather", 4, 128)


def test_eight_bits_are_no_faster_than_half_of_sixteen():
    sizes, none = (1, 256, 256, 256), {}
    tables = GpuTables(
        {"bf16xbf16->bf16": {sizes: 4.0}, "f8e4m3fnxf8e4m3fn->bf16": {sizes: 1.0}}, none
    )
    assert tables.matmul("f8e4m3fnxf8e4m3fn->bf16", sizes) == 2.0
    tables.matmuls["f8e4m3fnxf8e4m3fn->bf16"][sizes] = 3.0
    assert tables.matmul("f8e4m3fnxf8e4m3fn->f32", sizes) == pytest.approx(3.0)
    assert tables.matmul("s8xs8->s32", sizes) == 2.0


def test_truth_values_have_no_table():
    tables = GpuTables({"bf16xbf16->bf16": {(1, 256, 256, 256): 1e-5}}, {})
    assert tables.matmul("predxpred->pred", (1, 512, 512, 512)) is None


def test_a_chip_with_other_figures_has_no_table(plugin, monkeypatch):
    monkeypatch.setattr(targets, "find_plugin", lambda: plugin)
    chip = target("h100:2x8").chip
    own = tables_of(plugin, H100)
    assert measured_of(chip) == own
    assert measured_of(replace(chip, network=1.0)) == own  # which is in no table
    assert measured_of(replace(chip, link=1.0)) is None
    assert measured_of(target("v5e:2x2").chip) is None
    monkeypatch.setattr(targets, "find_plugin", lambda: None)
    assert measured_of(chip) is None


def test_a_book_has_no_tables(plugin, monkeypatch):
    """The vendor's peak and links, whatever was measured of them."""
    measured, book = (target("h100:8", figures=which) for which in ("measured", "book"))
    args = [jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=P())] * 2
    program = compile_for(jnp.matmul, book, *args)
    monkeypatch.setattr(targets, "find_plugin", lambda: plugin)
    assert measured_of(measured.chip)
    assert measured_of(book.chip) is None
    assert book.chip == chip_of(H100)
    assert timeline(program).estimate == "roofline"
    assert timeline(program, measured.chip).estimate == "published and XLA's tables and rooflines"
    gather = Message("all-gather", 1e9)
    at_links = Links(book.mesh, book.chip).transfer(gather, 1.0)
    assert at_links.route.seconds.max() == pytest.approx(7e9 / book.chip.link)


def test_collectives_behind_one_switch_take_what_was_measured(plugin, monkeypatch):
    monkeypatch.setattr(targets, "find_plugin", lambda: plugin)
    one, two = target("h100:8", "tp=8"), target("h100:2x8", "dp=2,tp=8")
    gather = Message("all-gather", 256.0)  # of 2048 in all
    links = Links(one.mesh, one.chip)
    sent = links.transfer(gather, 1.0)
    # As long as an array of twice the size: half of it is latency.
    assert sent.route.seconds.tolist() == [pytest.approx(512e-9)] * 16
    assert links.latency(sent.route) == pytest.approx(512e-9)
    assert (sent.sent, sent.route.hops) == (7 * 256, 0)
    over_both = Links(two.mesh, two.chip).transfer(gather, 1.0)
    assert over_both.route.hops > 0  # the network is in no table
    assert links.transfer(Message("all-reduce", 256.0), 1.0).route.hops > 0
    assert sent.is_measured
    by_xla = links.transfer(replace(gather, kernel="one-shot"), 1.0)  # the table is NCCL's
    assert (by_xla.row, by_xla.is_measured) == ("tp (XLA's one-shot) all-gather", False)
    assert by_xla.route.seconds.tolist() == sent.route.seconds.tolist()


@pytest.mark.parametrize(
    ("pairs", "seconds"),
    [
        (RING, 1024e-9),
        (RING[:-1], 1024e-9),  # a pipeline, which does not close
        (SWAPS, 512e-9),
        ([(0, 1), (1, 0), (2, 2)], 512e-9),  # who keeps its own sends nothing
        (ONE_WAY, 1024e-9 / 3),
    ],
)
def test_permutes_behind_one_switch_take_what_was_measured(pairs, seconds, plugin, monkeypatch):
    """By who sends to whom, however many take part."""
    monkeypatch.setattr(targets, "find_plugin", lambda: plugin)
    one, two = target("h100:8", "tp=8"), target("h100:2x4", "tp=8")
    message = Message("collective-permute", 1024.0, pairs=tuple(pairs))
    links = Links(one.mesh, one.chip)
    sent = links.transfer(message, 1.0)
    assert sent.route.seconds == pytest.approx(seconds)
    assert links.latency(sent.route) == pytest.approx(0, abs=1e-18)
    # The way back has links of its own where a device only sends, or only receives.
    back = links.transfer(replace(message, pairs=tuple(pair[::-1] for pair in pairs)), 1.0)
    shared = np.intersect1d(sent.route.links, back.route.links).size
    moving = [pair for pair in pairs if pair[0] != pair[1]]
    assert sent.route.links.size == 2 * len(moving)
    assert (shared == 0) == (pairs == ONE_WAY)
    assert (sent.sent, sent.route.hops, sent.is_measured) == (1024, 0, True)
    beyond = Links(two.mesh, two.chip).transfer(message, 1.0)
    assert beyond.is_measured == (pairs == SWAPS or len(pairs) == 3)
    large = replace(message, payload=1e6)
    assert not Links(one.mesh, one.chip).transfer(large, 1.0).is_measured


def test_a_permute_to_itself_sends_nothing(plugin, monkeypatch):
    monkeypatch.setattr(targets, "find_plugin", lambda: plugin)
    one = target("h100:8", "tp=8")
    message = Message("collective-permute", 1024.0, pairs=((0, 0), (1, 1)))
    assert not Links(one.mesh, one.chip).transfer(message, 1.0).route.seconds.size
