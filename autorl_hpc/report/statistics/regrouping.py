"""Permutation tests: runs change sides within their task. All ways where they are few, else a seeded sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from autorl_hpc.report.statistics.resampling import CHUNK_CELLS, EXACT_WAYS, RESAMPLES, TIE, UNIT, indices, raw

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PERMUTED, _PICKED = 3, 4
"""First words of streams."""

_KEPT = 8
"""Sets of random choices that are kept: of some hundred runs, a few megabytes each."""


class Stratum(NamedTuple):
    """Both sides' runs on one task."""

    a: Sequence[float]
    b: Sequence[float]

    @property
    def ways(self) -> int:
        """In how many ways the runs can be divided between the two sides."""
        return math.comb(len(self.a) + len(self.b), len(self.a))


def regrouping_p(strata: Sequence[Stratum]) -> float:
    """Two-sided p value of equal means on every task; what is compared is the sum over tasks of the difference of means.

    Exact: the share of regroupings at least as far apart as the one seen. Sampled: (hits + 1) / (draws + 1).
    ValueError for no task, or an empty side.
    """
    import numpy as np

    if not strata or not all(task.a and task.b for task in strata):
        raise ValueError("a comparison needs runs on both sides")
    seen = abs(math.fsum(fmean(task.a) - fmean(task.b) for task in strata))
    if math.prod(task.ways for task in strata) <= EXACT_WAYS:
        sums = np.zeros(1)
        for task in strata:
            sums = (sums[:, None] + _all_of(task)).ravel()
        return float((np.abs(sums) >= seen - TIE).mean())
    drawn = sum(_some_of(task, number) for number, task in enumerate(strata))
    return (int((np.abs(drawn) >= seen - TIE).sum()) + 1) / (RESAMPLES + 1)


def least_regrouping_p(sizes: Sequence[tuple[int, int]]) -> float:
    """The least p value that `regrouping_p` can give for runs of so many on both sides of each task."""
    ways = math.prod(math.comb(n_a + n_b, n_a) for n_a, n_b in sizes)
    both = 2 if all(n_a == n_b for n_a, n_b in sizes) else 1
    return both / ways if ways <= EXACT_WAYS else 1 / (RESAMPLES + 1)


def _all_of(task: Stratum) -> Any:
    """Differences of the two means, for every way to choose the runs of a: of shape (ways,)."""
    pooled = _pooled(task)
    return _differences(pooled[_choices(len(pooled), len(task.a))].sum(axis=1), pooled, task)


def _some_of(task: Stratum, number: int) -> Any:
    """Differences of the two means for drawn regroupings: of shape (RESAMPLES,)."""
    import numpy as np

    if task.ways <= EXACT_WAYS:
        return _all_of(task)[indices(task.ways, RESAMPLES, _PICKED, number)]
    pooled = _pooled(task)
    drawn = [pooled[chosen].sum(axis=1) for chosen in _drawn(len(pooled), len(task.a), number)]
    return _differences(np.concatenate(drawn), pooled, task)


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


def _pooled(task: Stratum) -> NDArray[np.float64]:
    """All runs in ascending order, so that the order in which they were given does not matter, as whole numbers."""
    import numpy as np

    found: NDArray[np.float64] = np.rint(np.array(sorted([*task.a, *task.b])) * UNIT)
    return found


def _differences(of_a: Any, pooled: Any, task: Stratum) -> Any:
    return (of_a / len(task.a) - (pooled.sum() - of_a) / len(task.b)) / UNIT


@lru_cache(maxsize=16)
def _choices(n: int, k: int) -> NDArray[np.int64]:
    """Every way to choose k of n, of shape (ways, k)."""
    import numpy as np

    return np.array(list(combinations(range(n), k)), dtype=np.int64)
