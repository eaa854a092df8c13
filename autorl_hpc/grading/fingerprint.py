"""Fingerprint of a submission: where its weights and outputs come from, and the rules behind the flags. A flag is not a
verdict; a person judges."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from autorl_hpc.files import reading
from autorl_hpc.files.checkpoint import ITEM_BYTES, STORED, TensorSpec, narrow, tensors_of, widen
from autorl_hpc.files.checkpoint import content_hash as hash_of_parts
from autorl_hpc.records.entries import Evaluation, Fingerprint, FingerprintFlag

if TYPE_CHECKING:
    from numpy.typing import NDArray

# --- sorted lengths of rows and columns: unchanged if hidden units are permuted or change sign
# A network with permuted hidden units computes the same, but a plain distance takes the copy for another model. Not detected:
# units that are rescaled against each other or rotated into each other.

UNLIKE: Final = 0.25
"""A row counts as exchanged if its squared change exceeds this share of its squared lengths before and after, added. Two
unrelated rows give 1, a changed sign 2; training that moves a row by a tenth of its length gives 0.005."""
EXCHANGED_SHARE: Final = 0.25
"""Sorted lengths are compared only if exchanged rows or columns hold this share of the squared change. A copy hidden by
permutation has at least 0.64; with less, a plain distance still finds it."""
AS_NEAR: Final = 0.5
"""A tensor's lengths match another model if they are at most this far from it, relative to the base's distance. Stricter than
for plain distances, because the lengths of two trained models may grow alike."""
ROUNDING: Final = 1e-6  # Relative error of a length, from the order of summation and from float32


class Energies:
    """Sums of squares by row and column of one tensor; with more than two axes, all but the first are columns, and with a single
    axis each row has one value."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        import numpy as np

        self.width = max(1, math.prod(shape[1:]))
        self.rows: NDArray[Any] = np.zeros(shape[0] if shape else 1)
        self.columns: NDArray[Any] = np.zeros(self.width)

    def add(self, values: NDArray[Any], start: int) -> None:
        """Add float32 values, beginning at value `start` of the tensor."""
        import numpy as np

        row, column = divmod(start, self.width)
        count = -(-(column + len(values)) // self.width)
        squares = np.zeros(count * self.width)  # whole rows, also where the values begin or end inside of one
        squares[column : column + len(values)] = values
        squares *= squares
        self.rows[row : row + count] += squares.reshape(count, self.width).sum(axis=1)
        self.columns += squares.reshape(count, self.width).sum(axis=0)

    def total(self) -> float:
        """Return the sum of all squares."""
        return float(self.rows.sum())

    def lengths(self) -> NDArray[Any]:
        """Return sorted lengths of the rows, then of the columns, as float32."""
        import numpy as np

        return np.concatenate([np.sort(np.sqrt(self.rows)), np.sort(np.sqrt(self.columns))]).astype(np.float32)


Profile = dict[str, "NDArray[Any]"]  # `Energies.lengths` of each tensor of a model, by name


# --- seeded sketches: distances between models whose weights may be deleted
# A CountSketch (Charikar, Chen, Farach-Colton 2002) of the difference to the base model: value i of a tensor is added, with a hashed
# sign, to bucket i mod WIDTH. Linear, so distances between sketches estimate distances between models, to about 1.1 %.

WIDTH: Final = 4093
"""A prime, so that no layer width divides a multiple of it and a column of large values is spread over all buckets."""
SLICE: Final = 64 * WIDTH
"""Values handled at once. Signs are drawn by slice, so this is part of the sketch's definition."""
VERSION: Final = "s1"  # Version of the sketch; sketches of different versions don't compare


class Sketcher:
    """Computes one sketch. `seed` is shared by all sketches that are compared: the base model's content hash."""

    def __init__(self, seed: str) -> None:
        import numpy as np

        self.seed = seed
        self.sums: NDArray[Any] = np.zeros(WIDTH)

    def add(self, tensor: str, number: int, difference: NDArray[Any]) -> None:
        """Add slice `number` of a tensor: float32, at most SLICE values."""
        import numpy as np

        size = len(difference)
        drawn = hashlib.shake_128(f"{VERSION}\0{self.seed}\0{tensor}\0{number}".encode()).digest(-(-size // 8))
        signs = np.unpackbits(np.frombuffer(drawn, dtype=np.uint8), count=size).astype(np.uint32) << 31
        signed = (signs ^ difference.view(np.uint32)).view(np.float32)
        whole = size // WIDTH * WIDTH
        self.sums += signed[:whole].reshape(-1, WIDTH).sum(axis=0, dtype=np.float64)
        self.sums[: size - whole] += signed[whole:]

    def finished(self) -> bytes:
        """Return the sketch in its stored form: WIDTH float32, little endian."""
        import numpy as np

        with np.errstate(over="ignore"):
            return self.sums.astype("<f4").tobytes()


def distance(a: bytes, b: bytes) -> float:
    """Estimate the distance of two models from their sketches, in units of the weights; infinite if it overflows. Raises
    ValueError: one of them is not a sketch."""
    import numpy as np

    if not len(a) == len(b) == 4 * WIDTH:
        raise ValueError("no sketch of this version")
    with np.errstate(invalid="ignore"):
        found = float(np.linalg.norm(np.frombuffer(a, dtype="<f4").astype(np.float64) - np.frombuffer(b, dtype="<f4")))
    return found if math.isfinite(found) else math.inf


# --- reading weights slice by slice; no model is ever whole in memory


class FolderWeights:
    """The tensors of a folder of safetensors files, by name, without those in `but`. Raises Refused: a file is not a
    safetensors file; ValueError: two files hold the same tensor."""

    def __init__(self, folder: Path, but: frozenset[str] = frozenset()) -> None:
        self.folder = folder
        specs = [spec for spec in tensors_of(folder) if spec.name not in but]
        self.specs = {spec.name: spec for spec in sorted(specs, key=lambda spec: (spec.file, spec.begin))}
        if len(self.specs) != len(specs):
            raise ValueError(f"{folder.name}: a tensor is in two files")

    def slices(self, spec: TensorSpec) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield a tensor's slices: their first value's number, and the values as they are stored."""
        import numpy as np

        kind, values = np.dtype(STORED[spec.dtype]), math.prod(spec.shape)
        for start in range(0, values, SLICE):
            count = min(SLICE, values - start)
            bits = np.fromfile(self.folder / spec.file, kind, count, offset=spec.begin + start * kind.itemsize)
            if len(bits) < count:
                raise ValueError(f"{spec.file} is shorter than its header says")
            yield start, bits


def rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Round float32 values to the type of a file: to nearest, ties to even."""
    return values if dtype == "F32" else widen(narrow(values, dtype), dtype)


def precision(values: NDArray[Any], dtype: str) -> str:
    """Return the smallest type that holds all these values; fp32 files are often written from bf16 or fp16 weights."""
    import numpy as np

    kinds = ("BF16", "F16", "F32") if dtype == "F32" else (dtype,)
    return next(kind for kind in kinds if kind == kinds[-1] or np.array_equal(rounded(values, kind), values))


# --- comparison with the base model, tensor by tensor, in one exact pass
# Both are compared in the submission's precision: an fp32 base model that was only saved as bf16 has not moved, and an fp32
# file whose values are all bf16 counts as bf16.

NOISE: Final = 1.5e-6
"""1.5 times what one step of Adam moves a value at 1e-6, the lowest learning rate in use; ten steps move by 3e-6 even as a
random walk. Absolute, because Adam's steps don't scale with the weights."""
CLIP: Final = 4 * NOISE
"""Limit of one value's difference, because one changed byte may make a weight 1e38 without moving the tensor."""
RESOLVES: Final = {"BF16": NOISE * 2**9, "F16": NOISE * 2**12}
"""Values above this absorb a change of NOISE: it is less than half of the step between two numbers of the type."""


class TensorSums:
    """Sums over one tensor of a submission (`mine`), its base model (`theirs`), and their difference. `raw_delta`: squared
    differences without rounding. `moved`: rounded and clipped; `noise`: what a change of NOISE on every value would leave of
    it; `tipped`: unclipped."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.values = name, math.prod(shape)
        self.mine, self.theirs, self.difference = Energies(shape), Energies(shape), Energies(shape)
        self.raw_delta = self.moved = self.noise = self.tipped = 0.0
        self.changed = 0

    def add(self, start: int, mine: NDArray[Any], theirs: NDArray[Any], dtype: str, base_dtype: str) -> NDArray[Any]:
        """Add a slice as float32 values, from files of these types; return the difference without rounding."""
        import numpy as np

        kept_as = precision(mine, dtype)
        rounds = kept_as != base_dtype and ITEM_BYTES[kept_as] <= ITEM_BYTES[base_dtype]
        known = rounded(theirs, kept_as) if rounds else theirs
        noise, tipped = _noise_energy(theirs, kept_as, not rounds)
        self.noise += noise
        self.tipped += tipped
        difference = mine - known
        raw: NDArray[Any] = mine - theirs
        self.mine.add(mine, start)
        self.theirs.add(known, start)
        self.difference.add(difference, start)
        self.changed += int(np.count_nonzero(mine.view(np.uint32) != known.view(np.uint32)))
        self.moved += _energy(difference, CLIP)
        self.raw_delta += _energy(raw)
        return raw

    @property
    def has_moved(self) -> bool:
        """Return whether the tensor changed by more than noise."""
        return self.moved > self.noise

    @property
    def relative_delta(self) -> float | None:
        """|submission - base| / |base|; None if the base is zero."""
        base = self.theirs.total()
        return math.sqrt(self.difference.total() / base) if base > 0 else None

    def exchanged(self) -> float:
        """Return the squared change in exchanged rows or in exchanged columns, whichever is larger."""
        found = []
        for axis in ("rows", "columns"):
            change = getattr(self.difference, axis)
            unlike = change > UNLIKE * (getattr(self.mine, axis) + getattr(self.theirs, axis))
            found.append(float(change[unlike].sum()))
        return max(found)

    def has_same_lengths(self) -> bool:
        """Return whether sorted lengths differ by no more than noise, which applies to a length too, whatever the row's size."""
        import numpy as np

        mine, theirs = self.mine.lengths().astype(np.float64), self.theirs.lengths().astype(np.float64)
        allowed = 2 * self.tipped / self.values + (ROUNDING * theirs) ** 2
        # Clipped like differences of values, so that a few changed values don't move a tensor.
        return float(np.minimum((mine - theirs) ** 2, 16 * allowed).sum()) <= float(allowed.sum())


def _energy(values: NDArray[Any], clip: float | None = None) -> float:
    import numpy as np

    wide = (values if clip is None else np.clip(values, -clip, clip)).astype(np.float64)
    return float(np.dot(wide, wide))


def _noise_energy(values: NDArray[Any], dtype: str, as_stored: bool) -> tuple[float, float]:
    """Return the energy that a change of NOISE on every value leaves after rounding, clipped and unclipped. Where the values are not
    stored in that type yet, one near the middle of two numbers may change whatever its size."""
    import numpy as np

    if dtype == "F32":  # NOISE is absolute, but relative for large values such as norms
        found = max(len(values), _energy(values)) * NOISE**2
        return found, found
    small = values[np.abs(values) < np.float32(RESOLVES[dtype])] if as_stored else values
    step = np.full(len(small), NOISE, dtype=np.float32)
    step[1::2] *= -1
    left = rounded(small + step, dtype) - rounded(small, dtype)
    return _energy(left, CLIP), _energy(left)


@dataclass
class WeightComparison:
    """The result of a comparison of both models."""

    tensors: list[TensorSums] = field(default_factory=list)
    sketch: bytes = b""

    def total(self, name: str) -> float:
        """Return the total of an attribute over all tensors."""
        return math.fsum(getattr(tensor, name) for tensor in self.tensors)

    @property
    def base_length(self) -> float:
        """|base| over all values."""
        return math.sqrt(math.fsum(tensor.theirs.total() for tensor in self.tensors))

    @property
    def relative_delta(self) -> float:
        """|submission - base| / |base| over all values."""
        return math.sqrt(math.fsum(tensor.difference.total() for tensor in self.tensors)) / self.base_length

    @property
    def exchanged_share(self) -> float:
        """Share of the squared change in exchanged rows or columns."""
        change = self.total("raw_delta")
        return math.fsum(tensor.exchanged() for tensor in self.tensors) / change if change > 0 else 0.0


def compare(new: FolderWeights, base: FolderWeights, content_hash: str, seed: str) -> WeightComparison:
    """Compare a submission with its base model. Raises ValueError: names or shapes differ, the base is zero, or the content of
    `new` is not the accepted one."""
    found, sketcher, parts = WeightComparison(), Sketcher(seed), []
    for spec in new.specs.values():
        other = base.specs.get(spec.name)
        if other is None:  # a tied head, which intake leaves out of the content hash
            continue
        if other.shape != spec.shape:
            raise ValueError(f"tensor {spec.name} has another shape than the base model's")
        tensor, digest = TensorSums(spec.name, spec.shape), hashlib.sha256()
        for (start, bits), (_, base_bits) in zip(new.slices(spec), base.slices(other), strict=True):
            digest.update(bits.data)
            mine, theirs = widen(bits, spec.dtype), widen(base_bits, other.dtype)
            sketcher.add(spec.name, start // SLICE, tensor.add(start, mine, theirs, spec.dtype, other.dtype))
        found.tensors.append(tensor)
        parts.append((spec.name, spec.dtype, spec.shape, digest.hexdigest()))
    if len(parts) != len(base.specs):
        raise ValueError("it lacks tensors of the base model")
    if hash_of_parts(parts) != content_hash:
        raise ValueError("the accepted copy was changed after intake")
    if not found.base_length > 0:
        raise ValueError("every value of the base model is zero")
    if not math.isfinite(found.total("raw_delta")):
        raise ValueError("values too large to compare")
    found.sketch = sketcher.finished()
    return found


class StagedSketch(NamedTuple):
    """A staged model beside a base model: its sketch, and its rows' and columns' lengths."""

    sketch: bytes
    profile: Profile


def sketch_of(other: FolderWeights, base: FolderWeights, seed: str) -> StagedSketch:
    """Compute the sketch and lengths of a staged model with the same tensors."""
    sketcher, profile = Sketcher(seed), Profile()
    for spec in other.specs.values():
        own = base.specs.get(spec.name)
        if own is None:
            continue
        energies = Energies(spec.shape)
        for (start, bits), (_, base_bits) in zip(other.slices(spec), base.slices(own), strict=True):
            values = widen(bits, spec.dtype)
            energies.add(values, start)
            sketcher.add(spec.name, start // SLICE, values - widen(base_bits, own.dtype))
        profile[spec.name] = energies.lengths()
    return StagedSketch(sketcher.finished(), profile)


FEW_VALUES: Final = 16
FEW_SHARE: Final = 1e-5
"""Share of changed values in moved tensors up to which nothing was trained. One layer norm of a 7B model is half of this share;
training usually moves whole tensors, and all of them."""
NEARER: Final = 0.8
"""A model is foreign if its distance to another staged model is at most this, relative to the base. Training on the other
model's own data, with half of its direction, gives 1.0; two thirds 0.8; a copy with as much noise 0.7; a mixture 0.8 from 5/9
on."""
TOLD: Final = 0.5  # More than this share of a model must have another model's lengths
PARENT_NEARER: Final = 0.95
"""An earlier submission is the parent if it is nearer than the base by more than four standard deviations of the sketch."""
REPEATS: Final = 0.5  # If more than this share of answers are the same long text, the model does not read its questions
REPEATS_SHORT: Final = 0.9
SHORT_TOKENS: Final = 16
"""A short answer (`yes`, an action, a class) may be right for most items; above nine tenths it is a constant."""


class Outputs(NamedTuple):
    """The most common output of an evaluation: its share of the items, and its length in tokens."""

    share: float
    tokens: int


def outputs_of(path: Path, evaluation: Evaluation) -> Outputs | None:
    """Read the outputs from the items file; None if its hash is not the recorded one."""
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
    """Return whether one output is so common that it can't answer the questions. If the base model repeats itself (a constant
    first action), half of its remaining variety must be gone."""
    limit = REPEATS_SHORT if outputs.tokens <= SHORT_TOKENS else REPEATS
    if base is not None:
        limit = max(limit, (1 + base.share) / 2)
    return outputs.share > limit


def is_untrained(found: WeightComparison) -> bool:
    """Return whether nothing but a few values moved by more than noise."""
    moved = sum(tensor.changed for tensor in found.tensors if tensor.has_moved)
    return moved <= max(FEW_VALUES, FEW_SHARE * found.total("values"))


def exchanged_of(found: WeightComparison, base_model: str, profiles: Mapping[str, Profile]) -> str | None:
    """Return the staged model whose hidden units were permuted or changed sign to give these weights; None if there is none."""
    if found.exchanged_share < EXCHANGED_SHARE:
        return None
    if all(tensor.has_same_lengths() for tensor in found.tensors):
        return base_model
    shares = {name: _share_told(found.tensors, profile) for name, profile in sorted(profiles.items())}
    name = max(shares, key=lambda name: shares[name], default=None)
    return name if name is not None and shares[name] > TOLD else None


def _share_told(tensors: Iterable[TensorSums], other: Profile) -> float:
    """Return the share of the model whose sorted lengths are another model's rather than the base's. Counted by number of
    values, over tensors in which the two models differ, so that a few huge values don't dominate."""
    told = seen = 0
    for tensor in tensors:
        theirs, base, mine = (
            each.astype("f8") for each in (other[tensor.name], tensor.theirs.lengths(), tensor.mine.lengths())
        )
        if float(((theirs - base) ** 2).sum()) > float(((ROUNDING * base) ** 2).sum()):
            seen += tensor.values
            if float(((mine - theirs) ** 2).sum()) <= AS_NEAR**2 * float(((mine - base) ** 2).sum()):
                told += tensor.values
    return told / seen if seen else 0.0


def about_weights(
    found: WeightComparison, base_model: str, others: dict[str, float], profiles: Mapping[str, Profile] | None = None
) -> dict[str, Any]:
    """Return the fields of a Fingerprint that describe the weights, from the estimated distance to each other staged model with the
    same tensors, and the sorted lengths of these models' rows and columns."""
    hidden = exchanged_of(found, base_model, profiles or {})
    length, delta = found.base_length, found.relative_delta
    largest = max(found.tensors, key=lambda tensor: tensor.relative_delta or 0.0)
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
        "largest_delta": largest.relative_delta,
        "largest_tensor": largest.name,
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
    """Return the nearest earlier submission (None: the base model) and the relative distance to it, from estimated distances."""
    from_base = found.total("raw_delta") ** 0.5
    number, away = min(earlier.items(), key=lambda one: (one[1], one[0]), default=(None, from_base))
    if number is None or away >= PARENT_NEARER * from_base:
        return None, from_base / found.base_length
    return number, away / found.base_length


def about_outputs(outputs: Outputs | None, base: Outputs | None) -> dict[str, Any]:
    """Return the fields of a Fingerprint that describe the outputs, without the flag."""
    share, tokens = outputs or (None, None)
    base_share = None if base is None else base.share
    return {"commonest_output_share": share, "commonest_output_tokens": tokens, "base_output_share": base_share}


def of_base(number: int, content_hash: str, base_model: str, outputs: Outputs | None) -> Fingerprint:
    """Return the fingerprint of a submission with the base model's content, without reading weights."""
    zeros = dict.fromkeys(("relative_delta", "largest_delta", "changed_share", "nearest_delta", "parent_delta"), 0.0)
    facts: dict[str, Any] = {**zeros, **dict.fromkeys(("changed_tensors", "moved_tensors", "moved_values"), 0)}
    facts |= {"flags": ("untrained_copy",), "nearest_model": base_model, **about_outputs(outputs, outputs)}
    return Fingerprint(submission_id=number, content_hash=content_hash, **facts)
