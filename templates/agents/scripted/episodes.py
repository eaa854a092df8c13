"""Interactive tasks from an agent's side: goals to train on and to validate with, and groups of episodes.

Used with autorl_rollouts, which the workspace holds. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # other tasks have no such package in their workspace
    from autorl_rollouts.environment import Episode
    from autorl_rollouts.pool import Pool
    from autorl_rollouts.source import Source

FILES = ("goals.jsonl", "train.jsonl")  # where goals lie, if the environment's file has no function `goals`
CLUSTERS = ("cluster", "product")  # fields that goals share which must not be in both parts
VALIDATION_SHARE = 0.15
VALIDATION_LEAST = 0.25  # of few goals (fewer than `FEW`)
FEW = 200
GATHER_S = 2.0  # how long a batch waits for slow environments: longer than a step takes, so that batches stay large


def interactive(meta: Mapping[str, Any]) -> bool:
    """Whether the task is played in episodes."""
    return bool(meta["recipe"].get("max_steps"))


def source_of(workspace: Path, meta: Mapping[str, Any]) -> Source:
    """The task's environment over the training data."""
    from autorl_rollouts.source import Source

    recipe = meta["recipe"]
    options = {**(recipe.get("options") or {}), "max_steps": recipe["max_steps"]}
    return Source(workspace / "environment" / "environment.py", "Environment", os.environ["DATA_PATH"], options=options)


def all_goals(source: Source) -> Iterator[dict[str, Any]]:
    """The training goals, one after the other: all of them may be more than the memory holds."""
    from autorl_rollouts.source import load

    listed = getattr(load(source.file), "goals", None)
    if listed is not None:
        yield from listed(Path(source.data))
        return
    path = next(Path(source.data) / name for name in FILES if (Path(source.data) / name).is_file())
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def chosen(source: Source, most: int, validation: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """At most so many goals to train on, and to validate with, drawn once for a seed, in a drawn order.

    Which part a goal belongs to follows from its cluster alone, so that no task stands in both.
    """
    ids = [str(goal["id"]) for goal in all_goals(source)]
    share = VALIDATION_LEAST if len(ids) < FEW else VALIDATION_SHARE
    draw = random.Random(seed)
    train: list[dict[str, Any]] = []
    held: list[dict[str, Any]] = []
    counts = {"train": 0, "held": 0}
    for goal in all_goals(source):
        kept, name, limit = (held, "held", validation) if _held_out(goal, share) else (train, "train", most)
        counts[name] += 1
        place = counts[name] - 1 if len(kept) < limit else draw.randrange(counts[name])
        if place < len(kept):
            kept[place] = goal
        elif len(kept) < limit:
            kept.append(goal)
    for part in (train, held):
        draw.shuffle(part)
    return train, held or train[:validation]


def _held_out(goal: Mapping[str, Any], share: float) -> bool:
    key = str(next((goal[name] for name in CLUSTERS if name in goal), goal["id"]))
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") < share * 2**32


def workers_here(processes: int) -> int:
    """Processes with environments for each trainer of this node."""
    from autorl_rollouts.cores import usable_cores

    return max(1, usable_cores() // processes)


def play(
    sampler: Any, goals: Sequence[dict[str, Any]], copies: int, pool: Pool, recipe: Mapping[str, Any]
) -> list[list[Episode]]:
    """So many episodes of each goal, all of them together; one list a goal.

    Goals are begun one after the other before their copies: the pool begins copies where their goal is known, so that a game is
    translated once for all of them.
    """
    from autorl_rollouts.episodes import run_episodes

    order: list[int] = []
    for start in range(0, len(goals), pool.size):
        block = list(range(start, min(start + pool.size, len(goals))))
        order += block * copies
    limit = (recipe.get("options") or {}).get("max_prompt_tokens")
    if hasattr(sampler, "turns"):
        sampler.turns = int(recipe["max_steps"])  # by which it knows what goes on
    played = run_episodes(
        sampler,
        [goals[number] for number in order],
        pool.source,
        None,  # type: ignore[arg-type]
        max_steps=int(recipe["max_steps"]),
        pool=pool,
        in_flight=min(
            len(order), getattr(sampler, "rows", len(order))
        ),  # one without a row would lose what is computed of it
        gather_s=GATHER_S,
        max_prompt_tokens=None if limit is None else int(limit),
    )
    groups: list[list[Episode]] = [[] for _ in goals]
    for number, episode in zip(order, played, strict=True):
        groups[number].append(episode)
    return groups
