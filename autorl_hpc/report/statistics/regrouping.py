"""Permutation tests: runs change sides within their task. All ways where they are few, else a seeded sample.

What is compared is studentised: the difference over its standard error, which is estimated anew in each regrouping. A regrouped
task on which the sides lie far apart has a large spread within them; the bare difference would take that spread for chance, and
find nothing wherever the effects differ by task.
Source: A. Janssen, Statistics & Probability Letters 36:9-21, 1997; E. Chung and J. P. Romano, Annals of Statistics 41:484-507, 2013.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from autorl_hpc.report.statistics.resampling import CHUNK_CELLS, EXACT_WAYS, RESAMPLES, TIE, UNIT, indices, raw

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PERMUTED, _PICKED = 3, 4
"""First words of streams."""

_KEPT = 8
"""Sets of random choices that are kept: of some hundred runs, a few megabytes each."""

NO_SPREAD = 1e-9
"""Squared standard errors below it are rounding: sides without spread are told apart by their difference alone."""


class Stratum(NamedTuple):
    """Both sides' runs on one task, or on a part of one; `weight` is that of its difference in the sum."""

    a: Sequence[float]
    b: Sequence[float]
    weight: float = 1.0

    @property
    def ways(self) -> int:
        """In how many ways the runs can be divided between the two sides."""
        return math.comb(len(self.a) + len(self.b), len(self.a))


def regrouping_p(strata: Sequence[Stratum]) -> float:
    """Two-sided p value of a weighted sum over tasks of differences of means that is 0, by its studentised value.

    Exact if runs of both sides are drawn alike on every task; asymptotically so if only that sum is 0. With as many runs on both
    sides of a single task the order of regroupings is that of the bare difference. Exact: the share of regroupings at least as far
    apart as the one seen. Sampled: (hits + 1) / (draws + 1).
    ValueError for no task, or an empty side.
    """
    import numpy as np

    if not strata or not all(task.a and task.b for task in strata):
        raise ValueError("a comparison needs runs on both sides")
    seen = float(_squared(sum(_as_seen(task) for task in strata))[0])
    if math.prod(task.ways for task in strata) <= EXACT_WAYS:
        sums = np.zeros((2, 1))
        for task in strata:
            sums = (sums[:, :, None] + _all_of(task)[:, None, :]).reshape(2, -1)
        return float((_squared(sums) >= seen * (1 - TIE)).mean())
    drawn = sum(_some_of(task, number) for number, task in enumerate(strata))
    return (int((_squared(drawn) >= seen * (1 - TIE)).sum()) + 1) / (RESAMPLES + 1)


def least_regrouping_p(sizes: Sequence[tuple[int, int]]) -> float:
    """The least p value that `regrouping_p` can give for runs of so many on both sides of each task."""
    ways = math.prod(math.comb(n_a + n_b, n_a) for n_a, n_b in sizes)
    both = 2 if all(n_a == n_b for n_a, n_b in sizes) else 1
    return both / ways if ways <= EXACT_WAYS else 1 / (RESAMPLES + 1)


def _all_of(task: Stratum) -> Any:
    """Difference and squared error, for every way to choose the runs of a: of shape (2, ways)."""
    pooled = _pooled(task)
    return _measured(pooled[_choices(len(pooled), len(task.a))], pooled, task)


def _some_of(task: Stratum, number: int) -> Any:
    """Difference and squared error for drawn regroupings: of shape (2, RESAMPLES)."""
    import numpy as np

    if task.ways <= EXACT_WAYS:
        return _all_of(task)[:, indices(task.ways, RESAMPLES, _PICKED, number)]
    pooled = _pooled(task)
    drawn = _drawn(len(pooled), len(task.a), number)
    return np.concatenate([_measured(pooled[chosen], pooled, task) for chosen in drawn], axis=1)


@lru_cache(maxsize=_KEPT)
def _drawn(n: int, k: int, number: int) -> list[NDArray[Any]]:
    """RESAMPLES random choices of k of n, the same for all pairs of so many runs: chunks of shape (rows, k)."""
    import numpy as np

    chunks = []
    rows = max(1, CHUNK_CELLS // n)
    for start in range(0, RESAMPLES, rows):
        size = min(rows, RESAMPLES - start)
        keys = raw(size * n, _PERMUTED, number, start).reshape(size, n)
        chosen = np.argpartition(keys, k - 1, axis=1)[:, :k]
        chunks.append(chosen.astype(np.uint16 if n < 2**16 else np.uint32))
    return chunks


def _as_seen(task: Stratum) -> Any:
    """Of the runs as they are: of shape (2, 1)."""
    import numpy as np

    return _measured(np.sort(_whole(task.a))[None], _pooled(task), task)


def _pooled(task: Stratum) -> NDArray[np.float64]:
    """All runs in ascending order, so that the order in which they were given does not matter, as whole numbers."""
    import numpy as np

    found: NDArray[np.float64] = np.sort(_whole([*task.a, *task.b]))
    return found


def _whole(values: Sequence[float]) -> Any:
    import numpy as np

    return np.rint(np.asarray(values, dtype=float) * UNIT)


def _measured(of_a: Any, pooled: Any, task: Stratum) -> Any:
    """Weighted difference of means and its squared standard error, of shape (2, ways), from the runs of a, of shape (ways, n_a).

    A side of one run knows no spread and adds none.
    """
    import numpy as np

    n_a, n_b = len(task.a), len(task.b)
    sums = of_a.sum(axis=1)
    mean_a, mean_b = sums / n_a / UNIT, (pooled.sum() - sums) / n_b / UNIT
    middle = float(pooled.mean())
    squares = (((of_a - middle) / UNIT) ** 2).sum(axis=1)
    rest = float((((pooled - middle) / UNIT) ** 2).sum()) - squares
    middle /= UNIT
    spread_a = np.maximum(0.0, squares - n_a * (mean_a - middle) ** 2) / max(1, n_a - 1) / n_a
    spread_b = np.maximum(0.0, rest - n_b * (mean_b - middle) ** 2) / max(1, n_b - 1) / n_b
    return np.stack([task.weight * (mean_a - mean_b), task.weight**2 * (spread_a + spread_b)])


def _squared(sums: Any) -> Any:
    """The square of a difference over its error, of shape (ways,), from both, of shape (2, ways); 0 where there is no difference."""
    import numpy as np

    return np.where(np.abs(sums[0]) <= TIE, 0.0, sums[0] ** 2 / np.maximum(sums[1], NO_SPREAD))


@lru_cache(maxsize=16)
def _choices(n: int, k: int) -> NDArray[np.int64]:
    """Every way to choose k of n, of shape (ways, k)."""
    import numpy as np

    return np.array(list(combinations(range(n), k)), dtype=np.int64)
