"""What is said of routes: planned by code, executed by trainers. Plain values, which a report turns into its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from autorl_hpc.report.story_records import EvidenceLine
from autorl_hpc.states import Route


class Commanded(Protocol):
    """A command line that was really seen: a ProcessSeen, or a tool call of a trace that was given one."""

    @property
    def command(self) -> str | None: ...

    @property
    def elapsed_s(self) -> float: ...


@dataclass(frozen=True)
class CommandSeen:
    """The least that is a Commanded."""

    command: str | None
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class Alternative:
    """Another route that the same code may take."""

    route: Route
    why: str


@dataclass(frozen=True)
class Planned:
    """The route that code plans. `confidence` is an ordered scale from 0 to 1 and no probability."""

    route: Route
    evidence: tuple[EvidenceLine, ...] = ()
    confidence: float = 0.0
    alternatives: tuple[Alternative, ...] = ()
    scripts: tuple[str, ...] = field(default=())
    """Files that the finding rests on, in the order in which they run."""
    notes: tuple[str, ...] = ()
    """What was not read, or was read in part only."""


@dataclass(frozen=True)
class Executed:
    """The route that was really taken."""

    route: Route
    evidence: tuple[EvidenceLine, ...] = ()
    steps: int = 0
    """Training steps logged."""
    notes: tuple[str, ...] = ()
    disputed: bool = False
    """The logs tell another kind of training than code that is sure of its own."""


TRAINER, OWN_LOOP = 0.95, 0.8
"""Confidence in what was found; less where a condition is open."""


@dataclass
class Training:
    """A training that a script makes."""

    route: Route | None
    why: str
    path: str
    line: int
    sure: bool = True
    confidence: float = TRAINER
    model: object = None
    """Literal name of the model that it starts from."""
    reads: set[str] = field(default_factory=set)
