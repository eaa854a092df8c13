"""Index held-out texts as hashed n-grams of words, search them in other text, and remove the NULs of wide characters (`readings`).

As in the field: n-grams of 13 words, and shorter texts whole if they have at least 8 words (Brown et al. 2020, appendix C).
Text is folded first, so that wrapping, case, quoting, JSON and other escapes make no difference.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Patterns = NDArray[np.int64]

WINDOW = 13  # words in a row that don't match by accident
LEAST_WORDS = 8  # a match of a shorter text means nothing, for example `put a clean cup on shelf`
OTHER_LEAST_WORDS = 2 * WINDOW
OTHER_SHARE = 0.5
"""Answers and other texts of an item count if half of their n-grams are in one file. A single n-gram of an answer is often
common (the loop that tests for a prime), and a sum of few words comes up by chance."""

LEAST_TELLING = 3
"""Words of an n-gram that are more than a number or a letter: many programs contain `1 2 3 4 5 6 7 8 9 a b c d`."""

MAX_WINDOWS_PER_TEXT = 1000  # only the first this many n-grams of a longer text (a game's file) are used
_SOLO = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Scripts without spaces: each character is a word."""

_WORD = re.compile(rf"[{_SOLO}]|[^\W_{_SOLO}]+")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufe00-\ufe0f\ufeff]+")
_ESCAPE = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|[nrtbfvNRTBFV]?)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FACTOR = 0x9E3779B97F4A7C15
_SEED = 13

How = Literal["ngram", "exact"]


def words(text: bytes) -> list[str]:
    r"""Return the words of a UTF-8 text: letters and digits, folded (NFKC, lower case); everything else separates words.
    Backslash escapes are undone the same way whether they belong to the text (LaTeX) or to a file format, however often it
    was quoted: `\n` and `\\n` separate two words, a backslash before anything else is dropped, `\uXXXX` becomes its
    character. So are HTML entities."""
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
        import numpy as np

        self._vocabulary: dict[str, int] = {}
        kept: list[tuple[Text, Any]] = []
        for text in texts:
            found = words(text.text.encode("utf-8", "replace"))
            if len(found) >= (LEAST_WORDS if text.asked else OTHER_LEAST_WORDS):
                numbers = [self._vocabulary.setdefault(word, len(self._vocabulary) + 1) for word in found]
                kept.append((text, np.array(numbers, dtype=np.int64)))
        # By number of a word; 0 for every word that no held-out text has.
        self._values = np.random.default_rng(_SEED).integers(1, 2**64, len(self._vocabulary) + 1, dtype=np.uint64)
        self._item = np.array([text.item for text, _ in kept], dtype=np.int64)
        self._asked = np.array([text.asked for text, _ in kept], dtype=bool)
        telling = np.array([False, *map(_telling, self._vocabulary)])
        hashes = [np.zeros(0, dtype=np.uint64)]
        for _, ids in kept:
            length = min(WINDOW, len(ids))
            counts = np.convolve(telling[ids], np.ones(length, dtype=np.int64), "valid")
            runs = _runs(self._values[ids], length)
            hashes.append(np.unique(runs[counts >= LEAST_TELLING][:MAX_WINDOWS_PER_TEXT]))
        self._lengths = sorted({min(WINDOW, len(ids)) for _, ids in kept})
        self._owner = np.repeat(np.arange(len(kept)), [len(own) for own in hashes[1:]])
        self._hashes, self._pattern = np.unique(np.concatenate(hashes), return_inverse=True)
        self._runs_of = np.bincount(self._owner, minlength=len(self._item))
        self.short = items - len(self.looked_for())

    def search(self, text: bytes) -> Patterns:
        """Return the indexed n-grams in a chunk of text, as sorted numbers for `found` and `forget`."""
        import numpy as np

        found = words(text)
        ids = np.fromiter((self._vocabulary.get(word, 0) for word in found), dtype=np.int64, count=len(found))
        hits = [np.zeros(0, dtype=np.int64)]
        for length in self._lengths:
            if length > len(ids) or not len(self._hashes):
                break
            known = np.flatnonzero(np.convolve(ids > 0, np.ones(length, dtype=np.int64), "valid") == length)
            if len(known):
                runs = _runs(self._values[ids], length)[known]
                at = np.minimum(np.searchsorted(self._hashes, runs), len(self._hashes) - 1)
                hits.append(at[self._hashes[at] == runs])
        return np.unique(np.concatenate(hits))

    def forget(self, runs: Patterns | Sequence[int]) -> None:
        """Remove n-grams that the suite gave to the agent. The others get new numbers."""
        import numpy as np

        alive = np.ones(len(self._hashes), dtype=bool)
        alive[list(runs)] = False
        living = alive[self._pattern]
        self._pattern, self._owner = (np.cumsum(alive) - 1)[self._pattern[living]], self._owner[living]
        self._hashes = self._hashes[alive]
        self._runs_of = np.bincount(self._owner, minlength=len(self._item))

    def looked_for(self) -> list[int]:
        """Return the items that have n-grams in the index, in order."""
        return sorted(set(self._item[self._runs_of > 0].tolist()))

    def found(self, patterns: Patterns) -> dict[int, How]:
        """Return the items that the n-grams of one file show; `exact` if all n-grams of one of the item's texts were found."""
        import numpy as np

        present = np.zeros(len(self._hashes), dtype=bool)
        present[patterns] = True
        there = np.bincount(self._owner[present[self._pattern]], minlength=len(self._item))
        enough = (there > 0) & (self._asked | (there >= OTHER_SHARE * self._runs_of))
        found: dict[int, How] = {int(self._item[n]): "ngram" for n in np.flatnonzero(enough)}
        found.update({int(self._item[n]): "exact" for n in np.flatnonzero((there > 0) & (there == self._runs_of))})
        return found


def _telling(word: str) -> bool:
    return not word.isascii() or (len(word) > 1 and not word.isdigit())


def _runs(values: Any, length: int) -> Any:
    """Return polynomial hashes of all runs of `length` words, modulo 2**64. The length is part of them, so that a text of 8
    words never matches a run of 13."""
    import numpy as np

    count, factor = len(values) - length + 1, np.uint64(_FACTOR)
    state = np.full(count, length, dtype=np.uint64)
    for k in range(length):
        state = state * factor + values[k : k + count]
    return state


LEAST_NULS = 13  # fewer NULs can't hold thirteen words in wide characters


def readings(chunk: bytes) -> Iterator[bytes]:
    """Yield the chunk, and without its NULs if there are many: so wide Latin characters are found at any position. The plain chunk
    comes too, so that nothing can be hidden by imitating wide ones."""
    yield chunk
    if chunk.count(0) >= LEAST_NULS:
        yield chunk.replace(b"\0", b"")
