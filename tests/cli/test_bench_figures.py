"""What stands beside measured times: bounds, predictions, public rows, reasons with evidence."""

import json
import os
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from jaxpar.platforms.chips import chip_of
from jaxpar.schedule import Floor, Target, compile_for, target, timeline
from jaxpar.tools.accuracy import interval
from jaxpar.tools.accuracy.measurement import Measurement, measurements
from jaxpar.tools.accuracy.nearest import Wanted, nearest
from jaxpar.tools.cli import bench_figures, bench_times
from jaxpar.tools.cli.bench_reasons import Host, reasons_of
from jaxpar.tools.cli.gpu_clocks import Clocks, clocks_in, clocks_of
from jaxpar.tools.cli.main import main
from jaxpar.tools.cli.ops import OPS
from jaxpar.tools.timeline.target import target_of

SMALL = ("bench", "--shapes", "64x64x64", "--repeats", "2", "--ops", "gather-lhs-rows")


# -- the command ----------------------------------------------------------------------------------


def test_of_cpu_devices_there_is_no_figure(tmp_path, capsys):
    data = tmp_path / "bench.json"
    assert main([*SMALL, "--modes", "naive", "--json", str(data)]) == 0
    said = "no figure of this chip (cpu)"
    assert f"bound, prediction and public row: {said}" in capsys.readouterr().out
    record = json.loads(data.read_text())
    assert [row["figures"] for row in record["rows"]] == [{"missing": said}] * 2


@pytest.fixture
def as_h100s(monkeypatch):
    """CPU devices pass for GPUs, which are a thousand times as fast."""

    def pretended(mesh):
        return replace(target_of(mesh), chip=target("h100:8").chip)

    monkeypatch.setattr(bench_times, "target_of", pretended)
    monkeypatch.setattr(bench_figures, "target_of", pretended)
    monkeypatch.setattr(interval, "target_of", pretended)


def test_bound_prediction_and_public_row_stand_beside_a_time(as_h100s, tmp_path, capsys):
    data = tmp_path / "bench.json"
    forms = ["--ops", "scatter-rows", "--modes", "unidirectional"]
    assert main([*SMALL, *forms, "--json", str(data)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    record = json.loads(data.read_text())
    for row in record["rows"]:
        found, grad = row["figures"], row["phase"] != "forward"
        # Each of eight devices sends seven eighths of the partial sums, over one port.
        assert found["bound"] == pytest.approx((1 + grad) * 64 * 64 * 4 * 7 / 8 / 4.5e11)
        assert found["bound"] < found["predicted"] < row["seconds_quartiles"][1]
        assert found["unit"] == "GB/s"
        assert found["public"]["what"].startswith("matmul_reduce_scatter of")
        assert "among 8 devices" in found["public"]["what"]
    assert record["host"]["call_seconds"] > 0
    assert "Is it as fast as it should be?" in text
    assert "is the fastest, at" in text
    # Only where XLA's tables are there: errors of rooflines are not known.
    measured = record["rows"][0]["figures"]["estimate"] != "roofline"
    said, _, off = " ".join(text.split()).partition("(predicted / measured - 1): ")
    assert said.endswith("80% of unseen predictions lie within ")
    assert ("NVIDIA H100, small " in off) if measured else off.startswith("not known")


def test_a_prediction_that_fails_leaves_all_else(as_h100s, monkeypatch, tmp_path, capsys):
    def broken(program):
        raise ValueError("no such instruction\nof many lines")

    monkeypatch.setattr(bench_figures, "timeline", broken)
    data = tmp_path / "bench.json"
    assert main([*SMALL, "--modes", "naive", "--json", str(data)]) == 0
    out = capsys.readouterr().out
    assert out.count("gather-lhs-rows 64x64x64, forward\n") == 2
    assert "no prediction: ValueError: no such instruction" in out
    for row in json.loads(data.read_text())["rows"]:
        assert row["figures"]["predicted"] is None
        assert row["figures"]["bound"] > 0 < row["figures"]["public"]["rate"]


def test_slices_whose_network_has_no_figure():
    own = target("v4:2x2x1", "tp=8")
    args = [jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * 2
    program = compile_for(OPS["gather-lhs-rows"].bind(own.mesh, ("tp",), "naive"), own, *args)
    row = bench_times.Row(
        *("gather-lhs-rows", "64x64x64", "forward", "naive", [1.0], [1.0], None, 0, {}, {}, {}),
        program=program,
    )
    assert bench_figures.figures_of(row, ("tp",), "bfloat16", Host()).bound > 0
    apart = replace(row, program=replace(program, target=target("2xv4:2x2x1", "tp=16")))
    found = bench_figures.figures_of(apart, ("tp",), "bfloat16", Host())
    assert found.startswith("the mesh {'tp': 16} joins 2 TPU slices, and no figure is known of")


# -- the nearest public row -----------------------------------------------------------------------


def test_chips_of_rows_have_intervals():
    works = {interval.KindOfWork(one.kind_of_chip, "matmul", True) for one in measurements()}
    assert all(map(interval.interval_of, works))


@pytest.mark.parametrize(
    ("op", "mesh", "axes", "shape", "group", "flops", "sent"),
    [
        ("matmul", "tp=1", (), (8, 16, 32), 1, 2 * 8 * 16 * 32, 0),
        ("all_gather_matmul", "tp=4", ("tp",), (8, 16, 32), 4, 2 * 8 * 16 * 32, 8 * 16 * 2 * 3 / 4),
        ("gathered_rhs_matmul", "i=4", ("i",), (8, 16, 32), 4, 8192, 16 * 32 * 2 * 3 / 4),
        ("matmul_reduce_scatter", "tp=2", ("tp",), (8, 16, 32), 2, 8192, 8 * 32 * 2 / 2),
        ("all_gather", "x=2,y=4", ("x", "y"), (64,), 8, 0, 64 * 2 * 7),
        ("psum", "x=2,y=4", ("y",), (64,), 4, 0, 2 * 64 * 2 * 3 / 4),
        ("reduce_scatter", "tp=4", ("tp",), (64,), 4, 0, 64 * 2 * 3 / 4),
        ("all_to_all", "tp=4", ("tp",), (8, 8), 4, 0, 64 * 2 * 3 / 4),
        ("ppermute", "tp=4", ("tp",), (64,), 4, 0, 64 * 2),
        ("copy", "tp=1", (), (64,), 1, 0, 0),
    ],
)
def test_flops_and_bytes_of_a_measurement(op, mesh, axes, shape, group, flops, sent):
    one = Measurement("a", "kind", "v5e:2x4", mesh, op, axes, shape, "bfloat16", 1e-3, "")
    assert (one.group, one.flops, one.sent_bytes) == (group, flops, sent)


def wanted(*sizes, group=8, sent=0.0, dtype="bfloat16", fused="gather and matmul"):
    return Wanted((fused, "matmul", "gather"), sizes, group, sent, dtype)


def test_the_nearest_row_is_of_the_same_chip_kind_and_size():
    h100, v5e = chip_of("NVIDIA H100 80GB HBM3"), chip_of("TPU v5 lite")
    found = nearest(wanted(1024, 8192, 6656, sent=1024 * 8192 * 2 * 7 / 8), h100)
    assert found.name == "h100-kraken-ag-128x6656x8192-nccl"
    # What is bound by its bytes is not held against what multiplies.
    found = nearest(wanted(16, 16, 16, sent=2e8), h100)
    assert (found.kind, found.flops, found.kind_of_chip) == ("gather", 0, "NVIDIA H100")
    # Of what travels its bytes count, in whatever numbers they are.
    v6e = chip_of("TPU v6 lite")
    sums = Wanted(("sum",), (64, 64, 64), 8, 5e7, "bfloat16")
    rows = [one for one in measurements() if (one.kind_of_chip, one.kind) == (v6e.kind, "sum")]
    best = min(rows, key=lambda o: abs(np.log(o.group / 8)) + abs(np.log(o.sent_bytes / 5e7)))
    assert nearest(sums, v6e) == best
    assert best.dtype == "float32"
    found = nearest(wanted(4096, 4096, 4096, group=1, fused="none"), v5e)
    assert (found.kind, found.chip) == ("matmul", "v5e")
    eight = nearest(wanted(4096, 4096, 4096, dtype="float8_e4m3fn", fused="none"), h100)
    assert jnp.dtype(eight.dtype).itemsize == 1
    assert nearest(wanted(64, 64, 64), chip_of("TPU v4")) is None


# -- reasons, of programs for described devices ---------------------------------------------------


def reasons(
    where, op, shape, mode="naive", *, options=None, measured=None, host=None, dtype="bf16"
):
    """The texts of the reasons of one form, with a measured time as it was predicted or another."""
    ring = where.mesh.axis_names
    lhs, rhs, _ = OPS[op].specs(ring)
    m, k, n = shape
    args = [
        jax.ShapeDtypeStruct(size, {"bf16": jnp.bfloat16}.get(dtype, dtype), sharding=sharding)
        for size, sharding in (
            ((m, k), NamedSharding(where.mesh, lhs)),
            ((k, n), NamedSharding(where.mesh, rhs)),
        )
    ]
    function = OPS[op].bind(where.mesh, ring, mode)
    program = compile_for(function, where, *args, compiler_options=options)
    played = timeline(program)
    seconds = played.total if measured is None else measured * played.total
    floor = Floor(2 * m * k * n / where.mesh.size / where.chip.flops, 0.0)
    times = (seconds, seconds, seconds)
    found = reasons_of(program, played, floor, ring, times, host or Host())
    assert [one.seconds for one in found] == sorted((one.seconds for one in found), reverse=True)
    return "\n".join(one.text for one in found), found


OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true"


def test_an_option_that_is_not_given_is_named():
    v5p, scatter = target("v5p:2x2x1"), ("scatter-rows", (2048, 2048, 2048))
    text, _ = reasons(v5p, *scatter, options={})
    assert "is synchronous, nothing is computed meanwhile" in text
    assert "the program is compiled without xla_tpu_enable_sparse_core" in text
    assert OFFLOAD in text
    assert "compiled without" not in reasons(v5p, *scatter)[0]


def test_where_no_option_frees_a_collective_a_ring_does():
    text, _ = reasons(target("v5e:2x2"), "scatter-rows", (4096, 4096, 4096))
    assert "no option of this compiler changes that, but a ring does (--modes bidirec" in text
    text, _ = reasons(target("h100:4"), "scatter-rows", (4096, 4096, 4096))
    assert "nothing is computed meanwhile: this mode has no work to overlap with, a ring or" in text


def test_transfers_too_small_to_be_worth_their_starts():
    text, found = reasons(target("v5e:2x4"), "gather-rhs-k", (256, 512, 512), "bidirectional")
    assert "so small that starts and hops take longer than the bytes" in text
    assert found[0].seconds > 0


def test_a_ring_whose_steps_are_not_links():
    good = target("v5e:4x4", "tp=16")
    shuffled = np.random.default_rng(0).permutation(good.mesh.devices)
    bad = replace(good, mesh=Mesh(shuffled, ("tp",)))
    case = ("gather-lhs-rows", (4096, 2048, 256))
    text, _ = reasons(bad, *case)
    assert "neighbours on tp are up to" in text
    assert "messages share links; choose an axis along closed dimensions" in text
    assert "messages share links" not in reasons(good, *case)[0]


def test_a_ring_beyond_its_host():
    case = ("gather-lhs-rows", (8192, 8192, 1024))
    text, _ = reasons(target("h100:2x8", "tp=16"), *case)
    assert "goes beyond one switch: 42.5 GB/s a device in place of 450" in text
    assert "beyond one switch" not in reasons(target("h100:8"), *case)[0]


def test_a_ring_beyond_its_slice():
    case = ("gather-lhs-rows", (4096, 4096, 1024))
    text, _ = reasons(target("2xv6e:2x2", "tp=8"), *case)
    assert "goes beyond one slice: 4.11 GB/s a device in place of 86.8; keep the axis with" in text
    assert "beyond one slice" not in reasons(target("v6e:2x4", "tp=8"), *case)[0]


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "text"),
    [
        ("h100:1", (2048, 2048, 2048), "float32", "32-bit numbers: the peak is for 16 bits"),
        ("h100:1", (256, 4096, 1001), "bf16", "1001 is no multiple of 8, which the fast kernels"),
        ("v5e:1x1", (512, 2048, 2000), "bf16", "2000 is padded to a multiple of 128"),
        ("h100:1", (32, 2048, 2048), "bf16", "too few rows or columns to fill the chip"),
    ],
)
def test_products_below_the_peak(name, shape, dtype, text):
    where = target(name) if "h100" in name else one_of("v5e:2x2")
    found, _ = reasons(where, "gather-lhs-rows", shape, dtype=dtype)
    assert "matmuls reach" in found
    assert "of the chip's peak, at a size of " + " x ".join(map(str, shape)) in found
    assert text in found


def one_of(name):
    """The first device of a slice alone."""
    whole = target(name)
    return Target(name, Mesh(whole.mesh.devices.flat[:1], ("tp",)), whole.chip)


def test_what_the_host_adds():
    where, case = target("h100:1"), ("gather-lhs-rows", (1024, 1024, 1024))
    predicted = reasons(where, *case)[0]
    assert "computes nothing" not in predicted
    assert "beyond the prediction" not in predicted
    host = Host(1e-3, {"xla_gpu_autotune_level": "0"}, Clocks(990.0, 1980.0, 698.0, 700.0))
    text, found = reasons(where, *case, measured=3, host=host)
    assert "a call that computes nothing takes 1000 us here" in text
    assert "GPUs run at 990 of 1980 MHz, at their limit of 700 W" in text
    half = next(one for one in found if "990" in one.text)
    assert half.seconds == pytest.approx(timeline(program_of(where, case)).compute)
    text, _ = reasons(where, *case, measured=3, host=replace(host, call_seconds=0.0, clocks=None))
    assert "the environment gives the compiler xla_gpu_autotune_level=0: try without" in text


def program_of(where, case):
    op, (m, k, n) = case
    args = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((m, k), (k, n))]
    return compile_for(OPS[op].bind(where.mesh, ("tp",), "naive"), where, *args)


def test_times_that_scatter():
    where, case = target("h100:1"), ("gather-lhs-rows", (1024, 1024, 1024))
    program = program_of(where, case)
    played = timeline(program)
    floor = Floor(played.compute, 0.0)
    times = [share * played.total for share in (0.9, 1.0, 1.5)]
    (found,) = reasons_of(program, played, floor, ("tp",), times, Host())
    assert found.text.startswith("calls take from ")
    assert found.seconds == pytest.approx(0.6 * played.total)
    assert not reasons_of(program, played, floor, ("tp",), [played.total] * 3, Host())


# -- clocks ---------------------------------------------------------------------------------------


def test_clocks_of_busy_gpus():
    lines = (
        "300, 1980, 90.0, 700.00, 0\n1755, 1980, 690.1, 700.00, 98\n1740, 1980, 695, 700, 99\n17"
    )
    found = clocks_in(lines)
    assert (found.mhz, found.most) == (1747.5, 1980.0)
    assert str(found) == "GPUs run at 1748 of 1980 MHz, at their limit of 700 W"
    cool = clocks_in("1200, 1980, [N/A], [N/A], 90\n")
    assert str(cool) == "GPUs run at 1200 of 1980 MHz (nvidia-smi -q -d CLOCK,PERFORMANCE says why)"
    assert clocks_in("") is clocks_in("300, 1980, 90, 700, 3\n") is clocks_in("no devices") is None


def test_clocks_are_watched_where_there_is_a_gpu(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 990, 1980, 100, 700, 100\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with clocks_of("cpu") as found:
        pass
    assert found() is None
    with clocks_of("gpu") as found:
        time.sleep(0.5)  # until it has said something
    assert found() == Clocks(990.0, 1980.0, 100.0, 700.0)


def test_clocks_are_watched_for_as_long_as_it_takes(tmp_path, monkeypatch):
    """What is said of minutes is more than a pipe holds, and the last of it is what counts."""
    tool, done = tmp_path / "nvidia-smi", tmp_path / "done"
    idle = "300, 1980, 90.0, 700.00, 0"
    tool.write_text(
        f"#!/bin/sh\nfor n in $(seq 10000); do echo {idle}; done\n"
        f"echo 990, 1980, 100, 700, 100\ntouch {done}\nexec sleep 60\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with clocks_of("gpu") as found:
        until = time.monotonic() + 20
        while not done.exists() and time.monotonic() < until:
            time.sleep(0.05)
    assert found() == Clocks(990.0, 1980.0, 100.0, 700.0)
