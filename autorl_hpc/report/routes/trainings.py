"""Trainings: trainers that are made and run, with what data, and own loops, told by what flows into their loss."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autorl_hpc.report.routes import losses, trainers
from autorl_hpc.report.routes.events import Event, What, event
from autorl_hpc.report.routes.flow import flow
from autorl_hpc.report.routes.kinds import Made, Value
from autorl_hpc.report.routes.samples import base_names, told_by_flow
from autorl_hpc.report.routes.scopes import Scope
from autorl_hpc.report.routes.shell import Arms
from autorl_hpc.report.routes.values import Values
from autorl_hpc.report.routes.words import words
from autorl_hpc.states import Route

if TYPE_CHECKING:
    from autorl_hpc.report.routes.walk import Walk

OWN_LOOP = "own loop"
_STEPS = re.compile(
    r"step\(|optim|\bopt\b|apply_gradients|_foreach_|Trainer|\.grad\b[^\n]{0,80}\b(?:lr|rate|eta)\b|\b(?:lr|rate|eta)\b[^\n]{0,80}\.grad\b"
)
"""What code says that goes from gradients to weights: a step, an optimiser, a learning rate times a gradient."""

_MODEL_WORDS = ("model", "policy", "net", "actor", "critic", "backbone", "llm")


def trainer_made(walk: Walk, node: ast.Call, targets: Sequence[Value], scope: Scope, arms: Arms) -> None:
    """Keeps a trainer that a call makes, with its models and data, until it is run."""
    told_of = [trainers.of_class(target, node, scope, walk.values) for target in targets]
    several = list({told.route: told for told in reversed(told_of) if told is not None}.values())[::-1]
    known = walk.trainers.get(id(node))
    if known is not None and (len(several) != 1 or known.route is (several[0].route or Route.UNKNOWN)):
        return
    walk.trained.discard(id(node))
    for number, told in enumerate(several):  # which class it is may be undecided: each is a branch of its own
        own = arms if len(several) == 1 else (*arms, (f"{scope.source.path}:{node.lineno}:class", number))
        made = event("made", node, scope, own, route=told.route or Route.UNKNOWN, why=told.why)
        made.tags.add("policy" if told.route is not None else "no-policy")
        made.models = trainers.models(node, scope, walk.values)
        made.objects = trainers.objects(node, scope, walk.values)
        made.writes = frozenset(base_names(trainers.outputs(node, scope, walk.values)))
        if trainers.is_idle(node, scope, walk.values):
            made.tags.add("idle")
        _told_by_data(made, node, scope, walk.values)
        if number == 0:
            walk.trainers[id(node)] = first = made
        else:
            walk.beside.setdefault(id(first), []).append(made)


def _told_by_data(made: Event, node: ast.Call, scope: Scope, values: Values) -> None:
    """Whether a trainer's data is made of samples, and how they were kept."""
    data = next((k.value for k in node.keywords if k.arg in ("train_dataset", "dataset", "train_data")), None)
    if data is None:
        return
    told_by_flow(made, flow(data, scope, values), values)


def handed_over(walk: Walk, what: ast.expr, scope: Scope, arms: Arms) -> None:
    """`Thread(target=trainer.train)`: whoever gets it runs it."""
    if not isinstance(what, ast.Attribute) or what.attr != "train":
        return
    if any(isinstance(v, Made) and id(v.call) in walk.trainers for v in walk.values.of(what.value, scope)):
        trained(walk, what, scope, arms)


def trained(walk: Walk, func: ast.Attribute, scope: Scope, arms: Arms) -> None:
    """Notes that a trainer is run."""
    receivers = walk.values.of(func.value, scope)
    made = [walk.trainers[id(r.call)] for r in receivers if isinstance(r, Made) and id(r.call) in walk.trainers]
    if func.attr == "train" and not receivers and not made and not any(w in words(func.value) for w in _MODEL_WORDS):
        made = [t for key, t in walk.trainers.items() if key not in walk.trained][-1:]
    now = walk.current(func.value, scope, made)
    for trainer in [each for one in now for each in (one, *walk.beside.get(id(one), ()))]:
        if func.attr == "step" and trainer.route is not Route.PPO:
            continue
        walk.trained |= {key for key, value in walk.trainers.items() if value is trainer}
        what: What = "no-policy" if "no-policy" in trainer.tags else "zero" if "idle" in trainer.tags else "train"
        ran = Event(
            what,
            trainer.path,
            trainer.line,
            trainer.says,
            trainer.route,
            trainer.why,
            (*trainer.arms, *(a for a in arms if a not in trainer.arms)),
        )
        ran.reads, ran.models, ran.objects = trainer.reads, trainer.models, trainer.objects
        ran.writes = trainer.writes
        ran.sampled, ran.kept, ran.elsewhere = trainer.sampled, trainer.kept, trainer.elsewhere
        walk.add(ran)


def loop(walk: Walk, node: ast.Call, func: ast.Attribute, scope: Scope, arms: Arms) -> None:
    """An own training loop, told by what flows into its loss."""
    start = node.args[0] if node.args else func.value
    found = flow(start, scope, walk.values)
    told = losses.route_of(signals := losses.signals(found, walk.values))
    if told is None:
        walk.add(event("train", node, scope, arms, why="a loss that tells nothing", sure=0.3))
        return
    route, word, why = told
    path, line = signals.lines[word]
    source = walk.values.sources.get(path)
    what: What = "zero" if trainers.optimiser_is_idle(walk.reached, walk.values) else "train"
    made = Event(what, path, line, source.line(line) if source else "", route, f"{OWN_LOOP}: {why}", arms, sure=0.85)
    told_by_flow(made, found, walk.values)
    walk.add(made)


def ended(walk: Walk) -> None:
    """Trainers that were made and never run, and losses of which nothing is learned: nobody makes a step from them."""
    if not any(_STEPS.search(text) for text in {s.source.path: s.source.text for s in walk.reached}.values()):
        for each in walk.events:
            if each.what == "train" and each.why.startswith(OWN_LOOP):
                each.what = "made"
    for key, made in walk.trainers.items():
        if key not in walk.trained:
            walk.add(made)
