"""Which trainer a call makes, what it starts from, and whether it is set to learn nothing."""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from autorl_hpc.report.routes import losses
from autorl_hpc.report.routes.flow import Flow, flow
from autorl_hpc.report.routes.kinds import Cls, Const, Lib, Lit, Made, Value
from autorl_hpc.report.routes.names import LOSS_TYPES_OF_RELATIVES, NO_POLICY_TRAINERS, TRAINER_CLASSES
from autorl_hpc.report.routes.scopes import Scope, statements
from autorl_hpc.report.routes.values import Values
from autorl_hpc.states import Route

_OWN_LOSS = (
    "compute_loss",
    "_compute_loss",
    "training_step",
    "get_batch_loss_metrics",
    "dpo_loss",
    "loss",
)
"""Methods by which a subclass changes what is learned."""
_STEPS = ("max_steps", "num_train_epochs", "learning_rate")
OPTIMISERS = frozenset({"AdamW", "Adam", "SGD", "AdamW8bit", "Adafactor", "Lion", "PagedAdamW8bit", "RMSprop"})


class Told(NamedTuple):
    """A trainer; route None: it trains no policy."""

    route: Route | None
    why: str


def of_class(target: Value, call: ast.Call, scope: Scope, values: Values) -> Told | None:
    """What a class that is called is as a trainer; None: it is none."""
    if isinstance(target, Lib):
        return _of_library(target, call, scope, values)
    if not isinstance(target, Cls):
        return None
    bases = [
        told for base in values.library_bases(target) if (told := _of_library(base, call, scope, values)) is not None
    ]
    if not bases:
        return None
    own = _own_loss(target, values)
    name = target.node.name
    if own is not None:
        return Told(own[0], f"{name}, a trainer whose own loss is {own[1]}")
    return Told(bases[0].route, f"{name}, which is a {bases[0].why}")


def _of_library(target: Lib, call: ast.Call, scope: Scope, values: Values) -> Told | None:
    last = target.last
    if target.name.startswith("builtins.") and target.name.count(".") == 1:
        return None
    if "()" in target.name or (last not in TRAINER_CLASSES and last not in NO_POLICY_TRAINERS):
        return None
    if last in NO_POLICY_TRAINERS:
        return Told(None, last)
    route = TRAINER_CLASSES[last]
    if route is Route.DPO and _loss_type(call, scope, values) in LOSS_TYPES_OF_RELATIVES:
        route = Route.PREFERENCE
    return Told(route, last)


def _loss_type(call: ast.Call, scope: Scope, values: Values) -> str | None:
    for given in (call, *configured(call, scope, values)):
        node, where = given if isinstance(given, tuple) else (given, scope)
        for keyword in node.keywords:
            if keyword.arg == "loss_type":
                return values.text(keyword.value, where)
    return None


def configured(call: ast.Call, scope: Scope, values: Values) -> list[tuple[ast.Call, Scope]]:
    """The calls that made a trainer's configuration."""
    found = []
    exprs = [k.value for k in call.keywords if k.arg in ("args", "config", "training_args")] + list(call.args[:3])
    for expr in exprs:
        for value in values.of(expr, scope):
            if isinstance(value, Made) and value.call is not call and (value.call.keywords or value.call.args):
                found.append((value.call, value.scope))
    return found


def _own_loss(cls: Cls, values: Values) -> tuple[Route, str] | None:
    """The route of a loss that a local class computes; None: it leaves it to its base."""
    for each in values.lineage(cls):
        scope = values.scopes.class_(each.node, each.parent)
        for name in _OWN_LOSS:
            method = scope.functions.get(name)
            if method is None or isinstance(method, ast.Lambda):
                continue
            inner = values.scopes.function(method, scope)
            found = Flow()
            for returned in inner.returns[:6]:
                part = flow(returned, inner, values)
                found.nodes += part.nodes
                found.tests += part.tests
            told = losses.route_of(losses.signals(found, values))
            if told is not None and not (told[0] is Route.SFT and _asks_base(method, name)):
                return told[0], told[2]
    return None


def _asks_base(method: ast.AST, name: str) -> bool:
    """Whether a method calls the one that it replaces."""
    body = getattr(method, "body", [])
    for statement, _ in statements(body):
        for node in islice(ast.walk(statement), 2_000):
            is_method = isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.value, ast.Call)
            if is_method and getattr(node.value.func, "id", "") == "super":  # type: ignore[attr-defined]
                return True
    return False


def models(call: ast.Call, scope: Scope, values: Values) -> frozenset[str]:
    """Base names of the models that a call is given, as far as they are constant."""
    exprs = [k.value for k in call.keywords if k.arg in ("model", "pretrained_model_name_or_path", "model_name")]
    found: set[str] = set()
    waiting: list[tuple[ast.expr, Scope, int]] = [(e, scope, 0) for e in [*exprs, *call.args[:2]]]
    while waiting:
        expr, where, depth = waiting.pop()
        for value in values.of(expr, where):
            if isinstance(value, Const) and isinstance(value.value, str) and len(value.value) < 300:
                found.add(posixpath.basename(value.value.rstrip("/")))
            elif isinstance(value, Made) and depth < 3 and value.call.args:
                waiting.append((value.call.args[0], value.scope, depth + 1))
    return frozenset(found)


def objects(call: ast.Call, scope: Scope, values: Values) -> frozenset[int]:
    """The calls that made the model object that a trainer is given; empty: it is given a path."""
    exprs = [k.value for k in call.keywords if k.arg == "model"] + call.args[:1]
    return frozenset(id(v.call) for e in exprs for v in values.of(e, scope) if isinstance(v, Made))


def outputs(call: ast.Call, scope: Scope, values: Values) -> list[str]:
    """Where a trainer writes its checkpoints to, as far as that is constant."""
    found = []
    for node, where in configured(call, scope, values):
        named = [k.value for k in node.keywords if k.arg == "output_dir"] or node.args[:1]
        found += [text for expr in named if (text := values.text(expr, where)) is not None]
    return found


def is_idle(call: ast.Call, scope: Scope, values: Values) -> bool:
    """Whether a trainer is set to make no step, or steps of no length."""
    for node, where in configured(call, scope, values):
        for keyword in given(node, where, values):
            if keyword[0] in _STEPS and _is_zero(keyword[1], keyword[2], values):
                return True
    return False


def given(call: ast.Call, scope: Scope, values: Values) -> list[tuple[str, ast.expr, Scope]]:
    """Keyword arguments of a call by name; `**settings` opened where it is a literal."""
    found: list[tuple[str, ast.expr, Scope]] = []
    for keyword in call.keywords[:100]:
        if keyword.arg is not None:
            found.append((keyword.arg, keyword.value, scope))
            continue
        for value in values.of(keyword.value, scope):
            if isinstance(value, Lit) and isinstance(value.expr, ast.Dict):
                for key, item in zip(value.expr.keys, value.expr.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        found.append((key.value, item, value.scope))
            elif isinstance(value, Made) and isinstance(value.of, Lib) and value.of.last == "dict":
                found += [(k.arg, k.value, value.scope) for k in value.call.keywords if k.arg]
    return found


def _is_zero(expr: ast.expr, scope: Scope, values: Values) -> bool:
    known = values.of(expr, scope)
    return (
        len(known) == 1 and isinstance(known[0], Const) and known[0].value in (0, 0.0) and known[0].value is not False
    )


def optimiser_is_idle(reached: Iterable[Scope], values: Values) -> bool:
    """Whether all optimisers of the followed code have learning rate 0."""
    rates: list[bool] = []
    for scope in reached:
        for bindings in scope.names.values():
            for bound in bindings[:4]:
                call = bound.expr
                if (
                    isinstance(call, ast.Call)
                    and getattr(call.func, "attr", getattr(call.func, "id", "")) in OPTIMISERS
                ):
                    rate = next((k.value for k in call.keywords if k.arg == "lr"), None)
                    rates.append(rate is not None and _is_zero(rate, scope, values))
    return bool(rates) and all(rates)
