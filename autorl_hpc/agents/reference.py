"""Agent folders of AutoRL-Bench (config.yaml and start.sh), which load unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autorl_hpc.agents.file import AgentFile
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.yaml import read_yaml
from autorl_hpc.records.base import parse_record

CONFIG = "config.yaml"


def read_config(path: Path) -> AgentFile:
    """What a config.yaml says, as AutoRL-Bench's own registry reads it: `start`, `env_vars`, `description`, and nothing else.

    There an agent is called by its folder; `name` is a title. It runs with a driver or without one: the file doesn't tell.

    Raises:
        AutorlError: it is no table, or a field has another type.
    """
    value = read_yaml(path)
    if value is None:  # an empty file
        value = {}
    if not isinstance(value, dict):
        raise AutorlError("config.yaml is no table of fields", where=path, next_step="compare it with another agent's")
    title, description = (str(value.get(name) or "") for name in ("name", "description"))
    known: dict[str, Any] = {
        "name": path.parent.name,
        "description": description or title or path.parent.name,
        "start": _plain(value.get("start") or "start.sh"),
        "env": _texts(value.get("env_vars") or {}),  # a bare `env_vars:` is null
        "driver": {"dialect": "any", "required": False, "set_by": "its start script"},
    }
    return parse_record(AgentFile, known, path)


def _plain(start: Any) -> Any:
    """Without the `./` that shells want."""
    return start.removeprefix("./") if isinstance(start, str) else start


def _texts(variables: Any) -> Any:
    """A variable without a value is an empty one."""
    if not isinstance(variables, dict):
        return variables
    return {name: "" if value is None else value for name, value in variables.items()}
