"""Scorers by the name that a recipe gives. Each is made when it is asked for, so that one task's libraries don't trouble another."""

from __future__ import annotations

from collections.abc import Callable

from autorl_hpc.errors import AutorlError
from autorl_hpc.scoring.outcome import ByItem, Scorer


def _gsm8k() -> Scorer:
    from autorl_hpc.scoring import gsm8k

    return ByItem(gsm8k.VERSION, lambda text, answer: float(gsm8k.score_item(text, answer)))


def _gsm8k_marked() -> Scorer:
    from autorl_hpc.scoring import marked

    return ByItem(marked.VERSION, lambda text, answer: float(marked.score_marked(text, answer)))


def _gsm8k_opencompass() -> Scorer:
    from autorl_hpc.scoring import opencompass

    return ByItem(
        opencompass.VERSION,
        lambda text, answer: float(opencompass.opencompass_correct(opencompass.opencompass_extract(text), answer)),
    )


SCORERS: dict[str, Callable[[], Scorer]] = {
    "gsm8k": _gsm8k,
    "gsm8k-marked": _gsm8k_marked,
    "gsm8k-opencompass": _gsm8k_opencompass,
}


def scorer(name: str, version: str) -> Scorer:
    """The scorer `name`, whose version is the recipe's.

    Raises:
        AutorlError: there is none of that name and version in this package.
    """
    make = SCORERS.get(name)
    found = None if make is None else make()
    if found is None or found.version != version:
        raise AutorlError(
            f"this package has no scorer `{name}` version {version}"
            + (f" (it has version {found.version})" if found else ""),
            next_step="use the package version that the experiment was launched with",
        )
    return found
