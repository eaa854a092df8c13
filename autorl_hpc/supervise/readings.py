"""Other ways to read a chunk of what an agent wrote: as wide characters, percent-encoded, quoted-printable, with numbered lines.

Each is an addition: the chunk is always read as it stands too, so that nothing can be hidden by looking like one of them.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import unquote_to_bytes

LEAST_NULS: Final = 13
"""Fewer are no run of thirteen words in wide characters."""

WIDE_SHARE: Final = 0.5
"""Of the places where a script of one byte would leave a NUL, those that hold one: signs beyond it are rare in most texts."""

LEAST_SIGNS: Final = 3
LEAST_LINES: Final = 8

_PERCENT: Final = re.compile(rb"%[0-9A-Fa-f]{2}")
_SOFT_BREAK: Final = re.compile(rb"=[ \t]*\r?\n")
_QUOTED: Final = re.compile(rb"=(?:[013A-F][0-9A-F]|2[0-9A-F])")
_NUMBER: Final = re.compile(rb"^[ \t\[(\"'#]*[0-9]+[ \t:.,;)\]|>\"'-]+", re.MULTILINE)


def readings(chunk: bytes) -> Iterator[bytes]:
    """The chunk, and what else it may be read as.

    Wide characters are read wherever they stand in it if they are of Latin letters: those are what is left without the NULs.
    """
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
    """UTF-16 or UTF-32 without a mark, by where the NULs stand; None for neither."""
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
