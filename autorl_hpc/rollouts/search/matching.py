"""Answers compared without a judge: sets of items, each equal after case, punctuation and articles are taken off.

Another yardstick than a judge model: it knows no synonyms and no rounding. Good for answers that a task's own corpus spells out.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

SINGLE, SET = "Single Answer", "Set Answer"
"""The two answer types of DeepSearchQA's files."""
_ARTICLE = re.compile(r"^(?:the|a|an) ")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_WORD = re.compile(r"(?<!\w)[-+]?\d+(?:\.\d+)?(?!\w)|\w+|%")
_SEPARATOR = re.compile(r"[;\n]|,(?!\d)|(?<!\d),")
_AND = re.compile(r"^\s*(?:and|&)\s+", re.IGNORECASE)


@dataclass(frozen=True)
class Counts:
    """How an answer compares with the expected items.

    Attributes:
        found: expected items that it gives.
        missed: expected items that it doesn't.
        extra: what it gives beside them.
    """

    found: int
    missed: int
    extra: int

    @property
    def precision(self) -> float:
        """Share of what was given that was expected; 0 where nothing was given."""
        given = self.found + self.extra
        return self.found / given if given else 0.0

    @property
    def recall(self) -> float:
        """Share of what was expected that was given."""
        expected = self.found + self.missed
        return self.found / expected if expected else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of the two."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0

    @property
    def fully_correct(self) -> bool:
        """Everything expected and nothing else."""
        return not self.missed and not self.extra

    @property
    def correct_with_excessive(self) -> bool:
        """Everything expected and something else."""
        return not self.missed and self.extra > 0

    @property
    def fully_incorrect(self) -> bool:
        """Nothing of what was expected."""
        return not self.found and self.missed > 0


def compare(answer: str, expected: str, answer_type: str) -> Counts:
    """Compares an answer with the expected one, whose items stand with commas between them where the type is a set's."""
    wanted = {normalised(expected)} if answer_type == SINGLE else _items(expected)
    whole = normalised(answer)
    given = {whole} if whole in wanted else _items(answer)
    return Counts(len(wanted & given), len(wanted - given), len(given - wanted))


def _items(text: str) -> set[str]:
    """The items of a list: at semicolons, ends of lines, and commas that are no part of a number; `and` may lead the last."""
    parts = (normalised(_AND.sub("", part)) for part in _SEPARATOR.split(_THOUSANDS.sub("", text)))
    return {part for part in parts if part}


def normalised(text: str) -> str:
    """Words in lower case with single spaces; no punctuation, no leading article, no commas in numbers."""
    folded = _THOUSANDS.sub("", unicodedata.normalize("NFKC", text).casefold())
    return _ARTICLE.sub("", " ".join(_WORD.findall(folded)))
