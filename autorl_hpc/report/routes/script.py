"""Analyse a script and its imports (`Script`): which statements may run, which trainers they make, what flows into a loss.

Nothing is executed or imported. Names are matched as text, values are literals, and conditions are open unless constant. If the
analysis is not sure, the result is `unknown`.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autorl_hpc.report.routes.commands import options
from autorl_hpc.report.routes.look import Look, base_names, bindings, called, own_parts, receiver, said
from autorl_hpc.report.routes.route import OWN_LOOP, Training
from autorl_hpc.report.routes.trainers import (
    API_CLIENTS,
    GENERATE,
    LOSS_TYPES_OF_RELATIVES,
    NO_POLICY_TRAINERS,
    OWN_LOSS,
    TRAINER_CLASSES,
    TRAINER_PACKAGES,
    route_of_loss,
)
from autorl_hpc.states import Route

MAX_FLOW = 5_000
"""Bound on the parts of an expression's origins; a formula has fewer."""

MODEL_NAME = re.compile(r"(^|_)(model|policy|actor|net|critic|lm|student|teacher|ref|reference|m)\d?$", re.I)
CHECK = re.compile(r"correct|right|solv|reward|score|verif|answer|gold|match|pass|judge|accept|extract|maj", re.I)
_GUARD = re.compile(r"exists|is_?file|is_?dir|main_process|rank")
"""Conditions for resuming after an interruption or for one process of several: what they guard counts as run."""


class CodePlace(NamedTuple):
    """A statement or expression that may run, with the file and function in which its names are resolved."""

    node: Any
    look: Look
    function: str
    sure: bool = True
    """Whether no open condition is around it."""
    tests: tuple[ast.expr, ...] = ()
    """The conditions around it."""

    def part(self, node: ast.AST) -> CodePlace:
        """Return a part of this place."""
        return self._replace(node=node)


class Script:
    """The live statements of a script and everything that it imports."""

    def __init__(self, path: str, looks: Mapping[str, Look], args: Sequence[str] = ()) -> None:
        self.path, self.looks, self.given = path, looks, options(args)
        self.reached: dict[str, Look] = {}
        self.statements: list[CodePlace] = []
        self.calls: list[CodePlace] = []
        self.by_name: dict[str, list[CodePlace]] = defaultdict(list)
        """Calls by the last name of the called function."""
        self.loads: list[CodePlace] = []
        """Names that are used but not called."""
        self.bound: dict[tuple[str, str, str], list[CodePlace]] = defaultdict(list)
        self.members: dict[tuple[str, str], list[CodePlace]] = defaultdict(list)
        self.options: dict[str, CodePlace] = {}
        """Defaults of `add_argument`."""
        self._defined: dict[str, list[tuple[Look, Any]]] = defaultdict(list)
        self._waiting: list[tuple[Look, Any, bool]] = []
        self._names: dict[bool, list[str]] = {True: [], False: []}
        self._wanted: dict[bool, dict[str, None]] = {True: {}, False: {}}
        self._entered: set[int] = set()
        self._enter(looks[path])
        self._reach()

    # --- live statements

    def _enter(self, look: Look) -> None:
        if look.path in self.reached or look.tree is None:
            return
        self.reached[look.path] = look
        for name, nodes in look.functions.items():
            self._defined[name] += [(look, node) for node in nodes]
        for name, made in look.classes.items():
            inner = [n for n in made.body if getattr(n, "name", "") in ("__init__", "__call__", "forward")]
            self._defined[name] += [(look, node) for node in inner]
        for sure, names in self._wanted.items():
            self._names[sure] += [name for name in names if name in look.functions or name in look.classes]
        self._waiting.append((look, look.tree, True))

    def _reach(self) -> None:
        """Visit everything reachable from the first line: called functions surely run, others that are named perhaps do."""
        while self._waiting or self._names[True] or self._names[False]:
            if self._waiting:
                look, node, sure = self._waiting.pop()
                for each in self._lives(look, node, sure):
                    self._statement(each)
                continue
            sure = bool(self._names[True])
            name = self._names[sure].pop()
            new = [(look, node) for look, node in self._defined.get(name, ()) if id(node) not in self._entered]
            if sure and len(new) > 1 and not any(name in look.classes for look, _ in new):
                self._names[False].append(name)
                continue
            self._entered |= {id(node) for _, node in new}
            self._waiting += [(look, node, sure) for look, node in new]

    def _want(self, name: str, sure: bool) -> None:
        if name in self._wanted[sure]:
            return
        self._wanted[sure][name] = None
        self._names[sure].append(name)

    def _lives(self, look: Look, owner: Any, sure: bool) -> Iterator[CodePlace]:
        waiting: list[tuple[list[ast.stmt], bool, tuple[ast.expr, ...]]] = [(owner.body, sure, ())]
        function = getattr(owner, "name", "")
        while waiting:
            body, sure, tests = waiting.pop()
            inner: list[tuple[list[ast.stmt], bool, tuple[ast.expr, ...]]] = []
            for node in body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                yield CodePlace(node, look, function, sure, tests)
                if isinstance(node, ast.Return | ast.Raise | ast.Break | ast.Continue) or _leaves(node):
                    break
                if isinstance(node, ast.If | ast.While):
                    known = self._decided(node.test, look)
                    guards = isinstance(node, ast.While) or _GUARD.search(said(node.test)) is not None
                    if known is not False:
                        inner.append((node.body, sure and (known is True or guards), (*tests[-8:], node.test)))
                    if known is not True:
                        inner.append((node.orelse, sure and (known is False or guards), (*tests[-8:], node.test)))
                    if known is not False and isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return):
                        if known:
                            break
                        sure = sure and guards
                elif isinstance(node, ast.Try):
                    inner += [(b, sure, tests) for b in (node.body, node.orelse, node.finalbody)]
                    inner += [(handler.body, False, tests) for handler in node.handlers]
                elif isinstance(node, ast.Match):
                    inner += [(case.body, False, tests) for case in node.cases]
                elif isinstance(node, ast.For | ast.AsyncFor | ast.With | ast.AsyncWith | ast.ClassDef):
                    inner.append((node.body, sure, tests))
            waiting += inner[::-1]

    def _decided(self, test: ast.expr, look: Look) -> bool | None:
        """Return the value of a condition that is constant or tests for the main module, else None."""
        if (
            isinstance(test, ast.UnaryOp)
            and isinstance(test.op, ast.Not)
            and isinstance(look.literal(test.operand), int)
        ):
            return not look.literal(test.operand)
        if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__":
            return look.path == self.path
        known = look.literal(test)
        return bool(known) if isinstance(known, bool | int) else None

    def _statement(self, each: CodePlace) -> None:
        look = each.look
        self.statements.append(each)
        if isinstance(each.node, ast.Import | ast.ImportFrom):
            for path in _modules(each.node, look.path, self.path, self.looks):
                self._enter(self.looks[path])
        for name, value in bindings(each.node):
            self.bound[look.path, each.function, name].append(each.part(value))
            self.members[look.path, name].append(each.part(value))
        callees: set[int] = set()
        for part in own_parts(each.node):
            if isinstance(part, ast.Call):
                callees.add(id(part.func))
                self.calls.append(each.part(part))
                self.by_name[called(part)].append(each.part(part))
                self._want(called(part), each.sure)
                if called(part) == "add_argument":
                    self._option(part, each)
            elif isinstance(part, ast.Name | ast.Attribute) and id(part) not in callees:
                self.loads.append(each.part(part))
                self._want(part.id if isinstance(part, ast.Name) else part.attr, False)

    def _option(self, call: ast.Call, each: CodePlace) -> None:
        names = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        given = {k.arg: k.value for k in call.keywords}
        name = each.look.literal(given.get("dest")) or "".join(names[-1:]).lstrip("-").replace("-", "_")
        if "default" in given:
            self.options[str(name)] = each.part(given["default"])

    # --- data flow

    def flow(self, start: Sequence[CodePlace]) -> tuple[list[CodePlace], list[ast.expr]]:
        """Return everything that flows into these expressions through names and calls, and the conditions that filter it."""
        waiting, done = list(start), set[int]()
        nodes: list[CodePlace] = []
        tests: list[ast.expr] = []
        while waiting and len(nodes) < MAX_FLOW:
            place = waiting.pop()
            if id(place.node) in done:
                continue
            done.add(id(place.node))
            for part in ast.walk(place.node):
                nodes.append(place._replace(node=part))
                if isinstance(part, ast.If):
                    tests.append(part.test)
                elif isinstance(part, ast.comprehension):
                    tests += part.ifs
                elif isinstance(part, ast.Call):
                    waiting += [
                        CodePlace(node, look, node.name) for look, node in self._defined.get(called(part), ())[:4]
                    ]
                elif isinstance(part, ast.Name | ast.Attribute):
                    origins = self._origins(part, place)
                    waiting += origins
                    tests += [test for origin in origins for test in origin.tests]
        return nodes, tests

    def _origins(self, part: ast.Name | ast.Attribute, place: CodePlace) -> list[CodePlace]:
        path = place.look.path
        if isinstance(part, ast.Attribute):
            if isinstance(part.value, ast.Name) and part.value.id in ("self", "s"):
                return self.members[path, part.attr][:8]
            return [self.options[part.attr]] if part.attr in self.options else []
        if known := self.bound.get((path, place.function, part.id)) or self.bound.get((path, "", part.id)):
            return known[:20]
        found = [CodePlace(node, look, node.name) for look, node in self._defined.get(part.id, ())[:2]]
        for node in place.look.functions.get(place.function, ())[:1]:
            names = [a.arg for a in node.args.args if a.arg != "self"]
            for call in self.by_name[place.function][:8] if part.id in names else ():
                at = names.index(part.id)
                given = [*call.node.args[at : at + 1], *(k.value for k in call.node.keywords if k.arg == part.id)]
                found += [call._replace(node=value, tests=()) for value in given]
        return found

    # --- trainings

    def trainings(self) -> list[Training]:
        """Return the trainers that are run, and hand-written loops."""
        made = [(training, call) for call in self.calls if (training := self._made(call)) is not None]
        names = {id(origin.node): name for (_, _, name), origins in self.bound.items() for origin in origins}
        known = {(call.look.path, names.get(id(call.node))) for _, call in made}
        makers = {id(call.node) for _, call in made}
        named = [*(call.part(call.node.func) for call in self.calls), *self.loads]
        runs = [place for place in named if getattr(place.node, "attr", "") in ("train", "step")]
        free = [
            run
            for run in runs
            if run.node.attr == "train" and id(run.node.value) not in makers
            if (run.look.path, receiver(run.node)) not in known and not MODEL_NAME.search(receiver(run.node))
        ]
        found = []
        for training, call in made:
            name, is_ppo = names.get(id(call.node)), training.why == "PPOTrainer"
            mine = [
                run
                for run in runs
                if (run.node.attr == "train" or is_ppo)
                if run.node.value is call.node or (receiver(run.node) == name and run.look is call.look)
            ]
            rivals = {t.route for t, c in made if name and names.get(id(c.node)) == name and c.look is call.look}
            if mine or free:
                training.sure &= any(run.sure for run in mine or free) and (not mine or len(mine) >= len(rivals))
                found.append(training)
        return found + [self._loop(call) for call in self.by_name["backward"]]

    def _trainer(self, expr: ast.AST, look: Look, depth: int = 0) -> tuple[Route | None, str, list[CodePlace]] | None:
        """Return route and name of a trainer's class, and the methods that compute a loss of its own."""
        name = look.name_of(expr)
        last, root = name.rsplit(".", 1)[-1], name.split(".", 1)[0]
        for where in [look, *self.reached.values()] if root not in TRAINER_PACKAGES and depth < 5 and last else ():
            if (local := where.classes.get(last)) is not None and (where is look or "." in name or look.stars):
                told = next((t for b in local.bases if (t := self._trainer(b, where, depth + 1)) is not None), None)
                own = [
                    CodePlace(n, where, n.name)
                    for n in local.body
                    if isinstance(n, ast.FunctionDef) and n.name in OWN_LOSS
                ]
                return (told[0], f"{last}, which is a {told[1]}", own or told[2]) if told else None
        full = [name, *(w.imports.get(last, "") for w in self.reached.values()), *(f"{s}.{last}" for s in look.stars)]
        if not any(each.split(".", 1)[0] in TRAINER_PACKAGES and "." in each for each in full if each.endswith(last)):
            return None
        if last in NO_POLICY_TRAINERS:
            return None, last, []
        return (TRAINER_CLASSES[last], last, []) if last in TRAINER_CLASSES else None

    def _made(self, call: CodePlace) -> Training | None:
        if (told := self._trainer(call.node.func, call.look)) is None:
            return None
        route, why, own = told
        made = Training(route, why, call.look.path, call.node.lineno, call.sure, model=self.model(call))
        parts = {k.arg: call.part(k.value) for k in call.node.keywords}
        nodes, _ = self.flow(own)
        calls_base = any(getattr(n.node, "id", "") == "super" for n in nodes)
        loss, words = route_of_loss([n.node for n in nodes]) if own else (Route.UNKNOWN, "")
        if own and not (calls_base and loss in (Route.SFT, Route.UNKNOWN)):
            made.route, made.why = loss, f"{why}, whose loss is {words}"
        settings, _ = self.flow([p for k, p in parts.items() if k in ("args", "config")] or [call])
        literals = ((k.arg, n.look.literal(k.value)) for n in settings for k in getattr(n.node, "keywords", ()))
        given = {name: value for name, value in literals if value is not None and value is not False}
        if 0 in (given.get("learning_rate"), given.get("max_steps"), given.get("num_train_epochs")):
            made.route = Route.COPY if given.get("learning_rate") == 0 else Route.UNKNOWN
            made.why += ", set to learn nothing"
        if why.endswith("Trainer") and "ForSequenceClassification" in call.look.text and route is Route.SFT:
            made.route, made.why = Route.UNKNOWN, f"{made.why}, perhaps of a reward model"
        if route is Route.DPO and given.get("loss_type", "sigmoid") != "sigmoid":
            made.route = Route.PREFERENCE if given["loss_type"] in LOSS_TYPES_OF_RELATIVES else Route.UNKNOWN
        if made.route is Route.SFT:
            self._data(made, [p for k, p in parts.items() if k == "train_dataset"])
        return made

    def _loop(self, call: CodePlace) -> Training:
        """Return what a hand-written loop learns, judging by what flows into its loss."""
        parts = [call.part(e) for e in [*call.node.args, getattr(call.node.func, "value", call.node)]]
        nodes, _ = self.flow(parts)
        route, why = route_of_loss([n.node for n in nodes])
        if not self.by_name["step"] or len(nodes) >= MAX_FLOW:
            route, why = Route.UNKNOWN, "no step of an optimiser, or too much to be told"
        made = Training(route, f"own loop: {why}", call.look.path, call.node.lineno, call.sure, OWN_LOOP)
        if made.route is Route.SFT:
            self._data(made, parts)
            if made.route is Route.SFT and any(self.by_name[name] for name in GENERATE):
                made.route, made.why = Route.UNKNOWN, f"{made.why}, beside samples of a model"
        return made

    def _data(self, made: Training, parts: Sequence[CodePlace]) -> None:
        """Refine supervised training by the origin of its rows."""
        nodes, tests = self.flow(parts)
        made.reads = base_names([n.node for n in nodes])
        samples = [n for n in nodes if is_sampling(n)]
        if samples:
            kept = any(CHECK.search(said(test)) for test in tests)
            made.route = Route.REJECTION_SAMPLING if kept else Route.UNKNOWN
            made.route = Route.DISTILLATION if any(map(is_elsewhere, samples)) else made.route
            made.why += ", on samples that a check kept" if kept else ", on samples"

    def model(self, call: CodePlace) -> object:
        """Return the literal name of the model that a call receives or that was loaded for it; None if unknown."""
        named = [k.value for k in call.node.keywords if k.arg in ("model", "pretrained_model_name_or_path")]
        given = [*named, *call.node.args[:1]][:1]
        for _ in range(3):
            if not given or isinstance(known := call.look.literal(given[0]), str):
                return known if given else None
            origins = self._origins(given[0], call) if isinstance(given[0], ast.Name) else []
            loaded = origins[0].node if len(origins) == 1 else None
            given = loaded.args[:1] if isinstance(loaded, ast.Call) else []
        return None


def is_sampling(part: CodePlace) -> bool:
    """Return whether a call asks a model for text."""
    return isinstance(part.node, ast.Call) and (
        called(part.node) in GENERATE
        or part.look.name_of(part.node.func).endswith(("completions.create", "messages.create"))
    )


def is_elsewhere(part: CodePlace) -> bool:
    """Return whether a sampling call asks a service on another host."""
    roots = {name.split(".")[0] for name in part.look.imports.values()} | set(part.look.imports)
    local = re.search(r"localhost|127\.0\.0\.1|0\.0\.0\.0", part.look.text)
    return called(part.node) == "create" and bool(roots & set(API_CLIENTS)) and not local


def _leaves(node: ast.stmt) -> bool:
    """Return whether a statement ends or replaces the process."""
    name = called(node.value) if isinstance(node, ast.Expr) else ""
    return name in ("exit", "_exit") or name.startswith(("execv", "execl"))


def _modules(node: ast.Import | ast.ImportFrom, path: str, main: str, looks: Mapping[str, Look]) -> Iterator[str]:
    """Yield the files of this code that an import reads."""
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        names = [node.module or "", *(f"{node.module}.{n}" if node.module else n for n in names)]
    for name in filter(None, names):
        ends = [f"{name.replace('.', '/')}{ending}" for ending in (".py", "/__init__.py")]
        folders = [posixpath.dirname(path), "", posixpath.dirname(main), posixpath.dirname(posixpath.dirname(path))]
        yield from (p for p in dict.fromkeys(posixpath.join(f, e) for f in folders for e in ends) if p in looks)
