"""Index held-out texts as n-grams of words, search them in other text. As in the field: 13 words, shorter texts whole from 8 words on
(Brown et al. 2020, appendix C). Folded, so wrapping, case and escapes make no difference."""

from __future__ import annotations

import html
import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Literal

WINDOW = 13  # words in a row that don't match by accident
LEAST_WORDS = 8  # a match of a shorter text means nothing, for example `put a clean cup on shelf`
# Answers and other texts of an item count if half of their n-grams are in one file: a single one is often common.
OTHER_LEAST_WORDS, OTHER_SHARE = 2 * WINDOW, 0.5
LEAST_TELLING = 3  # words of an n-gram that are more than a number or a letter: many programs have `1 2 3 a b c d`
START = 3  # words that must be those of an n-gram before the rest is compared
WORD = array("I").itemsize
MAX_WINDOWS_PER_TEXT = 1000  # of a longer text (a game's file) the first ones are used
_SOLO = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # scripts without spaces: a character is a word
_WORD = re.compile(rf"[{_SOLO}]|[^\W_{_SOLO}]+")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufe00-\ufe0f\ufeff]+")
_ESCAPE = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|[nrtbfvNRTBFV]?)")
_SURROGATE = re.compile("[\ud800-\udfff]")

How = Literal["ngram", "exact"]


def words(text: bytes) -> list[str]:
    r"""Return the words of a UTF-8 text: letters and digits, folded (NFKC, lower case). Backslash escapes and HTML entities are undone,
    however often the text was quoted: `\n` and `\\n` separate words, `\uXXXX` becomes its character, other backslashes go."""
    wide = text.decode("utf-8", "replace")
    if "\\" in wide:
        wide = _ESCAPE.sub(lambda found: chr(int(found[1] or found[2] or "20", 16)), wide)
        if _SURROGATE.search(wide):  # characters beyond U+FFFF are written as two escapes
            wide = wide.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if "&" in wide:
        wide = html.unescape(wide)
    if not wide.isascii():
        wide = unicodedata.normalize("NFKC", _INVISIBLE.sub("", wide))
    # Final sigma is the only lower case that depends on where a text is cut.
    return _WORD.findall(wide.lower().replace("\u03c2", "\u03c3"))


@dataclass(frozen=True)
class Text:
    """One text of a held-out item; `item` is the item's index in the caller's list."""

    item: int
    text: str
    asked: bool  # True for the question, of which every n-gram counts


class NgramIndex:
    """Index of the n-grams of the held-out texts. `short`: number of items none of whose texts is long enough."""

    def __init__(self, texts: Iterable[Text], items: int) -> None:
        self._vocabulary: dict[str, int] = {}  # a number for each word of the texts; 0 is every other word
        self._numbers: dict[bytes, int] = {}  # by n-gram, as the numbers of its words
        self._texts: list[tuple[Text, set[int]]] = []  # with the numbers of the n-grams of each text
        for text in texts:
            found = words(text.text.encode("utf-8", "replace"))
            if len(found) >= (LEAST_WORDS if text.asked else OTHER_LEAST_WORDS):
                own: set[int] = set()
                numbers = [self._vocabulary.setdefault(word, len(self._vocabulary) + 1) for word in found]
                data, length = array("I", numbers).tobytes(), min(WINDOW, len(found))
                telling, starts = list(map(_is_telling, found)), range(len(found) - length + 1)
                places = (at for at in starts if sum(telling[at : at + length]) >= LEAST_TELLING)
                for at in islice(places, MAX_WINDOWS_PER_TEXT):
                    own.add(self._numbers.setdefault(data[WORD * at : WORD * (at + length)], len(self._numbers)))
                self._texts.append((text, own))
        self._sizes = sorted({len(run) for run in self._numbers})
        self._starts = {run[: WORD * START] for run in self._numbers}
        self.short = items - len(self.looked_for())

    def search(self, text: bytes) -> set[int]:
        """Return the numbers of the n-grams in a chunk of text, for `found` and `forget`."""
        data = array("I", map(self._vocabulary.get, words(text), repeat(0))).tobytes()
        starts, number_of = self._starts, self._numbers.get
        hits: set[int | None] = set()
        for at in range(0, len(data), WORD):
            if data[at : at + WORD * START] in starts:
                hits.update(number_of(data[at : at + size]) for size in self._sizes)
        return {hit for hit in hits if hit is not None}

    def forget(self, runs: Iterable[int]) -> None:
        """Remove n-grams that the suite gave to the agent."""
        for _, own in self._texts:
            own.difference_update(runs)

    def looked_for(self) -> list[int]:
        """Return the items that have n-grams in the index, in order."""
        return sorted({text.item for text, own in self._texts if own})

    def found(self, runs: set[int]) -> dict[int, How]:
        """Return the items that the n-grams of one file show; `exact` if all n-grams of one of the item's texts were found."""
        found: dict[int, How] = {}
        for text, own in self._texts:
            there = len(own & runs)
            if there and there == len(own):
                found[text.item] = "exact"
            elif there and (text.asked or there >= OTHER_SHARE * len(own)):
                found.setdefault(text.item, "ngram")
        return found


# --- other readings of a chunk: wide characters, numbered lines. They are read in addition to the plain chunk, so nothing can be hidden by
# imitating one of them.

LEAST_NULS = 13  # fewer can't hold thirteen words in wide characters
LEAST_LINES = 8
_NUMBER = re.compile(rb"^[ \t\[(\"'#]*[0-9]+[ \t:.,;)\]|>\"'-]+", re.MULTILINE)


def readings(chunk: bytes) -> Iterator[bytes]:
    """Yield the chunk and its other readings. Wide Latin characters are found at any position, by removing the NULs."""
    yield chunk
    if chunk.count(0) >= LEAST_NULS:
        chunk = chunk.replace(b"\0", b"")
        yield chunk
    lines = chunk.count(b"\n") + 1
    if lines >= LEAST_LINES:
        without, numbers = _NUMBER.subn(b"", chunk)
        if numbers >= LEAST_LINES and 2 * numbers >= lines:
            yield without


def _is_telling(word: str) -> bool:
    return not word.isascii() or (len(word) > 1 and not word.isdigit())
