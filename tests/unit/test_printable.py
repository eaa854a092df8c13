"""What is escaped of an agent's texts: the whole of Unicode against the plain rule, one character at a time."""

from __future__ import annotations

import sys

import pytest

from autorl_hpc.recorder.traces.parse import MASKED_CHARS, MAX_TEXT_CHARS, beginning
from autorl_hpc.records.base import printable


def by_rule(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def test_every_character_is_kept_or_escaped() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert printable(every) == by_rule(every)
    assert printable("a\nb\x1b[0m \ud800é\u202e") == r"a\nb\x1b[0m \ud800é\u202e"
    assert printable("") == ""


@pytest.mark.parametrize("char", ["x", "\n", "\U000e0001"])
@pytest.mark.parametrize("length", [1, MAX_TEXT_CHARS - 1, MAX_TEXT_CHARS, MAX_TEXT_CHARS + 1, 3 * MASKED_CHARS])
def test_a_beginning_is_cut_as_if_all_of_it_had_been_escaped(char: str, length: int) -> None:
    text = f"a{char * length}b"
    whole = by_rule(text[:MASKED_CHARS])
    assert beginning(text) == (whole if len(whole) <= MAX_TEXT_CHARS else whole[: MAX_TEXT_CHARS - 1] + "…")
