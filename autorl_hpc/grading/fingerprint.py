"""What weights and outputs say about where a submission comes from: the rules behind the flags.

A flag is no verdict: it stands in the record and in the report, and a person judges.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from autorl_hpc.files import reading
from autorl_hpc.files.checkpoint import ITEM_BYTES, TensorSpec, tensors_of
from autorl_hpc.files.checkpoint import content_hash as hash_of_parts
from autorl_hpc.files.faults import again
from autorl_hpc.records.entries import Evaluation, Fingerprint, FingerprintFlag

if TYPE_CHECKING:
    from numpy.typing import NDArray

# What of a model's weights stays when its hidden units change places, or signs: the lengths of rows and of columns.
#
# A network computes the same with its hidden units in another order: rows of one matrix and columns of the next are exchanged, and
# a plain distance takes the copy for another model. Sorted lengths don't change by that; neither do they if a unit's sign is turned.
# They do if units are scaled against each other or turned into each other, which is not looked for.

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


# Seeded sketches: two models' distance from a few thousand numbers each, long after their weights were deleted.
#
# A sketch is a CountSketch (Charikar, Chen, Farach-Colton 2002) of the difference to the base model: value number i of a
# tensor is added, with a sign by hash, to bucket i mod WIDTH. It is linear, so the difference of two sketches is the sketch of
# the difference, and the square of its length has the right mean. Its relative standard deviation is sqrt(2/WIDTH) where the
# energy is spread over the buckets: 2.2 % of the square, 1.1 % of the distance.

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


# Weights of ours read piece by piece with numpy alone: no model is ever whole in memory.

READ_VALUES = 4 * 1024 * 1024
"""Values in one read: 8 to 16 MiB, which shared file systems like."""


class FolderWeights:
    """The tensors of a folder of the store or the artifacts, by name, those in `but` left out.

    Raises:
        Refused: a file is no safetensors file.
        ValueError: a tensor stands in two files.
        OSError: the file system failed.
    """

    def __init__(self, folder: Path, but: frozenset[str] = frozenset()) -> None:
        self.folder = folder
        specs = [spec for spec in tensors_of(folder) if spec.name not in but]
        self.specs = {spec.name: spec for spec in sorted(specs, key=lambda spec: (spec.file, spec.begin))}
        self._files: dict[str, int] = {}
        if len(self.specs) != len(specs):
            raise ValueError(f"{folder.name}: a tensor stands in two files")

    def read(self, spec: TensorSpec, start: int, count: int) -> bytearray:
        """The bytes of `count` values from value `start` of a tensor on."""
        size = ITEM_BYTES[spec.dtype]
        return again(functools.partial(self._read, spec, spec.begin + start * size, count * size))

    def _read(self, spec: TensorSpec, position: int, length: int) -> bytearray:
        if spec.file not in self._files:
            self._files[spec.file] = os.open(self.folder / spec.file, os.O_RDONLY | os.O_CLOEXEC)
        data = bytearray(length)
        view = memoryview(data)
        while view:
            got = os.preadv(self._files[spec.file], [view], position)
            if got <= 0:
                raise ValueError(f"{spec.file} is shorter than its header says")
            view, position = view[got:], position + got
        return data

    def close(self) -> None:
        """Closes the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def values_of(spec: TensorSpec) -> int:
    """How many values a tensor has."""
    return math.prod(spec.shape)


def raw(data: bytearray, dtype: str) -> NDArray[Any]:
    """The bytes as unsigned integers, one a value."""
    import numpy as np

    return np.frombuffer(data, dtype=np.uint32 if dtype == "F32" else np.uint16)


def as_float32(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    """What `raw` gave, as float32: exact for all three types."""
    import numpy as np

    if dtype == "F32":
        return bits.view(np.float32)
    if dtype == "F16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """float32 values as they come back from a file of that type: to nearest, ties to even."""
    import numpy as np

    if dtype == "F32":
        return values
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    bits: NDArray[Any] = values.view(np.uint32)
    kept: NDArray[Any] = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) & np.uint32(0xFFFF0000)
    return kept.view(np.float32)


def precision(bits: NDArray[Any], dtype: str) -> str:
    """The smallest type that holds all these values: fp32 files are often written from bf16 or fp16 weights."""
    import numpy as np

    if dtype != "F32":
        return dtype
    seen = int(np.bitwise_or.reduce(bits)) if len(bits) else 0
    if not seen & 0xFFFF:
        return "BF16"
    if seen & 0x1FFF:
        return "F32"
    values = bits.view(np.float32)
    return "F16" if np.array_equal(rounded(values, "F16"), values) else "F32"


# A submission's weights against the base model's, tensor by tensor: exact, in one pass over both.
#
# Both are compared as the submission's precision can hold them: a base model in fp32 that was only saved as bf16 has not
# moved, and a file in fp32 whose values are all bf16's is taken for bf16.

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
class TensorSums:
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
class WeightComparison:
    """What the pass over both models gave."""

    tensors: list[TensorSums] = field(default_factory=list)
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
    def largest(self) -> TensorSums | None:
        """The tensor that moved farthest for its size."""
        known = [tensor for tensor in self.tensors if tensor.relative_delta is not None]
        return max(known, key=lambda tensor: tensor.relative_delta or 0.0, default=None)


def compare(
    new: FolderWeights, base: FolderWeights, content_hash: str, seed: str
) -> Generator[None, None, WeightComparison]:
    """Compares a submission with its base model; may be paused between reads.

    Raises:
        ValueError: names or shapes differ, a base of zeros, or `new` no longer has the content that was accepted.
        OSError: the file system failed.
    """
    found, sketcher, parts = WeightComparison(), Sketcher(seed), []
    for spec in new.specs.values():
        other = base.specs.get(spec.name)
        if other is None:  # a tied head that intake left out of the content hash
            continue
        if other.shape != spec.shape:
            raise ValueError(f"tensor {spec.name} has another shape than the base model's")
        tensor, digest = TensorSums(spec.name, values_of(spec)), hashlib.sha256()
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


def sketch_of(other: FolderWeights, base: FolderWeights, seed: str, profile: Profile) -> Generator[None, None, bytes]:
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
    tensor: TensorSums,
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


FEW_VALUES: Final = 16
FEW_SHARE: Final = 1e-5
"""Changed values in tensors that moved: with no more than that nothing was trained. One layer norm of a 7B model is half of
its share; training moves whole tensors, and all at once most often."""

NEARER: Final = 0.8
"""A model is foreign if it is at most this far from another staged model, the distance to the base being 1. Training from the
base leads away from every other model, too: in so many dimensions two ways agree by chance in nothing, and both distances
grow alike. Even training on that model's own data, half of which way is the same, gives 1.0; two thirds, 0.8. A copy to which as
much was added as the two models differ by has 0.7, a mixture 0.8 from 5 parts in 9 on."""

TOLD: Final = 0.5
"""More than half of a model must have another's lengths."""

PARENT_NEARER: Final = 0.95
"""An earlier submission is the parent if it is nearer than the base by more than four standard deviations of the sketch."""

REPEATS: Final = 0.5
"""More than half of the answers one and the same long text: no model that reads its questions."""

REPEATS_SHORT: Final = 0.9
SHORT_TOKENS: Final = 16
"""A short answer (`yes`, an action, a class) may honestly be right for most items; above nine tenths it is a constant."""


@dataclass(frozen=True)
class Outputs:
    """The commonest output of an evaluation.

    Attributes:
        share: of the items.
        tokens: how long it is.
    """

    share: float
    tokens: int


def outputs_of(path: Path, evaluation: Evaluation) -> Outputs | None:
    """From the items file; None where it is not the one that was recorded."""
    try:
        data = reading.read_bytes(path)
        if hashlib.sha256(data).hexdigest() != evaluation.items_sha256:
            return None
        rows = [json.loads(line) for line in gzip.decompress(data).splitlines()]
        digest, count = Counter(str(row["output_sha256"]) for row in rows).most_common(1)[0]
        return Outputs(count / len(rows), next(int(row["tokens"]) for row in rows if row["output_sha256"] == digest))
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError):
        return None


def is_degenerate(outputs: Outputs, base: Outputs | None) -> bool:
    """Whether one output is so common that it can't be an answer to what was asked.

    Where the base model repeats itself (games whose first action is always the same), half of what it left varied must be
    gone before the limit is passed: such a task's honest answers repeat.
    """
    limit = REPEATS_SHORT if outputs.tokens <= SHORT_TOKENS else REPEATS
    if base is not None:
        limit = max(limit, (1 + base.share) / 2)
    return outputs.share > limit


def is_untrained(found: WeightComparison) -> bool:
    """Whether nothing moved by more than noise, but for a few values."""
    moved = sum(tensor.changed for tensor in found.tensors if tensor.has_moved)
    return moved <= max(FEW_VALUES, FEW_SHARE * found.total("values"))


def exchanged_of(found: WeightComparison, base_model: str, profiles: Mapping[str, Profile]) -> str | None:
    """The staged model whose hidden units, in another order or with other signs, these weights are; None for weights of their own.

    Args:
        profiles: of the other staged models with the same tensors.
    """
    if found.exchanged_share < EXCHANGED_SHARE:
        return None
    if found.has_same_lengths():
        return base_model
    shares = {name: share_told(found.places, profile) for name, profile in sorted(profiles.items())}
    name = max(shares, key=lambda name: shares[name], default=None)
    return name if name is not None and shares[name] > TOLD else None


def about_weights(
    found: WeightComparison, base_model: str, others: dict[str, float], profiles: Mapping[str, Profile] | None = None
) -> dict[str, Any]:
    """Fields of a Fingerprint.

    Args:
        others: estimated distance to each other staged model with the same tensors, in units of the weights.
        profiles: sorted lengths of these models' rows and columns.
    """
    hidden = exchanged_of(found, base_model, profiles or {})
    length, largest = found.base_length, found.largest
    delta = found.relative_delta
    nearest, away = min(
        [(base_model, delta), *((name, far / length) for name, far in sorted(others.items()))], key=lambda one: one[1]
    )
    flags: list[FingerprintFlag] = []
    if is_untrained(found) or hidden == base_model:
        flags.append("untrained_copy")
    elif hidden is not None or (nearest != base_model and away <= NEARER * delta):
        flags.append("foreign_weights")
    moved = [tensor for tensor in found.tensors if tensor.has_moved]
    return {
        "flags": tuple(flags),
        "relative_delta": delta,
        "largest_delta": largest.relative_delta if largest else None,
        "largest_tensor": largest.name if largest else None,
        "changed_tensors": sum(tensor.changed > 0 for tensor in found.tensors),
        "changed_share": found.total("changed") / found.total("values"),
        "noise_delta": (found.total("noise") ** 0.5) / length,
        "moved_tensors": len(moved),
        "moved_values": sum(tensor.changed for tensor in moved),
        "nearest_model": nearest,
        "nearest_delta": away,
        "exchanged_share": min(1.0, found.exchanged_share),
        "exchanged_of": hidden,
    }


def parent_of(found: WeightComparison, earlier: dict[int, float]) -> tuple[int | None, float]:
    """The earlier submission that this one is nearest to, None for the base model; and the relative distance.

    Args:
        earlier: estimated distance to each earlier submission, in units of the weights.
    """
    from_base = found.total("raw_delta") ** 0.5
    number, away = min(earlier.items(), key=lambda one: (one[1], one[0]), default=(None, from_base))
    if number is None or away >= PARENT_NEARER * from_base:
        return None, from_base / found.base_length
    return number, away / found.base_length


def about_outputs(outputs: Outputs | None, base: Outputs | None) -> dict[str, Any]:
    """Fields of a Fingerprint, but for the flag."""
    return {
        "commonest_output_share": None if outputs is None else outputs.share,
        "commonest_output_tokens": None if outputs is None else outputs.tokens,
        "base_output_share": None if base is None else base.share,
    }


def of_base(number: int, content_hash: str, base_model: str, outputs: Outputs | None) -> Fingerprint:
    """Of a submission whose content is the base model's: known without reading a byte."""
    return Fingerprint(
        submission_id=number,
        content_hash=content_hash,
        flags=("untrained_copy",),
        relative_delta=0.0,
        largest_delta=0.0,
        changed_tensors=0,
        changed_share=0.0,
        moved_tensors=0,
        moved_values=0,
        nearest_model=base_model,
        nearest_delta=0.0,
        parent_delta=0.0,
        **about_outputs(outputs, outputs),
    )
