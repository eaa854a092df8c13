"""Whether a condition holds, as far as constants and options tell."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autorl_hpc.report.routes.constants import COMPARISONS
from autorl_hpc.report.routes.kinds import Const, Lit
from autorl_hpc.report.routes.scopes import Bound, Scope

if TYPE_CHECKING:
    from autorl_hpc.report.routes.values import Values

MAX_DEPTH = 14
"""Of conditions inside conditions."""


def truth(values: Values, test: ast.expr, scope: Scope, depth: int = 0) -> bool | None:
    """Whether a condition holds; None: it can't be told."""
    if depth > MAX_DEPTH:
        return None
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        known = truth(values, test.operand, scope, depth + 1)
        return None if known is None else not known
    if isinstance(test, ast.BoolOp):
        known_ = [truth(values, each, scope, depth + 1) for each in test.values[:12]]
        decisive = isinstance(test.op, ast.Or)
        if decisive in known_:
            return decisive
        return None if None in known_ else not decisive
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compared(values, test.left, test.ops[0], test.comparators[0], scope, depth)
    if isinstance(test, ast.Name) and test.id in ("TYPE_CHECKING",):
        return False
    found = values.of(test, scope, depth + 1)
    if found and all(isinstance(v, Const) for v in found):
        truths = {bool(v.value) for v in found if isinstance(v, Const)}
        return truths.pop() if len(truths) == 1 else None
    return None


def possible(values: Values, bindings: Sequence[Bound], scope: Scope, depth: int) -> Sequence[Bound]:
    """The bindings of a name that no condition rules out; all if none is left."""
    if len(bindings) < 2:
        return bindings
    asked = bindings[-2 * MAX_DEPTH :]
    kept = [b for b in asked if not any(truth(values, test, scope, depth + 1) is False for test in b.tests)]
    return kept or bindings


def _compared(values: Values, left: ast.expr, op: ast.cmpop, right: ast.expr, scope: Scope, depth: int) -> bool | None:
    if isinstance(left, ast.Name) and left.id == "__name__":
        return scope.module.is_main if isinstance(op, ast.Eq) else not scope.module.is_main
    a = values.of(left, scope, depth + 1)
    if len(a) != 1 or not isinstance(a[0], Const):
        return None
    if isinstance(op, (ast.In, ast.NotIn)):
        for value in values.of(right, scope, depth + 1):
            if isinstance(value, Lit) and isinstance(value.expr, (ast.List, ast.Tuple, ast.Set)):
                inside = [
                    v.value
                    for e in value.expr.elts[:50]
                    for v in values.of(e, value.scope, depth + 1)
                    if isinstance(v, Const)
                ]
                return (a[0].value in inside) == isinstance(op, ast.In)
            if isinstance(value, Const) and isinstance(value.value, str) and isinstance(a[0].value, str):
                return (a[0].value in value.value) == isinstance(op, ast.In)
        return None
    b = values.of(right, scope, depth + 1)
    if len(b) != 1 or not isinstance(b[0], Const):
        return None
    compare = COMPARISONS.get(type(op))
    try:
        return bool(compare(a[0].value, b[0].value)) if compare is not None else None
    except TypeError:
        return None
