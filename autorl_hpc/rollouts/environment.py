"""The environment Protocol of interactive tasks. Nothing in this room knows of held-out data: goals are handed in.

A task's class stands in its folder (`environment: environment.py:Environment` in task.yaml) and is used by graders and, for
training, by agents. It must not import anything of the suite but `autorl_hpc.rollouts`. Both classes are made with those of
these keyword arguments that they name: `data` (Path: the task's training data, or its vault for graders), `held_out` (bool:
which of the two), `options` (dict: the recipe's).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from autorl_hpc.rollouts.engine import CONVERSATION


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


# One episode: under way, and what came out of it.

MAX_ATTEMPTS = 64
"""Above all beginnings of one episode, counted or not: bounds on losses, errors and moves keep it below."""


@dataclass(frozen=True)
class Episode:
    """What came out of one goal.

    Attributes:
        goal: its id.
        reward: at the end, 0 to 1; None where the environment failed: the grader's fault, and no score.
        done: the environment ended it; else the steps or the context were used up.
        steps: actions of the model.
        tokens: that the model wrote.
        truncated: completions that were cut off by the token limit.
        transcript: first observation and turns; `completions` are the model's words behind each.
        problem: why there is no reward, or what ended the episode before its time.
    """

    goal: str
    reward: float | None
    done: bool
    steps: int
    tokens: int
    truncated: int
    transcript_sha256: str
    transcript: Transcript = field(repr=False)
    completions: tuple[str, ...] = field(default=(), repr=False)
    problem: str | None = None


@dataclass(eq=False)
class Live:
    """An episode under way.

    Attributes:
        index: of its goal.
        ticket: of the call that it waits for; 0: it waits for the model.
        key: of the prompt that the engine was asked, None where it was not.
        beginnings: that count against the bound; `attempts` are all of them.
        known: the transcript up to which it is played again, after it was moved.
    """

    index: int
    slot: int
    ticket: int = 0
    key: int | None = None
    beginnings: int = 1
    attempts: int = 0
    moves: int = 0
    begun: bool = False
    reward: float = 0.0
    done: bool = False
    tokens: int = 0
    truncated: int = 0
    prompt: str | list[dict[str, str]] | None = None
    transcript: Transcript = field(default_factory=lambda: Transcript({}, ""))
    known: Transcript | None = None
    completions: list[str] = field(default_factory=list)

    def clear(self) -> None:
        """Back to nothing, for another beginning."""
        self.begun, self.reward, self.done, self.tokens, self.truncated = False, 0.0, False, 0, 0
        self.completions, self.known, self.key = [], None, None
        self.attempts += 1

    def next_key(self) -> int:
        """The key of the next prompt: by goal, beginning and turn, so that draws don't depend on the timing. A beginning is one
        conversation."""
        return (self.index * MAX_ATTEMPTS + self.attempts) * CONVERSATION + len(self.completions)

    def over(self, goal: Mapping[str, Any], reward: float | None, problem: str | None) -> Episode:
        """What came out of it."""
        return Episode(
            goal=str(goal["id"]),
            reward=reward,
            done=self.done,
            steps=len(self.completions),
            tokens=self.tokens,
            truncated=self.truncated,
            transcript_sha256=_digest(self.transcript),
            transcript=self.transcript,
            completions=tuple(self.completions),
            problem=problem,
        )


def _digest(transcript: Transcript) -> str:
    text = json.dumps([transcript.first, *([turn.action, turn.observation] for turn in transcript.turns)])
    return hashlib.sha256(text.encode("ascii")).hexdigest()
