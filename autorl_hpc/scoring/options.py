"""The options of a recipe that scorers know: names, kinds and ranges. What is misspelt would else be without effect, and what is
out of range would fail when the first checkpoint is scored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from autorl_hpc.records.task import Recipe
from autorl_hpc.tasks.own_files import EVALUATE_FILE, OWN_SCORER, SCORER_SHA256

Value = str | int | float | bool

MISSPELT_LIKENESS = 0.85
"""Of names, among options that are the environment's to know: above it one is taken for a misspelt other."""


@dataclass(frozen=True)
class Option:
    """What one option may be.

    Attributes:
        kind: `number`, `whole number`, `text`, `yes or no`.
        above: the value must be larger.
        most: the largest.
        choices: of a text.
    """

    kind: str
    above: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()

    def problem(self, value: Value) -> str | None:
        """What is wrong with a value, in words that go after its name; None: nothing."""
        right = {
            "number": isinstance(value, (int, float)) and not isinstance(value, bool),
            "whole number": isinstance(value, int) and not isinstance(value, bool),
            "text": isinstance(value, str),
            "yes or no": isinstance(value, bool),
        }[self.kind]
        if not right:
            return f"it is {value!r:.100}, expected is a {self.kind}"
        if isinstance(value, str):
            return (
                None if not self.choices or value in self.choices else f"it is {value!r:.100}, known: {self.choices[0]}"
            )
        if isinstance(value, (int, float)) and not (self.above < value <= self.most):
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
"""Of any recipe with `max_steps`, beside the options of its environment."""

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
"""By scorer."""


def wrong_option(recipe: Recipe) -> tuple[str, str] | None:
    """The first option of a recipe that its scorer doesn't know or can't use, with the reason; None: there is none.

    Options that no scorer knows are the environment's in a recipe with `max_steps`, unless they look like one misspelt.
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
