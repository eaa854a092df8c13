"""Finds and loads agent folders: agent.yaml (or AutoRL-Bench's config.yaml) and start.sh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from autorl_hpc.agents.file import RESTART, AgentFile
from autorl_hpc.agents.reference import CONFIG, read_config
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import beside
from autorl_hpc.files.hashing import tree_sha256, walk_files
from autorl_hpc.files.share import share
from autorl_hpc.files.yaml import read_yaml
from autorl_hpc.records.base import parse_record

DEFINITION = "agent.yaml"


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
        beside = (
            next((f for f in (agents / name, agents.parent / name) if f.is_dir()), agents / name)
            for name in self.file.include
        )
        return [self.folder, *beside]

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
    return [*beside.named_by(PATH_VARIABLE), share("templates") / "agents"]


def put_first(folders: Sequence[Path]) -> None:
    """Looks into these folders before all others, in this process and those that it starts.

    Raises:
        AutorlError: one is no folder.
    """
    beside.put_first(PATH_VARIABLE, folders, "agent")


def agent_names(folders: Sequence[Path] | None = None) -> list[str]:
    """Names of all agents that can be found."""
    places = agent_folders() if folders is None else folders
    return sorted({path.parent.name for name in (DEFINITION, CONFIG) for f in places for path in f.glob(f"*/{name}")})


def _definition(folder: Path) -> Path | None:
    """The file that makes a folder an agent's; None: it is none."""
    return next((folder / name for name in (DEFINITION, CONFIG) if (folder / name).is_file()), None)


def load_agent(name: str, folders: Sequence[Path] | None = None) -> Agent:
    """The agent of that name, looked for in `folders` (default: `agent_folders()`).

    Raises:
        AutorlError: there is none, or its folder is incomplete.
    """
    places = agent_folders() if folders is None else folders
    path = next(filter(None, (_definition(place / name) for place in places)), None)
    if path is None:
        near = get_close_matches(name, agent_names(), n=1)
        raise AutorlError(
            f"there is no agent `{name}`" + (f"; did you mean `{near[0]}`?" if near else ""),
            where=share("templates") / "agents",
            next_step=f"choose one of: {', '.join(agent_names())}; or name the folder of yours by --agents or ${PATH_VARIABLE}",
        )
    file = read_config(path) if path.name == CONFIG else parse_record(AgentFile, read_yaml(path), path)
    agent = Agent(path.parent, file)
    _look_whole(agent)
    return agent


def _look_whole(agent: Agent) -> None:
    """Everything that the definition names is there, and is what gets frozen."""
    if agent.name != agent.folder.name:
        raise AutorlError(
            f"field `name`: agent {agent.name} lies in a folder called {agent.folder.name}",
            where=agent.folder / DEFINITION,
            next_step="give both the same name",
        )
    for part in agent.folders():
        if not part.is_dir():
            raise AutorlError(
                f"agent {agent.name} lacks {part.name}/", where=part, next_step="complete the agent's folder"
            )
        for entry in sorted(part.rglob("*")):
            if entry.is_symlink():
                what = f"agent {agent.name}: {entry.name} is a link, which is not frozen"
                raise AutorlError(what, where=entry, next_step="copy the file in its place")
    there = set(walk_files(agent.folder))
    for script in (agent.script(again=False), agent.script(again=True), agent.file.check):
        if script is not None and script not in there:
            what = f"agent {agent.name} lacks {script}"
            raise AutorlError(what, where=agent.folder / script, next_step="complete the agent's folder")
