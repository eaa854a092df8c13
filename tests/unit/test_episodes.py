"""The episode scheduler, with engines that play by a plan: order, batches, texts, the engine's errors, the scorer."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import counting_environment
import pytest
from counting_environment import count, goal, outcomes, play
from players import Player

from autorl_hpc.rollouts.environment import Live, Transcript, Turn
from autorl_hpc.rollouts.source import Source
from autorl_hpc.scoring.outcome import Context
from autorl_hpc.scoring.registry import Episodes, encode
from autorl_hpc.tasks.heldout import Item

source = counting_environment.source

REPO = Path(__file__).resolve().parents[2]


# --- order, batches ---


def test_episodes_come_back_in_the_goals_order_with_the_same_outcome_each_time(source: Source) -> None:
    goals = [goal(number, n=1 + number % 7) for number in range(20)]
    engine = Player(count)
    episodes = play(source, goals, engine, workers=3, gather_s=30)
    assert [e.goal for e in episodes] == [g["id"] for g in goals]
    assert [(e.reward, e.done, e.steps, e.tokens) for e in episodes] == [(1.0, True, g["n"], g["n"]) for g in goals]
    assert [len(batch) for batch in engine.batches] == [20, 17, 14, 11, 8, 5, 2], "not all that were ready were asked"
    assert episodes[2].completions == (" 1\n", " 2\n", " 3\n")
    assert [turn.observation for turn in episodes[2].transcript.turns] == ["1", "2", "3"]
    for workers, in_flight, gather_s in [(1, 256, 0.0), (2, 3, 0.001), (3, 1, 1.0)]:
        again = play(source, goals, workers=workers, in_flight=in_flight, gather_s=gather_s)
        assert outcomes(again) == outcomes(episodes)


def test_the_hash_of_an_episode_stands_for_every_word_of_it() -> None:
    def digest(first: str, action: str, observation: str) -> str:
        live = Live(0, 0)
        live.transcript = Transcript({"id": "g"}, first, [Turn(action, observation)])
        return live.over({"id": "g"}, 1.0, None).transcript_sha256

    told = [("f", "a", "o"), ("F", "a", "o"), ("f", "A", "o"), ("f", "a", "O")]
    assert len({digest(*one) for one in told}) == 4 and digest(*told[0]) == digest(*told[0])


def test_a_prompt_that_grows_too_long_ends_an_episode_with_the_reward_so_far(source: Source) -> None:
    short, long = play(source, [goal(0, n=2), goal(1, n=10)], max_prompt_tokens=50)
    assert short.reward == 1.0 and short.problem is None
    assert long.reward is not None and 0 < long.reward < 1 and not long.done
    assert long.problem == "the prompt is longer than the recipe allows"


def test_the_seed_and_cut_off_completions_are_told(source: Source) -> None:
    engine = Player(lambda prompt: "1 cut off" if "> " not in prompt else "2")
    (episode,) = play(source, [goal(0, n=2, trouble="fail('never')", at=9)], engine, seed=7)
    assert "AssertionError: 1 cut off follows on 0" in str(episode.problem), episode
    (episode,) = play(source, [goal(0, n=1)], Player(lambda prompt: "1"), seed=7)
    assert episode.transcript.first.endswith("seed 7")


# --- the scorer ---


@pytest.mark.parametrize(
    ("reward", "threshold", "won"),
    [
        (1.0, None, 1), (1.0 - 1e-10, None, 1), (0.999999, None, 0), (0.5, None, 0), (0.5, 0.5, 1),
        (0.5 - 1e-10, 0.5, 1), (0.49, 0.5, 0), (0.0, None, 0), (0.0, 0.5, 0),
    ],
)  # fmt: skip
def test_won_is_what_reaches_the_threshold(reward: float, threshold: float | None, won: int) -> None:
    context = Context() if threshold is None else Context(options={"threshold": threshold})
    items = [Item("a", "", "")]
    (outcome,) = Episodes().score(items, [[encode(reward, 3, True, "0" * 64)]], context)
    assert outcome.value == won and outcome.facts == {"reward": reward, "steps": 3.0}


# --- for agents ---


def test_the_room_imports_nothing_of_the_suite_but_itself() -> None:
    script = (
        "import json, sys; import autorl_hpc.rollouts.episodes, autorl_hpc.rollouts.worker;"
        "print(json.dumps(sorted(m for m in sys.modules if m.startswith('autorl_hpc'))))"
    )
    found = json.loads(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    )
    assert all(name == "autorl_hpc" or name.startswith("autorl_hpc.rollouts") for name in found), found
    room = REPO / "autorl_hpc" / "rollouts"
    for path in (*room.rglob("*.py"), *(REPO / "tasks").glob("*/environment.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for_types = {id(n) for node in ast.walk(tree) if isinstance(node, ast.If) for n in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in for_types:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                for name in names:
                    inside = name.split(".")[0] != "autorl_hpc" or name.startswith("autorl_hpc.rollouts")
                    assert inside, f"{path} imports {name}, which agents don't get"


def test_more_steps_than_allowed_end_an_episode(source: Source) -> None:
    (episode,) = play(source, [goal(0, n=8)], max_steps=4)
    assert (episode.reward, episode.done, episode.steps, episode.problem) == (0.5, False, 4, None)


def test_the_metrics_of_rewards() -> None:
    items = [Item(str(number), "", "") for number in range(4)]
    answers = [[encode(reward, steps, True, "")] for reward, steps in [(1.0, 2), (0.5, 4), (0.25, 6), (0.0, 8)]]
    outcomes = Episodes().score(items, answers, Context(options={"threshold": 0.5}))
    assert [o.value for o in outcomes] == [1, 1, 0, 0]
    assert Episodes().metrics(items, outcomes) == {
        "average_reward": 0.4375,
        "success_at_1": 25.0,
        "success_at_half": 50.0,
        "mean_steps": 5.0,
    }
