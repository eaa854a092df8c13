"""The environment of questions that are answered by searching. A scorer rates the answer; see `Environment.step`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autorl_hpc.rollouts.environment import Step
from autorl_hpc.rollouts.search.backend import Result, Setup, make_backend
from autorl_hpc.rollouts.search.dialogue import asked, parse
from autorl_hpc.rollouts.search.matching import SINGLE, compare

TRAIN = "train.jsonl"
RESULTS = 3
"""Results of a search, as the reference shows."""
MAX_RESULT_CHARS = 600
"""Of one result, its title included: engines on the internet may send more."""
NOTHING = "Nothing was found."
NO_ACTION = "That is no action. Write `Action: search[words]` or `Action: answer[the answer]`."


def goals(data: Path) -> Iterator[dict[str, Any]]:
    """The training questions, with their answers: the environment's reward needs those."""
    with open(Path(data) / TRAIN, "rb") as file:
        for line in file:
            yield json.loads(line)


class Environment:
    """One question after the other.

    Options: `search` and those of the back end (see backend.py); `results`: of a search, default 3.
    """

    replays = False  # a search may cost money

    def __init__(self, data: Path, *, held_out: bool = False, options: Mapping[str, Any] | None = None) -> None:
        """Opens the search.

        Raises:
            OSError, ValueError: the back end can't be made; see `make_backend`.
        """
        options = options or {}
        self._backend = make_backend(Setup(options, Path(data), held_out))
        self._results = int(options.get("results", RESULTS))
        self._goal: Mapping[str, Any] = {}

    def reset(self, goal: Mapping[str, Any], seed: int = 0) -> str:
        """Begins with a question. Nothing is drawn, so `seed` is not used."""
        del seed
        self._goal = goal
        return asked(goal).strip()

    def step(self, action: str) -> Step:
        """One search, or the answer: it ends the episode, and the last observation is the answer itself, for the scorer.

        The reward is the F1 of items that match exactly, for goals that hold their `answer`: training ones. Held-out goals
        don't; their answers are rated by the recipe's scorer.

        Raises:
            SearchFailed: the back end could not be asked.
        """
        name, argument = parse(action)
        if name == "answer":
            return Step(argument, True, self._reward(argument))
        if name == "search":
            return Step(shown(self._backend.search(argument, self._results)))
        return Step(NO_ACTION)

    def close(self) -> None:
        """The corpus stays open for the others of this process."""

    def _reward(self, answer: str) -> float:
        if "answer" not in self._goal:
            return 0.0
        return compare(answer, str(self._goal["answer"]), str(self._goal.get("answer_type", SINGLE))).f1


def shown(results: list[Result]) -> str:
    """Results as the model sees them: one a line, with a number. A text's own line ends could pass for the environment's."""
    lines = (f"[{number}] {row.title}: {row.snippet}" for number, row in enumerate(results, start=1))
    return "\n".join(" ".join(line.split())[:MAX_RESULT_CHARS] for line in lines) or NOTHING
