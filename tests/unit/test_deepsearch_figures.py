"""Precision, recall and F1 of a verdict, and answers that are compared without a judge."""

from __future__ import annotations

import re

import pytest
from verdicts import WHOLE

from autorl_hpc.rollouts.search.matching import SET, SINGLE, Counts, compare

# found, missed, extra: precision, recall, F1, fully correct, correct with excessive, fully incorrect
FIGURES = [
    ((1, 0, 0), (1.0, 1.0, 1.0, True, False, False)), ((3, 0, 0), (1.0, 1.0, 1.0, True, False, False)),
    ((3, 0, 1), (0.75, 1.0, 6 / 7, False, True, False)), ((1, 0, 3), (0.25, 1.0, 0.4, False, True, False)),
    ((1, 1, 1), (0.5, 0.5, 0.5, False, False, False)), ((2, 2, 0), (1.0, 0.5, 2 / 3, False, False, False)),
    ((0, 1, 0), (0.0, 0.0, 0.0, False, False, True)), ((0, 3, 5), (0.0, 0.0, 0.0, False, False, True)),
    ((0, 0, 0), (0.0, 0.0, 0.0, False, False, True)),  # nothing was expected: a judge gave no items
]  # fmt: skip


@pytest.mark.parametrize(("counts", "expected"), FIGURES)
def test_precision_recall_and_f1(counts: tuple[int, int, int], expected: tuple[float, ...]) -> None:
    made = Counts(*counts)
    found = (
        made.precision, made.recall, made.f1, made.fully_correct, made.correct_with_excessive, made.fully_incorrect,
    )  # fmt: skip
    assert found == pytest.approx(expected)


def test_a_verdict_counts_as_the_benchmark_does() -> None:
    assert WHOLE.counts() == Counts(found=1, missed=1, extra=1)


EXACT = [
    ("New Zealand", "New Zealand", SINGLE, (1, 0, 0)), ("new zealand.", "New Zealand", SINGLE, (1, 0, 0)),
    ("the New  Zealand", "New Zealand", SINGLE, (1, 0, 0)), ("Zealand", "New Zealand", SINGLE, (0, 1, 1)),
    ("", "New Zealand", SINGLE, (0, 1, 0)),  # the reference's fallback took it for correct
    ("New", "New Zealand", SINGLE, (0, 1, 1)),  # and this
    ("New Zealand, Australia", "New Zealand", SINGLE, (1, 0, 1)),
    ("Washington, D.C.", "Washington, D.C.", SINGLE, (1, 0, 0)), ("1,234", "1234", SINGLE, (1, 0, 0)),
    ("-3.5%", "-3.5 %", SINGLE, (1, 0, 0)), ("3.5%", "-3.5%", SINGLE, (0, 1, 1)),
    ("1990-1995", "1990 - 1995", SINGLE, (1, 0, 0)),
    ("2019, 2022, 2023, 2024", "2019, 2022, 2023, 2024", SET, (4, 0, 0)),
    ("2024; 2023; 2022; 2019", "2019, 2022, 2023, 2024", SET, (4, 0, 0)),
    ("Austria, Singapore", "Austria, Switzerland, Singapore", SET, (2, 1, 0)),
    ("Austria, Switzerland, and Singapore", "Austria, Switzerland, Singapore", SET, (3, 0, 0)),
    ("Austria\nSwitzerland\nSingapore\nItaly", "Austria, Switzerland, Singapore", SET, (3, 0, 1)),
    ("Austria, Austria", "Austria, Switzerland, Singapore", SET, (1, 2, 0)),
    (", ;\n", "Austria, Switzerland", SET, (0, 2, 0)), ("Potosi\u0301", "Potosí", SINGLE, (1, 0, 0)),
    ("\uff21\uff22\uff23", "abc", SINGLE, (1, 0, 0)), ("C#", "C++", SINGLE, (0, 1, 1)),
    ("c++", "C++", SINGLE, (1, 0, 0)), ("$5", "€5", SINGLE, (0, 1, 1)), ("\uff045", "$5.", SINGLE, (1, 0, 0)),
    ("?", "$", SINGLE, (0, 1, 0)), ("?", "!", SINGLE, (0, 1, 0)), ("!", "!", SINGLE, (1, 0, 0)),
    ("?; *", "*, ?", SET, (2, 0, 0)), ("Austria, ...", "Austria", SINGLE, (1, 0, 0)), ("", "", SINGLE, (0, 0, 0)),
    ("\u22125", "5", SINGLE, (0, 1, 1)), ("5", "\u22125", SINGLE, (0, 1, 1)), ("\u2212 5", "-5", SINGLE, (1, 0, 0)),
    ("minus 5", "-5", SINGLE, (1, 0, 0)), ("minus 5", "5", SINGLE, (0, 1, 1)),
    ("-5", "\uff0d\uff15", SINGLE, (1, 0, 0)), ("1\u2009234\u2009567", "1,234,567", SINGLE, (1, 0, 0)),
    ("1\u202f000 km", "1000 km", SINGLE, (1, 0, 0)), ("1 000", "1,000", SINGLE, (1, 0, 0)),
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


# What differs by its sign alone, wherever the sign stands; and what is the same number or name.
DIFFERENT = [
    *[("-$5", "$5"), ("$-5", "$5"), ("-.5", ".5"), ("-5%", "5%"), ("-5kg", "5kg"), ("-5°C", "5°C"), ("-US$5", "US$5")],
    *[("-USD 5", "USD 5"), ("-Rs. 5", "Rs. 5"), ("minus ₹5", "₹5"), ("\u2212€5", "€5"), ("\u2013$5", "$5"), ("-½", "½")],
    *[("-\uff045", "$5"), ("-5$", "5$"), ("(-5)", "5"), ("-1,000", "1,000"), ("fell by -$5", "fell by $5")],
    *[("10²", "102"), ("3½", "31/2"), ("Python 3.10", "Python 3.1"), ("1.2.3", "1.23")],
    *[("10⁻⁵", "10-5"), ("10⁻⁵", "105"), ("10⁻⁵", "10⁵"), ("10⁻¹²", "10⁻²")],
    *[("<5", "5"), ("±5", "5"), ("≥5", "5"), (">5", "<5"), ("5‰", "5%")],
]  # fmt: skip
SAME = [
    *[("-$5", "$-5"), ("-$5", "minus $5"), (".5", "0.5"), ("-.5", "-0.50"), ("5.0", "5"), ("$5.00", "$5"), ("2.50", "2.5")],
    *[("-5kg", "-5 kg"), ("+5%", "5%"), ("½", "1/2"), ("B-52", "B 52"), ("$5 - $10", "$5-$10"), ("5%-10%", "5% - 10%")],
    *[("Simon & Garfunkel", "Simon and Garfunkel"), ("Simon\uff06Garfunkel", "Simon and Garfunkel"), ("C++11", "C++ 11")],
    *[("10⁻⁵", "10^-5"), ("10⁻⁵", "10^{-5}"), ("10²", "10^2"), ("1.5\xd710⁻⁵", "1.5 x 10^-5"), ("5 m s⁻¹", "5 m s^-1")],
    *[("km²", "km^2"), ("km²", "km2"), ("H₂O", "H2O")],
    *[("\uff15\uff0e\uff10", "5"), ("1,000.0", "1000"), ("-1 000", "-1000"), ("\u2212US$5", "-US$5")],
]  # fmt: skip


def test_a_sign_is_kept_wherever_it_stands_and_one_number_is_one_answer() -> None:
    told = [(pair, Counts(0, 1, 1)) for pair in DIFFERENT] + [(pair, Counts(1, 0, 0)) for pair in SAME]
    wrong = [pair for (a, b), counts in told for pair in ((a, b), (b, a)) if compare(*pair, SINGLE) != counts]
    assert not wrong


LISTS = """• A • B • C|•A•B•C|- A - B - C|* A * B * C|+ A\n+ B\n+ C|\u2014 A\n\u2014 B\n\u2014 C|\u2013 A\n\u2013 B\n\u2013 C
|\u25e6 A\n\u25e6 B\n\u25e6 C|▪ A ▪ B ▪ C|→ A\n→ B\n→ C|・ A\n・ B\n・ C|# A\n# B\n# C|A \u00b7 B \u00b7 C|A • B • C|- **A**\n- **B**\n- **C**
|① A ② B ③ C|①A②B③C|❶ A\n❷ B\n❸ C|⑴A ⑵B ⑶C|⒈A ⒉B ⒊C|⒜ A ⒝ B ⒞ C|1\ufe0f\u20e3 A 2\ufe0f\u20e3 B 3\ufe0f\u20e3 C|① A, ② B and ③ C
|a) A b) B c) C|(i) A (ii) B (iii) C|i. A ii. B iii. C|[1] A [2] B [3] C|**1.** A\n**2.** B\n**3.** C|\uff11\uff0eA \uff12\uff0eB \uff13\uff0eC
|1: A\n2: B\n3: C|1 - A\n2 - B\n3 - C|\uff11、A \uff12、B \uff13、C|A,B,C|A. A\nB. B\nC. C|A. A B. B C. C|A: A\nB: B\nC: C|I. A\nII. B\nIII. C|I. A, II. B, III. C|#1 A\n#2 B\n#3 C|#1. A #2. B #3. C
|#1: A, #2: B, #3: C|**A.** A\n**B.** B\n**C.** C|A. A; B. B; and C. C|A) A B) B C) C|A\uff06B\uff06C|A \uff06 B, C|A, B, & C|A、B、C|A\uff1bB\uff1bC|A and B & C"""
OTHERS = [
    *[("5, .5, -5", "-5, 0.5, 5.0", (3, 0, 0)), ("1. -5\n2. .5", "-5, 0.5", (2, 0, 0)), ("-5\n-.5", "-5, -0.5", (2, 0, 0))],
    *[("5、7", "5, 7", (2, 0, 0)), ("① 5 ② 7", "5, 7", (2, 0, 0)), ("- 5\n- 7", "5, 7", (2, 0, 0)), ("5 and -5", "-5, 5", (2, 0, 0))],
    *[("12,15", "12, 15", (2, 0, 0)), ("1999,2001,2003", "1999, 2001, 2003", (3, 0, 0)), ("100,200,300", "100, 200, 300", (3, 0, 0))],
    *[("1,234", "1234", (1, 0, 0)), ("100,200,300", "100200300", (1, 0, 0)), ("U2,10cc", "U2, 10cc", (2, 0, 0)), ("12,15 and 7", "7, 12, 15", (3, 0, 0))],
    *[("A. Einstein, B. Podolsky", "A. Einstein, B. Podolsky", (2, 0, 0)), ("J. R. Smith, Bob", "J. R. Smith, Bob", (2, 0, 0))],
    *[("C. elegans, E. coli", "C. elegans, E. coli", (2, 0, 0)), ("#1 Crush", "#1 Crush", (1, 0, 0)), ("I, Robot", "I, Robot", (2, 0, 0))],
    *[("Henry V, Henry VI", "Henry V, Henry VI", (2, 0, 0)), ("Vitamin C, Vitamin D", "Vitamin C, Vitamin D", (2, 0, 0))],
    *[("AT&T and Verizon", "AT&T, Verizon", (2, 0, 0)), ("J. Smith", "Smith", (0, 1, 1)), ("Jean-Luc - Marie", "Marie", (0, 1, 1))],
    ("レオナルド・ダ・ヴィンチ", "レオナルド・ダ・ヴィンチ", (1, 0, 0)),
]  # fmt: skip


def test_lists_are_read_with_any_bullet_number_and_joint() -> None:
    names = {"A": "Austria", "B": "Switzerland", "C": "Italy"}
    for text in LISTS.replace("\n|", "|").split("|"):
        answer = re.sub(r"[ABC](?![.):])", lambda name: names[name[0]], text)
        assert compare(answer, "Italy, Austria, Switzerland", SET) == Counts(3, 0, 0), answer
    for answer, expected, counts in OTHERS:
        assert compare(answer, expected, SET) == Counts(*counts), answer


@pytest.mark.parametrize(("answer", "expected", "kind", "counts"), EXACT)
def test_answers_are_compared_without_a_judge(answer: str, expected: str, kind: str, counts: tuple[int, ...]) -> None:
    assert compare(answer, expected, kind) == Counts(*counts)
