"""DeepSearchQA's scorers: which of the expected items an answer gives, and what it gives beside them.

`deepsearchqa` asks a judge, as the benchmark does; `deepsearchqa-exact` compares normalised texts and needs none. They are
different yardsticks: a score of one says nothing about the other.

An item's outcome is 1 if it is fully correct: everything expected, nothing else. So an outcome is a yes or no, which the exact
paired test needs. The benchmark's paper reports F1 first and fully correct beside it; all its figures are metrics here.

Source: the starter code of google/deepsearchqa (arXiv 2601.20975, section 3).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from autorl_hpc.rollouts.search.matching import SET, SINGLE, Counts, compare
from autorl_hpc.scoring.deepsearch_verdict import Reading, Unreadable, read, read_official
from autorl_hpc.scoring.outcome import UNREAD_SHARE, Context, Fact, ItemLike, JudgeFailed, Outcome, Verdict
from autorl_hpc.scoring.thinking import without_closed_thinking

VERSION = "2"

OFFICIAL = "official"
"""Value of the recipe's option `judge_rule`: asked once, read by the official rule, unreadable counts as nothing found."""
ROUNDS: Final = 3
"""How often a judge is asked until its words can be read. A judge that failed thrice fails for a reason."""
JUDGE_TOKENS: Final = 2048
"""Of a verdict: some items have fifty expected answers. The option `judge_max_tokens` is another limit."""
REMINDERS: Final = (
    "",
    "\n\nReply with the JSON object alone.",
    "\n\nYour last reply could not be read. Reply with the JSON object alone: no text around it, every quotation mark inside a "
    "string escaped.",
)
_FIELD = re.compile(r"\{\{|\}\}|\{(question|prompt_type|correct_answer|response|mark)\}")


class Answered(NamedTuple):
    """What an episode ended with.

    Attributes:
        text: the answer, "" where there is none.
        steps: actions, 1 for an answer without an episode.
    """

    text: str
    steps: int


def answered(text: str) -> Answered:
    """The answer in an episode's outcome (scoring/episodes.py), or a plain text, which is the answer itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and isinstance(value.get("answer"), str) and "transcript_sha256" in value:
        return Answered(value["answer"].strip(), int(value.get("steps", 0)))
    return Answered(without_closed_thinking(text).strip(), 1)


class DeepSearchQA:
    """Asks a judge about each answer. An empty answer needs no judge: it gives nothing of what was expected."""

    version = VERSION

    def score(self, items: Sequence[ItemLike], answers: Sequence[Sequence[str]], context: Context) -> list[Outcome]:
        """Outcomes by the judge's verdicts; of several samples the mean.

        Raises:
            JudgeFailed: there is no judge, it can't be asked, or after some tries more than `UNREAD_SHARE` of its replies can't
                be read. Fewer are a 0 each, shown as `judge_unread`; under the option `judge_rule: official` all are, as in
                the benchmark's own code.
        """
        if context.judge is None:
            raise JudgeFailed("no judge was given")
        given = [[answered(text) for text in drawn] for drawn in answers]
        answers_given = ((place, answer.text) for place, drawn in enumerate(given) for answer in drawn)
        wanted = list(dict.fromkeys((place, text) for place, text in answers_given if text))  # each once
        questions = [_values(items[place], text) for place, text in wanted]
        found = dict(zip(wanted, _judged(questions, context), strict=True))

        def rate(place: int, answer: str) -> Counts:
            reading = found.get((place, answer))
            return reading.counts() if reading else Counts(0, max(1, _expected(items[place])), 0)

        outcomes = _outcomes(given, rate)
        for place, (outcome, drawn) in enumerate(zip(outcomes, given, strict=True)):
            readings = [found[place, answer.text] for answer in drawn if answer.text]
            sizes = [len(reading.details) for reading in readings if reading]
            facts = {
                "judge_unread": _mean([reading is None for reading in readings]),
                "items_differ": _mean([size != _expected(items[place]) for size in sizes]),
            }
            outcomes[place] = Outcome(outcome.value, {**outcome.facts, **facts})
        return outcomes

    def metrics(self, items: Sequence[ItemLike], outcomes: Sequence[Outcome]) -> dict[str, float]:
        """See `figures`; and in percent, what was taken for 0 since the judge's reply could not be read (`judge_unread`), and where
        the judge saw another number of expected items than there are commas for (`items_differ`): a judge that leaves out
        what was missed finds everything."""
        facts = [outcome.facts for outcome in outcomes]
        more = {name: 100.0 * _mean([float(each[name]) for each in facts]) for name in ("judge_unread", "items_differ")}
        return {**figures(facts), **more}


class Exact:
    """Compares texts (rollouts/search/matching.py): offline, deterministic, and blind to synonyms."""

    version = VERSION

    def score(self, items: Sequence[ItemLike], answers: Sequence[Sequence[str]], context: Context) -> list[Outcome]:
        """Outcomes by comparing sets of normalised items; of several samples the mean."""
        given = [[answered(text) for text in drawn] for drawn in answers]
        return _outcomes(given, lambda place, answer: compare(answer, items[place].answer, _type(items[place])))

    def metrics(self, items: Sequence[ItemLike], outcomes: Sequence[Outcome]) -> dict[str, float]:
        """See `figures`."""
        return figures([outcome.facts for outcome in outcomes])


def figures(facts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The benchmark's figures, each the mean over items, in percent but for `mean_steps`.

    `fully_correct`, `correct_with_excessive` and `fully_incorrect` are disjoint; what is left is partially correct.
    """
    names = ("precision", "recall", "f1", "fully_correct", "correct_with_excessive", "fully_incorrect", "answered")
    found = {name: 100.0 * _mean([float(each[name]) for each in facts]) for name in names}
    return {**found, "mean_steps": _mean([float(each["steps"]) for each in facts])}


def conversation(template: str, values: Mapping[str, str], reminder: str = "") -> list[dict[str, str]]:
    """What a judge is asked: one user's turn. Doubled braces of the template are single ones, as in `str.format`.

    Raises:
        ValueError: the template has no place for the answer or for what is expected.
    """
    fields = set(_FIELD.findall(template))
    if not {"response", "correct_answer"} <= fields:
        raise ValueError("a judge's prompt holds {correct_answer} and {response}")
    # In one pass: an answer may itself hold {correct_answer}.
    text = _FIELD.sub(lambda match: values[match[1]] if match[1] else match[0][0], template)
    return [{"role": "user", "content": text + reminder}]


def _judged(questions: Sequence[Mapping[str, str]], context: Context) -> list[Reading | None]:
    """The verdict on each, None where an unread one gives 0; see `DeepSearchQA.score`."""
    assert context.judge is not None
    official = context.options.get("judge_rule") == OFFICIAL
    limit = int(context.options.get("judge_max_tokens", JUDGE_TOKENS))
    found: dict[int, Reading | None] = {}
    why: dict[int, str] = {}
    for reminder in REMINDERS[: 1 if official else ROUNDS]:
        left = [number for number in range(len(questions)) if number not in found]
        if not left:
            break
        asked = [conversation(context.judge_prompt, questions[number], reminder) for number in left]
        unreadable = []
        for number, verdict in zip(left, context.judge.ask(asked, max_tokens=limit), strict=True):
            try:
                found[number] = _read(verdict, official)
            except Unreadable as error:
                why[number] = str(error)
            if found.get(number) is None:
                unreadable.append(verdict)
        context.judge.forget(unreadable)
    unread = [number for number in range(len(questions)) if number not in found]
    if len(unread) > UNREAD_SHARE * len(questions):
        raise JudgeFailed(
            f"{len(unread)} of {len(questions)} replies of {context.judge.model} can't be read, the first: {why[unread[0]]}"
        )
    return [found.get(number) for number in range(len(questions))]


def _read(verdict: Verdict, official: bool) -> Reading | None:
    if verdict.refused:  # also under the official rule: no reply is no verdict
        raise Unreadable(f"it would not answer: {verdict.refused}")
    if verdict.cut_off and not official:
        raise Unreadable("it is cut off by the limit of tokens")
    if not official:
        return read(verdict.text)
    try:
        return read_official(verdict.text)
    except Unreadable:
        return None


def _values(item: ItemLike, answer: str) -> dict[str, str]:
    texts = {
        "question": item.question,
        "prompt_type": _type(item),
        "correct_answer": item.answer,
        "response": answer,
    }
    clean = {name: text.encode("utf-8", "replace").decode() for name, text in texts.items()}
    # Sixteen digits that depend on the answer too: no answer can hold the line that ends it.
    mark = hashlib.sha256("\0".join(clean.values()).encode()).hexdigest()[:16]
    return {**clean, "mark": mark}


def _type(item: ItemLike) -> str:
    return SET if item.data.get("answer_type") == SET else SINGLE


def _expected(item: ItemLike) -> int:
    """How many items are expected, as far as commas tell."""
    return compare("", item.answer, _type(item)).missed


def _outcomes(given: Sequence[Sequence[Answered]], rate: Callable[[int, str], Counts]) -> list[Outcome]:
    outcomes = []
    for place, drawn in enumerate(given):
        counts = [rate(place, answer.text) for answer in drawn]
        facts: dict[str, Fact] = {
            "precision": _mean([each.precision for each in counts]),
            "recall": _mean([each.recall for each in counts]),
            "f1": _mean([each.f1 for each in counts]),
            "fully_correct": _mean([each.fully_correct for each in counts]),
            "correct_with_excessive": _mean([each.correct_with_excessive for each in counts]),
            "fully_incorrect": _mean([each.fully_incorrect for each in counts]),
            "answered": _mean([bool(answer.text) for answer in drawn]),
            "steps": _mean([answer.steps for answer in drawn]),
        }
        outcomes.append(Outcome(float(facts["fully_correct"]), facts))
    return outcomes


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
