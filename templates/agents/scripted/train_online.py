"""GRPO on whole episodes of an interactive task: many episodes together, groups of one game, the policy's own tokens alone.

Run as `accelerate launch code/train_online.py --model MODEL --out output/online`. The folder `--out` holds the checkpoint that
is best on the validation part; it is not written if none is better than the model to start from. Interrupted, it goes on
from `output/state-online`.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import episodes
import machine
from autorl_rollouts.pool import Pool
from learner import Learner
from policy import Policy

TEMPERATURE = 1.0
SMALL = {"games": 8, "copies": 8, "validation": 64, "updates": 1}
LARGE = {"games": 32, "copies": 8, "validation": 128, "updates": 4}
MOST_STEPS = 30
"""Of an episode in training: experts need a third of it, and one that is not over by then mostly goes round in circles, at the cost
of the longest prompts. Validation plays as many as graders do."""
MOST_GAMES = 1500  # training games that are kept in memory and drawn from
VALIDATION_SHARE = 0.15  # of the time, at most, that validation takes
NEVER = 10**9


def main() -> None:
    """Trains and saves; see `machine.arguments` for the command line."""
    whole = {"type": int, "default": None}
    given = machine.arguments(
        "GRPO on whole episodes", iterations=whole, games=whole, copies=whole, updates=whole, validation=whole
    )
    workspace = Path(os.environ["WORKSPACE"])
    meta = machine.read_meta(workspace)
    moment = machine.deadline(workspace, meta, given.share)
    rows = (given.games or LARGE["games"]) * (given.copies or LARGE["copies"])
    policy = Policy(given.model, meta["recipe"], lora=given.lora, rows=max(rows, LARGE["validation"]))
    sizes = SMALL if policy.small else LARGE
    sizes = {name: getattr(given, name) or size for name, size in sizes.items()}
    source = episodes.source_of(workspace, meta)
    goals, held_out = episodes.chosen(source, MOST_GAMES, sizes["validation"], machine.seed())
    with Pool(source, episodes.workers_here(machine.processes())) as pool:
        run = Run(policy, goals, held_out, pool, meta["recipe"], sizes, given.out, workspace)
        run.train(moment, given.iterations or NEVER)
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
        self.iteration, self.best, self.submitted = 0, -1.0, False
        self.validated_s = self.spent_s = 0.0

    def train(self, moment: float, iterations: int) -> None:
        """Iterations until the moment, the last of which still ends before it."""
        begun = kept = time.monotonic()
        self.resume()
        if self.best < 0:
            self.best = self.validate()
            self.note_start()
        longest_s = 0.0
        while self.iteration < iterations:
            started = time.monotonic()
            if self.agreed(started + longest_s + self.validated_s > moment):
                break
            self.iterate()
            longest_s = max(longest_s, time.monotonic() - started)
            self.spent_s += time.monotonic() - started
            if self.agreed(self.validated_s < VALIDATION_SHARE * self.spent_s) or self.iteration == iterations:
                self.look(early=time.monotonic() > begun + (moment - begun) / 3)
                self.spent_s = 0.0
            if self.agreed(time.monotonic() > kept + machine.KEEP_S):
                self.keep()
                kept = time.monotonic()
        if self.spent_s and self.iteration:
            self.look(early=False)

    def iterate(self) -> None:
        """Plays groups of episodes, and takes some steps by what came of them."""
        started = time.monotonic()
        accelerator = self.policy.accelerator
        draw = random.Random(f"{machine.seed()}/{self.iteration}")
        numbers = draw.sample(range(len(self.goals)), min(self.sizes["games"], len(self.goals)))
        mine = list(range(accelerator.process_index, len(numbers), accelerator.num_processes))
        self.policy.sampler.begin(machine.seed() * 1_000_003 + self.iteration, TEMPERATURE)
        groups = episodes.play(
            self.policy.sampler, [self.goals[numbers[n]] for n in mine], self.sizes["copies"], self.pool, self.short
        )
        played_s = time.monotonic() - started
        updates = self.sizes["updates"]
        told = self.learner.learn(
            dict(zip(mine, groups, strict=True)),
            lambda number: number * updates // len(numbers),
            updates,
        )
        self.policy.hand_over()
        self.iteration += 1
        if accelerator.is_main_process:
            steps_per_s = sum(episode.steps for group in groups for episode in group) / max(1e-3, played_s)
            seconds = {"rollout_s": round(played_s, 1), "iteration_s": round(time.monotonic() - started, 1)}
            seconds["steps_per_s"] = round(steps_per_s)
            print({**told, **seconds, "epoch": self.iteration}, flush=True)

    def validate(self) -> float:
        """Mean reward of greedy episodes on the validation part, each process playing its share."""
        started = time.monotonic()
        accelerator = self.policy.accelerator
        mine = self.held_out[accelerator.process_index :: accelerator.num_processes]
        self.policy.sampler.begin(0, 0.0)
        groups = episodes.play(self.policy.sampler, mine, 1, self.pool, self.recipe) if mine else []
        rewards = [episode.reward or 0.0 for group in groups for episode in group]
        total, number = self.learner.sums(sum(rewards), len(rewards))
        score = total / max(1.0, number)
        self.validated_s = time.monotonic() - started
        if accelerator.is_main_process:
            told = {"eval_reward": round(score, 4), "eval_n": int(number), "eval_s": round(self.validated_s, 1)}
            print({**told, "epoch": self.iteration}, flush=True)
        return score

    def look(self, *, early: bool) -> None:
        """Validates; a checkpoint that is the best so far is saved, and submitted if it is the first after a third of the time."""
        score = self.validate()
        if score <= self.best:
            return
        self.best = score
        self.policy.save(self.out)
        if self.policy.accelerator.is_main_process:
            self.write_score(self.out, score)
            if early and not self.submitted:
                machine.submit(self.workspace, self.out, f"iteration {self.iteration}, {score:.3f} on own validation")
        self.submitted = self.submitted or early

    def note_start(self) -> None:
        """Leaves the score of the model to start from beside it, for the choice at the end."""
        if self.policy.accelerator.is_main_process and self.policy.folder.parent.resolve() == self.out.parent.resolve():
            self.write_score(self.policy.folder, self.best)

    def write_score(self, folder: Path, score: float) -> None:
        """What a checkpoint reached on the validation part."""
        told = {"score": score, "n": len(self.held_out), "iteration": self.iteration}
        folder.with_name(folder.name + ".score.json").write_text(json.dumps(told), encoding="ascii")

    def keep(self) -> None:
        """Writes all that is needed to go on."""
        progress = {"iteration": self.iteration, "best": self.best, "submitted": self.submitted}
        self.policy.keep(self.states, progress, self.iteration)

    def resume(self) -> None:
        """Goes on where an interrupted training was."""
        progress = self.policy.take_up(self.states)
        if progress is not None:
            self.iteration, self.best, self.submitted = progress["iteration"], progress["best"], progress["submitted"]

    def agreed(self, value: bool) -> bool:
        """Whether any process says so."""
        return machine.agreed(value, self.policy.accelerator.device)


if __name__ == "__main__":
    main()
