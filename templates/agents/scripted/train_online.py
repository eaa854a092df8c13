"""GRPO on whole episodes of an interactive task: many episodes together, groups of one game, the policy's own tokens alone.

Run as `accelerate launch code/train_online.py --model MODEL --out output/online`. The folder `--out` holds the last checkpoint,
always; what it and the model to start from reach on the validation part stands beside both. Interrupted, it goes on from
`output/state-online`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import episodes
import machine
from autorl_rollouts.pool import Pool
from learner import Learner, mixed, rewards_of
from policy import Policy

TEMPERATURE = 1.0
SMALL = {"games": 8, "copies": 8, "validation": 64}
LARGE = {"games": 32, "copies": 8, "validation": 512}
LEAST_MIXED, MOST_WAVES, SPARE = 16, 3, 1.2
"""Groups with different rewards that a step is taken on, where so many waves of games give as many; games that are drawn for one, in units
of what the last wave's share of mixed groups says."""
WARMUP = 4  # iterations until the learning rate is whole: AdamW begins without a memory
FALL, LAST = 0.5, 0.1
"""Behind this share of the time the learning rate falls, to this share of itself at the end: else the last steps' noise is what is saved."""
MOST_STEPS = 30
"""Of an episode in training: experts need a third of it, and one that is not over by then mostly goes round in circles, at the cost
of the longest prompts. Validation plays as many as graders do."""
REPEATS = 8  # of so many games that were not always won one is played again, while there are new ones
KEPT = ("iteration", "start", "submitted", "share", "spent_s")  # of a run's state, beside the games
MOST_GAMES = 2500  # training games that are kept in memory and drawn from


def main() -> None:
    """Trains and saves; see `machine.arguments` for the command line."""
    whole = {"type": int, "default": None}
    numbers = dict.fromkeys(("iterations", "games", "copies", "validation", "steps"), whole)
    given = machine.arguments("GRPO on whole episodes", **numbers, rate={"type": float, "default": None})
    workspace = Path(os.environ["WORKSPACE"])
    meta = machine.read_meta(workspace)
    moment = machine.deadline(workspace, meta, given.share)
    rows = (given.games or LARGE["games"]) * (given.copies or LARGE["copies"])
    policy = Policy(given.model, meta["recipe"], lora=given.lora, rows=rows)
    sizes = {name: getattr(given, name) or size for name, size in (SMALL if policy.small else LARGE).items()}
    source = episodes.source_of(workspace, meta)
    goals, held_out = episodes.chosen(source, MOST_GAMES, sizes["validation"], machine.seed())
    with Pool(source, episodes.workers_here(machine.processes())) as pool:
        run = Run(policy, goals, held_out, pool, meta["recipe"], sizes, given.out, workspace)
        policy.rate = given.rate or policy.rate
        run.short["max_steps"] = min(given.steps or MOST_STEPS, run.short["max_steps"])
        run.train(moment, given.iterations or 10**9)
    machine.finish(policy.accelerator, given.out)


class Run:
    """One training: its progress survives an interruption."""

    def __init__(
        self,
        policy: Policy,
        goals: list[dict[str, Any]],
        held_out: list[dict[str, Any]],
        pool: Pool,
        recipe: dict[str, Any],
        sizes: dict[str, int],
        out: Path,
        workspace: Path,
    ) -> None:
        self.policy, self.goals, self.held_out, self.pool = policy, goals, held_out, pool
        self.recipe, self.sizes, self.out, self.workspace = recipe, sizes, out, workspace
        self.short = {**recipe, "max_steps": min(int(recipe["max_steps"]), MOST_STEPS)}
        self.learner = Learner(policy, TEMPERATURE)
        self.states = out.with_name(f"state-{out.name}")
        self.iteration, self.submitted, self.done, self.spent_s = 0, False, 0.0, 0.0
        self.start: list[float] = []
        """Rewards of the validation games before the first iteration."""
        self.known: dict[int, float] = {}
        """Mean reward of each game when it was played last, by its number."""
        self.share, self.validated_s = 0.5, 0.0  # mixed ones among the last wave's groups; how long validation took
        self.busy = machine.Busy()

    def train(self, moment: float, iterations: int) -> None:
        """Iterations until the moment, before which the last checkpoint is validated. It is submitted, better or not."""
        begun = kept = time.monotonic()
        self.resume()
        before_s = self.spent_s
        allowed_s = before_s + max(1.0, moment - begun)
        self.start = self.start or self.validate()
        longest_s = 0.0
        agreed = functools.partial(machine.agreed, device=self.policy.accelerator.device)
        while self.iteration < iterations:
            started = time.monotonic()
            if agreed(started + longest_s + self.validated_s > moment):
                break
            self.spent_s = before_s + started - begun
            self.done = machine.largest(self.spent_s / allowed_s, self.policy.accelerator.device)
            self.iterate()
            longest_s = max(longest_s, time.monotonic() - started)
            if not self.submitted and agreed(time.monotonic() > begun + (moment - begun) / 3):
                self.submitted = True
                self.submit(self.out.with_name(f"{self.out.name}-early"), "early")
            if agreed(time.monotonic() > kept + machine.KEEP_S):
                self.keep()
                kept = time.monotonic()
        end = self.validate()
        if self.policy.accelerator.is_main_process:
            for folder, rewards in ((self.policy.folder, self.start), (self.out, end)):  # for the choice at the end
                if folder.resolve().parent == self.out.resolve().parent:
                    told = {"score": sum(rewards) / max(1, len(rewards)), "n": len(rewards), "rewards": rewards}
                    folder.with_name(folder.name + ".score.json").write_text(json.dumps(told), encoding="ascii")
        self.submit(self.out, "the last checkpoint")

    def submit(self, folder: Path, note: str) -> None:
        """Saves and submits what there is."""
        self.policy.save(folder)
        if self.policy.accelerator.is_main_process:
            machine.submit(self.workspace, folder, f"{note}, iteration {self.iteration}")

    def iterate(self) -> None:
        """Plays groups of episodes, wave after wave until enough of them are mixed, and takes a step."""
        started = time.monotonic()
        accelerator = self.policy.accelerator
        groups: list[list[Any]] = []
        fresh: list[float] = []  # mean rewards of new games: the others are chosen for being hard
        have, waves, enough = 0, 0, min(LEAST_MIXED, self.sizes["games"] // 2)
        while have < enough and waves < MOST_WAVES:
            numbers = self.drawn(waves, math.ceil(SPARE * (enough - have) / max(0.1, self.share)))
            mine = numbers[accelerator.process_index :: accelerator.num_processes]
            self.policy.sampler.begin(machine.seed() * 1_000_003 + self.iteration * MOST_WAVES + waves, TEMPERATURE)
            goals = [self.goals[n] for n in mine]
            played = (
                episodes.play(self.policy.sampler, goals, self.sizes["copies"], self.pool, self.short) if mine else []
            )
            groups += played
            (more,) = self.learner.sums(sum(map(mixed, played)))
            have, self.share = have + int(more), more / len(numbers)
            means = {n: sum(rewards_of(group)) / len(group) for n, group in zip(mine, played, strict=True)}
            known = dict(zip(numbers, self.learner.sums(*(means.get(n, 0.0) for n in numbers)), strict=True))
            fresh += [mean for n, mean in known.items() if n not in self.known]
            self.known |= known
            waves += 1
        played_s = time.monotonic() - started
        fall = max(LAST, min(1.0, (1.0 - self.done) / (1.0 - FALL)))
        told = self.learner.learn(groups, self.policy.rate * min(fall, (self.iteration + 1) / WARMUP))
        self.policy.hand_over()
        self.iteration += 1
        if accelerator.is_main_process:
            steps_per_s = sum(episode.steps for group in groups for episode in group) / max(1e-3, played_s)
            seconds = {"rollout_s": round(played_s, 1), "iteration_s": round(time.monotonic() - started, 1)}
            seconds |= {"waves": waves, "steps_per_s": round(steps_per_s), **self.busy.told()}
            seconds |= {"fresh_reward": round(sum(fresh) / len(fresh), 4)} if fresh else {}
            seconds["tokens_per_s"] = round(told["sequences"] / max(1e-3, time.monotonic() - started - played_s))
            print({**told, **seconds, "epoch": self.iteration}, flush=True)

    def drawn(self, wave: int, wanted: int) -> list[int]:
        """Numbers of the games to play: up to half of them games that were not always won when they were played last, first those that were won
        sometimes, but few of a few, which would be learned by heart; and games that were not played yet."""
        draw = random.Random(f"{machine.seed()}/{self.iteration}/{wave}")
        size = min(wanted, self.sizes["games"], len(self.goals))
        fresh = [n for n in range(len(self.goals)) if n not in self.known]
        failed = [n for n, mean in sorted(self.known.items()) if mean < 1.0]
        draw.shuffle(failed)
        most = min(size // 2, len(failed) // REPEATS) if len(fresh) >= size else size // 2
        again = sorted(failed, key=lambda n: self.known[n] == 0.0)[:most]
        fresh = draw.sample(fresh, min(size - len(again), len(fresh)))
        left = [n for n in self.known if n not in again]
        return again + fresh + draw.sample(sorted(left), size - len(again) - len(fresh))

    def validate(self) -> list[float]:
        """Rewards of greedy episodes on the validation part."""
        started = time.monotonic()
        rewards = self.learner.greedy(self.held_out, self.pool, self.recipe)
        self.validated_s = time.monotonic() - started
        if self.policy.accelerator.is_main_process:
            told = {"eval_reward": round(sum(rewards) / max(1, len(rewards)), 4), "eval_n": len(rewards)}
            print({**told, "eval_s": round(self.validated_s, 1), "epoch": self.iteration}, flush=True)
        return rewards

    def keep(self) -> None:
        """Writes all that is needed to go on."""
        told = {name: getattr(self, name) for name in KEPT}
        self.policy.keep(self.states, {**told, "known": sorted(self.known.items())}, self.iteration)

    def resume(self) -> None:
        """Goes on where an interrupted training was."""
        progress = self.policy.take_up(self.states)
        if progress is not None:
            for name in KEPT:
                setattr(self, name, progress[name])
            self.known = {int(number): float(mean) for number, mean in progress["known"]}


if __name__ == "__main__":
    main()
