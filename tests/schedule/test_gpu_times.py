"""Published times of GPUs: which version of NCCL counts, and what lies between the points."""

from dataclasses import replace

import numpy as np
import pytest

from accuracy.calibrate import products_without_each, without_each
from jaxpar.platforms.chips import Gpu, chip_of, platforms
from jaxpar.schedule import target
from jaxpar.tools.timeline import gpu_times
from jaxpar.tools.timeline import target as targets
from jaxpar.tools.timeline.gpu_tables import GpuTables, published
from jaxpar.tools.timeline.gpu_times import PublicProducts
from jaxpar.tools.timeline.target import measured_of

SMALL = 2**17


@pytest.mark.parametrize(
    ("kind", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA RTX A6000", None),
        ("Tesla V100", None),
        ("TPU v5", None),
        ("", None),
    ],
)
def test_gpus_by_the_names_of_jax(kind, gpu):
    assert gpu_times.gpu_of(kind) == gpu


def test_the_next_older_version_counts():
    assert gpu_times.versions("b200") == ["2.27.3", "2.27.5", "2.28.9", "2.29.2"]
    near = {
        one: gpu_times.nearest_version("b200", one)
        for one in ("", "2.20", "2.27", "2.27.4", "2.28", "2.28.9", "2.29", "2.30.1", "3.0")
    }
    assert near == {
        "": "2.29.2",
        "2.20": "2.27.3",  # older than all
        "2.27": "2.27.5",  # the newest of these
        "2.27.4": "2.27.3",
        "2.28": "2.28.9",
        "2.28.9": "2.28.9",
        "2.29": "2.29.2",
        "2.30.1": "2.29.2",
        "3.0": "2.29.2",
    }


@pytest.mark.parametrize("packages", [{}, {"nvidia-nccl-cu12": "2.27.3"}])
def test_the_installed_version_counts_where_none_is_named(packages, monkeypatch):
    def version(name):
        if name not in packages:
            raise gpu_times.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(gpu_times, "version", version)
    assert gpu_times.installed_nccl() == packages.get("nvidia-nccl-cu12", "")
    chip = target("b200:8").chip
    used = "2.27.3" if packages else "2.29.2"
    named = target("b200:8", nccl=used).chip
    assert named.nccl == used
    times = [measured_of(one).collective("all-reduce", 8, SMALL) for one in (chip, named)]
    own = gpu_times.collectives("b200", used)["all-reduce", 8][SMALL,]
    assert times == [pytest.approx(own), pytest.approx(own)]


def test_a_named_version_changes_small_collectives():
    new, old = (measured_of(target("h100:8", nccl=one).chip) for one in ("2.29", "2.23"))
    times = [one.collective("all-gather", 8, SMALL) for one in (new, old)]
    assert times[0] != times[1]
    assert new.matmul("bf16xbf16->bf16", (1, 64, 4096, 4096)) == old.matmul(
        "bf16xbf16->bf16", (1, 64, 4096, 4096)
    )


@pytest.mark.parametrize(
    ("name", "nccl", "text"),
    [
        ("h100:8", "newest", "target: nccl='newest' must be a version, such as '2.29' or '2.29.2'"),
        ("v5e:2x2", "2.29", "target: 'v5e:2x2' has no NCCL; leave nccl='2.29' out"),
    ],
)
def test_versions_that_are_refused(name, nccl, text):
    with pytest.raises(ValueError, match=text):
        target(name, nccl=nccl)


def test_a_gpu_on_a_bus_takes_no_times_of_a_switch():
    """The same chip with slower links: its products count, by the ratio of peaks."""
    kinds = "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3"
    pcie, sxm = (measured_of(targets._with_measured_links(chip_of(kind))) for kind in kinds)
    assert ("all-gather", 8) not in pcie.collectives
    sizes = "bf16xbf16->bf16", (1, 512, 4096, 4096)
    assert pcie.matmul(*sizes) == pytest.approx(sxm.matmul(*sizes) * 9.9e14 / 7.56e14)


def test_a_product_that_was_measured_takes_its_time():
    made = gpu_times.products("h200", 9.9e14, 4.8e12)
    for number in (0, 100, 1000):
        m, k, n = made.sizes[number].astype(int).tolist()
        assert made.of(m, k, n) == pytest.approx(made.seconds[number], rel=1e-3)
    assert made.has(16, 4096, 4096)
    assert not made.has(1, 16, 4096)


def test_products_between_measured_ones_follow_the_roofline():
    """Each measured one takes twice its roofline; so does what lies between them."""
    sizes = np.array(
        [[m, k, n] for m in (16, 256) for k in (256, 4096) for n in (256, 4096)], float
    )
    flops, hbm = 1e14, 1e12
    bare = PublicProducts(sizes, np.ones(8), flops, hbm)
    made = PublicProducts(sizes, 2 * bare._roofline(sizes), flops, hbm)
    one = np.array([[64.0, 1024.0, 512.0]])
    assert made.of(64, 1024, 512) == pytest.approx(2 * float(bare._roofline(one)[0]))
    assert made.of(64, 1024, 512) < made.of(64, 1024, 1024) < made.of(128, 1024, 1024)


def test_a_size_takes_no_longer_than_a_larger_one():
    spiky = {(512,): 7.0, (1024,): 18.0, (2048,): 8.0, (4096,): 9.0, (8192,): 5.0, (16384,): 20.0}
    assert gpu_times.never_falling(spiky) == dict.fromkeys(list(spiky)[:5], 5.0) | {(16384,): 20.0}
    assert gpu_times.never_falling({}) == {}
    series = gpu_times.collectives("h100", "2.29.2")
    assert series["all-to-all", 4][(1024,)] > 17e-6
    assert published(None, series).collective("all-to-all", 4, 1024) < 8e-6
    # Nor do they tell what their neighbours take; their own time stays what it is.
    guesses, own = zip(*without_each(spiky), strict=True)
    assert own == (18.0, 8.0, 9.0, 5.0)
    assert guesses[:3] == pytest.approx((5.0, 5.0, 5.0))


def test_each_point_is_predicted_from_its_neighbours():
    series = {(1024,): 1e-6, (2048,): 3e-6, (4096,): 4e-6, (16384,): 8e-6}
    [(first, own), (second, other)] = without_each(series)
    assert (own, other) == (3e-6, 4e-6)
    assert first == pytest.approx(2e-6)  # half way in logarithms
    assert second == pytest.approx(3e-6 ** (2 / 3) * 8e-6 ** (1 / 3))
    made = gpu_times.products("b300", 2.25e15, 8e12)
    few = replace(made, sizes=made.sizes[:40], seconds=made.seconds[:40], known={})
    errors = [predicted / seconds for predicted, seconds in products_without_each(few)]
    assert len(errors) == 40
    assert 0.01 < np.std(errors) < 0.3


def test_published_times_count_before_xlas():
    """Of one product in 16 bits; batches, other dtypes and sizes beyond them are XLA's."""
    grid = {(b, m, 512, 512): 1.0 * b * m for b in (1, 2) for m in (256, 512)}
    xlas = GpuTables(
        {"bf16xbf16->bf16": grid, "f32xf32->f32": grid},
        {("all-gather", 8): {(64,): 1.0}, ("all-gather", 4): {(64,): 1.0}},
    )
    sizes = np.array([[m, 512, n] for m in (256, 384) for n in (256, 1024)], float)
    times = PublicProducts(sizes, np.full(4, 5.0), 1e30, 1e30)
    merged = published(times, {("all-gather", 8): {(64,): 2.0}}).before(xlas)
    assert merged.collective("all-gather", 8, 64) == 2.0
    assert merged.collective("all-gather", 4, 64) == 1.0
    assert merged.matmul("bf16xbf16->f32", (1, 256, 512, 512)) == pytest.approx(5.0)
    assert merged.matmul("f16xf16->f16", (1, 256, 512, 512)) == pytest.approx(5.0)
    assert merged.matmul("f32xf32->f32", (1, 256, 512, 512)) == pytest.approx(256.0)
    assert merged.matmul("bf16xbf16->bf16", (2, 256, 512, 512)) == pytest.approx(512.0)
    assert merged.matmul("bf16xbf16->bf16", (1, 512, 512, 512)) == pytest.approx(512.0)  # beyond
    assert merged.has("bf16xbf16->bf16", (1, 300, 900, 512))
    slower = merged.slower(3.0, 2.0)
    assert slower.matmul("bf16xbf16->f32", (1, 256, 512, 512)) == pytest.approx(15.0)
    assert slower.collective("all-gather", 8, 64) == 4.0


def test_no_time_falls_with_size():
    """A series has points that are off; larger ones take no less."""
    for gpu in {gpu.published for gpu in platforms() if isinstance(gpu, Gpu) and gpu.published}:
        for version in gpu_times.versions(gpu):
            times = published(None, gpu_times.collectives(gpu, version)).collectives.values()
            for series in times:
                seconds = [series[size] for size in sorted(series)]
                assert seconds == sorted(seconds)
    assert targets.gpu_of("NVIDIA H200") == "h200"
