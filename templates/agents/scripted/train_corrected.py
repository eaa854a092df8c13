"""SFT on corrections: the model plays training games, and the expert says what it would have done where the model went.

What an expert's own episodes can't show is how to go on after a fault that only this model makes (DAgger). Run as `python
code/train_corrected.py --model output/sft --out output/corrected --traces output/traces`, or by accelerate on several
processes. Rounds of games are played and learned from, with as many of the expert's own episodes among them, until the time
is up. Interrupted, it goes on from `output/state-corrected` with the next round. Only the household expert can do this.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import episodes
import household
import machine
from autorl_rollouts.pool import Pool
from batches import Tokens
from collect import MOST_GOALS, expert_for, read_traces
from corrections import corrected
from learner import Learner
from policy import Policy

TEMPERATURE = 1.0
GAMES, SMALL_GAMES = 128, 8
COPIES = 2  # episodes of a game: to translate one takes as long as to play it
MOST_STEPS = 30
BATCH, SMALL_BATCH = 64, 16
DEMONSTRATIONS = 0.5  # of a batch: the expert's own episodes, so that what it shows alone is not forgotten
RATE_SHARE = 0.5
"""Of SFT's learning rate: the peak of a round, whose rate goes up and down, so that the next one is played by a model at rest."""
LATER_LESS = 0.5  # of that, when all of the time is used
NEVER = 10**9


def main() -> None:
    """Trains and saves; see `machine.arguments` for the command line."""
    traces: dict[str, Any] = {"type": Path, "required": True}
    whole = {"type": int, "default": None}
    given = machine.arguments("SFT on corrections", traces=traces, rounds=whole, games=whole)
    workspace = Path(os.environ["WORKSPACE"])
    meta = machine.read_meta(workspace)
    moment = machine.deadline(workspace, meta, given.share)
    source = episodes.source_of(workspace, meta)
    goals, _ = episodes.chosen(source, MOST_GOALS, 0, machine.seed())
    expert = expert_for(goals, meta)
    if not isinstance(expert, household.Expert):
        sys.exit("only the household expert can say how to go on from any state: this task has no corrections")
    with Pool(source, episodes.workers_here(machine.processes())) as pool:
        policy = Policy(given.model, meta["recipe"], lora=given.lora, supervised=True, rows=COPIES * GAMES)
        size = given.games or (SMALL_GAMES if policy.small else GAMES)
        states = given.out.with_name(f"state-{given.out.name}")
        rounds = Rounds(policy, goals, expert, read_traces(given.traces), pool, meta["recipe"], size, states)
        rounds.train(moment, given.rounds or NEVER)
    if rounds.number:
        policy.save(given.out)
    elif policy.accelerator.is_main_process:
        shutil.copytree(given.model, given.out, dirs_exist_ok=True)  # there was no time for any
    machine.finish(policy.accelerator, given.out)


class Rounds:
    """One training: its progress survives an interruption."""

    def __init__(
        self,
        policy: Policy,
        goals: Sequence[dict[str, Any]],
        expert: household.Expert,
        shown: Sequence[Tokens],
        pool: Pool,
        recipe: dict[str, Any],
        games: int,
        states: Path,
    ) -> None:
        self.policy, self.goals, self.expert, self.pool = policy, goals, expert, pool
        self.shown = [one._replace(advantage=1.0) for one in shown]
        self.recipe = {**recipe, "max_steps": min(int(recipe["max_steps"]), MOST_STEPS)}
        self.games, self.states = games, states
        self.learner = Learner(policy, 1.0)
        self.number, self.spent_s, self.busy = 0, 0.0, machine.Busy()

    def train(self, moment: float, rounds: int) -> None:
        """Rounds until the moment, the last of which still ends before it."""
        progress = self.policy.take_up(self.states)
        if progress is not None:
            self.number, self.spent_s = int(progress["iteration"]), float(progress["spent_s"])
        begun = kept = time.monotonic()
        before_s, longest_s = self.spent_s, 0.0
        allowed_s = max(1.0, before_s + moment - begun)
        device = self.policy.accelerator.device
        while self.number < rounds:
            started = time.monotonic()
            if machine.agreed(started + longest_s > moment, device):
                break
            self.round(lambda: machine.largest((before_s + time.monotonic() - begun) / allowed_s, device))
            self.spent_s = before_s + time.monotonic() - begun
            longest_s = max(longest_s, time.monotonic() - started)
            if machine.agreed(time.monotonic() > kept + machine.KEEP_S, device):
                self.policy.keep(self.states, {"iteration": self.number, "spent_s": self.spent_s}, self.number)
                kept = time.monotonic()

    def round(self, done: Any) -> None:
        """Plays games that no earlier round had, while there are such, and learns from what the expert says of them. `done` tells
        the share of the time that is used."""
        started = time.monotonic()
        accelerator = self.policy.accelerator
        first = self.number * self.games
        chosen = [self.goals[(first + n) % len(self.goals)] for n in range(min(self.games, len(self.goals)))]
        mine = chosen[accelerator.process_index :: accelerator.num_processes]
        self.policy.model.eval()
        self.policy.sampler.begin(machine.seed() * 1_000_003 + self.number, TEMPERATURE)
        groups = episodes.play(self.policy.sampler, mine, COPIES, self.pool, self.recipe) if mine else []
        played_s = time.monotonic() - started
        draw = random.Random(f"{machine.seed()}/{self.number}/{accelerator.process_index}")
        sequences: list[Tokens] = []
        won = asked = other = 0
        for goal, episode in ((goal, one) for goal, group in zip(mine, groups, strict=True) for one in group):
            found, at, otherwise = corrected(episode, goal, self.expert, self.policy.words, self.policy.limit, draw)
            sequences += found
            won, asked, other = won + ((episode.reward or 0.0) >= 1.0), asked + at, other + otherwise
        told = self.learn(sequences, draw, done)
        self.policy.hand_over()
        self.number += 1
        mine_told = (won, COPIES * len(mine), asked, other, len(sequences))
        won, number, asked, other, count = map(int, self.learner.sums(*mine_told))
        if accelerator.is_main_process:
            told |= {"played": number, "won": won, "sequences": count}
            told["expert_agrees"] = round(1.0 - other / max(1, asked), 3)
            seconds = {"rollout_s": round(played_s, 1), "round_s": round(time.monotonic() - started, 1)}
            print({**told, **seconds, **self.busy.told(), "round": self.number}, flush=True)

    def learn(self, sequences: list[Tokens], draw: random.Random, done: Any) -> dict[str, float]:
        """One pass over the corrections of all processes, with the expert's episodes in between."""
        processes = self.policy.accelerator.num_processes
        batch = SMALL_BATCH if self.policy.small else BATCH
        (total,) = self.learner.sums(len(sequences))
        steps = math.ceil(total / (batch * (1.0 - DEMONSTRATIONS)))
        draw.shuffle(sequences)
        told: dict[str, float] = {}
        peak = self.policy.rate * RATE_SHARE * (1.0 - LATER_LESS * min(1.0, done()))
        for step in range(steps):
            part = sequences[step * len(sequences) // steps : (step + 1) * len(sequences) // steps]
            part += [draw.choice(self.shown) for _ in range(max(1, int(batch * DEMONSTRATIONS / processes)))]
            told = self.learner.imitate(part, peak * machine.rate_at((step + 1) / (steps + 1)))
        for name in ("tokens", "computed"):
            told.pop(name, None)
        return {**told, "steps": steps}


if __name__ == "__main__":
    main()
