"""Described devices: which there are, what they look like, and what every refusal says."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxpar
from jaxpar.platforms.chips import chip_of, platforms
from jaxpar.schedule import Target, compile_for, explain, matmul_floor, target, timeline
from jaxpar.tools.cli import predict_worker
from jaxpar.tools.cli.console import UsageError
from jaxpar.tools.timeline.cuda_plugin import described_gpus, find_plugin

ROWS = PartitionSpec("tp")
target("h100:8")  # where the CUDA compiler is missing, nothing here is tried
GPUS = described_gpus(find_plugin())


def shifted(described: Target):
    x = jax.ShapeDtypeStruct((described.mesh.size * 128, 128), jnp.bfloat16, sharding=ROWS)
    shift = jax.shard_map(
        lambda x: jaxpar.ring_shift(x, "tp"), in_specs=ROWS, out_specs=ROWS
    )  # fmt: skip
    return compile_for(shift, described, x)


@pytest.mark.parametrize(
    ("name", "devices", "kind"),
    [
        ("v4:2x2x1", 8, "TPU v4"),  # two devices a chip, as with tpu7x
        ("v5e:2x2", 4, "TPU v5 lite"),
        ("v5p:2x2x1", 4, "TPU v5"),
        ("v6e:2x2", 4, "TPU v6 lite"),
        ("tpu7x:2x2x1", 8, "TPU7x"),
    ],
)
def test_every_tpu(name, devices, kind):
    described = target(name)
    assert (described.platform, described.mesh.size) == ("tpu", devices)
    assert described.mesh.devices.flat[0].device_kind == kind
    assert described.chip is not None
    assert described.chip.torus
    (transfer,) = timeline(shifted(described)).transfers
    assert (transfer.row, transfer.bytes) == ("tp +1", 128 * 128 * 2)


def test_every_gpu_that_the_compiler_knows():
    assert len(GPUS) >= 4
    for name in GPUS:
        described = target(f"{name}:4")
        assert (described.platform, described.mesh.size) == ("gpu", 4)
        unpublished = " mig-" in name.replace("-mig", " mig") or name == "vr-nvl72"
        assert (described.chip is None) == unpublished, name
        assert described.chip is None or not described.chip.torus


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200"])
def test_usual_gpus_compile(name):
    (transfer,) = timeline(shifted(target(f"{name}:4"))).transfers
    assert (transfer.row, transfer.bytes) == ("tp +1", 128 * 128 * 2)


@pytest.mark.parametrize(
    ("name", "hosts"),
    [("h100:8", 1), ("h100:32", 4), ("h100:4x8", 4), ("h100:2x4", 2), ("h100:4", 1)],
)
def test_gpus_have_hosts(name, hosts):
    devices = target(name).mesh.devices.flat
    assert len({device.process_index for device in devices}) == hosts


def test_meshes_are_those_of_make_mesh():
    described = target("v5p:2x2x2", {"dp": 2, "tp": 4}, axis_types=AxisType.Explicit)
    assert dict(described.mesh.shape) == {"dp": 2, "tp": 4}
    assert set(described.mesh.axis_types) == {AxisType.Explicit}
    assert described.name == "v5p:2x2x2"
    with pytest.raises(ValueError, match="make_mesh: tp=3 = 3 devices, but there are 8"):
        target("v5p:2x2x2", "tp=3")


@pytest.mark.parametrize(
    "name", ["", "v5e", "v5e:", ":2x2", "v5e:2x", "v5e:axb", "h100:0", "v5e:-2"]
)
def test_malformed_names(name):
    with pytest.raises(ValueError, match="is not of the form chip:layout, as in 'v5p:8x8x8'"):
        target(name)


def test_unknown_chips_are_told_which_there_are():
    with pytest.raises(ValueError, match=r"'v9:2x2': 'v9' is not a chip.* TPU: v4.* GPU: .*h100"):
        target("v9:2x2")
    with pytest.raises(ValueError, match=r"write chip:devices or chip:hosts x devices"):
        target("h:8")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "h100:2x2x2",
            r"a layout of GPUs must be devices, or hosts x devices .* 'h100:8' or 'h100:4x8'",
        ),
        (
            "h100:12",
            r"12 devices are no whole hosts of 8 \(12 = 1 x 8 \+ 4\); write hosts x devices",
        ),
    ],
)
def test_layouts_of_gpus(name, message):
    with pytest.raises(ValueError, match=message):
        target(name)


def test_the_environment_is_left_as_it_was():
    before = dict(os.environ)
    target("v5e:2x2")
    target("h100:2")
    assert dict(os.environ) == before


def test_ambiguous_chips_are_told_their_full_names(monkeypatch):
    known = {"a1-40gb": "", "a1-80gb": ""}
    monkeypatch.setattr("jaxpar.tools.timeline.target._gpu_configs", lambda name: known)
    with pytest.raises(ValueError, match=r"'a1' is one of a1-40gb, a1-80gb; write"):
        target("a1:8")


def test_unknown_slices():
    with pytest.raises(ValueError, match=r"libtpu does not know the slice 'v5e:3x5': "):
        target("v5e:3x5")


def test_missing_compilers_name_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"'v5e:2x2' needs .* pip install 'jax\[tpu\]>="):
        target("v5e:2x2")
    with pytest.raises(ImportError, match=r"'b300:8' is no .* pip install 'jax\[cuda13-local\]>="):
        target("b300:8")


def test_4096_chips():
    described = target("v5p:16x16x16", "dp=512,tp=8")
    lhs = jax.ShapeDtypeStruct(
        (512 * 1024, 512), jnp.bfloat16, sharding=PartitionSpec(("dp", "tp"))
    )
    rhs = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16, sharding=PartitionSpec(None, "tp"))
    matmul = jax.shard_map(
        lambda lhs, rhs: jaxpar.all_gather_matmul(lhs, rhs, "tp", mode="bidirectional"),
        in_specs=(PartitionSpec(("dp", "tp")), PartitionSpec(None, "tp")),
        out_specs=PartitionSpec("dp", "tp"),
    )
    program = compile_for(matmul, described, lhs, rhs)
    played = timeline(program)
    assert played.sent_bytes == 7 * 128 * 512 * 2
    assert not any(transfer.synchronous for transfer in played.transfers)


def test_both_compilers_in_a_fresh_process():
    """In either order, and with nothing else of JAX used before."""
    for names in (("v5e:2x2", "h100:4"), ("h100:4", "v5e:2x2")):
        code = (
            "import jax, jax.numpy as jnp; jax.config.update('jax_platforms', 'cpu')\n"
            "from jax.sharding import PartitionSpec as P; import jaxpar\n"
            "from jaxpar.schedule import compile_for, target\n"
            f"for name in {names}:\n"
            "    x = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=P('tp'))\n"
            "    f = jax.shard_map(lambda x: jaxpar.ring_shift(x, 'tp'), in_specs=P('tp'),\n"
            "        out_specs=P('tp'))\n"
            "    print(compile_for(f, target(name), x).module.entry.name, jax.device_count())\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 2


def test_figures_of_half_a_chip():
    for whole in [known.chip for known in platforms()]:
        if whole.cores == 2:
            half = chip_of(whole.kind, 1)
            assert half is not None
            assert (half.flops, half.hbm, half.capacity) == (
                whole.flops / 2,
                whole.hbm / 2,
                whole.capacity / 2,
            )
            assert (half.link, half.clock, half.cores) == (whole.link, whole.clock, 1)
            assert chip_of(whole.kind, 2) == chip_of(whole.kind) == whole
    assert target("tpu7x:2x2x1", figures="book").chip == chip_of("TPU7x", 1)


def test_figures_by_kind():
    assert chip_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert chip_of("NVIDIA A100-SXM4-40GB").capacity == 4e10
    assert chip_of("NVIDIA A100-SXM4-80GB").capacity == 8e10
    assert chip_of("TPU v5 lite").link == 4.5e10
    assert chip_of("TPU v5p") == chip_of("TPU v5")
    assert chip_of("cpu") is None


def test_figures_of_links_are_the_measured_ones_where_there_are_any():
    v5p = target("v5p:2x2x1").chip
    assert (v5p.link, v5p.latency, v5p.start) == (8.63e10, 0.8e-6, 3e-6)
    assert target("v5p:2x2x1", figures="book").chip == chip_of("TPU v5")
    core, book = (target("tpu7x:2x2x1", figures=which).chip for which in ("measured", "book"))
    assert core.hbm == book.hbm == chip_of("TPU7x").hbm / 2
    assert core.link < book.link
    v4 = (target("v4:2x2x1", figures=which).chip for which in ("measured", "book"))
    assert len(set(v4)) == 1  # nobody has
    hosts, of_the_book = (target("h100:2x8", figures=which).chip for which in ("measured", "book"))
    assert hosts.network == pytest.approx(0.85 * of_the_book.network)
    assert (hosts.start, of_the_book.start) == (45e-6, 0)
    assert hosts.link == of_the_book.link  # behind a switch there are tables
    with pytest.raises(ValueError, match=r"^target: figures='mine' must be 'measured' or 'book'"):
        target("v5p:2x2x1", figures="mine")


SLICES = (
    r"the mesh {'tp': 16} joins 2 TPU slices, and no figure is known of the network between slices "
    r"of TPU v4; give the figures of one slice and of the network, in bytes a second and device: "
    r"dataclasses.replace\(of_one_slice.chip, network=...\)$"
)


def test_nothing_is_predicted_of_slices_whose_network_has_no_figure():
    both = target("2xv4:2x2x1")
    program = shifted(both)
    with pytest.raises(ValueError, match=f"^timeline: {SLICES}"):
        timeline(program)
    with pytest.raises(ValueError, match=SLICES):
        explain(program)
    with pytest.raises(ValueError, match=f"^matmul_floor: {SLICES}"):
        matmul_floor(both, "mk,kn->mn", (8, 8), (8, 8), 0.0)
    assert both.chip is None
    given = replace(target("v4:2x2x1").chip, network=1e9)
    slowest = max(timeline(program, given).transfers, key=lambda one: one.seconds)
    assert slowest.seconds == pytest.approx(128 * 128 * 2 / 1e9, rel=0.1)


def test_commands_refuse_slices_whose_network_has_no_figure():
    request = SimpleNamespace(target="2xv4:2x2x1", mesh="tp=16", figures="measured")
    with pytest.raises(UsageError, match=SLICES):
        predict_worker.target_of(request)
    assert predict_worker.target_of(request, needs_figures=False).chip is None
