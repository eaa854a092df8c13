"""Environments as the reference's loop plays them, in its own process, one game at a time."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autorl_hpc.rollouts.source import Source


class Stock:
    """TextWorld's own environment under ALFWorld's wrapper, which works the admissible commands out after each step."""

    def __init__(self, source: Source) -> None:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.envs.pddl import PddlEnv

        data = Path(source.data)
        self._domain = (data / "pddl_domain.in_games.pddl").read_text()
        self._grammar = (data / "grammar.in_games.twl2").read_text()
        self._env: Any = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
        self._folder = tempfile.TemporaryDirectory()

    def reset(self, goal: Mapping[str, Any], seed: int) -> str:
        """Begins a game; the text without its title."""
        game = Path(self._folder.name) / "game.tw-pddl"
        game.write_text(
            json.dumps(
                {
                    "pddl_domain": self._domain,
                    "grammar": self._grammar.replace("UNKNOWN GOAL.", goal["question"]),
                    "pddl_problem": goal["pddl_problem"],
                    "solvable": True,
                    "walkthrough": goal["walkthrough"],
                }
            )
        )
        self._env.load(str(game))
        return "\n".join(self._env.reset().feedback.split("\n\n")[1:])

    def step(self, action: str) -> tuple[str, bool]:
        """Observation, and whether the game is over. Thinking is answered by `OK.`, as ReAct's loop does."""
        state, _, done = self._env.step(action)
        return ("OK." if action.startswith("think:") else str(state.feedback)), bool(done)


class Own:
    """The task's own environment: for tasks that have no stock one."""

    def __init__(self, source: Source) -> None:
        self._env = source.environment()

    def reset(self, goal: Mapping[str, Any], seed: int) -> str:
        """Begins an episode."""
        return self._env.reset(goal, seed)

    def step(self, action: str) -> tuple[str, bool]:
        """Observation, and whether the episode is over."""
        observation, done, _ = self._env.step(action)
        return observation, done
