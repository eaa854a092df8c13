"""The official ALFWorld games: staged, won by their walkthroughs, and what the two recipes make of ReAct's examples."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needs
import pytest
from players import Player

from autorl_hpc.files.layout import Root
from autorl_hpc.records.task import Sampling
from autorl_hpc.rollouts.environment import Environment, Transcript, Turn
from autorl_hpc.rollouts.episodes import run_episodes
from autorl_hpc.rollouts.pool import Pool
from autorl_hpc.rollouts.source import Source, load
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.heldout import load_items
from autorl_hpc.tasks.loader import Task, load_task

FILES = ("train.jsonl.xz", "valid_seen.jsonl.xz", "valid_unseen.jsonl.xz", "pddl_domain.in_games.pddl", "grammar.in_games.twl2", "react_prompts.json")  # fmt: skip

needs_textworld = needs.needs(
    "alfworld",
    all(importlib.util.find_spec(name) is not None for name in ("alfworld", "textworld", "fast_downward")),
    "ALFWorld's games need TextWorld: pip install 'autorl-hpc[alfworld]'",
)


@pytest.fixture(scope="module")
def task() -> Task:
    return load_task("alfworld")


@pytest.fixture(scope="module")
def official(data: Path) -> Path:
    folder = data / "alfworld"
    if not folder.is_dir():
        needs.skip("data", "the real data are not here: set AUTORL_TEST_DATA to a folder with alfworld/")
    return folder


@pytest.fixture(scope="module")
def root(task: Task, official: Path, tmp_path_factory: pytest.TempPathFactory) -> Root:
    made = Root(tmp_path_factory.mktemp("alfworld"))
    stage_task(made, task, official)
    return made


def goals_of(root: Root, task: Task, split: str) -> list[dict[str, Any]]:
    items = load_items(root, "alfworld", split, task.file.splits[split])  # type: ignore[index]
    return [{**item.data, "id": item.id, "question": item.question} for item in items]


# --- staging ---


def test_the_splits_are_the_official_games(root: Root, task: Task) -> None:
    feedback, report = goals_of(root, task, "feedback"), goals_of(root, task, "report")
    assert (len(feedback), len(report)) == (140, 134)
    assert len({goal["cluster"] for goal in report}) == 47
    assert all(goal["id"].startswith("valid_seen/") for goal in feedback)
    assert all(goal["id"].startswith("valid_unseen/") for goal in report)
    ids = [goal["id"] for goal in report]
    assert ids == sorted(ids)
    assert task.file.unit == "cluster" and task.file.cluster_field == "cluster"
    train = root.task_train("alfworld")
    assert sorted(os.listdir(train)) == sorted(FILES[:1] + FILES[3:])
    first = next(load(task.folder / "environment.py").goals(train))
    assert first["id"].startswith("train/") and set(first) == set(report[0]) - {"answer"}


def test_no_held_out_game_lies_in_the_store(root: Root, task: Task) -> None:
    train = {goal["pddl_problem"] for goal in load(task.folder / "environment.py").goals(root.task_train("alfworld"))}
    assert len(train) == 3553
    held_out = {g["pddl_problem"] for split in ("feedback", "report") for g in goals_of(root, task, split)}
    assert len(held_out) == 274 and not train & held_out


# --- playing ---

BY_PLAN = """
import json
from pathlib import Path
from autorl_hpc.rollouts.source import load

_theirs = load(Path({file!r}))
Environment = _theirs.Environment


class Dialogue:
    def prompt(self, transcript):
        return json.dumps([transcript.goal["id"], len(transcript.turns)])

    def action(self, completion):
        return completion
"""


def by_plan(goals: list[dict[str, Any]], change: Callable[[str], str] = lambda action: action) -> Player:
    plans = {goal["id"]: goal["walkthrough"] for goal in goals}

    def act(prompt: str) -> str:
        name, turn = json.loads(prompt)
        return change(plans[name][turn]) if turn < len(plans[name]) else "look"

    return Player(act)


@pytest.fixture(scope="module")
def planned(root: Root, task: Task, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The environment as graders have it, with a dialogue that says which game and turn it is."""
    file = tmp_path_factory.mktemp("by_plan") / "environment.py"
    file.write_text(BY_PLAN.format(file=str(task.folder / "environment.py")))
    return Source(file, "Environment", root.task_vault("alfworld"), held_out=True)


@needs_textworld
@pytest.mark.parametrize(("split", "n"), [("report", 134), ("feedback", 140)])
@pytest.mark.soak
def test_every_game_is_won_by_its_walkthrough(root: Root, task: Task, planned: Source, split: str, n: int) -> None:
    goals = goals_of(root, task, split)
    with Pool(planned, 2) as pool:
        episodes = run_episodes(by_plan(goals), goals, planned, Sampling(max_new_tokens=1), max_steps=50, pool=pool)
    assert [e.goal for e in episodes if e.reward != 1.0 or not e.done] == []
    assert len(episodes) == n and [e.goal for e in episodes] == [goal["id"] for goal in goals]
    assert [e.steps for e in episodes] == [len(goal["walkthrough"]) for goal in goals]


@needs_textworld
def test_put_wins_by_the_default_recipe_and_is_refused_by_the_papers(root: Root, task: Task, planned: Source) -> None:
    goals = [goal for goal in goals_of(root, task, "report") if goal["walkthrough"][-1].startswith("move ")][::60]
    for name, reward in (("default", 1.0), ("paper", 0.0)):
        source = Source(planned.file, planned.name, planned.data, True, dict(task.recipe(name).options))
        act = by_plan(goals, lambda action: re.sub(r"^move (.+) to (.+)", r"put \1 in/on \2", action))
        episodes = run_episodes(act, goals, source, Sampling(max_new_tokens=1), max_steps=15)
        assert goals and [e.reward for e in episodes] == [reward] * len(goals), name


@pytest.fixture
def environment(root: Root, task: Task) -> Environment:
    return Source(
        task.folder / "environment.py", "Environment", root.task_vault("alfworld"), held_out=True
    ).environment()


def test_the_prompt_is_the_references(root: Root, task: Task, official: Path) -> None:
    source = Source(task.folder / "environment.py", "Environment", root.task_vault("alfworld"), held_out=True)
    dialogue = source.dialogue()
    shots = json.loads((official / "react_prompts.json").read_text())
    kinds = {
        "pick_and_place_simple": "put",
        "pick_clean_then_place_in_recep": "clean",
        "pick_heat_then_place_in_recep": "heat",
        "pick_cool_then_place_in_recep": "cool",
        "look_at_obj_in_light": "examine",
        "pick_two_obj_and_place": "puttwo",
    }
    assert {goal["task_type"] for goal in goals_of(root, task, "report")} == set(kinds)
    for task_type, kind in kinds.items():
        transcript = Transcript(
            {"task_type": task_type}, "A room.\nYour task is to: x.", [Turn("go to a 1", "On the a 1.")]
        )
        assert dialogue.prompt(transcript) == (
            "Interact with a household to solve a task. Here are two examples.\n"
            + shots[f"react_{kind}_1"]
            + shots[f"react_{kind}_0"]
            + "\nHere is the task.\nA room.\nYour task is to: x.\n> go to a 1\nOn the a 1.\n>"
        )
    assert dialogue.action(" go to a 1 ") == "go to a 1"


@needs_textworld
def test_games_side_by_side_are_as_alone(root: Root, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a planner for each environment, and where environments take turns with one."""
    module = load(task.folder / "environment.py")
    source = Source(task.folder / "environment.py", "Environment", root.task_vault("alfworld"), held_out=True)
    goals = goals_of(root, task, "report")[:60:30]
    actions = ["look", *(action for goal in goals for action in goal["walkthrough"])]

    def played(environments: list[Environment]) -> list[list[Any]]:
        told = [[env.reset(goal, 0)] for env, goal in zip(environments, goals, strict=True)]
        for action in actions:
            for lines, env in zip(told, environments, strict=True):
                lines.append(env.step(action))
        return told

    alone: list[list[Any]] = []
    for goal in goals:
        env = source.environment()
        alone.append([env.reset(goal, 0), *map(env.step, actions)])
    assert any(step.reward for lines in alone for step in lines[1:])
    for planners in (module.PLANNERS, 1):
        monkeypatch.setattr(module, "PLANNERS", planners)
        environments = [source.environment() for _ in goals]
        assert (environments[0]._planner is environments[1]._planner) == (planners == 1)  # type: ignore[attr-defined]
        assert played(environments) == alone
