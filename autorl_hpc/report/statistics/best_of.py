"""The expected best improvement of k runs, from n runs seen (pass@k of an improvement)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class BestOf(NamedTuple):
    """Expected best of k runs with its 95 % interval; the interval is None where so few runs don't tell one."""

    k: int
    mean: float
    low: float | None
    high: float | None


def expected_best_of(values: Sequence[float], k: int) -> float:
    """Expected best of k runs, by order statistics over all k-subsets of the n runs seen.

    ValueError unless 1 <= k <= n: nothing is extrapolated.
    """
    n = len(values)
    if not 1 <= k <= n:
        raise ValueError(f"the best of {k} can't be told from {n} runs")
    return math.fsum(math.comb(i, k - 1) * value for i, value in enumerate(sorted(values))) / math.comb(n, k)


def best_of_curve(values: Sequence[float]) -> list[BestOf]:
    """Expected best of 1, 2, ... n runs, each with an interval by bootstrap over runs from five runs on.

    Args:
        values: of n runs, in any order.
    """
    raise NotImplementedError
