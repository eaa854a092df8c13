"""Items in clusters, sign flips and the bootstrap of a mean: right values against scipy, statsmodels and enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autorl_hpc.report import statistics
from autorl_hpc.report.statistics import (
    bca_of_mean,
    clustered_intervals,
    paired_clusters,
    sign_flip_p,
    variance_of_mean,
)
from autorl_hpc.scoring import stats

NAMES = ["a", "a", "a", "b", "c", "c", "d", "d", "d", "d", "e", "f", "f", "g"]
BASE = [1, 0, 1, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 1]
NEW = [1, 1, 1, 0, 1, 1, 0, 1, 0, 1, 1, 1, 1, 0]


def test_variance_equals_the_cluster_robust_one_of_statsmodels() -> None:
    regression = pytest.importorskip("statsmodels.regression.linear_model")
    values = [new - base for new, base in zip(NEW, BASE, strict=True)]
    codes = np.unique(NAMES, return_inverse=True)[1]
    fit = regression.OLS(values, np.ones(len(values))).fit(
        cov_type="cluster", cov_kwds={"groups": codes, "use_correction": False}
    )
    n = len(set(NAMES))
    assert variance_of_mean(values, NAMES) == pytest.approx(float(fit.cov_params()[0, 0]) * n / (n - 1))
    assert variance_of_mean(values, [str(i) for i in range(14)]) == pytest.approx(np.var(values, ddof=1) / 14)
    with pytest.raises(ValueError):
        variance_of_mean([1, 2], ["a", "a"])


def test_clustered_bootstrap_agrees_with_scipy() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(4)
    sizes = rng.integers(1, 6, 60)
    sums = rng.binomial(sizes, rng.beta(1, 2, 60))
    names = [f"c{i}" for i, size in enumerate(sizes) for _ in range(size)]
    outcomes = [float(j < won) for won, size in zip(sums, sizes, strict=True) for j in range(size)]
    ours = clustered_intervals([outcomes], names)[0]
    assert ours.kind == "bootstrap over clusters"
    theirs = scipy_stats.bootstrap(
        (sums, sizes),
        lambda s, m, axis=-1: s.sum(axis) / m.sum(axis),
        paired=True,
        method="BCa",
        n_resamples=40_000,
        confidence_level=1 - 2 * statistics.expanded_tail(60),
        rng=1,
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.005)
    independent = stats.wilson(int(sum(outcomes)), len(outcomes))
    assert ours.high - ours.low > independent.high - independent.low


def test_the_interval_of_skewed_values_leans_to_their_tail() -> None:
    """As scipy's: with the acceleration's sign turned both ends lie lower, the upper one by 0.04."""
    scipy_stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(1).exponential(0.1, 20)
    ours = bca_of_mean(values.tolist(), [1] * 20)
    level = 1 - 2 * statistics.expanded_tail(20)
    theirs = scipy_stats.bootstrap(
        (values,), np.mean, method="BCa", n_resamples=40_000, confidence_level=level, rng=1
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.003)


def test_expanded_tail_by_hand() -> None:
    norm = pytest.importorskip("scipy.stats").norm
    t = pytest.importorskip("scipy.stats").t
    assert statistics.expanded_tail(10) == pytest.approx(norm.cdf(-t.ppf(0.975, 9) * math.sqrt(10 / 9)))
    assert statistics.expanded_tail(100_000) == pytest.approx(0.025, abs=1e-5)


EQUAL = [name for name in "abcdefg" for _ in range(2)]
EFFECTIVE = 14**2 / 36
"""Of NAMES: clusters of 3, 1, 2, 4, 1, 2 and 1 items."""


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_clusters_that_are_all_alike_have_wilsons_interval_of_their_number(value: float) -> None:
    equal, unequal = (clustered_intervals([[value] * 14], names)[0] for names in (EQUAL, NAMES))
    assert equal.kind == unequal.kind == "Wilson over clusters"
    assert equal[:2] == stats.wilson(int(7 * value), 7)
    assert unequal[:2] == stats.wilson_share(value, EFFECTIVE)


def test_three_and_four_clusters_have_wilsons_interval_by_students_quantile() -> None:
    t = pytest.importorskip("scipy.stats").t
    for outcomes, names, effective in (
        ([1, 0, 1, 1], ["a", "a", "b", "c"], 16 / 6),
        ([1, 0, 1, 1], ["a", "b", "c", "d"], 4),
        ([0, 0, 0, 0], ["a", "b", "c", "d"], 4),
    ):
        n, p, z = len(set(names)), sum(outcomes) / 4, t.ppf(0.975, len(set(names)) - 1)
        center = (p + z * z / (2 * effective)) / (1 + z * z / effective)
        half = z / (1 + z * z / effective) * math.sqrt(p * (1 - p) / effective + z * z / (4 * effective**2))
        found = clustered_intervals([outcomes], names)[0]
        assert found.kind == "Wilson over clusters"
        assert found[:2] == pytest.approx((center - half, center + half), abs=1e-6)
        narrower = stats.wilson_share(p, n)
        assert found.low <= narrower.low and found.high > narrower.high


def test_gains_and_losses_of_few_clusters_do_not_cancel_to_certainty() -> None:
    names = ["a", "b", "c", "d"]
    still = paired_clusters([0, 0, 0, 0], [0, 0, 0, 0], names)
    moved = paired_clusters([0, 0, 1, 1], [1, 1, 0, 0], names)
    assert (still.difference, moved.difference) == (0, 0)
    assert moved.low < still.low < -0.6 and moved.high > still.high > 0.6


def test_paired_clusters() -> None:
    found = paired_clusters(BASE, NEW, NAMES)
    assert found.difference == pytest.approx(4 / 14) and found.clusters == 7
    assert found.low < found.difference < found.high and found.kind == "bootstrap over clusters"
    # Sums of clusters: a 1, b 0, c 1, d 1, e 0, f 2, g -1; of 32 sign patterns of the five others 10 reach 4 or -4.
    signs = [
        sum(s * v for s, v in zip(way, (1, 1, 1, 2, 1), strict=True)) for way in itertools.product((1, -1), repeat=5)
    ]
    assert found.p_value == sum(abs(one) >= 4 for one in signs) / 32
    backwards = [values[::-1] for values in (BASE, NEW, NAMES)]
    assert paired_clusters(*backwards) == found  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        paired_clusters(BASE, NEW[1:], NAMES)


def test_sign_flips_equal_scipys() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    for n in (3, 8, 13):
        values = np.random.default_rng(n).normal(0.6, 1, n)
        theirs = scipy_stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=np.inf)
        assert sign_flip_p(values.tolist()) == pytest.approx(theirs.pvalue)
    values = np.random.default_rng(5).normal(0.3, 1, 40)
    theirs = scipy_stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=50_000, rng=1)
    assert sign_flip_p(values.tolist()) == pytest.approx(theirs.pvalue, abs=0.01)


def test_sign_flips_at_the_edges() -> None:
    assert sign_flip_p([]) == sign_flip_p([0.0, 0.0]) == 1.0
    assert sign_flip_p([0.1 + 0.2, -0.3]) == 1.0, "equal but for rounding"
    assert sign_flip_p([1.0, 0.0, 2.0, 0.0, 3.0]) == 2 / 8
    assert sign_flip_p([1.0] * 40) == 1 / 10_001


def test_sums_that_differ_by_rounding_alone_are_equal() -> None:
    """Tenths: 7 and -6 make 1, an odd number, and no pattern comes nearer to 0; thirds as whole numbers have it."""
    assert sign_flip_p([0.1] * 7 + [-0.3] * 2) == 1.0
    whole, thirds = [3.0, 1.0, 2.0, 0.0, 1.0, 1.0, 2.0, 0.0], [1.0, 1 / 3, 2 / 3, 0.0, 1 / 3, 1 / 3, 2 / 3, 0.0]
    by_three = [end / 3 for end in bca_of_mean(whole, [1] * 8)]
    assert list(bca_of_mean(thirds, [1] * 8)) == pytest.approx(by_three, abs=1e-8)


def test_clusters_show_less() -> None:
    assert stats.visible_of_clusters([1] * 82) == 82
    assert stats.visible_of_clusters([5] * 20, 1.0) == 20
    assert stats.visible_of_clusters([5] * 20) == 33  # 100 / (1 + 4 / 2)
    assert stats.visible_of_clusters([3, 1], 0.0) == 4
    for sizes, rho in (([], 0.5), ([2], 1.5), ([2], -0.1)):
        with pytest.raises(ValueError):
            stats.visible_of_clusters(sizes, rho)
