"""Interactive tasks: a split's items are goals, and the model's answer is an episode."""

from __future__ import annotations

from collections.abc import Sequence

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import Root
from autorl_hpc.records.run import Science
from autorl_hpc.rollouts.cores import usable_cores
from autorl_hpc.rollouts.engine import Answer, Engine
from autorl_hpc.rollouts.episode import Episode
from autorl_hpc.rollouts.episodes import run_episodes
from autorl_hpc.rollouts.pool import CALL_LIMIT_S, Pool
from autorl_hpc.rollouts.source import EnvironmentBroken, Source
from autorl_hpc.scoring.episodes import encode
from autorl_hpc.states import Fault
from autorl_hpc.tasks.check import ENVIRONMENT_TIMEOUT
from autorl_hpc.tasks.heldout import Item
from autorl_hpc.tasks.loader import Task, load_task
from autorl_hpc.tasks.played import check_played

BY_REWARD = "episodes"
"""The scorer that goes by episodes' rewards; others rate the answer that an episode ended with."""

MAX_WORKERS = 64
"""Processes with environments, one a core. A split has some 140 goals: more processes would have one or two each, and every one
takes a second to start and about 100 MB."""

GATHER_S = 30.0
"""How long a batch waits for slow environments, where the engine is asked in batches. Long, so that a batch is all episodes under
way but in case of need: which prompts stand together can change a word of an answer, and the same checkpoint should get the same
score."""


MAX_POOLS = 3
"""Tasks whose environments are kept warm: a grader goes to and fro between the tasks of one engine. Each has processes of its own."""


class Playground:
    """Keeps some tasks' environments warm between evaluations: what they have parsed stays parsed."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self._pools: list[Pool] = []  # the one used last is last

    def play(
        self,
        science: Science,
        items: Sequence[Item],
        engine: Engine,
        order: Sequence[int] | None = None,
    ) -> list[list[Answer]]:
        """Each item's episodes, one a sample, as answers for the scorer, in the items' order.

        Args:
            order: begin them in this order: another composition of the batches.

        Raises:
            AutorlError: the environment can't be used, or failed in an episode: the grader's fault, so nothing is scored.
        """
        recipe = science.recipe
        pool = self._warm(science)
        places = range(len(items)) if order is None else order
        goals = [{**items[place].data, "id": items[place].id, "question": items[place].question} for place in places]
        limit = recipe.options.get("max_prompt_tokens")
        drawn: list[dict[int, Answer]] = []
        for number in range(recipe.samples):
            try:
                episodes = run_episodes(
                    engine,
                    goals,
                    pool.source,
                    recipe.sampling,
                    max_steps=recipe.max_steps or 1,
                    seed=science.seed + number,
                    pool=pool,
                    gather_s=GATHER_S,
                    max_prompt_tokens=None if limit is None else int(limit),
                    all_or_none=True,
                )
            except EnvironmentBroken as error:
                self._pools.remove(pool)
                pool.close()
                raise _trouble(science.task, str(error)) from error
            rated = recipe.scorer != BY_REWARD
            drawn.append({place: _answer(episode, rated) for place, episode in zip(places, episodes, strict=True)})
        return [[sample[place] for sample in drawn] for place in range(len(items))]

    def close(self) -> None:
        """Ends the environments' processes; the next evaluation starts new ones."""
        while self._pools:
            self._pools.pop().close()

    def _warm(self, science: Science) -> Pool:
        task = load_task(science.task)
        source = source_of(self.root, task, science)
        pool = next((pool for pool in self._pools if pool.source == source), None)
        if pool is None:
            check_played(self.root, task, science.recipe.options)
            limit_s = float(science.recipe.options.get(ENVIRONMENT_TIMEOUT, CALL_LIMIT_S))
            while len(self._pools) >= MAX_POOLS:
                self._pools.pop(0).close()
            pool = Pool(source, min(MAX_WORKERS, usable_cores()), call_limit_s=limit_s)
        else:
            self._pools.remove(pool)
        self._pools.append(pool)
        return pool


def source_of(root: Root, task: Task, science: Science) -> Source:
    """A task's environment over its vault.

    Raises:
        AutorlError: the task has none.
    """
    if task.file.environment is None:
        raise AutorlError(
            f"recipe {science.recipe.name} of task {task.name} asks for episodes, and the task has no environment",
            where=task.folder / "task.yaml",
            next_step="set `environment`, or leave `max_steps` out of the recipe",
        )
    file, _, name = task.file.environment.partition(":")
    return Source(
        file=task.folder / file,
        name=name,
        data=root.task_vault(task.name),
        held_out=True,
        options={**science.recipe.options, "max_steps": science.recipe.max_steps},
    )


def _answer(episode: Episode, rated: bool) -> Answer:
    """The episode for the scorer. Where that one rates an answer, it is the observation that the environment ended with."""
    answer = (episode.transcript.turns[-1].observation if episode.done else "") if rated else None
    text = encode(episode.reward or 0.0, episode.steps, episode.done, episode.transcript_sha256, answer)
    return Answer(text, episode.tokens, episode.truncated > 0)


def _trouble(task: str, words: str) -> AutorlError:
    return AutorlError(
        f"the environment of task {task} failed: {words}",
        fault=Fault.GRADER,
        next_step="the submission waits and is scored again; see the grader's log, and the task's `needs`",
        exit_code=Exit.ENVIRONMENT,
    )
