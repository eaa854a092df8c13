"""Statistics of one score: against scipy and statsmodels, published cases, brute force, and simulation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from autorl_hpc.scoring.stats import (
    Interval,
    expected_max_noise,
    mcnemar_midp,
    mean_t_interval,
    paired,
    smallest_visible_gain,
    tango,
    wilson,
)

Z95 = NormalDist().inv_cdf(0.975)


# Wilson


def test_wilson_published_case() -> None:
    # Newcombe, Statistics in Medicine 17:857-872 (1998), table I: 81 of 263, and 15 of 148.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)


def test_wilson_at_the_edges() -> None:
    assert wilson(0, 0) == Interval(0.0, 1.0)
    assert wilson(0, 20).low == 0.0
    assert wilson(20, 20).high == 1.0
    assert wilson(0, 20).high == pytest.approx(Z95**2 / (20 + Z95**2))
    assert wilson(1, 1).low == pytest.approx(1 / (1 + Z95**2))


# McNemar


def test_midp_published_cases() -> None:
    # Fagerland, Lydersen, Laake, BMC Med. Res. Methodol. 13:91 (2013): airway data; exact test 0.070.
    assert mcnemar_midp(1, 7) == 10 / 256
    assert mcnemar_midp(6, 16) == pytest.approx(0.0347, abs=5e-5)


def test_midp_at_the_edges() -> None:
    assert mcnemar_midp(0, 0) == mcnemar_midp(1, 1) == mcnemar_midp(50, 50) == 1.0
    assert mcnemar_midp(1, 0) == mcnemar_midp(0, 1) == 0.5
    assert mcnemar_midp(5, 0) == 1 / 32
    assert 0 < mcnemar_midp(1000, 0) < 1e-300
    assert mcnemar_midp(5000, 0) == 0.0
    with pytest.raises(ValueError, match="no counts"):
        mcnemar_midp(-1, 3)


# Tango


def test_tango_published_cases() -> None:
    """Newcombe's worked example; airway data in Fagerland, Lydersen, Laake, Stat. Med. 33:2850 (2014)."""
    assert [round(limit, 4) for limit in tango(12, 2, 50)] == [0.0611, 0.3447]
    assert [round(limit, 3) for limit in tango(1, 7, 21)] == [-0.517, -0.026]


def test_tango_at_the_edges() -> None:
    g = Z95**2
    assert tango(0, 0, 0) == Interval(-1.0, 1.0)
    for n in (1, 10, 1000):
        assert tango(0, 0, n) == pytest.approx((-g / (n + g), g / (n + g)), abs=1e-12)
        assert tango(n, 0, n) == pytest.approx(((n - g) / (n + g), 1.0), abs=1e-12)
        assert tango(0, n, n) == pytest.approx((-1.0, (g - n) / (n + g)), abs=1e-12)
    assert tango(7, 3, 40) == Interval(-tango(3, 7, 40).high, -tango(3, 7, 40).low)


# Paired outcomes


def test_paired_by_hand() -> None:
    base = [True, True, False, False, False, False, True, False]
    new = [1, 0, 1, 1, 1, 0, 1, 1]
    result = paired(base, new)
    assert (result.n, result.won, result.lost, result.difference) == (8, 4, 1, 3 / 8)
    assert result.p_value == mcnemar_midp(4, 1) == pytest.approx(2 * (1 + 5 / 2) / 32)
    assert (result.low, result.high) == tango(4, 1, 8)
    assert paired(base, new, level=0.5).low > result.low


# What a split can show


def test_smallest_visible_gain_of_the_tasks() -> None:
    assert smallest_visible_gain(82) == 14.9
    assert smallest_visible_gain(1319) == 2.8
    assert 12 < (smallest_visible_gain(82, p_base=0.3) or 0) < 14


def test_some_splits_show_nothing() -> None:
    for n, p_base in ((0, 0.5), (4, 0.0), (10, 0.5), (100, 1.0), (100, 0.99)):
        assert smallest_visible_gain(n, p_base) is None


# Runs


def test_t_interval_equals_scipy() -> None:
    for n, level in itertools.product((*range(3, 14), 30, 31, 101), (0.5, 0.95, 0.999)):
        values = np.random.default_rng(n).normal(50, 10, n)
        low, high = scipy.stats.t.interval(level, n - 1, values.mean(), scipy.stats.sem(values))
        result = mean_t_interval(values.tolist(), level)
        assert (result.n, result.kind) == (n, "t")
        assert (result.mean, result.low, result.high) == pytest.approx((values.mean(), low, high), rel=1e-10)


def test_few_runs_have_no_interval() -> None:
    assert mean_t_interval([]) == (0, None, None, None, "none")
    assert mean_t_interval([3.0]) == (1, 3.0, None, None, "none")
    assert mean_t_interval([5.0, 3.0]) == (2, 4.0, 3.0, 5.0, "range")
    assert mean_t_interval([2.0, 2.0, 2.0]) == (3, 2.0, None, None, "equal")


# Choosing the best by luck


def test_expected_max_noise_known_values() -> None:
    assert expected_max_noise(0, 1) == expected_max_noise(1, 1) == expected_max_noise(5, 0) == 0.0
    assert expected_max_noise(2, 1) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-9)
    assert expected_max_noise(3, 4) == pytest.approx(4 * 1.5 / math.sqrt(math.pi), abs=1e-8)
    assert expected_max_noise(10, 1) == pytest.approx(1.5387527, abs=1e-7)  # tables of normal order statistics
    assert expected_max_noise(20, 2.3) == pytest.approx(2.3 * 1.8674751, abs=1e-6)


IMPOSSIBLE = (
    *(lambda k=k, n=n: wilson(k, n) for k, n in ((-1, 5), (6, 5), (1, 0), (0, -1))),
    *(lambda level=level: wilson(1, 2, level) for level in (0.0, 1.0, 95.0, math.nan)),
    *(lambda b=b, c=c, n=n: tango(b, c, n) for b, c, n in ((-1, 0, 5), (0, -1, 5), (3, 3, 5), (1, 0, 0))),
    *(
        lambda base=base, new=new: paired(base, new)
        for base, new in (([], []), ([1], [1, 0]), ([2], [1]), ([0.5], [1]))
    ),
    *(lambda n=n, p=p: smallest_visible_gain(n, p) for n, p in ((-1, 0.5), (10, 1.5), (10, math.nan))),
    *(lambda value=value: mean_t_interval([1.0, 2.0, value]) for value in (math.nan, math.inf)),
    *(lambda n=n, se=se: expected_max_noise(n, se) for n, se in ((-1, 1.0), (3, -1.0), (3, math.nan))),
)


@pytest.mark.parametrize("call", IMPOSSIBLE)
def test_what_is_impossible_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        call()
