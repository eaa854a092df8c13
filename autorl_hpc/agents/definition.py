"""Agent folders: the fields of agent.yaml, AutoRL-Bench's config.yaml, finding and loading agents, and `attach` to a shell."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, StringConstraints

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import layout, reading
from autorl_hpc.files.checkpoint import tree_sha256, walk_files
from autorl_hpc.files.layout import RunDir, share
from autorl_hpc.files.reading import read_yaml
from autorl_hpc.records.base import Name, Record, Table, parse_record

RESTART = "restart"
UNTESTED = "untested"
TraceFormat = Literal["claude-code", "codex", "gemini-cli", "opencode", "openhands", "mini"]
Dialect = Literal["openai-chat", "openai-responses", "anthropic", "gemini", "any"]
"""The API by which a program calls its driver: /v1/chat/completions, /v1/responses, /v1/messages,
/v1beta/models/M:generateContent; `any` if the definition does not say."""

ScriptName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
ScriptPath = Annotated[
    str, StringConstraints(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63}/){0,4}[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
]
"""A path below the agent's folder; no part begins with a dot."""

Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
Words = Annotated[str, StringConstraints(max_length=1000, pattern=r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*$")]
"""Terminals show them, and must not be steered by them."""


def _text(value: Any) -> Any:
    """Convert YAML's numbers and booleans to text as in a shell."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, (int, float)) else value


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Value = Annotated[str, BeforeValidator(_text), StringConstraints(max_length=10_000, pattern=r"^[^\x00]*$")]


class AgentDriver(Table):
    """How an agent uses its driver."""

    dialect: Dialect = Field(description="What its program speaks; the driver must answer it.")
    required: bool = Field(True, description="False: it runs without a driver too.")
    set_by: Words = Field("", description="How `start` tells the program its driver, in words: variables, a file.")


class AgentFile(Record):
    """agent.yaml."""

    name: Name
    description: Words
    start: ScriptPath = "start.sh"
    resume: ScriptName = Field(
        RESTART,
        description="What runs after an interruption or for a reprompt: `restart`, the start script again, or another script "
        "beside it.",
    )
    include: tuple[Name, ...] = ()
    needs: tuple[Words, ...] = ()
    secrets: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]{0,63}$")], ...] = Field(
        (), description="Variables of the launching environment that the agent gets, API keys for one."
    )
    env: dict[Variable, Value] = Field(
        default_factory=dict, description="Further variables of its process. The suite's own go before them."
    )
    prompt: bool = Field(
        False, description="The suite writes `prompt.md` into the workspace and gives it to `start` on standard input."
    )
    driver: Annotated[AgentDriver | None, BeforeValidator(lambda value: None if value == "none" else value)] = Field(
        None, description="How it uses its driver; null or `none`: it calls none."
    )
    program: Annotated[tuple[Annotated[Words, Field(min_length=1)], ...], BeforeValidator(_one_or_more)] = Field(
        (), description="The program and the arguments that make it tell its version; empty: it needs none."
    )
    versions: Annotated[tuple[Words, ...], BeforeValidator(_one_or_more)] = Field(
        (UNTESTED,),
        validation_alias=AliasChoices("versions", "version_tested"),
        min_length=1,
        description="Versions that are known to work, or `untested`. May be written `version_tested`.",
    )
    check: ScriptName | None = Field(
        None,
        description="A script beside `start` that `doctor` and `launch` run where they are, in a sandbox: exit code 0, or its words are shown.",
    )
    install: Words = Field("", description="How its program is installed, in words.")
    trace: TraceFormat | None = Field(
        None, description="In which format it tells what it does; else its lines are recognised. See docs/traces.md."
    )


# --- AutoRL-Bench's agent folders (config.yaml and start.sh), which load unchanged

CONFIG = "config.yaml"


def read_config(path: Path) -> AgentFile:
    """Read a config.yaml as AutoRL-Bench's own registry does: only `start`, `env_vars` and `description`; an agent is identified by its
    folder. Raises AutorlError if a field has another type."""
    value = read_yaml(path) or {}  # an empty file is null
    if not isinstance(value, dict):
        advice = "compare it with another agent's"
        raise AutorlError("config.yaml is not a table of fields", where=path, next_step=advice)
    start, env = value.get("start") or "start.sh", value.get("env_vars") or {}  # a bare `env_vars:` is null
    known: dict[str, Any] = {
        "name": path.parent.name,
        "description": str(value.get("description") or value.get("name") or path.parent.name),
        "start": start.removeprefix("./") if isinstance(start, str) else start,
        "env": {name: "" if each is None else each for name, each in env.items()} if isinstance(env, dict) else env,
        "driver": {"dialect": "any", "required": False, "set_by": "its start script"},
    }
    return parse_record(AgentFile, known, path)


# --- finding and loading agent folders

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
        """Return the agent's folder and the included ones, which are beside it, or templates of the suite."""
        agents, found = self.folder.parent, [self.folder]
        for name in self.file.include:
            beside = (agents / name, share("templates") / name)
            found.append(next(filter(Path.is_dir, beside), agents / name))
        return found

    def asks_for(self) -> list[str]:
        """Return in words what the definition asks for, beyond running its start script inside the sandbox."""
        file = self.file
        tried = " and ".join(filter(None, (" ".join(file.program), file.check)))
        found = {
            f"gets {', '.join(file.secrets)} of your environment": file.secrets,
            f"sets {', '.join(file.env)}": file.env,
            f"brings {', '.join(file.include)} along": file.include,
            f"calls a driver ({file.driver.dialect if file.driver else ''})": file.driver,
            f"runs {tried} on this host, in a sandbox, when it is looked at": tried,
        }
        return [words for words, there in found.items() if there]

    def script(self, *, again: bool) -> str:
        """Return the script to run; `again` if the agent was interrupted before."""
        return self.file.resume if again and self.file.resume != RESTART else self.file.start

    def hash(self) -> str:
        """Return a hash over all files that are copied into the workspace."""
        import hashlib

        return hashlib.sha256("".join(tree_sha256(folder) for folder in self.folders()).encode()).hexdigest()


PATH_VARIABLE = "AUTORL_AGENTS_PATH"


def agent_folders() -> list[Path]:
    """Return the folders that hold agent folders: those of $AUTORL_AGENTS_PATH, then the built-in one."""
    return [*layout.named_by(PATH_VARIABLE), share("templates") / "agents"]


def put_first(folders: Sequence[Path]) -> None:
    """Search these folders first, in this process and its children. Raises AutorlError if one is not a folder."""
    layout.put_first(PATH_VARIABLE, folders, "agent")


def agent_names(folders: Sequence[Path] | None = None) -> list[str]:
    places = agent_folders() if folders is None else folders
    return sorted({path.parent.name for name in (DEFINITION, CONFIG) for f in places for path in f.glob(f"*/{name}")})


def load_agent(name: str, folders: Sequence[Path] | None = None) -> Agent:
    """Load the agent of that name from `folders` (default: `agent_folders()`). Raises AutorlError if there is none, or its folder
    is incomplete."""
    places = agent_folders() if folders is None else folders
    files = (place / name / file for place in places for file in (DEFINITION, CONFIG))
    path = next(filter(Path.is_file, files), None)
    if path is None:
        advice = f"choose one of: {', '.join(agent_names())}; or name your own folder with --agents or ${PATH_VARIABLE}"
        near = get_close_matches(name, agent_names(), n=1)
        what = f"there is no agent `{name}`" + (f"; did you mean `{near[0]}`?" if near else "")
        raise AutorlError(what, where=share("templates") / "agents", next_step=advice)
    if path.is_symlink():  # before it is read: messages quote what can't be parsed
        what = f"agent {name}: {path.name} is a link, which is not frozen"
        raise AutorlError(what, where=path, next_step="copy the file in its place")
    file = read_config(path) if path.name == CONFIG else parse_record(AgentFile, read_yaml(path), path)
    agent = Agent(path.parent, file)
    _check_complete(agent)
    return agent


def _check_complete(agent: Agent) -> None:
    """Check that every file in the definition exists and can be frozen."""
    complete, copy = "complete the agent's folder", "copy the file in its place"
    if agent.name != agent.folder.name:
        what = f"field `name`: agent {agent.name} is in a folder named {agent.folder.name}"
        raise AutorlError(what, where=agent.folder / DEFINITION, next_step="give both the same name")
    for part in agent.folders():
        if part.is_symlink() and part != agent.folder:
            what = f"field `include`: {part.name} is a link; what is included must be in the folder of agents itself"
            raise AutorlError(what, where=part, next_step="copy the folder in its place")
        if not part.is_dir():
            raise AutorlError(f"agent {agent.name} lacks {part.name}/", where=part, next_step=complete)
        if links := sorted(filter(Path.is_symlink, part.rglob("*"))):
            what = f"agent {agent.name}: {links[0].name} is a link, which is not frozen"
            raise AutorlError(what, where=links[0], next_step=copy)
    there = set(walk_files(agent.folder))
    for script in (agent.script(again=False), agent.script(again=True), agent.file.check):
        if script is not None and script not in there:
            raise AutorlError(f"agent {agent.name} lacks {script}", where=agent.folder / script, next_step=complete)


# --- `attach`: connect this terminal to the shell of agent `shell` in its sandbox


def attach_to(run: RunDir) -> None:
    """Connect until the shell exits or the user detaches. Raises AutorlError if it has not begun, is over, or is on another
    node."""
    terminal = runpy.run_path(str(share("templates") / "agents" / "shell" / "terminal.py"))
    try:
        workspace = json.loads(reading.read_bytes(run.workspace_link))["workspace"]
        terminal["attach"](workspace)
    except (OSError, ValueError, KeyError) as error:
        advice = "see with `autorl-hpc status` that the run is under way; a shell is reached on its own node alone: srun --overlap --jobid NUMBER --pty autorl-hpc attach ..."
        what = f"no shell answers: {error}"
        raise AutorlError(what, where=run.path, next_step=advice, exit_code=Exit.FAILED) from None
