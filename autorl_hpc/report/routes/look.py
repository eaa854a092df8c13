"""Parse one Python file: imports, functions, classes and constants (`look_at`). Nothing is executed or imported."""

from __future__ import annotations

import ast
import json
import posixpath
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

_COMMON = frozenset(("train.jsonl", "train.json", "test.jsonl", "config.json"))
"""File names that many scripts use, so that they don't show that one reads what another wrote."""


@dataclass
class Look:
    """One parsed file."""

    path: str
    text: str
    tree: ast.Module | None = None
    note: str | None = None
    imports: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    functions: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    imported: set[str] = field(default_factory=set)
    """Last names of imported modules and of the names imported from them."""
    constants: dict[str, ast.expr] = field(default_factory=dict)
    """Module-level names that are bound exactly once in the file."""

    def literal(self, expr: ast.AST | None) -> Any:
        """Return the value of a constant, given literally or by name; None if it is not constant."""
        expr = self.constants.get(expr.id) if isinstance(expr, ast.Name) else expr
        return expr.value if isinstance(expr, ast.Constant) else None

    def name_of(self, expr: ast.AST) -> str:
        """Return the full name of `a.b.c` according to the file's imports; empty if it is not a plain name."""
        parts: list[str] = []
        while isinstance(expr, ast.Attribute) and len(parts) < 9:
            parts, expr = [expr.attr, *parts], expr.value
        return ".".join([self.imports.get(expr.id, expr.id), *parts]) if isinstance(expr, ast.Name) else ""


def look_at(path: str, text: str) -> Look:
    """Parse one file; if Python's parser rejects it, the result has a note and no tree."""
    found = Look(path, _cells(text) if path.endswith(".ipynb") else text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.tree = ast.parse(found.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        found.note = f"not read, no Python 3: {type(error).__name__} in line {getattr(error, 'lineno', '?')}"
        return found
    bound: dict[str, int] = defaultdict(int)
    for node in ast.walk(found.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [*(a.name for a in node.names), getattr(node, "module", None) or ""]
            found.imported |= {part for name in names for part in name.split(".")}
        if isinstance(node, ast.Import):
            found.imports |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom):
            found.stars += [node.module or "" for a in node.names if a.name == "*"]
            found.imports |= {a.asname or a.name: f"{node.module or ''}.{a.name}".lstrip(".") for a in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.functions[node.name].append(node)
        elif isinstance(node, ast.ClassDef):
            found.classes[node.name] = node
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound[node.id] += 1
    pairs = (pair for statement in found.tree.body for pair in bindings(statement))
    found.constants = {name: value for name, value in pairs if bound[name] == 1}
    return found


def _cells(text: str) -> str:
    """Return the code cells of a notebook as one script; shell lines keep their command."""
    try:
        cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        code = "\n".join("".join(cell) for cell in cells)
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    code = re.sub(r"^( *)%.*", r"\1pass", code, flags=re.M)
    return re.sub(r"^( *)!(.*)", lambda m: f"{m[1]}__import__('os').system({m[2]!r})", code, flags=re.M)


def bindings(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
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
        call, func = node.value, node.value.func
        if isinstance(func, ast.Attribute) and func.attr in ("append", "extend", "add", "update"):
            pairs = [(func.value, each) for each in call.args]
    while pairs:
        target, value = pairs.pop(0)
        parts: list[ast.expr] = getattr(
            value, "elts", value.args if isinstance(value, ast.Call) and called(value) == "zip" else []
        )
        if isinstance(target, ast.Tuple) and len(target.elts) == len(parts):
            pairs += zip(target.elts, parts, strict=True)
        elif target is not None and value is not None:
            for part in ast.walk(target):
                if (name := getattr(part, "id", getattr(part, "attr", None))) and name != "self":
                    yield name, value


def own_parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a statement, without those of statements nested in it."""
    waiting = [node]
    while waiting:
        yield (each := waiting.pop())
        inner = ast.iter_child_nodes(each)
        waiting += [c for c in inner if not isinstance(c, ast.stmt | ast.ExceptHandler | ast.match_case)]


def called(call: ast.AST) -> str:
    """Return the last name of the called function."""
    func = getattr(call, "func", None)
    return str(getattr(func, "attr", getattr(func, "id", "")))


def receiver(func: Any) -> str:
    """Return the last name of `x` in `x.train`."""
    return str(getattr(func.value, "attr", getattr(func.value, "id", "")))


def said(node: ast.AST) -> str:
    """Return the names and string constants in an expression."""
    parts = (getattr(n, "id", getattr(n, "attr", getattr(n, "value", ""))) for n in islice(ast.walk(node), 300))
    return " ".join(part[:200] for part in parts if isinstance(part, str))


def base_names(nodes: Sequence[ast.AST]) -> set[str]:
    texts = (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return {posixpath.basename(t.rstrip("/")) for t in texts if len(t) < 300 and re.search(r"\w[/.]\w", t)} - _COMMON
