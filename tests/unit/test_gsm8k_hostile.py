"""Random and hostile text never raises, and takes linear time."""

from __future__ import annotations

import random
import re
import time
from fractions import Fraction

import pytest

from autorl_hpc.scoring.gsm8k import opencompass_correct, opencompass_extract, read_answer, read_marked

MAX_HOSTILE_S = 2.0


def _reference_extract(text: str) -> str:
    """The reference's two steps with its own (partly quadratic) expressions."""
    if "<think>" not in text and "</think>" in text:
        text = text.rsplit("</think>", maxsplit=1)[-1].strip()
    else:
        text = re.sub(r"<think>(.*?)</think>", "", text, flags=re.DOTALL).strip()
    numbers: list[str] = re.findall(r"\-?\d+\.\d+|\-?\d+", text.split("Question:")[0])
    return numbers[-1] if numbers else "NULL"


CHARS = "0123456789,.-/$%#()[]{}=*+^_\\ \n\t\x00'\"e½⅓\xa0\u2009\u2212\u2013\uff15\u0665\ud800\U0001f600"
WORDS = "####|#### |<think>|</think>|Question:|answer|answer is |Answer: |18|1,234|7.5|</think"
LATEX = r"\boxed{|\frac{1}{2}|\text{| or | and |<<|>>|USD |Rs. |wörd"
PIECES = (*CHARS, *WORDS.split("|"), *LATEX.split("|"))


def _random_text(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(60)))
    return "".join(rng.choices(PIECES, k=rng.randrange(40)))


@pytest.mark.parametrize("seed", range(3))
def test_random_text_never_raises(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2500):
        text = _random_text(rng)
        answer = read_answer(text)
        assert answer is None or type(answer) is Fraction, ascii(text)
        assert opencompass_extract(text) == _reference_extract(text), ascii(text)
        assert opencompass_correct(opencompass_extract(text), "#### 18") in (True, False)


HOSTILE_WORDS = (
    r"#### { } 9 9. 9, , . - ( ) () (9) 1( )9 <think> </think> <think></think> Question: \boxed{ "
    r"\boxed{9} \frac{ \frac{1}{2} \ $ answer << <<1 ½ 9½ 1/2 1/ /2 1e3 1' 😀 = 9= * _ a US"
)
HOSTILE = [
    *HOSTILE_WORDS.split(),
    *("Rs.", "!", "((9))"),
    *("#### ", "#### x", "#### 1. a ", "9 ", "- ", r"\boxed{9 ", "$ ", "answer ", "answer is "),
    *("answer is 5 or ", "Answer: 1 2 ", "is ", " ", "\n", "9 or ", "or ", "\xa0", "9\xa0", "\x00"),
    *("\u0301", "a ", "\ud800", "1 1/2 ", "9 and "),
]


@pytest.mark.parametrize("piece", HOSTILE, ids=[ascii(piece)[1:-1] for piece in HOSTILE])
def test_hostile_text_takes_linear_time(piece: str) -> None:
    full = piece * (25_000 // len(piece))  # squared, this is a minute
    for text in (full + "18", "#### " + full, r"\boxed{" + full, "The answer is " + full, "18 (" + full):
        start = time.process_time()
        for read in (read_answer, opencompass_extract, read_marked):
            read(text)
        assert time.process_time() - start < MAX_HOSTILE_S, ascii(text[:60])


def test_a_wide_alphabet_takes_linear_time() -> None:
    text = "".join(map(chr, range(0x80, 0x80 + 250_000)))
    read_answer("")
    start = time.process_time()
    read_answer(text)
    assert time.process_time() - start < MAX_HOSTILE_S


def test_comparing_a_long_number_takes_linear_time() -> None:
    start = time.process_time()
    assert not opencompass_correct("9" * 250_000, "#### 18")
    assert time.process_time() - start < MAX_HOSTILE_S
