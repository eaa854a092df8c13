"""The episode scheduler: all episodes are stepped together, and the engine is asked in large batches.

An episode's prompts depend on its own transcript alone. With a greedy engine and deterministic environments its outcome is
therefore the same whatever the timing, the number of workers and the other episodes. With sampling the engine's draws
depend on the batch.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from autorl_hpc.rollouts.engine import Answer
from autorl_hpc.rollouts.environment import Transcript, Turn
from autorl_hpc.rollouts.pool import Lost, Pool, Reply
from autorl_hpc.rollouts.source import EnvironmentBroken, Source

if TYPE_CHECKING:
    from autorl_hpc.records.task import Sampling

GATHER_S = 1.0
"""How long a batch waits for slow environments once the first is ready: about what a batch takes, so at most half is lost."""

IN_FLIGHT = 256
"""Episodes at a time: a batch that fills a GPU; an environment of each lives in some worker's memory."""

MAX_BEGINNINGS = 3
"""Of one episode. What killed a worker three times is no accident."""

MAX_LOSSES = 12
"""Workers lost in one run of episodes, and calls that raised. An environment that fails everywhere ends the run, not after hours of
new beginnings."""


class Answers(Protocol):
    """The part of an engine that episodes need; agents write one over the model that they train."""

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""
        ...

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        """Token ids of a conversation with the answer's beginning, None where the model has no template."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Answer]:
        """One answer a prompt, in order."""
        ...


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


def run_episodes(
    engine: Answers,
    goals: Sequence[Mapping[str, Any]],
    source: Source,
    sampling: Sampling,
    *,
    max_steps: int,
    seed: int = 0,
    workers: int = 2,
    pool: Pool | None = None,
    in_flight: int = IN_FLIGHT,
    gather_s: float = GATHER_S,
    max_prompt_tokens: int | None = None,
    all_or_none: bool = False,
) -> list[Episode]:
    """One episode a goal, in the goals' order. A goal is a JSON object with an `id`.

    Args:
        pool: a warm one of the same source; without one a pool of `workers` processes is made for this run.
        in_flight: episodes at a time; a finished one makes room for the next goal at once.
        gather_s: a slow environment never keeps ready ones waiting for longer than this.
        max_prompt_tokens: an episode whose prompt grows longer ends there, with the reward that it has.
        all_or_none: stop at the first episode that can have no reward.

    Raises:
        EnvironmentBroken: environment or dialogue can't be made, or fail one time after the other; with `all_or_none`, they
            failed in one episode.
        Exception: the engine's own.
    """
    own = Pool(source, workers) if pool is None else None
    try:
        run = _Run(engine, goals, pool or own or Pool(source), sampling)
        run.all_or_none = all_or_none
        run.max_steps, run.seed, run.gather_s, run.max_prompt_tokens = max_steps, seed, gather_s, max_prompt_tokens
        return run.play(in_flight)
    finally:
        if own is not None:
            own.close()


@dataclass(eq=False)
class _Live:
    """An episode under way."""

    index: int
    slot: int
    ticket: int = -1  # of the call it waits for; -1: it waits for the model
    beginnings: int = 1
    begun: bool = False
    reward: float = 0.0
    done: bool = False
    tokens: int = 0
    truncated: int = 0
    prompt: str | list[dict[str, str]] | None = None
    transcript: Transcript = field(default_factory=lambda: Transcript({}, ""))
    completions: list[str] = field(default_factory=list)


@dataclass
class _Run:
    engine: Answers
    goals: Sequence[Mapping[str, Any]]
    pool: Pool
    sampling: Sampling
    max_steps: int = 1
    seed: int = 0
    gather_s: float = GATHER_S
    max_prompt_tokens: int | None = None
    all_or_none: bool = False
    _live: dict[int, _Live] = field(default_factory=dict)  # by slot
    _waiting: dict[int, _Live] = field(default_factory=dict)  # by ticket
    _ready: list[_Live] = field(default_factory=list)
    _finished: dict[int, Episode] = field(default_factory=dict)
    _next: int = 0
    _losses: int = 0
    _errors: int = 0

    def play(self, in_flight: int) -> list[Episode]:
        for slot in range(min(max(1, in_flight), len(self.goals))):
            self._begin_next(slot)
        while self._live:
            self._gather()
            if self._ready:
                self._ask()
        return [self._finished[index] for index in range(len(self.goals))]

    def _begin_next(self, slot: int) -> None:
        if self._next < len(self.goals):
            self._live[slot] = _Live(self._next, slot)
            self._next += 1
            self._begin(self._live[slot])

    def _begin(self, live: _Live) -> None:
        """Begins an episode, or begins it again from nothing."""
        live.begun, live.reward, live.done, live.tokens, live.truncated, live.completions = False, 0.0, False, 0, 0, []
        self._wait(live, self.pool.begin(live.slot, self.goals[live.index], self.seed))

    def _wait(self, live: _Live, ticket: int) -> None:
        live.ticket = ticket
        self._waiting[ticket] = live

    def _gather(self) -> None:
        """Waits until all episodes are ready, or some have been for `gather_s`."""
        deadline: float | None = None
        while self._waiting:
            if self._ready and deadline is None:
                deadline = time.monotonic() + self.gather_s
            event = self.pool.next(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if event is None:
                return
            if isinstance(event, Lost):
                self._lost(event)
            elif (live := self._waiting.pop(event.ticket, None)) is not None:  # else of a run that was given up
                self._take(live, event)

    def _take(self, live: _Live, reply: Reply) -> None:
        if reply.error is not None:
            self._errors += 1
            if self._errors > MAX_LOSSES:
                raise EnvironmentBroken(f"{self._errors} calls failed in one run; the last one: {reply.error}")
            self._again(live, f"the environment failed: {reply.error}", last=reply.final)
            return
        live.prompt = reply.prompt
        if not live.begun:
            live.begun, live.transcript = True, Transcript(self.goals[live.index], reply.observation)
        else:
            live.transcript.turns.append(Turn(reply.action, reply.observation))
            live.reward, live.done = reply.reward, reply.done
        live.ticket = -1
        if live.done or len(live.transcript.turns) >= self.max_steps:
            self._finish(live, live.reward)
        else:
            self._ready.append(live)

    def _lost(self, lost: Lost) -> None:
        """All episodes of a lost worker begin again; only the one that it was at is counted."""
        self._losses += 1
        if self._losses > MAX_LOSSES:
            raise EnvironmentBroken(f"{self._losses} workers were lost in one run; the last one: {lost.reason}")
        for live in [live for live in self._live.values() if self.pool.worker_of(live.slot) == lost.worker]:
            guilty = live.ticket == lost.ticket
            self._waiting.pop(live.ticket, None)
            if live in self._ready:
                self._ready.remove(live)
            if guilty:
                self._again(live, lost.reason)
            else:
                self._begin(live)

    def _again(self, live: _Live, reason: str, last: bool = False) -> None:
        if last or live.beginnings >= MAX_BEGINNINGS:
            times = "once" if live.beginnings == 1 else f"{live.beginnings} times"
            self._finish(live, None, f"{reason}; begun {times}")
        else:
            live.beginnings += 1
            self._begin(live)

    def _ask(self) -> None:
        """One batch: the prompts of all that are ready, in the goals' order."""
        asked: list[tuple[_Live, list[int]]] = []
        for live in sorted(self._ready, key=lambda live: live.index):
            tokens = self._tokens(live)
            if self.max_prompt_tokens is not None and len(tokens) > self.max_prompt_tokens:
                self._finish(live, live.reward, "the prompt is longer than the recipe allows")
            else:
                asked.append((live, tokens))
        self._ready.clear()
        if not asked:
            return
        answers = self.engine.generate([tokens for _, tokens in asked], self.sampling, self.seed)
        for (live, _), answer in zip(asked, answers, strict=True):
            live.tokens += answer.tokens
            live.truncated += answer.truncated
            live.completions.append(answer.text)
            last = len(live.completions) >= self.max_steps
            self._wait(live, self.pool.act(live.slot, answer.text, last=last))

    def _tokens(self, live: _Live) -> list[int]:
        prompt = live.prompt or ""
        if isinstance(prompt, str):
            return self.engine.encode(prompt)
        tokens = self.engine.chat(prompt)
        return self.engine.encode("\n\n".join(m["content"] for m in prompt)) if tokens is None else tokens

    def _finish(self, live: _Live, reward: float | None, problem: str | None = None) -> None:
        if reward is None and self.all_or_none:
            raise EnvironmentBroken(f"episode {self.goals[live.index]['id']}: {problem}")
        del self._live[live.slot]
        self._waiting.pop(live.ticket, None)
        self._finished[live.index] = Episode(
            goal=str(self.goals[live.index]["id"]),
            reward=reward,
            done=live.done,
            steps=len(live.completions),
            tokens=live.tokens,
            truncated=live.truncated,
            transcript_sha256=_digest(live.transcript),
            transcript=live.transcript,
            completions=tuple(live.completions),
            problem=problem,
        )
        self._begin_next(live.slot)


def _digest(transcript: Transcript) -> str:
    text = json.dumps([transcript.first, *([turn.action, turn.observation] for turn in transcript.turns)])
    return hashlib.sha256(text.encode("ascii")).hexdigest()
