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
_WORD = re.compile(r"(?<!\w)[-+]?\d+(?:\.\d+)?(?!\w)|\w+|[%+#$\u00a2-\u00a5\u058f\u060b\u0e3f\u20a0-\u20cf]")
"""Numbers, words, and the signs that tell answers apart: C++ from C#, $5 from \u20ac5."""
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
        """Everything expected and nothing else. Where nothing was expected nothing can be right."""
        return self.found > 0 and not self.missed and not self.extra

    @property
    def correct_with_excessive(self) -> bool:
        """Everything expected and something else."""
        return self.found > 0 and not self.missed and self.extra > 0

    @property
    def fully_incorrect(self) -> bool:
        """Nothing of what was expected."""
        return not self.found


def compare(answer: str, expected: str, answer_type: str) -> Counts:
    """Compares an answer with the expected one, whose items stand with commas between them where the type is a set's."""
    wanted = {_compared(expected)} if answer_type == SINGLE else set(_items(expected))
    wanted.discard("")
    whole = _compared(answer)
    parts = [whole] if whole in wanted else _items(answer)
    given = {part for part in parts if part in wanted or normalised(part)}  # stray marks are no items of an answer
    return Counts(len(wanted & given), len(wanted - given), len(given - wanted))


def _items(text: str) -> list[str]:
    """The items of a list: at semicolons, ends of lines, and commas that are no part of a number; `and` may lead the last."""
    return [_compared(_AND.sub("", part)) for part in _SEPARATOR.split(_THOUSANDS.sub("", text))]


def normalised(text: str) -> str:
    """Words in lower case with single spaces; no punctuation, no leading article, no commas in numbers. Signs that tell answers
    apart stay: currencies', %, + and #."""
    folded = _THOUSANDS.sub("", unicodedata.normalize("NFKC", text).casefold())
    return _ARTICLE.sub("", " ".join(_WORD.findall(folded)))


def _compared(text: str) -> str:
    """What is compared: the normalised text, and where nothing is left of it, the text itself."""
    return normalised(text) or " ".join(text.split())
