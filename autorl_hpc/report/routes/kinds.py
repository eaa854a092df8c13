"""The kinds of things that an expression may be."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from autorl_hpc.report.routes.scopes import Function, Scope


@dataclass(frozen=True)
class Lib:
    """A name of a library, or of Python itself."""

    name: str

    @property
    def last(self) -> str:
        return self.name.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Func:
    node: Function
    parent: Scope = field(hash=False, compare=False)
    me: ast.expr | None = field(default=None, hash=False, compare=False)
    """The object of a bound method."""


@dataclass(frozen=True)
class Cls:
    node: ast.ClassDef
    parent: Scope = field(hash=False, compare=False)


@dataclass(frozen=True)
class Made:
    """What a call of `of` returned."""

    of: Lib | Cls
    call: ast.Call
    scope: Scope = field(hash=False, compare=False)


@dataclass(frozen=True)
class Const:
    value: str | int | float | bool | None


@dataclass(frozen=True)
class Lit:
    """A literal list, tuple, set or dict."""

    expr: ast.expr
    scope: Scope = field(hash=False, compare=False)


@dataclass(frozen=True)
class Args:
    """Parsed command-line options."""


@dataclass(frozen=True)
class Conf:
    """A configuration file that was loaded, below a key."""

    path: str
    prefix: str = ""


@dataclass(frozen=True)
class Mod:
    """A local module."""

    scope: Scope = field(hash=False, compare=False)
    path: str = ""


Value = Lib | Func | Cls | Made | Const | Lit | Args | Conf | Mod
