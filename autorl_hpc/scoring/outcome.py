"""What a scorer is: items and a model's answers in, an outcome from 0 to 1 for each item out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

Fact = float | int | str | bool


@dataclass(frozen=True)
class Outcome:
    """Of one item.

    Attributes:
        value: 0 to 1.
        facts: numbers and short words that the statistics need; they go into the items file, so no texts and no gold.
    """

    value: float
    facts: Mapping[str, Fact] = field(default_factory=dict)


class ItemLike(Protocol):
    """A held-out item as scorers see it: `tasks.heldout.Item`."""

    @property
    def id(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def answer(self) -> str: ...
    @property
    def data(self) -> dict[str, Any]: ...


class Judge(Protocol):
    """A judge model. `ask` answers all conversations, in order; see scoring/judges.py for the one over HTTP.

    Raises:
        JudgeFailed: after retries; never a loss or a win.
    """

    @property
    def model(self) -> str: ...

    def ask(
        self, conversations: Sequence[Sequence[Mapping[str, str]]], *, max_tokens: int, logprobs: int = 0
    ) -> list[Verdict]: ...

    def forget(self, verdicts: Sequence[Verdict]) -> None:
        """These could not be read: the next evaluation asks anew, whatever is kept of what was asked before."""
        ...


@dataclass(frozen=True)
class Verdict:
    """A judge's answer.

    Attributes:
        text: what it said.
        logprobs: of the first token, the log probabilities of the likeliest tokens by their text, where asked for.
        refused: why it would not answer this conversation (too long, filtered); then there is no text.
        cut_off: its limit of tokens ended it.
        key: by which the judge knows it again.
    """

    text: str
    logprobs: Mapping[str, float] = field(default_factory=dict)
    refused: str = ""
    cut_off: bool = False
    key: str = field(default="", compare=False)


UNREAD_SHARE: Final = 0.01
"""Of the items, that may stay without a readable word of the judge. An adversarial answer can confuse a judge for good: were
none allowed, one such item would keep its run from ever being scored."""


class JudgeFailed(Exception):
    """The judge could not be asked, or its answers make no sense: the grader's fault, to be tried again."""


@dataclass(frozen=True)
class Context:
    """What a scorer may use besides items and answers.

    Attributes:
        options: those of the recipe.
        workers: processes or threads that it may use at once.
        seed: of the run.
        judge: where the recipe asks for one.
        judge_mode: the recipe's field `judge`.
        judge_prompt: text of the file that the recipe's option `judge_prompt` names.
    """

    options: Mapping[str, Fact] = field(default_factory=dict)
    workers: int = 2
    seed: int = 0
    judge: Judge | None = None
    judge_mode: str = "none"
    judge_prompt: str = ""


class Scorer(Protocol):
    """Scores all answers of one split at once, so that programs run and judges are asked in parallel.

    `version`: any change that can change one verdict is a new version.
    """

    @property
    def version(self) -> str: ...

    def score(self, items: Sequence[ItemLike], answers: Sequence[Sequence[str]], context: Context) -> list[Outcome]:
        """One outcome an item, in order. `answers` holds the recipe's number of samples for each item."""
        ...

    def metrics(self, items: Sequence[ItemLike], outcomes: Sequence[Outcome]) -> dict[str, float]:
        """Figures over all items. `score`, 0 to 100, stands in the place of 100 x the mean outcome, where it is given, and
        `standard_error` beside it, in points."""
        ...


@runtime_checkable
class Clocked(Protocol):
    """A scorer whose calls have a limit each, which follows from the recipe."""

    def longest_s(self, calls: int, context: Context) -> float:
        """How long it may take to rate so many answers, if each takes all the time that it has."""
        ...


@dataclass(frozen=True)
class ByItem:
    """A scorer that looks at one answer of one item at a time; of several samples the mean counts."""

    version: str
    judge_one: Callable[[str, str], float]

    def score(self, items: Sequence[ItemLike], answers: Sequence[Sequence[str]], context: Context) -> list[Outcome]:
        """See the Protocol."""
        return [
            Outcome(sum(self.judge_one(text, item.answer) for text in texts) / len(texts))
            for item, texts in zip(items, answers, strict=True)
        ]

    def metrics(self, items: Sequence[ItemLike], outcomes: Sequence[Outcome]) -> dict[str, float]:
        """None beside the mean."""
        return {}
