"""Comparison of answers without a judge: sets of items, equal after removing case, punctuation and articles. Not comparable
with a judge model: it knows no synonyms and no rounding. Suited to answers that occur literally in the corpus."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass

from autorl_hpc.rollouts.characters import CURRENCIES, plain_characters

SINGLE, SET = "Single Answer", "Set Answer"  # The two answer types in DeepSearchQA's files
_ARTICLE = re.compile(r"^(?:the|a|an) ")
_THOUSANDS = re.compile(r"(?<=\d)[,'\xa0](?=\d{3}(?!\d))")
_THOUSANDS_SPACED = re.compile(r"(?<=\d)['\xa0](?=\d{3}(?!\d))")
_WORD = re.compile(
    rf"(?<![\w)\]%+.])[-+]?(?P<number>\d+(?:\.\d+)*|\.\d+)|(?P<plain>\d+(?:\.\d+)*)|[^\W\d]\w*|[%+#<>\xb1\u2030\u2264\u2265{CURRENCIES}]"
)
"""Numbers with their sign, words, and the signs that distinguish answers: C++ and C#, $5 and \u20ac5, 5 and <5."""
_DECIMAL = re.compile(r"\d*\.\d+")
_RAISED = re.compile("(?<=[0-9])(?=-?[\xb2\xb3\xb9\xbc-\xbe\u2070-\u2089\u2150-\u215e])")  # 10\xb2 is not 102
_POWER = re.compile(r"(?<=[^\W\d_])\^\{?(?=-?\d)")  # km^2 is km\xb2 is km2
_BULLETS = "\u2022\u2023\u2043\u2219\u25a0\u25a1\u25aa\u25ab\u25b6\u25b8\u25ba\u25c6\u25c7\u25cb\u25cf\u25e6\u2605\u2606\u2192\u2713\u2714\u2794\u27a4"
_SEPARATOR = re.compile(rf"[;\n{_BULLETS}]|\s[\xb7\u30fb|]\s|,(?!\d)|(?<!\d),")
_OUTER_AND = re.compile(r"^(?:and(?: |$)|& ?)|(?: and| ?&)$", re.IGNORECASE)
_AND = re.compile(r" and | ?& ?", re.IGNORECASE)
_MARK = r"[(\[]?(?:\d{1,3}|[a-zA-Z]|[ivxIVX]{2,5})[)\]]|(?:\d{1,3}|[a-z]|[ivx]{2,5})\."
_MARKED = re.compile(
    rf"^\s*(?:(?:{_MARK})(?:\s+|(?=-?\d|[^\W\d_]{{2}}))|\d{{1,3}}(?::| ?[-\u2014])\s+|[-*+#>\u2014\xb7\u30fb]+\s+)"
)
_MARKED_IN_LINE = re.compile(rf"[ \xa0](?=(?:{_MARK})(?:\s|[^\W\d_]{{2}}))")
_LABEL = re.compile(r"(?:^|(?<=[\s;,]))(?:#(\d{1,2})[.:)]?|([A-Z]|[IVX]{1,4})[.:])(?=\s|[^\W\d_]{2})")
_ORDERS = (
    tuple(map(str, range(1, 100))),
    tuple(string.ascii_uppercase),
    ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII"),
)
_IDEOGRAPHIC = re.compile(r"(?<!\S)(\d{1,3})\u3001(?=\D)")
_ENCLOSED = {
    code: f" ({int(unicodedata.numeric(chr(code)))}) "
    for code in (*range(0x2460, 0x249C), *range(0x24EA, 0x2500), *range(0x2776, 0x2794))
    if unicodedata.numeric(chr(code), None) is not None
}
_LIST_SIGNS = str.maketrans({**_ENCLOSED, **{chr(0x249C + n): f" ({chr(97 + n)}) " for n in range(26)}, "\u20e3": ")"})


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
    lists = [[answer]] if whole in wanted else [_parts(answer), _parts(answer, labelled=True)]
    readings = [{item for part in parts for item in _items(part, wanted)} for parts in lists]
    given = max(readings, key=lambda items: len(wanted & items))  # `A. Smith` may be a name or the first of a list
    extra = {item for item in given - wanted if normalised(item)}  # stray punctuation is not an item
    return Counts(len(wanted & given), len(wanted - given), len(extra))


def _parts(text: str, labelled: bool = False) -> list[str]:
    """Split a list at semicolons, line ends, bullets, and commas outside numbers; one that begins with a mark at its marks too, and
    with `labelled` at `A.`, `I.` or `#1` if they count up from the beginning."""
    text = plain_characters(_IDEOGRAPHIC.sub(r"\1. ", text)).translate(_LIST_SIGNS).replace("**", "")
    text = _THOUSANDS_SPACED.sub("", text)
    labels = tuple(found[1] or found[2] for found in _LABEL.finditer(text)) if labelled else ()
    if len(labels) > 1 and _LABEL.match(text) and any(labels == order[: len(labels)] for order in _ORDERS):
        text = _LABEL.sub("\n", text)
    if mark := _MARKED.match(text):
        text = _MARKED_IN_LINE.sub("\n", text)
        text = text.replace(f" {mark[0].strip()} ", "\n")  # "- Austria - Italy"
    return [_OUTER_AND.sub("", " ".join(part.split())) for part in _SEPARATOR.split(text)]


def _items(part: str, wanted: Collection[str]) -> list[str]:
    """Return the items that `and` joins in a part of a list. Between two readings the one with an expected item counts: `Trinidad
    and Tobago` may be one, `1. FC Union` may be a name or the first of a list."""
    if (found := _compared(part)) in wanted:
        return [found]
    words = [_MARKED.sub("", word) for word in _AND.split(_MARKED.sub("", part))]
    longest = 1 + max((item.count(" and ") for item in wanted), default=0)
    items = []
    while words:
        length = next(
            (n for n in range(min(len(words), longest), 1, -1) if _compared(" and ".join(words[:n])) in wanted), 1
        )
        item = _compared(joined := " and ".join(words[:length]))
        pieces = [_compared(piece) for piece in joined.split(",")]  # `12,15` may be two
        items += pieces if item not in wanted and not set(pieces).isdisjoint(wanted) else [item]
        words = words[length:]
    return items


def normalised(text: str) -> str:
    """Return lower-case words and numbers with single spaces, without punctuation, leading article and commas in numbers. Signs
    that distinguish answers stay: a number's minus, currencies, %, + and #. `.5` and `0.50` are `0.5`, `&` is `and`."""
    plain = _RAISED.sub(" ", _POWER.sub("", _THOUSANDS.sub("", plain_characters(text))))
    plain = plain.replace("&", " and ").replace("\xd7", " x ")
    words: list[str] = []
    for found in _WORD.finditer(unicodedata.normalize("NFKC", plain).casefold()):
        number = found["number"] or found["plain"]
        if number and _DECIMAL.fullmatch(number):
            after_name = bool(words) and words[-1][-1].isalpha()  # Python 3.10 is not 3.1
            whole, _, rest = number.partition(".")
            rest = rest.rstrip("0") if not after_name or not rest.strip("0") else rest
            number = f"{whole or '0'}.{rest}".removesuffix(".")
        words.append(("-" if found[0].startswith("-") else "") + number if number else found[0])
    return _ARTICLE.sub("", " ".join(words))


def _compared(text: str) -> str:
    """Return the normalised text, or the text itself if nothing is left."""
    return normalised(text) or " ".join(text.split())
