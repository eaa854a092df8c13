"""Registry of scorers by recipe name, the options each one accepts, and the scorer `episodes`. Scorers are imported lazily."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from autorl_hpc.errors import AutorlError
from autorl_hpc.records.task import HARNESSES, Recipe
from autorl_hpc.scoring.harness import OPTIONS
from autorl_hpc.scoring.outcome import Context, ItemLike, Outcome, Scorer, mean
from autorl_hpc.tasks.folders import EVALUATE_FILE, OWN_SCORER, SCORER_SHA256

SCORERS: dict[str, str] = {
    "alpacaeval": "alpacaeval:AlpacaEval",
    "deepsearchqa": "deepsearchqa:DeepSearchQA",
    "deepsearchqa-exact": "deepsearchqa:Exact",
    "episodes": "registry:Episodes",
    "gsm8k": "gsm8k:GSM8K",
    "gsm8k-marked": "gsm8k:GSM8K_MARKED",
    "gsm8k-opencompass": "gsm8k:GSM8K_OPENCOMPASS",
    "humaneval": "humaneval:HUMANEVAL",
    "humaneval-opencompass": "humaneval:HUMANEVAL_OPENCOMPASS",
    "inspect": "harness:Inspect",
    "lm-eval": "harness:LmEval",
}
"""By name: the module of this package, and the scorer or its class."""
READ_ANSWER = frozenset(
    ("alpacaeval", "deepsearchqa", "deepsearchqa-exact", "gsm8k", "gsm8k-marked", "gsm8k-opencompass")
)
"""Scorers that compare with an item's `answer`; others read other fields, or none."""
OF_EPISODES = frozenset(("episodes", "deepsearchqa", "deepsearchqa-exact"))
"""Scorers that read the end of an episode (`encode`). `episodes` reads nothing else."""


def scorer(name: str, version: str, task: str = "") -> Scorer:
    """Return the scorer `name` in the recipe's version. `task`: name of the recipe's task; the scorer `task` is in its folder.
    Raises AutorlError: this package has no such name and version."""
    if name == OWN_SCORER:
        from autorl_hpc.scoring import own
        from autorl_hpc.tasks.loader import load_task

        return own.OwnScorer(task, load_task(task).folder, version)
    found: Scorer | None = None
    if name in SCORERS:
        module, _, holder = SCORERS[name].partition(":")
        held = getattr(import_module(f"autorl_hpc.scoring.{module}"), holder)
        found = held() if isinstance(held, type) else held
    if found is None or found.version != version:
        raise AutorlError(
            f"this package has no scorer `{name}` version {version}"
            + (f" (it has version {found.version})" if found else ""),
            next_step="use the package version that the experiment was launched with",
        )
    return found


# --- options of a recipe, checked before launch: a misspelt one would have no effect, an invalid one fail at the first checkpoint

MISSPELT_LIKENESS = 0.85
"""Options that look more like a scorer's option than this count as misspelt rather than as the environment's."""
JUDGED: Mapping[str, Any] = {
    "judge_model": str,
    "judge_revision": str,
    "judge_parameters": str,
    "judge_prompt": str,
    "judge_prompt_sha256": str,
}
PLAYED: Mapping[str, Any] = {"max_prompt_tokens": Annotated[int, Field(gt=0)]}
"""Options of any recipe with `max_steps`, in addition to its environment's."""
KNOWN: Mapping[str, Mapping[str, Any]] = {
    OWN_SCORER: {
        "evaluate_timeout_s": Annotated[float, Field(gt=0, le=3600)],
        "evaluate_memory_gib": Annotated[float, Field(gt=0.1, le=4096)],  # an interpreter alone takes a tenth
        EVALUATE_FILE: str,
        SCORER_SHA256: str,
    },
    "alpacaeval": {**JUDGED, "order_seed": Annotated[int, Field(gt=-1)]},
    "deepsearchqa": {
        **JUDGED,
        "judge_rule": Literal["official"],
        "judge_max_tokens": Annotated[int, Field(gt=0, le=32768)],
    },
    "episodes": {"threshold": Annotated[float, Field(gt=0, le=1)]},
    "humaneval": {"unconfined": bool},
    "humaneval-opencompass": {"unconfined": bool},
    **{kind: {**JUDGED, **OPTIONS} for kind in HARNESSES},
}
"""The type of each option, by scorer; others have none."""


def wrong_option(recipe: Recipe) -> tuple[str, str] | None:
    """Return the first option that the recipe's scorer doesn't accept, with the reason; None if all are valid. With
    `max_steps`, options that no scorer knows are the environment's, unless they look misspelt."""
    played = recipe.max_steps is not None
    known = {**KNOWN.get(recipe.scorer, {}), **(PLAYED if played else {})}
    for name, value in recipe.options.items():
        if name in known:
            try:
                TypeAdapter(known[name]).validate_python(value, strict=True)
            except ValidationError as error:
                return name, f"it is {value!r:.100}: {error.errors()[0]['msg']}"
            continue
        near = get_close_matches(name, known, n=1, cutoff=MISSPELT_LIKENESS if played else 0.6)
        if played and not near:
            continue
        advice = f"; did you mean `{near[0]}`?" if near else f"; it knows {', '.join(sorted(known)) or 'none'}"
        return name, f"the scorer `{recipe.scorer}` has no such option{advice}"
    return None


# --- scorer `episodes`; an answer is an episode's outcome as JSON, written by the grader (`encode`)

TOLERANCE = 1e-9  # Rewards are sums of fractions; 0.9999999999 means 1


def encode(reward: float, steps: int, done: bool, transcript_sha256: str, answer: str | None = None) -> str:
    """Encode an episode as an answer. Through the transcript's hash, the items file's output hash covers every word of it.
    `answer`: the episode's final answer, for scorers that rate it instead of the reward."""
    value = {"reward": reward, "steps": steps, "done": done, "transcript_sha256": transcript_sha256}
    return json.dumps(value if answer is None else {**value, "answer": answer}, sort_keys=True)


class Episodes:
    """Counts an episode as won if its reward reaches the recipe's option `threshold` (default 1)."""

    version = "1"

    def score(self, items: Sequence[ItemLike], answers: Sequence[Sequence[str]], context: Context) -> list[Outcome]:
        """Return 1 for a won episode, else 0; of several samples the mean. Facts: mean reward and steps."""
        threshold = float(context.options.get("threshold", 1.0))
        outcomes = []
        for _, texts in zip(items, answers, strict=True):
            drawn = [json.loads(text) for text in texts]
            rewards = [float(episode["reward"]) for episode in drawn]
            won = sum(reward >= threshold - TOLERANCE for reward in rewards) / len(rewards)
            steps = sum(int(episode["steps"]) for episode in drawn) / len(drawn)
            outcomes.append(Outcome(won, {"reward": sum(rewards) / len(rewards), "steps": steps}))
        return outcomes

    def metrics(self, items: Sequence[ItemLike], outcomes: Sequence[Outcome]) -> dict[str, float]:
        """Return the average reward, percentages of episodes with full and at least half the reward, and mean steps."""
        rewards = [float(outcome.facts["reward"]) for outcome in outcomes]
        return {
            "average_reward": mean(rewards),
            "success_at_1": 100.0 * mean([float(reward >= 1.0 - TOLERANCE) for reward in rewards]),
            "success_at_half": 100.0 * mean([float(reward >= 0.5 - TOLERANCE) for reward in rewards]),
            "mean_steps": mean([float(outcome.facts["steps"]) for outcome in outcomes]),
        }
