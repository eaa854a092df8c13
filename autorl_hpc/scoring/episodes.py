"""Scores finished episodes. An answer is the episode's outcome as JSON, made by the grader itself: `encode`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from autorl_hpc.scoring.outcome import Context, ItemLike, Outcome

VERSION = "1"

TOLERANCE = 1e-9
"""Rewards are sums of fractions: 0.9999999999 is meant to be 1."""

DEFAULT_THRESHOLD = 1.0


def encode(reward: float, steps: int, done: bool, transcript_sha256: str, answer: str | None = None) -> str:
    """The answer of an episode. The transcript's hash makes the items file's output hash stand for every word of it.

    Args:
        answer: for scorers that rate what an episode ended with, not its reward.
    """
    value = {"reward": reward, "steps": steps, "done": done, "transcript_sha256": transcript_sha256}
    return json.dumps(value if answer is None else {**value, "answer": answer}, sort_keys=True)


class Episodes:
    """Won is an episode whose reward reaches the recipe's option `threshold` (default 1)."""

    version = VERSION

    def score(self, items: Sequence[ItemLike], answers: Sequence[Sequence[str]], context: Context) -> list[Outcome]:
        """1 for a won episode, else 0; of several samples the mean. Facts: mean reward and steps."""
        threshold = float(context.options.get("threshold", DEFAULT_THRESHOLD))
        outcomes = []
        for _, texts in zip(items, answers, strict=True):
            drawn = [json.loads(text) for text in texts]
            rewards = [float(episode["reward"]) for episode in drawn]
            won = sum(reward >= threshold - TOLERANCE for reward in rewards) / len(rewards)
            steps = sum(int(episode["steps"]) for episode in drawn) / len(drawn)
            outcomes.append(Outcome(won, {"reward": sum(rewards) / len(rewards), "steps": steps}))
        return outcomes

    def metrics(self, items: Sequence[ItemLike], outcomes: Sequence[Outcome]) -> dict[str, float]:
        """Average reward, the percentages of episodes with full and with half the reward, mean steps."""
        rewards = [float(outcome.facts["reward"]) for outcome in outcomes]
        return {
            "average_reward": _mean(rewards),
            "success_at_1": 100.0 * _mean([float(reward >= 1.0 - TOLERANCE) for reward in rewards]),
            "success_at_half": 100.0 * _mean([float(reward >= 0.5 - TOLERANCE) for reward in rewards]),
            "mean_steps": _mean([float(outcome.facts["steps"]) for outcome in outcomes]),
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
