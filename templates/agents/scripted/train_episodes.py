"""Supervised fine-tuning on whole episodes that an expert won: of long prompts, only what the expert said is learned.

Run as `python code/train_episodes.py --model MODEL --out output/sft --traces output/traces`, or by accelerate on several
processes. Batches are of episodes, cut by their length into micro-batches that fill the memory; the head is applied where
the expert speaks. Interrupted, it goes on from `output/state-sft`.
"""

from __future__ import annotations

import functools
import math
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import episodes
import machine
from autorl_rollouts.pool import Pool
from batches import Tokens
from collect import read_rows, read_traces
from learner import Learner
from policy import Policy

BATCH = 32
EPOCHS = 3
LEAST_STEPS, MOST_EPOCHS = 240, 8  # of few episodes more passes are taken, up to so many
SMALL_STEPS, SMALL_BATCH = 60, 16
LOOKED_AT, LOOKS_FROM, LOOK_EVERY = 96, 6, 2
"""Validation games, and the steps behind which they are played, of a training that is to end at a share of games won."""
LOG_EVERY = 10


class Plan(NamedTuple):
    """How long, and in what batches."""

    steps: int
    batch: int


def plan(episodes: int, small: bool, steps: int | None) -> Plan:
    """The plan for so many episodes; `steps` stands above it."""
    if small:
        return Plan(steps or SMALL_STEPS, SMALL_BATCH)
    usual, most = (math.ceil(epochs * episodes / BATCH) for epochs in (EPOCHS, MOST_EPOCHS))
    return Plan(steps or max(usual, min(LEAST_STEPS, most)), BATCH)


@functools.lru_cache(maxsize=4)
def order(episodes: int, epoch: int) -> list[int]:
    """The episodes of one pass, shuffled."""
    numbers = list(range(episodes))
    random.Random(f"{machine.seed()}/{epoch}").shuffle(numbers)
    return numbers


class Imitation:
    """One training: its progress survives an interruption."""

    def __init__(self, policy: Policy, sequences: Sequence[Tokens], steps: Plan, states: Path) -> None:
        self.policy, self.steps, self.states = policy, steps, states
        self.sequences = [one._replace(advantage=1.0) for one in sequences]
        self.learner = Learner(policy, 1.0)
        self.step, self.spent_s = 0, 0.0

    def train(self, moment: float, enough: Callable[[], bool] | None = None) -> None:
        """All steps, or until the moment: the learning rate is at its end either way. Or until what it has learned is `enough`."""
        progress = self.policy.take_up(self.states)
        if progress is not None:
            self.step, self.spent_s = int(progress["iteration"]), float(progress["spent_s"])
        begun = kept = logged = time.monotonic()
        before_s, tokens, computed, busy = self.spent_s, 0.0, 0.0, machine.Busy()
        allowed_s, device = max(1.0, before_s + moment - begun), self.policy.accelerator.device
        while self.step < self.steps.steps:
            now = time.monotonic()
            if machine.agreed(now > moment, device):
                break
            self.spent_s = before_s + now - begun
            late = 0.0 if self.policy.small else machine.largest(self.spent_s / allowed_s, device)
            done = max((self.step + 1) / self.steps.steps, late)
            told = self.take(machine.rate_at(done))
            tokens, computed = tokens + told.pop("tokens"), computed + told.pop("computed")
            self.step += 1
            now = time.monotonic()
            if self.step % LOG_EVERY == 0 or self.step == self.steps.steps:
                paces = {"tokens_per_s": tokens, "computed_per_s": computed}
                pace = {"step": self.step, **{name: round(value / (now - logged)) for name, value in paces.items()}}
                pace["epoch"] = round(self.step * self.steps.batch / len(self.sequences), 3)
                self._say({**told, **pace, **busy.told()})
                logged, tokens, computed = now, 0.0, 0.0
            if enough is not None and self.step >= LOOKS_FROM and self.step % LOOK_EVERY == 0 and enough():
                break
            if machine.agreed(now > kept + machine.KEEP_S, device):
                self.policy.keep(self.states, {"iteration": self.step, "spent_s": self.spent_s}, self.step)
                kept = time.monotonic()

    def wins(self, goals: Sequence[Any], pool: Pool, recipe: Mapping[str, Any]) -> float:
        """The share of games that the model wins by now, greedily."""
        self.policy.hand_over()
        rewards = self.learner.greedy(goals, pool, recipe)
        won = sum(rewards) / max(1, len(rewards))
        self._say({"step": self.step, "eval_reward": round(won, 4), "eval_n": len(rewards)})
        return won

    def take(self, share: float) -> dict[str, float]:
        """One step at a share of the learning rate."""
        accelerator = self.policy.accelerator
        mine = self._batch()[accelerator.process_index :: accelerator.num_processes]
        return self.learner.imitate(mine, self.policy.rate * share)

    def _batch(self) -> list[Tokens]:
        """The step's episodes, from as many passes as they reach into."""
        size, found = len(self.sequences), []
        for place in range(self.step * self.steps.batch, (self.step + 1) * self.steps.batch):
            found.append(self.sequences[order(size, place // size)[place % size]])
        return found

    def _say(self, told: Mapping[str, Any]) -> None:
        if self.policy.accelerator.is_main_process:
            print(dict(told), flush=True)


def main() -> None:
    """Trains and saves; see `machine.arguments` for the command line."""
    traces: dict[str, Any] = {"type": Path, "required": True}
    steps, until = {"type": int, "default": None}, {"type": float, "default": None}
    given = machine.arguments("SFT on an expert's episodes", traces=traces, steps=steps, until=until)
    workspace = Path(os.environ["WORKSPACE"])
    meta = machine.read_meta(workspace)
    moment = machine.deadline(workspace, meta, given.share)
    sequences = read_traces(given.traces)
    if not sequences:
        won = sum(row["reward"] >= 1.0 for row in read_rows(given.traces))
        why = f"of {won} episodes that the expert won the first prompt is longer than the model's window: take another model"
        sys.exit(f"{given.traces}: {why if won else 'no episode that the expert won: give it more time'}")
    plays = given.until is not None
    policy = Policy(given.model, meta["recipe"], lora=given.lora, samples=plays, supervised=True, rows=LOOKED_AT)
    states = given.out.with_name(f"state-{given.out.name}")
    training = Imitation(policy, sequences, plan(len(sequences), policy.small, given.steps), states)
    if plays:
        source = episodes.source_of(workspace, meta)
        _, goals = episodes.chosen(source, 1, LOOKED_AT, machine.seed())
        with Pool(source, episodes.workers_here(machine.processes())) as pool:
            training.train(moment, lambda: training.wins(goals, pool, meta["recipe"]) >= given.until)
    else:
        training.train(moment)
    policy.save(given.out)
    machine.finish(policy.accelerator, given.out)


if __name__ == "__main__":
    main()
