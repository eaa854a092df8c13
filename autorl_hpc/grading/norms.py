"""What of a model's weights stays when its hidden units change places, or signs: the lengths of rows and of columns.

A network computes the same with its hidden units in another order: rows of one matrix and columns of the next are exchanged, and
a plain distance takes the copy for another model. Sorted lengths don't change by that; neither do they if a unit's sign is turned.
They do if units are scaled against each other or turned into each other, which is not looked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNLIKE: Final = 0.25
"""A row is exchanged if its squared change is more than this share of what it was and what it became, together: two rows that have
nothing to do with each other give 1, a turned sign 2. What training moves by a tenth of its length gives 0.005."""

EXCHANGED_SHARE: Final = 0.25
"""So much of all that changed, squared, must lie in exchanged rows or columns before sorted lengths are asked. A copy hidden by
exchange has at least 0.64: less than that hides nothing from a distance."""

AS_NEAR: Final = 0.5
"""Lengths of a tensor tell another model if they are at most this far from its, the distance to the base's being 1. Stricter than
for plain distances, since lengths of two trained models may grow alike."""

ROUNDING: Final = 1e-6
"""Of a length: what an order of sums changes, and float32."""


class Energies:
    """Sums of squares by row and by column of one tensor; of more than two axes, all but the first are columns.

    Args:
        shape: the tensor's. One of a single axis has rows of one value.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        import numpy as np

        self.width = max(1, math.prod(shape[1:]))
        self.rows: NDArray[Any] = np.zeros(shape[0] if shape else 1, dtype=np.float64)
        self.columns: NDArray[Any] = np.zeros(self.width, dtype=np.float64)

    def add(self, values: NDArray[Any], start: int) -> None:
        """Adds float32 values from value `start` of the tensor on."""
        import numpy as np

        squares = values.astype(np.float64)
        squares *= squares
        at, width = 0, self.width
        while at < len(squares):
            row, column = divmod(start + at, width)
            if column or len(squares) - at < width:  # a part of a row
                part = squares[at : at + width - column]
                self.rows[row] += part.sum()
                self.columns[column : column + len(part)] += part
                at += len(part)
            else:
                whole = (len(squares) - at) // width
                block = squares[at : at + whole * width].reshape(whole, width)
                self.rows[row : row + whole] += block.sum(axis=1)
                self.columns += block.sum(axis=0)
                at += whole * width

    def lengths(self) -> NDArray[Any]:
        """Sorted lengths of the rows, then of the columns; float32."""
        import numpy as np

        return np.concatenate([np.sort(np.sqrt(self.rows)), np.sort(np.sqrt(self.columns))]).astype(np.float32)


Profile = dict[str, "NDArray[Any]"]
"""`Energies.lengths` of each tensor of a model, by name."""


class Places:
    """Of one tensor: the energies of both models and of their difference."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.mine, self.theirs, self.difference = Energies(shape), Energies(shape), Energies(shape)

    def exchanged(self) -> float:
        """The squared change in exchanged rows or, if it is more, in exchanged columns."""
        found = []
        for axis in ("rows", "columns"):
            change = getattr(self.difference, axis)
            unlike = change > UNLIKE * (getattr(self.mine, axis) + getattr(self.theirs, axis))
            found.append(float(change[unlike].sum()))
        return max(found)

    def same_lengths(self, noise: float) -> bool:
        """Whether sorted lengths differ by no more than noise.

        Args:
            noise: mean square of what noise leaves of a value; so much it leaves of a length too, whatever the row's size.
        """
        import numpy as np

        mine, theirs = self.mine.lengths().astype(np.float64), self.theirs.lengths()
        allowed = 2 * noise + (ROUNDING * theirs.astype(np.float64)) ** 2
        # Clipped, as differences of values are: a few changed ones move no tensor.
        moved = np.minimum((mine - theirs) ** 2, 16 * allowed)
        return float(moved.sum()) <= float(allowed.sum())


def share_told(places: Mapping[str, Places], other: Profile) -> float:
    """In what share of the model the sorted lengths are another model's rather than the base's.

    Counted by values, over the tensors in which these two differ; one with a few huge values can't outvote the rest.
    """
    told = seen = 0
    for name, own in places.items():
        theirs, base = other[name].astype("f8"), own.theirs.lengths().astype("f8")
        mine = own.mine.lengths().astype("f8")
        if float(((theirs - base) ** 2).sum()) <= float(((ROUNDING * base) ** 2).sum()):
            continue
        size = len(own.mine.rows) * own.mine.width
        seen += size
        told += size * (float(((mine - theirs) ** 2).sum()) <= AS_NEAR**2 * float(((mine - base) ** 2).sum()))
    return told / seen if seen else 0.0
