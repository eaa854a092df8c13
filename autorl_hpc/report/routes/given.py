"""Settings that one call gives to a trainer, an optimiser or a sampler, resolved where it is made."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from autorl_hpc.report.routes import trainers
from autorl_hpc.report.routes.kinds import Cls, Conf, Const, Func, Lib, Lit, Value
from autorl_hpc.report.routes.names import KEY_SETTINGS, SETTING_CLASSES, TRAINER_CLASSES
from autorl_hpc.report.routes.scopes import Scope
from autorl_hpc.report.routes.values import Values
from autorl_hpc.report.routes.words import written

_SAMPLERS = frozenset({"generate", "DataLoader", "get_cosine_schedule_with_warmup", "get_linear_schedule_with_warmup"})

Given = tuple[str, str, str, int]
"""Name, value, path, line."""


def of_call(node: ast.Call, targets: Sequence[Value], attr: str, scope: Scope, values: Values) -> Iterator[Given]:
    """Key settings that a call is given by keyword; an optimiser's learning rate by position, too."""
    is_optimiser = attr in trainers.OPTIMISERS
    if not (is_optimiser or attr in _SAMPLERS or any(_takes_settings(t, values) for t in targets)):
        return
    for name, expr, where in trainers.given(node, scope, values):
        if name in KEY_SETTINGS:
            yield name, shown(expr, where, values), where.source.path, expr.lineno
    for unnamed in (k.value for k in node.keywords if k.arg is None):
        for value in values.of(unnamed, scope):
            if isinstance(value, Conf):
                for item in values.configuration(value):
                    yield item.name, item.value, value.path, item.line
    if is_optimiser and len(node.args) > 1:
        yield "lr", shown(node.args[1], scope, values), scope.source.path, node.args[1].lineno


def _takes_settings(target: Value, values: Values) -> bool:
    if isinstance(target, Lib):
        return target.last in SETTING_CLASSES or target.last in TRAINER_CLASSES
    if isinstance(target, Cls):
        return any(
            base.last in SETTING_CLASSES or base.last in TRAINER_CLASSES for base in values.library_bases(target)
        )
    return False


def of_assignment(node: ast.stmt, scope: Scope, values: Values) -> Iterator[Given]:
    """Constants of own loops by the usual names: `EPOCHS = 3`."""
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        exprs = node.value.elts if isinstance(node.value, ast.Tuple) and len(names) > 1 else [node.value]
        for name, expr in zip(names, exprs, strict=False):
            if isinstance(name, ast.Name) and name.id.lower() in KEY_SETTINGS and isinstance(expr, ast.Constant):
                yield name.id, shown(expr, scope, values), scope.source.path, node.lineno


def shown(expr: ast.expr, scope: Scope, values: Values, depth: int = 0) -> str:
    """A value in words: constants resolved, functions by name, the rest as it is written."""
    found = values.of(expr, scope)
    if len(found) == 1:
        value = found[0]
        if isinstance(value, Const):
            return str(value.value)
        if isinstance(value, Func) and isinstance(value.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return value.node.name
        if isinstance(value, Lit) and isinstance(value.expr, (ast.List, ast.Tuple)) and depth < 2:
            inner = [shown(e, value.scope, values, depth + 1) for e in value.expr.elts[:8]]
            return f"[{', '.join(inner)}{', …' if len(value.expr.elts) > 8 else ''}]"
    if isinstance(expr, ast.IfExp) and depth < 2:
        sides = [values.of(side, scope) for side in (expr.body, expr.orelse)]
        if all(len(side) == 1 and isinstance(side[0], Const) for side in sides):
            (one,), (other,) = sides
            return f"{one.value} ({written(expr.test, scope.source)}) or {other.value}"  # type: ignore[union-attr]
    return written(expr, scope.source)
