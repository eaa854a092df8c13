"""Every 95 % interval holds the truth about as often as it says: short simulations; benchmarks/coverage makes the long ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
from coverage_cases import CASES, FOUND, Case, share_held

from autorl_hpc.scoring import stats

ERRORS = 3.5
"""Standard errors of a short simulation that its share may lie outside: one case in two thousand by chance, were seeds drawn anew."""

SETS = ((2, 1500), (30, 400), (100, 150))
"""Sets of data by a case's cost, dear ones fewer: all cases together take less than half a minute."""


@pytest.mark.parametrize("case", [*CASES, *FOUND], ids=lambda case: case.name)
@pytest.mark.soak
def test_interval_holds_the_truth(case: Case) -> None:
    sets = next((count for cost, count in SETS if case.cost <= cost), 12)
    share = share_held(case, sets, seed=20)
    error = ERRORS * math.sqrt(case.least * (1 - case.least) / sets)
    assert case.least - error <= share, f"{share:.3f} of {sets}"
    if case.most < 1:
        assert share <= case.most + error, f"{share:.3f} of {sets}: too wide"


def test_an_interval_that_is_too_narrow_or_too_wide_is_found_out() -> None:
    def draw(rng: np.random.Generator) -> bool:
        found = stats.mean_t_interval(rng.normal(5, 3, 5).tolist())
        assert found.mean is not None and found.low is not None
        return abs(found.mean - 5) <= 0.6 * (found.mean - found.low)

    with pytest.raises(AssertionError, match="of 400"):
        test_interval_holds_the_truth(Case("t, six tenths of its width", draw, 0.94, cost=30))
    with pytest.raises(AssertionError, match="too wide"):
        test_interval_holds_the_truth(Case("everything", lambda rng: True, 0.93, 0.97, cost=2))
