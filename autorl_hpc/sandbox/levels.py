"""The levels, strongest first, behind one small Protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autorl_hpc.sandbox import apptainer, bwrap
from autorl_hpc.sandbox.bycalls import Landlock, Namespaces
from autorl_hpc.sandbox.plan import Plan
from autorl_hpc.states import Network, SandboxLevel


class Level(Protocol):
    """One way to keep an agent to its plan."""

    @property
    def name(self) -> SandboxLevel: ...

    def why_not(self, plan: Plan) -> str | None:
        """Why it can't even be tried on this node; None: it can, which doesn't say that it works."""
        ...

    def known_holes(self, plan: Plan) -> tuple[str, ...]:
        """What it does not stop by its very nature, beside what is found by trying."""
        ...

    def argv(self, plan: Plan, command: Sequence[str]) -> list[str]:
        """The command that runs `command` inside. No secret stands in it: the environment is handed on as it is."""
        ...


class Nothing:
    """Level `none`: the agent is the user."""

    name = SandboxLevel.NONE

    def why_not(self, plan: Plan) -> str | None:
        """None, unless the network is to be closed."""
        return None if plan.network is Network.OPEN else "nothing closes the network"

    def known_holes(self, plan: Plan) -> tuple[str, ...]:
        """Everything."""
        return ("everything that the user may do",)

    def argv(self, plan: Plan, command: Sequence[str]) -> list[str]:
        """The command itself."""
        return list(command)


LEVELS: tuple[Level, ...] = (apptainer, bwrap, Namespaces(), Landlock(), Nothing())


def level(name: SandboxLevel) -> Level:
    """The level of that name."""
    return next(each for each in LEVELS if each.name is name)
