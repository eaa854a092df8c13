"""Scorers by the name that a recipe gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from autorl_hpc.errors import AutorlError
from autorl_hpc.scoring import gsm8k, marked, opencompass

Score = Callable[[str, str], float]
"""(model's text, the item's answer field) -> outcome from 0 to 1."""


class Scorer(NamedTuple):
    """A scorer with its version: any change that can change one verdict is a new version."""

    version: str
    score: Score


def _opencompass(text: str, answer: str) -> float:
    return float(opencompass.opencompass_correct(opencompass.opencompass_extract(text), answer))


SCORERS: dict[str, Scorer] = {
    "gsm8k": Scorer(gsm8k.VERSION, lambda text, answer: float(gsm8k.score_item(text, answer))),
    "gsm8k-marked": Scorer(marked.VERSION, lambda text, answer: float(marked.score_marked(text, answer))),
    "gsm8k-opencompass": Scorer(opencompass.VERSION, _opencompass),
}


def scorer(name: str, version: str) -> Score:
    """The scorer `name`, whose version is the recipe's.

    Raises:
        AutorlError: there is none of that name and version in this package.
    """
    found = SCORERS.get(name)
    if found is None or found.version != version:
        raise AutorlError(
            f"this package has no scorer `{name}` version {version}"
            + (f" (it has version {found.version})" if found else ""),
            next_step="use the package version that the experiment was launched with",
        )
    return found.score
