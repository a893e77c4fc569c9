"""A chip that nobody has asked for: a newcomer adds one file, as CONTRIBUTING says, and no more."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import jaxpar
from jaxpar.platforms.chips import Fitted, Gpu, Observed, Platform, Tpu, platforms

FILE = '''"""TPU v3.

Source: Jouppi et al., "A domain-specific supercomputer for training deep neural networks" (2020).
"""

from jaxpar.platforms.chips import Compiler, Fitted, Observed, Tpu
from jaxpar.platforms.compilers import WHOLE_MATMULS

V3 = Tpu(
    kind="TPU v3",
    names=("v3",),
    flops=1.23e14,
    hbm=9e11,
    capacity=2**35,
    vmem=2**24,
    cores=2,
    clock=9.4e8,
    dimensions=2,
    closed=32,
    synchronous_around=None,
    link=8.2e10,
    network=0.0,
    host=1.6e10,
    compiler=Compiler((WHOLE_MATMULS,)),
    delays_transfers=False,
    cuts_first=True,
    fitted=Fitted(within=0.0, step_passes=0.0, chunk_passes=2.0, piece=3e-6, resident=0.3),
    measured=Observed(link=None, network=None, sustained=1.0, sparse_core_starts=1.0),
)
'''

ASKED = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import jaxpar
from jaxpar.ring.order import order_of
from jaxpar.schedule import compile_for, target, timeline
from jaxpar.tools.accuracy.interval import KindOfWork, text_of
from jaxpar.tools.cli.doctor_command import starts_that_wait

chips = target("v3:4x4", "dp=4,tp=8")
step = jax.shard_map(
    lambda x, w: jaxpar.all_gather_matmul(x, w, "tp"),
    in_specs=(P(("dp", "tp")), P(None, "tp")), out_specs=P("dp", "tp"),
)
x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 2048), (2048, 8192)))
shown = jaxpar.ways(step, x, w, target=chips)
print(json.dumps({
    "file": jaxpar.__file__,
    "kind": chips.chip.kind,
    "half": chips.chip.flops,
    "hops": jaxpar.ring_hops(chips.mesh, "tp").max().item(),
    "options": jaxpar.compiler_options(chips),
    "cuts_first": order_of("TPU v3").cuts_first,
    "estimated": timeline(compile_for(jaxpar.jit(step), chips, x, w)).estimate,
    "seconds": [len(site.algorithms) for site in shown.sites],
    "ways": str(shown),
    "bands": text_of(KindOfWork("TPU v3", "matmul", True)),
    "doctor": list(starts_that_wait({"jax": "0.12.0"}, "TPU v3")),
}))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What a copy of the package says that has this file, too."""
    folder = tmp_path_factory.mktemp("newcomer")
    ours = Path(jaxpar.__file__).parent
    shutil.copytree(ours, folder / "jaxpar", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "jaxpar/platforms/families/tpu_v3.py").write_text(FILE)

    def ask(*command):
        variables = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, env=variables, cwd=folder
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    found = json.loads(ask("-c", ASKED).splitlines()[-1])
    assert Path(found["file"]).is_relative_to(folder)
    return {**found, "ask": ask}


def test_it_takes_one_file():
    assert len(FILE.splitlines()) <= 30


def test_target_and_mesh_know_it(answers):
    assert (answers["kind"], answers["half"]) == ("TPU v3", 6.15e13)  # a device is half of a chip
    assert answers["hops"] == 1  # 2 x 2 chips of two cores


def test_the_compiler_gets_its_options(answers):
    [(name, value)] = answers["options"].items()
    assert "windowed_einsum" in name
    assert value == "1000000"
    assert answers["cuts_first"]
    assert "psum_scatter_start on TPU v3 is synchronous" in answers["doctor"][0]


def test_ways_and_bands_know_it(answers):
    assert all(answers["seconds"])
    assert "no figures" not in answers["ways"]
    assert "TPU v3, large matmuls: -" in answers["bands"]
    assert "(no measurements, " in answers["bands"]
    assert answers["estimated"] == "the compiler's cycles"


def test_predict_knows_it(answers):
    shape = ("--target", "v3:2x2", "--shapes", "2048x2048x4096", "--modes", "naive")
    said = answers["ask"]("-m", "jaxpar", "predict", *shape, "--no-cache")
    assert "TPU v3, large gathers: " in " ".join(said.split())


@pytest.mark.parametrize("record", [Tpu, Gpu, Fitted, Observed])
def test_a_record_has_no_silent_default(record):
    """A chip that lacks a field is an error of its file."""
    known = {field.name: field for field in fields(record)}
    assert all(field.default is field.default_factory is MISSING for field in known.values())
    for lacking in known:
        with pytest.raises(TypeError, match=f"missing 1 required .*'{lacking}'"):
            record(**{name: None for name in known if name != lacking})


def test_the_records_that_are_there():
    kinds = [known.kind for known in platforms()]
    names = [name for known in platforms() for name in known.names]
    assert len(kinds) == len(set(kinds)) >= 19
    assert len(names) == len(set(names)) >= 12
    for known in platforms():
        assert isinstance(known, Platform)
        assert min(known.flops, known.hbm, known.capacity, known.link, known.host) > 0
        if isinstance(known, Gpu):
            owners = [gpu for gpu in platforms() if isinstance(gpu, Gpu)]
            timed = {table for gpu in owners for table in gpu.timed}
            assert timed.issuperset(known.tables or ())
