"""Comparison of answers without a judge: sets of items, equal after removing case, punctuation and articles.

Not comparable with a judge model: it knows no synonyms and no rounding. Suited to answers that occur literally in the corpus.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass

from autorl_hpc.rollouts.characters import plain_characters

SINGLE, SET = "Single Answer", "Set Answer"  # The two answer types in DeepSearchQA's files
_ARTICLE = re.compile(r"^(?:the|a|an) ")
_THOUSANDS = re.compile(r"(?<=\d)[,'\xa0](?=\d{3}(?!\d))")
_WORD = re.compile(r"(?<!\w)[-+]?\d+(?:\.\d+)?(?!\w)|\w+|[%+#$\u00a2-\u00a5\u058f\u060b\u0e3f\u20a0-\u20cf]")
"""Numbers, words, and the signs that distinguish answers: C++ and C#, $5 and \u20ac5."""
_SEPARATOR = re.compile(r"[;\n]|,(?!\d)|(?<!\d),")
_OUTER_AND = re.compile(r"^\s*(?:and|&)\s+|\s+(?:and|&)\s*$", re.IGNORECASE)
_AND = re.compile(r"\s+(?:and|&)\s+", re.IGNORECASE)
_NUMBERED = re.compile(r"^\s*(?:\(?(?:\d{1,3}|[a-z])[.)]|[-*\u2022])(?:\s+|(?=[^\W\d_]{2}))", re.IGNORECASE)
_NUMBERED_IN_LINE = re.compile(r"[ \xa0]+(?=\(?\d{1,3}[.)](?:\s|[^\W\d_]{2}))")


@dataclass(frozen=True)
class Counts:
    """How many expected items an answer gives (`found`) and misses, and how many it gives in addition (`extra`)."""

    found: int
    missed: int
    extra: int

    @property
    def precision(self) -> float:
        """Share of the given items that were expected; 0 if none was given."""
        given = self.found + self.extra
        return self.found / given if given else 0.0

    @property
    def recall(self) -> float:
        """Share of the expected items that were given; 0 if none was expected."""
        expected = self.found + self.missed
        return self.found / expected if expected else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0

    @property
    def fully_correct(self) -> bool:
        """Everything expected and nothing else. False if nothing was expected."""
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
    """Compare an answer with the expected one, whose items are separated by commas if the type is a set."""
    whole = _compared(answer)
    wanted = {_compared(expected)} if answer_type == SINGLE else {_compared(part) for part in _parts(expected)}
    wanted.discard("")
    parts = [whole] if whole in wanted else [item for part in _parts(answer) for item in _items(part, wanted)]
    given = {part for part in parts if part in wanted or normalised(part)}  # stray punctuation is not an item
    return Counts(len(wanted & given), len(wanted - given), len(given - wanted))


def _parts(text: str) -> list[str]:
    """Split a list at semicolons, line ends, and commas outside numbers; a numbered one in a line at its numbers too."""
    text = _THOUSANDS.sub("", plain_characters(text))
    if _NUMBERED.match(text):
        text = _NUMBERED_IN_LINE.sub("\n", text)
    return [_OUTER_AND.sub("", part) for part in _SEPARATOR.split(text)]


def _items(part: str, wanted: Collection[str]) -> list[str]:
    """Return the items that `and` joins in a part of a list. Between two readings the one with an expected item counts: `Trinidad
    and Tobago` may be one, `1. FC Union` may be a name or the first of a list."""
    if (found := _compared(part)) in wanted:
        return [found]
    words = [_NUMBERED.sub("", word) for word in _AND.split(part)]
    items = []
    while words:
        length = next((n for n in range(len(words), 1, -1) if _compared(" and ".join(words[:n])) in wanted), 1)
        items.append(_compared(" and ".join(words[:length])))
        words = words[length:]
    return items


def normalised(text: str) -> str:
    """Return lower-case words with single spaces, without punctuation, leading article and commas in numbers. Signs that
    distinguish answers stay: currencies, %, + and #."""
    folded = unicodedata.normalize("NFKC", _THOUSANDS.sub("", plain_characters(text))).casefold()
    return _ARTICLE.sub("", " ".join(_WORD.findall(folded)))


def _compared(text: str) -> str:
    """Return the normalised text, or the text itself if nothing is left."""
    return normalised(text) or " ".join(text.split())
