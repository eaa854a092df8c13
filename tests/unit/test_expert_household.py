"""ALFWorld's expert by itself: tasks in the games' words, and a household played by what it says alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from autorl_hpc.files.layout import Root
from autorl_hpc.rollouts.source import load
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.loader import load_task

REPO = Path(__file__).resolve().parents[2]
SCRIPTED = REPO / "templates" / "agents" / "scripted"


@pytest.fixture(scope="module")
def household() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTED))
    try:
        import household as module

        yield module
    finally:
        sys.path.remove(str(SCRIPTED))


WORDED = [
    ("put a clean mug in coffeemachine.", ("mug", "coffeemachine", "clean", 1)),
    ("clean some ladle and put it in drawer.", ("ladle", "drawer", "clean", 1)),
    ("put a hot potato in fridge.", ("potato", "fridge", "heat", 1)),
    ("heat some egg and put it in diningtable.", ("egg", "diningtable", "heat", 1)),
    ("cool some pan and put it in stoveburner.", ("pan", "stoveburner", "cool", 1)),
    ("put a cool tomato in microwave.", ("tomato", "microwave", "cool", 1)),
    ("put two soapbar in garbagecan.", ("soapbar", "garbagecan", None, 2)),
    ("find two cellphone and put them in bed.", ("cellphone", "bed", None, 2)),
    ("put some vase in safe.", ("vase", "safe", None, 1)),
    ("put a pencil on shelf.", ("pencil", "shelf", None, 1)),
    ("find some apple and put it in sidetable.", ("apple", "sidetable", None, 1)),
    ("examine the alarmclock with the desklamp.", ("alarmclock", None, None, 1)),
    ("look at bowl under the desklamp.", ("bowl", None, None, 1)),
    ("dance with the fridge.", None),
]


@pytest.mark.parametrize(("words", "wanted"), WORDED)
def test_a_task_in_the_games_words(household: ModuleType, words: str, wanted: tuple[object, ...] | None) -> None:
    task = household.task_of(words)
    assert (None if task is None else (task.thing, task.target, task.verb, task.count)) == wanted


def play(household: ModuleType, goal: dict[str, Any], prior: Any, steps: int) -> tuple[bool, list[str]]:
    """Plays a household of alfworld-mini, which speaks ALFWorld's words."""
    shop = load(REPO / "tasks" / "alfworld-mini" / "environment.py").Environment()
    expert, turns = household.Expert(prior), []
    first = shop.reset(goal, 0)
    for _ in range(steps):
        action = expert.act(goal, first, turns)
        if action is None:
            break
        observation, won, _ = shop.step(action)
        turns.append((action, observation))
        if won:
            return True, [action for action, _ in turns]
    return False, [action for action, _ in turns]


@pytest.fixture(scope="module")
def goals(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = Root(tmp_path_factory.mktemp("root"))
    stage_task(root, load_task("alfworld-mini"), None)
    files = [root.task_train("alfworld-mini") / "train.jsonl"]
    files += [root.task_vault("alfworld-mini") / split / "items.jsonl" for split in ("feedback", "report")]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_it_wins_every_household_without_being_told_where_things_are(
    household: ModuleType, goals: list[dict[str, Any]]
) -> None:
    assert len(goals) == 24
    for goal in goals:
        won, actions = play(household, goal, {}, 40)
        assert won, (goal["question"], actions)


def test_what_the_training_games_tell_makes_it_faster(household: ModuleType, goals: list[dict[str, Any]]) -> None:
    prior = household.prior_of(goals)
    assert sum(sum(places.values()) for places in prior.values()) == len(goals)
    blind = sum(len(play(household, goal, {}, 40)[1]) for goal in goals)
    told = sum(len(play(household, goal, prior, 40)[1]) for goal in goals)
    assert told < blind


def test_a_game_that_refuses_everything_ends(household: ModuleType) -> None:
    goal = {"question": "put some apple in fridge."}
    first = "You are in the middle of a room. Looking quickly around you, you see a fridge 1, and a desk 1.\nYour task is to: put some apple in fridge."
    expert, turns = household.Expert({}), []
    for _ in range(50):
        action = expert.act(goal, first, turns)
        if action is None:
            break
        turns.append((action, "Nothing happens."))
    assert action is None and len(turns) < 12, json.dumps(turns)
