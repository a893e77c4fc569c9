"""A target's report made by hand, for which no compiler is needed."""

import pytest

from jaxpar.schedule import Event, Floor, Memory, Timeline
from jaxpar.tools.cli.predict_results import Facts, Prediction, Request, TargetResults

MS = 1e-3


def a_timeline(events, total, exposed):
    transfers = [event for event in events if event.kind == "transfer"]
    return Timeline(
        events=tuple(events),
        total=total * MS,
        compute=(total - exposed) * MS,
        exposed=exposed * MS,
        transfer=sum(event.seconds for event in transfers),
        sent_bytes=sum(event.bytes for event in transfers),
        link_utilisation=0.5,
        peak_bytes=3 * 2**30,
        estimate="the compiler's cycles",
        loops_of_unknown_length=(),
    )


def a_prediction(mode, timeline, same_as=None):
    memory = Memory(2**30, 2**30, 2**30, 0, 3 * 2**30)
    return Prediction("scatter-rows 8x8x8", mode, timeline, Floor(2 * MS, MS), memory, 0.5, same_as)


def event(name, kind, row, start, end, **more):
    return Event(name, f"jit(f)/{name}", kind, row, start * MS, end * MS, **more)


NAIVE = a_timeline(
    [
        event("dot", "compute", "compute", 0, 2, is_matmul=True),
        event("reduce-scatter", "transfer", "tp reduce-scatter", 2, 4, bytes=5.0, synchronous=True),
        event("reduce-scatter", "wait", "compute", 2, 4),
    ],
    total=4,
    exposed=2,
)
RING = a_timeline(
    [
        event("send", "transfer", "tp +1", 0, 1, bytes=2.0, covers=("dot.1",)),
        event("back", "transfer", "tp -1", 0, 1.5, bytes=2.0),
        event("send.1", "transfer", "tp +1", 0.5, 1.5, bytes=2.0, covers=("dot.1",)),
        event("copy", "copy", "memory", 0, 0.2),
        event("dot.1", "compute", "compute", 0, 2.0, is_matmul=True),
        event("add", "compute", "compute", 2.0, 2.02),
        event("send", "wait", "compute", 2.02, 2.1),
    ],
    total=2.1,
    exposed=0.08,
)


@pytest.fixture(autouse=True)
def no_progress(monkeypatch):
    """Busy machines take seconds for what is over at once elsewhere, and then show progress."""
    monkeypatch.setattr("jaxpar.tools.cli.console.SECONDS_A_LINE", 1000.0)


@pytest.fixture
def request_made():
    return Request(
        target="v5e:2x2",
        mesh="tp=-1",
        axis=None,
        function=None,
        args=(),
        ops=("scatter-rows",),
        shapes=("8x8x8",),
        modes=("naive", "bidirectional", "auto"),
        dtype="bfloat16",
        wire_dtype=None,
        grad=True,
        bare=False,
        compiler_options={"xla_a": True},
        figures="book",
        cache=False,
    )


@pytest.fixture
def report():
    facts = Facts(
        platform="tpu",
        device_kind="TPU v5 lite",
        devices=4,
        mesh={"tp": 4},
        ring=("tp",),
        links_apart=1,
        disjoint=False,
        not_closed=(),
        chip={"capacity": 2.0**34, "link": 4.5e10},
        compiler_options={"xla_a": True},
        versions={"jax": "0.12", "libtpu": "0.0.50"},
    )
    return TargetResults(
        "v5e:2x2",
        facts,
        [
            a_prediction("naive", NAIVE),
            a_prediction("bidirectional", RING),
            a_prediction("auto", RING, same_as="bidirectional"),
        ],
    )
