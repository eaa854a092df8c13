"""One agent against another on one task: the unit is the run, and runs are exchanged between the two."""

from __future__ import annotations

from collections.abc import Sequence

from autorl_hpc.report.statistics.regrouping import Stratum, least_regrouping_p, regrouping_p


def permutation_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided permutation test of equal means, studentised: runs are regrouped, all ways where they are few.

    Exact: the share of regroupings at least as far apart as the one seen. Sampled: (hits + 1) / (draws + 1).
    ValueError for an empty side.
    """
    return regrouping_p([Stratum(a, b)])


def least_permutation_p(n_a: int, n_b: int) -> float:
    """The least p value that `permutation_p` can give for so many runs: 0.1 for three against three."""
    return least_regrouping_p([(n_a, n_b)])


def probability_of_improvement(a: Sequence[float], b: Sequence[float]) -> float:
    """Share of pairs of runs in which a beats b, ties half (Mann-Whitney's U over its maximum)."""
    if not a or not b:
        raise ValueError("a comparison needs runs on both sides")
    return sum(1.0 if x > y else 0.5 if x == y else 0.0 for x in a for y in b) / (len(a) * len(b))


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for their number (S. Holm, Scand. J. Statist. 6:65-70, 1979), in the order given."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted
