"""What makes resampling fast changes no number: several at once are as one by one."""

from __future__ import annotations

import random
import statistics as plain

import pytest

from autorl_hpc.report.statistics import bca_of_mean, bca_of_means, clustered_interval, clustered_intervals
from autorl_hpc.scoring import stats


def test_several_are_drawn_as_one_by_one() -> None:
    chance = random.Random(5)
    sizes = [chance.randint(1, 9) for _ in range(30)]
    several = [[chance.uniform(0, size) for size in sizes] for _ in range(120)]
    assert bca_of_means(several, sizes) == [bca_of_mean(sums, sizes) for sums in several]
    assert bca_of_means([], sizes) == []
    with pytest.raises(ValueError):
        bca_of_means([several[0], several[1][:-1]], sizes)


def test_scores_on_the_same_clusters() -> None:
    chance = random.Random(6)
    names = [f"c{i % 12}" for i in range(100)]
    several = [[float(chance.random() < share) for _ in names] for share in (0.0, 0.3, 1.0, 0.5)]
    found = clustered_intervals(several, names)
    assert found == [clustered_interval(each, names) for each in several]
    kinds = ["Wilson over clusters", "bootstrap over clusters", "Wilson over clusters", "bootstrap over clusters"]
    assert [each.kind for each in found] == kinds
    few = clustered_intervals(several, [f"c{i % 4}" for i in range(100)])
    assert {each.kind for each in few} == {"Wilson over clusters"}


@pytest.mark.parametrize("values", [(0.0, 1.0), (0.0, 0.25, 1.0)])
def test_the_error_of_a_gap_is_the_sample_variance(values: tuple[float, ...]) -> None:
    chance = random.Random(7)
    base, new = ([chance.choice(values) for _ in range(137)] for _ in range(2))
    found = stats.optimism_gap(base, new, base[:50], new[:50])
    differences = [after - before for before, after in zip(base, new, strict=True)]
    expected = (plain.variance(differences) / 137 + plain.variance(differences[:50]) / 50) ** 0.5
    assert found.standard_error == pytest.approx(expected, rel=1e-14)
