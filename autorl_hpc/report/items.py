"""Items files (`items/<submission>.<split>.jsonl.gz`): outcomes per item, used only if they are what was scored."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from autorl_hpc.files import reading
from autorl_hpc.records.ledger import Evaluation

_NOTHING: Mapping[str, Any] = {}
"""One for all items of which nothing was noted: most."""

SCORE_TOLERANCE = 1e-6
"""Points; a mean of the same outcomes summed in another order differs by far less."""


class Unusable(Exception):
    """Why an items file can't be used."""


@dataclass(frozen=True)
class Items:
    """Outcomes of one model on one split, in the split's order.

    Attributes:
        facts: of each item, what its scorer noted for the statistics; empty where it noted nothing.
        lc_c: for length-controlled win rates, the penalty that the score was fitted with.
        clusters: what each item belongs to, where items are not independent; None where each stands for itself.
    """

    ids: tuple[str, ...]
    outcomes: tuple[float, ...]
    commonest_output_share: float
    facts: tuple[Mapping[str, Any], ...] = ()
    lc_c: float | None = None
    clusters: tuple[str, ...] | None = None

    @property
    def binary(self) -> bool:
        """Whether every outcome is right or wrong."""
        return set(self.outcomes) <= {0.0, 1.0}


class ItemsReader:
    """Reads items files, each once."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, str], Items | Unusable] = {}

    def read(self, path: Path, evaluation: Evaluation, *, keep: bool = True) -> Items:
        """The items behind a score.

        Args:
            keep: for the next who asks; not for what only one asks for.

        Raises:
            Unusable: absent, altered (its sha256 is not the one that the record gives), or not adding up to the score.
        """
        wanted = evaluation.items_sha256
        if wanted is None:
            raise Unusable("the score names no items file")
        key = (str(path), wanted)
        items = self._read.get(key)
        if items is None:
            try:
                items = _parse(path, wanted)
            except Unusable as error:
                items = error
            if keep:
                self._read[key] = items
        if isinstance(items, Unusable):
            raise items
        score = 100.0 * sum(items.outcomes) / len(items.outcomes)
        recorded = evaluation.metrics.get("mean_outcome", evaluation.score)
        if evaluation.score is None or recorded is None or abs(score - recorded) > SCORE_TOLERANCE:
            raise Unusable(f"{path.name} gives {score:.4f}, not the score of the record")
        return replace(items, lc_c=evaluation.metrics.get("lc_c"))


def clusters_of(base: Items, new: Items) -> tuple[str, ...] | None:
    """The clusters of the items that both models were scored on.

    Raises:
        Unusable: the two files disagree.
    """
    if base.clusters and new.clusters and base.clusters != new.clusters:
        raise Unusable("the items of base model and checkpoint are not in the same clusters")
    return base.clusters or new.clusters


def same_items(base: Items, new: Items) -> None:
    """Raises Unusable unless both hold the same items in the same order."""
    if base.ids != new.ids:
        raise Unusable("the base model and the checkpoint were not scored on the same items")


def _parse(path: Path, wanted: str) -> Items:
    try:
        data = reading.read_bytes(path)
    except FileNotFoundError:
        raise Unusable(f"{path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise Unusable(f"{path.name} can't be read: {error}") from None
    if hashlib.sha256(data).hexdigest() != wanted:
        raise Unusable(f"{path.name} was altered: its sha256 is not the one that was recorded")
    try:
        lines = reading.gunzip(data).rstrip(b"\n").replace(b"\n", b",")
        rows = from_json(b"[" + lines + b"]")  # one call: a tenth of the time of one a line
        ids = tuple([str(row["id"]) for row in rows])
        outcomes = tuple([float(row["outcome"]) for row in rows])
        outputs = Counter([row.get("output_sha256") for row in rows])
        facts = tuple([row.get("facts") or _NOTHING for row in rows]) if _may_hold(lines, "facts") else ()
        clusters = _clusters(ids, [one.get("cluster") for one in facts]) if any(facts) else None
    except (RecursionError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unusable(f"{path.name} is no items file: {type(error).__name__}") from None
    if not rows or len(set(ids)) != len(ids):
        raise Unusable(f"{path.name} is empty or has an item twice")
    return Items(ids, outcomes, max(outputs.values()) / len(rows), facts if any(facts) else (), clusters=clusters)


def _may_hold(data: bytes, name: str) -> bool:
    """False: no object in this JSON has such a field, however it is written."""
    return name.encode() in data or b"\\" in data


def _clusters(ids: Sequence[str], named: Sequence[object]) -> tuple[str, ...] | None:
    """Names of clusters; an item without one is one of its own. None if no two items share one."""
    if not any(name is not None for name in named):
        return None
    clusters = tuple(f"item {key}" if name is None else str(name) for key, name in zip(ids, named, strict=True))
    return clusters if len(set(clusters)) < len(clusters) else None
