"""Scorers by the name that a recipe gives. Each is made when it is asked for, so that one task's libraries don't trouble another."""

from __future__ import annotations

from collections.abc import Callable

from autorl_hpc.errors import AutorlError
from autorl_hpc.scoring.outcome import ByItem, Scorer
from autorl_hpc.tasks.own_files import OWN_SCORER


def _alpacaeval() -> Scorer:
    from autorl_hpc.scoring import alpaca

    return alpaca.AlpacaEval()


def _deepsearchqa() -> Scorer:
    from autorl_hpc.scoring import deepsearch

    return deepsearch.DeepSearchQA()


def _deepsearchqa_exact() -> Scorer:
    from autorl_hpc.scoring import deepsearch

    return deepsearch.Exact()


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


def _episodes() -> Scorer:
    from autorl_hpc.scoring import episodes

    return episodes.Episodes()


def _humaneval() -> Scorer:
    from autorl_hpc.scoring import humaneval

    return humaneval.humaneval()


def _humaneval_opencompass() -> Scorer:
    from autorl_hpc.scoring import humaneval

    return humaneval.humaneval_opencompass()


SCORERS: dict[str, Callable[[], Scorer]] = {
    "alpacaeval": _alpacaeval,
    "deepsearchqa": _deepsearchqa,
    "deepsearchqa-exact": _deepsearchqa_exact,
    "episodes": _episodes,
    "gsm8k": _gsm8k,
    "gsm8k-marked": _gsm8k_marked,
    "gsm8k-opencompass": _gsm8k_opencompass,
    "humaneval": _humaneval,
    "humaneval-opencompass": _humaneval_opencompass,
}

READ_ANSWER = frozenset(
    ("alpacaeval", "deepsearchqa", "deepsearchqa-exact", "gsm8k", "gsm8k-marked", "gsm8k-opencompass")
)
"""Those that compare with an item's `answer`; the others read other fields, or none."""

OF_EPISODES = frozenset(("episodes", "deepsearchqa", "deepsearchqa-exact"))
"""Those that read what an episode ended with (scoring/episodes.py). `episodes` reads nothing else."""


def scorer(name: str, version: str, task: str = "") -> Scorer:
    """The scorer `name`, whose version is the recipe's.

    Args:
        task: whose recipe it is: scorer `task` stands in its folder.

    Raises:
        AutorlError: there is none of that name and version in this package.
    """
    if name == OWN_SCORER:
        from autorl_hpc.scoring import own
        from autorl_hpc.tasks.loader import load_task

        return own.OwnScorer(task, load_task(task).folder, version)
    make = SCORERS.get(name)
    found = None if make is None else make()
    if found is None or found.version != version:
        raise AutorlError(
            f"this package has no scorer `{name}` version {version}"
            + (f" (it has version {found.version})" if found else ""),
            next_step="use the package version that the experiment was launched with",
        )
    return found
