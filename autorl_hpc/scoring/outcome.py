"""Interfaces of scorers and judges: items and a model's answers in, one outcome from 0 to 1 per item out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

Fact = float | int | str | bool


@dataclass(frozen=True)
class Outcome:
    """The outcome of one item, from 0 to 1 (None: a judge or metric failed on it, which counts neither way), with facts for the
    statistics. They go into the items file, so no texts and no gold answers."""

    value: float | None
    facts: Mapping[str, Fact] = field(default_factory=dict)


class ItemLike(Protocol):
    """A held-out item as scorers see it (`tasks.heldout.Item`)."""

    @property
    def id(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def answer(self) -> str: ...
    @property
    def data(self) -> dict[str, Any]: ...


class Judge(Protocol):
    """A judge model. `ask` answers all conversations in order, or raises JudgeFailed after retries."""

    @property
    def model(self) -> str: ...

    def ask(
        self, conversations: Sequence[Sequence[Mapping[str, str]]], *, max_tokens: int, logprobs: int = 0
    ) -> list[Verdict]: ...

    def forget(self, verdicts: Sequence[Verdict]) -> None:
        """Drop cached replies of these unreadable verdicts, so that the next evaluation asks again."""


@dataclass(frozen=True)
class Verdict:
    """A judge's reply."""

    text: str
    logprobs: Mapping[str, float] = field(default_factory=dict)  # of the first token's likeliest candidates
    refused: str = ""  # why this conversation was refused (too long, filtered); then there is no text
    cut_off: bool = False  # by the token limit
    key: str = field(default="", compare=False)  # in the judge's cache


UNREAD_SHARE: Final = 0.01
"""Share of items that may stay without a readable reply. An adversarial answer can confuse a judge for good; if none were
allowed, one such item would keep its run from ever being scored."""


class JudgeFailed(Exception):
    """The judge could not be reached or its replies make no sense. The grader is at fault; the evaluation is tried again."""


@dataclass(frozen=True)
class Context:
    """What a scorer may use besides items and answers."""

    options: Mapping[str, Fact] = field(default_factory=dict)  # the recipe's
    workers: int = 2  # parallel processes or threads at most
    seed: int = 0  # the run's
    judge: Judge | None = None  # set if the recipe needs one
    judge_mode: str = "none"  # the recipe's field `judge`
    judge_prompt: str = ""  # text of the file in the recipe's option `judge_prompt`


class Scorer(Protocol):
    """Scores all answers of one split at once, so that programs and judge requests run in parallel. `version`: any change that
    can change a verdict needs a new version."""

    @property
    def version(self) -> str: ...

    def score(self, items: Sequence[ItemLike], answers: Sequence[Sequence[str]], context: Context) -> list[Outcome]:
        """Return one outcome per item, in order. `answers` holds the recipe's number of samples per item."""

    def metrics(self, items: Sequence[ItemLike], outcomes: Sequence[Outcome]) -> dict[str, float]:
        """Return figures over all items. `score` (0 to 100) replaces 100 x the mean outcome, and `standard_error` (points) its
        standard error, if present."""


@runtime_checkable
class Clocked(Protocol):
    """A scorer whose single calls have time limits that follow from the recipe."""

    def longest_s(self, calls: int, context: Context) -> float:
        """Return the seconds that this many ratings may take if each uses its full limit."""


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 for no values."""
    return sum(values) / len(values) if values else 0.0


@dataclass(frozen=True)
class ByItem:
    """A scorer that rates one answer of one item at a time; the mean of several samples counts."""

    version: str
    judge_one: Callable[[str, str], float]

    def score(self, items: Sequence[ItemLike], answers: Sequence[Sequence[str]], context: Context) -> list[Outcome]:
        return [
            Outcome(sum(self.judge_one(text, item.answer) for text in texts) / len(texts))
            for item, texts in zip(items, answers, strict=True)
        ]

    def metrics(self, items: Sequence[ItemLike], outcomes: Sequence[Outcome]) -> dict[str, float]:
        return {}
