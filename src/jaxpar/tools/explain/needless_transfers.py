"""Rules that find needless transfers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from jaxpar.tools.explain.edits import Edits
from jaxpar.tools.explain.exposed import ExposedCollective, Exposures
from jaxpar.tools.explain.verdict import Verdict
from jaxpar.tools.program.hlo import Instruction
from jaxpar.tools.program.values import Value
from jaxpar.tools.toolkit_api import size_text as size

_FEW = 1024  # bytes; less is the sum of a loss or the like, which has no sharding


class SentInVain:
    def __init__(self, exposures: Exposures, edits: Edits) -> None:
        self.exposures, self.edits, self.values = exposures, edits, exposures.values

    def _in_disguise(self, e: ExposedCollective) -> Verdict | None:
        disguise = self.exposures.disguise(e.name)
        collective = self.values.collective(e.name)
        if disguise is None or collective is None:
            return None
        part = disguise.part.arrays[0]
        whole = max((x.arrays[0] for x in collective.operands), key=lambda array: array.bytes)
        if disguise.really == "gather":
            does = f"each device writes its {part} into zeros, and the full {whole} is summed"
            rings = "gather in a ring that overlaps with the matmul: jaxpar.all_gather_matmul"
            remedy = f"{self._one_after_the_other(e)}{rings}"
            if self.exposures.is_written(e.name, "psum"):
                remedy = "write jax.lax.all_gather in place of the zeros, the update and the psum"
        else:
            does = f"the full {whole} is summed, and each device keeps its {part}"
            remedy = "write jax.lax.psum_scatter in place of the psum and the slice"
            if e.inserted:
                remedy = (
                    "give the sum the sharding of its user (with_sharding_constraint, right after "
                    "the sum), or write it in a jax.shard_map with jax.lax.psum_scatter"
                )
        # An inserted gather stays a sum whatever the sharding of its argument.
        edits = () if e.inserted else chain(self.edits.modes(), self.edits.forms(e.line))
        return Verdict(
            "in disguise",
            f"it is a {disguise.really} in disguise: {does}. That sends twice the bytes of a "
            f"{disguise.really}",
            remedy,
            edits,
        )

    def _one_after_the_other(self, e: ExposedCollective) -> str:
        # Over all axes at once the gather becomes a sum.
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
                f"it gathers the same array in each of {e.runs} iterations of a loop",
                "gather before the loop, and pass the full array to the loop",
                self.edits.once(),
            )
        if not self._has_room(kept := self._kept(e)):
            return None
        if e.phase == "recomputation" and e.name not in self.exposures.recomputed:
            return Verdict(
                "sent twice",
                "the forward pass sends it, and jax.checkpoint sends it again; saving it for the "
                f"backward pass takes {size(kept)}, and memory has room for it",
                "save the collective's result for the backward pass: jax.checkpoint(f, policy="
                "jax.checkpoint_policies.save_only_these_names('received')) with "
                "jax.ad_checkpoint.checkpoint_name(result, 'received')",
                self.edits.kept(),
            )
        if other := self._alike(e, collective):
            return Verdict(
                "sent twice",
                f"{self.exposures.text(other)} has sent the same array over {e.over!r} before",
                "send it once and use the result in both places",
                self.edits.barriers(),  # without barriers the compiler sends it once
            )
        return None

    def _is_invariant(self, collective: Instruction) -> bool:
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
        """Returns an earlier collective that sends the same."""
        origin = self._origin_of(collective)
        for name, events in self.exposures.transfers.items():
            other = self.values.collective(name)
            if name == e.name or other is None or other.opcode != collective.opcode:
                continue
            first = self.exposures.transfers[e.name][0]
            earlier = events and events[0].start < first.start
            if (
                earlier
                and self._origin_of(other) == origin
                and other.groups == collective.groups
                and other.pairs == collective.pairs
                and other.after("dimensions={") == collective.after("dimensions={")
            ):
                return name
        return None

    def _origin_of(self, collective: Instruction) -> Value:
        value = self.values.value(collective.operands[0])
        while value.kind in ("copy", "bitcast", "parameter"):
            sources = list(self.values.sources(value))
            if len(sources) != 1:  # an argument, or a loop's carry
                break
            value = sources[0]
        return value

    def _kept(self, e: ExposedCollective) -> int:
        """Returns the bytes of the results in all runs."""
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
            "the program does not have it: the partitioner put it in, because the array's sharding "
            "is not the one that its user needs",
            "give the array the sharding that its user needs, where the array is made; or give its "
            "user the sharding of the array",
            edits,
            is_sure=False,
        )

    def _is_at_odds(self, e: ExposedCollective) -> bool:
        arguments = self.exposures.arguments(e.name)
        return e.inserted and any(True for _ in self.edits.mended(arguments, e.axes))

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
        """Yields users, past copies and dones."""
        for user in self.values.users[value]:
            if user.kind in ("copy", "bitcast", "all-reduce", "reduce-scatter", "dynamic-slice"):
                yield from self._on(user)
            else:
                yield user


def _width(i: Instruction) -> float:
    # It is 0 if unknown, and for flags, whose sums are counts.
    return i.arrays[0].width if i.arrays and i.arrays[0].dtype != "pred" else 0.0
