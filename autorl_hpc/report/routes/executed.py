"""Decide the executed route (`executed`): from trainers' logged steps, changed weights and the scripts that were run."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

from autorl_hpc.records.entries import Fingerprint
from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.format import clean
from autorl_hpc.report.routes.commands import command_of
from autorl_hpc.report.routes.planned import Commanded, Executed, Planned
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

SURE_ENOUGH = 0.6
"""Least confidence with which a plan counts for a script that ran and logged nothing."""

_GENERIC = ("Trainer", "Seq2SeqTrainer")
"""Trainers whose logs don't show which loss a subclass computes."""

NO_EFFECT_POINTS = 2
"""A single point with learning rate 0 is the first step of a warm-up."""

_FIGURES: tuple[tuple[Route, str], ...] = (
    (Route.PREFERENCE, "log_odds_ratio log_odds_chosen"),  # ORPO
    (Route.PPO, "critic/vf_loss value_loss vf_loss loss/value val/ratio ppo/loss/value critic_loss loss/value_avg"),
    (Route.DPO, "rewards/chosen rewards/margins logps/chosen"),
    (Route.GRPO, "frac_reward_zero_std reward_std clip_ratio/region_mean completions/mean_length"),
    (Route.RL, "objective/rlhf_reward actor/pg_loss policy_loss critic/score/mean objective/scores"),
    (Route.SFT, "mean_token_accuracy num_tokens"),
)
"""Metrics that only one kind of trainer logs, the most specific first (trl 0.12 to 1.16, verl 0.4, OpenRLHF 0.8)."""


@dataclass
class _Stage:
    """Consecutive steps of one kind in one log; `route` is UNKNOWN if the log doesn't show it."""

    route: Route
    why: str
    first: TrainingPoint
    last: TrainingPoint
    points: int = 0
    idle: int = 0
    """Number of points with learning rate 0."""

    @property
    def steps(self) -> int:
        """Return the last step's number, or the number of points if steps are not numbered."""
        return self.points if self.last.step is None else max(self.last.step, 0)

    @property
    def had_effect(self) -> bool:
        """Return False if every step had learning rate 0."""
        return self.idle < max(self.points, NO_EFFECT_POINTS)


def _stages(training: Sequence[TrainingPoint]) -> list[_Stage]:
    """Return trainings by log, kind and trainer, in the order of their first steps."""
    found: dict[tuple[str, Route, str], _Stage] = {}
    for point in sorted(training, key=lambda p: (p.attempt, p.elapsed_s)):
        if (told := _kind(point)) is not None:
            route, why = told
            stage = found.setdefault((point.source, route, point.trainer or ""), _Stage(route, why, point, point))
            stage.points += 1
            stage.idle += point.learning_rate == 0
            if (point.step or 0) >= (stage.last.step or 0):
                stage.last = point
    return list(found.values())


def _kind(point: TrainingPoint) -> tuple[Route, str] | None:
    """Return route and reason of one point; None if it trains no policy, or is only an evaluation."""
    name = point.trainer or ""
    is_evaluation = point.more and point.loss is None and all(k.startswith("eval_") for k in point.more)
    if name in NO_POLICY_TRAINERS or is_evaluation:
        return None
    if name in TRAINER_CLASSES and name not in _GENERIC:
        return TRAINER_CLASSES[name], name
    for route, figures in _FIGURES:
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
    if origin := _origin(fingerprint, is_base):
        return Executed(Route.COPY, origin)
    logged = [stage for stage in _stages(training) if stage.had_effect]
    if logged:
        return _by_logs(logged, planned, parent)
    if not submitted:
        return Executed(Route.NONE)
    averaged = _merges(commands, planned) + _between(fingerprint, parent_fingerprint)
    if averaged:
        return Executed(Route.AVERAGING, averaged)
    ran = _ran(commands, planned)
    changed = fingerprint.relative_delta if fingerprint is not None else None
    if (
        fingerprint is None
        or not changed
        or not ran
        or not _is_training(planned.route)
        or planned.confidence < SURE_ENOUGH
    ):
        return Executed(Route.UNKNOWN, ran)
    says = f"no step was logged, and the weights changed, relative delta {changed:.3g}"
    return Executed(planned.route, (*ran, _of_fingerprint(fingerprint, says)))


def has_effect(training: Sequence[TrainingPoint]) -> bool:
    """Return whether steps of a policy's training were logged, not all with learning rate 0."""
    return any(stage.had_effect for stage in _stages(training))


def trained_in_vain(training: Sequence[TrainingPoint], number: int) -> tuple[EvidenceLine, ...]:
    """Return the trainings of a window that ended by submitting the content of submission `number` again."""
    unused = f"; not in these weights: they are those of submission {number}"
    told = [_line(stage, stage.route) for stage in _stages(training)[:4]]
    return tuple(EvidenceLine(where=line.where, says=f"{line.says}{unused}") for line in told)


def _of_fingerprint(fingerprint: Fingerprint, says: str) -> EvidenceLine:
    return EvidenceLine(where=f"ledger: fingerprint of submission {fingerprint.submission_id}", says=says)


def _origin(fingerprint: Fingerprint | None, is_base: bool) -> tuple[EvidenceLine, ...]:
    """Return evidence that a checkpoint is a copy of another model; empty if it is not."""
    if is_base:
        return (EvidenceLine(where="ledger: submission", says="the content is the base model's, tensor by tensor"),)
    if fingerprint is not None and "untrained_copy" in fingerprint.flags:
        return (_of_fingerprint(fingerprint, f"untrained_copy, relative delta {fingerprint.relative_delta}"),)
    if fingerprint is not None and "foreign_weights" in fingerprint.flags:
        nearest = f"{clean(fingerprint.nearest_model, 100)}, distance {fingerprint.nearest_delta}"
        return (_of_fingerprint(fingerprint, f"foreign_weights: nearest to {nearest}"),)
    return ()


# --- with training logs


def _by_logs(found: Sequence[_Stage], planned: Planned, parent: Route | None) -> Executed:
    routes = [_refined(stage, planned) for stage in found]
    evidence = [_line(stage, route) for stage, route in zip(found, routes, strict=True)][:8]
    if parent is not None:
        says = f"goes on from a submission whose route was {parent}"
        evidence.append(EvidenceLine(where="ledger: fingerprint", says=says))
    known = [*routes, parent]
    rl, supervised = ([r for r in known if r in (*kind, Route.SFT_RL)] for kind in (RL, SUPERVISED))
    preference = [route for route in routes if route in PREFERENCE]
    is_new = any(route in (*RL, *SUPERVISED) for route in routes)
    if is_new and rl and supervised:
        route = Route.SFT_RL
    else:
        own = [r for r in routes if r in RL] or preference or [r for r in routes if r in SUPERVISED]
        route = own[-1] if own else planned.route if _is_training(planned.route) else Route.UNKNOWN
    return Executed(route, tuple(evidence), _disputed(routes, planned))


def _disputed(logged: Sequence[Route], planned: Planned) -> bool:
    """Return whether nothing that was logged is of a kind that the confident plan contains."""
    plan, told = _kinds(planned.route), set[str]().union(*map(_kinds, logged))
    if planned.route is Route.RL:
        plan.add("preference")  # online DPO logs the same as DPO
    return planned.confidence >= SURE and not planned.alternatives and bool(plan and told) and not plan & told


def _kinds(route: Route) -> set[str]:
    """Return the kinds of training in a route; empty if none or unknown."""
    kinds = {"supervised": (*SUPERVISED, Route.SFT_RL), "rl": (*RL, Route.SFT_RL), "preference": PREFERENCE}
    return {name for name, routes in kinds.items() if route in routes}


def _refined(stage: _Stage, planned: Planned) -> Route:
    """Refine the route of a log by code: a log does not show where SFT's data came from, nor a subclass's loss."""
    known = (planned.route, *(a.route for a in planned.alternatives))
    if stage.route is Route.SFT and planned.route in SUPERVISED:
        return planned.route
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
    where = f"{clean(stage.first.source, 150)}, {stage.first.elapsed_s:.0f} s to {stage.last.elapsed_s:.0f} s"
    return EvidenceLine(where=where, says=clean(", ".join(figures), 200) or "")


# --- without training logs


def _merges(commands: Sequence[Commanded], planned: Planned) -> tuple[EvidenceLine, ...]:
    """Return command lines that average models: a merging tool, or a script that the plan says averages."""
    tools = [c for c in commands if c.command and command_of(c.command).target.startswith("mergekit")]
    return tuple(map(_command, tools[:3])) or (_ran(commands, planned) if planned.route is Route.AVERAGING else ())


def _ran(commands: Sequence[Commanded], planned: Planned) -> tuple[EvidenceLine, ...]:
    """Return command lines that ran a script of the plan."""
    names = {posixpath.basename(path) for path in planned.scripts}
    found: dict[str, EvidenceLine] = {}
    for each in commands:
        command = command_of(each.command or "")
        if command.kind in ("script", "shell") and posixpath.basename(command.target) in names:
            line = _command(each)
            found.setdefault(line.says, line)
    return tuple(found.values())[:3]


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
    return (_of_fingerprint(fingerprint, says),)


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
