"""GSM8K's other scorers: the reference's with its faults, the strict one by the mark alone; their versions."""

from __future__ import annotations

from fractions import Fraction

import pytest

from autorl_hpc.errors import AutorlError
from autorl_hpc.scoring.gsm8k import opencompass_correct, opencompass_extract, read_marked, score_marked
from autorl_hpc.scoring.outcome import Context, Outcome
from autorl_hpc.scoring.registry import SCORERS, scorer
from autorl_hpc.tasks.heldout import Item

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
    assert set(versions) == set(SCORERS)
    assert {name: scorer(name, version).version for name, version in versions.items()} == versions
    found = scorer("gsm8k-marked", "4").score([Item("a", "", "#### 7")], [["#### 7", "8"]], Context())
    assert found == [Outcome(0.5)], "of several samples the mean"
    with pytest.raises(AutorlError, match="version 4"):
        scorer("gsm8k", "1")


def test_opencompass_refuses_a_row_without_gold() -> None:
    with pytest.raises(ValueError, match="check the task's data"):
        opencompass_correct("18", "18")
