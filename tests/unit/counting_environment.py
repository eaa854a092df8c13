"""An environment in a file whose goal is to count, the ways in which it fails, and engines that play it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S
from players import Player

from autorl_hpc.records.task import Sampling
from autorl_hpc.rollouts.environment import Episode
from autorl_hpc.rollouts.episodes import run_episodes
from autorl_hpc.rollouts.pool import Pool
from autorl_hpc.rollouts.source import Source

SAMPLING = Sampling(max_new_tokens=8)

ENVIRONMENT = '''
import os, signal, subprocess, sys, time
from autorl_hpc.rollouts.environment import Step


class Dialogue:
    def prompt(self, transcript):
        shown = transcript.first + "".join(f" > {action}: {seen}" for action, seen in transcript.turns)
        if transcript.goal.get("chat"):
            return [{"role": "system", "content": "count"}, {"role": "user", "content": shown}]
        return shown

    def action(self, completion):
        return completion.strip()


class Environment:
    """Count to `n`. At step `at` (0: in reset) `trouble` happens, only the first time where `once` names a file."""

    def __init__(self, data, options):
        self.options = options

    def reset(self, goal, seed):
        self.goal, self.count = goal, 0
        return self.trouble(f"{goal['id']}: count to {goal['n']}, seed {seed}")

    def step(self, action):
        assert action == str(self.count + 1), f"{action} follows on {self.count}"
        self.count += 1
        time.sleep(self.goal.get("slow", 0))
        done = self.count == self.goal["n"]
        return self.trouble(Step(f"{self.count}", done, self.count / self.goal["n"]))

    def close(self):
        pass

    def trouble(self, usual):
        goal = self.goal
        if "trouble" not in goal or goal.get("at", 1) != self.count or os.path.exists(goal.get("once", "/nowhere")):
            return usual
        if "once" in goal:
            open(goal["once"], "w").close()
        return eval(goal["trouble"])


def fail(words):
    raise RuntimeError(words)


def die(number):
    os.kill(os.getpid(), number)
    time.sleep(60)


def wait(path):
    while not os.path.exists(path):
        time.sleep(0.005)
'''


@pytest.fixture
def source(tmp_path: Path) -> Source:
    file = tmp_path / "environment.py"
    file.write_text(ENVIRONMENT)
    return Source(file, "Environment", tmp_path)


def count(prompt: str) -> str:
    """What a model says that can count: the next number."""
    return f" {prompt.count(' > ') + 1}\n"


def goal(number: int, n: int = 3, **fields: Any) -> dict[str, Any]:
    return {"id": f"g{number}", "n": n, **fields}


def play(source: Source, goals: list[dict[str, Any]], engine: Player | None = None, **options: Any) -> list[Episode]:
    return run_episodes(engine or Player(count), goals, source, SAMPLING, **{"max_steps": 20, **options})


def limit_s(name: str) -> float:
    """Of a call: a second where nothing else ends it, and otherwise as long as a busy machine may take."""
    return 1 if name == "hangs" else PATIENCE_S


def warm(source: Source, pool: Pool) -> None:
    """Lets all its workers play, so that none of them comes when the others have done all there is to do."""
    while len(pool.pids) < pool.size:
        play(source, [goal(number, n=1) for number in range(90, 98)], pool=pool)


def outcomes(episodes: list[Episode]) -> list[tuple[Any, ...]]:
    return [(e.goal, e.reward, e.done, e.steps, e.tokens, e.transcript_sha256, e.problem) for e in episodes]


TROUBLES = {
    "killed": ("die(9)", r"the environment ended its process \(signal SIGKILL\)"),
    "crashed": ("die(11)", r"the environment ended its process \(signal SIGSEGV\)"),
    "left": ("os._exit(3)", r"the environment ended its process \(exit code 3\)"),
    "hangs": ("time.sleep(600)", r"the environment gave no answer within 1 s"),
    "raises": ("fail('broken \\ud800 door')", r"the environment failed: RuntimeError: broken \? door"),
    "ends": ("sys.exit('enough')", r"the environment failed: SystemExit: enough"),
    "no step": ("'seven'", r"a step is \(observation, done, reward\), not 'seven'"),
    "nothing": ("None", r"a step is \(observation, done, reward\), not None"),
    "no number": ("('a', False, 'much')", r"a reward is a number, not 'much'"),
    "a number as text": ("('a', True, '1')", r"a reward is a number, not '1'"),
    "done in words": ("('a', 'no', 0.0)", r"`done` is True or False, not 'no'"),
    "done as a number": ("('a', 1, 0.0)", r"`done` is True or False, not 1"),
    "NaN": ("('a', False, float('nan'))", r"a reward lies between 0 and 1, not nan"),
    "too much": ("('a', True, 1.5)", r"a reward lies between 0 and 1, not 1.5"),
    "no text": ("(b'a', False, 0.0)", r"an observation is text, not bytes"),
}
