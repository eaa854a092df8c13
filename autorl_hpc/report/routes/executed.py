"""Decide the executed route (`executed`): by what was observed, else by trainers' logs, the weights, and command lines."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autorl_hpc.records.entries import Fingerprint
from autorl_hpc.records.recorded import ObservedFact, TrainingPoint
from autorl_hpc.report.format import clean
from autorl_hpc.report.routes.commands import commands_in
from autorl_hpc.report.routes.logged import Logged, line_of, logged, refined
from autorl_hpc.report.routes.planned import Planned
from autorl_hpc.report.routes.stages import (
    Commanded,
    ObservedProcess,
    Stage,
    ancestors,
    averages,
    copies_in,
    numbers,
    processes_of,
    same,
    shown,
    steps_observed,
    whole,
)
from autorl_hpc.report.routes.trainers import (
    GENERIC_TRAINERS,
    RL,
    SUPERVISED,
    TRAINER_PACKAGES,
    UNTRAINED,
    family,
    joined_route,
    route_of_trainer,
    trainer_class,
)
from autorl_hpc.report.story_records import EvidenceLine, RouteSource
from autorl_hpc.states import Route

SURE, SURE_ENOUGH = 0.8, 0.6
"""Least confidence with which a plan contradicts what was executed, and with which it refines that."""

BETWEEN_TOLERANCE, BETWEEN_SHARE = 0.05, 0.03
"""Relative to the distance of two models. A point between them misses the straight line by the sketches' error (1.1 % of each of
two distances) and rounding, and a point closer to an end than BETWEEN_SHARE is that end. Training leaves the line at once,
because weights have millions of dimensions."""

ROUNDS = 2
"""Samples were drawn this often between optimizer steps where a policy learns from its own samples."""


@dataclass(frozen=True)
class Executed:
    """The route that was executed, and which kind of evidence decided it."""

    route: Route
    evidence: tuple[EvidenceLine, ...] = ()
    source: RouteSource | None = None
    disputed: bool = False
    """Whether the plan is sure of another kind of training."""


def _sampled(process: ObservedProcess, first: int, last: float) -> list[dict[str, Any]]:
    """Return the generations of a process after step `first` and before step `last`, but for greedy ones."""
    told = [g for g in process.of("generated") if g.get("sampled") is not False]
    return [g for g in told if first <= whole(g.get("steps_before")) < last]


def _tell(stage: Stage, process: ObservedProcess, earlier: Sequence[ObservedProcess], plan: Planned) -> None:
    """Set the stage's route and why: by the trainer's class, else by samples drawn between its steps and its code's loss."""
    bases = stage.facts.get("bases")
    name = trainer_class([stage.trainer, *(map(str, bases) if isinstance(bases, list) else ())])
    rounds = len({whole(g.get("steps_before")) for g in _sampled(process, stage.first, stage.last)})
    losses = _losses(process, plan, "own loop" if name is None else name)
    arguments = stage.facts.get("arguments")
    given = arguments if isinstance(arguments, Mapping) else {}
    stage.why = name or (f"own loop, samples drawn in {rounds} rounds between its steps" if rounds else "own loop")
    if name is not None:
        stage.route = route_of_trainer(name, given) or Route.NONE
        own_class = stage.trainer.split(".", 1)[0] not in TRAINER_PACKAGES
        unsampled = stage.route in RL and not process.of("generated") and not given.get("use_vllm")
        if own_class and (name in GENERIC_TRAINERS or unsampled):  # it may compute another loss: its code tells which
            rewarded = {Route.RL} if rounds >= ROUNDS and _rewarded(process) else set()
            stage.route = next(iter(losses)) if len(losses) == 1 else next(iter(rewarded), Route.UNKNOWN)
        elif len(losses & set(family(stage.route))) == 1 and len(losses) == 1:
            stage.route = next(iter(losses))  # an argument that was not observed
    elif rounds >= ROUNDS:
        policy = losses & set(RL)
        first = min(whole(g.get("steps_before")) for g in _sampled(process, stage.first, stage.last))
        if len(policy) == 1 and losses & set(SUPERVISED) and first > stage.first:
            stage.route = Route.SFT_RL  # steps, then samples between steps
        elif len(found := policy or losses or ({Route.RL} if _rewarded(process) else set())) == 1:
            stage.route = next(iter(found))
    else:
        # A plan that draws samples by a call that is observed did not run where none was.
        unsampled = not process.of("generated") and any(t.samples for t in plan.trainings if _is_of(t.path, process))
        losses = losses - set(RL) if unsampled else losses
        stage.route = next(iter(losses)) if len(losses) == 1 else Route.UNKNOWN
    if stage.route is Route.SFT:
        stage.route, more = _rows(stage, process, earlier, plan)
        stage.why += more


def _rewarded(process: ObservedProcess) -> bool:
    return any("reward" in str(key) for log in process.of("log") for key in log)


def _is_of(path: str, process: ObservedProcess) -> bool:
    return posixpath.basename(path) == posixpath.basename(process.program)


def _losses(process: ObservedProcess, plan: Planned, why: str) -> set[Route]:
    """Return the routes of own loops, or of a trainer, in the code that a process ran: its script's, else those of all files."""
    found = [t for t in plan.trainings if t.why.startswith(why)]
    routes = {t.loss or t.route for t in [t for t in found if _is_of(t.path, process)] or found}
    return {route for route in routes if route is not None and route not in UNTRAINED}


def _rows(
    stage: Stage, process: ObservedProcess, earlier: Sequence[ObservedProcess], plan: Planned
) -> tuple[Route, str]:
    """Return the route of supervised training by where its rows came from, and how that was seen."""
    rows = whole(stage.facts.get("rows")) or max((whole(r.get("rows")) for r in process.of("rows")), default=0)
    trained = str(stage.facts.get("model") or "") or next(iter(process.paths("loaded")), "")
    makers = [(process, _sampled(process, 0, stage.first + 1))]
    makers += [(one, _sampled(one, 0, math.inf)) for one in earlier if not one.stages]
    for maker, asked in makers:
        samples = sum(whole(g.get("prompts")) for g in asked)
        if samples and samples >= max(rows, 1) and plan.route not in (Route.SFT, Route.SFT_RL):
            models = maker.paths("loaded")
            other = trained and models and not any(same(trained, path) for path in models)
            teacher = maker is process and len(models) > 1
            word = f", on {rows or 'its'} rows after {samples} samples of {posixpath.basename(maker.program)}"
            return (Route.DISTILLATION if other or teacher else Route.REJECTION_SAMPLING), word
    return (
        (plan.route, ", by its code")
        if plan.route in SUPERVISED and plan.confidence >= SURE_ENOUGH
        else (Route.SFT, "")
    )


# --- the decision


def has_effect(training: Sequence[TrainingPoint], observed: Sequence[ObservedFact] = ()) -> bool:
    """Return whether steps of a policy's training were observed or logged, not all with learning rate 0."""
    return any(stage.had_effect for stage in logged(training)) or bool(steps_observed(observed))


def executed(
    training: Sequence[TrainingPoint],
    commands: Sequence[Commanded],
    fingerprint: Fingerprint | None,
    plan: Planned,
    *,
    observed: Sequence[ObservedFact] = (),
    begin_s: float = -1.0,
    checkpoint: str | None = None,
    is_base: bool = False,
    parent: Route | None = None,
    parent_fingerprint: Fingerprint | None = None,
    submitted: bool = True,
) -> Executed:
    """Return the route of one submission's window, or of the run.

    Args:
        observed: facts of the run until the submission; those after `begin_s` are the window's.
        checkpoint: the submitted folder, which leads back to the processes that made it.
        parent: executed route of the earlier submission that the fingerprint names; `parent_fingerprint`: its fingerprint.
        submitted: False without a checkpoint; then nothing is said of weights.
    """
    if origin := _origin(fingerprint, is_base):
        return Executed(Route.COPY, origin, "weights")
    done = _by_facts(observed, begin_s, checkpoint, commands, fingerprint, plan, parent)
    if done is None or done.route is Route.UNKNOWN:
        effective = [stage for stage in logged(training) if stage.had_effect]
        told = _by_logs(effective, plan, parent) if effective else None
        if told is not None and (done is None or told.route is not Route.UNKNOWN):
            done = told
    if done is None and not submitted:
        return Executed(Route.NONE, _crashes(observed), "observed" if observed else None)
    if done is not None and not (done.route is Route.NONE and submitted):
        return done
    return _by_weights(commands, fingerprint, plan, parent_fingerprint, observed)


def _by_facts(
    observed: Sequence[ObservedFact],
    begin_s: float,
    checkpoint: str | None,
    commands: Sequence[Commanded],
    fingerprint: Fingerprint | None,
    plan: Planned,
    parent: Route | None,
) -> Executed | None:
    processes = processes_of(observed)
    for place, process in enumerate(processes):
        for stage in process.stages:
            _tell(stage, process, processes[:place], plan)
    made = ancestors(checkpoint, processes, copies_in(commands)) if checkpoint else []
    if not any(stage.steps for process in made for stage in process.stages) and not any(map(averages, made)):
        made = [
            process for process in processes if process.elapsed_s > begin_s or process.facts[-1].elapsed_s > begin_s
        ]
    if made and averages(made[-1]) and (fingerprint is None or fingerprint.relative_delta):
        says = f"{made[-1].program} loaded {', '.join(made[-1].paths('loaded')[:3])}, made no step and saved"
        return Executed(Route.AVERAGING, (_seen(made[-1], says),), "observed")
    stages = [(process, stage) for process in made for stage in process.stages if stage.steps]
    if not stages:
        return None
    if all(stage.route is Route.NONE for _, stage in stages):
        return Executed(Route.NONE, tuple(_seen(p, _says(s)) for p, s in stages[-6:]), "observed")
    stages = [(process, stage) for process, stage in stages if stage.route is not Route.NONE]
    routes = [stage.route for _, stage in stages]
    first = made[0].elapsed_s
    routes = [parent, *routes] if parent is not None and first > begin_s else routes
    evidence = tuple(_seen(process, _says(stage)) for process, stage in stages[-6:]) + _crashes(observed)
    route = Route.UNKNOWN if Route.UNKNOWN in routes[-len(stages) :] else joined_route(routes)
    return Executed(route, evidence, "observed", _disputed(routes, plan))


def _says(stage: Stage) -> str:
    blocks = stage.blocks
    figures = [f"{stage.steps} steps", stage.trainer or "own loop", f"{stage.why} -> {stage.route}"]
    if rates := [rate for block in blocks for rate in numbers(block.get("rates"))]:
        figures.append(f"rate {shown(rates[0])} to {shown(rates[-1])}")
    figures += [f"{name} {shown(stage.facts[name])}" for name in ("model", "rows") if stage.facts.get(name)]
    return ", ".join(figures) + ("" if stage.end_s < math.inf or not stage.trainer else ", not ended")


def _seen(process: ObservedProcess, says: str) -> EvidenceLine:
    where = f"process at {process.elapsed_s:.0f} s"
    return EvidenceLine(where=where, says=clean(f"observed in {process.program}: {says}", 240) or "")


def _crashes(observed: Sequence[ObservedFact]) -> tuple[EvidenceLine, ...]:
    crashed = [p for p in processes_of(observed) if p.of("crashed")][-2:]
    told = [(p, p.of("crashed")[-1]) for p in crashed]
    return tuple(_seen(p, f"crashed: {c.get('type')}: {c.get('message')} ({c.get('where')})") for p, c in told)


def _by_logs(found: Sequence[Logged], plan: Planned, parent: Route | None) -> Executed:
    routes = [refined(stage, plan) for stage in found]
    evidence = [line_of(stage, route) for stage, route in zip(found, routes, strict=True)][:8]
    if parent is not None:
        says = f"goes on from a submission whose route was {parent}"
        evidence.append(EvidenceLine(where="ledger: fingerprint", says=says))
    known = [parent, *routes] if parent and any(r in (*RL, *SUPERVISED) for r in routes) else routes
    route = joined_route(routes) if joined_route(known) is not Route.SFT_RL else Route.SFT_RL
    if route is Route.UNKNOWN and plan.route not in UNTRAINED:
        route = plan.route
    return Executed(route, tuple(evidence), "logged", _disputed(routes, plan))


def _disputed(routes: Sequence[Route], plan: Planned) -> bool:
    """Return whether nothing that was executed is of a kind that the confident plan contains."""
    both = (*SUPERVISED, *RL)
    planned = set(both if plan.route is Route.SFT_RL else family(plan.route))
    planned |= set(family(Route.DPO)) if plan.route is Route.RL else set()  # online DPO logs the same as DPO
    done = {r for route in routes for r in (both if route is Route.SFT_RL else family(route))}
    return plan.confidence >= SURE and not plan.alternatives and bool(planned and done) and not planned & done


# --- weights and command lines


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


def _by_weights(
    commands: Sequence[Commanded],
    fingerprint: Fingerprint | None,
    plan: Planned,
    parent: Fingerprint | None,
    observed: Sequence[ObservedFact],
) -> Executed:
    if between := _between(fingerprint, parent):
        return Executed(Route.AVERAGING, between, "weights")
    tools, ran = [], []
    scripts = {posixpath.basename(path) for path in plan.scripts}
    for line in commands:
        for command in (one.command for one in commands_in(line.command or "")):
            is_script = command.kind in ("script", "shell") and posixpath.basename(command.target) in scripts
            where = EvidenceLine(where=f"process at {line.elapsed_s:.0f} s", says=clean(line.command, 200) or "")
            ran += [where] * is_script
            tools += [where] * command.target.startswith("mergekit")
    ran = list({line.says: line for line in ran}.values())[:3]
    if tools or (plan.route is Route.AVERAGING and ran):
        return Executed(Route.AVERAGING, tuple(tools[:3] or ran), "commands")
    watched = any(posixpath.basename(p.program) in scripts for p in processes_of(observed))
    changed = fingerprint is not None and fingerprint.relative_delta
    if (
        not changed
        or not ran
        or watched
        or plan.route in UNTRAINED
        or plan.confidence < SURE_ENOUGH
        or fingerprint is None
    ):
        return Executed(Route.UNKNOWN, tuple(ran))
    says = f"no step was observed or logged, and the weights changed, relative delta {changed:.3g}"
    return Executed(plan.route, (*ran, _of_fingerprint(fingerprint, says)), "commands")


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
