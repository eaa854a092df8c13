"""What single calls and statements mean for a route: files, programs, texts, averages. Trainings and samples have their own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from autorl_hpc.report.routes import given, samples, trainings
from autorl_hpc.report.routes.averages import averaging, changes_weights
from autorl_hpc.report.routes.commands import split, understood
from autorl_hpc.report.routes.events import event
from autorl_hpc.report.routes.flow import about_samples, filters, flow, generates, judges
from autorl_hpc.report.routes.kinds import Lib, Lit, Made, Value
from autorl_hpc.report.routes.scopes import Scope, statements
from autorl_hpc.report.routes.shell import Arms
from autorl_hpc.report.routes.values import Values
from autorl_hpc.report.routes.words import words
from autorl_hpc.states import Route

if TYPE_CHECKING:
    from autorl_hpc.report.routes.walk import Walk

_PROCESSES = frozenset(
    {
        "system",
        "popen",
        "run",
        "call",
        "check_call",
        "check_output",
        "Popen",
        "getoutput",
        "create_subprocess_shell",
        "create_subprocess_exec",
    }
)
_BECOMES = re.compile(r"^os\.(exec|spawn|posix_spawn)(l|v)?p?e?$")
"""Calls that give a program's arguments behind its path (spawn: and a mode): as one list, or one by one (l)."""
_WRITERS = frozenset(
    {"to_json", "save_to_disk", "to_parquet", "to_csv", "write_text", "dump", "write", "writelines", "to_jsonl"}
)

MAX_SETTINGS = 500
"""Noted of one script."""


def call(walk: Walk, node: ast.Call, targets: Sequence[Value], scope: Scope, arms: Arms) -> None:
    """Notes what a call means."""
    func = node.func
    attr = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    names = {t.name for t in targets if isinstance(t, Lib)}
    trainings.trainer_made(walk, node, targets, scope, arms)
    _note(walk, given.of_call(node, targets, attr, scope, walk.values))
    if attr in ("train", "step", "fit") and isinstance(func, ast.Attribute):
        trainings.trained(walk, func, scope, arms)
    if attr == "backward" and isinstance(func, ast.Attribute):
        trainings.loop(walk, node, func, scope, arms)
    if generates(node, scope, walk.values):
        walk.add(samples.sampling(node, scope, arms, walk.values))
    if attr in _PROCESSES and any(
        n.startswith(("os.", "subprocess.", "asyncio.")) or n.endswith(".system") for n in names | {_root(func)}
    ):
        _process(walk, node, node.args, scope, arms)
    for kind in (match for n in names if (match := _BECOMES.match(n)) is not None):
        begin = 2 if kind[1] == "spawn" else 1
        _process(walk, node, node.args[begin:] if kind[2] == "l" else node.args[begin : begin + 1], scope, arms)
    if attr in ("exec", "eval") and isinstance(func, ast.Name):
        _text(walk, node, scope, arms)
    if attr in ("run_path", "run_module") and node.args:
        _script(walk, node, walk.values.text(node.args[0], scope), scope, arms)
    _handed_script(walk, node, scope, arms)
    _files(walk, node, attr, names, scope, arms)


def _note(walk: Walk, found: Iterable[given.Given]) -> None:
    if len(walk.settings) < MAX_SETTINGS:
        walk.settings += found


def _root(func: ast.expr) -> str:
    at = func
    for _ in range(20):
        if not isinstance(at, (ast.Attribute, ast.Call)):
            break
        at = at.value if isinstance(at, ast.Attribute) else at.func
    return f"{at.id}." if isinstance(at, ast.Name) else ""


# -- files ---------------------------------------------------------------------------------------------------------


def _files(walk: Walk, node: ast.Call, attr: str, names: set[str], scope: Scope, arms: Arms) -> None:
    if attr in _WRITERS and isinstance(node.func, ast.Attribute):
        _written(walk, node, node.func, scope, arms)
    elif attr == "save_pretrained" and isinstance(node.func, ast.Attribute):
        if not _is_tokenizer(node.func.value, scope, walk.values):
            written = [walk.values.text(each, scope) for each in node.args[:1]]
            walk.add(event("save", node, scope, arms, writes=frozenset(samples.base_names(written))))
    elif attr in ("copytree", "copy", "copy2", "copyfile", "symlink") and any(
        n.startswith(("shutil.", "os.")) for n in names
    ):
        source = walk.values.text(node.args[0], scope) if node.args else None
        if (
            attr == "copytree"
            or "safetensors" in (source or "")
            or (source is None and "safetensors" in scope.source.text)
        ):
            walk.add(event("copy", node, scope, arms, why="a model's folder is copied"))


def _is_tokenizer(expr: ast.expr, scope: Scope, values: Values) -> bool:
    names = [t.of.name for t in values.of(expr, scope) if isinstance(t, Made) and isinstance(t.of, Lib)]
    if names:
        return all("token" in n.lower() or "processor" in n.lower() or "config" in n.lower() for n in names)
    return "tok" in words(expr)


def _written(walk: Walk, node: ast.Call, func: ast.Attribute, scope: Scope, arms: Arms) -> None:
    """Rows that are written to a file: are they samples, and kept by what? Scripts that are written are kept for their run."""
    _script_written(walk, node, func, scope)
    content = node.args[0] if node.args else func.value
    if func.attr in ("to_json", "save_to_disk", "to_parquet", "to_csv", "to_jsonl"):
        content = func.value
    found = flow(content, scope, walk.values)
    made = event("write", node, scope, arms)
    samples.told_by_flow(made, found, walk.values)
    target = _target_of(node, func)
    made.writes = samples.paths(flow(target, scope, walk.values), walk.values) if target is not None else frozenset()
    if made.writes and (made.sampled or made.reads):
        made.kept = filters(found, walk.values) is not None or _kept_around(node, scope, walk.values)
        made.reads -= made.writes
        walk.add(made)


def _script_written(walk: Walk, node: ast.Call, func: ast.Attribute, scope: Scope) -> None:
    if func.attr not in ("write", "write_text") or not node.args:
        return
    text = walk.values.text(node.args[0], scope)
    if text is None or "\n" not in text:
        return
    for name in sorted(samples.paths(flow(func.value, scope, walk.values), walk.values)):
        if name.endswith((".py", ".sh")):
            walk.files[name] = text


def _target_of(node: ast.Call, func: ast.Attribute) -> ast.expr | None:
    """The expression that says where rows are written to."""
    if func.attr in ("write", "writelines", "write_text"):
        return func.value
    if func.attr == "dump":
        return node.args[1] if len(node.args) > 1 else None
    return node.args[0] if node.args else None


def _kept_around(node: ast.Call, scope: Scope, values: Values) -> bool:
    """Whether a condition on an answer stands around a statement."""
    body = getattr(scope.node, "body", [])
    for statement, tests in statements(body if isinstance(body, list) else []):
        if isinstance(statement, ast.Expr) and statement.lineno <= node.lineno <= (statement.end_lineno or 0):
            return any(judges(test) or about_samples(test, scope, values) for test in tests)
    return False


# -- programs, text, averages --------------------------------------------------------------------------------------


def _process(walk: Walk, node: ast.Call, args: Sequence[ast.expr], scope: Scope, arms: Arms) -> None:
    for line in command_words(args, scope, walk.values):
        walk.run(understood(line), event("generate", node, scope, arms), arms)


def command_words(args: Sequence[ast.expr], scope: Scope, values: Values) -> list[list[str]]:
    """The words of the command that a call starts, given as a text or as a list."""
    if not args:
        return []
    found: list[list[str]] = []
    lists = [v for v in values.of(args[0], scope) if isinstance(v, Lit) and isinstance(v.expr, (ast.List, ast.Tuple))]
    for each in lists[:4]:
        elements = each.expr.elts if isinstance(each.expr, (ast.List, ast.Tuple)) else []
        line = [values.text(e, each.scope) or ("python" if "executable" in words(e) else "?") for e in elements[:200]]
        found.append(line)
    text = values.text(args[0], scope)
    if text is not None and not lists:
        if len(args) > 1 and (rest := [values.text(a, scope) for a in args[1:]]) and all(rest):
            return [[text, *[r for r in rest if r]]]
        return [["bash", "-c", text]] if any(c in text for c in ";&|\n") else [split(text)]
    return found


def _text(walk: Walk, node: ast.Call, scope: Scope, arms: Arms) -> None:
    """`exec` of a text: followed where it is constant or a file's, else opaque."""
    inner = node.args[0] if node.args else None
    if isinstance(inner, ast.Call) and getattr(inner.func, "id", "") == "compile" and inner.args:
        inner = inner.args[0]
    text = walk.values.text(inner, scope)
    if text is not None:
        walk.run(understood(["python", "-c", text]), event("generate", node, scope, arms), arms)
        return
    opened = [
        n
        for n in islice(ast.walk(node), 40)
        if isinstance(n, ast.Call) and getattr(n.func, "id", "") in ("open", "Path")
    ]
    path = walk.values.text(opened[0].args[0], scope) if opened and opened[0].args else None
    if path is not None:
        _script(walk, node, path, scope, arms)
    elif isinstance(node.func, ast.Name) and node.func.id == "exec":
        walk.add(event("opaque", node, scope, arms, why="runs a text that is not in the code"))


def _script(walk: Walk, node: ast.Call, path: str | None, scope: Scope, arms: Arms) -> None:
    if path is not None:
        walk.run(understood(["python", path]), event("generate", node, scope, arms), arms)


def _handed_script(walk: Walk, node: ast.Call, scope: Scope, arms: Arms) -> None:
    """`Process(target=runpy.run_path, args=("two.py",))`: a function that runs a script, handed over with its arguments."""
    target = next((k.value for k in node.keywords if k.arg == "target"), None)
    args = next((k.value for k in node.keywords if k.arg == "args"), None)
    if target is None or not isinstance(args, (ast.Tuple, ast.List)) or not args.elts:
        return
    if any(isinstance(t, Lib) and t.last in ("run_path", "run_module") for t in walk.values.of(target, scope)):
        _script(walk, node, walk.values.text(args.elts[0], scope), scope, arms)


def statement(walk: Walk, node: ast.stmt, scope: Scope, arms: Arms) -> None:
    """Notes what a statement means that is no call."""
    _note(walk, given.of_assignment(node, scope, walk.values))
    why = averaging(node, scope, walk.values)
    if why is not None:
        walk.add(event("average", node, scope, arms, route=Route.AVERAGING, why=why))
    elif isinstance(node, (ast.Expr, ast.AugAssign)) and changes_weights(node, scope):
        walk.add(event("change", node, scope, arms, why="weights are changed by hand"))
