"""Finds and loads agent folders: agent.yaml and start.sh."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.hashing import tree_sha256
from autorl_hpc.files.share import share
from autorl_hpc.files.yaml import read_yaml
from autorl_hpc.records.base import Record, parse_record
from autorl_hpc.records.names import Name


class AgentFile(Record):
    """agent.yaml."""

    name: Name
    description: str
    start: str = "start.sh"
    include: tuple[Name, ...] = ()
    needs: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    resume: Literal["restart"] = "restart"
    version_tested: str | None = None


@dataclass(frozen=True)
class Agent:
    """A loaded agent folder."""

    folder: Path
    file: AgentFile

    @property
    def name(self) -> str:
        return self.file.name

    def folders(self) -> list[Path]:
        """The agent's folder and those it includes."""
        return [self.folder, *(self.folder.parent / name for name in self.file.include)]

    def hash(self) -> str:
        """Hash over all files that are laid into the workspace."""
        import hashlib

        return hashlib.sha256("".join(tree_sha256(folder) for folder in self.folders()).encode()).hexdigest()


def agent_names() -> list[str]:
    """Names of all agents that can be found."""
    return sorted(path.parent.name for path in (share("templates") / "agents").glob("*/agent.yaml"))


def load_agent(name: str) -> Agent:
    """The agent of that name.

    Raises:
        AutorlError: there is none, or its folder is incomplete.
    """
    folder = share("templates") / "agents" / name
    path = folder / "agent.yaml"
    if not path.is_file():
        near = get_close_matches(name, agent_names(), n=1)
        raise AutorlError(
            f"there is no agent `{name}`" + (f"; did you mean `{near[0]}`?" if near else ""),
            where=folder.parent,
            next_step=f"choose one of: {', '.join(agent_names())}",
        )
    agent = Agent(folder, parse_record(AgentFile, read_yaml(path), path))
    for needed in (folder / agent.file.start, *agent.folders()):
        if not needed.exists():
            raise AutorlError(
                f"agent {name} lacks {needed.name}", where=needed, next_step="complete the agent's folder"
            )
    return agent
