"""The route that events add up to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from autorl_hpc.report.routes.events import Event, exclusive
from autorl_hpc.report.routes.told import Alternative
from autorl_hpc.states import Route

RL = (Route.GRPO, Route.PPO, Route.RL)
_STAGE = re.compile(r"(stage|step|phase|part)[_-]?\d|^\d+[_-]", re.I)
_COMMON = frozenset(
    {"train.jsonl", "train.json", "data", "output", "outputs", "model", "config.json", "test.jsonl", "results"}
)
"""Names that two scripts share without one using what the other made."""


@dataclass
class Decision:
    """A route with the events that it rests on."""

    route: Route
    events: list[Event] = field(default_factory=list)
    confidence: float = 0.0
    alternatives: list[Alternative] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def decided(events: Sequence[Event], ordered: bool) -> Decision:
    """`ordered`: the scripts were really run in this order; else it is that of their names."""
    trains = [e for e in events if e.what == "train"]
    main, others = _main_branch(trains)
    if not main:
        return _without_training(events)
    decision = _of_trainings(main, events, ordered)
    decision.alternatives += [
        Alternative(e.route, f"{e.path}:{e.line}, in another branch") for e in others if e.route is not decision.route
    ]
    if any(e.what == "average" for e in events):
        decision.alternatives.append(Alternative(Route.AVERAGING, "weights are averaged, too"))
    if others:
        decision.confidence *= 0.7
    if any(e.what == "opaque" for e in events):
        decision.confidence *= 0.7
    return decision


def _main_branch(trains: Sequence[Event]) -> tuple[list[Event], list[Event]]:
    """Trainings that can happen in one run, the first branch of each question, and the rest."""
    main: list[Event] = []
    others: list[Event] = []
    for event in trains:
        (others if any(exclusive(event.arms, known.arms) for known in main) else main).append(event)
    return main, others


def _of_trainings(main: list[Event], events: Sequence[Event], ordered: bool) -> Decision:
    routes = [_of_one(event, events) for event in main]
    rl = [n for n, route in enumerate(routes) if route in RL]
    preference = [n for n, route in enumerate(routes) if route in (Route.DPO, Route.PREFERENCE)]
    supervised = [
        n for n, route in enumerate(routes) if route in (Route.SFT, Route.REJECTION_SAMPLING, Route.DISTILLATION)
    ]
    scripts = {event.script for event in main}
    one = len(scripts) == 1 or len({event.root for event in main}) == 1
    linked = one or ordered or _linked(main, events)
    pair = _stages([main[n] for n in supervised], [main[n] for n in rl]) if linked else None
    if pair is not None:
        chosen = list(pair)
        decision = Decision(Route.SFT_RL, chosen, min(e.sure for e in chosen) * (1.0 if len(scripts) == 1 else 0.9))
        if main.index(chosen[0]) > main.index(chosen[1]):
            decision.notes.append("RL comes first, supervised training after it")
        return decision
    group = rl or preference or supervised or list(range(len(routes)))
    best = routes[group[-1]]
    same = [n for n in group if routes[n] is best]
    sure = max(main[n].sure for n in same)
    rest = [(main[n], routes[n]) for n in range(len(routes)) if routes[n] is not best]
    decision = Decision(best, [main[n] for n in same][:3], sure * (0.95 if not rest else 0.5 if not linked else 0.7))
    decision.alternatives = [Alternative(route, f"{e.path}:{e.line}: {e.why}") for e, route in rest]
    if rl and supervised:
        decision.alternatives.append(Alternative(Route.SFT_RL, "if one script goes on from the other's model"))
    return decision


def _of_one(event: Event, events: Sequence[Event]) -> Route:
    """The route of one training; SFT on samples is rejection sampling or distillation."""
    if event.route is not Route.SFT:
        return event.route
    if event.elsewhere:
        return Route.DISTILLATION
    if event.kept:
        return Route.REJECTION_SAMPLING
    chain = _chain(event, events)
    if any(other.sampled for other in chain):
        event.tags |= {f"{other.path}:{other.line}" for other in chain if other.sampled or other.kept}
        if any(other.elsewhere or _foreign(other, event, events) for other in chain if other.sampled):
            return Route.DISTILLATION
        if any(other.kept for other in chain):
            return Route.REJECTION_SAMPLING
    return Route.SFT


def _chain(event: Event, events: Sequence[Event]) -> list[Event]:
    """The writings of the files that a training reads, and of those that these were made of; at most five deep."""
    wanted = set(event.reads) - _COMMON
    found: list[Event] = []
    for _ in range(5):
        new = [e for e in events if e.what == "write" and e not in found and (e.writes & wanted) - _COMMON]
        if not new:
            break
        found += new
        wanted |= {name for e in new for name in e.reads} - _COMMON
    return found


def _foreign(sampled: Event, trained: Event, events: Sequence[Event]) -> bool:
    """Whether the samples of a script are another model's than the one that is trained."""
    models = {m for e in events if e.what == "generate" and e.script == sampled.script for m in e.models}
    made = {name for e in events if e.what in ("train", "save") for name in e.writes}
    return bool(
        models and trained.models and not models & (trained.models | made) and not _alike(models, trained.models)
    )


def _alike(some: set[str], others: frozenset[str]) -> bool:
    return any("?" in m or "$" in m for m in (*some, *others))


def _linked(main: Sequence[Event], events: Sequence[Event]) -> bool:
    """Whether scripts are stages of one plan: by their names, or by a path that both name."""
    by_script = {e.script: e for e in main}
    names = [e.path.rsplit("/", 1)[-1] for e in by_script.values()]
    if sum(_STAGE.search(n) is not None for n in names) >= 2:
        return True
    first, *rest = by_script.values()
    return any((_paths(first, events) & _paths(e, events)) - (first.models & e.models) - _COMMON for e in rest)


def _stages(supervised: Sequence[Event], rl: Sequence[Event]) -> tuple[Event, Event] | None:
    """A supervised training and one by RL that may go on from it: the first and the last, if these may."""
    return next(((one, other) for one in supervised for other in reversed(rl) if not _separate(one, other)), None)


def _separate(one: Event, other: Event) -> bool:
    """Whether two trainings start from the same stored model: the second doesn't go on from the first."""
    return bool(one.models) and one.models == other.models and not (one.objects & other.objects)


def _paths(event: Event, events: Sequence[Event]) -> set[str]:
    own = [e for e in events if e.script == event.script]
    return {
        name for e in own for name in (*e.reads, *e.models, *e.writes) if not name.endswith((".jsonl", ".json", ".csv"))
    }


def _without_training(events: Sequence[Event]) -> Decision:
    averages = [e for e in events if e.what == "average"]
    if averages:
        return Decision(Route.AVERAGING, averages[:3], 0.9)
    changed = [e for e in events if e.what == "change"]
    if changed:
        return Decision(Route.UNKNOWN, changed[:3], 0.6, notes=["weights are changed by hand"])
    opaque = [e for e in events if e.what == "opaque"]
    if opaque:
        return Decision(Route.UNKNOWN, opaque[:3], 0.3, notes=["a text is run that is not in the code"])
    zero = [e for e in events if e.what == "zero"]
    if zero:
        return Decision(Route.COPY, zero[:3], 0.8, notes=["a training of no step, or with learning rate 0"])
    copies = [e for e in events if e.what == "copy"]
    if copies:
        return Decision(Route.COPY, copies[:3], 0.85)
    saves = [e for e in events if e.what == "save"]
    if saves:
        return Decision(Route.COPY, saves[:3], 0.7, notes=["a model is saved that nothing trained"])
    made = [e for e in events if e.what in ("made", "no-policy")]
    notes = ["a trainer is made and never run"] if any(e.what == "made" for e in made) else []
    return Decision(Route.NONE, made[:3], 0.7 if made else 0.6, notes=notes)
