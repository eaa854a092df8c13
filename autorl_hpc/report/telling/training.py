"""Training steps between two submissions, from the points that training logs gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autorl_hpc.records.recorded import TrainingPoint


@dataclass(frozen=True)
class Trained:
    """What was trained in one stretch of time.

    Attributes:
        steps: optimizer steps of all trainings in it; None: no log tells a step.
    """

    points: tuple[TrainingPoint, ...] = ()
    steps: int | None = None
    last_loss: float | None = None
    last_reward: float | None = None


def trained_by(points: Sequence[TrainingPoint], times: Sequence[float]) -> list[Trained]:
    """What was trained up to each of `times` (ascending seconds of budget), since the one before."""
    ordered = sorted(points, key=lambda p: p.elapsed_s)
    found, at = [], 0
    last_step: dict[str, int] = {}
    for time_s in times:
        begin = at
        while at < len(ordered) and ordered[at].elapsed_s <= time_s:
            at += 1
        found.append(_trained(tuple(ordered[begin:at]), last_step))
    return found


def _trained(points: tuple[TrainingPoint, ...], last_step: dict[str, int]) -> Trained:
    """`last_step`: by source, the last step seen, which goes on from one stretch to the next."""
    steps: int | None = None
    for point in points:
        if point.step is None:
            continue
        before = last_step.get(point.source, 0)
        # A step below the last one is a new training that writes to the same place: it began at 0.
        steps = (steps or 0) + (point.step - before if point.step >= before else max(point.step, 0))
        last_step[point.source] = point.step
    return Trained(
        points=points,
        steps=steps,
        last_loss=next((p.loss for p in reversed(points) if p.loss is not None), None),
        last_reward=next((p.reward for p in reversed(points) if p.reward is not None), None),
    )
