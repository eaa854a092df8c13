"""Elements of literal lists, tuples and dictionaries, and of registries that decorators fill."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from autorl_hpc.report.routes.kinds import Cls, Func, Lit, Value
from autorl_hpc.report.routes.scopes import Scope

if TYPE_CHECKING:
    from autorl_hpc.report.routes.values import Values

MAX_VALUES = 6
"""Elements that an unknown key may mean."""


def of_literal(values: Values, value: Lit, names: Sequence[object], depth: int) -> list[Value]:
    if isinstance(value.expr, ast.Dict):
        pairs = [(k, v) for k, v in zip(value.expr.keys, value.expr.values, strict=True) if isinstance(k, ast.Constant)]
        chosen = [v for k, v in pairs if k.value in names] if names else [v for _, v in pairs][:MAX_VALUES]
    elif isinstance(value.expr, (ast.List, ast.Tuple)):
        ints = [n for n in names if isinstance(n, int) and -len(value.expr.elts) <= n < len(value.expr.elts)]
        chosen = [value.expr.elts[n] for n in ints]
    else:
        chosen = []
    if not chosen and isinstance(value.expr, ast.Dict) and not value.expr.keys:
        return registered(value.scope.module, names)
    return [each for expr in chosen for each in values.of(expr, value.scope, depth + 1)]


def registered(module: Scope, names: Sequence[object]) -> list[Value]:
    """Functions and classes of a file with a decorator that is given one of `names`: `@register("grpo")`."""
    found: list[Value] = []
    for function in islice(module.functions.values(), 200):
        if not isinstance(function, ast.Lambda) and _has_decorator(function.decorator_list, names):
            found.append(Func(function, module))
    for class_ in islice(module.classes.values(), 200):
        if _has_decorator(class_.decorator_list, names):
            found.append(Cls(class_, module))
    return found[:MAX_VALUES]


def _has_decorator(decorators: Sequence[ast.expr], names: Sequence[object]) -> bool:
    return any(
        isinstance(argument, ast.Constant) and argument.value in names
        for decorator in decorators[:6]
        if isinstance(decorator, ast.Call)
        for argument in decorator.args[:3]
    )
