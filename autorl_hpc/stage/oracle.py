"""What a staged task's own answers score: a perfect answer must get 100, no answer 0. Else the scorer measures something else."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from autorl_hpc.files.layout import Root
from autorl_hpc.records.task import Recipe
from autorl_hpc.scoring.outcome import Context
from autorl_hpc.scoring.registry import scorer
from autorl_hpc.stage.played import Trial
from autorl_hpc.tasks.heldout import Item, load_items
from autorl_hpc.tasks.loader import Task
from autorl_hpc.tasks.own_files import with_scorer_hash
from autorl_hpc.tasks.staged import with_pins

ORACLE = "oracle"
"""Field of an item with a perfect answer, where that is not its `answer`."""


@dataclass(frozen=True)
class Checked:
    """Scores of one recipe on one split.

    Attributes:
        oracle, null: of perfect answers and of empty ones.
        skipped: why not all of them are there.
    """

    recipe: str
    split: str
    oracle: float | None = None
    null: float | None = None
    skipped: str = ""

    @property
    def right(self) -> bool:
        """Whether they are what they must be, as far as they can be had."""
        return self.oracle in (100.0, None) and self.null in (0.0, None)

    def __str__(self) -> str:
        place = f"recipe {self.recipe}, {self.split} split"
        if self.oracle is not None and self.null is not None:
            return f"{place}: perfect answers score {self.oracle:g}, empty ones {self.null:g}"
        if self.null is not None:
            return f"{place}: empty episodes score {self.null:g}; WARNING: perfect play was not tried: {self.skipped}"
        return f"{place}: WARNING: not tried: {self.skipped}"


def perfect_answer(recipe: Recipe, item: Item) -> str:
    """The answer that should get full marks."""
    return str(item.data.get(ORACLE, item.answer))


def check_scores(root: Root, task: Task, perfect: Callable[[Recipe, Item], str] = perfect_answer) -> list[Checked]:
    """Scores perfect and empty answers of a staged task, by each recipe on each split; of a task with an environment, episodes.

    Raises:
        AutorlError: the scorer or the environment failed.
    """
    task = with_pins(root, task)
    found = []
    for recipe in task.file.recipes:
        reason = "" if recipe.judge == "none" else "it needs a judge"
        for split, pin in task.file.splits.items():
            if reason:
                found.append(Checked(recipe.name, split, skipped=reason))
                continue
            items = load_items(root, task.name, split, pin)
            if recipe.max_steps is not None:
                best, empty, why = Trial(root, task, recipe).play(items)
                null = _score(task, recipe, items, empty)
                oracle = None if best is None else _score(task, recipe, items, best)
                found.append(Checked(recipe.name, split, oracle, null, skipped=why))
                continue
            oracle = _score(task, recipe, items, [perfect(recipe, item) for item in items])
            null = _score(task, recipe, items, ["" for _ in items])
            found.append(Checked(recipe.name, split, oracle, null))
    return found


def _score(task: Task, recipe: Recipe, items: list[Item], texts: list[str]) -> float:
    rater = scorer(recipe.scorer, recipe.scorer_version, task.name)
    context = Context(options=with_scorer_hash(recipe, task.folder).options, workers=os.cpu_count() or 1)
    outcomes = rater.score(items, [[text] for text in texts], context)
    mean = 100.0 * sum(outcome.value for outcome in outcomes) / len(outcomes)
    return rater.metrics(items, outcomes).get("score", mean)
