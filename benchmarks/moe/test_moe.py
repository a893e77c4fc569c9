"""All forms of a layer of experts compute the same, and the tables are right."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import moe.__main__ as command
import tables
from jaxpar import make_mesh
from moe import worker


def test_all_forms_compute_the_same():
    """Six experts: two a device, and on the last device none that is real."""
    mesh, t, d, f, experts = make_mesh("ep=4", devices=jax.devices()[:4]), 8, 6, 10, 6
    case = worker.Case(worker.Model(d, f, experts, 2), "", "", 4, tokens=t, factor=4.0)
    count = case.local * 4
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)

    weights = draw(count, d, f), draw(count, d, f), draw(count, f, d)
    operands = draw(4 * t, d), draw(d, experts), weights, draw(4 * t, d)
    specs = P("ep"), P(), P("ep"), P("ep")
    found = {}
    with jax.numpy_dtype_promotion("standard"):
        for form in worker.FORMS:
            local = worker.build(case, form, "gradients", "tpu")
            mapped = jax.shard_map(
                local, mesh=mesh, in_specs=specs, out_specs=P("ep"), check_vma=False
            )
            found[form] = jax.tree.leaves(jax.jit(mapped)(*operands))
    for form, leaves in found.items():
        for a, b in zip(leaves, found["dense"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=form)


def test_the_average_routing():
    """4 of 16 experts, 2 a device: of 8 devices, one is missed by C(14, 4) of C(16, 4) choices."""
    case = worker.Case(worker.Model(100, 1, 16, 4), "", "", 8, tokens=10)
    assert (case.local, case.with_experts, case.load) == (2, 8, 1.0)
    targets = 8 * (1 - 1001 / 1820)
    assert case.targets == pytest.approx(targets)
    assert case.bound(1) == pytest.approx(10 * targets * 7 / 8 * (2 * 200 + 4 * 8))
    assert case.bound(2) == pytest.approx(10 * targets * 7 / 8 * (4 * 200 + 4 * 8))
    padded = worker.Case(worker.Model(100, 1, 4, 2), "", "", 8, tokens=10)
    assert (padded.local, padded.with_experts, padded.load, padded.targets) == (1, 4, 2.0, 2.0)


def test_blocks_are_those_of_the_loops():
    """Of 3700 rows three times 1024, as what is left is less than 5/8 of that, and three of 256."""
    case = worker.Case(worker.Model(1, 1, 8, 1), "", "", 8, tokens=3700)
    trips = {"beyond_slots/": 0, "blocks_of_1024/": 3, "blocks_of_256/": 3, "filled_groups/": 1}
    assert worker.assumed(case, "jaxpar ragged").trips == trips
    more = worker.Case(worker.Model(1, 1, 8, 1), "", "", 8, tokens=700)
    assert [*worker.assumed(more, "jaxpar ragged").trips.values()] == [0, 1, 0, 1]


def results(**changed):
    record = {"total": 1e-3, "exposed": 1e-4, "peak": 2**30, "sent": 2e9, "unknown loops": 0}
    record |= {"estimate": "the compiler's cycles"}
    cases, forms = ("DeepSeek-V3, h100:8", "DeepSeek-V3, b200:8"), ("all-gather", "jaxpar ragged")
    found = {key: dict(record) for key in product(cases, forms, worker.PASSES)}
    for place, change in changed.items():
        key = cases[0], forms[0], place
        found[key] = change if "failure" in change else record | change
    return found


def test_tables_have_a_row_for_each_form_that_is_like_no_other():
    found = results(forward={"estimate": "roofline", "unknown loops": 1})
    forward, times, memory = command.compiled_tables(found)
    assert forward.titles == ["DeepSeek-V3, forward: ms (exposed)", "h100:8", "b200:8"]
    assert forward.rows == [
        ["all-gather", "~1.00? (10.0%)", "1.00 (10.0%)"],
        ["jaxpar ragged", "1.00 (10.0%)", "1.00 (10.0%)"],
    ]
    assert times.rows == [["all-gather", "1.00 (10.0%)", "1.00 (10.0%)"]]
    assert memory.titles[0] == "DeepSeek-V3: GB sent, GiB of HBM"
    assert memory.rows == [["all-gather", "2.00, 1.00", "2.00, 1.00"], ["bound", "1.09", "1.09"]]


@pytest.mark.parametrize(
    ("reason", "shown"),
    [("Ran out of memory in hbm", "out of memory"), ("its process died", "failed")],
)
def test_a_failure_is_shown(reason, shown):
    _, times, memory = command.compiled_tables(results(gradients={"failure": reason}))
    assert times.rows[0] == ["all-gather", shown, "1.00 (10.0%)"]
    assert memory.rows[0] == ["all-gather", "", "2.00, 1.00"]


def test_the_table_of_times():
    records = [{"case": "8 experts", "matmuls": 0.5, "ratios": {"jaxpar": 1.25, "ring": 1.5}}]
    table = command.cpu_table(records)
    assert table.titles == ["case", "matmuls alone, ms", "jaxpar", "ring"]
    assert table.rows == [["8 experts", "500", "1.25", "1.50"]]


@pytest.mark.parametrize("section", [command.COMPILED, command.CPU])
def test_the_readme_has_the_markers(section):
    assert tables.rewrite(command.README.read_text(), section, "new").count("new") >= 1


@pytest.mark.parametrize("arguments", [["--cases", "9"], ["--forms", "sparse"]])
def test_unknown_arguments(arguments, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert "choose from" in capsys.readouterr().err
