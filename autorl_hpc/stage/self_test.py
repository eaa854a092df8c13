"""Self-tests of a staged task: perfect answers must score 100 and empty ones 0; its environment must be playable. Perfect play: an
item's `oracle` or `walkthrough`, or what `oracle(goal)` in the environment's file returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import Root
from autorl_hpc.records.task import Recipe, Sampling
from autorl_hpc.rollouts.cores import usable_cores
from autorl_hpc.rollouts.engine import Answer
from autorl_hpc.rollouts.episodes import run_episodes
from autorl_hpc.rollouts.pool import Lost, Pool, Reply
from autorl_hpc.rollouts.source import EnvironmentBroken, Source, load
from autorl_hpc.scoring.outcome import Context
from autorl_hpc.scoring.registry import encode, scorer
from autorl_hpc.tasks.folders import with_scorer_hash
from autorl_hpc.tasks.heldout import Item, load_items, with_pins
from autorl_hpc.tasks.loader import Task

BY_REWARD: Final = "episodes"  # the scorer that uses rewards; others score the last observation of an episode
ORACLE: Final = "oracle"  # field with an item's perfect answer or play; function that plays perfectly
NO_TRANSCRIPT: Final = "0" * 64
NO_PLAY: Final = "its items have no field `oracle` with a list of actions, and {} has no function `oracle(goal)`"

Goal = Mapping[str, Any]


class Silent:
    """An engine whose answers are all empty."""

    def encode(self, text: str) -> list[int]:
        return [0]

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        return [0]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Answer]:
        return [Answer("", 0, False) for _ in prompts]


class Trial:
    """One recipe of a staged task, with its vault as a grader sees it."""

    def __init__(self, root: Root, task: Task, recipe: Recipe) -> None:
        self.task = task
        self.recipe = recipe
        file, _, name = (task.file.environment or "").partition(":")
        self.file = task.folder / file
        options = {**recipe.options, "max_steps": recipe.max_steps}
        self._source = Source(self.file, name, root.task_vault(task.name), held_out=True, options=options)

    def play(self, items: Sequence[Item]) -> tuple[list[str] | None, list[str], str]:
        """Play one perfect and one empty episode per item; return the answers, or None for perfect play and the reason. Raises
        AutorlError: the environment, its dialogue or its oracle failed."""
        goals: list[Goal] = [{**item.data, "id": item.id, "question": item.question} for item in items]
        try:
            with Pool(self._source, max(1, min(4, usable_cores(), len(goals)))) as pool:
                # Alone, so that an environment that always fails does not fail three times per goal.
                self._ask(pool, goals[0], "reset", lambda: pool.begin(0, goals[0], 0))
                plans = self._plans(goals)
                empty = self._empty(pool, goals)
                if plans is None:
                    return None, empty, NO_PLAY.format(self.file.name)
                return [self._perfect(pool, *pair) for pair in zip(goals, plans, strict=True)], empty, ""
        except AutorlError:
            raise
        except EnvironmentBroken as error:
            raise self._wrong(str(error)) from error
        except Exception as error:  # raised by the dialogue or the oracle
            raise self._wrong(f"{type(error).__name__}: {error}"[:500]) from error

    def _empty(self, pool: Pool, goals: Sequence[Goal]) -> list[str]:
        """Play the episodes of a model that says nothing, as a grader does."""
        sampling, steps = self.recipe.sampling, self.recipe.max_steps or 1
        texts = []
        for episode in run_episodes(Silent(), goals, self._source, sampling, max_steps=steps, pool=pool):
            if episode.reward is None:
                raise self._wrong(f"an empty episode of goal {episode.goal} failed: {episode.problem}")
            last = episode.transcript.turns[-1].observation if episode.transcript.turns else ""
            texts.append(self._answer(episode.reward, episode.steps, episode.done, last))
        return texts

    def _plans(self, goals: Sequence[Goal]) -> list[list[str]] | None:
        """Return the actions of perfect play, or None unless the task has them for every goal."""
        function = getattr(load(self.file), ORACLE, None)
        found: list[list[str]] = []
        for goal in goals:
            plan = next((goal[name] for name in (ORACLE, "walkthrough") if isinstance(goal.get(name), list)), None)
            if plan is None and callable(function):
                plan = list(function(dict(goal)))
            if plan is None:
                return None
            if not plan or not all(isinstance(action, str) for action in plan):
                raise self._wrong(f"the oracle of goal {goal['id']} is not a list of actions")
            found.append(plan)
        return found

    def _perfect(self, pool: Pool, goal: Goal, plan: Sequence[str]) -> str:
        """Play a goal's actions until the episode ends or the steps are used up."""
        self._ask(pool, goal, "reset", lambda: pool.begin(0, goal, 0))
        reply, taken = Reply(0), 0
        for action in plan[: self.recipe.max_steps]:
            reply = self._ask(pool, goal, f"step({action!r:.60})", partial(pool.act, 0, action))
            taken += 1
            if reply.done:
                break
        return self._answer(reply.reward, taken, reply.done, reply.observation)

    def _ask(self, pool: Pool, goal: Goal, what: str, call: Callable[[], int]) -> Reply:
        ticket = call()
        while True:
            event = pool.hear()
            if isinstance(event, Lost):
                raise self._wrong(f"{what} of goal {goal['id']}: {event.reason}")
            if isinstance(event, Reply) and event.ticket == ticket:
                if event.error is not None:
                    raise self._wrong(f"{what} of goal {goal['id']}: {event.error}")
                return event

    def _answer(self, reward: float, steps: int, done: bool, last: str) -> str:
        rated = (last if done else "") if self.recipe.scorer != BY_REWARD else None
        return encode(reward, steps, done, NO_TRANSCRIPT, rated)

    def _wrong(self, words: str) -> AutorlError:
        what = f"the environment of task {self.task.name} failed: {words}"
        advice = "correct it: docs/adding-a-task.md says what reset and step return"
        return AutorlError(what, where=Path(self.file), next_step=advice, exit_code=Exit.FAILED)


# --- scores of a staged task's own answers: if perfect is not 100 or empty not 0, the scorer measures something else


@dataclass(frozen=True)
class Checked:
    """Scores of one recipe on one split: of perfect (`oracle`) and of empty answers (`null`), and why one is missing."""

    recipe: str
    split: str
    oracle: float | None = None
    null: float | None = None
    skipped: str = ""

    @property
    def right(self) -> bool:
        return self.oracle in (100.0, None) and self.null in (0.0, None)

    def __str__(self) -> str:
        place = f"recipe {self.recipe}, {self.split} split"
        if self.oracle is not None and self.null is not None:
            return f"{place}: perfect answers score {self.oracle:g}, empty ones {self.null:g}"
        if self.null is not None:
            return f"{place}: empty episodes score {self.null:g}; WARNING: perfect play was not tried: {self.skipped}"
        return f"{place}: WARNING: not tried: {self.skipped}"


def perfect_answer(recipe: Recipe, item: Item) -> str:
    return str(item.data.get(ORACLE, item.answer))


def check_scores(root: Root, task: Task, perfect: Callable[[Recipe, Item], str] = perfect_answer) -> list[Checked]:
    """Score perfect and empty answers (or episodes) of a staged task, by each recipe on each split. Raises AutorlError: the scorer
    or the environment failed."""
    task = with_pins(root, task)
    found = []
    for recipe in task.file.recipes:
        for split, pin in task.file.splits.items():
            if recipe.judge != "none":
                found.append(Checked(recipe.name, split, skipped="it needs a judge"))
                continue
            items, why = load_items(root, task.name, split, pin), ""
            best: list[str] | None = [perfect(recipe, item) for item in items]
            empty = ["" for _ in items]
            if recipe.max_steps is not None:
                best, empty, why = Trial(root, task, recipe).play(items)
            oracle = None if best is None else _score(task, recipe, items, best)
            found.append(Checked(recipe.name, split, oracle, _score(task, recipe, items, empty), skipped=why))
    return found


def _score(task: Task, recipe: Recipe, items: list[Item], texts: list[str]) -> float:
    rater = scorer(recipe.scorer, recipe.scorer_version, task.name)
    context = Context(options=with_scorer_hash(recipe, task.folder).options, workers=os.cpu_count() or 1)
    outcomes = rater.score(items, [[text] for text in texts], context)
    mean = 100.0 * sum(outcome.value or 0.0 for outcome in outcomes) / len(outcomes)
    return rater.metrics(items, outcomes).get("score", mean)
