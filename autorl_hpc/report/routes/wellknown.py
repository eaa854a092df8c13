"""Calls whose value is known without the library that they are of: options, environment, paths, imports by name."""

from __future__ import annotations

import ast
import posixpath
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autorl_hpc.report.routes.commands import matching
from autorl_hpc.report.routes.constants import keyword, of_environ
from autorl_hpc.report.routes.kinds import Args, Conf, Const, Lib, Mod, Value
from autorl_hpc.report.routes.scopes import Scope

if TYPE_CHECKING:
    from autorl_hpc.report.routes.values import Values


_TEXT: dict[str, Callable[[str], str]] = {
    "upper": str.upper,
    "lower": str.lower,
    "strip": str.strip,
    "capitalize": str.capitalize,
    "title": str.title,
    "dedent": textwrap.dedent,
}
"""Methods and functions of one text that give a text."""


def call(values: Values, call: ast.Call, scope: Scope, depth: int) -> Sequence[Value] | None:
    """Calls whose value is known without their library; None: none of these."""
    func = call.func
    attr = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    args = call.args
    if attr in ("parse_args", "parse_known_args", "parse_args_into_dataclasses", "parse_args_and_config"):
        return (Args(),)
    if attr == "getattr" and len(args) >= 2:
        return [
            v
            for name in values.of(args[1], scope, depth + 1)
            if isinstance(name, Const) and isinstance(name.value, str)
            for base in values.of(args[0], scope, depth + 1)
            for v in values.attribute(base, name.value, args[0], depth + 1)
        ]
    if attr in ("import_module", "__import__") and args:
        return [
            _module_named(values, v.value, scope) for v in values.of(args[0], scope, depth + 1) if isinstance(v, Const)
        ]
    if attr == "field":
        return values.of(keyword(call, "default"), scope, depth + 1)
    if attr in _TEXT and isinstance(func, ast.Attribute):
        known = [v.value for v in values.of(args[0] if args else func.value, scope, depth + 1) if isinstance(v, Const)]
        return [Const(_TEXT[attr](text)) for text in known if isinstance(text, str)]
    if attr == "partial" and args:
        return values.of(args[0], scope, depth + 1)
    if attr in ("str", "Path", "int", "float", "abspath", "expanduser", "fspath", "realpath") and len(args) == 1:
        return [v for v in values.of(args[0], scope, depth + 1) if isinstance(v, Const)]
    if attr == "join" and isinstance(func, ast.Attribute) and len(args) > 1:
        return _path(values, args, scope, depth)
    if (attr == "getenv" or (attr == "get" and of_environ(func))) and args:
        return _environment(values, args, scope, depth)
    if (
        attr in ("safe_load", "load", "full_load", "loads")
        and args
        and (path := _opened(values, args[0], scope, depth))
    ):
        return (Conf(path),)
    if attr == "get" and isinstance(func, ast.Attribute) and args:
        found = values.item_of(func.value, args[0], scope, depth)
        return found or (values.of(args[1], scope, depth + 1) if len(args) > 1 else ())
    if attr in ("vars", "asdict", "copy", "deepcopy", "Namespace", "to", "cuda", "eval") and len(args) == 1:
        return values.of(args[0], scope, depth + 1)
    return None


def _module_named(values: Values, name: object, scope: Scope) -> Value:
    local = values.module(str(name), 0, scope)
    return Mod(local, local.source.path) if local is not None else Lib(str(name))


def _path(values: Values, args: Sequence[ast.expr], scope: Scope, depth: int) -> Sequence[Value]:
    parts = [values.text(each, scope, depth + 1) for each in args[:8]]
    known = [p if p is not None else "?" for p in parts]
    return (Const("/".join(known)),) if any(p is not None for p in parts) else ()


def _environment(values: Values, args: Sequence[ast.expr], scope: Scope, depth: int) -> Sequence[Value]:
    name = values.text(args[0], scope, depth + 1)
    if name is not None and name in values.env:
        return (Const(values.env[name]),)
    return values.of(args[1], scope, depth + 1) if len(args) > 1 else ()


def _opened(values: Values, expr: ast.expr, scope: Scope, depth: int) -> str | None:
    """The configuration file that an expression opens or reads."""
    call = expr
    if isinstance(call, ast.Name):
        bindings = scope.names.get(call.id, [])
        call = bindings[-1].expr if bindings else call
    if isinstance(call, ast.Call):
        inner = call.args[0] if call.args else getattr(call.func, "value", None)
        if isinstance(inner, ast.Call):
            inner = inner.args[0] if inner.args else None
        path = values.text(inner, scope, depth + 1)
        if path is not None:
            return matching(path, values.sources, posixpath.dirname(scope.source.path))
    return None


def hydra(values: Values, scope: Scope) -> str | None:
    """The configuration file of a function that `@hydra.main(config_path=..., config_name=...)` runs."""
    for decorator in getattr(scope.node, "decorator_list", [])[:4]:
        name = keyword(decorator, "config_name") if isinstance(decorator, ast.Call) else None
        if name is None or not isinstance(decorator, ast.Call):
            continue
        where = scope.parent or scope
        stem, folder = values.text(name, where), keyword(decorator, "config_path")
        text = (values.text(folder, where) if folder is not None else None) or ""
        for ending in (".yaml", ".yml"):
            path = posixpath.join(text, (stem or "").removesuffix(ending) + ending)
            if found := matching(path, values.sources, posixpath.dirname(scope.source.path)):
                return found
    return None
