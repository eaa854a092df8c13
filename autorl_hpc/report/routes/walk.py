"""Follows one Python script from its first line as it would run: into functions and local modules, past dead branches."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from autorl_hpc.report.routes import calls, clis, trainings
from autorl_hpc.report.routes.commands import Command
from autorl_hpc.report.routes.events import Event
from autorl_hpc.report.routes.flow import bind
from autorl_hpc.report.routes.given import Given
from autorl_hpc.report.routes.kinds import Args, Cls, Func, Lib, Made
from autorl_hpc.report.routes.reading import Source
from autorl_hpc.report.routes.scopes import Scope
from autorl_hpc.report.routes.shell import Arms
from autorl_hpc.report.routes.turns import turns
from autorl_hpc.report.routes.values import Values

MAX_DEPTH = 25
"""Functions inside functions."""
MAX_ENTERED = 4
"""Times that one function is followed: it may be called for SFT and again for RL."""
MAX_BOUND = 6
"""Calls whose arguments a function's parameters remember."""
MAX_CALLS = 30_000
"""Of one script; beyond it the rest is not followed."""

_EXITS = ("sys.exit", "os._exit", "builtins.exit", "builtins.quit")

Run = Callable[[Command, Event, Arms], None]
"""Follows a command that the script runs."""


class Walk:
    """The walk through one script. Events come in the order in which the code comes to them."""

    def __init__(self, values: Values, run: Run, number: int) -> None:
        self.values = values
        self.run = run
        self.number = number
        self.files: dict[str, str] = {}
        """Scripts that this one writes, by path."""
        self.events: list[Event] = []
        self.trainers: dict[int, Event] = {}
        """Trainers that were made, by their call."""
        self.beside: dict[int, list[Event]] = {}
        """By a trainer's event: what the same call makes where its class is another one."""
        self.trained: set[int] = set()
        self._touched: list[int] = []
        """Calls that make trainers, as often as the walk comes to one."""
        self._assigned: dict[tuple[int, str], tuple[set[int], Arms]] = {}
        """By scope and name: the trainers that its last assignment made, and the branch in which it stands."""
        self.reached: list[Scope] = []
        self.settings: list[Given] = []
        self._calls = 0
        self._entered: dict[int, int] = {}
        self._stack: list[int] = []
        self._imported: set[str] = set()
        self._seen: set[tuple[int, Arms, int]] = set()

    def script(self, source: Source) -> list[Event]:
        """Follows a file as the one that is run."""
        assert source.tree is not None
        scope = self.values.scopes.module(source, is_main=True)
        self._imported.add(source.path)
        self.reached.append(scope)
        self._body(source.tree.body, scope, ())
        self._commands_of_clis(scope)
        trainings.ended(self)
        return self.events

    def _commands_of_clis(self, scope: Scope) -> None:
        """Functions that a decorator makes commands (click, typer, hydra, ray): run by a framework."""
        several: list[tuple[str, Func]] = []
        for node in list(scope.functions.values()):
            decorators = getattr(node, "decorator_list", [])
            words = [n.attr if isinstance(n, ast.Attribute) else "" for d in decorators[:6] for n in ast.walk(d)]
            if "command" in words:
                several.append((clis.name_of(node), Func(node, scope)))
            elif any(word in ("main", "callback") for word in words):
                self.enter(Func(node, scope), ())
        self._one_of(several, scope, ())

    def _one_of(self, named: list[tuple[str, Func]], scope: Scope, arms: Arms) -> None:
        """Follows the function that the command line names; if it names none of several, each as a branch of its own."""
        chosen = clis.chosen(named, self.values.positional) if len(named) > 1 else named
        question = f"{scope.source.path}:commands"
        for number, (_, function) in enumerate(chosen):
            self.enter(function, arms if len(chosen) == 1 else (*arms, (question, number)))

    # -- statements ------------------------------------------------------------------------------------------------

    def _body(self, body: Sequence[ast.stmt], scope: Scope, arms: Arms) -> bool:
        """Follows statements; True: what stands behind them isn't reached."""
        return any(self._calls > MAX_CALLS or self._statement(statement, scope, arms) for statement in body)

    def _statement(self, node: ast.stmt, scope: Scope, arms: Arms) -> bool:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return False
        if isinstance(node, ast.If):
            return self._if(node, scope, arms)
        if isinstance(node, (ast.For, ast.AsyncFor)):
            self._expressions(node.iter, scope, arms)
            for _ in turns(node, scope, self.values):
                self._body(node.body, scope, arms)
            self._body(node.orelse, scope, arms)
        elif isinstance(node, ast.While):
            if self.values.truth(node.test, scope) is False:
                return False
            self._expressions(node.test, scope, arms)
            self._body(node.body, scope, arms)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self._expressions(item.context_expr, scope, arms)
            return self._body(node.body, scope, arms)
        elif isinstance(node, ast.Try):
            question = f"{scope.source.path}:{node.lineno}"
            over = self._body(node.body, scope, (*arms, (question, 0)) if node.handlers else arms)
            for handler in node.handlers:
                self._body(handler.body, scope, (*arms, (question, 1)))
            over = (over and not node.handlers) or self._body(node.orelse, scope, arms)
            return self._body(node.finalbody, scope, arms) or over
        elif isinstance(node, ast.Match):
            self._expressions(node.subject, scope, arms)
            for number, case in clis.cases(node, scope, self.values):
                own = () if number is None else ((f"{scope.source.path}:{node.lineno}", number),)
                self._body(case.body, scope, (*arms, *own))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node, scope)
        else:
            before = len(self._touched)
            self._expressions(node, scope, arms)
            self._assign(node, self._touched[before:], scope, arms)
            calls.statement(self, node, scope, arms)
            return isinstance(node, (ast.Return, ast.Raise, ast.Break, ast.Continue)) or self._exits(node, scope)
        return False

    def _if(self, node: ast.If, scope: Scope, arms: Arms) -> bool:
        """A chain of if, elif, else; an `elif` is an `if` inside an `else`, as deep as the chain is long."""
        question = f"{scope.source.path}:{node.lineno}"
        overs: list[bool] = []
        number = 0
        while True:
            self._expressions(node.test, scope, arms)
            known = self.values.truth(node.test, scope)
            own = arms if known is True else (*arms, (question, number))
            if known is not False:
                overs.append(self._body(node.body, scope, own))
            if known is True:
                break
            number += 1
            rest = node.orelse
            if len(rest) == 1 and isinstance(rest[0], ast.If):
                node = rest[0]
                continue
            last = arms if not overs else (*arms, (question, number))
            overs.append(self._body(rest, scope, last) if rest else False)
            break
        return all(overs)

    def _exits(self, node: ast.stmt, scope: Scope) -> bool:
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            return False
        targets = self.values.of(node.value.func, scope)
        return any(isinstance(t, Lib) and (t.name in _EXITS or t.name.startswith("os.exec")) for t in targets)

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        if isinstance(node, ast.Import):
            wanted = [(alias.name, 0) for alias in node.names]
        else:
            base = node.module or ""
            wanted = [(base, node.level), *((f"{base}.{a.name}".strip("."), node.level) for a in node.names)]
        for name, level in wanted:
            module = self.values.module(name, level, scope) if name or level else None
            if module is None or module.source.path in self._imported or len(self._stack) > MAX_DEPTH:
                continue
            self._imported.add(module.source.path)
            self.reached.append(module)
            self._stack.append(0)
            self._body(module.node.body, module, ())  # type: ignore[attr-defined]
            self._stack.pop()

    # -- calls -----------------------------------------------------------------------------------------------------

    def _expressions(self, node: ast.AST, scope: Scope, arms: Arms) -> None:
        """The calls in a statement or expression, inner ones first."""
        found = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
        for call in sorted(found, key=lambda c: (c.end_lineno or 0, c.end_col_offset or 0)):
            self._calls += 1
            if self._calls > MAX_CALLS:
                return
            self._call(call, scope, arms)

    def _call(self, call: ast.Call, scope: Scope, arms: Arms) -> None:
        targets = self.values.of(call.func, scope)
        dispatched = self._is_option(call.func, scope) and sum(isinstance(t, Func) for t in targets) > 1
        for number, target in enumerate(targets):
            if isinstance(target, Func):
                branch = ((f"{scope.source.path}:{call.lineno}:called", number),) if dispatched else ()
                self._called(call, target, scope, (*arms, *branch))
            elif isinstance(target, Cls):
                self._methods(call, target, "__init__", scope, arms)
            elif isinstance(target, Made) and isinstance(target.of, Cls):
                self._methods(call, target.of, "__call__", scope, arms)
        calls.call(self, call, targets, scope, arms)
        if id(call) in self.trainers:
            self._touched.append(id(call))
        if any(isinstance(t, Lib) and t.name in clis.FIRE for t in targets):
            self._one_of(clis.of_fire(call, scope, self.values), scope, arms)
            return
        if isinstance(call.func, ast.Attribute) and call.func.attr == "set_defaults":
            return  # run where the option is called
        for argument in [*call.args, *(k.value for k in call.keywords)]:
            self._handed_over(argument, scope, arms)

    def _assign(self, node: ast.stmt, made: list[int], scope: Scope, arms: Arms) -> None:
        """Remembers which trainers a name stands for: those of the last assignment, and of others in branches beside it."""
        if not made or not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            return
        key = (id(scope), node.targets[0].id)
        known, where = self._assigned.get(key, (set(), arms))
        replaces = where[: len(arms)] == arms
        self._assigned[key] = (set(made) if replaces else known | set(made), arms)

    def current(self, name: ast.expr, scope: Scope, made: list[Event]) -> list[Event]:
        """Of the trainers that a name may be, those that it is by now; all where that isn't known."""
        keys = self._assigned.get((id(scope), name.id), (set(), ()))[0] if isinstance(name, ast.Name) else set()
        now = [self.trainers[key] for key in keys]
        return [each for each in made if any(each is one for one in now)] or made

    def _is_option(self, func: ast.expr, scope: Scope) -> bool:
        """`args.func(...)`: one of the functions that subparsers set."""
        return isinstance(func, ast.Attribute) and any(isinstance(v, Args) for v in self.values.of(func.value, scope))

    def _methods(self, call: ast.Call, target: Cls, name: str, scope: Scope, arms: Arms) -> None:
        for method in self.values.of_class(target, name, None, 0):
            if isinstance(method, Func):
                self._called(call, method, scope, arms)

    def _called(self, call: ast.Call, target: Func, scope: Scope, arms: Arms) -> None:
        """Follows a function with the arguments of this call alone; afterwards those of all calls are known."""
        inner = self.values.scopes.function(target.node, target.parent)
        if id(target.node) in self._stack:
            return
        before = inner.bound
        inner.bound = {}
        bind(call, inner, scope, inner.owner is not None)
        self.enter(target, arms)
        own = inner.bound
        inner.bound = {name: [*before.get(name, []), *own.get(name, [])][:MAX_BOUND] for name in {**before, **own}}

    def _handed_over(self, argument: ast.expr, scope: Scope, arms: Arms) -> None:
        """Functions given to others (a pool, a launcher, a thread, a trainer) are run by these."""
        elements = argument.elts if isinstance(argument, (ast.List, ast.Tuple)) else [argument]
        for element in elements[:20]:
            trainings.handed_over(self, element, scope, arms)
            if isinstance(element, (ast.Name, ast.Attribute, ast.Lambda)):
                for value in self.values.of(element, scope):
                    if isinstance(value, Func):
                        self.enter(value, arms)

    def enter(self, target: Func, arms: Arms) -> None:
        """Follows a function's body."""
        node = target.node
        if id(node) in self._stack or len(self._stack) >= MAX_DEPTH or self._entered.get(id(node), 0) >= MAX_ENTERED:
            return
        self._entered[id(node)] = self._entered.get(id(node), 0) + 1
        scope = self.values.scopes.function(node, target.parent)
        self.reached.append(scope)
        self._stack.append(id(node))
        if isinstance(node, ast.Lambda):
            self._expressions(node.body, scope, arms)
        else:
            self._body(node.body, scope, arms)
        self._stack.pop()

    def add(self, event: Event) -> None:
        """Notes an event once per place and branch."""
        key = (hash((event.what, event.path, event.line, event.route)), event.arms, self.number)
        if key not in self._seen and len(self.events) < 500:
            self._seen.add(key)
            event.script = self.number
            self.events.append(event)
