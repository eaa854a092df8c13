"""Finds and loads agent folders: agent.yaml and start.sh."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.hashing import tree_sha256, walk_files
from autorl_hpc.files.share import share
from autorl_hpc.files.yaml import read_yaml
from autorl_hpc.records.base import Record, parse_record
from autorl_hpc.records.names import Name

RESTART = "restart"
TraceFormat = Literal["claude-code", "codex", "gemini-cli", "opencode", "openhands", "mini"]


class AgentFile(Record):
    """agent.yaml."""

    name: Name
    description: str
    start: str = "start.sh"
    include: tuple[Name, ...] = ()
    needs: tuple[str, ...] = ()
    secrets: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]{0,63}$")], ...] = Field(
        (), description="Variables of the launching environment that the agent gets, API keys for one."
    )
    resume: str = Field(
        "restart",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="What runs after an interruption: `restart`, the start script again, or another script beside it.",
    )
    trace: TraceFormat | None = Field(
        None, description="In which format it tells what it does; else its lines are recognised. See docs/traces.md."
    )
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
        """The agent's folder and those it includes, which lie beside it or beside the folder of agents."""
        agents = self.folder.parent
        return [
            self.folder,
            *(
                next((f for f in (agents / name, agents.parent / name) if f.is_dir()), agents / name)
                for name in self.file.include
            ),
        ]

    def script(self, *, again: bool) -> str:
        """The script that is run; `again`: the agent was interrupted before."""
        return self.file.resume if again and self.file.resume != RESTART else self.file.start

    def hash(self) -> str:
        """Hash over all files that are laid into the workspace."""
        import hashlib

        return hashlib.sha256("".join(tree_sha256(folder) for folder in self.folders()).encode()).hexdigest()


PATH_VARIABLE = "AUTORL_AGENTS_PATH"


def agent_folders() -> list[Path]:
    """Folders that hold agent folders: those of $AUTORL_AGENTS_PATH, then the built-in one."""
    extra = [Path(part).absolute() for part in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if part]
    return [*extra, share("templates") / "agents"]


def agent_names() -> list[str]:
    """Names of all agents that can be found."""
    return sorted({path.parent.name for folder in agent_folders() for path in folder.glob("*/agent.yaml")})


def load_agent(name: str, folders: Sequence[Path] | None = None) -> Agent:
    """The agent of that name, looked for in `folders` (default: `agent_folders()`).

    Raises:
        AutorlError: there is none, or its folder is incomplete.
    """
    folder = next(
        (f / name for f in (agent_folders() if folders is None else folders) if (f / name / "agent.yaml").is_file()),
        None,
    )
    if folder is None:
        near = get_close_matches(name, agent_names(), n=1)
        raise AutorlError(
            f"there is no agent `{name}`" + (f"; did you mean `{near[0]}`?" if near else ""),
            where=share("templates") / "agents",
            next_step=f"choose one of: {', '.join(agent_names())}; or name the folder of yours in ${PATH_VARIABLE}",
        )
    path = folder / "agent.yaml"
    agent = Agent(folder, parse_record(AgentFile, read_yaml(path), path))
    for part in agent.folders():
        if not part.is_dir():
            raise AutorlError(f"agent {name} lacks {part.name}/", where=part, next_step="complete the agent's folder")
        for entry in sorted(part.rglob("*")):
            if entry.is_symlink():
                what = f"agent {name}: {entry.name} is a link, which is not frozen"
                raise AutorlError(what, where=entry, next_step="copy the file in its place")
    for script in (agent.script(again=False), agent.script(again=True)):
        if script not in walk_files(folder):
            what = f"agent {name} lacks {script}"
            raise AutorlError(what, where=folder / script, next_step="complete the agent's folder")
    return agent
