"""Take a plain look at a script and what it imports (`Script`): statements that may run, and what flows into an expression.

Nothing is executed or imported. Names are matched as text, values are literals, and conditions are open unless constant.
"""

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
        first, *rest = _dotted(expr).split(".")
        return ".".join([self.imports.get(first, first), *rest])

    def words(self) -> Iterator[ast.AST]:
        """Yield all nodes of the file."""
        return ast.walk(self.tree) if self.tree is not None else iter(())


def _dotted(expr: ast.AST) -> str:
    names: list[str] = []
    while isinstance(expr, ast.Attribute) and len(names) < 9:
        names, expr = [expr.attr, *names], expr.value
    return ".".join([expr.id, *names]) if isinstance(expr, ast.Name) else ""


@lru_cache(maxsize=64)
def look_at(path: str, text: str) -> Look:
    """Parse one file. Cached, because most files are the same in all revisions of a run."""
    found = Look(path, text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.tree = ast.parse(text) if len(text) <= MAX_FILE_CHARS else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    bound: Counter[str] = Counter()
    for node in found.words():
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
    pairs = (pair for statement in getattr(found.tree, "body", ()) for pair in _bindings(statement))
    found.constants |= {name: value for name, value in pairs if bound[name] == 1}
    return found


class CodePlace(NamedTuple):
    """A statement or expression that may run, with the file and function in which its names are resolved.

    Attributes:
        sure: no open condition is around it.
        tests: the conditions around it.
    """

    node: Any
    look: Look
    function: str
    sure: bool = True
    tests: tuple[ast.expr, ...] = ()

    def part(self, node: ast.AST) -> CodePlace:
        """Return a part of this place."""
        return self._replace(node=node)


class Script:
    """The live statements of a script and everything that it imports.

    Attributes:
        given: options of the command line.
        named: names and attributes that are used, called or not.
        options: defaults of `add_argument`.
    """

    def __init__(self, path: str, looks: Mapping[str, Look], args: Sequence[str] = (), sure: bool = True) -> None:
        self.path, self.looks, self.sure, self.given = path, looks, sure, options(args)
        self.reached: dict[str, Look] = {}
        self.statements: list[CodePlace] = []
        self.calls: list[CodePlace] = []
        self.named: list[CodePlace] = []
        self.options: dict[str, CodePlace] = {}
        self._bound: dict[tuple[str, str, str], list[CodePlace]] = defaultdict(list)
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

    # --- live statements

    def _enter(self, look: Look) -> None:
        if look.path not in self.reached and look.tree is not None:
            self.reached[look.path] = look
            for name, function in look.functions:
                self._defined[name].append((look, function))
            self._live(look, look.tree, self.sure)

    def _next(self) -> tuple[bool, Look, Function] | None:
        """Return a function to visit next; those that are surely called come first."""
        later = None
        for name, sure in reversed(self._wanted.items()):
            known = self._defined.get(name, ())
            # Of functions of one name, only one is meant; of a class, all its ways to be called are.
            is_sure = sure and (len(known) < 2 or name in known[0][0].classes)
            for look, function in known if is_sure or later is None else ():
                if id(function) not in self._entered:
                    if is_sure:
                        return True, look, function
                    later = later or (False, look, function)
        return later

    def _live(self, look: Look, owner: Any, sure: bool) -> None:
        """Visit the statements of a module or function that are not certainly skipped."""
        waiting: list[tuple[list[ast.stmt], bool, tuple[ast.expr, ...]]] = [(owner.body, sure, ())]
        while waiting:
            body, sure, tests = waiting.pop()
            inner: list[tuple[list[ast.stmt], bool, tuple[ast.expr, ...]]] = []
            for node in body:
                if isinstance(node, Function):
                    continue
                self._statement(CodePlace(node, look, getattr(owner, "name", ""), sure, tests))
                ends = isinstance(node, ast.Return | ast.Raise | ast.Break | ast.Continue) or _leaves(node)
                if isinstance(node, ast.If | ast.While):
                    known, within = self._decided(node.test, look), (*tests[-8:], node.test)
                    guards = known is not None or isinstance(node, ast.While) or bool(_GUARD.search(said(node.test)))
                    arms = ((node.body, False), (node.orelse, True))
                    inner += [(arm, sure and guards, within) for arm, dead in arms if known is not dead]
                    if isinstance(node, ast.If) and known is not False and isinstance(node.body[-1], ast.Return):
                        ends, sure = known is True, sure and guards
                else:
                    inner += [(getattr(node, name, []), sure, tests) for name in ("body", "orelse", "finalbody")]
                    inner += [(a.body, False, tests) for name in ("handlers", "cases") for a in getattr(node, name, ())]
                if ends:
                    break
            waiting += inner[::-1]

    def _decided(self, test: ast.expr, look: Look) -> bool | None:
        """Return the value of a condition that is constant or tests for the main module, else None."""
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
            names = [alias.name for alias in each.node.names]
            module = getattr(each.node, "module", "") or ""
            if isinstance(each.node, ast.ImportFrom):
                names = [module, *(f"{module}.{name}".lstrip(".") for name in names)]
            ends = [f"/{name.replace('.', '/')}{end}" for name in names if name for end in (".py", "/__init__.py")]
            for read in [read for end in ends for path, read in self.looks.items() if f"/{path}".endswith(end)]:
                self._enter(read)
        for name, value in _bindings(each.node):
            self._bound[look.path, each.function, name].append(each.part(value))
            self._bound[look.path, "self", name].append(each.part(value))
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
            elif isinstance(part, ast.Name | ast.Attribute):
                self.named.append(each.part(part))
                name = last_name(part)
                self._wanted[name] = (each.sure and id(part) in callees) or self._wanted.get(name, False)

    # --- data flow

    def flow(self, start: Sequence[CodePlace], *, wide: bool = False) -> tuple[list[CodePlace], list[ast.expr]]:
        """Return everything that flows into these expressions through names and calls, and the conditions that filter it.

        Args:
            wide: a method of an unknown object may be any of that name; else only one of the same file.
        """
        waiting, done = list(start), set[int]()
        nodes: list[CodePlace] = []
        tests: list[ast.expr] = []
        while waiting and len(nodes) < MAX_FLOW:
            place = waiting.pop()
            if id(place.node) in done:
                continue
            done.add(id(place.node))
            for part in ast.walk(place.node):
                nodes.append(place.part(part))
                if isinstance(part, ast.If):
                    tests.append(part.test)
                elif isinstance(part, ast.comprehension):
                    tests += part.ifs
                elif isinstance(part, ast.Call):
                    name, look = place.look.name_of(part.func), place.look
                    is_known = wide or isinstance(part.func, ast.Name) or name != _dotted(part.func)
                    known = [k for k in self._defined.get(last_name(part.func), ()) if is_known or k[0] is look]
                    waiting += [CodePlace(node, look, node.name) for look, node in known[:4]]
                elif isinstance(part, ast.Name | ast.Attribute):
                    origins = self.origins(place.part(part))
                    waiting += origins
                    tests += [test for origin in origins for test in origin.tests]
        return nodes, tests

    def origins(self, place: CodePlace) -> list[CodePlace]:
        """Return what a name is bound to: values, functions, arguments of calls, or the default of an option."""
        part, path = place.node, place.look.path
        if isinstance(part, ast.Attribute):
            if isinstance(part.value, ast.Name) and part.value.id == "self":
                return self._bound.get((path, "self", part.attr), [])[:8]
            return [self.options[part.attr]] if part.attr in self.options else []
        if known := self._bound.get((path, place.function, part.id)) or self._bound.get((path, "", part.id)):
            return known[:20]
        found = [CodePlace(node, look, node.name) for look, node in self._defined.get(part.id, ())[:2]]
        for _, node in [known for known in self._defined.get(place.function, ()) if known[0] is place.look][:1]:
            names = [a.arg for a in node.args.args if a.arg != "self"]
            for call in self.called(place.function)[:8] if part.id in names else ():
                at = names.index(part.id)
                given = [*call.node.args[at : at + 1], *(k.value for k in call.node.keywords if k.arg == part.id)]
                found += [call._replace(node=value, tests=()) for value in given]
        return found


def _leaves(node: ast.stmt) -> bool:
    """Return whether a statement ends or replaces the process."""
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
    elif isinstance(node, ast.With | ast.AsyncWith):
        pairs = [(item.optional_vars, item.context_expr) for item in node.items]
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
    """Yield the parts of a statement, without those of statements nested in it."""
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
