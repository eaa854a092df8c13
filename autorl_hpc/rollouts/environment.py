"""The environment Protocol of interactive tasks. Nothing in this room knows of held-out data: goals are handed in.

A task's class stands in its folder (`environment: environment.py:Environment` in task.yaml) and is used by graders and, for
training, by agents. It must not import anything of the suite but `autorl_hpc.rollouts`. Both classes are made with those of
these keyword arguments that they name: `data` (Path: the task's training data, or its vault for graders), `held_out` (bool:
which of the two), `options` (dict: the recipe's).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class Step(NamedTuple):
    """What follows on an action.

    Attributes:
        observation: the text that the model sees next.
        done: the episode has ended.
        reward: of the episode so far, 0 to 1.
    """

    observation: str
    done: bool = False
    reward: float = 0.0


class Environment(Protocol):
    """One environment, in a process of its own; it serves one episode after the other.

    A class may set `replays = False`: its episodes are never played again up to where they stand, which is done to get them away
    from one that hangs. Right where a step costs money or the world outside answers.
    """

    def reset(self, goal: Mapping[str, Any], seed: int) -> str:
        """Begins an episode and returns the first observation."""
        ...

    def step(self, action: str) -> Step:
        """One action of the model, already cleaned by the dialogue."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...


class Turn(NamedTuple):
    """One exchange: what the model did, and what it saw then."""

    action: str
    observation: str


@dataclass
class Transcript:
    """An episode as it stands."""

    goal: Mapping[str, Any]
    first: str
    turns: list[Turn] = field(default_factory=list)


class Unavailable(Exception):
    """Something that an environment asks can't be reached. Raised by environments that have tried again themselves: the episode
    is not begun anew."""


class Dialogue(Protocol):
    """How a task turns an episode into a prompt and a completion into an action. Stands in the task's folder, beside the
    environment, as class `Dialogue` of the same file. One is made in each process with environments, and serves all of them: what
    it says depends on its arguments alone."""

    def prompt(self, transcript: Transcript) -> str | Sequence[Mapping[str, str]]:
        """What the model is asked: plain text, or chat messages."""
        ...

    def action(self, completion: str) -> str:
        """The action in the model's words; what is no action is passed on as it stands, for the environment to refuse."""
        ...
