"""The scripted experts as players: the household of alfworld-mini, the shop of webshop-mini, a search; and what they reward."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pieces
import pytest
from pieces import REPO

from autorl_hpc.files.layout import Root
from autorl_hpc.rollouts.source import load
from autorl_hpc.rollouts.webshop import Environment
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.loader import load_task

piece = pieces.piece


@pytest.fixture(scope="module")
def household(piece: Any) -> ModuleType:
    module: ModuleType = piece("household")
    return module


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
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
    ],
)
def test_a_task_in_the_games_words(household: ModuleType, words: str, wanted: tuple[object, ...] | None) -> None:
    task = household.task_of(words)
    assert (None if task is None else (task.thing, task.target, task.verb, task.count)) == wanted


def play(
    environment: Any, goal: dict[str, Any], act: Callable[[str, list[tuple[str, str]]], str | None], steps: int
) -> tuple[float, int]:
    """Play one episode; return the last reward and the number of steps."""
    first, turns, reward = environment.reset(goal, 0), [], 0.0
    while len(turns) < steps and (action := act(first, turns)) is not None:
        observation, done, reward = environment.step(action)
        turns.append((action, observation))
        if done:
            break
    return reward, len(turns)


def staged(folder: Path, task: str, *files: str) -> tuple[Root, list[dict[str, Any]]]:
    root = Root(folder)
    stage_task(root, load_task(task), None)
    return root, [json.loads(line) for file in files for line in (root.path / file).read_text().splitlines()]


def test_it_wins_every_household_and_faster_where_it_knows_the_training_games(
    household: ModuleType, tmp_path: Path
) -> None:
    files = [f"vault/alfworld-mini/{split}/items.jsonl" for split in ("feedback", "report")]
    train = Root(tmp_path).task_train("alfworld-mini").relative_to(tmp_path) / "train.jsonl"
    _, goals = staged(tmp_path, "alfworld-mini", str(train), *files)
    environment = load(REPO / "tasks" / "alfworld-mini" / "environment.py").Environment()
    prior = household.prior_of(goals)
    assert len(goals) == sum(sum(places.values()) for places in prior.values()) == 24
    steps = []
    for known in ({}, prior):
        experts = [household.Expert(known) for _ in goals]
        games = [
            play(environment, goal, lambda first, turns: expert.act(goal, first, turns), 40)  # noqa: B023
            for goal, expert in zip(goals, experts, strict=True)
        ]
        assert all(won for won, _ in games)
        steps.append(sum(taken for _, taken in games))
    assert steps[1] < steps[0]


def test_a_game_that_refuses_everything_ends(household: ModuleType) -> None:
    goal = {"question": "put some apple in fridge."}
    first = "You are in the middle of a room. Looking quickly around you, you see a fridge 1, and a desk 1.\nYour task is to: put some apple in fridge."
    expert, turns = household.Expert({}), []
    while (action := expert.act(goal, first, turns)) is not None and len(turns) < 50:
        turns.append((action, "Nothing happens."))
    assert action is None and len(turns) < 12, json.dumps(turns)


def test_the_household_expert_goes_on_from_others_faults(household: ModuleType) -> None:
    expert = household.Expert({"cd": {"drawer": 3}, "keychain": {"desk": 2}})
    goal = {"question": "put some keychain on armchair."}
    first = (
        "You see a armchair 1, a desk 1, a drawer 1, and a shelf 1.\nYour task is to: put some keychain on armchair."
    )
    turns = [
        ("go to armchair 1", "On the armchair 1, you see a cd 2."),
        ("take cd 2 from armchair 1", "You pick up the cd 2 from the armchair 1."),
        ("take keychain 1 from desk 1", "Nothing happens."),  # twice from afar: that says nothing of it
        ("take keychain 1 from desk 1", "Nothing happens."),
        ("go to desk 1", "On the desk 1, you see a keychain 1."),
    ]
    answers = {
        "go to armchair 1": "On the armchair 1, you see nothing.",
        "move cd 2 to armchair 1": "Nothing happens.",  # it lay there, and can't be put there
        "go to drawer 1": "The drawer 1 is closed.",
        "open drawer 1": "You open the drawer 1. In it, you see nothing.",
        "move cd 2 to drawer 1": "You move the cd 2 to the drawer 1.",
        "go to desk 1": "On the desk 1, you see a keychain 1.",
        "take keychain 1 from desk 1": "You pick up the keychain 1 from the desk 1.",
        "move keychain 1 to armchair 1": "You move the keychain 1 to the armchair 1.",
    }
    done = []
    while not done or done[-1] != "move keychain 1 to armchair 1":
        done.append(expert.act(goal, first, turns))
        turns.append((done[-1], answers[done[-1]]))
    assert done == [
        "go to armchair 1", "move cd 2 to armchair 1", "go to drawer 1", "open drawer 1", "move cd 2 to drawer 1",
        "go to desk 1", "take keychain 1 from desk 1", "go to armchair 1", "move keychain 1 to armchair 1",
    ]  # fmt: skip


def test_the_shopper_buys_most_wishes_by_what_the_pages_show(piece: Any, tmp_path: Path) -> None:
    train = Root(tmp_path).task_train("webshop-mini")
    _, goals = staged(tmp_path, "webshop-mini", str((train / "goals.jsonl").relative_to(tmp_path)))
    shop = Environment(train)
    shopper = piece("shopping").Shopper
    rewards = [
        play(shop, goal, lambda first, turns: shopper().act(goal, first, turns), 10)[0]  # noqa: B023
        for goal in goals
    ]
    assert sum(reward == 1.0 for reward in rewards) > 0.9 * len(goals), rewards


def test_the_searcher_answers_only_what_was_found(piece: Any) -> None:
    searcher = piece("shopping").Searcher(6, True)
    goal = {"question": "Where was the founder of Brell Mills born?", "answer": "Orlen"}
    first = searcher.act(goal, "", [])
    assert first == "I need to look this up.\nAction: search[Where was the founder of Brell Mills born?]"
    second = searcher.act(goal, "", [(first, "[1] Brell Mills: founded by Mara Veld.")])
    assert second.endswith("Action: search[Brell Mills]")
    turns = [(first, "Brell Mills: founded by Mara Veld."), (second, "Mara Veld: born in Orlen.")]
    assert searcher.act(goal, "", turns) == "The results give the answer.\nAction: answer[Orlen]"
    assert searcher.act(goal, "", [(f"search[{n}]", "nothing") for n in range(5)]) is None


PROBLEM = {
    "question": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum of xs."""\n',
    "answer": "    return sum(xs)\n",
    "entry_point": "total",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
CODED = [
    ("    return sum(xs)\n", 1.0),
    ("```python\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n```", 1.0),
    ("Here:\n```\n    return sum(xs)\n```\nDone.", 1.0),
    ("    return 3\n", 0.0),
    ("    while True: pass\n", 0.0),
    ("    return [0] * 10**11\n", 0.0),
    ("", 0.0),
]


@pytest.mark.slow
def test_code_is_right_if_its_test_passes_and_numbers_if_they_are_equal(piece: Any) -> None:
    rewards = piece("rewards")
    gold = rewards.gold_of(PROBLEM)
    assert rewards.right([answer for answer, _ in CODED], [gold] * len(CODED)) == [value for _, value in CODED]
    row = {"question": "?", "answer": "so #### 1,200"}
    assert rewards.right(["#### 1200.0", "1200", "#### 12"], [rewards.gold_of(row)] * 3) == [1.0, 0.0, 0.0]
    assert rewards.kind_of({"question": "?", "answer": "Write a poem."}) is None
