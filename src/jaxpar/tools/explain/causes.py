"""Rules that give each wait one cause out of a closed list.

Rules on needless transfers come before rules on hiding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain

from jaxpar.mesh import ring_hops
from jaxpar.tools.explain.exposed import BEHIND, THE_END, ExposedCollective
from jaxpar.tools.explain.needless_transfers import SentInVain
from jaxpar.tools.explain.overheads import Overhead
from jaxpar.tools.explain.verdict import Verdict
from jaxpar.tools.timeline.links import BETWEEN_SLICES
from jaxpar.tools.toolkit_api import WHOLE_MATMULS, compiler_of, on_torus, slice_of, us
from jaxpar.tools.toolkit_api import size_text as size

_BESIDE_MATMULS = ("all-gather", "all-reduce", "reduce-scatter")  # jaxpar has forms of these
_HALF = 0.5


class Rules(SentInVain):
    def of(self, exposed: ExposedCollective | Overhead) -> Iterator[Verdict]:
        if isinstance(exposed, Overhead):
            rule = {
                "windowed einsums": self._windowed_einsums,
                "recomputed by the compiler": self._recomputed,
            }.get(exposed.kind, self._copies)
            yield rule(exposed)
            return
        first = [self._in_disguise, self._resharding]
        if self._is_at_odds(exposed):
            first.reverse()
        rules: tuple[Callable[[ExposedCollective], Verdict | None], ...] = (
            *first,
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

    # -- links --------------------------------------------------------------------------------

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
            "messages share links",
            "make the mesh with jaxpar.make_mesh; name the axis with the most traffic last",
            self.edits.order(axes),
            is_sure=False,
        )

    def _links_busy(self, e: ExposedCollective) -> Verdict | None:
        if BETWEEN_SLICES in e.over and max(e.held, e.queued) >= _HALF * e.seconds:
            return Verdict(
                "links busy",
                f"for {us(max(e.held, e.queued))}, transfers queue for the network between slices",
                "send fewer bytes between slices: sum once for several microbatches, or in a "
                "narrower dtype",
            )
        if e.held >= _HALF * e.seconds:
            return Verdict(
                "links busy",
                f"for {us(e.held)}, other transfers queue behind it on its links: {e.after}",
                "start the queued transfers first; or send half of this one in the other direction "
                "(mode='bidirectional' of jaxpar's collectives), or over another axis",
                self.edits.modes(),
            )
        if e.queued < _HALF * e.seconds:
            return None
        return Verdict(
            "links busy",
            f"for {us(e.queued)}, earlier transfers use its {e.links:.2g} of {e.links_there} links",
            "send half of it in the other direction (mode='bidirectional' of jaxpar's "
            "collectives), or over another axis, whose links are idle",
            self.edits.modes(),
        )

    def _latency(self, e: ExposedCollective) -> Verdict | None:
        if e.latency < _HALF * e.transfer:
            return None
        return Verdict(
            "latency",
            f"{us(e.latency)} of its {us(e.transfer)} are latency: it sends "
            f"{size(e.bytes / e.runs)} at a time, {e.runs} time{'s' * (e.runs != 1)}",
            "send several small arrays as one: concatenate them into a bucket, or sum them as one "
            "tuple",
        )

    # -- overlap ------------------------------------------------------------------------------

    def _start_alone(self, e: ExposedCollective) -> Verdict | None:
        if e.covered >= 0.1 * e.transfer or not self.exposures.is_started(e.name):
            return None
        if e.synchronous:
            why = "the program starts it itself, and the compiler makes it synchronous"
            remedy = (
                "use a ring of ppermutes in its place; they overlap with matmuls on every TPU: "
                "jaxpar's all_gather_matmul and matmul_reduce_scatter are such rings"
            )
            if e.collective == "collective-permute":
                remedy = "compile with jaxpar.compiler_options(mesh), which make it asynchronous"
        else:
            why = "the program starts it itself, and computes almost nothing before its done"
            remedy = (
                "put independent work between the start and the done: "
                "jax.experimental.overlap.program_order keeps the order of your source, and if it "
                "is enforced, that of the gradient, too (psum_scatter_start has none)"
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
                f"write it as permutes that overlap with a matmul{within}: jaxpar's "
                "all_gather_matmul, matmul_reduce_scatter or ring collectives"
            )
        else:
            remedy = "send less, or less often: no known form of it overlaps with other work"
        return Verdict(
            "synchronous",
            f"the compiler of {kind} makes this {e.collective} synchronous: no work overlaps with "
            "it",
            remedy,
            chain(self.edits.compiler_options(), self.edits.modes(), self.edits.forms(e.line)),
        )

    def _ends_of_a_pipeline(self, e: ExposedCollective) -> Verdict | None:
        """Applies if only ends of a series wait."""
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
            f"{sum(hidden)} of {len(runs)} such transfers are hidden; the exposed ones come first "
            "or last",
            "use smaller pieces, so that the first and the last one are shorter, or overlap these "
            "with other work",
            self.edits.modes(),
        )

    def _ordered_elsewhere(self, e: ExposedCollective) -> Verdict | None:
        if e.independent < _HALF * e.seconds:
            return None
        where = "in the backward pass" if e.phase == "recomputation" else "elsewhere in the step"
        return Verdict(
            "ordered elsewhere",
            f"{us(e.independent)} of work {where} is independent of it, but runs at another time",
            "start it earlier: remove an optimization_barrier or a loop boundary in between, or "
            "unroll the loop",
            chain(self.edits.compiler_options(), self.edits.barriers(), self.edits.unrolled()),
        )

    def _nothing_to_hide_behind(self, e: ExposedCollective) -> Verdict:
        needs = f"{e.after} needs it at once"
        if e.after == THE_END:
            needs = "the step ends with it"
        elif e.after.startswith(BEHIND):
            needs = f"it is next to {e.after}"
        remedy = "split it and its user into pieces: one piece travels while another is computed"
        beside = e.collective in _BESIDE_MATMULS and self.exposures.is_beside_a_matmul(e.name)
        if beside:
            remedy = (
                "split it and its matmul into pieces that overlap: jaxpar's all_gather_matmul and "
                "matmul_reduce_scatter do that"
            )
        cut = self.edits.cut_matmuls() if e.inserted and beside else ()
        return Verdict(
            "nothing to hide behind",
            f"{needs}, and {us(e.independent)} of the step's other work could overlap with it",
            remedy,
            chain(self.edits.compiler_options(), self.edits.modes(), self.edits.forms(e.line), cut),
        )

    def _copies(self, o: Overhead) -> Verdict:
        return Verdict(
            "copies",
            f"{o.runs} copies run in the iterations of a loop: its carry is needed in two places "
            "at once",
            "let the loop's body use its carry once and update it in place: no swap, no use after "
            "the update",
            self.edits.unrolled(),
        )

    def _windowed_einsums(self, o: Overhead) -> Verdict:
        return Verdict(
            "windowed einsums",
            "in place of gathers or reduce-scatters, the partitioner cut matmuls into pieces with "
            f"permutes between them: {o.runs} instructions in all. Small pieces are slow",
            f"compile with {WHOLE_MATMULS.name}={WHOLE_MATMULS.value}, or write the matmuls in a "
            "jax.shard_map with jaxpar's all_gather_matmul and matmul_reduce_scatter",
            chain(self.edits.compiler_options(WHOLE_MATMULS.name), self.edits.compiler_options()),
        )

    def _recomputed(self, o: Overhead) -> Verdict:
        names = self.exposures.recomputed.intersection(self.exposures.seconds)
        arrays = [array for name in names for array in self.exposures.instruction(name).results]
        count = sum(array.bytes for array in arrays)
        largest = max(map(str, arrays), key=Counter(map(str, arrays)).__getitem__, default="")
        peak, there = self.exposures.program.memory.peak, self.exposures.chip.capacity
        short = peak + count - there
        return Verdict(
            "recomputed by the compiler",
            f"{len(names)} instructions, most of {largest}, compute {size(count)} again that had "
            f"no room: the peak is {size(peak)} of {size(there)}"
            + (f", and with all of them {size(short)} would be short" if short > 0 else ""),
            "choose yourself what is not kept: jax.checkpoint around a layer, with a policy of "
            "jax.checkpoint_policies; or use a smaller batch, or shard the arrays at the peak",
        )
