"""One episode: under way, and what came out of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autorl_hpc.rollouts.engine import CONVERSATION
from autorl_hpc.rollouts.environment import Transcript

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
