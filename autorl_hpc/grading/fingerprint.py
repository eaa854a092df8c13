"""What weights and outputs say about where a submission comes from: the rules behind the flags.

A flag is no verdict: it stands in the record and in the report, and a person judges.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from autorl_hpc.files import reading
from autorl_hpc.grading.comparison import Comparison
from autorl_hpc.grading.norms import EXCHANGED_SHARE, Profile, share_told
from autorl_hpc.records.ledger import Evaluation, Fingerprint, FingerprintFlag

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


def is_untrained(found: Comparison) -> bool:
    """Whether nothing moved by more than noise, but for a few values."""
    moved = sum(tensor.changed for tensor in found.tensors if tensor.has_moved)
    return moved <= max(FEW_VALUES, FEW_SHARE * found.total("values"))


def exchanged_of(found: Comparison, base_model: str, profiles: Mapping[str, Profile]) -> str | None:
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
    found: Comparison, base_model: str, others: dict[str, float], profiles: Mapping[str, Profile] | None = None
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


def parent_of(found: Comparison, earlier: dict[int, float]) -> tuple[int | None, float]:
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
