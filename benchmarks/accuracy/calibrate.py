"""Makes intervals from held-out errors, and says how many unseen ones lie inside."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import log, log1p
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxpar.tools.accuracy.interval import LARGE, Class, Interval, KindOfWork
from jaxpar.tools.accuracy.validate import Held
from jaxpar.tools.timeline import gpu_times
from jaxpar.tools.timeline.gpu_times import PublicProducts
from jaxpar.tools.toolkit_api import Gpu, platforms

_OUTSIDE = 0.1  # of unseen errors, on either side
_ABOVE = 8.0  # measurements that the class above counts as
LEFT_OUT = "the package's times of GPUs"  # a source
_MOST = 30  # errors of a source in a class; more do not count more


class Error(NamedTuple):
    """One measurement's error, of a source."""

    work: KindOfWork
    source: str
    logarithm: float  # of predicted / measured


class Calibration:
    """The predictive distribution of each class, as weights of all errors.

    A class's distribution is its own errors and, as if these were `_ABOVE` more, that of the class
    above it. A source with m errors of a class weighs as sqrt(m), at most as
    sqrt(`_MOST`): its errors are alike. An interval is conformal: of n errors, each end leaves
    `_OUTSIDE` - 1/(n + 1) outside. With weights, n is their effective number.
    """

    def __init__(self, errors: Sequence[Error]) -> None:
        self.errors = sorted(errors, key=lambda one: one.logarithm)
        self.logarithms = np.array([one.logarithm for one in self.errors])
        self.sources = np.array([one.source for one in self.errors])
        members: dict[Class, list[int]] = defaultdict(list)
        for number, one in enumerate(self.errors):
            for of in one.work.classes:
                members[of].append(number)
        self.members = {of: np.array(numbers) for of, numbers in members.items()}

    def interval(self, work: KindOfWork, seen: Bool[np.ndarray, "errors"]) -> Interval | None:
        """Returns a class's interval, from what is seen; None if nothing of its platform is."""
        return self._interval(work.classes, seen)

    def _interval(
        self, classes: Sequence[Class], seen: Bool[np.ndarray, "errors"]
    ) -> Interval | None:
        weights: Float[np.ndarray, "errors"] | None = None
        rows = 0
        for of in classes:
            numbers = self.members.get(of, np.array([], int))
            numbers = numbers[seen[numbers]]
            rows, own = len(numbers), np.zeros(len(self.errors))
            several = Counter(self.sources[numbers].tolist())
            own[numbers] = [
                min(several[source], _MOST) ** 0.5 / several[source]
                for source in self.sources[numbers].tolist()
            ]
            if weights is not None:
                own = (own + _ABOVE * weights) / (own.sum() + _ABOVE)
            elif rows:
                own /= own.sum()
            else:
                return None
            weights = own
        assert weights is not None
        counted = weights > 0
        shares = weights[counted] / weights.sum()
        alike = 1 / np.square(shares).sum()  # n equal shares give n
        outside = max(0.0, _OUTSIDE - 1 / (alike + 1))
        reached, last = np.cumsum(shares), len(shares) - 1
        numbers = np.minimum(np.searchsorted(reached, [outside, 1 - outside]), last)
        ends = np.expm1(self.logarithms[counted][numbers])
        return Interval(float(ends[0]), float(ends[1]), rows)

    def table(self) -> dict[Class, Interval]:
        """Returns the interval of each class with an error."""
        everything = np.ones(len(self.errors), bool)
        made: dict[Class, Interval] = {}
        for one in self.errors:
            classes = one.work.classes
            for depth, of in enumerate(classes, 1):
                if of not in made:
                    interval = self._interval(classes[:depth], everything)
                    assert interval is not None
                    made[of] = interval
        return dict(sorted(made.items()))

    def inside(self, errors: Iterable[int], seen_without: str) -> list[bool]:
        """Returns which errors lie in the intervals that others make.

        Others are all but the error itself (`"row"`), or but those of its source (`"source"`).
        """
        made: dict[tuple[KindOfWork, str], Interval | None] = {}
        found: list[bool] = []
        for number in errors:
            one = self.errors[number]
            if seen_without == "row":
                seen = np.arange(len(self.errors)) != number
                interval = self.interval(one.work, seen)
            else:
                key = one.work, one.source
                if key not in made:
                    made[key] = self.interval(one.work, self.sources != one.source)
                interval = made[key]
            error = float(np.expm1(one.logarithm))
            found.append(interval is not None and interval.low <= error <= interval.high)
        return found


def errors_of(measurements: Iterable[Held]) -> list[Error]:
    """Returns the errors of those that are of one kind of operation."""
    return [
        Error(one.work, one.measured.source.partition("@")[0].strip(), log1p(one.error))
        for one in measurements
        if one.is_one
    ]


def text_of(table: dict[Class, Interval]) -> str:
    lines = (
        json.dumps(
            {"of": of, "low": round(one.low, 4), "high": round(one.high, 4), "rows": one.rows}
        )
        for of, one in table.items()
    )
    return "[\n" + ",\n".join(lines) + "\n]\n"


def without_each(times: Mapping[tuple[int, ...], float]) -> Iterator[tuple[float, float]]:
    """Yields the seconds that a size's neighbours tell, and its own."""
    for before, here, after in zip(*(sorted(times)[n:] for n in range(3)), strict=False):
        others = gpu_times.never_falling({size: times[size] for size in times if size != here})
        share = log(here[0] / before[0]) / log(after[0] / before[0])
        yield others[before] ** (1 - share) * others[after] ** share, times[here]


def products_without_each(products: PublicProducts) -> Iterator[tuple[float, float]]:
    """Yields the seconds that a product's neighbours tell, and its own."""
    for sizes, seconds in zip(products.sizes, products.seconds.tolist(), strict=True):
        yield products.between(sizes, left_out=1), seconds


def left_out() -> list[Error]:
    """Returns the errors of the package's public GPU times, each predicted from the others."""
    kinds = {"all-reduce": "sum", "reduce-scatter": "sum", "all-gather": "gather"}
    errors: list[Error] = []
    gpus = [gpu for gpu in platforms() if isinstance(gpu, Gpu)]
    for gpu, chip in [(gpu.published, gpu.chip) for gpu in gpus if gpu.published in gpu.names]:
        products = gpu_times.products(gpu, chip.flops, chip.hbm)
        newest = gpu_times.nearest_version(gpu, "")
        several = [
            (kinds.get(kind, kind), predicted, seconds)
            for (kind, _), times in gpu_times.collectives(gpu, newest).items()
            for predicted, seconds in without_each(times)
        ]
        if products is not None:
            several += [("matmul", *pair) for pair in products_without_each(products)]
        errors += [
            Error(
                KindOfWork(chip.kind, kind, predicted >= LARGE), LEFT_OUT, log(predicted / seconds)
            )
            for kind, predicted, seconds in several
        ]
    return errors
