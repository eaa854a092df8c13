"""The two GSM8K scorers: a table of awkward answers, random text, hostile text, and the official files."""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from autorl_hpc.errors import AutorlError
from autorl_hpc.scoring.gsm8k import MAX_TEXT_CHARS, read_answer, read_gold, score_item
from autorl_hpc.scoring.marked import read_marked, score_marked
from autorl_hpc.scoring.opencompass import opencompass_correct, opencompass_extract
from autorl_hpc.scoring.outcome import Context, Outcome
from autorl_hpc.scoring.registry import SCORERS, scorer
from autorl_hpc.tasks.heldout import Item

MAX_HOSTILE_S = 5.0
HALF = Fraction(1, 2)

ANSWERS: list[tuple[str, Fraction | int | None]] = [
    # Answers that broke somebody's tool.
    (r"\boxed{8,000}", 8000),
    ("$70,000.", 70000),
    ("$29.00.", 29),
    ("18. (9 - 3 = 6 left)", 18),
    ("12 apples...", 12),
    ("1.234,5", Fraction(2469, 2)),
    ("-5", -5),
    ("½", HALF),
    (",", None),
    ("The answer is ,", None),
    ("#### ,", None),
    ("9 - 3 = 6 left\n#### ,", None),
    ("The answer is 5 or 7", None),
    ("I have no idea.", None),
    ("", None),
    # Four hashes.
    ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", 18),
    ("#### 18", 18),
    ("####18", 18),
    ("####\n18", 18),
    ("#### $18", 18),
    (r"#### \$18", 18),
    ("#### **18**", 18),
    ("#### **$1,234.50**.", Fraction(2469, 2)),
    ("#### 18 dollars", 18),
    ("#### 18 dollars for 2 weeks", 18),
    ("#### -5", -5),
    ("#### $-5", -5),
    ("#### -$5", -5),
    ("#### \u22125", -5),
    ("#### 1,234", 1234),
    ("#### 9 + 9 = 18", 18),
    ("#### 18 = 9 + 9", 18),
    ("#### x = 18", 18),
    ("#### 2 * (3 + 4) = 14", 14),
    ("#### (18)", 18),
    ("#### 18 (9 * 2 = 18 for 1 day)", 18),
    (r"#### \boxed{18}", 18),
    ("#### 5\n#### 7", 5),
    ("#### 18\nThe answer is 7", 18),
    ("#### 18\nQuestion: 3 more?\n#### 7", 18),
    ("#### 18\n\nLet me check: 18 - 9 = 9", 18),
    ("#### 5 or 7", None),
    ("#### 5, 7", None),
    ("#### 5-7", None),
    ("#### 10 - 3", None),
    ("#### 5:30", None),
    ("#### 1 234", None),
    ("#### 1. Count the eggs\n16 - 3 = 13\n#### 2. Sell them\nSo she makes $26.", 26),
    ("#### 18. She makes that every day.", 18),
    ("#### 1. Count the eggs\n16 - 3 = 13\n#### 2. Sell them\nThe answer is 26.", 26),
    ("#### 1. Count the eggs\n16 - 3 = 13\n\n#### 26", 26),
    ("#### Step 1: count\n16 - 3 = 13\n#### Step 2: sell\nSo she makes $26.", 26),
    ("### Solution\n16 - 3 = 13", 13),
    ("The answer is 18\n##########", 18),
    ("The answer is 18.\n####", 18),
    # Boxes.
    (r"\boxed{18}", 18),
    (r"so $\boxed{18}$.", 18),
    (r"\boxed{8{,}000}", 8000),
    (r"\boxed{8\,000}", 8000),
    (r"\boxed{\$8,000}", 8000),
    (r"\boxed{\frac{1}{2}}", HALF),
    (r"\boxed{\dfrac{-1}{2}}", None),
    (r"\boxed{-\frac{1}{2}}", -HALF),
    (r"\boxed{3\frac{1}{2}}", Fraction(7, 2)),
    (r"\boxed{\frac12}", HALF),
    (r"\boxed{18 \text{ apples}}", 18),
    (r"\boxed{\text{She has } 18}", 18),
    (r"\boxed{\mathbf{18}}", 18),
    (r"\boxed{\boxed{18}}", 18),
    (r"\boxed{x = 18}", 18),
    (r"\boxed{5\%}", 5),
    (r"\boxed{3} eggs, then \boxed{18}", 18),
    (r"\boxed{18} (since 20 - 2 = 18) and 3 more words", 18),
    (r"\boxed{18", 18),
    (r"\boxed{5} or \boxed{7}", None),
    (r"\boxed{5} or \boxed{5.0}", 5),
    (r"$\boxed{5}$ or $\boxed{7}$", None),
    (r"\boxed{5 \text{ or } 7}", None),
    (r"16 - 3 = 13 \boxed{}", None),
    (r"\[ 9 \times 2 = 18 \]", 18),
    (r"The total is 9 + 9 = \(18\).", 18),
    # Phrases.
    ("The answer is 18", 18),
    ("The answer is 18.", 18),
    ("The answer is: $18.", 18),
    ("The answer is **18**.", 18),
    ("The answer is therefore 18.", 18),
    ("The answer is that Janet makes $18 every day.", 18),
    ("The answer is 9 + 9 = 18. Check: 18 - 9 = 9.", 18),
    ("The answer is 18. (9 - 3 = 6 left)", 18),
    ("The answer is 18 (i.e. 9 * 2).", 18),
    ("The answer is 18\nQuestion: What is 3 + 4?\nAnswer: The answer is 7", 18),
    ("the final answer to the question is 18 eggs", 18),
    ("Answer: 18", 18),
    ("**Answer:** 18 duck eggs\n\nExplanation: 9 + 9 makes 3 times 6", 18),
    ("**Final Answer**: $1,800", 1800),
    ("Answer:\n\n18", 18),
    ("Answer: Janet sells 16 - 3 - 4 = 9 eggs a day. She makes 9 * 2 = $18 every day.", 18),
    ("Answer: 3 trips were made. Each is 9 miles, 27 miles in all.", 27),
    ("To answer how many there are: 16 - 3 = 13. Then 13 * 2 = 26.", 26),
    ("The answer is 5. Wait, 2 are gone. The answer is 3.", 3),
    ("The answer is as follows:\n9 + 9 = 18", 18),
    ("16 - 3 = 13. The answer is unknown.", None),
    ("The answer is Rs. 500", 500),
    ("The answer is USD 500", 500),
    ("The answer is 5 and 7", None),
    ("The answer is $5 or $7.", None),
    ("The answer is 5 dollars or maybe 7 dollars.", None),
    ("The answer is 5 (or 7).", None),
    ("The answer is 5 or 5.00", 5),
    ("The answer is 5 hours and 30 minutes", None),
    ("The answer is between 5 and 7", None),
    ("The answer is 18 hours on 7 days.", 18),
    ("The answer is 5 million.", 5),
    # The last number.
    ("Janet makes 18", 18),
    ("She has 9 apples and 3 pears, so 12 pieces of fruit.", 12),
    ("So it is 5 or 7", None),
    ("16-3-4=9", 9),
    ("it loses -5", -5),
    ("10-3", 3),
    ("- 18", 18),
    ("(18)", 18),
    ("9 * 2 = (18)", 18),
    ("18 eggs (9 - 3 = 6 (or so) left).", 18),
    # Thinking and run-ons.
    ("<think>maybe 7</think>The answer is 18", 18),
    ("<think>#### 7</think>18", 18),
    ("maybe #### 7</think>18", 18),
    ("<think>a</think>18<think>7</think>", 18),
    ("<think>it may be 7", None),
    ("<think>18</think>", None),
    ("<think>Question: how many? 7</think>18", 18),
    ("Question: what is 9 + 9?\nAnswer: 18", 18),
    ("Question: 3 + 4?\nAnswer: 7\nQuestion: 9 + 9?\nAnswer: 18", 7),
    # Ways to write a number.
    ("3 ½", Fraction(7, 2)),
    ("3½", Fraction(7, 2)),
    ("3\xa0½ cups", Fraction(7, 2)),
    ("-½", -HALF),
    ("⅔", Fraction(2, 3)),
    ("1/2", HALF),
    ("1 / 2", HALF),
    ("-1/2", -HALF),
    ("3 1/2", Fraction(7, 2)),
    ("3 and 1/2", Fraction(7, 2)),
    ("1,000/4", 250),
    ("1/0", None),
    ("5/7/2020", None),
    (".5", HALF),
    ("0.50", HALF),
    ("5%", 5),
    ("1e3", 1000),
    ("1.5e3", 1500),
    ("1e-3", Fraction(1, 1000)),
    ("1e999", None),
    ("007", 7),
    ("1,234,567.25", Fraction(4938269, 4)),
    ("1.234.567", 1234567),
    ("1,23,456", 123456),
    ("1'234", 1234),
    ("1\u2019234", 1234),
    ("1\u2009234", 1234),
    ("1\xa0234", 1234),
    ("1\u202f234,5", Fraction(2469, 2)),
    ("1.234", Fraction(617, 500)),
    ("1,5", None),
    ("12,34", None),
    ("1.2.3", None),
    ("\uff11\uff18", 18),
    ("\uff03\uff03\uff03\uff03 \uff11\uff0c\uff12\uff13\uff14", 1234),
    ("\u0661\u0668", 18),
    ("\U0001d7cf\U0001d7d6", 18),
    ("\u20131\u200b8", -18),
    ("\u20ac18", 18),
    ("\x00", None),
    ("#### 1\x008", None),
    ("#### 18\x00", 18),
    ("\x00#### 18", 18),
    ("\ud800 18", 18),
    ("9" * 64, int("9" * 64)),
    ("9" * 65, None),
    ("#### " + "9" * 5000, None),
    ("9" * 500_000, None),
    ("18" + " " * MAX_TEXT_CHARS, None),
]


@pytest.mark.parametrize(("text", "expected"), ANSWERS, ids=[ascii(text)[1:41] for text, _ in ANSWERS])
def test_reads_awkward_answers(text: str, expected: Fraction | int | None) -> None:
    assert read_answer(text) == expected


def test_an_answer_is_exact() -> None:
    assert type(read_answer("0.1")) is Fraction
    assert score_item("The answer is 1234567890123456789.", "#### 1,234,567,890,123,456,789")
    assert not score_item("The answer is 1234567890123456789.", "#### 1234567890123456788")
    assert not score_item("The answer is 18.0000001", "18")
    assert not score_item("", "18")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("9*2=18\n#### 18", 18), ("#### 1,234", 1234), ("#### -5\n", -5), ("2.5", Fraction(5, 2))],
)
def test_reads_a_gold_answer(answer: str, expected: Fraction | int) -> None:
    assert read_gold(answer) == expected


@pytest.mark.parametrize("answer", ["", "#### ", "#### eighteen", "#### 18 eggs", "#### 1 or 2", "9" * 5000, "\u0661"])
def test_refuses_a_gold_answer_that_is_no_number(answer: str) -> None:
    with pytest.raises(ValueError, match="check the task's data"):
        read_gold(answer)


OPENCOMPASS: list[tuple[str, str]] = [
    ("The answer is 18", "18"),
    ("The answer is 18.0.", "18.0"),
    ("It is 18.", "18"),
    (r"\boxed{8,000}", "000"),
    ("18. (9 - 3 = 6 left)", "6"),
    ("10-3", "-3"),
    ("$29.00.", "29.00"),
    ("½", "NULL"),
    ("", "NULL"),
    ("no number", "NULL"),
    ("The answer is 18\nQuestion: 3 + 4?", "18"),
    ("Question: 3 + 4?\nAnswer: 7", "NULL"),
    ("<think>7</think> 18 <think>9</think>", "18"),
    ("7</think>18", "18"),
    ("7</think>18</think>", "NULL"),
    ("<think>it may be 7", "7"),
    ("</think>7<think>8", "8"),
    ("<think>1<think>2</think>3</think>4", "4"),
    ("\u0661\u0668", "\u0661\u0668"),
]


@pytest.mark.parametrize(("text", "expected"), OPENCOMPASS)
def test_opencompass_keeps_the_faults(text: str, expected: str) -> None:
    assert opencompass_extract(text) == expected


@pytest.mark.parametrize(
    ("pred", "gold", "expected"),
    [
        ("18", "#### 18", True),
        ("18.0", "#### 18", True),
        ("18.0000001", "#### 18", True),
        ("18.1", "#### 18", False),
        ("1234", "#### 1,234", True),
        ("000", "#### 8,000", False),
        ("NULL", "#### 18", False),
        ("9" * 500, "#### 18", False),
        ("2.5", "#### 2.5", True),
        ("2.50", "#### 2.5", False),
        ("18", "#### 18\nx #### 19", False),
        ("18", "#### " + "9" * 400, False),
    ],
)
def test_opencompass_compares_as_the_reference(pred: str, gold: str, expected: bool) -> None:
    assert opencompass_correct(pred, gold) is expected


def test_opencompass_refuses_a_row_without_gold() -> None:
    with pytest.raises(ValueError, match="check the task's data"):
        opencompass_correct("18", "18")


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


@pytest.mark.parametrize("seed", range(8))
def test_random_text_never_raises(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2500):
        text = _random_text(rng)
        answer = read_answer(text)
        assert answer is None or type(answer) is Fraction, ascii(text)
        assert opencompass_extract(text) == _reference_extract(text), ascii(text)
        assert opencompass_correct(opencompass_extract(text), "#### 18") in (True, False)


DRESSES = [
    *("{}", "9 + 9 = {}.", "#### {}", "#### ${}", "#### {} eggs.", "x\n#### {}\n\nQuestion: 3?\n#### 4"),
    *(
        r"\boxed{{{}}}",
        r"\boxed{{\${}}}",
        "The answer is {}.",
        "The answer is **{}** (9 - 3 = 6).",
        "Answer: {}\n",
    ),
]


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_reads_the_same_in_every_dress(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        value = rng.randrange(-(10 ** rng.randrange(1, 10)), 10 ** rng.randrange(1, 10))
        for number in (f"{value}", f"{value:,}", f"{value:,}.00", f"{value:,}".replace(",", "\u202f")):
            for dress in DRESSES:
                assert score_item("So: 3 + 4 = 7.\n" + dress.format(number), f"#### {value:,}"), dress.format(number)


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


def _hostile_texts(piece: str) -> list[str]:
    size = 250_000  # squared, this is minutes
    full = piece * (size // len(piece))
    marks = ("#### ", r"\boxed{", "The answer is ", "18 (")
    return [full, full + "18", *(mark + full for mark in marks)]


@pytest.mark.parametrize("piece", HOSTILE, ids=[ascii(piece)[1:-1] for piece in HOSTILE])
@pytest.mark.parametrize("read", [read_answer, opencompass_extract, read_marked])
def test_hostile_text_takes_linear_time(read: Callable[[str], object], piece: str) -> None:
    for text in _hostile_texts(piece):
        start = time.process_time()
        read(text)
        assert time.process_time() - start < MAX_HOSTILE_S, ascii(text[:60])


def test_a_wide_alphabet_takes_linear_time() -> None:
    text = "".join(map(chr, range(0x80, 0x80 + 1_000_000)))
    read_answer("")
    start = time.process_time()
    read_answer(text)
    assert time.process_time() - start < MAX_HOSTILE_S


def test_comparing_a_long_number_takes_linear_time() -> None:
    start = time.process_time()
    assert not opencompass_correct("9" * 1_000_000, "#### 18")
    assert time.process_time() - start < MAX_HOSTILE_S


def _rows(split: str) -> list[dict[str, str]]:
    root = Path(os.environ.get("AUTORL_TEST_DATA") or Path(__file__).parents[2] / "../shared/data")
    path = root / "gsm8k" / f"{split}.jsonl"
    if not path.is_file():
        pytest.skip(f"no gsm8k/{split}.jsonl; set AUTORL_TEST_DATA to a folder that holds it")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("split", "n_rows"), [("train", 7473), ("test", 1319)])
def test_the_official_answers_read_as_themselves(split: str, n_rows: int) -> None:
    rows = _rows(split)
    assert len(rows) == n_rows
    for row in rows:
        gold = read_gold(row["answer"])
        rationale, _, bare = row["answer"].rpartition("\n#### ")
        assert gold.denominator == 1
        assert read_gold(bare) == gold
        assert read_answer(row["answer"]) == gold
        assert score_item(f"{rationale}\nThe answer is {bare}\n", row["answer"])
        assert score_item(f"{rationale}\nThe final answer is \\boxed{{{bare}}}.", row["answer"])
        assert opencompass_correct(opencompass_extract(row["answer"].replace(",", "")), row["answer"])


@pytest.mark.parametrize(("split", "floor"), [("train", 0.9), ("test", 0.9)])
def test_a_rationale_alone_mostly_ends_with_its_answer(split: str, floor: float) -> None:
    rows = _rows(split)
    right = sum(score_item(row["answer"].rpartition("\n#### ")[0], row["answer"]) for row in rows)
    assert right / len(rows) > floor


MARKED: list[tuple[str, Fraction | int | None]] = [
    ("3 + 4 = 7\n#### 7", 7),
    ("#### 7\n#### 8", 7),
    ("####-12", -12),
    ("#### 1,234.", 1234),
    ("#### 16.0", 16),
    ("3 + 4 = 7", None),
    ("The answer is 7.", None),
    ("#### seven", None),
    ("#### .", None),
    ("#### 1.2.3", None),
    ("#### " + "9" * 100_000, None),
    ("", None),
]


@pytest.mark.parametrize(("text", "expected"), MARKED)
def test_the_strict_scorer_reads_the_mark_alone(text: str, expected: Fraction | int | None) -> None:
    assert read_marked(text) == expected
    assert score_marked(text, "work\n#### 7") is (expected == 7)


def test_each_scorer_has_a_version_and_another_one_is_refused() -> None:
    versions = {name: make().version for name, make in SCORERS.items()}
    expected = {"gsm8k": "1", "gsm8k-marked": "1", "gsm8k-opencompass": "a5acc4bb"}
    assert {name: version for name, version in versions.items() if name in expected} == expected
    assert all(versions.values())
    found = scorer("gsm8k-marked", "1").score([Item("a", "", "#### 7")], [["#### 7", "8"]], Context())
    assert found == [Outcome(0.5)], "of several samples the mean"
    with pytest.raises(AutorlError, match="version 2"):
        scorer("gsm8k", "2")
