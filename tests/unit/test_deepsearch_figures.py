"""Precision, recall and F1 of a verdict, and answers that are compared without a judge."""

from __future__ import annotations

import pytest
from verdicts import WHOLE

from autorl_hpc.rollouts.search.matching import SET, SINGLE, Counts, compare

# found, missed, extra: precision, recall, F1, fully correct, correct with excessive, fully incorrect
FIGURES = [
    ((1, 0, 0), (1.0, 1.0, 1.0, True, False, False)),
    ((3, 0, 0), (1.0, 1.0, 1.0, True, False, False)),
    ((3, 0, 1), (0.75, 1.0, 6 / 7, False, True, False)),
    ((1, 0, 3), (0.25, 1.0, 0.4, False, True, False)),
    ((1, 1, 1), (0.5, 0.5, 0.5, False, False, False)),
    ((2, 2, 0), (1.0, 0.5, 2 / 3, False, False, False)),
    ((0, 1, 0), (0.0, 0.0, 0.0, False, False, True)),
    ((0, 3, 5), (0.0, 0.0, 0.0, False, False, True)),
    ((0, 0, 0), (0.0, 0.0, 0.0, False, False, True)),  # nothing was expected: a judge gave no items
]


@pytest.mark.parametrize(("counts", "expected"), FIGURES)
def test_precision_recall_and_f1(counts: tuple[int, int, int], expected: tuple[float, ...]) -> None:
    made = Counts(*counts)
    found = (
        made.precision,
        made.recall,
        made.f1,
        made.fully_correct,
        made.correct_with_excessive,
        made.fully_incorrect,
    )
    assert found == pytest.approx(expected)


def test_a_verdict_counts_as_the_benchmark_does() -> None:
    assert WHOLE.counts() == Counts(found=1, missed=1, extra=1)


EXACT = [
    ("New Zealand", "New Zealand", SINGLE, (1, 0, 0)),
    ("new zealand.", "New Zealand", SINGLE, (1, 0, 0)),
    ("the New  Zealand", "New Zealand", SINGLE, (1, 0, 0)),
    ("Zealand", "New Zealand", SINGLE, (0, 1, 1)),
    ("", "New Zealand", SINGLE, (0, 1, 0)),  # the reference's fallback took it for correct
    ("New", "New Zealand", SINGLE, (0, 1, 1)),  # and this
    ("New Zealand, Australia", "New Zealand", SINGLE, (1, 0, 1)),
    ("Washington, D.C.", "Washington, D.C.", SINGLE, (1, 0, 0)),
    ("1,234", "1234", SINGLE, (1, 0, 0)),
    ("-3.5%", "-3.5 %", SINGLE, (1, 0, 0)),
    ("3.5%", "-3.5%", SINGLE, (0, 1, 1)),
    ("1990-1995", "1990 - 1995", SINGLE, (1, 0, 0)),
    ("2019, 2022, 2023, 2024", "2019, 2022, 2023, 2024", SET, (4, 0, 0)),
    ("2024; 2023; 2022; 2019", "2019, 2022, 2023, 2024", SET, (4, 0, 0)),
    ("Austria, Singapore", "Austria, Switzerland, Singapore", SET, (2, 1, 0)),
    ("Austria, Switzerland, and Singapore", "Austria, Switzerland, Singapore", SET, (3, 0, 0)),
    ("Austria\nSwitzerland\nSingapore\nItaly", "Austria, Switzerland, Singapore", SET, (3, 0, 1)),
    ("Austria, Austria", "Austria, Switzerland, Singapore", SET, (1, 2, 0)),
    (", ;\n", "Austria, Switzerland", SET, (0, 2, 0)),
    ("Potosi\u0301", "Potosí", SINGLE, (1, 0, 0)),
    ("\uff21\uff22\uff23", "abc", SINGLE, (1, 0, 0)),
    ("C#", "C++", SINGLE, (0, 1, 1)),
    ("c++", "C++", SINGLE, (1, 0, 0)),
    ("$5", "€5", SINGLE, (0, 1, 1)),
    ("\uff045", "$5.", SINGLE, (1, 0, 0)),
    ("?", "$", SINGLE, (0, 1, 0)),
    ("?", "!", SINGLE, (0, 1, 0)),
    ("!", "!", SINGLE, (1, 0, 0)),
    ("?; *", "*, ?", SET, (2, 0, 0)),
    ("Austria, ...", "Austria", SINGLE, (1, 0, 0)),
    ("", "", SINGLE, (0, 0, 0)),
    ("\u22125", "5", SINGLE, (0, 1, 1)),
    ("5", "\u22125", SINGLE, (0, 1, 1)),
    ("\u2212 5", "-5", SINGLE, (1, 0, 0)),
    ("minus 5", "-5", SINGLE, (1, 0, 0)),
    ("minus 5", "5", SINGLE, (0, 1, 1)),
    ("-5", "\uff0d\uff15", SINGLE, (1, 0, 0)),
    ("1\u2009234\u2009567", "1,234,567", SINGLE, (1, 0, 0)),
    ("1\u202f000 km", "1000 km", SINGLE, (1, 0, 0)),
    ("1 000", "1,000", SINGLE, (1, 0, 0)),
    ("1990\u20131995", "1990-1995", SINGLE, (1, 0, 0)),
    ("Austria and Switzerland", "Austria, Switzerland", SET, (2, 0, 0)),
    ("Italy, Austria & Switzerland", "Austria, Switzerland, Italy", SET, (3, 0, 0)),
    ("Cuba and Trinidad and Tobago", "Trinidad and Tobago, Cuba", SET, (2, 0, 0)),
    ("Simon and Garfunkel", "Simon and Garfunkel", SINGLE, (1, 0, 0)),
    ("Simon and Garfunkel", "Simon", SINGLE, (1, 0, 1)),
    ("1. Austria\n2. Switzerland", "Austria, Switzerland", SET, (2, 0, 0)),
    ("1) Austria, 2) Switzerland", "Austria, Switzerland", SET, (2, 0, 0)),
    ("1. Austria 2. Switzerland", "Austria, Switzerland", SET, (2, 0, 0)),
    ("(a) Austria; (b) Switzerland", "Austria, Switzerland", SET, (2, 0, 0)),
    ("- Austria\n\u2022 Switzerland", "Austria, Switzerland", SET, (2, 0, 0)),
    ("1. Austria; 2. Switzerland and 3. Italy", "Italy, Austria, Switzerland", SET, (3, 0, 0)),
    ("1.Austria 2.Switzerland", "Austria, Switzerland", SET, (2, 0, 0)),
    ("1. FC Union", "1. FC Union", SINGLE, (1, 0, 0)),
    ("FC Union, 2. Bundesliga", "2. Bundesliga, FC Union", SET, (2, 0, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "expected", "kind", "counts"), EXACT)
def test_answers_are_compared_without_a_judge(answer: str, expected: str, kind: str, counts: tuple[int, ...]) -> None:
    assert compare(answer, expected, kind) == Counts(*counts)
