"""Registry of scorers by recipe name, the options each one accepts, and the scorer `episodes`. Scorers are imported lazily."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from autorl_hpc.errors import AutorlError
from autorl_hpc.records.task import Recipe
from autorl_hpc.scoring.outcome import Context, ItemLike, Outcome, Scorer
from autorl_hpc.tasks.folders import EVALUATE_FILE, OWN_SCORER, SCORER_SHA256

SCORERS: dict[str, str] = {
    "alpacaeval": "alpacaeval:AlpacaEval",
    "deepsearchqa": "deepsearchqa:DeepSearchQA",
    "deepsearchqa-exact": "deepsearchqa:Exact",
    "episodes": "registry:Episodes",
    "gsm8k": "gsm8k:gsm8k",
    "gsm8k-marked": "gsm8k:gsm8k_marked",
    "gsm8k-opencompass": "gsm8k:gsm8k_opencompass",
    "humaneval": "humaneval:humaneval",
    "humaneval-opencompass": "humaneval:humaneval_opencompass",
}
"""By name: the module of this package, and what makes the scorer."""

READ_ANSWER = frozenset(
    ("alpacaeval", "deepsearchqa", "deepsearchqa-exact", "gsm8k", "gsm8k-marked", "gsm8k-opencompass")
)
"""Scorers that compare with an item's `answer`; others read other fields, or none."""

OF_EPISODES = frozenset(("episodes", "deepsearchqa", "deepsearchqa-exact"))
"""Scorers that read the end of an episode (`encode`). `episodes` reads nothing else."""


def scorer(name: str, version: str, task: str = "") -> Scorer:
    """Return the scorer `name` in the recipe's version.

    Args:
        task: name of the recipe's task; the scorer `task` is in its folder.

    Raises:
        AutorlError: this package has no such name and version.
    """
    if name == OWN_SCORER:
        from autorl_hpc.scoring import own
        from autorl_hpc.tasks.loader import load_task

        return own.OwnScorer(task, load_task(task).folder, version)
    found: Scorer | None = None
    if name in SCORERS:
        module, _, maker = SCORERS[name].partition(":")
        found = getattr(import_module(f"autorl_hpc.scoring.{module}"), maker)()
    if found is None or found.version != version:
        raise AutorlError(
            f"this package has no scorer `{name}` version {version}"
            + (f" (it has version {found.version})" if found else ""),
            next_step="use the package version that the experiment was launched with",
        )
    return found


# --- options of a recipe, checked before launch: a misspelt one would have no effect, an invalid one fail at the first checkpoint

Value = str | int | float | bool

MISSPELT_LIKENESS = 0.85
"""Options that look more like a scorer's option than this count as misspelt rather than as the environment's."""


@dataclass(frozen=True)
class Option:
    """The allowed values of one option; `kind` is `number`, `whole number`, `text` or `yes or no`, and `above` exclusive."""

    kind: str
    above: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()

    def problem(self, value: Value) -> str | None:
        """Return what is wrong with a value, in words that follow its name, or None."""
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        right = {
            "number": number,
            "whole number": number and isinstance(value, int),
            "text": isinstance(value, str),
            "yes or no": isinstance(value, bool),
        }[self.kind]
        if not right:
            return f"it is {value!r:.100}, expected is a {self.kind}"
        if self.choices and value not in self.choices:
            return f"it is {value!r:.100}, known: {self.choices[0]}"
        if number and not self.above < float(value) <= self.most:
            upper = f" and at most {self.most:g}" if math.isfinite(self.most) else ""
            return f"it is {value!r}, expected is more than {self.above:g}{upper}"
        return None


TEXT, YES_NO = Option("text"), Option("yes or no")
JUDGED: Mapping[str, Option] = {
    "judge_model": TEXT,
    "judge_revision": TEXT,
    "judge_parameters": TEXT,
    "judge_prompt": TEXT,
    "judge_prompt_sha256": TEXT,
}
PLAYED: Mapping[str, Option] = {"max_prompt_tokens": Option("whole number", above=0)}
"""Options of any recipe with `max_steps`, in addition to its environment's."""

KNOWN: Mapping[str, Mapping[str, Option]] = {
    OWN_SCORER: {
        "evaluate_timeout_s": Option("number", above=0, most=3600),
        "evaluate_memory_gib": Option("number", above=0.1, most=4096),  # an interpreter alone takes a tenth
        EVALUATE_FILE: TEXT,
        SCORER_SHA256: TEXT,
    },
    "alpacaeval": {**JUDGED, "order_seed": Option("whole number", above=-1)},
    "deepsearchqa": {
        **JUDGED,
        "judge_rule": Option("text", choices=("official",)),
        "judge_max_tokens": Option("whole number", above=0, most=32768),
    },
    "deepsearchqa-exact": {},
    "episodes": {"threshold": Option("number", above=0, most=1)},
    "gsm8k": {},
    "gsm8k-marked": {},
    "gsm8k-opencompass": {},
    "humaneval": {"unconfined": YES_NO},
    "humaneval-opencompass": {"unconfined": YES_NO},
}
"""Options by scorer."""


def wrong_option(recipe: Recipe) -> tuple[str, str] | None:
    """Return the first option that the recipe's scorer doesn't accept, with the reason; None if all are valid.

    With `max_steps`, options that no scorer knows are the environment's, unless they look misspelt.
    """
    played = recipe.max_steps is not None
    known = {**KNOWN.get(recipe.scorer, {}), **(PLAYED if played else {})}
    for name, value in recipe.options.items():
        if name in known:
            problem = known[name].problem(value)
            if problem:
                return name, problem
            continue
        near = get_close_matches(name, known, n=1, cutoff=MISSPELT_LIKENESS if played else 0.6)
        if played and not near:
            continue
        advice = f"; did you mean `{near[0]}`?" if near else f"; it knows {', '.join(sorted(known)) or 'none'}"
        return name, f"the scorer `{recipe.scorer}` has no such option{advice}"
    return None


# --- scorer `episodes`; an answer is an episode's outcome as JSON, written by the grader (`encode`)

VERSION = "1"

TOLERANCE = 1e-9  # Rewards are sums of fractions; 0.9999999999 means 1

DEFAULT_THRESHOLD = 1.0


def encode(reward: float, steps: int, done: bool, transcript_sha256: str, answer: str | None = None) -> str:
    """Encode an episode as an answer. Through the transcript's hash, the items file's output hash covers every word of it.

    Args:
        answer: the episode's final answer, for scorers that rate it instead of the reward.
    """
    value = {"reward": reward, "steps": steps, "done": done, "transcript_sha256": transcript_sha256}
    return json.dumps(value if answer is None else {**value, "answer": answer}, sort_keys=True)


class Episodes:
    """Counts an episode as won if its reward reaches the recipe's option `threshold` (default 1)."""

    version = VERSION

    def score(self, items: Sequence[ItemLike], answers: Sequence[Sequence[str]], context: Context) -> list[Outcome]:
        """Return 1 for a won episode, else 0; of several samples the mean. Facts: mean reward and steps."""
        threshold = float(context.options.get("threshold", DEFAULT_THRESHOLD))
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
            "average_reward": _mean(rewards),
            "success_at_1": 100.0 * _mean([float(reward >= 1.0 - TOLERANCE) for reward in rewards]),
            "success_at_half": 100.0 * _mean([float(reward >= 0.5 - TOLERANCE) for reward in rewards]),
            "mean_steps": _mean([float(outcome.facts["steps"]) for outcome in outcomes]),
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
