"""The picture, the table of coverage, and the package's table of GPU times."""

import json

import numpy as np
import pytest

from accuracy import gpu_times
from accuracy.__main__ import coverage
from accuracy.calibrate import LEFT_OUT, Calibration, Error
from accuracy.plot import draw
from jaxpar.tools.accuracy.interval import KindOfWork
from jaxpar.tools.accuracy.measurement import measurements
from jaxpar.tools.accuracy.validate import Held
from jaxpar.tools.timeline.gpu_times import SIZES

POINTS = """gpu,nccl,op,gpus,bytes,us
h100,2.29.2,all_gather,8,512,9.5
h100,2.29.2,all_gather,8,2048,10.25
h100,2.29.2,psum,8,512,11
"""
PRODUCTS = """gpu,vllm,m,k,n,us
h100,0.24.0,16,64,32,2.6
h100,0.24.0,1,64,32,2.5
"""


def test_a_picture_has_each_kind_and_chip(tmp_path):
    held = [
        Held(one, one.kind_of_chip, one.seconds * 1.1, (-0.2, 0.2) if number % 3 else None)
        for number, one in enumerate(measurements())
    ]
    draw(held, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "a.png").stat().st_size > 20_000


def test_coverage_is_of_intervals_made_without_the_error():
    """Errors of two sources: where one of them differs, the other does not tell."""
    rng = np.random.default_rng(0)
    works = [
        KindOfWork(chip, "sum", large) for chip in ("TPU7x", "NVIDIA H100") for large in (0, 1)
    ]
    errors = [
        Error(work, source, float(shift + rng.normal(scale=0.1)))
        for work in works
        for source, shift in (("a", 0.0), ("b", 2.0))
        for _ in range(40)
    ]
    rows = coverage(Calibration(errors)).rows
    assert [row[:2] for row in rows] == [
        ["TPU, below 20 us", "80"],
        ["TPU, 20 us and more", "80"],
        ["GPU, below 20 us", "80"],
        ["GPU, 20 us and more", "80"],
    ]
    for _, _, inside, without, width in rows:
        assert 75 <= int(inside[:-1]) <= 95
        assert int(without[:-1]) == 0
        assert int(width) > 500
    left_out = [replace_source(one) for one in errors]
    assert all(int(row[1]) < 80 for row in coverage(Calibration(left_out)).rows)


def replace_source(error):
    return error._replace(source=LEFT_OUT)


def test_the_table_of_gpu_times_is_made_of_two_files(tmp_path, monkeypatch, capsys):
    points, products = tmp_path / "a.csv", tmp_path / "b.csv"
    points.write_text(POINTS)
    products.write_text(PRODUCTS)
    monkeypatch.setattr(gpu_times, "OUT", tmp_path / "gpu_times.json")
    assert gpu_times.main([str(points), str(products)]) == 0
    made = json.loads((tmp_path / "gpu_times.json").read_text())
    assert "Apache-2.0" in made["about"]["license"]
    series = made["collectives"]["h100"]
    assert series["2.29.2 all-gather 8"] == [9.5, None, 10.25, *[None] * (SIZES - 3)]
    assert series["2.29.2 all-reduce 8"][0] == 11
    assert made["matmuls"]["h100"] == [[1, 16], [64, 64], [32, 32], [2.5, 2.6]]
    assert gpu_times.main([]) == 2
    assert "COLLECTIVES.csv" in capsys.readouterr().out
    points.write_text(POINTS.replace(",2048,", ",3000,"))
    with pytest.raises(ValueError, match=r"h100 2\.29\.2 all-gather 8 has 3000 bytes, no power of"):
        gpu_times.main([str(points), str(products)])


def test_the_package_has_the_table():
    kept = json.loads(gpu_times.OUT.read_text())
    assert len(kept["collectives"]) == 7
    assert len(kept["matmuls"]) == 6
    assert gpu_times.OUT.stat().st_size < 300_000
