"""Index held-out texts as hashed n-grams of words, search them in other text, and undo encodings (`readings`).

As in the field: n-grams of 13 words, and shorter texts whole if they have at least 8 words (Brown et al. 2020, appendix C).
Text is folded first, so that wrapping, case, quoting, JSON and other escapes make no difference. A chunk of text costs a
split into words, one dictionary look-up per word, and a few passes of numpy.
"""

from __future__ import annotations

import binascii
import html
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote_to_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Patterns = NDArray[np.int64]

WINDOW = 13
"""Words in a row that don't match by accident."""

LEAST_WORDS = 8
"""A match of a shorter text means nothing, for example `put a clean cup on shelf`."""

OTHER_LEAST_WORDS = 2 * WINDOW
OTHER_SHARE = 0.5
"""Answers and other texts of an item count if half of their n-grams are in one file. A single n-gram of an answer is often
common (the loop that tests for a prime), and a sum of few words comes up by chance."""

LEAST_TELLING = 3
"""Words of an n-gram that are more than a number or a letter: many programs contain `1 2 3 4 5 6 7 8 9 a b c d`."""

MAX_WINDOWS_PER_TEXT = 1000
"""Only the first this many n-grams of a longer text (a game's file) are used."""

MAX_WINDOWS = 5_000_000
"""Each takes 40 bytes while the index is built."""

CACHED_BYTES = 64
_SPACE = ord(" ")
_FOLD = bytes(c if c >= 128 or chr(c).isalnum() else _SPACE for c in range(256)).lower()
_CODED = re.compile(rb"\\\\*(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2}))")
_ESCAPE = re.compile(rb"\\\\*[nrtbfvNRTBFV]?")
_WIDE = re.compile(rb"[ -~]?[\x80-\xff]+")
"""Characters beyond ASCII, with the letter before them that an accent may belong to."""

_ENTITY = re.compile(rb"&(?:quot|apos|amp|lt|gt|nbsp|#[0-9]{2,5}|#[xX][0-9a-fA-F]{2,4});")
DENSE = 8
"""If more than one byte in this many is beyond ASCII (weights, other scripts), the whole text is folded at once, because
folding it piece by piece would take microseconds per byte. Both ways give the same words."""

_ASCII = bytes(range(128))
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufe00-\ufe0f\ufeff]+")
_NOT_A_WORD = re.compile(r"[^\x00-\x7f\w]+")
_SOLO = re.compile("([\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])")
"""Scripts without spaces: each character is a word."""

_FACTOR = 0x9E3779B97F4A7C15
_SEED = 13

How = Literal["ngram", "exact"]


def words(text: bytes) -> list[bytes]:
    r"""Return the words of a UTF-8 text: letters and digits, folded (NFKC, lower case); everything else separates words.
    Backslash escapes are undone the same way whether they belong to the text (LaTeX) or to a file format, however often it
    was quoted: `\n` and `\\n` separate two words, a backslash before anything else is dropped, `\uXXXX` becomes its
    character."""
    if b"\\" in text:
        if _CODED.search(text):
            text = _decode_surrogates(_CODED.sub(_sign, text))
        text = _ESCAPE.sub(b" ", text)
    if b"&" in text:
        text = _ENTITY.sub(_entity, text)
    if not text.isascii():
        dense = DENSE * len(text.translate(None, _ASCII)) > len(text)
        text = _fold(text) if dense else _WIDE.sub(_fold_wide, text)
    return text.translate(_FOLD).split()


def _fold_wide(match: re.Match[bytes]) -> bytes:
    return _fold_known(match[0]) if len(match[0]) <= CACHED_BYTES else _fold(match[0])


@lru_cache(maxsize=1 << 16)
def _fold_known(piece: bytes) -> bytes:
    return _fold(piece)


def _fold(piece: bytes) -> bytes:
    wide = unicodedata.normalize("NFKC", _INVISIBLE.sub("", piece.decode("utf-8", "replace"))).lower()
    wide = wide.replace("\u03c2", "\u03c3")  # final sigma: the only lower case that depends on where a text is cut
    return _SOLO.sub(r" \1 ", _NOT_A_WORD.sub(" ", wide)).encode("utf-8", "replace")


def _sign(match: re.Match[bytes]) -> bytes:
    return chr(int(match[1] or match[2], 16)).encode("utf-8", "surrogatepass")


def _decode_surrogates(text: bytes) -> bytes:
    """Join surrogate pairs: characters beyond U+FFFF are written as two escapes."""
    if b"\xed" not in text:
        return text
    wide = text.decode("utf-8", "surrogatepass") if _whole(text) else text.decode("utf-8", "replace")
    return wide.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _whole(text: bytes) -> bool:
    try:
        text.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


def _entity(match: re.Match[bytes]) -> bytes:
    return html.unescape(match[0].decode("ascii")).encode("utf-8", "replace")


@dataclass(frozen=True)
class Text:
    """One text of a held-out item; `item` is the item's index in the caller's list."""

    item: int
    text: str
    asked: bool  # True for the question, of which every n-gram counts


class NgramIndex:
    """Index of the n-grams of the held-out texts.

    Attributes:
        short: number of items none of whose texts is long enough.
    """

    def __init__(self, texts: Iterable[Text], items: int) -> None:
        import numpy as np

        self._vocabulary: dict[bytes, int] = {}
        kept: list[tuple[Text, list[int]]] = []
        for text in texts:
            found = words(text.text.encode("utf-8", "replace"))
            if len(found) >= (LEAST_WORDS if text.asked else OTHER_LEAST_WORDS):
                kept.append((text, [self._vocabulary.setdefault(w, len(self._vocabulary) + 1) for w in found]))
        values = np.random.default_rng(_SEED).integers(1, 2**64, len(self._vocabulary) + 1, dtype=np.uint64)
        values[0] = 0  # for every word that no held-out text has
        self._values = values
        self._text_item = np.array([text.item for text, _ in kept], dtype=np.int64)
        self._text_asked = np.array([text.asked for text, _ in kept], dtype=bool)
        self.items = items
        self.cut_off = 0
        hashes: list[Any] = []
        owners: list[Any] = []
        total = 0
        telling = np.array([False, *map(_telling, self._vocabulary)])
        for number, (_, found_ids) in enumerate(kept):
            ids = np.array(found_ids, dtype=np.int64)
            length = min(WINDOW, len(ids))
            counts = np.convolve(telling[ids], np.ones(length, dtype=np.int64), "valid")
            own = np.unique(_runs(values[ids], length)[counts >= LEAST_TELLING][:MAX_WINDOWS_PER_TEXT])
            total += len(own)
            if total > MAX_WINDOWS:
                self.cut_off += 1
                continue
            hashes.append(own)
            owners.append(np.full(len(own), number, dtype=np.int64))
        self._lengths = sorted({min(WINDOW, len(ids)) for _, ids in kept})
        every = np.concatenate(hashes) if hashes else np.zeros(0, dtype=np.uint64)
        self._owner = np.concatenate(owners) if owners else np.zeros(0, dtype=np.int64)
        self._hashes, self._pattern = np.unique(every, return_inverse=True)
        self._alive = np.ones(len(self._hashes), dtype=bool)
        self._arrange()
        self.short = items - len(self.looked_for())

    def _arrange(self) -> None:
        """Build the arrays for searching from the n-grams that were not removed."""
        import numpy as np

        bits = min(24, max(16, len(self._hashes).bit_length() + 4))
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << bits, dtype=bool)
        self._filter[self._hashes[self._alive] >> self._shift] = True
        living = self._alive[self._pattern]
        self._living_owner = self._owner[living]
        self._living_pattern = self._pattern[living]
        self._runs_of = np.bincount(self._living_owner, minlength=len(self._text_item))

    def search(self, text: bytes) -> Patterns:
        """Return the indexed n-grams in a chunk of text, as sorted numbers for `found` and `forget`."""
        import numpy as np

        tokens = words(text)
        ids = np.fromiter(map(self._vocabulary.get, tokens, repeat(0)), dtype=np.int64, count=len(tokens))
        values = self._values[ids]
        hits = []
        done, state = 0, np.zeros(len(values), dtype=np.uint64)
        for length in self._lengths:
            if length > len(values):
                break
            state, done = _extend(state, values, done, length), length
            salted = state ^ _salt(length)
            maybe = salted[self._filter[salted >> self._shift]]
            if len(maybe):
                at = np.minimum(np.searchsorted(self._hashes, maybe), len(self._hashes) - 1)
                at = at[self._hashes[at] == maybe]
                hits.append(at[self._alive[at]])
        return np.unique(np.concatenate(hits)) if hits else np.zeros(0, dtype=np.int64)

    def forget(self, runs: Patterns | Sequence[int]) -> None:
        """Remove n-grams that the suite gave to the agent."""
        self._alive[list(runs)] = False
        self._arrange()

    def looked_for(self) -> list[int]:
        """Return the items that have n-grams in the index, in order."""
        return sorted(set(self._text_item[self._runs_of > 0].tolist()))

    def found(self, patterns: Patterns) -> dict[int, How]:
        """Return the items that the n-grams of one file show; `exact` if all n-grams of one of the item's texts were found."""
        import numpy as np

        if not len(patterns):
            return {}
        present = np.zeros(len(self._hashes), dtype=bool)
        present[patterns] = True
        there = np.bincount(self._living_owner[present[self._living_pattern]], minlength=len(self._text_item))
        all_of_it = (there > 0) & (there == self._runs_of)
        enough = (there > 0) & (self._text_asked | (there >= OTHER_SHARE * self._runs_of))
        found: dict[int, How] = {int(self._text_item[n]): "ngram" for n in np.flatnonzero(enough)}
        found.update({int(self._text_item[n]): "exact" for n in np.flatnonzero(all_of_it)})
        return found


def _telling(word: bytes) -> bool:
    return not word.isascii() or (len(word) > 1 and not word.isdigit())


def _salt(length: int) -> Any:
    """Keep a text of 8 words from matching the hash of an n-gram of 13."""
    import numpy as np

    return np.uint64((length * _FACTOR) % 2**64)


def _extend(state: Any, values: Any, done: int, length: int) -> Any:
    """Extend polynomial hashes of `done` words to `length` words. Wraps around at 2**64."""
    import numpy as np

    factor = np.uint64(_FACTOR)
    for k in range(done, length):
        state = state[: len(values) - k] * factor + values[k:]
    return state


def _runs(values: Any, length: int) -> Any:
    import numpy as np

    return _extend(np.zeros(len(values), dtype=np.uint64), values, 0, length) ^ _salt(length)


# --- other readings of a chunk: wide characters, percent-encoding, quoted-printable, numbered lines.
# They are read in addition to the plain chunk, so nothing can be hidden by imitating one of them.

LEAST_NULS: Final = 13
"""Fewer NULs can't hold thirteen words in wide characters."""

WIDE_SHARE: Final = 0.5
"""Share of the positions where single-byte text would have a NUL that must hold one; other characters are rare in most texts."""

LEAST_SIGNS: Final = 3
LEAST_LINES: Final = 8

_PERCENT: Final = re.compile(rb"%[0-9A-Fa-f]{2}")
_SOFT_BREAK: Final = re.compile(rb"=[ \t]*\r?\n")
_QUOTED: Final = re.compile(rb"=(?:[013A-F][0-9A-F]|2[0-9A-F])")
_NUMBER: Final = re.compile(rb"^[ \t\[(\"'#]*[0-9]+[ \t:.,;)\]|>\"'-]+", re.MULTILINE)


def readings(chunk: bytes) -> Iterator[bytes]:
    """Yield the chunk and its other readings. Wide Latin characters are found at any position, by removing the NULs."""
    yield chunk
    if chunk.count(0) >= LEAST_NULS:
        code = wide_code(chunk)
        if code is not None:
            yield chunk.decode(code, "replace").encode("utf-8", "replace")
        chunk = chunk.replace(b"\0", b"")
        yield chunk
    if _many(_PERCENT, chunk, b"%", LEAST_SIGNS):
        yield unquote_to_bytes(chunk)
    if _SOFT_BREAK.search(chunk) or _many(_QUOTED, chunk, b"=", LEAST_SIGNS):
        yield binascii.a2b_qp(chunk)
    lines = chunk.count(b"\n") + 1
    if lines >= LEAST_LINES:
        without, numbers = _NUMBER.subn(b"", chunk)
        if numbers >= LEAST_LINES and 2 * numbers >= lines:
            yield without


def _many(signs: re.Pattern[bytes], chunk: bytes, mark: bytes, least: int) -> bool:
    return (
        chunk.count(mark) >= least and sum(1 for _ in zip(signs.finditer(chunk), range(least), strict=False)) == least
    )


def wide_code(chunk: bytes) -> str | None:
    """Return UTF-16 or UTF-32 without a byte order mark, by the positions of the NULs; None for neither."""
    places = max(1, len(chunk) // 4)
    first, second, third, fourth = (chunk[at::4].count(0) >= WIDE_SHARE * places for at in range(4))
    if third and fourth and not first:
        return "utf-32-le"
    if first and second and not fourth:
        return "utf-32-be"
    if second and fourth and not first and not third:
        return "utf-16-le"
    if first and third and not second and not fourth:
        return "utf-16-be"
    return None
