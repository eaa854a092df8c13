"""Loops of Python over words, classes or settings that are known: their bodies are followed once for each."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from autorl_hpc.report.routes.kinds import Lit
from autorl_hpc.report.routes.scopes import Bound, Scope
from autorl_hpc.report.routes.values import Values

MAX_TURNS = 4
"""Of one loop: stages of a training are few, and a loop over seeds shows its route in the first."""


def turns(node: ast.For | ast.AsyncFor, scope: Scope, values: Values) -> Iterator[None]:
    """One for each turn of a loop, in which its names are that turn's alone; a single one where the turns aren't known."""
    told = _told(node, scope, values)
    names = {name for turn in told for name in turn}
    own = {name: scope.names.get(name, []) for name in names}
    if len(told) < 2 or any(bound.how != "part" for bindings in own.values() for bound in bindings):
        yield
        return
    try:
        for turn in told:
            scope.names.update({name: [Bound(expr, "value")] for name, expr in turn.items()})
            yield
    finally:
        scope.names.update(own)


def _told(node: ast.For | ast.AsyncFor, scope: Scope, values: Values) -> list[dict[str, ast.expr]]:
    """What the names of a loop are in each turn; empty: it isn't known, or makes no difference to a route."""
    target, over = node.target, node.iter
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "enumerate" and over.args:
        over = over.args[0]
        target = target.elts[1] if isinstance(target, ast.Tuple) and len(target.elts) == 2 else ast.Tuple([])
    found = values.of(over, scope)
    if len(found) != 1 or not isinstance(found[0], Lit) or not _sees(scope, found[0].scope):
        return []
    elements = getattr(found[0].expr, "elts", [])
    if not 2 <= len(elements) <= MAX_TURNS or all(_is_number(each) for each in elements):
        return []
    return [turn for each in elements if (turn := _matched(target, each))]


def _sees(scope: Scope, other: Scope) -> bool:
    """Whether names mean the same in both: one stands in the other."""
    at: Scope | None = scope
    while at is not None and at is not other:
        at = at.parent
    return at is other


def _is_number(expr: ast.expr) -> bool:
    return isinstance(expr, ast.Constant) and isinstance(expr.value, (int, float))


def _matched(target: ast.expr, value: ast.expr) -> dict[str, ast.expr]:
    if isinstance(target, ast.Name):
        return {target.id: value}
    parts, given = getattr(target, "elts", []), getattr(value, "elts", [])
    if len(parts) != len(given):
        return {}
    return {part.id: each for part, each in zip(parts, given, strict=True) if isinstance(part, ast.Name)}
