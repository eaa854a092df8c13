"""Names of one Python file: what each is bound to, under which conditions, function by function.

Built from a syntax tree and kept for one analysis: parameters learn their arguments while the code is followed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from autorl_hpc.report.routes.reading import Source

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Bindings = Literal["value", "part", "more"]
"""value: the name is the expression; part: it is taken out of it; more: the expression is added to it."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ADDERS = frozenset({"append", "extend", "add", "update", "insert", "write", "writelines", "put"})


@dataclass(frozen=True)
class Bound:
    """One binding of a name."""

    expr: ast.expr
    how: Bindings
    tests: tuple[ast.expr, ...] = ()
    """Conditions under which it happens, from outside in."""
    index: int | None = None
    """Of a part: which element of the expression; None: any."""


@dataclass
class Scope:
    """A module, class or function body."""

    source: Source
    node: ast.AST
    parent: Scope | None
    is_main: bool = False
    names: dict[str, list[Bound]] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None, int]] = field(default_factory=dict)
    """Alias: module, name in it (None: the module itself), level of a relative import."""
    stars: list[tuple[str, int]] = field(default_factory=list)
    params: dict[str, ast.expr | None] = field(default_factory=dict)
    """Parameters with their defaults."""
    bound: dict[str, list[tuple[ast.expr, Scope]]] = field(default_factory=dict)
    """Parameters with the arguments met so far."""
    returns: list[ast.expr] = field(default_factory=list)
    owner: Scope | None = None
    """Of a method: its class."""

    @property
    def module(self) -> Scope:
        """The scope of the file."""
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope


class Scopes:
    """All scopes of one analysis, each built once, when it is first asked for."""

    def __init__(self) -> None:
        self._made: dict[int, Scope] = {}
        self.modules: list[Scope] = []
        """Files that the code has come to so far."""

    def module(self, source: Source, is_main: bool = False) -> Scope:
        """The scope of a file, which has a tree."""
        assert source.tree is not None
        made = self._made.get(id(source.tree))
        if made is None:
            made = self._built(Scope(source, source.tree, None), source.tree.body)
            self._made[id(source.tree)] = made
            self.modules.append(made)
        made.is_main = made.is_main or is_main
        return made

    def function(self, node: Function, parent: Scope) -> Scope:
        """The scope of a function that stands in `parent`."""
        made = self._made.get(id(node))
        if made is None:
            made = Scope(parent.source, node, parent, owner=parent if isinstance(parent.node, ast.ClassDef) else None)
            arguments = node.args
            plain = [*arguments.posonlyargs, *arguments.args]
            defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
            for argument, default in zip(plain, [*defaults, *arguments.defaults], strict=True):
                made.params[argument.arg] = default
            for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
                made.params[argument.arg] = default
            if isinstance(node, ast.Lambda):
                made.returns.append(node.body)
            else:
                self._built(made, node.body)
            self._made[id(node)] = made
        return made

    def class_(self, node: ast.ClassDef, parent: Scope) -> Scope:
        """The scope of a class; its methods' `self.x = ...` are names `self.x` of it."""
        made = self._made.get(id(node))
        if made is None:
            made = self._built(Scope(parent.source, node, parent), node.body)
            self._made[id(node)] = made
            for method in made.functions.values():
                for name, bindings in self.function(method, made).names.items():
                    if name.startswith("self."):
                        made.names.setdefault(name, []).extend(bindings)
        return made

    def _built(self, scope: Scope, body: list[ast.stmt]) -> Scope:
        for statement, tests in statements(body):
            _bind(scope, statement, tests)
        return scope


def statements(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, tuple[ast.expr, ...]]]:
    """Statements of a body, blocks opened but for functions and classes, with the conditions on them.

    `if not x: continue` is a condition on what follows it. A condition that must not hold stands as `not x`.
    """
    waiting: list[tuple[list[ast.stmt], int, tuple[ast.expr, ...]]] = [(body, 0, ())]
    while waiting:
        block, at, tests = waiting.pop()
        if at >= len(block):
            continue
        statement = block[at]
        guard = isinstance(statement, ast.If) and _leaves(statement.body)
        after = (*tests, _not(statement.test))[-20:] if guard and isinstance(statement, ast.If) else tests
        waiting.append((block, at + 1, after))
        yield statement, tests
        if isinstance(statement, ast.If):
            waiting.append((statement.orelse, 0, (*tests, _not(statement.test))[-20:]))
            waiting.append((statement.body, 0, (*tests, statement.test)[-20:]))
        elif isinstance(statement, (ast.For, ast.AsyncFor, ast.While)):
            waiting += [(statement.orelse, 0, tests), (statement.body, 0, tests)]
        elif isinstance(statement, (ast.With, ast.AsyncWith)):
            waiting.append((statement.body, 0, tests))
        elif isinstance(statement, ast.Try):
            waiting += [(statement.finalbody, 0, tests), (statement.orelse, 0, tests)]
            waiting += [(handler.body, 0, tests) for handler in statement.handlers]
            waiting.append((statement.body, 0, tests))
        elif isinstance(statement, ast.Match):
            waiting += [(case.body, 0, (*tests, *own)[-20:]) for case, own in reversed(_cases(statement))]


def _not(test: ast.expr) -> ast.expr:
    return ast.copy_location(ast.UnaryOp(ast.Not(), test), test)


def _cases(statement: ast.Match) -> list[tuple[ast.match_case, tuple[ast.expr, ...]]]:
    """The cases, each with its conditions: of plain values that it is this one, and none before it."""
    found: list[tuple[ast.match_case, tuple[ast.expr, ...]]] = []
    before: tuple[ast.expr, ...] = ()
    for case in statement.cases:
        own: tuple[ast.expr, ...] = ()
        if isinstance(case.pattern, ast.MatchValue):
            same = ast.Compare(statement.subject, [ast.Eq()], [case.pattern.value])
            own = (ast.copy_location(same, statement.subject),)
        found.append((case, (*before, *own)))
        if own and case.guard is None:
            before = (*before, _not(own[0]))
    return found


def _leaves(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], (ast.Continue, ast.Return, ast.Break))


def _bind(scope: Scope, statement: ast.stmt, tests: tuple[ast.expr, ...]) -> None:
    if isinstance(statement, _FUNCTIONS):
        scope.functions[statement.name] = statement
    elif isinstance(statement, ast.ClassDef):
        scope.classes[statement.name] = statement
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            if alias.asname:
                scope.imports[alias.asname] = (alias.name, None, 0)
            else:
                top = alias.name.split(".", 1)[0]
                scope.imports[top] = (top, None, 0)
    elif isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            if alias.name == "*":
                scope.stars.append((statement.module or "", statement.level))
            else:
                scope.imports[alias.asname or alias.name] = (statement.module or "", alias.name, statement.level)
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            _target(scope, target, statement.value, "value", tests)
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        _target(scope, statement.target, statement.value, "value", tests)
    elif isinstance(statement, ast.AugAssign):
        _target(scope, statement.target, statement.value, "more", tests)
    elif isinstance(statement, (ast.For, ast.AsyncFor)):
        _target(scope, statement.target, statement.iter, "part", tests)
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        for item in statement.items:
            if item.optional_vars is not None:
                _target(scope, item.optional_vars, item.context_expr, "value", tests)
    elif isinstance(statement, ast.Return) and statement.value is not None:
        scope.returns.append(statement.value)
    elif isinstance(statement, ast.Expr):
        _added(scope, statement.value, tests)


def _target(
    scope: Scope,
    target: ast.expr,
    value: ast.expr,
    how: Bindings,
    tests: tuple[ast.expr, ...],
    index: int | None = None,
) -> None:
    if isinstance(target, (ast.Tuple, ast.List)):
        if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts) and how == "value":
            for one, own in zip(target.elts, value.elts, strict=True):
                _target(scope, one, own, how, tests)
            return
        for number, one in enumerate(target.elts):
            inner = one.value if isinstance(one, ast.Starred) else one
            _target(scope, inner, value, "part", tests, number if how == "value" else None)
        return
    if isinstance(target, ast.Subscript):
        target, how = target.value, "more"
    name = dotted(target)
    if name:
        scope.names.setdefault(name, []).append(Bound(value, how, tests, index))


def _added(scope: Scope, value: ast.expr, tests: tuple[ast.expr, ...]) -> None:
    if isinstance(value, ast.Yield) and value.value is not None:
        scope.returns.append(value.value)
    if (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in _ADDERS
        and value.args
    ):
        name = dotted(value.func.value)
        if name:
            scope.names.setdefault(name, []).append(Bound(value.args[-1], "more", tests))


def dotted(expr: ast.expr) -> str:
    """`a` or `a.b`; empty for anything else."""
    if isinstance(expr, ast.Name):
        return expr.id
    if isinstance(expr, ast.Attribute) and isinstance(expr.value, ast.Name):
        return f"{expr.value.id}.{expr.attr}"
    return ""
