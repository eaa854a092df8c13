"""The length-controlled win rate: the published leaderboard, awkward inputs, refits, and the report's comparison."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import annotations
import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'autorl-hpc[alpacaeval]'")

from autorl_hpc.records.entries import Evaluation  # noqa: E402
from autorl_hpc.report.run_folder import Items, Unusable  # noqa: E402
from autorl_hpc.report.scores import PairedItems as ItemsPair  # noqa: E402
from autorl_hpc.report.scores import gain, interval, on_all_items, optimism  # noqa: E402
from autorl_hpc.scoring import length_control  # noqa: E402
from autorl_hpc.scoring.length_control import JudgedPair, length_controlled, refits, win_rate  # noqa: E402


@pytest.mark.parametrize("model", annotations.COMPLETE)
def test_the_published_leaderboard(data: Path, model: str) -> None:
    pairs = annotations.pairs(data, model)
    published = annotations.leaderboard(data)[model]
    assert len(pairs) == 805
    assert round(win_rate([pair.y for pair in pairs]), 2) == round(float(published["win_rate"]), 2)
    fit = length_controlled(pairs)
    assert abs(fit.score - float(published["length_controlled_winrate"])) < 0.2
    assert fit.c in length_control.STRENGTHS
    # Newton's method beside liblinear, whose tolerance leaves about a hundredth of a point.
    assert abs(refits(pairs, fit.c, np.ones((1, 805)))[0] - fit.score) < 0.02


# --- awkward inputs ---


def some(n: int, seed: int = 0) -> list[JudgedPair]:
    """Pairs of a judge that likes length and chance."""
    rng = random.Random(seed)
    made = []
    for _ in range(n):
        len_1, len_2 = rng.randint(100, 2000), rng.randint(100, 2000)
        made.append(JudgedPair(float(rng.random() < 1 / (1 + math.exp((len_1 - len_2) / 600))), len_1, len_2))
    return made


@pytest.mark.parametrize(("y", "score"), [(1.0, 100.0), (0.0, 0.0)])
@pytest.mark.parametrize("n", [1, 2, 30, 805])
def test_preferences_that_are_all_alike_need_no_fit(y: float, score: float, n: int) -> None:
    pairs = [JudgedPair(y, 100, 7 * number, 0.3, ((-1.0, 0.6),)) for number in range(n)]
    assert length_controlled(pairs).score == score
    assert refits(pairs, 1.0, np.ones((2, n))).tolist() == [score, score]


@pytest.mark.parametrize(
    "pair",
    [
        JudgedPair(math.nan, 1, 2), JudgedPair(0.5, math.nan, 2), JudgedPair(0.5, 1, math.inf),
        JudgedPair(0.5, 1, 2, math.nan), JudgedPair(0.5, 1, 2, 0.0, ((math.nan, 0.5),)), JudgedPair(1.5, 1, 2),
        JudgedPair(-0.1, 1, 2), JudgedPair(0.5, 1, 2, 0.0, ((0.0, 2.0),)),
    ],
)  # fmt: skip
def test_what_is_no_number_is_refused(pair: JudgedPair) -> None:
    with pytest.raises(ValueError, match=r"not finite|not from 0 to 1"):
        length_controlled([*some(40), pair])


# --- refits ---


def test_a_refit_is_the_fit_of_the_drawn_pairs() -> None:
    pairs = [pair._replace(gamed=((-1.0, 0.7), (1.0, 0.2)), difficulty=pair.len_1 / 1000) for pair in some(300)]
    drawn = np.random.default_rng(3).integers(0, 300, size=(5, 300))
    counts = np.stack([np.bincount(each, minlength=300) for each in drawn])
    found = refits(pairs, 3.0, counts)
    # Not to the last digit: the scale of the length difference is that of all pairs in the one, of the drawn ones in the other.
    direct = [length_controlled([pairs[place] for place in each], 3.0).score for each in drawn]
    assert found == pytest.approx(direct, abs=0.3)
    assert found.std() > 1.0


# --- selected against base ---


def items_of(pairs: Sequence[JudgedPair], c: float | None) -> Items:
    """As an items file gives them."""
    facts = [
        {"y": p.y, "len_1": p.len_1, "len_2": p.len_2, "difficulty": p.difficulty}
        | {
            f"gamed_{n}_{name}": value
            for n, row in enumerate(p.gamed)
            for name, value in zip(("delta", "y"), row, strict=True)
        }
        for p in pairs
    ]
    return Items(tuple(str(n) for n in range(len(pairs))), tuple(p.y for p in pairs), 0.1, facts=tuple(facts), lc_c=c)


def test_the_report_compares_length_controlled_win_rates(data: Path) -> None:
    base, new = (annotations.pairs(data, model) for model in ("vicuna-7b-v1.5", "FuseChat-Llama-3.2-1B-Instruct"))
    feedback, report = (
        ItemsPair(items_of(base[part], 21.5), items_of(new[part], 2.8)) for part in (slice(205), slice(205, 505))
    )
    found = gain(report)
    assert found.how == "length_controlled_items" and found.n == 300
    fitted = [length_controlled(pairs[205:505], c).score for pairs, c in ((base, 21.5), (new, 2.8))]
    assert found.difference == pytest.approx(fitted[1] - fitted[0], abs=0.05)
    assert found.low is not None and found.high is not None and 5 < found.low < found.difference < found.high < 40
    gap = optimism(feedback, report)
    assert gap is not None and abs(gap.gap) < 3 * gap.standard_error and 1 < gap.standard_error < 8
    scored = Evaluation.model_construct(score=fitted[1], n=300, clusters=None, correct=None)
    low, high, _ = interval(scored, report.new)
    assert low is not None and high is not None and 1 < (high - low) / 2 < 8
    note = on_all_items(feedback.new, report.new)
    whole = length_controlled(new[:505], 2.8).score
    assert note is not None and note.startswith(f"secondary: {whole:.1f} on all 505 items")
    plain = items_of(new[:205], None)
    assert gain(ItemsPair(plain, plain)).how == "graded_items" and on_all_items(plain, plain) is None


def test_items_that_were_not_judged_for_both_are_left_out() -> None:
    base, new = items_of(some(40), 1.0), items_of(some(40, seed=0), 1.0)
    new.facts[3].pop("y")  # type: ignore[attr-defined]
    assert gain(ItemsPair(base, new)).difference == 0.0
    for facts in new.facts[1:]:
        facts.pop("y", None)  # type: ignore[attr-defined]
    with pytest.raises(Unusable, match="fewer than two items"):
        gain(ItemsPair(base, new))


def test_805_pairs_take_seconds_and_not_minutes(data: Path) -> None:
    pairs = annotations.pairs(data, "gemma-2b-it")
    started = time.process_time()
    length_controlled(pairs)
    assert time.process_time() - started < 20.0  # 2 s on a quiet core
