"""One normaliser of characters for all scorers that read numbers and names: digits, signs, spaces and separators of every script."""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import Final

CURRENCIES: Final = r"$\u00a2-\u00a5\u058f\u060b\u0e3f\u20a0-\u20cf"  # Of a regular expression's class
_MINUS: Final = "\u2212"
_CHARS: Final[dict[str, str]] = {
    **dict.fromkeys("\u2796\u207b\u208b\ufe63\uff0d", _MINUS),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\ufe58", "-"),
    **dict.fromkeys("\u2015\u2e3a", "\u2014"),
    **dict.fromkeys("\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f", "\xa0"),  # thousands separators
    **dict.fromkeys("\u1680\u2000\u2001\u2002\u2003\u3000\t", " "),
    **dict.fromkeys("\u2028\u2029\x85", "\n"),
    **dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u202a\u202c\u2060\u2066\u2069\ufe0e\ufe0f\ufeff\xad", ""),
    **dict.fromkeys("\u2018\u2019\u02bc\u2032", "'"),
    **dict.fromkeys("\u2044\u2215", "/"),
    **dict.fromkeys("\u3002\u066b", "."),
    **dict.fromkeys("\u066c\u060c", ","),
    **{"\u2248": "=", "\u2795": "+", "\u061b": ";", "\u3001": ", "},
}
_BEFORE_VALUE = r"(?:####|[=:(\[{]|\b(?:is|are|was|were|be|equals)\b)[ \xa0$*]*"
_WORD_BEFORE = (
    r"\b(?:at|by|to|of|about|only|exactly|gives?|makes?|gets?|got|becomes|reaches|so|thus|therefore)[ \xa0$*]+"
)
_UNIT_BEFORE = rf"(?:[^\W\d_]{{1,3}}\.?[ \xa0]?)?[{CURRENCIES}]?[ \xa0]?"  # `$`, `US$`, `Rs. `
_NUMBER = r"\.?[\d\xbc-\xbe\u2150-\u215e]"
_NUMBER_NEXT = rf"(?={_UNIT_BEFORE}{_NUMBER})"
_SIGN = re.compile(
    rf"({_BEFORE_VALUE})(?:[-{_MINUS}][ \xa0]*|\u2014|(?:minus|negative)[ \xa0]+){_NUMBER_NEXT}"
    rf"|({_WORD_BEFORE})minus[ \xa0]+{_NUMBER_NEXT}|\bnegative[ \xa0]+{_NUMBER_NEXT}",
    re.IGNORECASE,
)
_FIRST_SIGN = re.compile(
    rf"^([ \xa0$*]*)(?:{_MINUS}[ \xa0]*|\u2014|(?:minus|negative)[ \xa0]+){_NUMBER_NEXT}", re.IGNORECASE | re.MULTILINE
)
"""At the beginning of a line a hyphen with a space behind it is a list's bullet."""
_SIGN_OF_UNIT = re.compile(rf"(?<![\w)\]}}%.-])-(?![\d \xa0])({_UNIT_BEFORE})(?={_NUMBER})")
_AMOUNT_BEFORE = (
    r"\b(?:costs?|pays?|paid|earn(?:s|ed)?|has|had|have|sold|spends?|spent|saves?|saved|total of|sum of)[ \xa0$*]+"
)
_GROUPED_BY_SPACES = re.compile(
    rf"(?P<before>(?:{_BEFORE_VALUE}|{_AMOUNT_BEFORE})-?|^[ \xa0*]*-?|[$\u20ac\xa3] ?|\b)(?<!\d )(?<![\d.,'\xa0/])"
    r"(?P<number>\d{1,3}(?: \d{3})+)(?![\d/])(?! \d)",
    re.IGNORECASE | re.MULTILINE,
)


@cache
def _table() -> dict[int, str]:
    wide = (*range(0xFE50, 0xFE6C), *range(0xFF01, 0xFF5F), *range(0xFFE0, 0xFFE7))  # full-width and small forms
    table = {code: unicodedata.normalize("NFKC", chr(code)) for code in wide}
    for char in filter(str.isdecimal, map(chr, range(0x80, 0x20000))):  # no script has digits beyond this range
        table[ord(char)] = str(unicodedata.decimal(char))
    return table | {ord(char): plain for char, plain in _CHARS.items()}


def plain_characters(text: str) -> str:
    """Return the text with ASCII digits, signs and punctuation, for comparing what it says. A minus is a `-` at its number,
    also before a unit (`-$5` is `$-5`), `minus 5`, and `- 5` where a value begins. Separators of thousands become U+00A0. Takes
    linear time."""
    text = _SIGN.sub(lambda sign: f"{sign[1] or sign[2] or ''}-", text.translate(_table()))
    text = _FIRST_SIGN.sub(r"\1-", text).replace(_MINUS, "-")
    return _GROUPED_BY_SPACES.sub(_grouped, _SIGN_OF_UNIT.sub(r"\1-", text))


def _grouped(found: re.Match[str]) -> str:
    number = found["number"]
    sure = found["before"] or not found.start() or number.endswith(" 000")
    return found["before"] + (number.replace(" ", "\xa0") if sure else number)
