"""What happens when a script is followed: trainings, samplings, copies, averages, files read and written."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Literal

from autorl_hpc.report.routes.scopes import Scope
from autorl_hpc.report.routes.shell import Arms
from autorl_hpc.states import Route

What = Literal["train", "no-policy", "copy", "save", "average", "change", "generate", "write", "opaque", "made", "zero"]
"""made: a trainer that is never run; zero: a training of no step or with learning rate 0; opaque: code that can't be read;
no-policy: a reward model's training."""


@dataclass
class Event:
    """One of them, in the order in which the code comes to it."""

    what: What
    path: str
    line: int
    says: str
    """The source line."""
    route: Route = Route.UNKNOWN
    why: str = ""
    arms: Arms = ()
    reads: frozenset[str] = frozenset()
    """Base names of the paths that flow into it: data, models."""
    writes: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    """Models that it samples from or trains, as far as they are constant."""
    kept: bool = False
    """Samples were kept by a condition on the answer or its reward."""
    sampled: bool = False
    """Model outputs flow into it."""
    elsewhere: bool = False
    """They come from another model's service."""
    sure: float = 1.0
    script: int = 0
    """Number of the script run in which it happens."""
    root: int = 0
    """Number of the command, or script that nothing else runs, through which the code came here."""
    objects: frozenset[int] = frozenset()
    """Calls that load the model that is trained: two trainings of one object follow each other."""
    tags: set[str] = field(default_factory=set)


def event(what: What, call: ast.AST, scope: Scope, arms: Arms, **more: object) -> Event:
    """An event at a place in the code."""
    line = getattr(call, "lineno", 0)
    return Event(what, scope.source.path, line, scope.source.line(line), arms=arms, **more)  # type: ignore[arg-type]


def exclusive(one: Arms, other: Arms) -> bool:
    """Whether two things stand in different branches of one question."""
    mine = dict(one)
    return any(question in mine and mine[question] != arm for question, arm in other)
