"""Matmuls whose operands are drawn: normal numbers, and some that are 100 times as large."""

from dataclasses import dataclass

import numpy as np

ROWS, CONTRACTED, COLUMNS = 512, 2048, 512
OUTLIER = 100.0  # times what it would be
PLACES = 1e-4  # the share of numbers that are outliers, in random places
FEATURES = 4  # whole columns of outliers


@dataclass(frozen=True)
class Case:
    """A matmul of which one operand is gathered, and a cotangent of its result.

    Attributes:
      name: of its row in a table.
      x: [m, k].
      w: [k, c].
      ct: [m, c]; None where no gradient is asked for.
      gather: the operand that is gathered.
      dim: along which.
    """

    name: str
    x: np.ndarray
    w: np.ndarray
    ct: np.ndarray | None = None
    gather: str = "lhs"
    dim: int = 0

    @property
    def largest(self) -> float:
        """The largest magnitude of a row over its rms, the median of all rows that are gathered."""
        x = self.x if self.gather == "lhs" else self.w
        x = np.abs(x if self.dim == 0 else x.T)
        return float(np.median(x.max(axis=1) / np.sqrt(np.square(x).mean(axis=1))))


def drawn(rows: int = ROWS, contracted: int = CONTRACTED, columns: int = COLUMNS) -> list[Case]:
    """Returns a case for each distribution of what is gathered, x and the cotangent."""
    rng = np.random.default_rng(0)
    x, w, ct = (
        rng.normal(size=shape)
        for shape in ((rows, contracted), (contracted, columns), (rows, columns))
    )
    in_places = [a * np.where(rng.random(a.shape) < PLACES, OUTLIER, 1) for a in (x, ct)]
    of_x, of_ct = (_features(rng, a.shape[1]) for a in (x, ct))
    return [
        Case("normal", x, w, ct),
        Case("outliers in places", in_places[0], w, in_places[1]),
        Case("outlier features", x * of_x, w, ct * of_ct),
        # As where a model has learned to live with them: each feature has its say in the result.
        Case(
            "outlier features, small weights",
            x * of_x,
            w / of_x[:, None] / of_ct,
            ct * of_ct,
        ),
    ]


def _features(rng: np.random.Generator, count: int) -> np.ndarray:
    """A factor for each feature."""
    factors = np.ones(count)
    factors[rng.choice(count, FEATURES, replace=False)] = OUTLIER
    return factors
