"""Best of k, scaling bands, cells against zero, agents over tasks: right values against brute force, scipy, statsmodels, hand."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean

import numpy as np
import pytest

from autorl_hpc.report import statistics as st
from autorl_hpc.report.statistics.over_runs import t_test_p
from autorl_hpc.scoring.stats import t_quantile, t_within

VALUES = [3.0, -1.0, 7.5, 0.0, 0.0, 4.0, 12.0]


@pytest.mark.parametrize("n", range(1, 8))
def test_best_of_k_is_the_mean_over_all_subsets(n: int) -> None:
    values = VALUES[:n]
    for k in range(1, n + 1):
        brute = fmean(max(subset) for subset in itertools.combinations(values, k))
        assert st.expected_best_of(values, k) == pytest.approx(brute)
        assert st.best_of_curve(values)[k - 1].mean == pytest.approx(brute)


def test_best_of_k_of_passes_is_pass_at_k() -> None:
    passes = [1.0] * 3 + [0.0] * 7
    for k in range(1, 11):
        assert st.expected_best_of(passes, k) == pytest.approx(1 - math.comb(7, k) / math.comb(10, k))


def test_best_of_intervals_come_from_five_runs_and_not_for_large_k() -> None:
    assert all(best.low is None for best in st.best_of_curve(VALUES[:4]))
    curve = st.best_of_curve(VALUES)
    assert [best.k for best in curve] == list(range(1, 8)) and [best.low is None for best in curve] == [False] * 3 + [
        True
    ] * 4
    assert st.best_of_curve([2.0] * 6)[0] == (1, 2.0, None, None), "equal runs tell no spread"
    assert st.best_of_curve([]) == []
    assert st.best_of_curve(VALUES[::-1]) == curve


def test_best_of_one_has_the_error_of_a_mean() -> None:
    (one, *_) = st.best_of_curve(VALUES)
    half = t_quantile(6) * float(np.std(VALUES, ddof=1)) / math.sqrt(7)
    assert one.low is not None and one.mean - one.low == pytest.approx(half, rel=0.02)


def test_best_of_errors_equal_the_full_bootstrap() -> None:
    values = [1.0, 2.0, 4.0, 8.0, 9.0]
    all_resamples = [st.expected_best_of(drawn, 3) for drawn in itertools.product(values, repeat=5)]
    half = t_quantile(4) * float(np.std(all_resamples)) * math.sqrt(5 / 4)
    third = st.best_of_curve(values)[2]
    assert third.high is not None and third.high - third.mean == pytest.approx(half, rel=0.03)


def test_a_band_by_hand() -> None:
    first = st.Curve([(3.0, 1.0), (1.0, 2.0), (5.0, 6.0)], 6.0)
    second = st.Curve([(2.0, -1.0)], 3.0)
    third = st.Curve([], 10.0)
    found = st.band([first, second, third], [0.0, 1.0, 2.5, 4.0, 5.0, 8.0])
    assert [point.mean for point in found] == pytest.approx([0, 2 / 3, 1 / 3, 1 / 3, 5 / 3, 5 / 3])
    assert [point.running for point in found] == [3, 3, 3, 2, 2, 1] and {point.n for point in found} == {3}
    values = [6.0, -1.0, 0.0]
    half = 4.302652729911275 * float(np.std(values, ddof=1)) / math.sqrt(3)
    assert (found[4].low, found[4].high) == pytest.approx((5 / 3 - half, 5 / 3 + half)) and found[4].kind == "t"
    assert st.band([third, second, first], [2.5]) == [found[2]]


def test_bands_of_few_runs() -> None:
    two = st.band([st.Curve([(1.0, 2.0)], 2.0), st.Curve([(1.0, 4.0)], 2.0)], [1.0])
    assert two == [(1.0, 3.0, 2.0, 4.0, 2, 2, "range")]
    assert st.band([st.Curve([(1.0, 2.0)], 2.0)], [1.0]) == [(1.0, 2.0, None, None, 1, 1, "none")]
    for curves in ([], [st.Curve([(1.0, math.nan)], 2.0)], [st.Curve([], math.inf)]):
        with pytest.raises(ValueError):
            st.band(curves, [1.0])


def test_of_two_steps_at_one_x_the_better_counts() -> None:
    assert st.band([st.Curve([(1.0, 5.0), (1.0, 2.0)], 2.0)], [1.0])[0].mean == 5.0


@pytest.mark.parametrize("n", [2, 3, 4, 7, 30])
def test_t_test_equals_scipys(n: int) -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(n).normal(1, 2, n)
    assert t_test_p(values.tolist()) == pytest.approx(scipy_stats.ttest_1samp(values, 0).pvalue, rel=1e-9)
    for t in (0.0, 0.5, 3.0, 40.0):
        assert t_within(t, n) == pytest.approx(1 - 2 * scipy_stats.t.sf(t, n), abs=1e-12)


def test_holm_equals_statsmodels() -> None:
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    p_values = [0.2, 0.011, 0.04, 0.011, 0.9, 0.0004]
    assert st.holm(p_values) == pytest.approx(multitest.multipletests(p_values, method="holm")[1])


def test_a_leaderboard_tests_what_can_be_tested() -> None:
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    scipy_stats = pytest.importorskip("scipy.stats")
    cells = [[5.0, 6.0, 9.0], [1.0, 2.0], [], [-1.0, 3.0, 0.0, 2.0], [7.0], [4.0, 4.5, 3.0, 5.0, 4.0]]
    found = st.leaderboard(cells)
    tested = [0, 3, 5]
    raw = [scipy_stats.ttest_1samp(cells[i], 0).pvalue for i in tested]
    assert [found[i].p_value for i in tested] == pytest.approx(raw)
    assert [found[i].p_holm for i in tested] == pytest.approx(multitest.multipletests(raw, method="holm")[1])
    assert [found[i].p_sign_flip_least for i in tested] == [0.25, 0.125, 0.0625] and found[0].p_sign_flip == 0.25
    assert {found[i] for i in (1, 2, 4)} == {st.CellTest(None, None, None, None)}


def test_runs_that_are_all_equal_are_no_certainty() -> None:
    (same, zero) = st.leaderboard([[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    assert same.p_value == 0.25 == same.p_sign_flip_least and zero.p_value == 1.0


A = {"x": [1.0, 2.0, 3.0], "y": [4.0, 5.0, 6.5], "z": [1.0]}
B = {"x": [0.0, 1.0, 2.0], "y": [4.0, 1.0, 2.0], "w": [1.0, 2.0]}


def all_differences(pooled: list[float], n_a: int) -> list[float]:
    """Differences of the two means for every way to choose the runs of a."""
    ways = itertools.combinations(range(len(pooled)), n_a)
    return [
        fmean(pooled[i] for i in chosen) - fmean(v for i, v in enumerate(pooled) if i not in chosen) for chosen in ways
    ]


def test_over_tasks_by_enumeration() -> None:
    found = st.over_tasks(A, B)
    assert found is not None and found.tasks == ("x", "y") and found.left_out == ("w", "z")
    assert found.difference == pytest.approx((1 + (15.5 - 7) / 3) / 2)
    of_x, of_y = (all_differences([*A[task], *B[task]], 3) for task in ("x", "y"))
    ways = [(one + other) / 2 for one, other in itertools.product(of_x, of_y)]
    assert found.p_value == pytest.approx(fmean(abs(way) >= found.difference - 1e-9 for way in ways))
    assert found.p_least == 2 / 400
    assert found.probability_of_improvement == pytest.approx((7 / 9 + 8.5 / 9) / 2)


def test_over_tasks_turned_round() -> None:
    there, back = st.over_tasks(A, B), st.over_tasks(B, A)
    assert there is not None and back is not None and there.low is not None and back.high is not None
    assert there.difference == -back.difference and there.p_value == back.p_value
    assert there.low == pytest.approx(-back.high, abs=0.15)
    shuffled = {task: values[::-1] for task, values in reversed(A.items())}
    assert st.over_tasks(shuffled, B) == there


def test_one_task_is_the_permutation_of_its_runs() -> None:
    a, b = [1.0, 4.0, 2.5, 9.0], [0.0, 1.0, 3.0]
    found = st.over_tasks({"x": a}, {"x": b})
    assert (
        found is not None and found.p_value == st.permutation_p(a, b) and found.p_least == st.least_permutation_p(4, 3)
    )
    scipy_stats = pytest.importorskip("scipy.stats")
    theirs = scipy_stats.permutation_test((a, b), lambda x, y: abs(np.mean(x) - np.mean(y)), alternative="greater")
    assert found.p_value == pytest.approx(theirs.pvalue)
    u = scipy_stats.mannwhitneyu(a, b).statistic
    assert found.probability_of_improvement == pytest.approx(u / 12)


def test_many_runs_are_sampled_and_near_the_exact_p() -> None:
    rng = random.Random(3)
    a = {f"t{i}": [rng.gauss(0.6, 1) for _ in range(4)] for i in range(4)}
    b = {f"t{i}": [rng.gauss(0, 1) for _ in range(4)] for i in range(4)}
    found = st.over_tasks(a, b)
    assert found is not None and found.p_least == 1 / 10_001
    sums = np.zeros(1)
    for task, values in a.items():
        sums = (sums[:, None] + np.array(all_differences([*values, *b[task]], 4))).ravel()
    exact = float((np.abs(sums) >= 4 * found.difference - 1e-9).mean())
    assert found.p_value == pytest.approx(exact, abs=0.01)
    large = st.over_tasks({"x": [float(i) for i in range(30)]}, {"x": [float(i) + 3 for i in range(30)]})
    theirs = pytest.importorskip("scipy.stats").permutation_test(
        (np.arange(30.0), np.arange(30.0) + 3), lambda x, y: np.mean(x) - np.mean(y), n_resamples=20_000, rng=1
    )
    assert large is not None and large.p_value == pytest.approx(theirs.pvalue, abs=0.02)


def test_stratified_interval_has_the_width_of_satterthwaites() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(8)
    a = {"x": rng.normal(3, 2, 12).tolist(), "y": rng.normal(3, 2, 9).tolist()}
    b = {"x": rng.normal(1, 2, 10).tolist(), "y": rng.normal(1, 2, 12).tolist()}
    found = st.over_tasks(a, b)
    assert found is not None and found.low is not None and found.high is not None
    parts = [(np.var(side[t], ddof=1) / len(side[t]) / 4, len(side[t]) - 1) for t in a for side in (a, b)]
    variance = sum(v for v, _ in parts)
    half = scipy_stats.t.ppf(0.975, variance**2 / sum(v * v / df for v, df in parts)) * math.sqrt(variance)
    assert (found.low, found.high) == pytest.approx((found.difference - half, found.difference + half), abs=0.12)


def test_too_few_runs_have_no_interval_over_tasks() -> None:
    assert st.over_tasks({"x": [1.0]}, {"x": [1.0, 2.0]}) is None and st.over_tasks({}, {}) is None
    found = st.over_tasks({"x": [1.0, 2.0]}, {"x": [3.0, 4.0]})
    assert (
        found is not None
        and found.low is None
        and found.probability_low is None
        and found.p_value == pytest.approx(1 / 3)
    )


def test_a_clean_sweep_is_not_certain() -> None:
    found = st.over_tasks({"x": [5.0, 6.0, 7.0], "y": [5.0, 6.0, 7.0]}, {"x": [1.0, 2.0, 3.0], "y": [1.0, 2.0, 3.0]})
    assert found is not None and found.probability_of_improvement == 1.0 == found.probability_high
    assert found.probability_low is not None and found.probability_low == pytest.approx(6 / (6 + 1.959964**2), abs=1e-6)
