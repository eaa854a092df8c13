"""Statistics over runs, and text made harmless."""

from __future__ import annotations

import pytest

from autorl_hpc.report import statistics as st
from autorl_hpc.report.format import clean, csv_cell, markdown
from autorl_hpc.report.scores import paired_graded
from autorl_hpc.scoring.stats import tango


def p_of(a: list[float], b: list[float]) -> float:
    return st.regrouping_p(a, b)


def test_permutation_exact() -> None:
    assert p_of([1, 2, 3], [4, 5, 6]) == pytest.approx(2 / 20)
    assert p_of([1, 2], [1, 2]) == 1
    assert p_of([0.1 + 0.2, 0.3], [0.3, 0.3]) == 1  # equal but for rounding
    with pytest.raises(ValueError):
        p_of([], [1])


@pytest.mark.parametrize("scale", [1, 1 / 82, 100 / 82, 100 / 1319])
@pytest.mark.parametrize("digits", [4, 15])
def test_rounding_breaks_no_tie(scale: float, digits: int) -> None:
    """Right values from whole numbers, of exact and sampled tests; (5, -2, -3, 5, 7) of 82 with four decimals gave 0.25."""
    flips = {(5, -2, -3, 5, 7): 0.375, (1, 2, 3): 0.25, (3, -1, -2, 6): 0.625, (9, 1, -4, 4, 6, -2): 0.34375}
    for values, p in flips.items():
        assert st.sign_flip_p([round(scale * value, digits) for value in values]) == p, values
    sides = (((5, -2, -3), (5, 7, 7)), 0.2), (((0, 1, 4), (1, 2, 9)), 0.6)
    for (a, b), p in sides:
        found = p_of(*([round(scale * value, digits) for value in side] for side in (a, b)))
        assert found == pytest.approx(p), (a, b)
    many, other = (
        [5.0, -2.0, -3.0, 5.0, 7.0, 1.0, -4.0, 2.0, 3.0] * 2,
        [7.0, 2.0, 3.0, 9.0, 5.0, 8.0, 0.0, 4.0, 5.0] * 2,
    )
    rounded, also = ([round(scale * value, digits) for value in values] for values in (many, other))
    assert st.sign_flip_p(rounded) == st.sign_flip_p(many)
    assert p_of(rounded, also) == p_of(many, other)


def test_a_sampled_p_value_is_never_0() -> None:
    """No drawn regrouping is as far apart as two sides that do not overlap; the one that was seen counts all the same."""
    low, high = [float(i) for i in range(12)], [1000.0 + i for i in range(12)]
    assert p_of(low, high) == pytest.approx(1 / 10_001)


def test_probability_of_improvement_and_holm() -> None:
    assert st.probability_of_improvement([2, 3], [1, 2]) == pytest.approx(3.5 / 4)
    assert st.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert st.holm([]) == []


def test_items_that_all_changed_alike_have_tangos_interval() -> None:
    copy = paired_graded([0.3] * 80, [0.3] * 80)
    assert (copy.difference, copy.p_value) == (0, 1) and (copy.low, copy.high) == pytest.approx(tango(0, 0, 80))
    with pytest.raises(ValueError):
        paired_graded([1.0], [1.0])


CLEAN: list[tuple[str | None, str | None]] = [
    (None, None),
    ("plain", "plain"),
    ("\x1b[1;31mred\x1b[0m", "red"),
    ("\x1b]8;;http://x\x07link\x1b]8;;\x1b\\", "link"),
    ("\x9b31mred", "red"),
    ("\x1bPq#0\x1b\\after", "after"),
    ("a\nb\r\tc\x00d", "a b c d"),
    ("x\u202ey\u200bz\u2066", "xyz"),
    ("lone \ud800 surrogate", "lone surrogate"),
    ("\x1b", ""),
    ("größer 数学", "größer 数学"),
    ("x" * 600, "x" * 499 + "…"),
]


def test_clean() -> None:
    for given, kept in CLEAN:
        assert clean(given) == kept


def test_markdown_and_csv() -> None:
    assert markdown("# a|b_c") == r"\# a\|b\_c"
    assert markdown("- x") == r"\- x" and markdown("1. x") == "1&#8203;. x" and markdown("a-b") == "a-b"
    assert markdown("<b>&") == "&lt;b&gt;&amp;" and "://" not in markdown("https://evil")
    assert csv_cell("=1+1") == "'=1+1" and csv_cell("-x") == "'-x" and csv_cell(-1.5) == -1.5
    assert (csv_cell(None), csv_cell(True), csv_cell("\x1b[0m=x")) == ("", "yes", "'=x")
