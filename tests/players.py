"""Engines that play by a plan, in place of models: deterministic, and what they were asked is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autorl_hpc.records.exchange import Engine as EngineIdentity
from autorl_hpc.records.task import Sampling
from autorl_hpc.rollouts.engine import Answer, Loaded


class Player:
    """An engine: `act` gets the prompt's text and says the model's words."""

    def __init__(self, act: Callable[[str], str], *, template: bool = False) -> None:
        self.act = act
        self.template = template
        self.batches: list[list[str]] = []

    @property
    def identity(self) -> EngineIdentity:
        return EngineIdentity(backend="plan", versions={}, device="none", dtype="float32")

    def load(self, weights: Path, content_hash: str) -> Loaded:
        return Loaded(0.0, 0.0)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        if not self.template:
            return None
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Answer]:
        texts = [bytes(prompt).decode("utf-8") for prompt in prompts]
        self.batches.append(texts)
        return [Answer(said := self.act(text), len(said.split()), "cut off" in said) for text in texts]

    def close(self) -> None:
        return None


def walkthroughs(goals: Sequence[Mapping[str, Any]]) -> Player:
    """Plays each goal's walkthrough; goals are told apart by their tasks, which must differ."""
    plans = {f"Your task is to: {goal['question']}": goal["walkthrough"] for goal in goals}
    assert len(plans) == len(goals)
    said: dict[str, int] = {}

    def act(prompt: str) -> str:
        task = next(task for task in plans if task in prompt)
        said[task] = 0 if "\n> " not in prompt else said[task] + 1
        plan = plans[task]
        return str(plan[said[task]]) if said[task] < len(plan) else "look"

    return Player(act)
