"""From a scheduled module to a timeline: what computes, what travels, and what waits for it."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxpar._chips import Chip
from jaxpar.schedule._compile import CompiledProgram
from jaxpar.schedule._links import Links
from jaxpar.schedule._player import Assumed, Event, Player


@dataclass(frozen=True)
class Timeline:
    """A program's schedule under the published model of a chip; seconds, for one device."""

    events: tuple[Event, ...]
    total: float
    compute: float  # in compute instructions
    exposed: float  # waiting for transfers, synchronous ones included
    transfer: float  # with at least one transfer under way
    sent_bytes: float  # by one device
    link_utilisation: float  # of the links in use: mean share of the total time that they are busy
    peak_bytes: int  # of HBM
    estimate: str  # where the times of compute instructions come from
    loops_of_unknown_length: tuple[str, ...]  # and of no assumed one: one trip each

    @property
    def hidden_share(self) -> float:
        """The share of transfer time that nothing waits for; 1 without transfers."""
        return 1.0 if not self.transfer else max(0.0, 1 - self.exposed / self.transfer)

    @property
    def transfers(self) -> tuple[Event, ...]:
        """The transfers, in the order of their starts."""
        return tuple(event for event in self.events if event.kind == "transfer")


def timeline(
    program: CompiledProgram, chip: Chip | None = None, *, assumed: Assumed | None = None
) -> Timeline:
    """Plays a compiled program's schedule on a model of its chip.

    The order of instructions, starts and dones is the compiler's. A compute instruction takes the
    compiler's cycles over the clock (TPU), or a roofline (GPU, whose compiler gives no times
    without a device, and TPU instructions without cycles). A TPU kernel takes the FLOPs and bytes
    of its own estimate, a grouped matmul those of the tiles that two groups share twice. A transfer
    takes one latency a hop and its bytes over the bandwidth of the links on its way; transfers that
    share a link take turns. A done waits.

    Args:
      program: from `compile_for`.
      chip: figures to use in place of the published ones, made with `dataclasses.replace` of
        `program.target.chip`.
      assumed: what depends on data: the rows that ragged all-to-alls send and grouped matmuls
        multiply (default: as many as their operands have), the trips of loops.

    Returns:
      A `Timeline`. It is a schedule under a model, not a measurement.

    Raises:
      ValueError: a chip that jaxpar has no figures of, and none given.
    """
    chip = program.target.chip if chip is None else chip
    if chip is None:
        kind = program.target.mesh.devices.flat[0].device_kind
        raise ValueError(
            f"timeline: no figures are known of {kind!r} ({program.target.name}); pass "
            "chip=jaxpar.schedule.Chip(...)"
        )
    player = Player(Links(program.target.mesh, chip), assumed or Assumed())
    player.run(program.module.entry)
    events = player.finish()
    transfers = [e for e in events if e.kind == "transfer"]
    total = max([player.now, *(e.end for e in transfers)])
    used = player.busy[player.busy > 0]
    return Timeline(
        events=events,
        total=total,
        compute=sum((e.seconds for e in events if e.kind == "compute"), 0.0),
        exposed=sum((e.seconds for e in events if e.kind == "wait" and e.row == "compute"), 0.0),
        transfer=covered(transfers),
        sent_bytes=sum((e.bytes for e in transfers), 0.0),
        link_utilisation=float(used.mean() / total) if used.size and total else 0.0,
        peak_bytes=program.memory.peak,
        estimate="the compiler's cycles" if chip.clock else "roofline",
        loops_of_unknown_length=tuple(player.unknown),
    )


def covered(events: Iterable[Event]) -> float:
    """Seconds in which at least one of the events is under way."""
    total, reached = 0.0, 0.0
    for start, end in sorted((e.start, e.end) for e in events):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
