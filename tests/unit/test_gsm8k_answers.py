"""How an answer to GSM8K is read: a table of awkward ones, in every dress, and the official files."""

from __future__ import annotations

import json
import os
import random
import re
import time
from fractions import Fraction
from pathlib import Path

import needs
import pytest

from autorl_hpc.errors import AutorlError
from autorl_hpc.records.task import HARNESSES
from autorl_hpc.scoring.gsm8k import (
    MAX_TEXT_CHARS,
    opencompass_correct,
    opencompass_extract,
    read_answer,
    read_gold,
    read_marked,
    score_item,
    score_marked,
)
from autorl_hpc.scoring.outcome import Context, Outcome
from autorl_hpc.scoring.registry import SCORERS, scorer
from autorl_hpc.tasks.heldout import Item

HALF = Fraction(1, 2)

ANSWERS: list[tuple[str, Fraction | int | None]] = [
    # Answers that broke somebody's tool.
    (r"\boxed{8,000}", 8000), ("$70,000.", 70000), ("$29.00.", 29), ("18. (9 - 3 = 6 left)", 18),
    ("12 apples...", 12), ("1.234,5", Fraction(2469, 2)), ("-5", -5), ("½", HALF), (",", None),
    ("The answer is ,", None), ("#### ,", None), ("9 - 3 = 6 left\n#### ,", None), ("The answer is 5 or 7", None),
    ("I have no idea.", None), ("", None),
    # Four hashes.
    ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", 18), ("#### 18", 18), ("####18", 18), ("####\n18", 18),
    ("#### $18", 18), (r"#### \$18", 18), ("#### **18**", 18), ("#### **$1,234.50**.", Fraction(2469, 2)),
    ("#### 18 dollars", 18), ("#### 18 dollars for 2 weeks", 18), ("#### -5", -5), ("#### $-5", -5),
    ("#### -$5", -5), ("#### \u22125", -5), ("#### 1,234", 1234), ("#### 9 + 9 = 18", 18), ("#### 18 = 9 + 9", 18),
    ("#### x = 18", 18), ("#### 2 * (3 + 4) = 14", 14), ("#### (18)", 18), ("#### 18 (9 * 2 = 18 for 1 day)", 18),
    (r"#### \boxed{18}", 18), ("#### 5\n#### 7", 5), ("#### 18\nThe answer is 7", 18),
    ("#### 18\nQuestion: 3 more?\n#### 7", 18), ("#### 18\n\nLet me check: 18 - 9 = 9", 18), ("#### 5 or 7", None),
    ("#### 18 versus 20", None), ("The answer is 18 versus 20.", None), ("The answer is 18 vs 20.", None),
    ("#### 5, 7", None), ("#### 5-7", None), ("#### 10 - 3", None), ("#### 5:30", None), ("#### 1 234", 1234),
    ("#### 1. Count the eggs\n16 - 3 = 13\n#### 2. Sell them\nSo she makes $26.", 26),
    ("#### 18. She makes that every day.", 18),
    ("#### 1. Count the eggs\n16 - 3 = 13\n#### 2. Sell them\nThe answer is 26.", 26),
    ("#### 1. Count the eggs\n16 - 3 = 13\n\n#### 26", 26),
    ("#### Step 1: count\n16 - 3 = 13\n#### Step 2: sell\nSo she makes $26.", 26), ("### Solution\n16 - 3 = 13", 13),
    ("The answer is 18\n##########", 18), ("The answer is 18.\n####", 18),
    # Boxes.
    (r"\boxed{18}", 18), (r"so $\boxed{18}$.", 18), (r"\boxed{8{,}000}", 8000), (r"\boxed{8\,000}", 8000),
    (r"\boxed{\$8,000}", 8000), (r"\boxed{\frac{1}{2}}", HALF), (r"\boxed{\dfrac{-1}{2}}", None),
    (r"\boxed{-\frac{1}{2}}", -HALF), (r"\boxed{3\frac{1}{2}}", Fraction(7, 2)), (r"\boxed{\frac12}", HALF),
    (r"\boxed{18 \text{ apples}}", 18), (r"\boxed{\text{She has } 18}", 18), (r"\boxed{\mathbf{18}}", 18),
    (r"\boxed{\boxed{18}}", 18), (r"\boxed{x = 18}", 18), (r"\boxed{5\%}", 5),
    (r"\boxed{3} eggs, then \boxed{18}", 18), (r"\boxed{3} eggs, \boxed{9} dollars each, so \boxed{18}", 18),
    (r"\boxed{3}, \boxed{5} or \boxed{7}", None), (r"\boxed{18} (since 20 - 2 = 18) and 3 more words", 18),
    (r"\boxed{18", 18), (r"\boxed{5} or \boxed{7}", None), (r"\boxed{5} or \boxed{5.0}", 5),
    (r"$\boxed{5}$ or $\boxed{7}$", None), (r"\boxed{5 \text{ or } 7}", None), (r"16 - 3 = 13 \boxed{}", None),
    (r"\[ 9 \times 2 = 18 \]", 18), (r"The total is 9 + 9 = \(18\).", 18),
    # Phrases.
    ("The answer is 18", 18), ("The answer is 18.", 18), ("The answer is: $18.", 18), ("The answer is **18**.", 18),
    ("The answer is therefore 18.", 18), ("The answer is that Janet makes $18 every day.", 18),
    ("The answer is 9 + 9 = 18. Check: 18 - 9 = 9.", 18), ("The answer is 18. (9 - 3 = 6 left)", 18),
    ("The answer is 18 (i.e. 9 * 2).", 18),
    ("The answer is 18\nQuestion: What is 3 + 4?\nAnswer: The answer is 7", 18),
    ("the final answer to the question is 18 eggs", 18), ("Answer: 18", 18),
    ("**Answer:** 18 duck eggs\n\nExplanation: 9 + 9 makes 3 times 6", 18), ("**Final Answer**: $1,800", 1800),
    ("Answer:\n\n18", 18), ("Answer: Janet sells 16 - 3 - 4 = 9 eggs a day. She makes 9 * 2 = $18 every day.", 18),
    ("Answer: 3 trips were made. Each is 9 miles, 27 miles in all.", 27),
    ("To answer how many there are: 16 - 3 = 13. Then 13 * 2 = 26.", 26),
    ("The answer is 5. Wait, 2 are gone. The answer is 3.", 3), ("The answer is as follows:\n9 + 9 = 18", 18),
    ("16 - 3 = 13. The answer is unknown.", None), ("The answer is Rs. 500", 500), ("The answer is USD 500", 500),
    ("The answer is 5 and 7", None), ("The answer is $5 or $7.", None),
    ("The answer is 5 dollars or maybe 7 dollars.", None), ("The answer is 5 (or 7).", None),
    ("The answer is 5 or 5.00", 5), ("The answer is 5 hours and 30 minutes", None),
    ("The answer is between 5 and 7", None), ("The answer is 18 hours on 7 days.", 18),
    ("The answer is 5 million.", 5),
    # The last number.
    ("Janet makes 18", 18), ("She has 9 apples and 3 pears, so 12 pieces of fruit.", 12), ("So it is 5 or 7", None),
    ("16-3-4=9", 9), ("it loses -5", -5), ("10-3", 3), ("- 18", 18), ("(18)", 18), ("9 * 2 = (18)", 18),
    ("18 eggs (9 - 3 = 6 (or so) left).", 18),
    # Thinking and run-ons.
    ("<think>maybe 7</think>The answer is 18", 18), ("<think>#### 7</think>18", 18), ("maybe #### 7</think>18", 18),
    ("<think>a</think>18<think>7</think>", 18), ("<think>it may be 7", None), ("<think>18</think>", None),
    ("<think>Question: how many? 7</think>18", 18), ("Question: what is 9 + 9?\nAnswer: 18", 18),
    ("Question: 3 + 4?\nAnswer: 7\nQuestion: 9 + 9?\nAnswer: 18", 7),
    ("The answer is 18\nQ: 3 + 4?\nA: The answer is 7", 18), ("9 + 9 = 18\n\nHuman: And 3 + 4?\nAssistant: 7", 18),
    ("9 + 9 = 18\n### Instruction:\n3 + 4? 7", 18), ("9 + 9 = 18\n**Q2:** 3 + 4? 7", 18),
    ("She asks Human: 3 + 4?", 4),
    *[(f"9 + 9 = 18{mark} 3 + 4?\nAnswer: 7", 18) for mark in (
        "\nQuestion\uff1a", " Question:", "\nQUESTION:", "\nquestion 2:", "\nProblem:", "\n### Problem 2:", "\n**Exercise:**", "\n## Problem 2\n",
        "\n**Exercise 3**\n", "\nNext question:", "\nUser:", "\nuser\n", ". User:", "\n\nHuman\uff1a", "\nAssistant:", "\nassistant\n", "<user>",
        "\n### User\n", "<|user|>", "<\uff5cUser\uff5c>", "<|im_end|>\n", "<|eot_id|>", "<end_of_turn>", " [INST]", "</s>", "<|start_header_id|>user",
    )],
    *[(f"9 + 9 = 18{mark}What is 3 + 4?\nA: 7", 18) for mark in (
        "\nQ1:", "\nQ 2: ", "\nQ.2:", "\nQ2. ", "\nQ2) ", "\nQ#2:", "\nQn:", "\nQuery:", "\n- Q:", "\n1. Q:", "\n[Q]:", "\n[User]:", "\n“Q: ", " Q: ", ". Q: ",
        " Q1: ", " Human: ", " User: ", "\nhuman: ", "\nHuman 2:", "\nHuman>", "\n[User]\n", "\nQuestion 2\n", "\nQuestion #2:", "\nQuestion 2 of 5:",
        "\nQuestion 2. ", "\nProblem 2. ", "\n## Q2\n", "\n# Q\n", "\nMath problem:",
    )],
    ("Q1: 300 sold\nQ2: 400 sold\nIn all 700", 700), ("There are 2.\nUser: 3 hours, robot: 4\nSo 7", 7),
    ("Problem 1: 3 eggs\nProblem 2: 4 eggs\nTotal: 7", 7), ("1 user: 3 hours\nSo 7", 7),
    ("## Problem 1\n9 + 9 = 18", 18), ("Assistant: 9 + 9 = 18", 18),
    ("<|assistant|>\n9 + 9 = 18", 18),
    ("Day 1: 3 eggs\nQuestion: how many are left? 16 - 3 = 13\n#### 13\nQuestion: 3 + 4?\n#### 7", 13),
    ("There are 2.\nUser: 3 hours, robot: 4 hours\n#### 7", 7), ("The answer is 18.\nProblem: 3 + 4?\n#### 7", 18),
    (r"\boxed{18}" + "\nProblem: 3 + 4?\n#### 7", 18), ("#### 18\nProblem: 3 + 4?\n#### 7", 18),
    ("She has 2 problems: 3 + 4 = 7", 7), ("Q: what is 9 + 9?\nA: 18", 18),
    # Signs, whichever dash or word, where a value begins.
    ("minus 5", -5), ("The answer is minus 5.", -5), ("#### negative 5", -5), ("#### \u2212 5", -5),
    ("\u2212 5", -5), ("The answer is \u2014" + "5", -5), ("#### - 5", -5), (r"\boxed{- 5}", -5),
    ("3 - 8 = - 5", -5), ("#### \uff0d5", -5), ("#### minus ½", -HALF), ("The answer is -US$5", -5),
    ("The answer is -Rs. 500", -500), ("#### -\uff045", -5), ("it loses -\u20a95", -5), ("#### -.5", -HALF),
    (r"\boxed{minus 5}", -5), (r"\boxed{\text{minus } 5}", -5), (r"\boxed{\text{negative 5}}", -5),
    (r"\boxed{\mathrm{minus}\ 5}", -5), (r"\boxed{-\,5}", -5), (r"\boxed{-\ \$5}", -5), (r"\boxed{x = minus 5}", -5),
    (r"\boxed{\text{18 apples}}", 18), (r"\boxed{12 - 5 = 7}", 7),
    ("12 minus 5", 5), ("12 \u2212 5 = 7", 7), ("She has 12 \u2014 5 are red", 5),
    ("The final answer \u2014 18", 18),
    # Ways to write a number.
    ("$1{,}000$", 1000), ("#### 1{,}000", 1000), (r"\boxed{1\ 000}", 1000), ("1_000", 1000),
    ("It falls to minus 5 degrees.", -5), ("a loss of negative $5", -5), ("12 apples minus 5 apples", 5),
    ("18<|im_start|>user\n7", 18), ("1 000", 1000), ("So it costs 1 000 dollars.", 1000),
    *[(f"{before} 1 500{after}", 1500) for before in ("It costs", "a total of", "She earned", "They sold", r"So $", "It is")
      for after in ("", " dollars.", " eggs")],
    *[(text, int(text.split()[-2])) for text in ("In 2020 500 eggs", "Room 3 250 people", "She bought 3 100 dollars", "He sold 2, then 500 eggs")],
    ("The total is $1 250.", 1250), ("12 000 000", 12000000), ("On day 2 200 eggs", 200), ("#### 1 2345", None),
    ("3 ½", Fraction(7, 2)), ("3½", Fraction(7, 2)), ("3\xa0½ cups", Fraction(7, 2)), ("-½", -HALF),
    ("⅔", Fraction(2, 3)), ("1/2", HALF), ("1 / 2", HALF), ("-1/2", -HALF), ("3 1/2", Fraction(7, 2)),
    ("3 and 1/2", Fraction(7, 2)), ("1,000/4", 250), ("1/0", None), ("5/7/2020", None), (".5", HALF), ("0.50", HALF),
    ("5%", 5), ("1e3", 1000), ("1.5e3", 1500), ("1e-3", Fraction(1, 1000)), ("1e999", None), ("007", 7),
    ("1,234,567.25", Fraction(4938269, 4)), ("1.234.567", 1234567), ("1,23,456", 123456), ("1'234", 1234),
    ("1\u2019234", 1234), ("1\u2009234", 1234), ("1\xa0234", 1234), ("1\u202f234,5", Fraction(2469, 2)),
    ("1.234", Fraction(617, 500)), ("1,5", None), ("12,34", None), ("1.2.3", None), ("\uff11\uff18", 18),
    ("\uff03\uff03\uff03\uff03 \uff11\uff0c\uff12\uff13\uff14", 1234), ("\u0661\u0668", 18),
    ("\U0001d7cf\U0001d7d6", 18), ("\u20131\u200b8", -18), ("\u20ac18", 18), ("\x00", None), ("#### 1\x008", None),
    ("#### 18\x00", 18), ("\x00#### 18", 18), ("\ud800 18", 18), ("9" * 64, int("9" * 64)), ("9" * 65, None),
    ("#### " + "9" * 5000, None), ("9" * 500_000, None), ("18" + " " * MAX_TEXT_CHARS, None),
]  # fmt: skip


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
    ("answer", "expected"), [("9*2=18\n#### 18", 18), ("#### 1,234", 1234), ("#### -5\n", -5), ("2.5", Fraction(5, 2))]
)
def test_reads_a_gold_answer(answer: str, expected: Fraction | int) -> None:
    assert read_gold(answer) == expected


@pytest.mark.parametrize("answer", ["", "#### ", "#### eighteen", "#### 18 eggs", "#### 1 or 2", "9" * 5000, "\u0661"])
def test_refuses_a_gold_answer_that_is_no_number(answer: str) -> None:
    with pytest.raises(ValueError, match="check the task's data"):
        read_gold(answer)


DRESSES = [
    *("{}", "9 + 9 = {}.", "#### {}", "#### ${}", "#### {} eggs.", "x\n#### {}\n\nQuestion: 3?\n#### 4"),
    *(
        r"\boxed{{{}}}", r"\boxed{{\${}}}", "The answer is {}.", "The answer is **{}** (9 - 3 = 6).", "Answer: {}\n",
    ),
]  # fmt: skip


def test_an_answer_reads_the_same_in_every_dress() -> None:
    rng = random.Random(0)
    for _ in range(200):
        value = rng.randrange(-(10 ** rng.randrange(1, 10)), 10 ** rng.randrange(1, 10))
        for number in (f"{value}", f"{value:,}", f"{value:,}.00", f"{value:,}".replace(",", "\u202f")):
            for dress in DRESSES:
                assert score_item("So: 3 + 4 = 7.\n" + dress.format(number), f"#### {value:,}"), dress.format(number)


def _rows(split: str) -> list[dict[str, str]]:
    root = Path(os.environ.get("AUTORL_TEST_DATA") or Path(__file__).parents[2] / "../shared/data")
    path = root / "gsm8k" / f"{split}.jsonl"
    if not path.is_file():
        needs.skip("data", f"no gsm8k/{split}.jsonl; set AUTORL_TEST_DATA to a folder that holds it")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_the_official_answers_read_as_themselves() -> None:
    rows = [*_rows("test"), *_rows("train")]
    assert len(rows) == 1319 + 7473
    for row in rows[:2000]:
        gold = read_gold(row["answer"])
        rationale, _, bare = row["answer"].rpartition("\n#### ")
        assert gold.denominator == 1
        assert read_gold(bare) == gold
        assert read_answer(row["answer"]) == gold
        assert score_item(f"{rationale}\nThe answer is {bare}\n", row["answer"])
        assert score_item(f"{rationale}\nThe final answer is \\boxed{{{bare}}}.", row["answer"])
        assert opencompass_correct(opencompass_extract(row["answer"].replace(",", "")), row["answer"])
    alone = [score_item(row["answer"].rpartition("\n#### ")[0], row["answer"]) for row in rows[:2000]]
    assert sum(alone) > 0.9 * len(alone), "a rationale alone mostly ends with its answer"


# --- random and hostile text never raises, and takes linear time

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


# --- the other scorers: the reference's with its faults, the strict one by the mark alone

OPENCOMPASS: list[tuple[str, str]] = [
    ("The answer is 18", "18"), ("The answer is 18.0.", "18.0"), ("It is 18.", "18"), (r"\boxed{8,000}", "000"),
    ("18. (9 - 3 = 6 left)", "6"), ("10-3", "-3"), ("$29.00.", "29.00"), ("½", "NULL"), ("", "NULL"),
    ("no number", "NULL"), ("The answer is 18\nQuestion: 3 + 4?", "18"), ("Question: 3 + 4?\nAnswer: 7", "NULL"),
    ("<think>7</think> 18 <think>9</think>", "18"), ("7</think>18", "18"), ("7</think>18</think>", "NULL"),
    ("<think>it may be 7", "7"), ("</think>7<think>8", "8"), ("<think>1<think>2</think>3</think>4", "4"),
    ("\u0661\u0668", "\u0661\u0668"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), OPENCOMPASS)
def test_opencompass_keeps_the_faults(text: str, expected: str) -> None:
    assert opencompass_extract(text) == expected


@pytest.mark.parametrize(
    ("pred", "gold", "expected"),
    [
        ("18", "#### 18", True), ("18.0", "#### 18", True), ("18.0000001", "#### 18", True),
        ("18.1", "#### 18", False), ("1234", "#### 1,234", True), ("000", "#### 8,000", False),
        ("NULL", "#### 18", False), ("9" * 500, "#### 18", False), ("2.5", "#### 2.5", True),
        ("2.50", "#### 2.5", False), ("18", "#### 18\nx #### 19", False), ("18", "#### " + "9" * 400, False),
    ],
)  # fmt: skip
def test_opencompass_compares_as_the_reference(pred: str, gold: str, expected: bool) -> None:
    assert opencompass_correct(pred, gold) is expected


MARKED: list[tuple[str, Fraction | int | None]] = [
    ("3 + 4 = 7\n#### 7", 7), ("#### 7\n#### 8", 7), ("####-12", -12), ("#### 1,234.", 1234), ("#### 16.0", 16),
    ("3 + 4 = 7", None), ("The answer is 7.", None), ("#### seven", None), ("#### .", None), ("#### 1.2.3", None),
    ("#### " + "9" * 100_000, None), ("", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), MARKED)
def test_the_strict_scorer_reads_the_mark_alone(text: str, expected: Fraction | int | None) -> None:
    assert read_marked(text) == expected
    assert score_marked(text, "work\n#### 7") is (expected == 7)


def test_each_scorer_has_a_version_and_another_one_is_refused() -> None:
    versions = {
        "alpacaeval": "1",
        "deepsearchqa": "2",
        "deepsearchqa-exact": "5",
        "episodes": "1",
        "gsm8k": "4",
        "gsm8k-marked": "4",
        "gsm8k-opencompass": "a5acc4bb",
        "humaneval": "5",
        "humaneval-opencompass": "a5acc4bb-2",
    }
    assert set(versions) == set(SCORERS) - set(HARNESSES)  # those name the version of a library
    assert {name: scorer(name, version).version for name, version in versions.items()} == versions
    found = scorer("gsm8k-marked", "4").score([Item("a", "", "#### 7")], [["#### 7", "8"]], Context())
    assert found == [Outcome(0.5)], "of several samples the mean"
    with pytest.raises(AutorlError, match="version 4"):
        scorer("gsm8k", "1")
