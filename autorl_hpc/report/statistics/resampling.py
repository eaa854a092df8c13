"""Seeded draws for every resampling of a report: the same numbers on every machine and with every version of numpy.

Only the raw stream of PCG64 is used, which numpy promises never to change; its `Generator` methods may.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

from autorl_hpc.scoring.stats import LEVEL, t_quantile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RESAMPLES = 10_000
SEED = 20260101
"""Any fixed number: two reports over the same runs must not differ."""

EXACT_WAYS = 20_000
"""Up to this many regroupings or sign patterns are all tried; beyond it a seeded sample of `RESAMPLES` is."""

TIE = 1e-9
"""Sums of the same numbers in another order differ by less than this, and count as equal."""

CHUNK_CELLS = 2_000_000
"""Resampled cells held at once as floats: 16 MB."""

UNIT = 2.0**32
"""Values are rounded to multiples of 1/UNIT before they are summed: whole numbers below 2^53 add up exactly in any order, so
that neither a linear algebra library nor a processor decides a last digit or a tie. 2e-10 is far below any score's digits."""

_DRAWS, _COINS = 1, 2
"""First words of streams."""

_KEPT = 4
"""Matrices of draws kept: a report holds the two splits of one or two tasks at a time."""


def raw(size: int, *stream: int) -> NDArray[np.uint64]:
    """The first `size` words of a stream of random 64-bit words."""
    import numpy as np

    found: NDArray[np.uint64] = np.random.PCG64([SEED, *stream]).random_raw(size)
    return found


def indices(n: int, size: int, *stream: int) -> NDArray[np.int64]:
    """`size` numbers below n, each as likely as the others to within n / 2^32."""
    import numpy as np

    words = raw((size + 1) // 2, *stream).astype("<u8").view("<u4")[:size].astype(np.uint64)
    found: NDArray[np.int64] = ((words * np.uint64(n)) >> np.uint64(32)).astype(np.int64)
    return found


@lru_cache(maxsize=_KEPT)
def counts(n: int, resamples: int = RESAMPLES) -> NDArray[np.uint8]:
    """How often each of n things is drawn when n are drawn with replacement: the same for all that have n things.

    Returns:
        Of shape (resamples, n), read-only.
    """
    found = counts_of(n, resamples)
    found.setflags(write=False)
    return found


def counts_of(n: int, resamples: int, *stream: int) -> NDArray[np.uint8]:
    """`counts` of a stream of its own, for things that must be drawn independently of others.

    A count of 256 has a probability below 1e-500 where n allows it.
    """
    import numpy as np

    found = np.zeros((resamples, n), dtype=np.uint8)
    rows = max(1, CHUNK_CELLS // n)
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        drawn = indices(n, size * n, _DRAWS, start, *stream).reshape(size, n)
        flat = (drawn + n * np.arange(size)[:, None]).ravel()
        found[start : start + size] = np.bincount(flat, minlength=size * n).reshape(size, n)
    return found


@lru_cache(maxsize=_KEPT)
def flips(n: int, resamples: int = RESAMPLES) -> NDArray[np.uint8]:
    """Fair coins, packed eight to a byte: `numpy.unpackbits(flips(n), axis=1, count=n)` has shape (resamples, n)."""
    import numpy as np

    width = (n + 7) // 8
    words = raw((resamples * width + 7) // 8, _COINS).astype("<u8")
    drawn = words.view(np.uint8)[: resamples * width].reshape(resamples, width)
    found: NDArray[np.uint8] = np.asfortranarray(drawn)  # it is looked through byte by byte, all draws at once
    found.setflags(write=False)
    return found


def quantiles(values: NDArray[np.float64], shares: Sequence[float]) -> list[float]:
    """Linear interpolation between order statistics, as numpy's default does it; only those that are asked for are sorted out.

    Args:
        values: of shape (n,), in any order.
    """
    import numpy as np

    last = len(values) - 1
    places = [(low := math.floor(share * last), min(low + 1, last), share * last - low) for share in shares]
    parted = np.partition(values, sorted({place for low, high, _ in places for place in (low, high)}))
    return [float(parted[low] + part * (parted[high] - parted[low])) for low, high, part in places]


def expanded_tail(n: int, level: float = LEVEL) -> float:
    """The tail at which the percentiles of a bootstrap of n values end, so that few values give wide enough intervals.

    A resampled mean varies by (n - 1) / n of what it should, and its percentiles are a normal's where Student's are due. Both
    are mended by the tail of the normal distribution beyond sqrt(n / (n - 1)) t, with t of n - 1 degrees of freedom.
    Source: T. Hesterberg, The American Statistician 69:371-386, 2015, "expanded percentile interval".
    """
    return NormalDist().cdf(-math.sqrt(n / (n - 1)) * t_quantile(n - 1, level))
