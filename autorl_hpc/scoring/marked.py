"""The strict reading of a GSM8K answer: the number behind the first `#### `, and nothing else (scorer `gsm8k-marked`).

Source: openai/grade-school-math, grade_school_math/dataset.py, `ANS_RE = #### (\\-?[0-9\\.\\,]+)` and `extract_answer`, which
searches the first match, drops commas and compares strings. Here values are compared, so that `16.0` is 16.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from autorl_hpc.scoring.gsm8k import read_gold

VERSION: Final = "1"
MAX_NUMBER_CHARS: Final = 64
"""A longer number is no answer, and int() of long strings is quadratic."""

_MARKED = re.compile(r"####[ \t]*(-?[0-9.,]+)")


def read_marked(text: str) -> Fraction | None:
    """The number behind the first mark that has one; None if there is none or it can't be read."""
    found = _MARKED.search(text)
    if found is None or len(found[1]) > MAX_NUMBER_CHARS:
        return None
    try:
        return Fraction(found[1].replace(",", "").rstrip("."))
    except (ValueError, ZeroDivisionError):
        return None


def score_marked(text: str, gold: str) -> bool:
    """Whether the marked number equals the gold one."""
    return read_marked(text) == read_gold(gold)
