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
from autorl_hpc.report.routes import stages as seen
from autorl_hpc.report.routes import trainers as known
from autorl_hpc.report.routes.commands import commands_in
from autorl_hpc.report.routes.logged import Logged, line_of, logged, refined
from autorl_hpc.report.routes.planned import Planned, Training
from autorl_hpc.report.routes.stages import Commanded, ObservedProcess, Stage, processes_of, whole
from autorl_hpc.report.routes.trainers import RL, SUPERVISED, UNTRAINED, family, joined_route
from autorl_hpc.report.story_records import EvidenceLine, RouteSource
from autorl_hpc.states import Route

SURE, SURE_ENOUGH = (
    0.8,
    0.6,
)  # least confidence with which a plan contradicts what was executed, and with which it refines that
# Of the distance of two models. Sketches err by 1.1 % of each; closer to an end than BETWEEN_SHARE is that end.
BETWEEN_TOLERANCE, BETWEEN_SHARE = 0.05, 0.03
ROUNDS = 2  # samples were drawn this often between optimizer steps where a policy learns from its own samples
# Of one prompt, by a guess: prompts are counted and answers are not; fewer samples were a look at some.
MOST_ANSWERS = 8


@dataclass(frozen=True)
class Executed:
    """The route that was executed, and which kind of evidence decided it."""

    route: Route
    evidence: tuple[EvidenceLine, ...] = ()
    source: RouteSource | None = None
    disputed: bool = False  # whether the plan is sure of another kind of training


def _sampled(process: ObservedProcess, first: float, last: float) -> list[dict[str, Any]]:
    """Return the generations of a process after step `first` and before step `last`, but for greedy ones."""
    told = [g for g in process.of("generated") if g.get("sampled") is not False]
    return [g for g in told if first <= whole(g.get("steps_before")) < last]


def _in_code(process: ObservedProcess, plan: Planned, why: str) -> list[Training]:
    """Return the trainings of this kind in the script that a process ran; if there is none, in all files."""
    found = [t for t in plan.trainings if t.why.startswith(why)]
    return [t for t in found if posixpath.basename(t.path) == posixpath.basename(process.program)] or found


def _tell(stage: Stage, process: ObservedProcess, earlier: Sequence[ObservedProcess], plan: Planned) -> None:
    """Set the stage's route and why: by the trainer's class, else by samples drawn between its steps and its code's loss."""
    bases, given = stage.facts.get("bases"), stage.facts.get("arguments")
    name = known.trainer_class([stage.trainer, *(map(str, bases) if isinstance(bases, list) else ())])
    arguments = given if isinstance(given, Mapping) else {}
    code = _in_code(process, plan, name or "own loop")
    losses = {route for t in code if (route := t.loss or t.route) is not None and route not in UNTRAINED}
    drawn = [whole(g.get("steps_before")) for g in _sampled(process, stage.first, stage.last)]
    rounds, rewarded = len(set(drawn)), any("reward" in str(key) for log in process.of("log") for key in log)
    by_rewards = {Route.RL} if rounds >= ROUNDS and rewarded else set[Route]()
    stage.why = name or (f"own loop, samples drawn in {rounds} rounds between its steps" if rounds else "own loop")
    if name is not None:
        stage.route = known.route_of_trainer(name, arguments) or Route.NONE
        own_class = stage.trainer.split(".", 1)[0] not in known.TRAINER_PACKAGES
        unsampled = stage.route in RL and not process.of("generated") and not arguments.get("use_vllm")
        if own_class and (name in known.GENERIC_TRAINERS or unsampled):  # its code tells which loss it computes
            stage.route = _one(losses) or _one(by_rewards) or Route.UNKNOWN
        elif _one(losses) in family(stage.route):
            stage.route = _one(losses) or stage.route  # an argument that was not observed
    elif rounds >= ROUNDS:
        after_steps = losses & set(SUPERVISED) and min(drawn) > stage.first
        policy = losses & set(RL)
        stage.route = _one(policy or losses or by_rewards) or Route.UNKNOWN
        if after_steps and _one(policy):
            stage.route = Route.SFT_RL
    else:
        # A plan that draws samples by a call that is observed did not run where none was.
        unsampled = not process.of("generated") and any(t.samples for t in code)
        stage.route = _one(losses - set(RL) if unsampled else losses) or Route.UNKNOWN
    if stage.route is Route.SFT:
        stage.route, more = _by_rows(stage, process, earlier, {t.route for t in code})
        stage.why += more


def _one(routes: set[Route]) -> Route | None:
    return next(iter(routes)) if len(routes) == 1 else None


def _by_rows(
    stage: Stage, process: ObservedProcess, earlier: Sequence[ObservedProcess], code: set[Route | None]
) -> tuple[Route, str]:
    """Return the route of supervised training by where its rows came from, and how that was seen: samples only if some were drawn
    before the first step, and the code says so; without code, if a file was read that whoever drew them did not read."""
    rows = whole(stage.facts.get("rows")) or max((whole(r.get("rows")) for r in process.of("rows")), default=0)
    trained = str(stage.facts.get("model") or "") or next(iter(process.paths("loaded")), "")
    makers = [(process, _sampled(process, 0, stage.first + 1))]
    makers += [(one, _sampled(one, 0, math.inf)) for one in earlier if not one.stages]
    for maker, asked in makers if code != {Route.SFT} else ():
        samples = sum(whole(g.get("prompts")) for g in asked)
        if samples * MOST_ANSWERS < max(rows, 1):
            continue
        made = maker is not process and set(process.paths("rows")) - set(maker.paths("rows")) and samples >= rows
        if not code and not made:
            return Route.UNKNOWN, f", {samples} samples were drawn before"
        models = maker.paths("loaded")
        other = trained and models and not any(seen.same(trained, path) for path in models)
        teacher = maker is process and len(models) > 1
        word = f", on {rows or 'its'} rows after {samples} samples of {posixpath.basename(maker.program)}"
        return (Route.DISTILLATION if other or teacher else Route.REJECTION_SAMPLING), word
    return (Route.DISTILLATION, ", by its code") if Route.DISTILLATION in code else (Route.SFT, "")


def has_effect(training: Sequence[TrainingPoint], observed: Sequence[ObservedFact] = ()) -> bool:
    """Return whether steps of a policy's training were observed or logged, not all with learning rate 0."""
    return any(stage.had_effect for stage in logged(training)) or bool(seen.steps_observed(observed))


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
        if told is not None and (done is None or told.route not in (Route.UNKNOWN, *SUPERVISED)):  # a log shows no rows
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
    made = seen.ancestors(checkpoint, processes, seen.copies_in(commands)) if checkpoint else []
    if not any(stage.steps for process in made for stage in process.stages) and not any(map(seen.averages, made)):
        made = [one for one in processes if max(one.elapsed_s, one.facts[-1].elapsed_s) > begin_s]
    if made and seen.averages(made[-1]) and (fingerprint is None or fingerprint.relative_delta):
        says = f"{made[-1].program} loaded {', '.join(made[-1].paths('loaded')[:3])}, made no step and saved"
        return Executed(Route.AVERAGING, (_seen(made[-1], says),), "observed")
    stages = [(process, stage) for process in made for stage in process.stages if stage.steps]
    if not stages:
        return None
    if all(stage.route is Route.NONE for _, stage in stages):
        return Executed(Route.NONE, tuple(_seen(p, _says(s)) for p, s in stages[-6:]), "observed")
    stages = [(process, stage) for process, stage in stages if stage.route is not Route.NONE]
    routes = [stage.route for _, stage in stages]
    routes = [parent, *routes] if parent is not None and made[0].elapsed_s > begin_s else routes
    evidence = tuple(_seen(process, _says(stage)) for process, stage in stages[-6:]) + _crashes(observed)
    route = Route.UNKNOWN if Route.UNKNOWN in routes[-len(stages) :] else joined_route(routes)
    return Executed(route, evidence, "observed", _disputed(routes, plan))


def _says(stage: Stage) -> str:
    blocks = stage.blocks
    figures = [f"{stage.steps} steps", stage.trainer or "own loop", f"{stage.why} -> {stage.route}"]
    if rates := [rate for block in blocks for rate in seen.numbers(block.get("rates"))]:
        figures.append(f"rate {seen.shown(rates[0])} to {seen.shown(rates[-1])}")
    figures += [f"{name} {seen.shown(stage.facts[name])}" for name in ("model", "rows") if stage.facts.get(name)]
    return ", ".join(figures) + ("" if stage.end_s < math.inf or not stage.trainer else ", not ended")


def _seen(process: ObservedProcess, says: str) -> EvidenceLine:
    where = f"process at {process.elapsed_s:.0f} s"
    return EvidenceLine(where=where, says=clean(f"observed in {process.program}: {says}", 240) or "")


def _crashes(observed: Sequence[ObservedFact]) -> tuple[EvidenceLine, ...]:
    crashed = [(p, p.of("crashed")[-1]) for p in processes_of(observed) if p.of("crashed")][-2:]
    where = [str(facts.get("where")).rsplit("/code/", 1)[-1] for _, facts in crashed]
    told = zip(crashed, where, strict=True)
    return tuple(_seen(p, f"crashed: {c.get('type')}: {c.get('message')} ({at})") for (p, c), at in told)


def _by_logs(found: Sequence[Logged], plan: Planned, parent: Route | None) -> Executed:
    routes = [refined(stage, plan) for stage in found]
    evidence = [line_of(stage, route) for stage, route in zip(found, routes, strict=True)][:8]
    if parent is not None:
        says = f"goes on from a submission whose route was {parent}"
        evidence.append(EvidenceLine(where="ledger: fingerprint", says=says))
    every = [parent, *routes] if parent and any(r in (*RL, *SUPERVISED) for r in routes) else routes
    route = joined_route(routes) if joined_route(every) is not Route.SFT_RL else Route.SFT_RL
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
    tools, ran = dict[str, EvidenceLine](), dict[str, EvidenceLine]()
    scripts = {posixpath.basename(path) for path in plan.scripts}
    for line in commands:
        where = EvidenceLine(where=f"process at {line.elapsed_s:.0f} s", says=clean(line.command, 200) or "")
        for command in (one.command for one in commands_in(line.command or "")):
            if command.kind in ("script", "shell") and posixpath.basename(command.target) in scripts:
                ran[where.says] = where
            if command.target.startswith("mergekit"):
                tools[where.says] = where
    by_commands = tuple(ran.values())[:3]
    if tools or (plan.route is Route.AVERAGING and ran):
        return Executed(Route.AVERAGING, tuple(tools.values())[:3] or by_commands, "commands")
    watched = any(posixpath.basename(p.program) in scripts for p in processes_of(observed))
    sure = plan.route not in UNTRAINED and plan.confidence >= SURE_ENOUGH
    if fingerprint is None or not fingerprint.relative_delta or not ran or watched or not sure:
        return Executed(Route.UNKNOWN, by_commands)
    says = f"no step was observed or logged, and the weights changed, relative delta {fingerprint.relative_delta:.3g}"
    return Executed(plan.route, (*by_commands, _of_fingerprint(fingerprint, says)), "commands")


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
