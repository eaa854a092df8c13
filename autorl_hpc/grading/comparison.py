"""A submission's weights against the base model's, tensor by tensor: exact, in one pass over both.

Both are compared as the submission's precision can hold them: a base model in fp32 that was only saved as bf16 has not
moved, and a file in fp32 whose values are all bf16's is taken for bf16.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from autorl_hpc.files.checkpoint import ITEM_BYTES, TensorSpec
from autorl_hpc.files.checkpoint import content_hash as hash_of_parts
from autorl_hpc.grading.norms import Energies, Places, Profile
from autorl_hpc.grading.sketch import SLICE, Sketcher
from autorl_hpc.grading.weights import READ_VALUES, Weights, as_float32, precision, raw, rounded, values_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK: Final = READ_VALUES // SLICE * SLICE
"""Values in one read: whole slices of a sketch."""

NOISE: Final = 1.5e-6
"""What a single step of Adam at the lowest learning rate in use, 1e-6, moves a value, and half as much again. Training adds
up: ten steps at 1e-6 move by 3e-6 even if no two agree (a random walk), thirty by 5e-6. An absolute size, since Adam's
steps don't scale with the weights: 2e-5 of a model whose weights are 0.1 large, 1e-4 of one whose weights are 0.02 large."""

CLIP: Final = 4 * NOISE
"""A single value counts at most so much: one changed byte may make a weight 1e38, and moves no tensor by that."""

RESOLVES: Final = {"BF16": NOISE * 2**9, "F16": NOISE * 2**12}
"""Larger values swallow a change of NOISE: it is less than half of the step between two numbers of the type."""


@dataclass
class Tensor:
    """Sums over one tensor.

    Attributes:
        delta: sum of the squared differences; `moved` the same with each difference clipped, `noise` what a change of NOISE
            on every value would leave in this precision; `base` of the base model's values.
        raw_delta: without regard to precision, as sketches see it.
        tipped: as `noise`, unclipped: where rounding tips a value over, all of the step.
    """

    name: str
    values: int
    base: float = 0.0
    delta: float = 0.0
    raw_delta: float = 0.0
    moved: float = 0.0
    noise: float = 0.0
    tipped: float = 0.0
    changed: int = 0

    @property
    def has_moved(self) -> bool:
        """Whether it changed by more than noise."""
        return self.moved > self.noise

    @property
    def relative_delta(self) -> float | None:
        """|submission - base| / |base|; None where the base is zero."""
        return math.sqrt(self.delta / self.base) if self.base > 0 else None


@dataclass
class Comparison:
    """What the pass over both models gave."""

    tensors: list[Tensor] = field(default_factory=list)
    places: dict[str, Places] = field(default_factory=dict)
    sketch: bytes = b""

    def total(self, name: str) -> float:
        """A sum over all tensors."""
        return math.fsum(getattr(tensor, name) for tensor in self.tensors)

    @property
    def base_length(self) -> float:
        """|base| over all values."""
        return math.sqrt(self.total("base"))

    @property
    def relative_delta(self) -> float:
        """|submission - base| / |base| over all values."""
        return math.sqrt(self.total("delta") / self.total("base"))

    @property
    def exchanged_share(self) -> float:
        """Of the squared change, what lies in rows or columns that have become others."""
        change = self.total("raw_delta")
        return math.fsum(places.exchanged() for places in self.places.values()) / change if change > 0 else 0.0

    def has_same_lengths(self) -> bool:
        """Whether, in whatever order, all rows and columns are as long as the base model's, but for noise."""
        return all(self.places[tensor.name].same_lengths(tensor.tipped / tensor.values) for tensor in self.tensors)

    @property
    def largest(self) -> Tensor | None:
        """The tensor that moved farthest for its size."""
        known = [tensor for tensor in self.tensors if tensor.relative_delta is not None]
        return max(known, key=lambda tensor: tensor.relative_delta or 0.0, default=None)


def compare(new: Weights, base: Weights, content_hash: str, seed: str) -> Generator[None, None, Comparison]:
    """Compares a submission with its base model; may be paused between reads.

    Raises:
        ValueError: names or shapes differ, a base of zeros, or `new` no longer has the content that was accepted.
        OSError: the file system failed.
    """
    found, sketcher, parts = Comparison(), Sketcher(seed), []
    for spec in new.specs.values():
        other = base.specs.get(spec.name)
        if other is None:  # a tied head that intake left out of the content hash
            continue
        if other.shape != spec.shape:
            raise ValueError(f"tensor {spec.name} has another shape than the base model's")
        tensor, digest = Tensor(spec.name, values_of(spec)), hashlib.sha256()
        found.places[spec.name] = places = Places(spec.shape)
        for start in range(0, tensor.values, BLOCK):
            count = min(BLOCK, tensor.values - start)
            mine, theirs = new.read(spec, start, count), base.read(other, start, count)
            digest.update(mine)
            pair = (raw(mine, spec.dtype), spec), (raw(theirs, other.dtype), other)
            _add_block(tensor, places, sketcher, *pair, start)
            yield
        found.tensors.append(tensor)
        parts.append((spec.name, spec.dtype, spec.shape, digest.hexdigest()))
    if len(parts) != len(base.specs):
        raise ValueError("it lacks tensors of the base model")
    if hash_of_parts(parts) != content_hash:
        raise ValueError("the accepted copy was changed after intake")
    if not found.total("base") > 0:
        raise ValueError("every value of the base model is zero")
    if not math.isfinite(found.total("raw_delta")):
        raise ValueError("values too large to compare")
    found.sketch = sketcher.finished()
    return found


def sketch_of(other: Weights, base: Weights, seed: str, profile: Profile) -> Generator[None, None, bytes]:
    """The sketch of another staged model with the same tensors; may be paused between reads. Its lengths go to `profile`."""
    sketcher = Sketcher(seed)
    for spec in other.specs.values():
        own = base.specs.get(spec.name)
        if own is None:
            continue
        energies = Energies(spec.shape)
        for start in range(0, values_of(spec), BLOCK):
            count = min(BLOCK, values_of(spec) - start)
            a = as_float32(raw(other.read(spec, start, count), spec.dtype), spec.dtype)
            b = as_float32(raw(base.read(own, start, count), own.dtype), own.dtype)
            for at in range(0, count, SLICE):
                energies.add(a[at : at + SLICE], start + at)
                difference = a[at : at + SLICE] - b[at : at + SLICE]
                if difference.any():
                    sketcher.add(spec.name, (start + at) // SLICE, difference)
            yield
        profile[spec.name] = energies.lengths()
    return sketcher.finished()


def _add_block(
    tensor: Tensor,
    places: Places,
    sketcher: Sketcher,
    new: tuple[NDArray[Any], TensorSpec],
    base: tuple[NDArray[Any], TensorSpec],
    start: int,
) -> None:
    """Adds a block to the sums. In slices, which fit the processor's caches."""
    kept_as = precision(new[0], new[1].dtype)
    for at in range(0, len(new[0]), SLICE):
        bits, base_bits = new[0][at : at + SLICE], base[0][at : at + SLICE]
        theirs = as_float32(base_bits, base[1].dtype)
        known = theirs
        if kept_as != base[1].dtype and ITEM_BYTES[kept_as] <= ITEM_BYTES[base[1].dtype]:
            known = rounded(theirs, kept_as)
        tensor.base += _energy(theirs)
        noise, tipped = _noise_energy(theirs, kept_as, known is theirs)
        tensor.noise += noise
        tensor.tipped += tipped
        places.theirs.add(known, start + at)
        same_type = new[1].dtype == base[1].dtype
        if same_type and (bits == base_bits).all():
            places.mine.add(known, start + at)
            continue
        mine = as_float32(bits, new[1].dtype)
        difference = mine - known
        places.mine.add(mine, start + at)
        places.difference.add(difference, start + at)
        tensor.changed += _count(bits != base_bits) if same_type and known is theirs else _count(difference)
        tensor.delta += _energy(difference)
        tensor.moved += _clipped_energy(difference)
        unrounded = difference if known is theirs else mine - theirs
        tensor.raw_delta += _energy(unrounded)
        sketcher.add(tensor.name, (start + at) // SLICE, unrounded)


def _count(values: NDArray[Any]) -> int:
    import numpy as np

    return int(np.count_nonzero(values))


def _energy(values: NDArray[Any]) -> float:
    """The sum of squares; in double precision only where single would not hold it."""
    import numpy as np

    with np.errstate(over="ignore"):
        found = float(np.dot(values, values))
    if math.isfinite(found):
        return found
    wide = values.astype(np.float64)
    return float(np.dot(wide, wide))


def _clipped_energy(difference: NDArray[Any]) -> float:
    import numpy as np

    clipped = np.clip(difference, np.float32(-CLIP), np.float32(CLIP))
    return float(np.dot(clipped, clipped))


def _noise_energy(values: NDArray[Any], dtype: str, as_stored: bool) -> tuple[float, float]:
    """What a change of NOISE on every value leaves after rounding, clipped and unclipped: all in fp32, little in 16 bits.

    Args:
        as_stored: the values are numbers of that type already; else one that lies near the middle of two may tip over
            whatever its size.
    """
    import numpy as np

    if dtype == "F32":  # of large values, such as norms', a share: noise is drawn either way
        found = max(len(values), _energy(values)) * NOISE**2
        return found, found
    small = values[np.abs(values) < np.float32(RESOLVES[dtype])] if as_stored else values
    step = np.full(len(small), NOISE, dtype=np.float32)
    step[1::2] *= -1
    left = rounded(small + step, dtype) - rounded(small, dtype)
    return _clipped_energy(left), _energy(left)
