"""Decide the executed route (`executed`): by what was observed, else by trainers' logs, the weights, and command lines."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autorl_hpc.records.entries import Fingerprint
from autorl_hpc.records.recorded import ObservedFact, ProcessSeen, TraceEvent, TrainingPoint
from autorl_hpc.report.format import clean
from autorl_hpc.report.routes.commands import commands_in
from autorl_hpc.report.routes.planned import Planned
from autorl_hpc.report.routes.trainers import (
    GENERIC_TRAINERS,
    REWARD_TRAINERS,
    RL,
    SUPERVISED,
    TRAINER_CLASSES,
    TRAINER_PACKAGES,
    UNTRAINED,
    family,
    joined_route,
    key_of,
    route_of_trainer,
    trainer_class,
)
from autorl_hpc.report.story_records import EvidenceLine, RouteSource, Setting
from autorl_hpc.states import Route

Commanded = ProcessSeen | TraceEvent
"""A command line: of a process, or of a tool call in a trace."""

SURE, SURE_ENOUGH = 0.8, 0.6
"""Least confidence with which a plan contradicts what was executed, and with which it refines that."""

BETWEEN_TOLERANCE, BETWEEN_SHARE = 0.05, 0.03
"""Relative to the distance of two models. A point between them misses the straight line by the sketches' error (1.1 % of each of
two distances) and rounding, and a point closer to an end than BETWEEN_SHARE is that end. Training leaves the line at once,
because weights have millions of dimensions."""

ROUNDS = 2
"""Samples were drawn this often between optimizer steps where a policy learns from its own samples."""

_FIGURES: tuple[tuple[Route, str], ...] = (
    (Route.PREFERENCE, "log_odds_ratio log_odds_chosen"),  # ORPO
    (Route.PPO, "critic/vf_loss value_loss vf_loss loss/value val/ratio ppo/loss/value critic_loss loss/value_avg"),
    (Route.DPO, "rewards/chosen rewards/margins logps/chosen"),
    (Route.GRPO, "frac_reward_zero_std reward_std clip_ratio/region_mean completions/mean_length"),
    (Route.RL, "objective/rlhf_reward actor/pg_loss policy_loss critic/score/mean objective/scores"),
    (Route.SFT, "mean_token_accuracy num_tokens"),
)
"""Metrics that only one kind of trainer logs, the most specific first (trl 0.12 to 1.16, verl 0.4, OpenRLHF 0.8)."""


@dataclass(frozen=True)
class Executed:
    """The route that was executed, and which kind of evidence decided it."""

    route: Route
    evidence: tuple[EvidenceLine, ...] = ()
    source: RouteSource | None = None
    disputed: bool = False
    """Whether the plan is sure of another kind of training."""


# --- what was observed in the agent's Python processes


@dataclass
class Stage:
    """Optimizer steps of one trainer, or of a program's own loop (`trainer` empty)."""

    trainer: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    begin_s: float = -math.inf
    end_s: float = math.inf
    blocks: list[dict[str, Any]] = field(default_factory=list)
    route: Route = Route.UNKNOWN
    why: str = ""

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps that can have changed weights."""
        if not self.blocks:
            return _whole(self.facts.get("steps"))
        return sum(_whole(b.get("count")) for b in self.blocks if b.get("rates") != [0, 0] and b.get("norm") != 0)

    @property
    def first(self) -> int:
        """Return the number of the process's first step in this stage."""
        return min((_whole(b.get("first")) for b in self.blocks), default=0)


@dataclass
class Process:
    """The facts of one process, in their order."""

    program: str
    elapsed_s: float
    facts: list[ObservedFact] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)

    def of(self, what: str) -> list[dict[str, Any]]:
        """Return the facts of one kind."""
        return [fact.facts for fact in self.facts if fact.what == what]

    def paths(self, what: str) -> list[str]:
        """Return the paths of models that were loaded or saved."""
        return list(dict.fromkeys(str(each["path"]) for each in self.of(what) if each.get("path")))


def _whole(value: object) -> int:
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) and value > 0 else 0


def _time(value: object, default: float) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else default


def processes_of(facts: Iterable[ObservedFact]) -> list[Process]:
    """Return the processes in the order of their first facts, without the further ranks of a distributed training."""
    found: dict[tuple[int, int], Process] = {}
    done: list[Process] = []
    for fact in facts:
        key = (fact.attempt, fact.pid)
        if key not in found or fact.what == "start":
            found[key] = Process(fact.program, fact.elapsed_s)
            done.append(found[key])
        found[key].facts.append(fact)
    kept = [p for p in done if not any(_whole(start.get("rank")) for start in p.of("start"))]
    for process in kept:
        process.stages = _stages(process)
    return kept


def _stages(process: Process) -> list[Stage]:
    made: list[Stage] = []
    for fact in process.facts:
        name = str(fact.facts.get("name", ""))
        if fact.what != "trainer":
            continue
        if fact.facts.get("phase") == "ended" and made and made[-1].trainer == name and made[-1].end_s == math.inf:
            made[-1].end_s = _time(fact.at_s, math.inf)
            made[-1].facts |= {k: v for k, v in fact.facts.items() if v not in (None, {}, [])}
        else:
            made.append(Stage(name, dict(fact.facts), _time(fact.at_s, -math.inf)))
    own: dict[int, Stage] = {}
    for block in process.of("steps"):
        at_s = _time(block.get("from_s"), 0.0)
        last = next((n for n, s in reversed(list(enumerate(made))) if s.begin_s <= at_s), -1)
        inside = last >= 0 and at_s <= made[last].end_s
        (made[last] if inside else own.setdefault(last, Stage(begin_s=at_s))).blocks.append(block)
    return sorted([*made, *own.values()], key=lambda s: s.begin_s)


def _sampled(process: Process, first: int, last: float) -> list[dict[str, Any]]:
    """Return the generations of a process after step `first` and before step `last`, but for greedy ones."""
    told = [g for g in process.of("generated") if g.get("sampled") is not False]
    return [g for g in told if first <= _whole(g.get("steps_before")) < last]


def _told(stage: Stage, process: Process, earlier: Sequence[Process], plan: Planned) -> None:
    """Set the stage's route and why."""
    names = [stage.trainer, *map(str, stage.facts.get("bases") or ())]
    name = trainer_class(names) if stage.trainer else None
    ends = stage.first + sum(_whole(b.get("count")) for b in stage.blocks) if stage.blocks else math.inf
    rounds = len({_whole(g.get("steps_before")) for g in _sampled(process, stage.first, ends)})
    is_own = stage.trainer.split(".", 1)[0] not in TRAINER_PACKAGES
    planned = _planned_for(process, plan, own_loop=not stage.trainer)
    arguments = stage.facts.get("arguments")
    if name is not None and (route := route_of_trainer(name, arguments if isinstance(arguments, Mapping) else {})):
        stage.route, stage.why = route, name
        unsampled = route in RL and rounds == 0 and process.of("generated") == [] and not _by_server(arguments)
        if is_own and (name in GENERIC_TRAINERS or unsampled):
            # A class of the agent's own may compute another loss: then its code tells which.
            told = planned if len(planned) == 1 else {Route.RL} if rounds >= ROUNDS and _rewarded(process) else set()
            stage.route = next(iter(told)) if told else Route.UNKNOWN
    elif name is None:
        stage.why = f"own loop, samples drawn in {rounds} rounds between its steps" if rounds else "own loop"
        if rounds >= ROUNDS and (on_policy := planned - {Route.SFT} or ({Route.RL} if _rewarded(process) else planned)):
            planned = on_policy
        elif not process.of("generated"):
            planned = {route for route in planned if not (route in RL and plan_samples(process, plan))} or planned - set(RL)
        stage.route = joined_route(sorted(planned)) if len({family(r) for r in planned}) == 1 and len(planned) == 1 else Route.UNKNOWN
    if stage.route is Route.SFT:
        stage.route, more = _rows(stage, process, earlier, plan)
        stage.why += more


def _by_server(arguments: object) -> bool:
    return isinstance(arguments, Mapping) and bool(arguments.get("use_vllm"))


def _rewarded(process: Process) -> bool:
    return any("reward" in str(key) for log in process.of("log") for key in log)


def plan_samples(process: Process, plan: Planned) -> bool:
    """Return whether a program's code draws samples by a call that is observed."""
    return any(each.samples for each in plan.trainings if _is_of(each.path, process))


def _is_of(path: str, process: Process) -> bool:
    return posixpath.basename(path) == posixpath.basename(process.program)


def _planned_for(process: Process, plan: Planned, *, own_loop: bool) -> set[Route]:
    """Return the routes of own losses in the code that a process ran: its script's, else those of all files."""
    marks = ("own loop",) if own_loop else ("whose loss is",)
    known = [t for t in plan.trainings if t.route and any(mark in t.why for mark in marks)]
    own = [t for t in known if _is_of(t.path, process)] or known
    return {t.route for t in own if t.route and t.route not in UNTRAINED}


def _rows(stage: Stage, process: Process, earlier: Sequence[Process], plan: Planned) -> tuple[Route, str]:
    """Return the route of supervised training by where its rows came from, and how that was seen."""
    rows = _whole(stage.facts.get("rows")) or max((_whole(r.get("rows")) for r in process.of("rows")), default=0)
    trained = str(stage.facts.get("model") or "") or next(iter(process.paths("loaded")), "")
    makers = [(process, _sampled(process, 0, stage.first + 1))]
    makers += [(one, _sampled(one, 0, math.inf)) for one in earlier if not one.stages]
    for maker, asked in makers:
        samples = sum(_whole(g.get("prompts")) for g in asked)
        if samples and samples >= max(rows, 1) and plan.route not in (Route.SFT, Route.SFT_RL):
            models = maker.paths("loaded")
            other = trained and models and not any(_same(trained, path) for path in models)
            teacher = maker is process and len(models) > 1
            word = f", on {rows or 'its'} rows after {samples} samples of {posixpath.basename(maker.program)}"
            return (Route.DISTILLATION if other or teacher else Route.REJECTION_SAMPLING), word
    return (plan.route, ", by its code") if plan.route in SUPERVISED and plan.confidence >= SURE_ENOUGH else (Route.SFT, "")


# --- from a checkpoint back to what it was made of


def _same(path: str, other: str) -> bool:
    one, two = (posixpath.normpath(p).strip("/") for p in (path, other))
    return f"/{one}".endswith(f"/{two}") or f"/{two}".endswith(f"/{one}")


def _ancestors(path: str, processes: Sequence[Process], copies: Mapping[str, str], depth: int = 0) -> list[Process]:
    """Return the processes that made a checkpoint, the first one first; empty if nobody was seen to save it."""
    makers = [p for p in processes if any(_same(path, saved) for saved in p.paths("saved"))]
    if depth > 8 or not makers:
        source = next((source for target, source in copies.items() if _same(path, target)), None)
        return _ancestors(source, processes, copies, depth + 1) if source and depth <= 8 else []
    maker = makers[-1]
    before = processes[: processes.index(maker)]
    origins = [str(s["origin"]) for s in maker.of("saved") if s.get("origin") and _same(path, str(s.get("path")))]
    origins += [*maker.paths("loaded"), *(str(s.facts.get("model") or "") for s in maker.stages)]
    found = [p for o in dict.fromkeys(filter(None, origins)) for p in _ancestors(o, before, copies, depth + 1)]
    return [one for one in before if any(one is each for each in found)] + [maker]


def _copies(commands: Sequence[Commanded]) -> dict[str, str]:
    """Return targets and sources of `cp` and `mv` of folders."""
    found: dict[str, str] = {}
    for each in (one.command for line in commands for one in commands_in(line.command or "")):
        words = [word for word in each.args if not word.startswith("-")]
        if each.target in ("cp", "mv", "rsync") and len(words) == 2:
            found[words[1].rstrip("/")] = words[0].rstrip("/")
    return found


def _averages(process: Process) -> bool:
    """Return whether a process loaded several models, made no step and saved one."""
    whole = [l for l in process.of("loaded") if "Peft" not in str(l.get("class")) and l.get("path")]
    return len({str(l["path"]) for l in whole}) > 1 and bool(process.paths("saved")) and not any(s.steps for s in process.stages)


# --- what trainers logged


@dataclass
class Logged:
    """Consecutive steps of one kind in one log; `route` is UNKNOWN if the log doesn't show it."""

    route: Route
    why: str
    first: TrainingPoint
    last: TrainingPoint
    points: int = 0
    idle: int = 0
    """Number of points with learning rate 0. A single one is the first step of a warm-up."""

    @property
    def had_effect(self) -> bool:
        """Return False if every step had learning rate 0."""
        return self.idle < max(self.points, 2)


def _logged(training: Sequence[TrainingPoint]) -> list[Logged]:
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
    is_evaluation = point.more and point.loss is None and all(k.startswith("eval_") for k in point.more)
    if name in REWARD_TRAINERS or is_evaluation:
        return None
    if name in TRAINER_CLASSES and name not in GENERIC_TRAINERS:
        return TRAINER_CLASSES[name], name
    for route, figures in _FIGURES:
        for figure in figures.split():
            if figure in point.more:
                return (Route.PREFERENCE if route is Route.DPO and "kl" in point.more else route), f"logs `{figure}`"
    if point.reward is not None:
        return Route.RL, "logs a reward"
    return (Route.UNKNOWN, name or "a loss only") if point.loss is not None or point.step is not None else None


def _refined(stage: Logged, plan: Planned) -> Route:
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


def has_effect(training: Sequence[TrainingPoint], observed: Sequence[ObservedFact] = ()) -> bool:
    """Return whether steps of a policy's training were observed or logged, not all with learning rate 0."""
    return any(stage.had_effect for stage in _logged(training)) or bool(steps_observed(observed))


def steps_observed(observed: Sequence[ObservedFact]) -> int | None:
    """Return the optimizer steps of all processes, each distributed training once; None if none was observed."""
    return sum(stage.steps for process in processes_of(observed) for stage in process.stages) or None


def trained_in_vain(training: Sequence[TrainingPoint], number: int) -> tuple[EvidenceLine, ...]:
    """Return the trainings of a window that ended by submitting the content of submission `number` again."""
    unused = f"; not in these weights: they are those of submission {number}"
    told = [_line(stage, stage.route) for stage in _logged(training)[:4]]
    return tuple(EvidenceLine(where=line.where, says=f"{line.says}{unused}") for line in told)


# --- the decision


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
        logged = [stage for stage in _logged(training) if stage.had_effect]
        told = _by_logs(logged, plan, parent) if logged else None
        if told is not None and (done is None or told.route is not Route.UNKNOWN):
            done = told
    if done is None and not submitted:
        return Executed(Route.NONE, _crashes(observed), "observed" if observed else None)
    return done or _by_weights(commands, fingerprint, plan, parent_fingerprint, observed)


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
            _told(stage, process, processes[:place], plan)
    made = _ancestors(checkpoint, processes, _copies(commands)) if checkpoint else []
    if not any(stage.steps for process in made for stage in process.stages) and not any(map(_averages, made)):
        made = [process for process in processes if process.elapsed_s > begin_s or process.facts[-1].elapsed_s > begin_s]
    if made and _averages(made[-1]) and (fingerprint is None or fingerprint.relative_delta):
        says = f"{made[-1].program} loaded {', '.join(made[-1].paths('loaded')[:3])}, made no step and saved"
        return Executed(Route.AVERAGING, (_seen(made[-1], says),), "observed")
    stages = [(process, stage) for process in made for stage in process.stages if stage.steps]
    stages = [(p, s) for p, s in stages if trainer_class([s.trainer]) not in REWARD_TRAINERS]
    if not stages:
        return None
    routes = [stage.route for _, stage in stages]
    first = made[0].elapsed_s
    routes = [parent, *routes] if parent is not None and first > begin_s else routes
    evidence = tuple(_seen(process, _says(stage)) for process, stage in stages[-6:]) + _crashes(observed)
    route = Route.UNKNOWN if Route.UNKNOWN in routes[-len(stages) :] else joined_route(routes)
    return Executed(route, evidence, "observed", _disputed(routes, plan))


def _says(stage: Stage) -> str:
    blocks = stage.blocks
    figures = [f"{stage.steps} steps", stage.trainer or "own loop", f"{stage.why} -> {stage.route}"]
    if blocks and isinstance(rates := [*(blocks[0].get("rates") or ()), *(blocks[-1].get("rates") or ())], list) and rates:
        figures.append(f"rate {_shown(rates[0])} to {_shown(rates[-1])}")
    figures += [f"{name} {_shown(stage.facts[name])}" for name in ("model", "rows") if stage.facts.get(name)]
    return ", ".join(figures) + ("" if stage.end_s < math.inf or not stage.trainer else ", not ended")


def _seen(process: Process, says: str) -> EvidenceLine:
    where = f"process at {process.elapsed_s:.0f} s"
    return EvidenceLine(where=where, says=clean(f"observed in {process.program}: {says}", 240) or "")


def _crashes(observed: Sequence[ObservedFact]) -> tuple[EvidenceLine, ...]:
    crashed = [p for p in processes_of(observed) if p.of("crashed")][-2:]
    told = [(p, p.of("crashed")[-1]) for p in crashed]
    return tuple(_seen(p, f"crashed: {c.get('type')}: {c.get('message')} ({c.get('where')})") for p, c in told)


def _by_logs(found: Sequence[Logged], plan: Planned, parent: Route | None) -> Executed:
    routes = [_refined(stage, plan) for stage in found]
    evidence = [_line(stage, route) for stage, route in zip(found, routes, strict=True)][:8]
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


def _line(stage: Logged, route: Route) -> EvidenceLine:
    steps = stage.points if stage.last.step is None else max(stage.last.step, 0)
    figures = [f"{steps} steps", f"{stage.why} -> {route}"]
    for name in ("loss", "reward", "kl"):
        first, last = getattr(stage.first, name), getattr(stage.last, name)
        if first is not None and last is not None:
            figures.append(f"{name} {first:.4g} to {last:.4g}")
    where = f"{clean(stage.first.source, 150)}, {stage.first.elapsed_s:.0f} s to {stage.last.elapsed_s:.0f} s"
    return EvidenceLine(where=where, says=clean(", ".join(figures), 200) or "")


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
    if not changed or not ran or watched or plan.route in UNTRAINED or plan.confidence < SURE_ENOUGH or fingerprint is None:
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


# --- settings: values that were observed, then logged, then literals of the code


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def settings(
    observed: Sequence[ObservedFact], training: Sequence[TrainingPoint], plan: Planned
) -> tuple[Setting, ...]:
    """Return the key settings of a window as values; the code's literals only for names that nothing else tells."""
    found: dict[tuple[str, str, str], RouteSource | None] = {}
    for process in processes_of(observed):
        where, given = f"process at {process.elapsed_s:.0f} s", dict[str, object]()
        for stage in process.stages:
            arguments = stage.facts.get("arguments")
            given |= {k: v for k, v in (arguments.items() if isinstance(arguments, Mapping) else ()) if v not in (None, "")}
            if not stage.trainer and stage.blocks and isinstance(rates := stage.blocks[0].get("rates"), list) and rates:
                given["learning_rate"] = max((r for b in stage.blocks for r in b.get("rates") or () if r), default=rates[0])
        given |= {k: v for facts in (*process.of("lora"),) for k, v in facts.items()}
        given |= {"seed": s["value"] for s in process.of("seed") if "value" in s}
        found |= {(k, _shown(v), where): "observed" for k, v in given.items() if not isinstance(v, dict)}
    rates = [p for p in training if p.learning_rate]
    if rates and not any(name == "learning_rate" for name, _, _ in found):
        best = max(rates, key=lambda p: p.learning_rate or 0.0)
        found[("learning_rate", _shown(best.learning_rate), f"{best.source}, {best.elapsed_s:.0f} s")] = "logged"
    aliases = {"lr": "learning_rate"}
    known = {aliases.get(name, name) for name, _, _ in found}
    rest = [s for s in plan.settings if aliases.get(last := s.name.rsplit(".", 1)[-1], last) not in known]
    made = [Setting(name=n, value=clean(v, 120) or "", where=clean(w, 200) or "", source=s) for (n, v, w), s in found.items()]
    told = [(order, each) for each in (*made, *rest) if each.value and (order := key_of(each.name)) is not None]
    return tuple(each for _, each in sorted(told, key=lambda one: one[0]))


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
