"""The shopping expert in the shop of webshop-mini: it buys what was wished for, from the page alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from autorl_hpc.files.layout import Root
from autorl_hpc.rollouts.webshop import Environment
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.loader import load_task

SCRIPTED = Path(__file__).resolve().parents[2] / "templates" / "agents" / "scripted"


def test_it_wins_most_wishes_by_what_the_pages_show(tmp_path: Path) -> None:
    sys.path.insert(0, str(SCRIPTED))
    try:
        from shopping import Shopper  # type: ignore[import-not-found,unused-ignore]
    finally:
        sys.path.pop(0)
    root = Root(tmp_path)
    stage_task(root, load_task("webshop-mini"), None)
    train = root.task_train("webshop-mini")
    goals = [json.loads(line) for line in (train / "goals.jsonl").read_text().splitlines()]
    shop, rewards = Environment(train), []
    for goal in goals:
        first, turns, reward = shop.reset(goal), [], 0.0
        while (action := Shopper().act(goal, first, turns)) is not None and len(turns) < 10:
            observation, done, reward = shop.step(action)
            turns.append((action, observation))
            if done:
                break
        rewards.append(reward)
    won = sum(reward == 1.0 for reward in rewards)
    assert won > 0.9 * len(goals), rewards
