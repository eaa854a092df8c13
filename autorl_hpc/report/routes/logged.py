"""Read the route from what trainers logged (`logged`): the names of their figures, refined by the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autorl_hpc.recorder.trainings import of_evaluation
from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.format import clean
from autorl_hpc.report.routes.planned import Planned
from autorl_hpc.report.routes.trainers import (
    GENERIC_TRAINERS,
    REWARD_TRAINERS,
    RL,
    SUPERVISED,
    TRAINER_CLASSES,
    UNTRAINED,
)
from autorl_hpc.report.story_records import EvidenceLine
from autorl_hpc.states import Route

# metrics that only one kind of trainer logs, the most specific first (trl 0.12 to 1.16, verl 0.4, OpenRLHF 0.8)
_FIGURES: tuple[tuple[Route, str], ...] = (
    (Route.PREFERENCE, "log_odds_ratio log_odds_chosen"),  # ORPO
    (Route.PPO, "critic/vf_loss value_loss vf_loss loss/value val/ratio ppo/loss/value critic_loss loss/value_avg"),
    (Route.DPO, "rewards/chosen rewards/margins logps/chosen"),
    (Route.GRPO, "frac_reward_zero_std reward_std clip_ratio/region_mean completions/mean_length"),
    (Route.RL, "objective/rlhf_reward actor/pg_loss policy_loss critic/score/mean objective/scores"),
    (Route.SFT, "mean_token_accuracy num_tokens"),
)


@dataclass
class Logged:
    """Consecutive steps of one kind in one log; `route` is UNKNOWN if the log doesn't show it."""

    route: Route
    why: str
    first: TrainingPoint
    last: TrainingPoint
    points: int = 0
    idle: int = 0  # Number of points with learning rate 0. A single one is the first step of a warm-up.

    @property
    def had_effect(self) -> bool:
        """Return False if every step had learning rate 0."""
        return self.idle < max(self.points, 2)


def logged(training: Sequence[TrainingPoint]) -> list[Logged]:
    """Return trainings by log, kind and trainer, in the order of their first steps."""
    found: dict[tuple[str, Route, str], Logged] = {}
    for point in sorted(training, key=lambda p: (p.attempt, p.elapsed_s)):
        if (told := _kind(point)) is not None:
            stage = found.setdefault((point.source, told[0], point.trainer or ""), Logged(*told, point, point))
            stage.points += 1
            stage.idle += point.learning_rate == 0
            if (point.step or 0) >= (stage.last.step or 0):
                stage.last = point
    return list(found.values())


def _kind(point: TrainingPoint) -> tuple[Route, str] | None:
    """Return route and reason of one point; None if it trains no policy, or is only an evaluation."""
    name = point.trainer or ""
    figures = [*point.more, *point.not_finite]
    if name in REWARD_TRAINERS or (figures and point.loss is None and all(map(of_evaluation, figures))):
        return None
    if name in TRAINER_CLASSES and name not in GENERIC_TRAINERS:
        return TRAINER_CLASSES[name], name
    for route, names in _FIGURES:
        for figure in names.split():
            if figure in point.more:
                return (Route.PREFERENCE if route is Route.DPO and "kl" in point.more else route), f"logs `{figure}`"
    if point.reward is not None:
        return Route.RL, "logs a reward"
    return (Route.UNKNOWN, name or "a loss only") if point.loss is not None or point.step is not None else None


def refined(stage: Logged, plan: Planned) -> Route:
    """Refine the route of a log by code: a log does not show where SFT's data came from, nor a subclass's loss."""
    if stage.route is Route.SFT and plan.route in SUPERVISED:
        return plan.route
    if (stage.route, plan.route) in ((Route.GRPO, Route.RL), (Route.DPO, Route.PREFERENCE)):
        return plan.route  # RLOO logs the same as GRPO, and IPO the same as DPO
    if stage.why == "logs a reward":
        return next((r for r in (plan.route, *plan.alternatives) if r in RL), Route.RL)
    if stage.route is Route.UNKNOWN and plan.route not in (*UNTRAINED, Route.SFT_RL):
        return plan.route
    return stage.route


def trained_in_vain(training: Sequence[TrainingPoint], number: int) -> tuple[EvidenceLine, ...]:
    """Return the trainings of a window that ended by submitting the content of submission `number` again."""
    unused = f"; not in these weights: they are those of submission {number}"
    told = [line_of(stage, stage.route) for stage in logged(training)[:4]]
    return tuple(EvidenceLine(where=line.where, says=f"{line.says}{unused}") for line in told)


def line_of(stage: Logged, route: Route) -> EvidenceLine:
    steps = stage.points if stage.last.step is None else max(stage.last.step, 0)
    figures = [f"{steps} steps", f"{stage.why} -> {route}"]
    for name in ("loss", "reward", "kl"):
        first, last = getattr(stage.first, name), getattr(stage.last, name)
        if first is not None and last is not None:
            figures.append(f"{name} {first:.4g} to {last:.4g}")
    where = f"{clean(stage.first.source, 150)}, {stage.first.elapsed_s:.0f} s to {stage.last.elapsed_s:.0f} s"
    return EvidenceLine(where=where, says=clean(", ".join(figures), 200) or "")
