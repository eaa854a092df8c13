"""Scorer `alpacaeval` (AlpacaEval 2.0): a judge compares answers with references; the score is the length-controlled win rate.
Source: tatsu-lab/alpaca_eval @ cd543a14 (Apache-2.0): annotators/pairwise_evaluator.py, metrics/winrate.py, glm_winrate.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from typing import Any, Final

from autorl_hpc.scoring import length_control, stats
from autorl_hpc.scoring.gsm8k import without_closed_thinking
from autorl_hpc.scoring.judge_cache import (
    FIRST,
    SECOND,
    JudgedPairText,
    conversation,
    is_swapped,
    read_discrete,
    read_logprobs,
)
from autorl_hpc.scoring.length_control import JudgedPair
from autorl_hpc.scoring.outcome import UNREAD_SHARE, Context, Fact, ItemLike, JudgeFailed, Outcome, Verdict

TOP_LOGPROBS: Final = 5  # As in the official judge; every endpoint supports this many
DISCRETE_TOKENS: Final = 8  # Room for one character and what a chatty judge adds
UNREAD: Final = 0.5  # Outcome of an item that stayed unread. It has no fact `y` and enters neither win rate.


class AlpacaEval:
    """Implements `Scorer`; see outcome.py."""

    version = "1"

    def score(self, items: Sequence[ItemLike], answers: Sequence[Sequence[str]], context: Context) -> list[Outcome]:
        """Return the preferences for the answers over the references. Raises JudgeFailed: the judge can't be reached, or too
        many replies are unreadable; ValueError: the recipe draws several answers per item."""
        if context.judge is None:
            raise JudgeFailed("no judge was given")
        if any(len(drawn) != 1 for drawn in answers):
            raise ValueError("AlpacaEval judges one answer an item: the recipe's `samples` must be 1")
        texts = [without_closed_thinking(drawn[0]) for drawn in answers]
        seed = int(context.options.get("order_seed", 0))
        pairs = [
            JudgedPairText(item.question, item.answer, text, is_swapped(item.question, seed))
            for item, text in zip(items, texts, strict=True)
        ]
        read = self._preferences(pairs, context)
        return [
            Outcome(UNREAD, _facts(item, text)) if y is None else Outcome(y, {**_facts(item, text), "y": y})
            for item, text, y in zip(items, texts, read, strict=True)
        ]

    def _preferences(self, pairs: Sequence[JudgedPairText], context: Context) -> list[float | None]:
        assert context.judge is not None
        found: list[float | None] = [None] * len(pairs)
        replies: dict[int, Verdict] = {}
        weighted = context.judge_mode == "logprob"
        names = (FIRST[1], SECOND[1]) if weighted else (FIRST[0], SECOND[0])
        for swap, remind in ((False, None), (True, None), (False, names)):
            left = [number for number, y in enumerate(found) if y is None]
            if not left:
                break
            shown = [pairs[number]._replace(swapped=pairs[number].swapped != swap) for number in left]
            asked = [conversation(context.judge_prompt, pair, remind=remind) for pair in shown]
            verdicts = context.judge.ask(
                asked, max_tokens=1 if weighted else DISCRETE_TOKENS, logprobs=TOP_LOGPROBS if weighted else 0
            )
            for number, pair, verdict in zip(left, shown, verdicts, strict=True):
                read = read_logprobs if weighted else read_discrete
                found[number] = read(verdict, swapped=pair.swapped)
                replies[number] = verdict
            context.judge.forget([replies[number] for number in left if found[number] is None])
        unread = [number for number, y in enumerate(found) if y is None]
        if len(unread) > UNREAD_SHARE * len(pairs):
            first = replies[unread[0]]
            said = first.refused or (
                f"its likeliest tokens are {sorted(first.logprobs)}" if weighted else first.text[:80]
            )
            raise JudgeFailed(
                f"{len(unread)} of {len(pairs)} replies of {context.judge.model} can't be read, the first: {said!r}"
            )
        return found

    def metrics(self, items: Sequence[ItemLike], outcomes: Sequence[Outcome]) -> dict[str, float]:
        """Return both win rates over the readable items; see `figures` and `standard_error`."""
        facts = [outcome.facts for outcome in outcomes]
        found = figures(facts)
        return {**found, "standard_error": standard_error(facts, found["lc_c"])}


def figures(facts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return all figures of items from their facts, of one split or several: `score` and `lc_win_rate` (the same), `win_rate`,
    `lc_c` (the penalty), `average_length` of the answers in characters, `judge_unread`."""
    pairs = pairs_of(facts)
    fit = length_control.length_controlled(pairs)
    rates = {"score": fit.score, "lc_win_rate": fit.score, "lc_c": fit.c}
    rates["win_rate"] = length_control.win_rate([pair.y for pair in pairs])
    length = math.fsum(float(each["len_2"]) for each in facts) / len(facts)
    return {**rates, "average_length": length, "judge_unread": float(len(facts) - len(pairs))}


def standard_error(facts: Sequence[Mapping[str, Any]], c: float) -> float:
    """Return the standard error of the length-controlled win rate, in points, at the penalty `c`. See
    `length_control.influences`. If all preferences are equal it would be 0; then the mean's error is returned."""
    pairs = pairs_of(facts)
    error = math.sqrt(float((length_control.influences(pairs, c) ** 2).sum()))
    return error or 100.0 * (stats.standard_error([pair.y for pair in pairs]) or 0.0)


def pairs_of(facts: Sequence[Mapping[str, Any]]) -> list[JudgedPair]:
    """Return the judged pairs from the facts in an items file, without unread ones. ValueError for another scorer's facts."""
    found = []
    try:
        for each in facts:
            if "y" in each:
                names = takewhile(each.__contains__, (f"gamed_{number}_y" for number in count()))
                gamed = tuple((float(each[f"{name[:-2]}_delta"]), float(each[name])) for name in names)
                y, len_1, len_2 = (float(each[name]) for name in ("y", "len_1", "len_2"))
                found.append(JudgedPair(y, len_1, len_2, float(each.get("difficulty", 0.0)), gamed))
        return found
    except (KeyError, TypeError) as error:
        raise ValueError(f"these are no facts of a judged pair: {error}") from None


def _facts(item: ItemLike, text: str) -> dict[str, Fact]:
    facts: dict[str, Fact] = {"len_1": len(item.answer), "len_2": len(text)}
    if "difficulty" in item.data:
        facts["difficulty"] = float(item.data["difficulty"])
    for number, (delta, y) in enumerate(item.data.get("gamed", ())):
        facts |= {f"gamed_{number}_delta": float(delta), f"gamed_{number}_y": float(y)}
    return facts
