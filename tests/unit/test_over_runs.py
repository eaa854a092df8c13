"""Best of k, scaling bands, cells against zero, agents over tasks: right values against brute force, scipy, statsmodels, hand."""

from __future__ import annotations

import itertools
import math
from statistics import fmean, variance

import numpy as np
import pytest

from autorl_hpc.report import statistics as st
from autorl_hpc.report.axes import BestSoFar, band
from autorl_hpc.report.statistics import t_test_p
from autorl_hpc.scoring.stats import t_outside, t_quantile

VALUES = [3.0, -1.0, 7.5, 0.0, 0.0, 4.0, 12.0]
FEEDBACK = [1.0, 2.0, 2.0, 0.0, 5.0, 5.0, 3.0]


@pytest.mark.parametrize("n", range(1, 8))
def test_the_best_of_k_is_chosen_on_feedback(n: int) -> None:
    """Over all subsets; equals on feedback are as likely chosen. The best by the value itself would be the luckiest."""
    for k, best in enumerate(st.best_of_curve(FEEDBACK[:n], VALUES[:n]), 1):
        brute = []
        for subset in itertools.combinations(range(n), k):
            most = max(FEEDBACK[i] for i in subset)
            brute.append(fmean(VALUES[i] for i in subset if FEEDBACK[i] == most))
        assert (best.k, best.mean) == (k, pytest.approx(fmean(brute)))


def test_best_of_intervals_come_from_five_runs_on() -> None:
    assert all(best.low is None for best in st.best_of_curve(FEEDBACK[:4], VALUES[:4]))
    curve = st.best_of_curve(FEEDBACK, VALUES)
    assert [best.k for best in curve] == list(range(1, 8)) and all(best.low is not None for best in curve)
    assert st.best_of_curve([1.0, 2.0, 3.0, 4.0, 5.0], [2.0] * 5)[0] == (1, 2.0, None, None), (
        "equal runs tell no spread"
    )
    assert st.best_of_curve([], []) == [] and len(st.best_of_curve([0.0] * 200, [0.0] * 200)) == 100
    assert st.best_of_curve(FEEDBACK[::-1], VALUES[::-1]) == curve


def test_the_error_of_a_best_of_k_by_hand() -> None:
    """b^2 V n / (n - 1) + s^2 sum(w^2); V, the variance of the best feedback of three, over all resamples."""
    feedback, values = [1.0, 2.0, 4.0, 8.0, 9.0], [1.0, 0.0, 3.0, 5.0, 8.0]
    drawn = [fmean(max(s) for s in itertools.combinations(one, 3)) for one in itertools.product(feedback, repeat=5)]
    slope, level = np.polyfit(feedback, values, 1)
    rest = sum((v - level - slope * f) ** 2 for f, v in zip(feedback, values, strict=True)) / 3
    weights = [0, 0, 0.1, 0.3, 0.6]
    error = math.sqrt(slope**2 * float(np.var(drawn)) * 5 / 4 + rest * sum(w * w for w in weights))
    third = st.best_of_curve(feedback, values)[2]
    assert third.high is not None and third.high - third.mean == pytest.approx(t_quantile(4) * error, rel=0.02)


def test_runs_that_kept_the_base_have_no_luck() -> None:
    """Zeros that are known: the interval is that of the runs that were measured, from three of these on."""
    feedback, values = [0.0, 0.0, 1.0, 2.0, 4.0, 5.0], [0.0, 0.0, 3.0, -1.0, 5.0, 4.0]
    kept = [True, True, False, False, False, False]
    slope, level = np.polyfit(feedback, values, 1)
    rest = [v - level - slope * f for f, v, k in zip(feedback, values, kept, strict=True) if not k]
    first, everyone = st.best_of_curve(feedback, values, kept)[0], st.best_of_curve(feedback, values)[0]
    assert first.high is not None and everyone.high is not None and first.mean == everyone.mean
    luck = sum(r * r for r in rest) / 2 * 4 / 36
    best = slope**2 * float(np.var(feedback)) / 6 * 6 / 5  # of a mean over resamples
    assert first.high - first.mean == pytest.approx(t_quantile(3) * math.sqrt(luck + best), rel=0.02)
    assert first.high > everyone.high
    assert st.best_of_curve(feedback, values, [*kept[:2], True, True, False, False])[0].high is None


def test_a_band_by_hand() -> None:
    first = BestSoFar([(3.0, 1.0), (1.0, 2.0), (5.0, 6.0)], 6.0)
    second = BestSoFar([(2.0, -1.0)], 3.0)
    third = BestSoFar([], 10.0)
    found = band([first, second, third], [0.0, 1.0, 2.5, 4.0, 5.0, 8.0])
    assert [point.mean for point in found] == pytest.approx([0, 2 / 3, 1 / 3, 1 / 3, 5 / 3, 5 / 3], abs=1e-6)
    assert [point.n_reached for point in found] == [3, 3, 3, 2, 2, 1]
    half = 4.302652729911275 * float(np.std([6.0, -1.0, 0.0], ddof=1)) / math.sqrt(3)
    assert (found[4].low, found[4].high) == pytest.approx((5 / 3 - half, 5 / 3 + half), abs=1e-6)
    two = band([BestSoFar([(1.0, 5.0), (1.0, 2.0)], 2.0), BestSoFar([(1.0, 4.0)], 2.0)], [1.0])
    assert (two[0].mean, two[0].low) == (4.5, None), "of two steps at one cost the better counts; two runs have no t"


def test_cells_are_tested_against_zero() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    for values in ([5.0, 6.0, 9.0], [-1.0, 3.0, 0.0, 2.0], [4.0, 4.5, 3.0, 5.0, 4.0]):
        found = st.against_zero(values)
        assert found == pytest.approx(scipy_stats.ttest_1samp(values, 0).pvalue)
    assert [st.against_zero(values) for values in ([], [7.0], [1.0, 2.0])] == [None] * 3


def test_a_tiny_p_is_not_0() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    values = [10, 10.001, 10.002, 10, 10.001, 10, 10.0005]
    p_value = t_test_p(values)
    assert p_value is not None and 0 < p_value < 1e-20
    assert p_value == pytest.approx(scipy_stats.ttest_1samp(values, 0).pvalue, rel=1e-9)
    for df in (1, 2, 3, 10, 200, 5000):
        for t in (0.0, 0.5, 1.7, 3.0, 14.0, 1e4, 1e9):
            assert t_outside(t, df) == pytest.approx(2 * scipy_stats.t.sf(t, df), rel=1e-9, abs=1e-300)


def test_runs_that_are_all_equal_are_no_certainty() -> None:
    assert (st.against_zero([2.0, 2.0, 2.0]), st.against_zero([0.0, 0.0, 0.0])) == (0.25, 1.0)


A = {"x": [1.0, 2.0, 3.0], "y": [4.0, 5.0, 6.5], "z": [1.0]}
B = {"x": [0.0, 1.0, 2.0], "y": [4.0, 1.0, 2.0], "w": [1.0, 2.0]}


def test_the_permutation_test_by_enumeration() -> None:
    pooled, found = [*A["y"], *B["y"]], []
    for chosen in itertools.combinations(range(6), 3):
        a, b = [pooled[i] for i in chosen], [v for i, v in enumerate(pooled) if i not in chosen]
        found.append((fmean(a) - fmean(b)) ** 2 / (variance(a) / 3 + variance(b) / 3))
    assert st.regrouping_p(A["y"], B["y"]) == pytest.approx(fmean(way >= found[0] * (1 - 1e-9) for way in found))


def test_over_tasks_by_hand() -> None:
    found = st.over_tasks(A, B)
    assert found is not None and found.tasks == ("x", "y") and found.left_out == ("w", "z")
    assert found.difference == pytest.approx((1 + (15.5 - 7) / 3) / 2)
    parts = [variance(side[task]) / 3 for task in ("x", "y") for side in (A, B)]
    degrees = sum(parts) ** 2 / sum(v * v / 2 for v in parts)
    assert found.p_value == pytest.approx(t_outside(2 * found.difference / math.sqrt(sum(parts)), degrees))
    assert found.probability_of_improvement == pytest.approx((7 / 9 + 8.5 / 9) / 2)


def test_satterthwaites_degrees_follow_the_tasks_weights() -> None:
    """Two modes of one task weigh a quarter each, the other task a half: its few runs decide how wide the tails are."""
    scipy_stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(3)
    sizes = {"x one": 30, "x two": 30, "y": 4}
    a = {part: rng.normal(2, 3, n).tolist() for part, n in sizes.items()}
    b = {part: rng.normal(0, 3, n).tolist() for part, n in sizes.items()}
    found = st.over_tasks(a, b, {"x one": "x", "x two": "x", "y": "y"})
    assert found is not None and found.low is not None and found.high is not None
    weights = {"x one": 1 / 4, "x two": 1 / 4, "y": 1 / 2}
    parts = [(weights[p] ** 2 * np.var(side[p], ddof=1) / len(side[p]), len(side[p]) - 1) for p in a for side in (a, b)]
    variance = sum(v for v, _ in parts)
    degrees = variance**2 / sum(v * v / df for v, df in parts)
    half = scipy_stats.t.ppf(0.975, degrees) * math.sqrt(variance)
    assert (found.high - found.low) / 2 == pytest.approx(half)


def test_too_few_runs_have_no_interval_over_tasks() -> None:
    assert st.over_tasks({"x": [1.0]}, {"x": [1.0, 2.0]}) is None and st.over_tasks({}, {}) is None
    found = st.over_tasks({"x": [1.0, 2.0]}, {"x": [3.0, 4.0]})
    assert found is not None and found.low is None and found.p_value is None
