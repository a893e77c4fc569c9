"""All forms of a training step compute the same, and the table ends up in a text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tables
import training_step.__main__ as command
from jaxpar import make_mesh
from jaxpar.schedule import Target
from training_step import worker


def test_all_forms_compute_the_same():
    mesh = make_mesh("fx=2,fy=2,cp=1,tp=2")
    case = worker.Case(worker.Model(8, 16, 4, 2, 4), "", "", sequence=8)
    step = worker.Step(case, Target("cpu", mesh, None))
    keys = iter(jax.random.split(jax.random.key(0), 20))

    def fill(described):
        values = jax.random.normal(next(keys), described.shape, jnp.float32) / 4
        return jax.device_put(values, described.sharding)

    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        arguments = jax.tree.map(fill, step.arguments())
        found = [step.build(form)(*arguments) for form in worker.FORMS if form != worker.WINDOWED]
    for other in found[1:]:
        for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(other), strict=True):
            # Partial sums travel as bfloat16.
            np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * np.abs(b).max())


def results(**changed):
    record = {"total": 1e-3, "exposed": 1e-4, "peak": 2**30, "sent": 2**20, "unknown loops": 0}
    record |= {"seconds": 1.0, "estimate": "compiler", "compute": 9e-4, "temporaries": 2**29}
    return {("a case", form): record | changed.get(form, {}) for form in ("jaxpar", "naive")}


def test_the_table_compares_with_the_peers():
    rows = command.table(results(naive={"total": 2e-3, "peak": 2**29})).rows
    assert rows == [
        ["a case", "1.00, 10.0%, 1.00 GiB", "2.00, 5.0%, 0.50 GiB", "-", "-", "0.50", "2.00"]
    ]


def test_rooflines_are_marked():
    roofline = {form: {"estimate": "roofline"} for form in ("jaxpar", "naive")}
    assert command.table(results(**roofline)).rows[0][1] == "~1.00, 10.0%, 1.00 GiB"


def test_a_failure_is_shown():
    found = results() | {("a case", "plain jit"): {"failure": "out of memory"}}
    assert command.table(found).rows[0][3] == "failed"


def test_the_readme_has_the_markers():
    text = command.README.read_text()
    assert tables.rewrite(text, command.SECTION, "new").count("new") >= 1


def test_an_error_is_a_record():
    assert list(worker.serve(["nothing", "naive"])) == [{"failure": "KeyError: 'nothing'"}]


def test_an_unknown_case(capsys):
    with pytest.raises(SystemExit):
        command.main(["--cases", "19"])
    assert "choose from 0,1,2,3,4,5,6,7" in capsys.readouterr().err
