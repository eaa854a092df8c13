"""Options that scripts declare, with their defaults: `add_argument` calls, and fields of dataclasses."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from autorl_hpc.report.routes.constants import keyword
from autorl_hpc.report.routes.reading import Source
from autorl_hpc.report.routes.scopes import Scope

Declared = dict[str, tuple[ast.expr, Scope]]


def declarations(modules: Iterable[Scope]) -> Declared:
    """Defaults by the option's name, of these modules; a later `add_argument` wins, a field never does."""
    found: Declared = {}
    for scope in modules:
        for node in _declaring(scope.source):
            if isinstance(node, ast.Call):
                _declare(node, scope, found)
                continue
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value:
                    found.setdefault(field.target.id, (field.value, scope))
    return found


def _declaring(source: Source) -> list[ast.Call | ast.ClassDef]:
    if source.declared is None:
        source.declared = []
        if source.tree is not None and ("add_argument" in source.text or "dataclass" in source.text):
            for node in ast.walk(source.tree):
                if isinstance(node, ast.ClassDef) or (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr == "add_argument"
                ):
                    source.declared.append(node)
    return source.declared


def _declare(call: ast.Call, scope: Scope, found: Declared) -> None:
    flags = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    name = next((f for f in flags if f.startswith("--")), flags[0] if flags else "").lstrip("-").replace("-", "_")
    destination, default, action = keyword(call, "dest"), keyword(call, "default"), keyword(call, "action")
    if isinstance(destination, ast.Constant):
        name = str(destination.value)
    if default is None and isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
        default = ast.Constant(value=action.value == "store_false")
    if name and default is not None:
        found[name] = (default, scope)
