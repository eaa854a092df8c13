"""The win rate as it would be if both answers were equally long (Dubois et al., Length-Controlled AlpacaEval, arXiv 2404.04475,
2024), and its refits for resampled items. Pure functions on numpy; scikit-learn fits the point estimate.

    logit P(y) = b1 tanh(s) + b2 difficulty + b3 not_gamed,   s = (len_1 - len_2) / sd(len_1 - len_2)

for an item's preference y for the answer (2) over the reference (1); lengths in characters, no intercept. Beside the items stand
gamed rows (weight 0.1, not_gamed 0): the reference model told to be verbose and to be concise, which tell what length alone does.
Lasso, its strength from five-fold cross validation. The score is 100 times the mean of P over the items with s = 0.
Source: tatsu-lab/alpaca_eval @ cd543a14, src/alpaca_eval/metrics/glm_winrate.py, `length_controlled_v1`. Two differences: a
row's fold is its number modulo five, and preferences that are all 1 or all 0 give exactly 100 or 0, the limit of the fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

GAMED_WEIGHT: Final = 0.1  # Of each gamed row: upstream's regularisation of 0.2, over its two gamed models
FOLDS: Final = 5
STRENGTHS: Final = tuple(float(10.0 ** (-4 + 8 * step / 9)) for step in range(10))
"""Inverse penalties C that cross validation tries: scikit-learn's default of ten."""
FALLBACK_C: Final = STRENGTHS[5]
"""Where there is nothing to cross-validate: a middle one of those that the published models get."""
MIN_ROWS_FOR_FOLDS: Final = 25  # Rows below which a fold would hold fewer than five
_SURE = 1e-9  # Preferences are kept this far from 0 and 1, so that both labels have some weight in every fold
_CHUNK_CELLS = 1_000_000  # Resampled cells held at once: 8 MB an array
_MAX_NEWTON, _MAX_SWEEPS, _MAX_HALVINGS = 100, 200, 30
_CONVERGED, _LONG_STEP = 1e-8, 0.5


class JudgedPair(NamedTuple):
    """One judged item: the preference `y` for the model's answer, the characters of reference and answer, the instruction's
    difficulty (0 where nothing is known), and standardised length difference and preference of each of its gamed rows."""

    y: float
    len_1: float
    len_2: float
    difficulty: float = 0.0
    gamed: tuple[tuple[float, float], ...] = ()


class LengthControlledRate(NamedTuple):
    """A length-controlled win rate from 0 to 100, the inverse strength `c` of the penalty that cross validation chose, which
    refits keep, and the weights of tanh(s), difficulty and not_gamed: zeros where nothing was fitted."""

    score: float
    c: float


class _Rows(NamedTuple):
    """All rows of a regression, the items first: arrays of shape (rows,), `x` of shape (rows, 3)."""

    x: Array
    y: Array
    weight: Array
    item: NDArray[np.int64]


def win_rate(preferences: Sequence[float]) -> float:
    """100 times the mean preference. ValueError for none, or for one that is not from 0 to 1."""
    if not preferences or not all(0.0 <= y <= 1.0 for y in preferences):  # NaN fails this too
        raise ValueError("a win rate needs preferences from 0 to 1")
    return 100.0 * math.fsum(preferences) / len(preferences)


def length_controlled(pairs: Sequence[JudgedPair], c: float | None = None) -> LengthControlledRate:
    """Return the length-controlled win rate of n pairs; the penalty's inverse strength `c` is None for cross validation.
    ValueError for no pairs, a preference outside 0 to 1, or a number that is not finite."""

    rows = _rows(pairs)
    if _are_alike(rows.y[: len(pairs)]):
        return LengthControlledRate(100.0 * float(rows.y[0]), FALLBACK_C if c is None else c)
    strength = _cross_validated(rows) if c is None else c
    weights = _liblinear(rows.x, rows.y, rows.weight, strength)
    return LengthControlledRate(100.0 * float(_logistic(rows.x[: len(pairs), 1:] @ weights[1:]).mean()), strength)


def refits(pairs: Sequence[JudgedPair], c: float, counts: Array) -> Array:
    """Return length-controlled win rates (0 to 100) of resampled items at a fixed penalty, by Newton's method for all at once.
    The scale of the length difference stays that of all items. `counts`, shape (resamples, n): how often each pair was
    drawn."""
    import numpy as np

    counts = np.asarray(counts, dtype=float)
    rows = _rows(pairs)
    n = len(pairs)
    if counts.ndim != 2 or counts.shape[1] != n or not np.all(counts.sum(axis=1) > 0):
        raise ValueError(f"counts of shape {counts.shape} are no resamples of {n} items")
    start = _newton(rows, rows.weight[None, :], c, np.zeros(3))[0]
    scores = []
    step = max(1, _CHUNK_CELLS // len(rows.y))
    for first in range(0, len(counts), step):
        drawn = counts[first : first + step]
        weights = _newton(rows, drawn[:, rows.item] * rows.weight, c, start)
        predicted = _logistic(weights[:, 1:] @ rows.x[:n, 1:].T)
        means = (predicted * drawn).sum(axis=1) / drawn.sum(axis=1)
        for end in (0.0, 1.0):  # as for all of them: preferences that are all alike need no fit
            means[(drawn * (rows.y[:n] != end)).sum(axis=1) == 0] = end
        scores.append(100.0 * means)
    return np.concatenate(scores)


def influences(pairs: Sequence[JudgedPair], c: float) -> Array:
    """Return by how many points each pair moves the win rate at a fixed penalty. The root of the sum of their squares is the
    standard error (infinitesimal jackknife: L. B. Jaeckel, Bell Laboratories memorandum 72-1215-11, 1972)."""
    import numpy as np

    rows = _rows(pairs)
    n = len(pairs)
    if _are_alike(rows.y[:n]):
        return np.zeros(n)
    (weights,) = _newton(rows, rows.weight[None, :], c, np.zeros(3))
    used = np.flatnonzero(weights)  # what the penalty holds at 0 stays there
    x, p = rows.x[:, used], _logistic(rows.x @ weights)
    slopes = np.zeros((n, len(used)))
    np.add.at(slopes, rows.item, (rows.weight * (p - rows.y))[:, None] * x)
    curve = (x * (rows.weight * p * (1 - p))[:, None]).T @ x + 1e-9 * np.eye(len(used))
    moved = -np.linalg.solve(curve, slopes.T)  # of the weights, by each pair
    level = rows.x[:n].copy()
    level[:, 0] = 0.0
    predicted = _logistic(level @ weights)
    lever = (predicted * (1 - predicted)) @ level[:, used] / n
    found: Array = 100.0 * ((predicted - predicted.mean()) / n + lever @ moved)
    return found


def _are_alike(y: Array) -> bool:
    return y[0] in (0.0, 1.0) and bool((y == y[0]).all())


def _rows(pairs: Sequence[JudgedPair]) -> _Rows:
    import numpy as np

    if not pairs:
        raise ValueError("there is no pair")
    table = np.array([(p.y, p.len_1 - p.len_2, p.difficulty) for p in pairs], dtype=float)
    gamed = np.array(
        [(number, s, y, p.difficulty) for number, p in enumerate(pairs) for s, y in p.gamed], dtype=float
    ).reshape(-1, 4)
    if not (np.isfinite(table).all() and np.isfinite(gamed).all()):
        raise ValueError("a preference, a length or a difficulty is not finite")
    y = np.concatenate([table[:, 0], gamed[:, 2]])
    if not ((y >= 0.0) & (y <= 1.0)).all():
        raise ValueError("a preference is not from 0 to 1")
    n, delta = len(pairs), table[:, 1]
    spread = float(delta.std(ddof=1)) if n > 1 else 0.0
    standardised = delta / spread if spread > 0.0 else np.zeros(n)  # all differ alike: length explains nothing
    x = np.column_stack(
        [
            np.tanh(np.concatenate([standardised, gamed[:, 1]])),
            np.concatenate([table[:, 2], gamed[:, 3]]),
            np.concatenate([np.ones(n), np.zeros(len(gamed))]),
        ]
    )
    weight = np.concatenate([np.ones(n), np.full(len(gamed), GAMED_WEIGHT)])
    return _Rows(x, y, weight, np.concatenate([np.arange(n), gamed[:, 0].astype(np.int64)]))


def _logistic(values: Any) -> Any:
    import numpy as np

    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-values))


def _cross_validated(rows: _Rows) -> float:
    """The strength whose mean log loss over the folds left out is least; of equal ones the smallest, as in scikit-learn."""
    import numpy as np

    total = len(rows.y)
    if total < MIN_ROWS_FOR_FOLDS:
        return FALLBACK_C
    fold = np.arange(total) % FOLDS
    losses = np.zeros(len(STRENGTHS))
    for number in range(FOLDS):
        kept, out = fold != number, fold == number
        for place, strength in enumerate(STRENGTHS):
            weights = _liblinear(rows.x[kept], rows.y[kept], rows.weight[kept], strength)
            p = np.clip(_logistic(rows.x[out] @ weights), 1e-15, 1 - 1e-15)
            y = rows.y[out]
            losses[place] -= float(((y * np.log(p) + (1 - y) * np.log(1 - p)) * rows.weight[out]).mean())
    return STRENGTHS[int(losses.argmin())]


def _liblinear(x: Array, y: Array, weight: Array, c: float) -> Array:
    """Weights of shape (3,). Each row stands twice: as a win of weight y and as a loss of weight 1 - y."""
    import inspect

    import numpy as np
    from sklearn.linear_model import LogisticRegression

    y = np.clip(y, _SURE, 1 - _SURE)
    # The penalty has another name from 1.8 on.
    newer = inspect.signature(LogisticRegression).parameters["penalty"].default == "deprecated"
    lasso = {"l1_ratio": 1.0} if newer else {"penalty": "l1"}
    model = LogisticRegression(C=c, solver="liblinear", fit_intercept=False, random_state=123, **lasso)
    model.fit(
        np.concatenate([x, x]), np.repeat([1, 0], len(y)), sample_weight=np.concatenate([y * weight, (1 - y) * weight])
    )
    found: Array = model.coef_[0]
    return found


def _newton(rows: _Rows, weight: Array, c: float, start: Array) -> Array:
    """Minimisers of |b| + c sum weight loss, of shape (resamples, 3), one for each row of `weight`, by Newton steps that keep the
    penalty as it is."""
    import numpy as np

    x, y = rows.x, np.clip(rows.y, _SURE, 1 - _SURE)
    products = (x[:, :, None] * x[:, None, :]).reshape(-1, 9)
    weights = np.tile(start, (len(weight), 1))
    active = np.arange(len(weight))
    for _ in range(_MAX_NEWTON):
        now, drawn = weights[active], weight[active]
        p = _logistic(now @ x.T)
        slope = c * ((drawn * (p - y)) @ x)
        curve = c * ((drawn * (p * (1 - p))) @ products).reshape(-1, 3, 3) + 1e-9 * np.eye(3)
        step = _lasso_step(now, slope, curve) - now
        # A long step may overshoot where the curve is flat; it is halved until it leads down.
        long = np.flatnonzero(np.abs(step).max(axis=1) > _LONG_STEP)
        before = _loss(x, y, drawn[long], c, now[long])
        for _ in range(_MAX_HALVINGS):
            after = _loss(x, y, drawn[long], c, now[long] + step[long])
            up = ~(after <= before + 1e-9 * (1 + np.abs(before)))
            long, before = long[up], before[up]
            if not len(long):
                break
            step[long] /= 2
        weights[active] = now + step
        active = active[np.abs(step).max(axis=1) > _CONVERGED]
        if not len(active):
            break
    return weights


def _loss(x: Array, y: Array, weight: Array, c: float, weights: Array) -> Array:
    import numpy as np

    eta = weights @ x.T
    losses: Array = np.maximum(eta, 0.0) + np.log1p(np.exp(-np.abs(eta))) - y * eta
    total: Array = c * (weight * losses).sum(axis=1) + np.abs(weights).sum(axis=1)
    return total


def _lasso_step(now: Array, slope: Array, curve: Array) -> Array:
    """Minimisers of the quadratic models plus penalty: coordinate by coordinate, for all resamples at once."""
    import numpy as np

    new: Array = now.copy()
    for _ in range(_MAX_SWEEPS):
        before = new.copy()
        for i in range(3):
            gradient = slope[:, i] + np.einsum("bj,bj->b", curve[:, i, :], new - now)
            pull = curve[:, i, i] * new[:, i] - gradient
            new[:, i] = np.sign(pull) * np.maximum(np.abs(pull) - 1.0, 0.0) / curve[:, i, i]
        if np.abs(new - before).max() < _CONVERGED / 10:
            break
    return new
