"""What a grader needs for tasks with a judge: the judge of each recipe, and the answers that could not be judged yet.

A judge that fails is the grader's fault: the entry goes back to the queue, with no word about the artifact, and other entries go
on. The model's answers are kept for the next try: to write them took longer than to judge them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import Final

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import Root
from autorl_hpc.records.experiment import JudgeSpec
from autorl_hpc.records.run import Science
from autorl_hpc.records.task import Recipe
from autorl_hpc.rollouts.engine import Answer
from autorl_hpc.scoring.judges import JUDGE_MODEL, JUDGE_REVISION, MeteredJudge, Usage, make_judge
from autorl_hpc.scoring.outcome import Context, JudgeFailed
from autorl_hpc.states import Fault
from autorl_hpc.tasks.heldout import load_judge_prompt

MAX_KEPT: Final = 16
"""Evaluations whose answers are kept: a few megabytes each at most."""


class Judging:
    """The judges of one grader.

    Args:
        spec: the experiment's judge as it stands now; a later launch may change it.
    """

    def __init__(self, root: Root, spec: Callable[[], JudgeSpec | None]) -> None:
        self.root = root
        self._spec = spec
        self._judges: dict[tuple[str, str | None], tuple[JudgeSpec | None, MeteredJudge]] = {}
        self._unjudged: dict[Hashable, list[list[Answer]]] = {}

    def context(self, science: Science) -> Context:
        """What the run's scorer gets.

        Raises:
            AutorlError: the judge can't be made, or its prompt is not staged.
        """
        recipe = science.recipe
        return Context(
            options=recipe.options,
            workers=os.cpu_count() or 1,
            seed=science.seed,
            judge=self._judge(recipe),
            judge_mode=recipe.judge,
            judge_prompt=load_judge_prompt(self.root, science.task, recipe),
        )

    def usage(self, recipe: Recipe) -> Usage:
        """What the recipe's judge was asked so far."""
        judge = self._judge(recipe)
        return Usage() if judge is None else judge.usage

    def _judge(self, recipe: Recipe) -> MeteredJudge | None:
        if recipe.judge == "none":
            return None
        name, spec = str(recipe.options.get(JUDGE_MODEL, "")), self._spec()
        said = recipe.options.get(JUDGE_REVISION)
        revision = None if said is None else str(said)
        if (name, revision) not in self._judges or self._judges[name, revision][0] != spec:
            self._judges[name, revision] = (spec, make_judge(spec, name, self.root.judge_cache, revision))
        return self._judges[name, revision][1]

    def kept(self, key: Hashable) -> list[list[Answer]] | None:
        """The answers that the judge failed to judge in the last try, once."""
        return self._unjudged.pop(key, None)

    def keep(self, key: Hashable, answers: list[list[Answer]]) -> None:
        """Keeps answers for the next try."""
        while len(self._unjudged) >= MAX_KEPT:
            self._unjudged.pop(next(iter(self._unjudged)))
        self._unjudged[key] = answers

    def failed(self, key: Hashable, answers: list[list[Answer]], error: JudgeFailed) -> AutorlError:
        """Keeps the answers; the error to raise."""
        self.keep(key, answers)
        return AutorlError(
            f"the judge failed, nothing was scored: {error}",
            fault=Fault.GRADER,
            next_step="check the endpoint that the experiment's field `judge` names; the same is tried again by itself",
            exit_code=Exit.ENVIRONMENT,
        )
