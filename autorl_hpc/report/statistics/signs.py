"""The sign-flip test: a difference and its opposite are equally likely if nothing changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autorl_hpc.report.statistics.resampling import EXACT_WAYS, RESAMPLES, UNIT, flips

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def sign_flip_p(values: Sequence[float]) -> float:
    """Two-sided p value of a mean of 0, by turning the signs of the values: of items, of clusters' sums, or of runs.

    Zeros change nothing and are dropped. Up to 14 others all sign patterns are tried (p = hits / 2^n); beyond it 10,000 are
    drawn, p = (hits + 1) / (draws + 1). Exact under differences that are symmetric about 0 if nothing changed. Values are
    rounded to 2^-32, so that equal sums are equal. No value but 0: p = 1.
    """
    import numpy as np

    whole = np.rint(np.sort(np.asarray(values, dtype=float)) * UNIT)
    whole = whole[whole != 0]
    n = len(whole)
    total = float(whole.sum())
    if n == 0:
        return 1.0
    if 2**n <= EXACT_WAYS:
        patterns = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
        return float((np.abs(total - 2 * (patterns @ whole)) >= abs(total)).mean())
    hits = int((np.abs(total - 2 * _turned(whole)) >= abs(total)).sum())
    return (hits + 1) / (RESAMPLES + 1)


def _turned(whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each draw, the sum of the values whose signs it turns, of shape (RESAMPLES,).

    Eight coins are a byte, and a byte has 256 values: the sum of eight values for each is looked up. Exact, as all are whole.
    """
    import numpy as np

    coins = flips(len(whole)).T
    eights = np.zeros((len(coins), 8))
    eights.ravel()[: len(whole)] = whole
    sums = eights @ np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(float).T
    found = np.zeros(RESAMPLES)
    for of_byte, byte in zip(sums, coins, strict=True):
        found += of_byte.take(byte)
    return found


def least_sign_flip_p(n: int) -> float:
    """The least p value that `sign_flip_p` can give for n values: 0.25 for three, 0.03 for six."""
    return 2 / 2**n if n > 0 and 2**n <= EXACT_WAYS else 1.0 if n == 0 else 1 / (RESAMPLES + 1)
