"""Result types of route detection: `Planned` by code, `Executed` by trainers, `Training` in a script, `Commanded` lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from autorl_hpc.report.routes.script import CodePlace, Script
from autorl_hpc.report.story_records import EvidenceLine
from autorl_hpc.states import Route


class Commanded(Protocol):
    """An observed command line: a ProcessSeen, or a tool call in a trace."""

    @property
    def command(self) -> str | None: ...

    @property
    def elapsed_s(self) -> float: ...


@dataclass(frozen=True)
class Alternative:
    """Another route that the code may take."""

    route: Route
    why: str


@dataclass(frozen=True)
class Planned:
    """The route that code plans. `confidence` is an ordered scale from 0 to 1, not a probability."""

    route: Route
    evidence: tuple[EvidenceLine, ...] = ()
    confidence: float = 0.0
    alternatives: tuple[Alternative, ...] = ()
    scripts: tuple[str, ...] = ()
    """Files that the finding is based on, in the order in which they run."""


@dataclass(frozen=True)
class Executed:
    """The route that was executed."""

    route: Route
    evidence: tuple[EvidenceLine, ...] = ()
    disputed: bool = False
    """Whether the logs show another kind of training than confident code analysis."""


TRAINER, OWN_LOOP = 0.95, 0.8
"""Confidence in a finding; lower under an open condition."""


@dataclass
class Training:
    """A training in a script, or by a trainer's program."""

    route: Route | None
    """None: it trains no policy."""
    why: str
    path: str
    line: int
    sure: bool = True
    confidence: float = TRAINER
    model: object = None
    """Literal name of the model that training starts from."""
    script: Script | None = None
    data: Sequence[CodePlace] = ()
    """What the rows come from."""
