"""Which function a command line names: commands of click and typer, fire's functions and classes, cases of a `match`."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from autorl_hpc.report.routes.kinds import Cls, Const, Func, Lit
from autorl_hpc.report.routes.scopes import Function, Scope
from autorl_hpc.report.routes.values import Values

FIRE = ("fire.Fire", "fire.core.Fire")

Named = list[tuple[str, Func]]


def name_of(node: Function) -> str:
    """The name of a decorated command: as its decorator says, else the function's."""
    for decorator in getattr(node, "decorator_list", [])[:6]:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute):
            given = [*decorator.args[:1], *(k.value for k in decorator.keywords if k.arg == "name")]
            if decorator.func.attr == "command" and given and isinstance(given[0], ast.Constant):
                return str(given[0].value)
    return getattr(node, "name", "")


def chosen(named: Named, positional: Sequence[str]) -> Named:
    """The function that the first fitting word names; all if none does."""
    for word in positional:
        found = [pair for pair in named if pair[0].replace("_", "-") == word.replace("_", "-")]
        if found:
            return found
    return named


def of_fire(call: ast.Call, scope: Scope, values: Values) -> Named:
    """Functions that `fire.Fire(...)` offers: one, those of a dictionary or a class, or all of the module."""
    if not call.args:
        return [(name, Func(node, scope.module)) for name, node in list(scope.module.functions.items())[:20]]
    found: Named = []
    for value in values.of(call.args[0], scope):
        if isinstance(value, Func):
            found.append((getattr(value.node, "name", ""), value))
        elif isinstance(value, Cls):
            inner = values.scopes.class_(value.node, value.parent)
            functions = [(name, node) for name, node in inner.functions.items() if not name.startswith("_")]
            found += [(name, Func(node, inner)) for name, node in functions[:20]]
        elif isinstance(value, Lit) and isinstance(value.expr, ast.Dict):
            for key, each in list(zip(value.expr.keys, value.expr.values, strict=True))[:20]:
                name = values.text(key, value.scope) or ""
                found += [(name, v) for v in values.of(each, value.scope) if isinstance(v, Func)]
    return found


def cases(node: ast.Match, scope: Scope, values: Values) -> list[tuple[int | None, ast.match_case]]:
    """The cases that may be taken, each with its number; the one that is surely taken, alone and without."""
    asked = values.of(node.subject, scope)
    every: list[tuple[int | None, ast.match_case]] = list(enumerate(node.cases))
    if len(asked) != 1 or not isinstance(asked[0], Const):
        return every
    for case in node.cases:
        known = _constants(case.pattern, scope, values)
        if known is None or case.guard is not None:
            return every
        if not known or asked[0].value in known:
            return [(None, case)]
    return []


def _constants(pattern: ast.pattern, scope: Scope, values: Values) -> list[object] | None:
    """The constants that a pattern takes; empty: anything; None: it can't be told."""
    if isinstance(pattern, ast.MatchAs):
        return [] if pattern.pattern is None else None
    parts = pattern.patterns if isinstance(pattern, ast.MatchOr) else [pattern]
    found: list[object] = []
    for part in parts:
        known = values.of(part.value, scope) if isinstance(part, ast.MatchValue) else ()
        if len(known) != 1 or not isinstance(known[0], Const):
            return None
        found.append(known[0].value)
    return found
