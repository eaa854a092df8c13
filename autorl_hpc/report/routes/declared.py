"""Options that scripts declare, with their defaults: `add_argument` calls, and fields of dataclasses."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autorl_hpc.report.routes.constants import keyword
from autorl_hpc.report.routes.reading import Source
from autorl_hpc.report.routes.scopes import Scope


@dataclass(frozen=True)
class Declared:
    """One option.

    Attributes:
        default: None: it has none.
        flags: words of a command line, dashes inside as underscores, that alone give the option a value.
        position: of an argument without a name, its place among these.
    """

    default: ast.expr | None
    scope: Scope
    flags: tuple[tuple[str, str], ...] = ()
    position: int | None = None
    choices: tuple[tuple[str, ast.expr], ...] = ()
    """What subparsers make of it (`set_defaults`), by their names."""

    def told(self, options: Mapping[str, str], positional: Sequence[str]) -> str | None:
        """Its word by a command line that doesn't give it by its name; None: it isn't there."""
        for flag, value in self.flags:
            if flag in options:
                return value
        if self.position is not None and self.position < len(positional):
            return positional[self.position]
        return None


def declarations(modules: Iterable[Scope]) -> dict[str, Declared]:
    """Options by their names, of these modules; a later `add_argument` wins, a field never does."""
    found: dict[str, Declared] = {}
    for scope in modules:
        _choices(scope, found)
        for node in _declaring(scope.source):
            if isinstance(node, ast.Call):
                _declare(node, scope, found)
                continue
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value:
                    name = field.target.id
                    found.setdefault(name, Declared(field.value, scope, ((f"no_{name}", "false"),)))
    return found


def _declaring(source: Source) -> list[ast.Call | ast.ClassDef]:
    if source.declared is None:
        source.declared = []
        if source.tree is not None and any(
            word in source.text for word in ("add_argument", "add_subparsers", "dataclass")
        ):
            for node in ast.walk(source.tree):
                if isinstance(node, ast.ClassDef) or (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in ("add_argument", "add_subparsers")
                ):
                    source.declared.append(node)
    return source.declared


def _declare(call: ast.Call, scope: Scope, found: dict[str, Declared]) -> None:
    flags = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    own = next((f for f in flags if f.startswith("--")), flags[0] if flags else "")
    name = _constant(keyword(call, "dest")) or own.lstrip("-").replace("-", "_")
    if not name:
        return
    position = None
    if not any(flag.startswith("-") for flag in flags):  # an argument, or the name of a subparser
        position = sum(one.position is not None and one.scope is scope for key, one in found.items() if key != name)
    default, alone = keyword(call, "default"), _alone(call, [f.lstrip("-").replace("-", "_") for f in flags])
    if default is None and alone and len({value for _, value in alone}) == 1:
        default = ast.Constant(value=alone[0][1] == "false")
    if default is not None or alone or position is not None:
        found[name] = Declared(default, scope, alone, position)


def _choices(scope: Scope, found: dict[str, Declared]) -> None:
    """`x = sub.add_parser("name"); x.set_defaults(func=f)`, in the order of the lines: a name may stand for one parser after another."""
    if "set_defaults" not in scope.source.text or scope.source.tree is None:
        return
    parsers: dict[str, str] = {}
    nodes = [n for n in ast.walk(scope.source.tree) if isinstance(n, (ast.Assign, ast.Call))]
    for node in sorted(nodes, key=lambda n: (n.lineno, n.col_offset)):
        if isinstance(node, ast.Assign):
            if isinstance(node.targets[0], ast.Name) and (name := _parser(node.value, parsers)):
                parsers[node.targets[0].id] = name
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "set_defaults":
            name = _parser(node.func.value, parsers)
            for given in node.keywords if name else ():
                if given.arg:
                    before = found.get(given.arg, Declared(None, scope))
                    found[given.arg] = replace(before, choices=(*before.choices, (name, given.value)))


def _parser(expr: ast.expr, parsers: dict[str, str]) -> str:
    if isinstance(expr, ast.Name):
        return parsers.get(expr.id, "")
    if (
        isinstance(expr, ast.Call)
        and isinstance(expr.func, ast.Attribute)
        and expr.func.attr == "add_parser"
        and expr.args
    ):
        return _constant(expr.args[0])
    return ""


def _alone(call: ast.Call, names: list[str]) -> tuple[tuple[str, str], ...]:
    """The option's words that need no value, with what they make of it."""
    action = keyword(call, "action")
    word = _constant(action) or (action.attr if isinstance(action, ast.Attribute) else getattr(action, "id", ""))
    if word in ("store_true", "store_false"):
        return tuple((name, "true" if word == "store_true" else "false") for name in names)
    if word == "BooleanOptionalAction":
        return (*((name, "true") for name in names), *((f"no_{name}", "false") for name in names))
    return ()


def _constant(expr: ast.expr | None) -> str:
    return expr.value if isinstance(expr, ast.Constant) and isinstance(expr.value, str) else ""
