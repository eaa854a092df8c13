"""Look at Python files: which statements of a script may run, and what flows into an expression. Nothing is evaluated."""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from autorl_hpc.report.routes.commands import options

MAX_FILE_CHARS = 400_000
"""A longer file is not a program of the agent's."""

MAX_FLOW = 5_000
"""Bound on the parts of an expression's origins; a formula has fewer."""

_GUARD = re.compile(r"exists|is_?file|is_?dir|main_process|rank")
"""Conditions for resuming after an interruption or for one process of several: what they guard counts as run."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Look:
    """One parsed file; `tree` is None if it was not read.

    Attributes:
        imports: full names by the names in this file; a star import by its module.
        functions: by name; what a class runs when it is called, by the class's name.
        constants: module-level names that are bound exactly once in the file.
    """

    path: str
    text: str
    tree: ast.Module | None = None
    imports: dict[str, str] = field(default_factory=dict)
    functions: list[tuple[str, Function]] = field(default_factory=list)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)

    def literal(self, expr: ast.AST | None) -> Any:
        """Return the value of a constant, given literally or by name; None if it is not constant."""
        expr = self.constants.get(expr.id) if isinstance(expr, ast.Name) else expr
        return expr.value if isinstance(expr, ast.Constant) else None

    def name_of(self, expr: ast.AST) -> str:
        """Return the full name of `a.b.c` according to the file's imports; empty if it is not a plain name."""
        names: list[str] = []
        while isinstance(expr, ast.Attribute) and len(names) < 9:
            names, expr = [expr.attr, *names], expr.value
        return ".".join([self.imports.get(expr.id, expr.id), *names]) if isinstance(expr, ast.Name) else ""


@lru_cache(maxsize=64)
def look_at(path: str, text: str) -> Look:
    """Parse one file. Cached, because most files are the same in all revisions of a run."""
    found = Look(path, text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.tree = ast.parse(text) if len(text) <= MAX_FILE_CHARS else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    if found.tree is None:
        return found
    bound: Counter[str] = Counter()
    for node in ast.walk(found.tree):
        if isinstance(node, ast.Import):
            found.imports |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = {a.asname or a.name.replace("*", module): f"{module}.{a.name}".lstrip(".") for a in node.names}
            found.imports |= names
        elif isinstance(node, Function):
            found.functions.append((node.name, node))
        elif isinstance(node, ast.ClassDef):
            found.classes[node.name] = node
            inner = [n for n in node.body if isinstance(n, Function)]
            found.functions += [(node.name, n) for n in inner if n.name in ("__init__", "__call__", "forward")]
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound[node.id] += 1
    pairs = (pair for statement in found.tree.body for pair in _bindings(statement))
    found.constants |= {name: value for name, value in pairs if bound[name] == 1}
    return found


class CodePlace(NamedTuple):
    """A statement or expression that may run; `sure`: no open condition is around it."""

    node: Any
    look: Look
    sure: bool = True

    def part(self, node: ast.AST) -> CodePlace:
        """Return a part of this place."""
        return self._replace(node=node)


class Script:
    """The live statements of a script and everything that it imports.

    Attributes:
        given: options of the command line.
        named: names and attributes that are used, called or not.
        tests: conditions, also those of comprehensions.
        options: defaults of `add_argument`.
    """

    def __init__(self, path: str, looks: Mapping[str, Look], args: Sequence[str] = (), sure: bool = True) -> None:
        self.path, self.looks, self.sure, self.given = path, looks, sure, options(args)
        self.reached: dict[str, Look] = {}
        self.statements: list[CodePlace] = []
        self.calls: list[CodePlace] = []
        self.named: list[CodePlace] = []
        self.tests: list[ast.expr] = []
        self.options: dict[str, CodePlace] = {}
        self._values: dict[tuple[str, str], list[CodePlace]] = defaultdict(list)  # by file and name
        self._defined: dict[str, list[tuple[Look, Function]]] = defaultdict(list)
        self._wanted: dict[str, bool] = {}  # names that live code uses, and whether one is surely called
        self._entered: set[int] = set()
        self._enter(looks[path])
        while found := self._next():
            is_sure, look, function = found
            self._entered.add(id(function))
            self._live(look, function, is_sure)

    def called(self, *names: str) -> list[CodePlace]:
        """Return the calls of functions and methods of these names."""
        return [call for call in self.calls if last_name(call.node.func) in names]

    def _enter(self, look: Look) -> None:
        if look.path not in self.reached and look.tree is not None:
            self.reached[look.path] = look
            for name, function in look.functions:
                self._defined[name].append((look, function))
            self._live(look, look.tree, self.sure)

    def _next(self) -> tuple[bool, Look, Function] | None:
        for name, is_sure in sorted(self._wanted.items(), key=lambda item: not item[1]):
            for look, function in self._defined.get(name, ()):
                if id(function) not in self._entered:
                    return is_sure, look, function
        return None

    def _live(self, look: Look, owner: Any, sure: bool) -> None:
        waiting: list[tuple[list[ast.stmt], bool]] = [(owner.body, sure)]
        while waiting:
            body, sure = waiting.pop()
            inner: list[tuple[list[ast.stmt], bool]] = []
            for node in body:
                if isinstance(node, Function):
                    continue
                self._statement(CodePlace(node, look, sure))
                ends = isinstance(node, ast.Return | ast.Raise | ast.Break | ast.Continue) or _leaves(node)
                if isinstance(node, ast.If | ast.While):
                    self.tests.append(node.test)
                    known = self._decided(node.test, look)
                    guards = known is not None or isinstance(node, ast.While) or bool(_GUARD.search(said(node.test)))
                    arms = ((node.body, False), (node.orelse, True))
                    inner += [(arm, sure and guards) for arm, dead in arms if known is not dead]
                    if isinstance(node, ast.If) and known is not False and isinstance(node.body[-1], ast.Return):
                        ends, sure = known is True, sure and guards
                else:
                    inner += [(getattr(node, name, []), sure) for name in ("body", "orelse", "finalbody")]
                    inner += [(a.body, False) for name in ("handlers", "cases") for a in getattr(node, name, ())]
                if ends:
                    break
            waiting += inner[::-1]

    def _decided(self, test: ast.expr, look: Look) -> bool | None:
        if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__":
            return look.path == self.path
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._decided(test.operand, look)
            return None if inner is None else not inner
        known = look.literal(test)
        return bool(known) if isinstance(known, int) else None

    def _statement(self, each: CodePlace) -> None:
        look = each.look
        self.statements.append(each)
        if isinstance(each.node, ast.Import | ast.ImportFrom):
            module = getattr(each.node, "module", None)
            names = [alias.name if module is None else f"{module}.{alias.name}" for alias in each.node.names]
            ends = [
                f"/{name.replace('.', '/')}{end}"
                for name in (module or "", *names)
                if name
                for end in (".py", "/__init__.py")
            ]
            for read in [read for end in ends for path, read in self.looks.items() if f"/{path}".endswith(end)]:
                self._enter(read)
        for name, value in _bindings(each.node):
            self._values[look.path, name].append(each.part(value))
        callees: set[int] = set()
        for part in _own_parts(each.node):
            if isinstance(part, ast.Call):
                callees.add(id(part.func))
                self.calls.append(each.part(part))
                given = {k.arg: k.value for k in part.keywords}
                if last_name(part.func) == "add_argument" and "default" in given:
                    texts = [a.value for a in part.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                    option = look.literal(given.get("dest")) or "".join(texts[-1:]).lstrip("-").replace("-", "_")
                    self.options[str(option)] = each.part(given["default"])
            elif isinstance(part, ast.comprehension):
                self.tests += part.ifs
            elif isinstance(part, ast.Name | ast.Attribute):
                self.named.append(each.part(part))
                name = last_name(part)
                self._wanted[name] = (each.sure and id(part) in callees) or self._wanted.get(name, False)

    def flow(self, start: Sequence[CodePlace]) -> list[CodePlace]:
        """Return everything that flows into these expressions by names, functions and options."""
        waiting, done = list(start), set[int]()
        nodes: list[CodePlace] = []
        while waiting and len(nodes) < MAX_FLOW:
            place = waiting.pop()
            if id(place.node) not in done:
                done.add(id(place.node))
                for part in ast.walk(place.node):
                    nodes.append(place.part(part))
                    waiting += self._origins(place.look, part)
        return nodes

    def _origins(self, look: Look, part: ast.AST) -> list[CodePlace]:
        """Return what a name or attribute of a file may stand for: values, functions, or the default of an option."""
        name = last_name(part)
        if isinstance(part, ast.Attribute) and name in self.options:
            return [self.options[name]]
        functions = [CodePlace(node, other) for other, node in self._defined.get(name, ())[:4]]
        return [*self._values.get((look.path, name), ())[:20], *functions] if name else []


def _leaves(node: ast.stmt) -> bool:
    name = last_name(node.value.func) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else ""
    return name in ("exit", "_exit") or name.startswith(("execv", "execl"))


def _bindings(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield names and the expressions that flow into them: `x = y`, `for x in y`, `x.append(y)`."""
    pairs: list[tuple[ast.expr | None, ast.expr | None]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.For | ast.AsyncFor):
        pairs = [(node.target, node.iter)]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        func, given = node.value.func, node.value.args
        if isinstance(func, ast.Attribute) and func.attr in ("append", "extend", "add", "update"):
            pairs = [(func.value, each) for each in given]
    for target, value in pairs:
        is_zip = isinstance(value, ast.Call) and last_name(value.func) == "zip"
        parts: list[ast.expr] = getattr(value, "args" if is_zip else "elts", [])
        if isinstance(target, ast.Tuple) and len(target.elts) == len(parts):
            pairs += zip(target.elts, parts, strict=True)
        elif target is not None and value is not None:
            names = map(last_name, ast.walk(target))
            yield from ((name, value) for name in names if name not in ("", "self"))


def _own_parts(node: ast.AST) -> Iterator[ast.AST]:
    waiting = [node]
    while waiting:
        yield (each := waiting.pop())
        inner = ast.iter_child_nodes(each)
        waiting += [c for c in inner if not isinstance(c, ast.stmt | ast.ExceptHandler | ast.match_case)]


def last_name(node: ast.AST) -> str:
    """Return `c` of `a.b.c`; empty for anything but names and attributes."""
    return str(getattr(node, "attr", "") or getattr(node, "id", ""))


def said(node: ast.AST) -> str:
    """Return the names and string constants in an expression."""
    parts = (last_name(n) or getattr(n, "value", "") for n in islice(ast.walk(node), 300))
    return " ".join(part[:200] for part in parts if isinstance(part, str))
