"""Which trainer a logged step is of: by its class, else by the names of its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.routes.names import NO_POLICY_TRAINERS, TRAINER_CLASSES
from autorl_hpc.states import Route

GENERIC = ("Trainer", "Seq2SeqTrainer")
"""Their logs don't tell which loss a subclass computes."""

NO_EFFECT_POINTS = 2
"""A single point with learning rate 0 is the first step of a warm-up."""

_FIGURES: tuple[tuple[Route, tuple[str, ...]], ...] = (
    (Route.PREFERENCE, ("log_odds_ratio", "log_odds_chosen")),  # ORPO
    (
        Route.PPO,
        (
            "critic/vf_loss",
            "value_loss",
            "vf_loss",
            "loss/value",
            "val/ratio",
            "ppo/loss/value",
            "critic_loss",
            "loss/value_avg",
        ),
    ),
    (Route.DPO, ("rewards/chosen", "rewards/margins", "logps/chosen")),
    (Route.GRPO, ("frac_reward_zero_std", "reward_std", "clip_ratio/region_mean", "completions/mean_length")),
    (Route.RL, ("objective/rlhf_reward", "actor/pg_loss", "policy_loss", "critic/score/mean", "objective/scores")),
    (Route.SFT, ("mean_token_accuracy", "num_tokens")),
)
"""Figures that only one kind of trainer logs, the most telling first (trl 0.12 to 1.16, verl 0.4, OpenRLHF 0.8)."""


@dataclass
class Stage:
    """Steps of one kind, one after another, in one log."""

    route: Route
    """UNKNOWN: the log doesn't tell."""
    source: str
    trainer: str
    why: str
    first: TrainingPoint
    last: TrainingPoint
    points: int = 1
    idle: int = 0
    """Points with learning rate 0."""

    @property
    def steps(self) -> int:
        """The last step's number, or the points where they have none."""
        return max(self.last.step or 0, self.points if self.last.step is None else 0)

    @property
    def had_effect(self) -> bool:
        """False: every step had learning rate 0."""
        return not (self.idle == self.points and self.points >= NO_EFFECT_POINTS)


def stages(training: Sequence[TrainingPoint]) -> list[Stage]:
    """Trainings by what logged them, in the order of their first steps."""
    found: dict[tuple[str, Route, str], Stage] = {}
    for point in sorted(training, key=lambda p: (p.attempt, p.elapsed_s)):
        told = kind(point)
        if told is None:
            continue
        route, why = told
        key = (point.source, route, point.trainer or "")
        stage = found.get(key)
        if stage is None:
            stage = found[key] = Stage(route, point.source, point.trainer or "", why, point, point)
        else:
            stage.points += 1
            if (point.step or 0) >= (stage.last.step or 0):
                stage.last = point
        stage.idle += point.learning_rate == 0
    return list(found.values())


def kind(point: TrainingPoint) -> tuple[Route, str] | None:
    """Route and reason of one point; None: it is no policy's training, or holds nothing but an evaluation."""
    name = point.trainer or ""
    if name in NO_POLICY_TRAINERS or (
        point.more and point.loss is None and all(k.startswith("eval_") for k in point.more)
    ):
        return None
    known = TRAINER_CLASSES.get(name)
    if known is not None and name not in GENERIC:
        return known, name
    for route, figures in _FIGURES if point.more else ():
        for figure in figures:
            if figure in point.more:
                return (Route.PREFERENCE if route is Route.DPO and "kl" in point.more else route), f"logs `{figure}`"
    if point.reward is not None:
        return Route.RL, "logs a reward"
    return (Route.UNKNOWN, name or "a loss only") if point.loss is not None or point.step is not None else None
