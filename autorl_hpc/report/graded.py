"""Selected against base where outcomes are graded (a share, a reward) instead of right or wrong, and items are independent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from autorl_hpc.report.statistics.bca import bca_of_mean
from autorl_hpc.report.statistics.clusters import Totals, hull, tango_of, vary_little
from autorl_hpc.report.statistics.signs import sign_flip_p
from autorl_hpc.scoring.stats import LEVEL

ALIKE = 1e-9
"""Differences nearer to each other are equal but for rounding."""


class GradedResult(NamedTuple):
    """New against base on the same items, in units of outcomes."""

    difference: float
    low: float
    high: float
    p_value: float


def paired_graded(base: Sequence[float], new: Sequence[float], level: float = LEVEL) -> GradedResult:
    """Mean paired difference with its BCa bootstrap interval (10,000 resamples) and a sign-flip p value, both seeded.

    Items that all changed alike have Tango's interval of as many won or lost in part, since resamples know no spread there; where
    fewer than ten differ from the others the interval is at least as wide. ValueError unless both hold the same two or more items.
    """
    if len(base) != len(new) or len(base) < 2:
        raise ValueError(f"{len(base)} and {len(new)} outcomes are not the same two or more items")
    differences = [float(now) - float(old) for old, now in zip(base, new, strict=True)]
    seen = math.fsum(differences) / len(differences)
    p_value = sign_flip_p(differences)
    found = Totals(differences, [1] * len(differences))
    if max(differences) - min(differences) <= ALIKE:
        return GradedResult(seen, *tango_of(found, level), p_value)
    interval = bca_of_mean(differences, found.sizes, level)
    return GradedResult(seen, *(hull(interval, tango_of(found, level)) if vary_little(found) else interval), p_value)
