"""Decide the executed route (`executed`): from trainers' logged steps, changed weights and the scripts that were run."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

from autorl_hpc.records.entries import Fingerprint
from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.format import clean
from autorl_hpc.report.routes.commands import command_of
from autorl_hpc.report.routes.route import Commanded, Executed, Planned
from autorl_hpc.report.routes.trainers import NO_POLICY_TRAINERS, PREFERENCE, RL, SUPERVISED, TRAINER_CLASSES
from autorl_hpc.report.story_records import EvidenceLine
from autorl_hpc.states import Route

BETWEEN_TOLERANCE = 0.05
"""Relative to the distance of two models. A point between them misses the straight line by the sketches' error (1.1 % of each of
two distances) and rounding. Training leaves the line at once, because weights have millions of dimensions."""

BETWEEN_SHARE = 0.03
"""A point closer to an end than this is that end, not an average."""

SURE = 0.8
"""Least confidence with which a plan without alternatives can contradict logs: anybody can print a trainer's figures."""

DISAGREE = "logs and code disagree"

SURE_ENOUGH = 0.6
"""Least confidence with which a plan counts for a script that ran and logged nothing."""


_GENERIC = ("Trainer", "Seq2SeqTrainer")
"""Trainers whose logs don't show which loss a subclass computes."""

NO_EFFECT_POINTS = 2
"""A single point with learning rate 0 is the first step of a warm-up."""

_FIGURES: tuple[tuple[Route, str], ...] = (
    (Route.PREFERENCE, "log_odds_ratio log_odds_chosen"),  # ORPO
    (
        Route.PPO,
        "critic/vf_loss value_loss vf_loss loss/value val/ratio ppo/loss/value critic_loss loss/value_avg",
    ),
    (Route.DPO, "rewards/chosen rewards/margins logps/chosen"),
    (Route.GRPO, "frac_reward_zero_std reward_std clip_ratio/region_mean completions/mean_length"),
    (Route.RL, "objective/rlhf_reward actor/pg_loss policy_loss critic/score/mean objective/scores"),
    (Route.SFT, "mean_token_accuracy num_tokens"),
)
"""Metrics that only one kind of trainer logs, the most specific first (trl 0.12 to 1.16, verl 0.4, OpenRLHF 0.8)."""


@dataclass
class _Stage:
    """Consecutive steps of one kind in one log."""

    route: Route
    """UNKNOWN if the log doesn't show it."""
    source: str
    trainer: str
    why: str
    first: TrainingPoint
    last: TrainingPoint
    points: int = 1
    idle: int = 0
    """Number of points with learning rate 0."""

    @property
    def steps(self) -> int:
        """Return the last step's number, or the number of points if steps are not numbered."""
        return max(self.last.step or 0, self.points if self.last.step is None else 0)

    @property
    def had_effect(self) -> bool:
        """Return False if every step had learning rate 0."""
        return not (self.idle == self.points and self.points >= NO_EFFECT_POINTS)


def _stages(training: Sequence[TrainingPoint]) -> list[_Stage]:
    """Return trainings by log, kind and trainer, in the order of their first steps."""
    found: dict[tuple[str, Route, str], _Stage] = {}
    for point in sorted(training, key=lambda p: (p.attempt, p.elapsed_s)):
        told = _kind(point)
        if told is None:
            continue
        route, why = told
        key = (point.source, route, point.trainer or "")
        stage = found.get(key)
        if stage is None:
            stage = found[key] = _Stage(route, point.source, point.trainer or "", why, point, point)
        else:
            stage.points += 1
            if (point.step or 0) >= (stage.last.step or 0):
                stage.last = point
        stage.idle += point.learning_rate == 0
    return list(found.values())


def _kind(point: TrainingPoint) -> tuple[Route, str] | None:
    """Return route and reason of one point; None if it trains no policy, or is only an evaluation."""
    name = point.trainer or ""
    if name in NO_POLICY_TRAINERS or (
        point.more and point.loss is None and all(k.startswith("eval_") for k in point.more)
    ):
        return None
    known = TRAINER_CLASSES.get(name)
    if known is not None and name not in _GENERIC:
        return known, name
    for route, figures in _FIGURES if point.more else ():
        for figure in figures.split():
            if figure in point.more:
                return (Route.PREFERENCE if route is Route.DPO and "kl" in point.more else route), f"logs `{figure}`"
    if point.reward is not None:
        return Route.RL, "logs a reward"
    return (Route.UNKNOWN, name or "a loss only") if point.loss is not None or point.step is not None else None


def executed(
    training: Sequence[TrainingPoint],
    commands: Sequence[Commanded],
    fingerprint: Fingerprint | None,
    planned: Planned,
    *,
    is_base: bool = False,
    parent: Route | None = None,
    parent_fingerprint: Fingerprint | None = None,
    submitted: bool = True,
) -> Executed:
    """Return the route of one submission's window, or of the run.

    `parent`: executed route of the earlier submission that the fingerprint names; `parent_fingerprint`: its fingerprint.
    `submitted`: False without a checkpoint; then only the logs count.
    """
    origin = _origin(fingerprint, is_base)
    logged = _stages(training)
    steps = sum(stage.steps for stage in logged)
    if origin is not None:
        notes = (f"{steps} training steps were logged, and these weights show none of them",) if steps else ()
        return Executed(Route.COPY, origin, steps, notes)
    effective = [stage for stage in logged if stage.had_effect]
    idle = tuple(f"{s.source}: all steps with learning rate 0" for s in logged if not s.had_effect)
    if effective:
        return _by_logs(effective, planned, parent, steps, idle)
    return _without_logs(commands, fingerprint, planned, parent_fingerprint, submitted, steps, idle)


def trained_in_vain(training: Sequence[TrainingPoint], number: int) -> tuple[EvidenceLine, ...]:
    """Return the trainings of a window that ended by submitting the content of submission `number` again."""
    unused = f"; not in these weights: they are those of submission {number}"
    return tuple(
        line.model_copy(update={"says": f"{line.says}{unused}"})
        for line in (_line(stage, stage.route) for stage in _stages(training)[:4])
    )


def _origin(fingerprint: Fingerprint | None, is_base: bool) -> tuple[EvidenceLine, ...] | None:
    """Return evidence that a checkpoint is a copy of another model; None if it is not."""
    if is_base:
        return (EvidenceLine(where="ledger: submission", says="the content is the base model's, tensor by tensor"),)
    if fingerprint is None:
        return None
    where = f"ledger: fingerprint of submission {fingerprint.submission_id}"
    if "untrained_copy" in fingerprint.flags:
        return (EvidenceLine(where=where, says=f"untrained_copy, relative delta {fingerprint.relative_delta}"),)
    if "foreign_weights" in fingerprint.flags:
        says = (
            f"foreign_weights: nearest to {clean(fingerprint.nearest_model, 100)}, distance {fingerprint.nearest_delta}"
        )
        return (EvidenceLine(where=where, says=says),)
    return None


# --- with training logs


def _by_logs(
    found: Sequence[_Stage], planned: Planned, parent: Route | None, steps: int, notes: tuple[str, ...]
) -> Executed:
    routes = [_refined(stage, planned) for stage in found]
    evidence = [_line(stage, route) for stage, route in zip(found, routes, strict=True)]
    rl = [route for route in routes if route in RL or route is Route.SFT_RL]
    supervised = [route for route in routes if route in SUPERVISED]
    preference = [route for route in routes if route in PREFERENCE]
    if parent is not None:
        evidence.append(
            EvidenceLine(where="ledger: fingerprint", says=f"goes on from a submission whose route was {parent}")
        )
    came = parent is not None and (parent in SUPERVISED or parent is Route.SFT_RL)
    if rl and (supervised or came):
        route = Route.SFT_RL
        if supervised and routes.index(rl[0]) < routes.index(supervised[0]) and not came:
            notes = (*notes, "RL came first, supervised training after it")
    elif supervised and parent is not None and parent.is_rl:
        route = Route.SFT_RL
        notes = (*notes, "RL came first, supervised training after it")
    else:
        route = (rl or preference or supervised or [planned.route if _is_training(planned.route) else Route.UNKNOWN])[
            -1
        ]
    disputed = _disputed(routes, planned)
    return Executed(route, tuple(evidence[:8]), steps, (*notes, DISAGREE) if disputed else notes, disputed)


def _disputed(logged: Sequence[Route], planned: Planned) -> bool:
    """Return whether nothing that was logged is of a kind that the confident plan contains."""
    plan, told = _kinds(planned.route), set[str]().union(*map(_kinds, logged))
    if planned.route is Route.RL:
        plan.add("preference")  # online DPO logs the same as DPO
    return planned.confidence >= SURE and not planned.alternatives and bool(plan and told) and not plan & told


def _kinds(route: Route) -> set[str]:
    """Return the kinds of training in a route; empty if none or unknown."""
    if route is Route.SFT_RL:
        return {"supervised", "rl"}
    kinds = {"supervised": SUPERVISED, "rl": RL, "preference": PREFERENCE}
    return {name for name, routes in kinds.items() if route in routes}


def _refined(stage: _Stage, planned: Planned) -> Route:
    """Refine the route of a log by code: a log does not show where SFT's data came from, nor a subclass's loss."""
    known = (planned.route, *(a.route for a in planned.alternatives))
    if stage.route is Route.SFT:
        return next((r for r in (Route.REJECTION_SAMPLING, Route.DISTILLATION) if r is planned.route), Route.SFT)
    if (stage.route, planned.route) in ((Route.GRPO, Route.RL), (Route.DPO, Route.PREFERENCE)):
        return planned.route  # RLOO logs the same as GRPO, and IPO the same as DPO
    if stage.route is Route.RL and stage.why == "logs a reward":
        return next((r for r in known if r in RL), Route.RL)
    if stage.route is Route.UNKNOWN and _is_training(planned.route) and planned.route is not Route.SFT_RL:
        return planned.route
    return stage.route


def _is_training(route: Route) -> bool:
    return route not in (Route.NONE, Route.COPY, Route.AVERAGING, Route.UNKNOWN)


def _line(stage: _Stage, route: Route) -> EvidenceLine:
    figures = [f"{stage.steps} steps", f"{stage.why} -> {route}"]
    for name in ("loss", "reward", "kl"):
        first, last = getattr(stage.first, name), getattr(stage.last, name)
        if first is not None and last is not None:
            figures.append(f"{name} {first:.4g} to {last:.4g}")
    where = f"{clean(stage.source, 150)}, {stage.first.elapsed_s:.0f} s to {stage.last.elapsed_s:.0f} s"
    return EvidenceLine(where=where, says=clean(", ".join(figures), 200) or "")


# --- without training logs


def _without_logs(
    commands: Sequence[Commanded],
    fingerprint: Fingerprint | None,
    planned: Planned,
    parent: Fingerprint | None,
    submitted: bool,
    steps: int,
    notes: tuple[str, ...],
) -> Executed:
    merged = _merges(commands, planned)
    between = _between(fingerprint, parent)
    if submitted and (merged or between):
        return Executed(Route.AVERAGING, (*merged, *between), steps, notes)
    if not submitted:
        return Executed(Route.NONE, (), steps, (*notes, "no training step was logged"))
    ran = _ran(commands, planned)
    changed = fingerprint is not None and bool(fingerprint.relative_delta)
    if (
        changed
        and fingerprint is not None
        and ran
        and _is_training(planned.route)
        and planned.confidence >= SURE_ENOUGH
    ):
        weights = EvidenceLine(
            where=f"ledger: fingerprint of submission {fingerprint.submission_id}",
            says=f"the weights changed, relative delta {fingerprint.relative_delta:.3g}",
        )
        note = "no step was logged: by the script that ran and the weights that changed"
        return Executed(planned.route, (*ran, weights), steps, (*notes, note))
    why = (
        "the weights changed and no step was logged" if changed else "no step was logged, and the weights are not known"
    )
    return Executed(Route.UNKNOWN, ran, steps, (*notes, why))


def _merges(commands: Sequence[Commanded], planned: Planned) -> tuple[EvidenceLine, ...]:
    """Return command lines that average models: a merging tool, or a script that the plan says averages."""
    tools = [c for c in commands if c.command and command_of(c.command).target.startswith("mergekit")]
    if tools:
        return tuple(_command(c) for c in tools[:3])
    return _ran(commands, planned) if planned.route is Route.AVERAGING else ()


def _ran(commands: Sequence[Commanded], planned: Planned) -> tuple[EvidenceLine, ...]:
    """Return command lines that ran a script of the plan."""
    names = {posixpath.basename(path) for path in planned.scripts}
    found = []
    for each in commands:
        command = command_of(each.command or "")
        if command.kind in ("script", "shell") and posixpath.basename(command.target) in names:
            found.append(_command(each))
    return tuple({line.says: line for line in reversed(found)}.values())[::-1][:3]


def _command(each: Commanded) -> EvidenceLine:
    return EvidenceLine(where=f"process at {each.elapsed_s:.0f} s", says=clean(each.command, 200) or "")


def _between(fingerprint: Fingerprint | None, parent: Fingerprint | None) -> tuple[EvidenceLine, ...]:
    """Return evidence if the weights are on the straight line between the base model and an earlier submission."""
    if fingerprint is None or parent is None or not parent.relative_delta:
        return ()
    whole, here, rest = parent.relative_delta, fingerprint.relative_delta, fingerprint.parent_delta
    if here is None or rest is None or min(here, rest) < BETWEEN_SHARE * whole:
        return ()
    if abs(here + rest - whole) > BETWEEN_TOLERANCE * whole:
        return ()
    says = f"on the line between the base model and submission {parent.submission_id}: {here:.3g} + {rest:.3g} of {whole:.3g}"
    return (EvidenceLine(where=f"ledger: fingerprint of submission {fingerprint.submission_id}", says=says),)


def mode_kept(mode: str, route: Route, *, disputed: bool = False) -> bool | None:
    """Return whether an executed route is what the mode asked for; None if this is unknown or the mode is.

    `sft-only`: only supervised training. `rl-only`: a policy that learned from rewards of its own samples, without a supervised
    stage. DPO and its relatives learn from given pairs and are neither. A run without training satisfies neither mode.
    `disputed`: logs and code disagree on the route, so the answer is None.
    """
    if mode == "free":
        return True
    if disputed or route in (Route.UNKNOWN, Route.AVERAGING) or mode not in ("sft-only", "rl-only"):
        return None
    return route in SUPERVISED if mode == "sft-only" else route in RL
