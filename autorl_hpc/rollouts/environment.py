"""The environment and dialogue Protocols of interactive tasks, and the result of one episode. A task's classes are in its
folder, import nothing of the suite but `autorl_hpc.rollouts`, and are created with those keyword arguments that they accept:
`data` (Path: training data or vault), `held_out` (bool), `options` (dict: the recipe's)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from autorl_hpc.rollouts.engine import CONVERSATION


class Step(NamedTuple):
    """The result of an action: what the model sees next, whether the episode has ended, and its reward so far, 0 to 1."""

    observation: str
    done: bool = False
    reward: float = 0.0


class Environment(Protocol):
    """One environment, in a worker process; it serves one episode after another."""

    def reset(self, goal: Mapping[str, Any], seed: int) -> str:
        """Begin an episode and return the first observation."""

    def step(self, action: str) -> Step:
        """Perform one action of the model, as extracted by the dialogue."""

    def close(self) -> None:
        """Release all resources."""


class Turn(NamedTuple):
    """One exchange: the model's action and the observation that followed."""

    action: str
    observation: str


@dataclass
class Transcript:
    """An episode so far."""

    goal: Mapping[str, Any]
    first: str
    turns: list[Turn] = field(default_factory=list)


class Unavailable(Exception):
    """A resource of the environment can't be reached. Raised after the environment's own retries, so the episode is not
    retried."""


class Dialogue(Protocol):
    """Turns an episode into a prompt, and a completion into an action. Defined in the task's folder as class `Dialogue` in the
    environment's file. One instance per process serves all environments, so its results must depend on its arguments alone."""

    def prompt(self, transcript: Transcript) -> str | Sequence[Mapping[str, str]]:
        """Return the prompt: plain text, or chat messages."""

    def action(self, completion: str) -> str:
        """Return the action in the completion. Invalid actions are passed on unchanged, for the environment to refuse."""


# --- one episode: its state and its result

MAX_ATTEMPTS = 64
"""Exceeds every possible number of attempts at one episode, which limits on losses and errors keep below."""


@dataclass(frozen=True)
class Episode:
    """The result of one goal. `reward`: 0 to 1; None if the environment failed, which gives no score. `done`: the environment
    ended it, not steps or context. `steps`, `tokens`, `truncated`: the model's actions, tokens, and cut-off completions.
    `first_prompt`: token ids. `problem`: why there is no reward, or what ended it early."""

    goal: str
    reward: float | None
    done: bool
    steps: int
    tokens: int
    truncated: int
    transcript_sha256: str
    transcript: Transcript = field(repr=False)
    completions: tuple[str, ...] = field(default=(), repr=False)
    first_prompt: tuple[int, ...] = field(default=(), repr=False)
    problem: str | None = None


@dataclass(eq=False)
class Live:
    """An episode in progress."""

    index: int  # of its goal
    slot: int
    ticket: int = 0  # of the call that it waits for; 0 if it waits for the model
    key: int | None = None  # of the pending prompt
    beginnings: int = 1  # attempts that count against the limit
    attempts: int = 0  # all of them
    begun: bool = False
    reward: float = 0.0
    done: bool = False
    tokens: int = 0
    truncated: int = 0
    prompt: str | list[dict[str, str]] | None = None
    transcript: Transcript = field(default_factory=lambda: Transcript({}, ""))
    completions: list[str] = field(default_factory=list)
    first_prompt: tuple[int, ...] = ()

    def clear(self) -> None:
        """Reset for another attempt."""
        self.begun, self.reward, self.done, self.tokens, self.truncated = False, 0.0, False, 0, 0
        self.completions, self.key = [], None
        self.attempts += 1

    def next_key(self) -> int:
        """Return the key of the next prompt, from goal, attempt and turn, so that sampling does not depend on timing. An
        attempt is one conversation."""
        return (self.index * MAX_ATTEMPTS + self.attempts) * CONVERSATION + len(self.completions)

    def over(self, goal: Mapping[str, Any], reward: float | None, problem: str | None) -> Episode:
        """Return the episode's result."""
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
            first_prompt=self.first_prompt,
            problem=problem,
        )


def _digest(transcript: Transcript) -> str:
    text = json.dumps([transcript.first, *([turn.action, turn.observation] for turn in transcript.turns)])
    return hashlib.sha256(text.encode("ascii")).hexdigest()
