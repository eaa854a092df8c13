"""Scorers by the name that a recipe gives."""

from __future__ import annotations

from collections.abc import Callable

from autorl_hpc.errors import AutorlError
from autorl_hpc.scoring import gsm8k

Scorer = Callable[[str, str], float]
"""(model's text, the item's answer field) -> outcome from 0 to 1."""

SCORERS: dict[str, Scorer] = {
    "gsm8k": lambda text, answer: float(gsm8k.score_item(text, answer)),
    "gsm8k-opencompass": lambda text, answer: float(gsm8k.opencompass_correct(gsm8k.opencompass_extract(text), answer)),
}


def scorer(name: str, version: str) -> Scorer:
    """The scorer `name`, whose version is the recipe's.

    Raises:
        AutorlError: there is none of that name and version in this package.
    """
    have = gsm8k.SCORER_VERSIONS.get(name)
    if have != version:
        raise AutorlError(
            f"this package has no scorer `{name}` version {version}" + (f" (it has version {have})" if have else ""),
            next_step="use the package version that the experiment was launched with",
        )
    return SCORERS[name]
