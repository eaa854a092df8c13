"""Two measurements of one checkpoint on the same items: are they the same but for the noise of the engines?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from autorl_hpc.files import reading
from autorl_hpc.records.ledger import Evaluation
from autorl_hpc.scoring.stats import ALPHA, mcnemar_midp

PURE_SCORERS = ("gsm8k", "gsm8k-marked", "gsm8k-opencompass", "deepsearchqa-exact")
"""Their outcome follows from item and text alone. Others ask a judge, a clock (programs), an environment or a task's own code,
and may give one text two outcomes."""

SCORE_TOLERANCE = 1e-6
"""Points; of a sum in another order."""

Word = Literal["identical", "within noise", "differs", "not scored"]


class Row(NamedTuple):
    """One item of an items file."""

    outcome: float
    output_sha256: str


@dataclass(frozen=True)
class Compared:
    """The claimed score of one model beside the one that was measured here.

    Attributes:
        changed: items with another outcome here; `up` of them higher, `down` lower.
        same_texts: items whose answer is the same text, by its hash.
        same_text_other_outcome: items that contradict a scorer that sees the text alone.
        p_value: of so lopsided a change, were it chance: McNemar's mid-p over the changed items.
    """

    what: Literal["selected", "base"]
    word: Word
    why: str
    claimed: float | None
    here: float | None
    n: int = 0
    changed: int = 0
    up: int = 0
    down: int = 0
    same_texts: int = 0
    same_text_other_outcome: int = 0
    p_value: float | None = None
    same_engine: bool = False
    claimed_engine: str | None = None
    engine: str | None = None

    @property
    def difference(self) -> float | None:
        """Here less claimed, in points."""
        return None if self.claimed is None or self.here is None else self.here - self.claimed

    @property
    def holds(self) -> bool:
        return self.word in ("identical", "within noise")

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {**vars(self), "difference": self.difference, "holds": self.holds}

    def as_text(self) -> str:
        """One line for people."""
        if self.difference is None:
            return f"{self.what}: {self.word}: {self.why}"
        agreed = f"{self.n - self.changed} of {self.n} outcomes and {self.same_texts} texts the same"
        return (
            f"{self.what}: {self.word}: claimed {self.claimed:.2f}, here {self.here:.2f} "
            f"({self.difference:+.2f}), {agreed}. {self.why}"
        )


def read_rows(path: Path) -> dict[str, Row]:
    """An items file by item.

    Raises:
        ValueError: it is none.
        OSError: it can't be read.
    """
    rows: dict[str, Row] = {}
    try:
        for line in reading.gunzip(reading.read_bytes(path)).splitlines():
            value = json.loads(line)
            rows[str(value["id"])] = Row(float(value["outcome"]), str(value["output_sha256"]))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path.name} is no items file: {type(error).__name__}") from None
    return rows


def compare(
    what: Literal["selected", "base"],
    claimed: Evaluation,
    claimed_rows: Mapping[str, Row],
    here: Evaluation,
    rows: Mapping[str, Row],
    *,
    scorer: str,
    noise: float,
    reproducible: bool = False,
) -> Compared:
    """Compares two evaluations of the same weights, item by item.

    Args:
        noise: in points, by which the base model's own repeats differed, as measured here: what the bundle says of its own
            noise is a claim like any other.
        reproducible: the base model was answered here word for word as claimed, whatever engine is claimed: then there is no
            noise that could explain other answers of the checkpoint.
    """
    facts: dict[str, Any] = {
        "what": what,
        "claimed": claimed.score,
        "here": here.score,
        "n": len(rows),
        "claimed_engine": claimed.engine_hash,
        "engine": here.engine_hash,
        "same_engine": claimed.engine_hash == here.engine_hash and here.engine_hash is not None,
    }
    if claimed.score is None or here.score is None:
        reason = here.reason if here.score is None else claimed.reason
        return Compared(**facts, word="not scored", why=reason or "there is no score")
    if claimed_rows.keys() != rows.keys():
        return Compared(
            **facts, word="differs", why="the bundle's items are not those of the split that is staged here"
        )
    pairs = [(claimed_rows[name], rows[name]) for name in rows]
    up = sum(new.outcome > old.outcome for old, new in pairs)
    down = sum(new.outcome < old.outcome for old, new in pairs)
    texts = [old.output_sha256 == new.output_sha256 for old, new in pairs]
    contradicted = sum(same and old.outcome != new.outcome for same, (old, new) in zip(texts, pairs, strict=True))
    facts |= {
        "up": up,
        "down": down,
        "changed": up + down,
        "same_texts": sum(texts),
        "same_text_other_outcome": contradicted,
        "p_value": mcnemar_midp(up, down),
    }
    difference = abs(here.score - claimed.score)
    word, why = _judge(facts, difference, noise, scorer, reproducible)
    return Compared(**facts, word=word, why=why)


def _judge(facts: dict[str, Any], difference: float, noise: float, scorer: str, reproducible: bool) -> tuple[Word, str]:
    contradicted, p_value = facts["same_text_other_outcome"], facts["p_value"]
    if contradicted and scorer in PURE_SCORERS:
        return "differs", f"{contradicted} answers are the same text as claimed, and that text has another outcome"
    if not facts["changed"] and difference <= SCORE_TOLERANCE:
        return "identical", "Every item has the outcome that was claimed."
    if reproducible and facts["changed"]:
        return "differs", "the base model's answers are word for word as claimed, and this checkpoint's are not"
    moved = f"{facts['up']} items up and {facts['down']} down"
    if p_value < ALPHA:
        return "differs", f"{moved} are more than chance (p {p_value:.4f})"
    if difference > noise + SCORE_TOLERANCE:
        why = f"{moved} may be chance (p {p_value:.2f}), but the base model's repeats here differ by {noise:.2f} points only"
        return "differs", why
    return (
        "within noise",
        f"The base model's own repeats here differ by {noise:.2f}, {moved} may be chance (p {p_value:.2f}).",
    )
