"""What an expression may be, found without running it: library names, local functions and classes, constants.

Insensitive to order: a name is all that is bound to it. Every question has a budget of steps and of depth; what is beyond
either is unknown.
"""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Mapping, Sequence

from autorl_hpc.report.routes import conditions, configs, elements, wellknown
from autorl_hpc.report.routes.commands import options, positional
from autorl_hpc.report.routes.constants import ARITHMETIC, is_known, is_number, keyword, literal, of_environ
from autorl_hpc.report.routes.declared import Declared, declarations
from autorl_hpc.report.routes.kinds import Args, Cls, Conf, Const, Func, Lib, Lit, Made, Mod, Value
from autorl_hpc.report.routes.names import TRAINER_CLASSES
from autorl_hpc.report.routes.reading import Source
from autorl_hpc.report.routes.scopes import Bound, Scope, Scopes

MAX_DEPTH = 14
MAX_VALUES = 6
MAX_STEPS = 400_000
"""Of one analysis; some seconds."""
MAX_QUESTION = 3_000
"""Steps of one question: a name with many bindings is unknown rather than slow."""
MAX_CONST_CHARS = 5_000


class Values:
    """The evaluator of one analysis: one entry script with its arguments."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        scopes: Scopes,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.sources = sources
        self.scopes = scopes
        self.options = options(args)
        self.positional = positional(args)
        self.is_open = any(word.startswith("$") for word in self.positional)
        """Options may stand in a variable that nobody knows: what is not given may be given there."""
        self.env = dict(env or {})
        self.steps = 0
        self._until = MAX_QUESTION
        self._declared: tuple[int, dict[str, Declared]] | None = None
        self._configs: dict[str, list[configs.ConfigItem]] = {}
        self._active: set[tuple[int, int]] = set()

    # -- names -----------------------------------------------------------------------------------------------------

    def of(self, expr: ast.expr | None, scope: Scope, depth: int = 0) -> tuple[Value, ...]:
        """All that `expr` may be; empty: unknown."""
        if depth == 0:
            self._until = min(MAX_STEPS, self.steps + MAX_QUESTION)
        self.steps += 1
        if expr is None or depth > MAX_DEPTH or self.steps > self._until:
            return ()
        key = (id(expr), id(scope))
        if key in self._active:
            return ()
        self._active.add(key)
        try:
            return tuple(dict.fromkeys(self._of(expr, scope, depth)))[:MAX_VALUES]
        finally:
            self._active.discard(key)

    def _of(self, expr: ast.expr, scope: Scope, depth: int) -> Sequence[Value]:
        if isinstance(expr, ast.Constant):
            value = expr.value
            return (Const(value),) if isinstance(value, (str, int, float, bool, type(None))) else ()
        if isinstance(expr, ast.Name):
            return self.named(expr.id, scope, depth)
        if isinstance(expr, ast.Attribute):
            return self._attribute(expr, scope, depth)
        if isinstance(expr, ast.Call):
            return self._call(expr, scope, depth)
        if isinstance(expr, (ast.List, ast.Tuple, ast.Dict, ast.Set)):
            return (Lit(expr, scope),)
        if isinstance(expr, ast.IfExp):
            known = self.truth(expr.test, scope, depth + 1)
            if known is not None:
                return self.of(expr.body if known else expr.orelse, scope, depth + 1)
            return [*self.of(expr.body, scope, depth + 1), *self.of(expr.orelse, scope, depth + 1)]
        if isinstance(expr, ast.BoolOp) and isinstance(expr.op, ast.Or):
            found = self.of(expr.values[0], scope, depth + 1)
            if found and all(isinstance(v, Const) and not v.value for v in found):
                return self.of(expr.values[-1], scope, depth + 1)
            return found or self.of(expr.values[-1], scope, depth + 1)
        if isinstance(expr, ast.Subscript):
            return self._item(expr, scope, depth)
        if isinstance(expr, (ast.Compare, ast.BoolOp)) or (
            isinstance(expr, ast.UnaryOp) and isinstance(expr.op, ast.Not)
        ):
            known = self.truth(expr, scope, depth + 1)
            return () if known is None else (Const(known),)
        if isinstance(expr, ast.JoinedStr):
            return self._joined(expr, scope, depth)
        if isinstance(expr, ast.BinOp):
            return self._sum(expr, scope, depth)
        if isinstance(expr, ast.UnaryOp) and isinstance(expr.op, ast.USub):
            return [Const(-v.value) for v in self.of(expr.operand, scope, depth + 1) if is_number(v)]  # type: ignore[operator,union-attr]
        if isinstance(expr, (ast.Await, ast.Starred)):
            return self.of(expr.value, scope, depth + 1)
        if isinstance(expr, ast.Lambda):
            return (Func(expr, scope),)
        if isinstance(expr, ast.NamedExpr):
            return self.of(expr.value, scope, depth + 1)
        return ()

    def named(self, name: str, scope: Scope, depth: int = 0) -> Sequence[Value]:
        """What a name is, from its scope outwards."""
        at: Scope | None = scope
        while at is not None:
            if at is scope or not isinstance(at.node, ast.ClassDef):
                found = self._here(name, at, depth)
                if found is not None:
                    return found
            at = at.parent
        for module, level in scope.module.stars:
            local = self.module(module, level, scope)
            if local is not None:
                found = self._here(name, local, depth)
                if found is not None:
                    return found
            elif name in TRAINER_CLASSES or name.endswith(("Config", "Arguments")):
                return (Lib(f"{module}.{name}"),)
        return (Lib(f"builtins.{name}"),)

    def _here(self, name: str, scope: Scope, depth: int) -> Sequence[Value] | None:
        if name in scope.params:
            return self._parameter(name, scope, depth)
        if name in scope.names:
            found: list[Value] = []
            for bound in conditions.possible(self, scope.names[name], scope, depth)[-MAX_VALUES:]:
                if bound.how == "value":
                    found += self.of(bound.expr, scope, depth + 1)
                elif bound.how == "part":
                    found += self._part(bound, scope, depth)
            return found
        if name in scope.functions:
            return (Func(scope.functions[name], scope),)
        if name in scope.classes:
            return (Cls(scope.classes[name], scope),)
        if name in scope.imports:
            return self._imported(*scope.imports[name], scope=scope, depth=depth)
        return None

    def _part(self, bound: Bound, scope: Scope, depth: int) -> list[Value]:
        """What a name is that takes an element of a literal list or tuple."""
        found: list[Value] = []
        for value in self.of(bound.expr, scope, depth + 1):
            if isinstance(value, Args):
                found.append(value)
            elif isinstance(value, Lit) and isinstance(value.expr, (ast.List, ast.Tuple)):
                elements = value.expr.elts
                chosen = elements[:MAX_VALUES] if bound.index is None else elements[bound.index : bound.index + 1]
                found += [each for element in chosen for each in self.of(element, value.scope, depth + 1)]
        return found

    def _parameter(self, name: str, scope: Scope, depth: int) -> Sequence[Value]:
        found: list[Value] = []
        for expr, where in scope.bound.get(name, [])[:MAX_VALUES]:
            found += self.of(expr, where, depth + 1)
        if found:
            return found
        if not found and (path := wellknown.hydra(self, scope)) is not None:
            return (Conf(path),)
        if name in self.options and not scope.bound.get(name) and scope.module.is_main:
            return (Const(literal(self.options[name])),)
        return self.of(scope.params[name], scope.parent or scope, depth + 1) if not scope.bound.get(name) else ()

    def _imported(self, module: str, name: str | None, level: int, scope: Scope, depth: int) -> Sequence[Value]:
        if name is None:
            local = self.module(module, level, scope)
            return (Mod(local, local.source.path),) if local is not None else (Lib(module),)
        local = self.module(module, level, scope) if module or not level else None
        if local is not None:
            found = self._here(name, local, depth + 1)
            if found is not None:
                return found
        inner = self.module(f"{module}.{name}" if module else name, level, scope)
        if inner is not None:
            return (Mod(inner, inner.source.path),)
        return () if local is not None or level else (Lib(f"{module}.{name}"),)

    def module(self, name: str, level: int, scope: Scope) -> Scope | None:
        """The scope of a local module; None: it is no file of this code."""
        folder = posixpath.dirname(scope.source.path)
        for _ in range(level - 1):
            folder = posixpath.dirname(folder)
        parts = [part for part in name.split(".") if part]
        for base in [folder] if level else list(dict.fromkeys([folder, "", "src", "code"])):
            stem = posixpath.join(base, *parts) if parts else base
            for path in (f"{stem}.py", posixpath.join(stem, "__init__.py")):
                source = self.sources.get(path)
                if source is not None and source.tree is not None and source is not scope.source:
                    return self.scopes.module(source)
        return None

    # -- attributes, calls, items ----------------------------------------------------------------------------------

    def _attribute(self, expr: ast.Attribute, scope: Scope, depth: int) -> Sequence[Value]:
        if isinstance(expr.value, ast.Name):
            own = self._own(expr.value.id, expr.attr, scope, depth)
            if own is not None:
                return own
        found: list[Value] = []
        for base in self.of(expr.value, scope, depth + 1):
            found += self.attribute(base, expr.attr, expr.value, depth + 1)
        return found

    def _own(self, name: str, attr: str, scope: Scope, depth: int) -> Sequence[Value] | None:
        """`self.x` of the class around, or `cfg.x` that was assigned in this scope."""
        owner = scope.owner
        if name in ("self", "cls") and owner is not None:
            return self.of_class(Cls(owner.node, owner.parent or owner), attr, None, depth)  # type: ignore[arg-type]
        bindings = scope.names.get(f"{name}.{attr}") or scope.module.names.get(f"{name}.{attr}")
        if bindings:
            return [v for b in bindings[-MAX_VALUES:] if b.how == "value" for v in self.of(b.expr, scope, depth + 1)]
        return None

    def attribute(self, base: Value, attr: str, me: ast.expr | None, depth: int) -> Sequence[Value]:
        """`base.attr`."""
        if isinstance(base, Lib):
            name = f"{base.name}.{attr}"
            return (Const("python"),) if name == "sys.executable" else (Lib(name),)
        if isinstance(base, Mod):
            return self._here(attr, base.scope, depth) or ()
        if isinstance(base, Args):
            return self.option(attr, depth)
        if isinstance(base, Conf):
            return self.configured(base, attr)
        if isinstance(base, Cls):
            return self.of_class(base, attr, None, depth)
        if isinstance(base, Func):
            return (base,) if attr in ("remote", "fn", "spawn", "main") else ()
        if isinstance(base, Made):
            if isinstance(base.of, Cls):
                given = keyword(base.call, attr)
                if given is not None:
                    return self.of(given, base.scope, depth + 1)
                return self.of_class(base.of, attr, me, depth)
            given = keyword(base.call, attr)
            if given is not None:
                return self.of(given, base.scope, depth + 1)
            return (Lib(f"{base.of.name}().{attr}"),)
        return ()

    def of_class(self, cls: Cls, attr: str, me: ast.expr | None, depth: int) -> Sequence[Value]:
        """A method, or what is assigned to an attribute, of a local class or its local parents."""
        for each in self.lineage(cls, depth):
            scope = self.scopes.class_(each.node, each.parent)
            if attr in scope.functions:
                return (Func(scope.functions[attr], scope, me),)
            for method in scope.functions.values():
                inner = self.scopes.function(method, scope)
                bindings = inner.names.get(f"self.{attr}", [])
                found = [v for b in bindings if b.how == "value" for v in self.of(b.expr, inner, depth + 1)]
                if found:
                    return found
            if attr in scope.names:
                return self.option(attr, depth) if attr in self.options else (self._here(attr, scope, depth) or ())
        return ()

    def lineage(self, cls: Cls, depth: int = 0) -> list[Cls]:
        """A class and its local parents."""
        found = [cls]
        for each in found:
            for base in each.node.bases[:6]:
                for value in self.of(base, each.parent, depth + 1):
                    if isinstance(value, Cls) and value not in found and len(found) < 12:
                        found.append(value)
        return found

    def library_bases(self, cls: Cls) -> list[Lib]:
        """The library classes that a local class descends from."""
        found = []
        for each in self.lineage(cls):
            for base in each.node.bases[:6]:
                found += [v for v in self.of(base, each.parent) if isinstance(v, Lib)]
        return found

    def _call(self, expr: ast.Call, scope: Scope, depth: int) -> Sequence[Value]:
        special = wellknown.call(self, expr, scope, depth)
        if special is not None:
            return special
        found: list[Value] = []
        for target in self.of(expr.func, scope, depth + 1):
            if isinstance(target, (Lib, Cls)):
                found.append(Made(target, expr, scope))
            elif isinstance(target, Func):
                inner = self.scopes.function(target.node, target.parent)
                for returned in inner.returns[:MAX_VALUES]:
                    found += self.of(returned, inner, depth + 1)
        return found

    def _item(self, expr: ast.Subscript, scope: Scope, depth: int) -> Sequence[Value]:
        if of_environ(expr) and (name := self.text(expr.slice, scope, depth + 1)):
            return (Const(self.env[name]),) if name in self.env else ()
        if isinstance(expr.value, ast.Attribute) and expr.value.attr == "argv":
            at = expr.slice.value if isinstance(expr.slice, ast.Constant) else None
            if isinstance(at, int) and 0 < at <= len(self.positional) and is_known(self.positional[at - 1]):
                return (Const(self.positional[at - 1]),)
            return ()
        return self.item_of(expr.value, expr.slice, scope, depth)

    def item_of(self, base: ast.expr, key: ast.expr, scope: Scope, depth: int) -> Sequence[Value]:
        names = [v.value for v in self.of(key, scope, depth + 1) if isinstance(v, Const)]
        found: list[Value] = []
        for value in self.of(base, scope, depth + 1):
            if isinstance(value, Conf) and names:
                found += self.configured(value, str(names[0]))
            elif isinstance(value, Args) and names:
                found += self.option(str(names[0]), depth)
            elif isinstance(value, Lit):
                found += elements.of_literal(self, value, names, depth)
            elif isinstance(value, Made) and isinstance(value.of, Lib) and value.of.last == "dict" and names:
                given = keyword(value.call, str(names[0]))
                found += self.of(given, value.scope, depth + 1) if given is not None else ()
        return found

    # -- constants -------------------------------------------------------------------------------------------------

    def _joined(self, expr: ast.JoinedStr, scope: Scope, depth: int) -> Sequence[Value]:
        parts = []
        for part in expr.values[:40]:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            known = self.text(inner, scope, depth + 1)
            parts.append("?" if known is None else known)
        return (Const("".join(parts)[:MAX_CONST_CHARS]),)

    def _sum(self, expr: ast.BinOp, scope: Scope, depth: int) -> Sequence[Value]:
        if isinstance(expr.op, ast.BitOr):  # d1 | d2
            return [*self.of(expr.left, scope, depth + 1), *self.of(expr.right, scope, depth + 1)]
        left = [v for v in self.of(expr.left, scope, depth + 1) if isinstance(v, Const)]
        right = [v for v in self.of(expr.right, scope, depth + 1) if isinstance(v, Const)]
        if len(left) != 1 or len(right) != 1:
            return ()
        a, b = left[0].value, right[0].value
        if isinstance(a, str) and isinstance(b, str) and isinstance(expr.op, (ast.Add, ast.Div)):
            return (Const((a + b if isinstance(expr.op, ast.Add) else f"{a}/{b}")[:MAX_CONST_CHARS]),)
        compute = ARITHMETIC.get(type(expr.op))
        if compute is None or not (is_number(left[0]) and is_number(right[0])):
            return ()
        try:
            value = compute(float(a), float(b))  # type: ignore[arg-type]
        except (ArithmeticError, ValueError):
            return ()
        whole = isinstance(a, int) and isinstance(b, int) and not isinstance(expr.op, ast.Div) and abs(value) < 2**53
        return (Const(int(value) if whole else value),)

    def text(self, expr: ast.expr | None, scope: Scope, depth: int = 0) -> str | None:
        """The one string or number that an expression is."""
        found = {str(v.value) for v in self.of(expr, scope, depth) if isinstance(v, Const) and v.value is not None}
        return found.pop() if len(found) == 1 else None

    def option(self, name: str, depth: int = 0) -> Sequence[Value]:
        """A command-line option: as given, else its declared default."""
        if name in self.options:
            return (Const(literal(self.options[name])),) if is_known(self.options[name]) else ()
        if self._declared is None or self._declared[0] != len(self.scopes.modules):
            self._declared = len(self.scopes.modules), declarations(self.scopes.modules)
        declared = self._declared[1].get(name)
        if declared is None:
            return ()
        if declared.choices:
            chosen = [expr for word, expr in declared.choices if word in self.positional]
            exprs = chosen or [expr for _, expr in declared.choices]
            return [v for expr in exprs[:MAX_VALUES] for v in self.of(expr, declared.scope, depth + 1)]
        told = declared.told(self.options, self.positional)
        if told is not None:
            return (Const(literal(told)),) if is_known(told) else ()
        if self.is_open or declared.default is None:
            return ()
        return self.of(declared.default, declared.scope, depth + 1)

    def configured(self, conf: Conf, name: str) -> Sequence[Value]:
        known = self._configs.get(conf.path)
        if known is None:
            known = self._configs[conf.path] = configs.items(self.sources[conf.path].text, conf.path)
        key = f"{conf.prefix}.{name}" if conf.prefix else name
        exact = [item for item in known if item.key == key or (conf.path.endswith(".json") and item.name == name)]
        if exact:
            return (Const(literal(exact[-1].value)),)
        return (Conf(conf.path, key),) if any(item.key.startswith(key + ".") for item in known) else ()

    def configuration(self, conf: Conf) -> list[configs.ConfigItem]:
        """What stands in a loaded configuration, below its key."""
        self.configured(conf, "")
        below = f"{conf.prefix}." if conf.prefix else ""
        return [item for item in self._configs[conf.path] if item.key.startswith(below)]

    def truth(self, test: ast.expr, scope: Scope, depth: int = 0) -> bool | None:
        """Whether a condition holds; None: it can't be told."""
        return conditions.truth(self, test, scope, depth)
