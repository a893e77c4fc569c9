"""Programs for several TPU slices: how they are read, and what they take."""

import re
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.schedule import compile_for, explain, matmul_floor, program_floor, target, timeline
from jaxpar.tools.accuracy.interval import texts_of
from jaxpar.tools.accuracy.measurement import measurements
from jaxpar.tools.cli.main import main
from jaxpar.tools.program.costs import Message
from jaxpar.tools.program.mesh_axes import axes_of, in_mesh
from jaxpar.tools.program.operations import Collective, Done, read
from jaxpar.tools.timeline.links import Links

TWO = target("2xv5e:2x2", "pp=2,tp=4")
START = TWO.chip.start + TWO.chip.latency  # of a transfer between slices


def compiled(described, function, shape=(4096, 4096), *more):
    spec = P(described.mesh.axis_names)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=spec)
    mapped = jax.shard_map(
        function, in_specs=(spec, *[P()] * len(more)), out_specs=spec, check_vma=False
    )
    return compile_for(mapped, described, x, *more)


def messages(program):
    found = [one.message for one in program.module.entry.operations if isinstance(one, Collective)]
    return [in_mesh(one, program.target.mesh) for one in found]


def test_a_sum_between_slices_has_the_rate_that_was_measured():
    """Google's benchmark divides these bytes by this time, of a matrix that the slices share."""
    both = target("2xv6e:16x16", "dcn=2,ici=256")
    links, matrix = Links(both.mesh, both.chip), 17408**2 * 2
    message = Message("all-reduce", matrix / 2, between_slices=True)
    transfer = links.transfer(message, 1.0)
    seconds = transfer.route.seconds.max() + links.latency(transfer.route)
    assert matrix * (2 - 1) * 2 / 2 / 2 / seconds == pytest.approx(4.113e9, rel=2e-3)
    (row,) = (one for one in measurements() if one.kind == "sum between slices")
    assert row.sent_bytes == transfer.sent
    assert (row.chip, row.kind_of_chip) == ("v6e", "TPU v6 lite")


@pytest.mark.parametrize(
    ("function", "row", "sent"),  # of 1 MiB on a device
    [
        (lambda x: lax.psum(x, "pp"), "pp (DCN) all-reduce", 1),
        (lambda x: lax.all_gather(x, "pp"), "pp (DCN) all-gather", 1),
        (lambda x: lax.psum_scatter(x, "pp", tiled=True), "pp (DCN) reduce-scatter", 1 / 2),
        (lambda x: lax.all_to_all(x, "pp", 0, 0, tiled=True), "pp (DCN) all-to-all", 1 / 2),
        (lambda x: lax.ppermute(x, "pp", [(0, 1), (1, 0)]), "pp +1 (DCN)", 1),
        (lambda x: lax.ppermute(x, "pp", [(0, 1)]), "pp +1 (DCN)", 1),
    ],
)
def test_transfers_between_slices_take_the_network(function, row, sent):
    (transfer,) = timeline(compiled(TWO, function, (4096, 1024))).transfers
    assert (transfer.row, transfer.bytes) == (row, sent * 2**20)
    assert transfer.seconds == pytest.approx(sent * 2**20 / 3.125e9 + START)
    assert (transfer.links, transfer.queued, transfer.synchronous) == (1.0, 0.0, False)


def test_a_sum_over_slices_is_a_scatter_a_sum_between_slices_and_a_gather():
    inside = target("v5e:2x2", "tp=4")
    shape = (8 * 2048, 1024)  # 4 MiB a device
    one = [
        timeline(compiled(inside, function, (shape[0] // 2, 1024))).transfers
        for function in (
            lambda x: lax.psum_scatter(x, "tp", tiled=True),
            lambda x: lax.all_gather(x[:512], "tp", tiled=True),
        )
    ]
    ((scatter,), (gather,)) = one
    found = timeline(compiled(TWO, lambda x: lax.psum(x, ("pp", "tp")), shape)).transfers
    rows = ["tp reduce-scatter", "pp (DCN) all-reduce", "tp all-gather"]
    assert [transfer.row for transfer in found] == rows
    # A quarter of 4 MiB leaves a device: half of it, twice.
    by_hand = 2**20 * 2 * (2 - 1) / 2 / 3.125e9 + START
    expected = [scatter.seconds, by_hand, gather.seconds]
    assert [transfer.seconds for transfer in found] == pytest.approx(expected)


def test_collectives_inside_of_slices_are_those_of_one():
    """Both slices have the same coordinates, and links of their own."""
    inside = target("v5e:2x2", "tp=4")
    for function in (
        lambda x: lax.psum(x, "tp"),
        lambda x: lax.all_to_all(x, "tp", 0, 0, tiled=True),
        lambda x: lax.ppermute(x, "tp", [(i, (i + 1) % 4) for i in range(4)]),
    ):
        (alone,) = timeline(compiled(inside, function, (4096, 1024))).transfers
        (both,) = timeline(compiled(TWO, function, (8192, 1024))).transfers
        assert (both.seconds, both.bytes, both.links, both.row) == pytest.approx(
            (alone.seconds, alone.bytes, alone.links, alone.row)
        )
    links = Links(TWO.mesh, TWO.chip)
    first, second = (
        set(links.permute(tuple((s + i, s + (i + 1) % 4) for i in range(4))).links.tolist())
        for s in (0, 4)
    )
    assert len(first) == len(second) == 4
    assert not first & second


def test_a_transfer_between_slices_is_hidden_by_enough_work():
    w = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)

    def passed_on(x, w):
        return lax.ppermute(x, "pp", [(0, 1), (1, 0)])

    def with_work(x, w):
        return passed_on(x, w) + jnp.tanh(w @ w)[: x.shape[0], : x.shape[1]]

    alone = timeline(compiled(TWO, passed_on, (8 * 64, 2048), w))
    beside = timeline(compiled(TWO, with_work, (8 * 64, 2048), w))
    (transfer,) = beside.transfers
    assert alone.exposed == pytest.approx(alone.transfers[0].seconds)
    assert transfer.covers
    assert beside.exposed < 0.5 * alone.exposed


def test_a_permute_over_all_axes_goes_inside_and_between():
    everyone = [(i, (i + 1) % 8) for i in range(8)]
    program = compiled(TWO, lambda x: lax.ppermute(x, ("pp", "tp"), everyone), (4096, 1024))
    inside, between = sorted(messages(program), key=lambda one: one.between_slices)
    assert inside.pairs == tuple((s + a, s + b) for s in (0, 4) for a, b in pairwise(range(4)))
    assert sorted(between.pairs) == [(3, 4), (7, 0)]


def test_slices_that_two_axes_share():
    four = target("4xv5e:2x2", "pp=2,dp=2,tp=4")
    (over_dp,) = messages(compiled(four, lambda x: lax.psum(x, "dp")))
    assert sorted(over_dp.groups) == [[n, n + 4] for n in (0, 1, 2, 3, 8, 9, 10, 11)]
    (over_both,) = messages(compiled(four, lambda x: lax.psum(x, ("pp", "dp"))))
    assert sorted(over_both.groups) == [[n, n + 4, n + 8, n + 12] for n in range(4)]
    assert axes_of(four.mesh, Message("all-reduce", 1.0, between_slices=True)) == ("pp", "dp")
    assert axes_of(four.mesh, Message("all-reduce", 1.0)) == ("tp",)
    played = timeline(compiled(four, lambda x: lax.psum(x, ("pp", "dp")), (16 * 512, 1024)))
    (transfer,) = played.transfers
    assert transfer.bytes == 2 * 2**20 * 3 / 4


def test_slices_with_layouts_of_their_own():
    """The compiler names devices; partitions count in each slice in the order of the mesh."""
    devices = TWO.mesh.devices.copy()
    devices[1] = devices[1][::-1]
    mixed = replace(TWO, mesh=Mesh(devices, ("pp", "tp")))
    (summed,) = messages(compiled(mixed, lambda x: lax.psum(x, "pp")))
    assert sorted(summed.groups) == [[n, n + 4] for n in range(4)]
    turned = replace(TWO, mesh=Mesh(TWO.mesh.devices.T, ("tp", "pp")))
    (inside,) = messages(compiled(turned, lambda x: lax.psum(x, "tp")))
    assert sorted(inside.groups) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_devices_of_another_mesh():
    message = Message("all-reduce", 1.0, groups=[[100000, 300000]], between_slices=True)
    with pytest.raises(
        ValueError, match=r"has the device 300000, which is not in .*; give the mesh"
    ):
        in_mesh(message, TWO.mesh)


def test_a_receive_that_a_loop_carries_knows_its_send_by_the_channel():
    text = compiled(TWO, lambda x: lax.psum(x, "pp"), (4096, 1024)).text
    (begun,) = (one for one in read(text).entry.operations if isinstance(one, Collective))
    (done,) = (one for one in read(text).entry.operations if isinstance(one, Done))
    assert begun.has_done
    assert done.pair == begun.pair
    assert done.operands[0].name == begun.name
    lost = re.sub(r"recv-done\(%recv\)", "recv-done(%after-all)", text)
    assert lost != text
    (carried,) = (one for one in read(lost).entry.operations if isinstance(one, Done))
    assert carried.pair == begun.pair


def test_floors_count_links_and_network_at_once():
    program = compiled(TWO, lambda x: lax.psum(x, ("pp", "tp")), (8 * 2048, 1024))
    played = timeline(program)
    by_hand = 2**20 / 3.125e9
    assert program_floor(program, played).transfer == pytest.approx(by_hand)
    floor = matmul_floor(TWO, "mk,kn->mn", (64, 64), (64, 64), 2**20, axis="pp")
    assert floor.transfer == floor.one_ring == pytest.approx(by_hand)
    floor = matmul_floor(TWO, "mk,kn->mn", (64, 64), (64, 64), 2**20, axis=("pp", "tp"))
    speed = 2 * TWO.chip.link + 3.125e9
    assert floor.transfer == pytest.approx(2**20 / speed)


def test_transfers_that_queue_for_the_network():
    def step(weights, x):
        return [lax.psum(x @ w, "pp") for w in weights]

    both = target("2xv6e:2x2", "pp=2,tp=4")
    weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P())] * 3
    x = jax.ShapeDtypeStruct((8 * 1024, 1024), jnp.bfloat16, sharding=P(("pp", "tp")))
    mapped = jax.shard_map(
        step, in_specs=(P(), P(("pp", "tp"))), out_specs=P("tp"), check_vma=False
    )
    program = compile_for(mapped, both, weights, x)
    text = str(explain(program))
    assert "transfers queue for the network between slices" in " ".join(text.split())
    assert "large sums between slices" in " ".join(texts_of(timeline(program), both))


@pytest.mark.parametrize(
    ("name", "mesh", "joining"),
    [
        ("2xv5e:2x2", "pp=2,tp=4", ["pp"]),
        ("2xv5e:2x2", "tp=4,dp=2", ["tp"]),
        ("3xv5e:2x4", "dp=2,fsdp=3,tp=4", ["fsdp"]),
        ("4xv5e:2x4", "pp=2,dp=2,tp=8", ["pp", "dp"]),
        ("6xv5e:2x2", "pp=4,dp=6", ["pp", "dp"]),
    ],
)
def test_slices_lie_along_the_first_axes_that_take_them(name, mesh, joining):
    described = target(name, mesh)
    slices = np.vectorize(lambda device: device.slice_index)(described.mesh.devices)
    found = [
        axis
        for number, axis in enumerate(described.mesh.axis_names)
        if (slices != slices.take([0], number)).any()
    ]
    assert found == joining


def test_names_of_several_slices():
    assert target("1xv5e:2x2").mesh.size == 4
    assert TWO.mesh.size == 8
    assert (TWO.chip.network, target("2xv5e:2x2", figures="book").chip.network) == (3.125e9,) * 2
    with pytest.raises(ValueError, match=r"'2xh100:8': only TPUs .*, as in 'h100:2x8'$"):
        target("2xh100:8")
    with pytest.raises(ValueError, match=r"or, for two TPU slices, '2xv5p:8x8x8'$"):
        target("2xv5e")


def test_the_command_predicts_several_slices(capsys):
    case = ["--shapes", "512x512x512", "--ops", "gather-lhs-rows", "--modes", "naive"]
    for mesh in (["--mesh", "pp=2,tp=4"], ["--mesh", "dp=2,tp=4", "--axis", "dp"]):
        assert main(["predict", "--target", "2xv5e:2x2", *mesh, *case]) == 0
        out = capsys.readouterr().out
        assert "2xv5e:2x2 | 8 x TPU v5 lite" in out
        assert re.search(r"naive +0\.\d+ ", out)
