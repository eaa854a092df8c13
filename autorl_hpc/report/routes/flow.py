"""Where a value comes from: all expressions that flow into one, through names, functions and arguments."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from itertools import islice

from autorl_hpc.report.routes.kinds import Cls, Func, Lib, Made
from autorl_hpc.report.routes.scopes import Bound, Scope, dotted
from autorl_hpc.report.routes.values import Values

MAX_NODES = 6_000
"""Of one flow; own training loops have some hundreds."""

GENERATORS = frozenset({"generate", "generate_batch", "chat", "beam_search", "complete", "completions", "sample"})
_TRIVIAL = frozenset({"len", "strip", "isinstance", "exists", "startswith", "hasattr", "any", "all", "bool", "lower"})
_JUDGED = re.compile(
    r"reward|correct|score|check|verif|match|pass|valid|accept|good|equal|grade|answer|gold|best|success|won|right",
    re.I,
)


@dataclass
class Flow:
    """Expressions that flow into a value, and the conditions on their way."""

    nodes: list[tuple[ast.AST, Scope]] = field(default_factory=list)
    tests: list[tuple[ast.expr, Scope]] = field(default_factory=list)


def flow(start: ast.expr, scope: Scope, values: Values) -> Flow:
    """Everything that flows into `start`, nearest first."""
    found = Flow()
    waiting: list[tuple[ast.expr, Scope]] = [(start, scope)]
    seen: set[tuple[int, int]] = set()
    at = 0
    while at < len(waiting) and len(found.nodes) < MAX_NODES:
        expr, where = waiting[at]
        at += 1
        if (id(expr), id(where)) in seen:
            continue
        seen.add((id(expr), id(where)))
        for node in ast.walk(expr):
            found.nodes.append((node, where))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                _through_name(node.id, where, waiting, found)
            elif isinstance(node, ast.Attribute):
                _through_attribute(node, where, waiting, found)
            elif isinstance(node, ast.Call):
                _through_call(node, where, waiting, values)
            elif isinstance(node, ast.comprehension):
                found.tests += [(test, where) for test in node.ifs]
    return found


def _through_name(name: str, scope: Scope, waiting: list[tuple[ast.expr, Scope]], found: Flow) -> None:
    at: Scope | None = scope
    while at is not None:
        if name in at.params or name in at.names:
            waiting += at.bound.get(name, [])
            default = at.params.get(name)
            if default is not None and at.parent is not None:
                waiting.append((default, at.parent))
            _bindings(at.names.get(name, []), at, waiting, found)
            return
        at = at.parent


def _bindings(bindings: list[Bound], scope: Scope, waiting: list[tuple[ast.expr, Scope]], found: Flow) -> None:
    for bound in bindings[:40]:
        waiting.append((bound.expr, scope))
        found.tests += [(test, scope) for test in bound.tests]


def _through_attribute(node: ast.Attribute, scope: Scope, waiting: list[tuple[ast.expr, Scope]], found: Flow) -> None:
    name = dotted(node)
    if not name:
        return
    if name.startswith("self.") and scope.owner is not None:
        _bindings(scope.owner.names.get(name, []), scope, waiting, found)
    else:
        _bindings(scope.names.get(name, []), scope, waiting, found)


def _through_call(node: ast.Call, scope: Scope, waiting: list[tuple[ast.expr, Scope]], values: Values) -> None:
    for argument in node.args[:6]:  # a function that is handed over: pool.map(f, rows)
        if isinstance(argument, ast.Name):
            for target in values.of(argument, scope):
                if isinstance(target, Func):
                    inner = values.scopes.function(target.node, target.parent)
                    waiting += [(each, inner) for each in inner.returns[:20]]
    for target in values.of(node.func, scope):
        if isinstance(target, Func):
            inner = values.scopes.function(target.node, target.parent)
            bind(node, inner, scope, target.me is not None or inner.owner is not None)
            waiting += [(each, inner) for each in inner.returns[:20]]
        elif isinstance(target, Cls):
            made = values.of_class(target, "forward", None, 0) or values.of_class(target, "__call__", None, 0)
            for method in made:
                if isinstance(method, Func):
                    inner = values.scopes.function(method.node, method.parent)
                    waiting += [(each, inner) for each in inner.returns[:20]]


def bind(call: ast.Call, inner: Scope, scope: Scope, is_method: bool) -> None:
    """Tells a function's parameters the arguments of one call; at most six calls are remembered."""
    names = list(inner.params)
    if is_method and names and names[0] in ("self", "cls"):
        names = names[1:]
    pairs = [*zip(names, call.args, strict=False), *((k.arg, k.value) for k in call.keywords if k.arg in inner.params)]
    for name, expr in pairs:
        if name is None or isinstance(expr, ast.Starred):
            continue
        known = inner.bound.setdefault(name, [])
        if len(known) < 6 and not any(expr is each for each, _ in known):
            known.append((expr, scope))


def called(node: ast.Call, scope: Scope, values: Values) -> str:
    """The last name of what is called, behind aliases."""
    for target in values.of(node.func, scope):
        if isinstance(target, Lib):
            return target.last
        if isinstance(target, Made):
            return target.of.last if isinstance(target.of, Lib) else target.of.node.name
    func = node.func
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def generates(node: ast.AST, scope: Scope, values: Values) -> bool:
    """Whether a call samples text from a model."""
    if not isinstance(node, ast.Call):
        return False
    func = node.func
    if isinstance(func, ast.Attribute):
        if (
            func.attr == "create"
            and isinstance(func.value, ast.Attribute)
            and func.value.attr in ("completions", "messages")
        ):
            return True
        if func.attr in GENERATORS:
            targets = values.of(func, scope)
            return not any(isinstance(t, Func) for t in targets) and not _is_random(targets, func)
    if isinstance(func, ast.Name):
        return any(
            isinstance(t, Made) and isinstance(t.of, Lib) and t.of.last == "pipeline" for t in values.of(func, scope)
        )
    return False


def _is_random(targets: object, func: ast.Attribute) -> bool:
    """`random.sample`, `df.sample`, `Categorical.sample`: no model's text."""
    return func.attr == "sample"


def filters(made: Flow, values: Values) -> ast.AST | None:
    """The condition or choice by which samples are kept; None: all are."""
    for test, scope in made.tests[:30]:
        if judges(test) or about_samples(test, scope, values):
            return test
    for node, _ in made.nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Compare, ast.BinOp)) and judges(node.slice):
            return node  # rows[rows.reward > 0.5]
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("max", "sorted", "argmax", "nlargest", "topk") and judges(node):
                return node
            if name in ("filter", "query") and judges(node):
                return node
    return None


def about_samples(test: ast.expr, scope: Scope, values: Values) -> bool:
    """Whether a condition is about what a model answered, and more than about its length."""
    called_names = {called(n, scope, values) for n in islice(ast.walk(test), 100) if isinstance(n, ast.Call)}
    compared = any(isinstance(n, ast.Compare) for n in islice(ast.walk(test), 100))
    if called_names <= _TRIVIAL and (called_names or not compared):
        return False
    return any(generates(node, where, values) for node, where in islice(flow(test, scope, values).nodes, 1_500))


def judges(test: ast.AST) -> bool:
    """Whether an expression compares an answer, or asks for a reward: `len(x) > 0` does not."""
    for node in islice(ast.walk(test), 300):
        word = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            word = node.value[:40]
        if word and _JUDGED.search(word):
            return True
    return False
