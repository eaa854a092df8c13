"""How often each 95 % interval of the reports holds the truth: one function a case, for test_coverage.py and benchmarks/coverage.

A case draws data of a known truth, asks the report's own function, and says whether the interval holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from autorl_hpc.report import scores
from autorl_hpc.report.scores import paired_graded
from autorl_hpc.report.statistics import (
    against_zero,
    best_of_curve,
    clustered_intervals,
    compared,
    over_tasks,
    paired_clusters,
    regrouping_p,
    variance_of_mean,
)
from autorl_hpc.scoring import stats
from autorl_hpc.scoring.length_control import JudgedPair, influences, refits

Draw = Callable[[np.random.Generator], bool]
KEPT, LUCKY = 0.6, 0.1  # share of runs that kept the base model, and of those that gain far more than the others


class Case(NamedTuple):
    """One interval or test under one way of drawing data.

    Attributes:
        draw: whether the interval of one drawn set of data holds the truth.
        least, most: shares of a long simulation between which the truth must be held, 0 to 1; what docs/statistics.md shows.
        cost: in comparison with the cheapest; tests draw fewer sets of dear ones.
    """

    name: str
    draw: Draw
    least: float
    most: float = 1.0
    cost: int = 1


def holds(low: float | None, high: float | None, truth: float) -> bool:
    """An interval that is not there holds nothing."""
    return low is not None and high is not None and low - 1e-12 <= truth <= high + 1e-12


def share_held(case: Case, sets: int, seed: int = 1) -> float:
    """Share of `sets` drawn sets of data whose interval holds the truth."""
    rng = np.random.default_rng([seed, *case.name.encode()])
    return sum(case.draw(rng) for _ in range(sets)) / sets


def drawn(once: Callable[..., bool]) -> Callable[..., Draw]:
    """Makes of a function of (rng, *args) one of args, which returns what draws."""
    return lambda *args: lambda rng: once(rng, *args)


# ---- one model ----


@drawn
def wilson(rng: np.random.Generator, n: int, p: float) -> bool:
    return holds(*stats.wilson(int(rng.binomial(n, p)), n), p)


@drawn
def clustered(rng: np.random.Generator, clusters: int, p: float, intraclass: float) -> bool:
    """Beta-binomial clusters of one to five items."""
    names, chances = _clusters(rng, clusters, p, intraclass)
    outcomes = (rng.random(len(names)) < chances).astype(float).tolist()
    found = clustered_intervals([outcomes], names)[0]
    return holds(found.low, found.high, p)


@drawn
def graded_mean(rng: np.random.Generator, n: int) -> bool:
    found = stats.mean_t_interval(rng.beta(0.6, 1.4, n).tolist())
    return holds(found.low, found.high, 0.3)


@drawn
def length_controlled_score(rng: np.random.Generator, n: int) -> bool:
    pairs = _judged(rng, n, 0.3)[1]
    score = float(refits(pairs, PENALTY, np.ones((1, n)))[0])
    half = 1.959964 * math.sqrt(float((influences(pairs, PENALTY) ** 2).sum()))
    return holds(score - half, score + half, _true_rates()[1])


# ---- selected against base ----


@drawn
def tango(rng: np.random.Generator, n: int, won: float, lost: float) -> bool:
    b, c, _ = rng.multinomial(n, [won, lost, 1 - won - lost])
    return holds(*stats.tango(int(b), int(c), n), won - lost)


@drawn
def paired_bca(rng: np.random.Generator, n: int, skewed: bool) -> bool:
    """Rewards from 0 to 1; skewed: few items gain much."""
    base = rng.beta(0.6, 1.4, n) * 0.5
    gains = rng.beta(0.2, 1.8, n) * 0.5 if skewed else rng.uniform(-0.1, 0.2, n)
    found = paired_graded(base.tolist(), (base + gains).tolist())
    return holds(found.low, found.high, 0.05)


@drawn
def clustered_gain(rng: np.random.Generator, clusters: int, intraclass: float, gain: float = 0.1) -> bool:
    """Base solves 0.3 of the items; the new model 0.3 + gain, and in one cluster alike."""
    names, chances = _clusters(rng, clusters, 0.3, intraclass)
    _, of_new = _clusters(rng, clusters, 0.3 + gain, intraclass, names)
    luck = rng.random(len(names))
    found = paired_clusters((luck < chances).astype(float).tolist(), (luck < of_new).astype(float).tolist(), names)
    return holds(found.low, found.high, gain)


@drawn
def whole_clusters(rng: np.random.Generator, clusters: int, won: float, lost: float) -> bool:
    """Clusters of one to five items that are won or lost as a whole, few of them."""
    sizes = rng.integers(1, 6, clusters)
    names = [f"c{i}" for i, size in enumerate(sizes) for _ in range(size)]
    moved = rng.choice([1.0, -1.0, 0.0], clusters, p=[won, lost, 1 - won - lost])
    of_item = moved[[int(name[1:]) for name in names]]
    found = paired_clusters((of_item < 0).astype(float).tolist(), (of_item > 0).astype(float).tolist(), names)
    return holds(found.low, found.high, won - lost)


@drawn
def clustered_size(rng: np.random.Generator, clusters: int, intraclass: float) -> bool:
    """Whether the sign-flip test of two equally good models stays above 0.05."""
    names, chances = _clusters(rng, clusters, 0.3, intraclass)
    _, of_new = _clusters(rng, clusters, 0.3, intraclass, names)
    base, new = (rng.random(len(names)) < chances), (rng.random(len(names)) < of_new)
    return paired_clusters(base.astype(float).tolist(), new.astype(float).tolist(), names).p_value > 0.05


@drawn
def length_controlled_gain(rng: np.random.Generator, n: int) -> bool:
    base, new = _judged(rng, n, 0.3)
    found = scores.paired(base, new, PENALTY, PENALTY)
    truth = _true_rates()
    return holds(found.low, found.high, (truth[1] - truth[0]) / 100)


@drawn
def gap(rng: np.random.Generator, clusters: int, intraclass: float) -> bool:
    """Both splits gain 0.1: the gap is 0; 0 clusters: 100 independent items on each split."""
    gains, squares = [], []
    for _ in range(2):
        names, chances = _clusters(rng, clusters or 100, 0.3, intraclass, None if clusters else one_each(100))
        _, of_new = _clusters(rng, clusters or 100, 0.4, intraclass, names)
        differences = (rng.random(len(names)) < of_new).astype(float) - (rng.random(len(names)) < chances)
        gains.append(float(differences.mean()))
        squares.append(variance_of_mean(differences.tolist(), names))
    return abs(gains[0] - gains[1]) <= 1.959964 * math.sqrt(sum(squares))


# ---- over runs ----


def runs(kind: str, n: int, rng: np.random.Generator) -> Any:
    """Improvements of n runs of mean 5: normal, or a third of the runs with 0 and the others normal."""
    if kind == "normal":
        return rng.normal(5, 3, n)
    if kind == "base mostly kept":
        return np.where(rng.random(n) < 0.6, 0.0, rng.normal(12.5, 3, n))
    return np.where(rng.random(n) < 1 / 3, 0.0, rng.normal(7.5, 3, n))


@drawn
def t_over_runs(rng: np.random.Generator, kind: str, n: int) -> bool:
    found = stats.mean_t_interval(runs(kind, n, rng).tolist())
    return holds(found.low, found.high, 5)


@drawn
def cell_size(rng: np.random.Generator, kind: str, n: int) -> bool:
    """Whether the test of a cell whose true mean is 0 stays above 0.05."""
    found = against_zero((runs(kind, n, rng) - 5).tolist())
    return found is not None and found > 0.05


def splits(rng: np.random.Generator, spread: float, n: int) -> tuple[Any, Any]:
    """Points gained on feedback and on report by n runs, 82 items each, of which 5 % are won and 5 % lost by chance.

    The runs' true gains are 5 +- `spread` points; no gain at all with a spread of 0.
    """
    true = np.clip(rng.normal(0.05, spread / 100, n), -0.4, 0.4) if spread else np.zeros(n)
    shares = np.array([[0.05 + max(gain, 0.0), 0.05 + max(-gain, 0.0)] for gain in true.tolist()])
    both = [
        [rng.multinomial(82, [won, lost, 1 - won - lost]) @ [1, -1, 0] / 0.82 for won, lost in shares] for _ in "fr"
    ]
    return np.array(both[0]), np.array(both[1])


@drawn
def best_of(rng: np.random.Generator, spread: float, n: int, k: int) -> bool:
    """Items and all: the truth is what the run that is best on feedback, of k, truly gains."""
    feedback, report = splits(rng, spread, n)
    found = best_of_curve(feedback.tolist(), report.tolist())[k - 1]
    return holds(found.low, found.high, _true_best(spread, k))


@drawn
def best_of_kept(rng: np.random.Generator, spread: float, n: int, k: int) -> bool:
    """The same, where a part of the runs kept the base model: their gain is 0, and known. Too few others: no interval, no claim."""
    kept = rng.random(n) < KEPT
    feedback, report = (np.where(kept, 0.0, told) for told in splits(rng, spread, n))
    found = best_of_curve(feedback.tolist(), report.tolist(), kept.tolist())[k - 1]
    return found.low is None or holds(found.low, found.high, _true_best(spread, k, KEPT))


@drawn
def best_of_lucky(rng: np.random.Generator, n: int, k: int) -> bool:
    """One run in ten truly gains 30 points, the others nothing: of ten runs a third of the samples hold no such run."""
    true = np.where(rng.random(n) < LUCKY, 30.0, 0.0)
    feedback, report = (true + told for told in splits(rng, 0, n))
    found = best_of_curve(feedback.tolist(), report.tolist())[k - 1]
    return holds(found.low, found.high, 30 * (1 - (1 - LUCKY) ** k))


@drawn
def luck(rng: np.random.Generator, by_report: bool, k: int) -> bool:
    """Whether the interval of the best of k of ten runs without any true gain leaves out 0, chosen on feedback or by the report value."""
    feedback, report = splits(rng, 0, 10)
    found = best_of_curve((report if by_report else feedback).tolist(), report.tolist())[k - 1]
    return not holds(found.low, found.high, 0)


def mean_luck(by_report: bool, sets: int) -> float:
    """Mean of what the best of 5 of ten runs without any true gain is said to gain, in points."""
    rng = np.random.default_rng(95)
    drawn_sets = [splits(rng, 0, 10) for _ in range(sets)]
    found = [best_of_curve(*((r if by_report else f).tolist(), r.tolist()))[4].mean for f, r in drawn_sets]
    return float(np.mean(found))


# ---- one agent against another ----


def permuted(a: list[float], b: list[float]) -> bool:
    return regrouping_p(a, b) < 0.05


def welch(a: list[float], b: list[float]) -> bool:
    found = compared(a, b).p_value
    return found is not None and found < 0.05


@drawn
def told_apart(rng: np.random.Generator, rule: Callable[[list[float], list[float]], bool], n: int, gain: float) -> bool:
    """Whether n runs a side of SD 10 whose true means differ by `gain` are told apart."""
    return rule(rng.normal(gain, 10, n).tolist(), rng.normal(0, 10, n).tolist())


# ---- over tasks ----


@drawn
def tasks(rng: np.random.Generator, kind: str, count: int, n: int) -> bool:
    """a is better by 2 on every task."""
    a = {f"t{i}": (runs(kind, n, rng) + 2).tolist() for i in range(count)}
    b = {f"t{i}": runs(kind, n, rng).tolist() for i in range(count)}
    found = over_tasks(a, b)
    assert found is not None
    return holds(found.low, found.high, 2)


@drawn
def tasks_size(rng: np.random.Generator, kind: str, count: int, n: int) -> bool:
    """Whether the test of two equal agents over tasks stays above 0.05."""
    a, b = ({f"t{i}": runs(kind, n, rng).tolist() for i in range(count)} for _ in range(2))
    found = over_tasks(a, b)
    assert found is not None
    return found.p_value > 0.05


# ---- data and truths ----

PENALTY = 10.0


def one_each(n: int) -> list[str]:
    return [f"c{i}" for i in range(n)]


def _clusters(
    rng: np.random.Generator, count: int, p: float, intraclass: float, names: list[str] | None = None
) -> tuple[list[str], Any]:
    """Names of clusters of one to five items, and each item's chance: Beta over clusters, of mean p."""
    if names is None:
        names = [f"c{i}" for i, size in enumerate(rng.integers(1, 6, count)) for _ in range(size)]
    spread = (1 - intraclass) / intraclass if intraclass else math.inf
    of_cluster = rng.beta(p * spread, (1 - p) * spread, count) if intraclass else np.full(count, p)
    return names, of_cluster[[int(name[1:]) for name in names]]


def _judged(rng: np.random.Generator, n: int, better: float) -> tuple[list[JudgedPair], list[JudgedPair]]:
    """A base model that is shorter than the reference and loses, and one that is better and longer."""
    difficulty = rng.normal(0, 0.5, n)
    reference = rng.integers(300, 2000, n)
    made = []
    for strength, length in ((-0.8, 0.8), (-0.8 + better * 3, 1.2)):
        own = np.maximum(20, reference * rng.lognormal(math.log(length), 0.4, n)).astype(int)
        logit = strength + difficulty + 0.8 * np.tanh((own - reference) / 600)
        wins = (rng.random(n) < 1 / (1 + np.exp(-logit))).astype(float)
        rows = zip(wins.tolist(), reference.tolist(), own.tolist(), difficulty.tolist(), strict=True)
        made.append([JudgedPair(y, len_1, len_2, hard) for y, len_1, len_2, hard in rows])
    return made[0], made[1]


@cache
def _true_rates() -> tuple[float, float]:
    """What the two models' length-controlled win rates are estimates of: those of very many items."""
    sides = _judged(np.random.default_rng(99), 150_000, 0.3)
    base, new = (float(refits(side, PENALTY, np.ones((1, len(side))))[0]) for side in sides)
    return base, new


@cache
def _true_best(spread: float, k: int, kept: float = 0.0) -> float:
    """By very many sets of k runs: the normal approximation of a multinomial would shift it."""
    if not spread:
        return 0.0
    rng, n = np.random.default_rng(98), 200_000
    true = np.clip(rng.normal(0.05, spread / 100, (n, k)), -0.4, 0.4)
    up, down = 0.05 + np.maximum(true, 0), 0.05 + np.maximum(-true, 0)
    won = rng.binomial(82, up)
    seen = won - rng.binomial(82 - won, down / (1 - up))
    base = rng.random((n, k)) < kept
    true, seen = np.where(base, 0.0, true), np.where(base, 0, seen)
    best = seen == seen.max(axis=1, keepdims=True)
    return float(100 * ((true * best).sum(axis=1) / best.sum(axis=1)).mean())


CASES = [
    Case("Wilson, 82 items of 0.1", wilson(82, 0.1), 0.93),
    Case("Wilson, 1,319 items of 0.4", wilson(1319, 0.4), 0.94, 0.965),
    Case("t over 60 graded items", graded_mean(60), 0.93, 0.97),
    *(
        Case(f"bootstrap over {n} clusters, p {p}, correlation {rho}", clustered(n, p, rho), least, cost=20)
        for n, p, rho, least in (
            (8, 0.3, 0.5, 0.93),
            (15, 0.3, 0.3, 0.93),
            (47, 0.05, 0.3, 0.93),
            (47, 0.05, 0.7, 0.90),
            (47, 0.95, 0.7, 0.90),
            (47, 0.3, 0.0, 0.94),
            (47, 0.3, 0.7, 0.94),
            (100, 0.3, 0.5, 0.94),
        )
    ),
    Case("length-controlled score, 150 items", length_controlled_score(150), 0.92, 0.98, cost=30),
    Case("Tango, 82 items, 0.2 won, 0.05 lost", tango(82, 0.2, 0.05), 0.935, cost=2),
    Case("Tango, 500 items, 0.06 won, 0.04 lost", tango(500, 0.06, 0.04), 0.94, 0.965, cost=2),
    *(
        Case(f"paired BCa, {n} items, {'skewed' if skewed else 'even'}", paired_bca(n, skewed), least, cost=20)
        for n, skewed, least in ((20, False, 0.93), (20, True, 0.91), (100, True, 0.94), (200, False, 0.935))
    ),
    *(
        Case(f"paired, bootstrap over {n} clusters, correlation {rho}", clustered_gain(n, rho), least, cost=25)
        for n, rho, least in ((8, 0.3, 0.92), (15, 0.3, 0.93), (47, 0.3, 0.935), (100, 0.5, 0.935))
    ),
    Case("paired, 47 clusters, 0.03 won and 0.01 lost as a whole", whole_clusters(47, 0.03, 0.01), 0.90, cost=25),
    *(
        Case(f"sign flips of {n} clusters: no change is not called one", clustered_size(n, 0.3), 0.94, cost=25)
        for n in (10, 47)
    ),
    Case("paired length-controlled, BCa, 120 items", length_controlled_gain(120), 0.91, 0.99, cost=1500),
    Case("gap +- 1.96 errors, 100 items", gap(0, 0.0), 0.93, 0.97, cost=5),
    Case("gap +- 1.96 errors, 15 clusters", gap(15, 0.3), 0.93, cost=5),
    Case("gap +- 1.96 errors, 47 clusters", gap(47, 0.3), 0.93, 0.97, cost=5),
    *(
        Case(f"t over {n} runs, {kind}", t_over_runs(kind, n), least)
        for kind, n, least in (
            ("normal", 3, 0.94),
            ("normal", 5, 0.94),
            ("mixed", 3, 0.895),
            ("mixed", 5, 0.91),
            ("base mostly kept", 3, 0.73),
        )
    ),
    *(
        Case(f"a cell of {n} runs against 0, {kind}: no gain is not called one", cell_size(kind, n), least, cost=2)
        for kind, n, least in (("normal", 3, 0.94), ("mixed", 3, 0.935), ("mixed", 6, 0.925))
    ),
    *(
        Case(f"best of {k} of {n} runs, 82 items, {kind}", best_of(spread, n, k), least, cost=20)
        for kind, spread, n, k, least in (
            ("no gain", 0, 5, 3, 0.94),
            ("no gain", 0, 10, 5, 0.94),
            ("no gain", 0, 10, 10, 0.94),
            ("gains of 5 ± 5", 5, 5, 3, 0.93),
            ("gains of 5 ± 5", 5, 10, 5, 0.93),
            ("gains of 5 ± 5", 5, 20, 20, 0.92),
        )
    ),
    *(
        Case(
            f"best of {k} of {n} runs, 60 % of which kept the base, {kind}", best_of_kept(spread, n, k), 0.935, cost=20
        )
        for kind, spread, n, k in (
            ("no gain", 0, 10, 5),
            ("gains of 5 ± 5", 5, 10, 3),
            ("gains of 5 ± 5", 5, 10, 10),
            ("gains of 5 ± 5", 5, 20, 5),
        )
    ),
    *(
        Case(f"{count} tasks of {n} runs a side, {kind}: difference", tasks(kind, count, n), least, cost=60)
        for kind, count, n, least in (
            ("normal", 2, 2, 0.92),
            ("normal", 2, 3, 0.93),
            ("mixed", 5, 3, 0.93),
            ("normal", 5, 5, 0.93),
        )
    ),
    Case("3 tasks of 3 runs a side: equal agents are not called unequal", tasks_size("mixed", 3, 3), 0.935, cost=60),
]

FOUND = [
    *(
        Case(
            f"difference of {gain:.0f}, {n} runs a side of SD 10: {name}",
            told_apart(rule, n, gain),
            least,
            most,
            cost=2,
        )
        for n, gain, name, rule, least, most in (
            (3, 30, "permutation", permuted, 0.0, 0.001),
            (3, 30, "Welch", welch, 0.66, 0.71),
            (5, 20, "permutation", permuted, 0.74, 0.81),
            (5, 20, "Welch", welch, 0.73, 0.80),
            (3, 0, "Welch", welch, 0.025, 0.05),
            (5, 0, "Welch", welch, 0.035, 0.055),
        )
    ),
    *(
        Case(
            f"best of {k} of {n} runs, one in ten gains 30, the others nothing",
            best_of_lucky(n, k),
            least,
            most,
            cost=20,
        )
        for n, k, least, most in ((10, 1, 0.74, 0.83), (10, 5, 0.55, 0.65), (40, 5, 0.8, 0.9))
    ),
    *(
        Case(f"best of {k} of 10 runs, no gain, chosen {name}: interval without 0", luck(by, k), least, most, cost=20)
        for k, by, name, least, most in (
            (2, True, "by report", 0.25, 0.4),
            (4, True, "by report", 0.65, 0.8),
            (5, True, "by report", 0.7, 0.9),
            (2, False, "on feedback", 0.01, 0.05),
            (4, False, "on feedback", 0.01, 0.05),
            (5, False, "on feedback", 0.01, 0.05),
        )
    ),
]
"""How often something is found: a test's power, its size where there is nothing, and luck that passes for a gain."""
