"""Why a transfer is waited for: one cause out of a closed list, by rules in a fixed order.

Each rule looks at what the schedule shows of one collective, and says in a sentence why it applies,
what to change, and which edits can be tried. Rules that say what a program does in vain stand
before those that say how well the rest is hidden: what need not be sent needs no hiding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from jaxpar.mesh import ring_hops
from jaxpar.tools.explain.edits import Edit, Edits
from jaxpar.tools.explain.exposed import BEHIND, THE_END, ExposedCollective, Exposures
from jaxpar.tools.explain.overheads import Overhead
from jaxpar.tools.private_names import WHOLE_MATMULS, compiler_of, on_torus, slice_of, us
from jaxpar.tools.private_names import size_text as size
from jaxpar.tools.program.hlo import Instruction
from jaxpar.tools.program.values import Value

Cause = Literal[
    "in disguise",
    "resharding",
    "sent twice",
    "wide dtype",
    "links apart",
    "links busy",
    "start alone",
    "latency",
    "synchronous",
    "ends of a pipeline",
    "ordered elsewhere",
    "nothing to hide behind",
    "copies",
    "windowed einsums",
]

# What each one means, for readers.
CAUSES: dict[Cause, str] = {
    "in disguise": "a gather or a reduce-scatter is done as a sum of whole arrays: twice the bytes",
    "resharding": "an array lies otherwise than the operation that uses it wants it",
    "sent twice": "the same bytes travel more than once in a step",
    "wide dtype": "numbers travel in more bytes than the result keeps of them",
    "links apart": "neighbours on the mesh axis are several links apart",
    "links busy": "the links are in use by another transfer",
    "start alone": "the program starts it early, and nothing runs beside it all the same",
    "latency": "the message is small: most of its time passes before the first byte is there",
    "synchronous": "the compiler makes it synchronous: nothing runs beside it",
    "ends of a pipeline": "it fills or drains a pipeline whose other transfers are hidden",
    "ordered elsewhere": "work that needs it not stands at another place of the program",
    "nothing to hide behind": "what comes next needs it, and there is no other work",
    "copies": "a loop copies what it carries from trip to trip",
    "windowed einsums": "the partitioner has cut matmuls into pieces with permutes between them",
}

_BESIDE_MATMULS = ("all-gather", "all-reduce", "reduce-scatter")  # what has a form of jaxpar's
_HALF = 0.5
_FEW = 1024  # bytes: the sum of a loss and the like, which lie nowhere


@dataclass(frozen=True)
class Verdict:
    """What a rule says of an exposed collective.

    Attributes:
      cause: the rule's.
      why: the evidence, as a sentence.
      edit: what to change, where none of `edits` is faster.
      edits: those that can be tried by themselves.
      is_sure: whether it holds without a trial; else one of them must make the step faster.
    """

    cause: Cause
    why: str
    edit: str
    edits: Iterable[Edit] = ()
    is_sure: bool = True


class Rules:
    """The rules, for the collectives of one program."""

    def __init__(self, exposures: Exposures, edits: Edits) -> None:
        self.exposures, self.edits, self.values = exposures, edits, exposures.values

    def of(self, exposed: ExposedCollective | Overhead) -> Iterator[Verdict]:
        """What the rules say, in their order; the last one always applies."""
        if isinstance(exposed, Overhead):
            is_cut = exposed.kind == "windowed einsums"
            yield self._windowed_einsums(exposed) if is_cut else self._copies(exposed)
            return
        rules: tuple[Callable[[ExposedCollective], Verdict | None], ...] = (
            self._in_disguise,
            self._resharding,
            self._sent_twice,
            self._wide_dtype,
            self._links_apart,
            self._latency,
            self._links_busy,
            self._start_alone,
            self._synchronous,
            self._ends_of_a_pipeline,
            self._ordered_elsewhere,
        )
        for rule in rules:
            if (verdict := rule(exposed)) is not None:
                yield verdict
        yield self._nothing_to_hide_behind(exposed)

    # -- what is sent in vain -----------------------------------------------------------------

    def _in_disguise(self, e: ExposedCollective) -> Verdict | None:
        disguise = self.exposures.disguise(e.name)
        collective = self.values.collective(e.name)
        if disguise is None or collective is None:
            return None
        part = disguise.part.arrays[0]
        whole = max((x.arrays[0] for x in collective.operands), key=lambda array: array.bytes)
        if disguise.really == "gather":
            does = f"each device writes its {part} into zeros, and all of {whole} is summed"
            rings = "gather in rings beside the matmul: jaxpar.all_gather_matmul"
            remedy = f"{self._one_after_the_other(e)}{rings}"
            if self.exposures.is_written(e.name, "psum"):
                remedy = "write jax.lax.all_gather in place of the zeros, the update and the psum"
        else:
            does = f"all of {whole} is summed, and each device keeps its {part}"
            remedy = "write jax.lax.psum_scatter in place of the psum and the slice"
            if e.inserted:
                remedy = (
                    "give the sum where it is made the sharding that its user has "
                    "(with_sharding_constraint), or write it in a jax.shard_map with "
                    "jax.lax.psum_scatter"
                )
        # What the partitioner gathers stays a sum however its argument is sharded.
        edits = () if e.inserted else chain(self.edits.modes(), self.edits.forms(e.line))
        return Verdict(
            "in disguise",
            f"it is a {disguise.really} in disguise: {does}: twice the bytes of a "
            f"{disguise.really}",
            remedy,
            edits,
        )

    def _one_after_the_other(self, e: ExposedCollective) -> str:
        """How to gather along parts of the devices: what goes over all of them is a sum."""
        axes = list(e.axes)
        if len(axes) == 1:
            size = self.exposures.target.mesh.shape[axes[0]]
            last = 4 if size > 4 and size % 4 == 0 else 2
            if size <= last or size % last:
                return ""
            axes = ["a", "b"]
            split = f"split {e.axes[0]} in two, as in make_mesh('a={size // last},b={last}'), and "
        else:
            split = ""
        order = ", then over ".join(reversed(axes))
        return f"{split}all_gather over {order}, in a jax.shard_map, not over all at once; or "

    def _sent_twice(self, e: ExposedCollective) -> Verdict | None:
        collective = self.values.collective(e.name)
        if collective is None or not collective.operands:
            return None
        if e.collective == "all-gather" and self._is_invariant(collective):
            return Verdict(
                "sent twice",
                f"it gathers the same array in each of {e.runs} trips of a loop",
                "gather in front of the loop, and give the loop the whole array",
                self.edits.once(),
            )
        if not self._has_room(kept := self._kept(e)):
            return None
        if e.phase == "recomputation":
            return Verdict(
                "sent twice",
                f"the forward pass has sent it, jax.checkpoint sends it again, and {size(kept)} to "
                "keep instead would fit the memory",
                "keep what the collective results in: jax.checkpoint(f, policy="
                "save_only_these_names('whole')) with checkpoint_name(result, 'whole')",
                self.edits.kept(),
            )
        if other := self._alike(e, collective):
            return Verdict(
                "sent twice",
                f"{self.exposures.text(other)} has sent the same array over {e.over!r} before",
                "gather once and use the result in both places",
                self.edits.barriers(),  # without them the compiler does
            )
        return None

    def _is_invariant(self, collective: Instruction) -> bool:
        """Whether a loop gives the collective the same array on each trip."""
        value = self.values.value(collective.operands[0])
        seen = set[Value]()
        while value not in seen:
            seen.add(value)
            i = value.instruction
            if i.opcode == "parameter":
                home = self.values.home[i]
                loops = [
                    caller
                    for caller in self.values.callers[home]
                    if caller.opcode == "while" and caller.called_as("body") is home
                ]
                if loops and value.element is not None:
                    return self._is_itself(self.values.value(home.root, value.element), value)
            if value.kind in ("dynamic-slice", "gather", "while") or not value.moves:
                return False
            sources = list(self.values.sources(value))
            if len(sources) != 1:
                return False
            value = sources[0]
        return False

    def _is_itself(self, value: Value, wanted: Value) -> bool:
        while value != wanted and value.kind in ("copy", "bitcast"):
            value = next(iter(self.values.sources(value)))
        return value == wanted

    def _alike(self, e: ExposedCollective, collective: Instruction) -> str | None:
        """Another collective that sends the same array to the same devices, before this one."""
        own = self._origin_of(collective)
        for name, events in self.exposures.transfers.items():
            other = self.values.collective(name)
            if name == e.name or other is None or other.opcode != collective.opcode:
                continue
            first = self.exposures.transfers[e.name][0]
            earlier = events and events[0].start < first.start
            if (
                earlier
                and self._origin_of(other) == own
                and other.groups == collective.groups
                and other.pairs == collective.pairs
                and other.after("dimensions={") == collective.after("dimensions={")
            ):
                return name
        return None

    def _origin_of(self, collective: Instruction) -> Value:
        """The operand of a collective, back through copies and out of what starts it."""
        value = self.values.value(collective.operands[0])
        while value.kind in ("copy", "bitcast", "parameter"):
            sources = list(self.values.sources(value))
            if len(sources) != 1:  # an argument, or what a loop carries
                break
            value = sources[0]
        return value

    def _kept(self, e: ExposedCollective) -> int:
        """Bytes of all that a collective results in over a step."""
        arrays = self.exposures.instruction(e.name).arrays
        return max((array.bytes for array in arrays), default=0) * e.runs

    def _has_room(self, count: int) -> bool:
        return self.exposures.program.memory.peak + count < self.exposures.chip.capacity

    def _resharding(self, e: ExposedCollective) -> Verdict | None:
        if not e.inserted or e.bytes < _FEW * e.runs:
            return None
        arguments = self.exposures.arguments(e.name)
        edits = chain(
            self.edits.mended(arguments, e.axes),
            self.edits.constraints(),
            self.edits.shardings(arguments, e.axes),
        )
        return Verdict(
            "resharding",
            "nobody wrote it: the partitioner put it in, as the array lies otherwise than it is "
            "wanted",
            "give the array where it is made the sharding that is wanted here, or shard what uses "
            "it as the array is",
            edits,
            is_sure=False,
        )

    def _wide_dtype(self, e: ExposedCollective) -> Verdict | None:
        collective = self.values.collective(e.name)
        if collective is None or e.collective not in ("all-reduce", "reduce-scatter"):
            return None
        width = max(map(_width, collective.operands), default=0)
        narrow = self._narrower(collective, width)
        if narrow is None:
            return None
        return Verdict(
            "wide dtype",
            f"each number travels in {width:g} bytes, and {narrow}",
            "sum in the narrower dtype: cast before the collective",
            self.edits.narrow(e.line),
        )

    def _narrower(self, collective: Instruction, width: float) -> str | None:
        """How it is known that fewer bytes a number would do, if it is."""
        count = len(collective.operands)
        values = [self.values.value(collective)]
        if count > 1:
            values = [self.values.value(collective, n) for n in range(count)]
        users = [user for value in values for user in self._on(value)]
        if users and all(u.kind == "convert" and _width(u.instruction) < width for u in users):
            return f"is converted to {_width(users[0].instruction):g} where it arrives"
        for operand in collective.operands:
            source = self.values.value(operand)
            if source.kind == "convert":
                before = next(iter(self.values.sources(source)))
                if 0 < _width(before.instruction) < width:
                    return f"had {_width(before.instruction):g} before it was sent"
        return None

    def _on(self, value: Value) -> Iterator[Value]:
        """What uses a value, through its copies and its done."""
        for user in self.values.users[value]:
            if user.kind in ("copy", "bitcast", "all-reduce", "reduce-scatter", "dynamic-slice"):
                yield from self._on(user)
            else:
                yield user

    # -- where it travels ---------------------------------------------------------------------

    def _links_apart(self, e: ExposedCollective) -> Verdict | None:
        mesh = self.exposures.target.mesh
        axes = [axis for axis in e.axes if axis in mesh.axis_names]
        devices = mesh.devices.flat
        slices = {slice_of(device) for device in devices}
        if not axes or len(slices) > 1 or not all(map(on_torus, devices)):
            return None
        most = max(int(ring_hops(mesh, axis).max()) for axis in axes)
        if most < 2:
            return None
        return Verdict(
            "links apart",
            f"neighbours along {', '.join(axes)} are up to {most} links apart on this mesh, so "
            "that messages share links",
            "make the mesh with jaxpar.make_mesh, the axis with the most traffic last",
            self.edits.order(axes),
            is_sure=False,
        )

    def _links_busy(self, e: ExposedCollective) -> Verdict | None:
        if e.held >= _HALF * e.seconds:
            return Verdict(
                "links busy",
                f"for {us(e.held)} others stand behind it on its links: {e.after}",
                "start what stands behind it first; or send a half of this the other way around "
                "(mode='bidirectional' of jaxpar's collectives), or over another axis",
                self.edits.modes(),
            )
        if e.queued < _HALF * e.seconds:
            return None
        return Verdict(
            "links busy",
            f"for {us(e.queued)} its {e.links:.2g} of {e.links_there} links send what was started "
            "before it",
            "send a half the other way around (mode='bidirectional' of jaxpar's collectives), or "
            "over another axis, whose links are idle",
            self.edits.modes(),
        )

    def _latency(self, e: ExposedCollective) -> Verdict | None:
        if e.latency < _HALF * e.transfer:
            return None
        return Verdict(
            "latency",
            f"{us(e.latency)} of its {us(e.transfer)} are latency: it sends "
            f"{size(e.bytes / e.runs)} at a time, {e.runs} time{'s' * (e.runs != 1)}",
            "send several small arrays as one: concatenate them (a bucket), or sum them as one "
            "tuple",
        )

    # -- what could run beside it -------------------------------------------------------------

    def _start_alone(self, e: ExposedCollective) -> Verdict | None:
        if e.covered >= 0.1 * e.transfer or not self.exposures.is_started(e.name):
            return None
        if e.synchronous:
            why = "the program starts it itself, and the compiler makes it synchronous"
            remedy = (
                "start a ring of ppermutes in its place, which run beside matmuls on every TPU: "
                "jaxpar's all_gather_matmul and matmul_reduce_scatter are such rings"
            )
            if e.collective == "collective-permute":
                remedy = "compile with jaxpar.compiler_options(mesh), which make it asynchronous"
        else:
            why = "the program starts it itself, and next to nothing is computed before its done"
            remedy = (
                "put work that does not need it between the start and the done: "
                "jax.experimental.overlap.program_order keeps the order in which it is written"
            )
        return Verdict(
            "start alone",
            f"it is a start that does not overlap: {why}",
            remedy,
            chain(self.edits.compiler_options(), self.edits.barriers()),
        )

    def _synchronous(self, e: ExposedCollective) -> Verdict | None:
        if not e.synchronous:
            return None
        kind = self.exposures.target.mesh.devices.flat[0].device_kind
        options = {o.frees: o.name for o in compiler_of(kind).options if o.frees}
        option = options.get(e.collective)
        if option and option not in self.exposures.program.compiler_options:
            remedy = f"compile with {option} (jaxpar.compiler_options(mesh) has it)"
        elif e.collective in _BESIDE_MATMULS:
            within = ", in a jax.shard_map" if e.inserted else ""
            remedy = (
                f"write it as permutes beside a matmul{within}: jaxpar's all_gather_matmul, "
                "matmul_reduce_scatter or ring collectives, which are asynchronous"
            )
        else:
            remedy = "send less, or less often: no form of it that is known runs beside other work"
        return Verdict(
            "synchronous",
            f"the compiler of {kind} makes this {e.collective} synchronous: nothing runs beside it",
            remedy,
            chain(self.edits.compiler_options(), self.edits.modes(), self.edits.forms(e.line)),
        )

    def _ends_of_a_pipeline(self, e: ExposedCollective) -> Verdict | None:
        """Most runs are hidden, and those that are not begin or end a series of them."""
        runs = self.exposures.runs(e)
        hidden = [waited < 0.1 * event.seconds for event, waited in runs]
        if len(runs) < 3 or sum(hidden) < _HALF * len(runs):
            return None
        for n, is_hidden in enumerate(hidden):
            is_first = n == 0 or runs[n][0].start - runs[n - 1][0].end > runs[n][0].seconds
            is_last = n + 1 == len(runs) or (
                runs[n + 1][0].start - runs[n][0].end > runs[n][0].seconds
            )
            if not (is_hidden or is_first or is_last):
                return None
        return Verdict(
            "ends of a pipeline",
            f"{sum(hidden)} of {len(runs)} alike are hidden; what is exposed begins or ends them",
            "cut finer, so that the first and the last piece are shorter, or give the ends other "
            "work",
            self.edits.modes(),
        )

    def _ordered_elsewhere(self, e: ExposedCollective) -> Verdict | None:
        if e.independent < _HALF * e.seconds:
            return None
        where = "in the backward pass" if e.phase == "recomputation" else "elsewhere in the step"
        return Verdict(
            "ordered elsewhere",
            f"{us(e.independent)} of work {where} neither needs it nor is needed for it, and runs "
            "at another time",
            "start it earlier: take an optimization_barrier or a loop's boundary from between, or "
            "unroll the loop",
            chain(self.edits.compiler_options(), self.edits.barriers(), self.edits.unrolled()),
        )

    def _nothing_to_hide_behind(self, e: ExposedCollective) -> Verdict:
        needs = f"{e.after} needs it at once"
        if e.after == THE_END:
            needs = "the step ends with it"
        elif e.after.startswith(BEHIND):
            needs = f"it is next to {e.after}"
        remedy = (
            "split it and what needs it into pieces, so that one is under way while another is "
            "computed with"
        )
        if e.collective in _BESIDE_MATMULS:
            remedy = (
                "split it and its matmul into pieces that run beside each other: jaxpar's "
                "all_gather_matmul and matmul_reduce_scatter do that"
            )
        cut = self.edits.cut_matmuls() if e.inserted and e.collective in _BESIDE_MATMULS else ()
        return Verdict(
            "nothing to hide behind",
            f"{needs}, and {us(e.independent)} of the step's other work could run beside it",
            remedy,
            chain(self.edits.compiler_options(), self.edits.modes(), self.edits.forms(e.line), cut),
        )

    def _copies(self, o: Overhead) -> Verdict:
        return Verdict(
            "copies",
            f"{o.runs} copies run in the trips of a loop: what it carries is wanted in two places "
            "at once",
            "have the loop's body use what it carries once and write it in place: no swapping, no "
            "use behind an update",
            self.edits.unrolled(),
        )

    def _windowed_einsums(self, o: Overhead) -> Verdict:
        return Verdict(
            "windowed einsums",
            "in place of gathers and reduce-scatters, matmuls run in pieces with permutes between "
            f"them, {o.runs} instructions in all; the smaller a piece, the slower it is",
            f"compile with {WHOLE_MATMULS.name}={WHOLE_MATMULS.value}, or write the matmuls in a "
            "jax.shard_map, by jaxpar's all_gather_matmul and matmul_reduce_scatter",
            chain(self.edits.compiler_options(WHOLE_MATMULS.name), self.edits.compiler_options()),
        )


def _width(i: Instruction) -> float:
    """Bytes of a number, 0 if it is not known; of flags, whose sums are counts, too."""
    return i.arrays[0].width if i.arrays and i.arrays[0].dtype != "pred" else 0.0
