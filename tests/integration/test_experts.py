"""The scripted experts at work with the tiny model: their real files, accelerate, trl and environments, each for a few steps."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import take
from experts import GAME, Workplace

EVERY_LOOK_IS_BETTER = """
import machine, train_online
class Run(train_online.Run):
    def validate(self):
        return float(self.iteration)
train_online.Run = Run
machine.KEEP_S = {keep_s}
train_online.main()
"""
"""The trainer itself, which saves after its last iteration, and keeps its state as often as asked."""


SLOW = 4
"""How much slower than an idle machine a busy one may be."""

KILLED_ONCE = """
import os, sys, machine, train_episodes
machine.KEEP_S = 0.0
class Killed(train_episodes.Imitation):
    def take(self, share):
        if self.step == 4 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), 9)
        return super().take(share)
train_episodes.Imitation = Killed
train_episodes.main()
"""


TOLD = """
import household, machine, train_corrected
machine.KEEP_S = 0.0
class Told(household.Expert):
    def __init__(self):
        pass
    def act(self, goal, first, turns):
        return "11"
train_corrected.expert_for = lambda goals, meta: Told()
train_corrected.main()
"""


def _base(place: Workplace) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return dict(load_file(place.model / "model.safetensors"))


def packed(path: Path, rows: list[dict[str, Any]]) -> None:
    """Episodes, as they are kept."""
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def near(one: Mapping[str, Any], other: Mapping[str, Any], start: Mapping[str, Any]) -> bool:
    """Whether two trainings went the same way: AdamW takes whole steps by the sign of what is but rounding, in few weights."""
    apart = sum(float(((one[name] - other[name]) ** 2).sum()) for name in start) ** 0.5
    return apart < 0.01 * sum(float(((one[name] - start[name]) ** 2).sum()) for name in start) ** 0.5


def same(one: Mapping[str, Any], other: Mapping[str, Any], within: float) -> bool:
    assert one.keys() == other.keys()
    return all(np.allclose(one[name], other[name], atol=within, rtol=0) for name in one)


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    place = Workplace(tmp_path_factory.mktemp("game"), "alfworld-mini", "sft-grpo-online")
    (place.path / "environment" / "environment.py").write_text(GAME)
    meta = json.loads((place.path / "run_meta.json").read_text())
    meta["recipe"]["max_new_tokens"] = 8
    (place.path / "run_meta.json").write_text(json.dumps(meta))
    for name, keep_s in (("often", 0.0), ("seldom", 1e9)):
        (place.path / f"{name}.py").write_text(EVERY_LOOK_IS_BETTER.format(keep_s=keep_s))
    return place


def online(place: Workplace, script: str, out: str, iterations: int, processes: int) -> str:
    return place.bash(
        f'cp {script}.py code/; launch "$MODEL_PATH" {script}.py --out output/{out} --iterations {iterations} '
        "--games 6 --copies 4",
        EXPERT_PROCESSES=str(processes),
    )


@pytest.mark.soak
def test_two_processes_take_the_steps_of_one_and_an_interrupted_training_goes_on(game: Workplace) -> None:
    told = online(game, "seldom", "one", 2, 1)
    assert "'mixed_groups'" in told and "'epoch': 2" in told
    base = _base(game)
    one = game.weights("one")
    assert one.keys() == base.keys() and not same(one, base, 1e-5)
    assert "2 processes" in online(game, "seldom", "two", 2, 2)
    assert near(game.weights("two"), one, base)
    online(game, "often", "pieces", 1, 1)
    assert not same(game.weights("pieces"), one, 1e-5)
    assert "going on from iteration 1" in online(game, "often", "pieces", 2, 1)
    assert near(game.weights("pieces"), one, base)
    take(game.path / "output" / "one", game.path.parent / "taken")  # as intake does: else refused
    assert not list((game.path / "output").glob("*.partial"))


@pytest.mark.soak
def test_training_on_episodes_that_is_killed_goes_on_to_the_same_weights(game: Workplace) -> None:
    (game.path / "killed.py").write_text(KILLED_ONCE)
    rows = [{"goal": "g", "reward": 1.0, "ids": [5 + n, 6, 7, 8, 9 + n], "own": [0, 0, 1, 0, 1]} for n in range(24)]
    packed(game.path / "output" / "shown" / "000024.jsonl.gz", rows)
    asked = 'launch "$MODEL_PATH" {} --out output/{} --traces output/shown --steps 6'
    told = game.bash(f"cp killed.py code/; {asked.format('killed.py', 'broken')}", check=False)
    assert "'tokens_per_s'" not in told and not (game.path / "output" / "broken").exists()
    assert "going on from iteration 4" in game.bash(asked.format("killed.py", "broken"))
    told = game.bash(asked.format("train_episodes.py", "unbroken"), EXPERT_PROCESSES="2")
    assert "'step': 6" in told and (game.path / "output" / "unbroken.done").exists()
    assert same(game.weights("broken"), game.weights("unbroken"), 2e-6)
    assert not same(game.weights("broken"), _base(game), 1e-4)
    packed(game.path / "output" / "long" / "000019.jsonl.gz", [{"goal": "g", "reward": 1.0, "ids": [], "own": []}] * 19)
    told = game.bash('launch "$MODEL_PATH" train_episodes.py --out output/none --traces output/long', check=False)
    assert "of 19 episodes that the expert won the first prompt is longer than the model's window" in told


@pytest.mark.soak
def test_rounds_of_corrections_teach_what_the_expert_says_and_go_on_after_an_interruption(game: Workplace) -> None:
    (game.path / "told.py").write_text(TOLD)
    row = {"goal": "g", "reward": 1.0, "ids": [5, 6, 7, 8, 9], "own": [0, 0, 1, 0, 1]}
    packed(game.path / "output" / "few" / "000001.jsonl.gz", [row])
    asked = (
        'cp told.py code/; launch "$MODEL_PATH" told.py --out output/told --traces output/few --games 12 --rounds {}'
    )
    told = game.bash(asked.format(1), EXPERT_SAMPLER="rows")
    assert "'round': 1" in told and "'played': 24" in told and "sampler by rows: " in told
    once = game.weights("told")
    assert not same(once, _base(game), 1e-4)
    told = game.bash(asked.format(2), EXPERT_PROCESSES="2")
    assert "going on from iteration 1" in told and "'round': 2" in told and "'played': 24" in told
    assert not same(game.weights("told"), once, 1e-4) and (game.path / "output" / "told.done").exists()
    told = game.bash(asked.format(1).replace("told.py --out", "train_corrected.py --out"), check=False)
    assert "only the household expert can say how to go on" in told


@pytest.mark.soak
def test_supervised_training_on_two_processes_is_that_of_one_with_twice_the_batch(tmp_path: Path) -> None:
    place = Workplace(tmp_path, "arithmetic", "sft")
    for out, processes in (("one", "1"), ("two", "2")):
        place.bash(f'launch "$MODEL_PATH" train_sft.py --out output/{out} --steps 3', EXPERT_PROCESSES=processes)
    assert not same(place.weights("one"), _base(place), 1e-4)
    assert same(place.weights("two"), place.weights("one"), 1e-5)


@pytest.mark.soak
def test_sft_grpo_online_from_the_experts_games_to_the_last_submission(tmp_path: Path) -> None:
    place = Workplace(tmp_path, "alfworld-mini", "sft-grpo-online", left_s=(3000.0, 3000.0, 20.0))
    place.env["EXPERT_SAMPLER"] = "rows"
    told = place.start()
    assert '"won": 6' in told and "'tokens_per_s'" in told and "'eval_reward'" in told
    assert "sampler by rows: " in told and "no sampler" not in told
    first, *middle, last = place.submitted()
    assert first[0] == "output/sft" and "--final" in last
    assert "output/online" in [one[0] for one in middle], "the last checkpoint, better or not"
    again = place.start()
    assert again.count("finished before, kept") == 3


@pytest.mark.soak
def test_rejection_sampling_keeps_what_is_right_and_learns_from_it(tmp_path: Path) -> None:
    place = Workplace(tmp_path, "arithmetic", "rejection-sampling", left_s=(60.0 * SLOW,))
    told = place.start()
    rows = [json.loads(line) for line in (place.path / "output/kept-1/rows.jsonl").read_text().splitlines()]
    assert len(rows) > 20 and all("####" in row["answer"] for row in rows)
    assert [name[0] for name in place.submitted()][:2] == ["output/round-1", "output/round-2"]
    assert place.submitted()[-1][1] == "--final" and "on the validation part" in told


@pytest.mark.soak
def test_grpo_from_the_base_model_submits_once(tmp_path: Path) -> None:
    place = Workplace(tmp_path, "arithmetic", "grpo", left_s=(40.0,))
    told = place.start()
    assert "'completions/mean_length'" in told
    assert [asked[0] for asked in place.submitted()] == ["output/grpo"]
    assert not same(place.weights("grpo"), _base(place), 0.0), "however few steps a slow machine takes"


def test_a_task_without_a_reward_is_refused_with_the_way_out(tmp_path: Path) -> None:
    place = Workplace(tmp_path, "alpacaeval-mini", "grpo")
    told = place.bash('train_grpo "$MODEL_PATH" 0.9', check=False)
    assert "there is no reward for RL here; use the agent sft" in told
