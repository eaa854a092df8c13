"""Seeded sketches: two models' distance from a few thousand numbers each, long after their weights were deleted.

A sketch is a CountSketch (Charikar, Chen, Farach-Colton 2002) of the difference to the base model: value number i of a
tensor is added, with a sign by hash, to bucket i mod WIDTH. It is linear, so the difference of two sketches is the sketch of
the difference, and the square of its length has the right mean. Its relative standard deviation is sqrt(2/WIDTH) where the
energy is spread over the buckets: 2.2 % of the square, 1.1 % of the distance.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from numpy.typing import NDArray

WIDTH: Final = 4093
"""A prime: layers' widths divide no multiple of it, so that a column of large values is spread over all buckets."""

SLICE: Final = 64 * WIDTH
"""Values that are handled at once; signs are drawn by slice, so this is part of what a sketch means."""

VERSION: Final = "s1"
"""Sketches of another version don't compare."""


class Sketcher:
    """Adds up one sketch.

    Args:
        seed: what all sketches that are compared share: the base model's content hash.
    """

    def __init__(self, seed: str) -> None:
        import numpy as np

        self.seed = seed
        self.sums: NDArray[Any] = np.zeros(WIDTH, dtype=np.float64)

    def add(self, tensor: str, number: int, difference: NDArray[Any]) -> None:
        """Adds slice `number` of a tensor, float32, at most SLICE values."""
        import numpy as np

        drawn = hashlib.shake_128(f"{VERSION}\0{self.seed}\0{tensor}\0{number}".encode()).digest(
            -(-len(difference) // 8)
        )
        signs = np.unpackbits(np.frombuffer(drawn, dtype=np.uint8), count=len(difference)).astype(np.uint32)
        signs <<= 31
        signs ^= difference.view(np.uint32)
        signed = signs.view(np.float32)
        whole = len(signed) // WIDTH * WIDTH
        self.sums += signed[:whole].reshape(-1, WIDTH).sum(axis=0, dtype=np.float64)
        self.sums[: len(signed) - whole] += signed[whole:]

    def finished(self) -> bytes:
        """The sketch as it is stored: WIDTH float32, little endian."""
        import numpy as np

        with np.errstate(over="ignore"):
            return self.sums.astype("<f4").tobytes()


def distance(a: bytes, b: bytes) -> float:
    """The estimated distance of two models whose sketches these are, in units of the weights.

    Raises:
        ValueError: one of them is no sketch.
    """
    import numpy as np

    if not len(a) == len(b) == 4 * WIDTH:
        raise ValueError("no sketch of this version")
    difference = np.frombuffer(a, dtype="<f4").astype(np.float64) - np.frombuffer(b, dtype="<f4")
    return float(np.sqrt(np.dot(difference, difference)))


def nothing() -> bytes:
    """The base model's own sketch."""
    return bytes(4 * WIDTH)
