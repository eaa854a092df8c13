"""Arithmetic and comparisons of constants, and words of command lines as constants."""

from __future__ import annotations

import ast
from collections.abc import Callable

from autorl_hpc.report.routes.kinds import Const, Value

ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
COMPARISONS: dict[type[ast.cmpop], Callable[..., object]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Is: lambda a, b: a is b or a == b,
    ast.IsNot: lambda a, b: not (a is b or a == b),
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}


def is_number(value: Value) -> bool:
    return isinstance(value, Const) and isinstance(value.value, (int, float)) and not isinstance(value.value, bool)


def is_known(word: str) -> bool:
    """Whether a word of a command line is what it says, and no variable or expression that nobody could fill."""
    return "$" not in word and word != "?"


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def of_environ(expr: ast.expr) -> bool:
    inner = getattr(expr, "value", None)
    return (isinstance(inner, ast.Attribute) and inner.attr == "environ") or (
        isinstance(inner, ast.Name) and inner.id == "environ"
    )


def literal(text: str) -> str | int | float | bool | None:
    """A word of a command line or configuration as the value that it is."""
    lower = text.strip().lower()
    if lower in ("true", "false"):
        return lower == "true"
    if lower in ("none", "null", "~"):
        return None
    for kind in (int, float):
        try:
            return kind(lower)
        except ValueError:
            continue
    return text
