"""`autorl-hpc list WHAT`: tasks, agents, models, environments, experiments and clusters that can be named here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from autorl_hpc.errors import AutorlError, visible


class What(str, Enum):
    """What is listed."""

    tasks = "tasks"
    agents = "agents"
    models = "models"
    environments = "environments"
    experiments = "experiments"
    clusters = "clusters"


Row = dict[str, Any]


def show(
    what: Annotated[What, typer.Argument(help="What to list.")],
    root: Annotated[Path | None, typer.Option("--root", help="Folder with store/, vault/ and runs/.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """List tasks, agents, models, environments, experiments or clusters.

    Example: autorl-hpc list tasks
    """
    from autorl_hpc.files.layout import Root, default_root

    place = Root((root or default_root()).absolute())
    rows = ROWS[what](place)
    if as_json:
        print(json.dumps(rows, indent=2, sort_keys=True))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        table.add_column(name.replace("_", " "), no_wrap=name == "name", overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(str(row.get(name, "")))) for name in columns))
    Console().print(table if rows else f"no {what.value} below {place.path}")


def _each(names: list[str], describe: Callable[[str], Row]) -> list[Row]:
    """Return a row for each name; one that cannot be loaded says why."""
    rows: list[Row] = []
    for name in names:
        try:
            rows.append({"name": name, **describe(name)})
        except AutorlError as error:
            rows.append({"name": name, "error": f"cannot be loaded: {error.what}"})
    return rows


def _tasks(place: Any) -> list[Row]:
    from autorl_hpc.tasks.loader import load_task, task_names

    def describe(name: str) -> Row:
        vault = place.task_vault(name)
        staged = (vault / "MANIFEST.json").is_file() or any(vault.glob("*/items.jsonl"))
        return {"title": load_task(name, root=place).file.title, "staged": "yes" if staged else "no"}

    others = {path.parent.name for path in place.store.glob("tasks/*/*/task.yaml")}  # tasks of other libraries
    return _each(sorted({*task_names(), *others}), describe)


def _agents(_: Any) -> list[Row]:
    from autorl_hpc.agents.definition import agent_names, load_agent

    def describe(name: str) -> Row:
        file = load_agent(name).file
        return {"calls": "a driver" if file.driver else "none", "description": file.description}

    return _each(agent_names(), describe)


def _models(place: Any) -> list[Row]:
    found = sorted(path.parent for path in place.models.glob("*/*/MANIFEST.json"))
    return [{"name": str(path.relative_to(place.models)), "MB": _mb(path)} for path in found]


def _environments(place: Any) -> list[Row]:
    from autorl_hpc.files.store import find_environment

    names = [path.stem for path in sorted(place.environments.glob("*.json"))]
    return _each(names, lambda name: {"MB": _mb(find_environment(place, name)[0])})


def _experiments(place: Any) -> list[Row]:
    rows = []
    for path in sorted((place.path / "runs").glob("*/experiment.json")):
        runs = list(path.parent.glob("*/run.json"))
        finished = len(list((path.parent / "finished").glob("*")))
        rows.append({"name": path.parent.name, "runs": len(runs), "finished": finished})
    return rows


def _clusters(_: Any) -> list[Row]:
    from autorl_hpc.cluster.profile import load_profile, profile_names

    return _each(profile_names(), lambda name: {"description": load_profile(name).description})


def _mb(folder: Path) -> float:
    return round(disk_bytes(folder) / 1e6, 1)


def disk_bytes(folder: Path) -> int:
    """Return the bytes on disk below `folder`, as far as it can be read; links are not followed."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return size


ROWS: dict[What, Callable[[Any], list[Row]]] = {
    What.tasks: _tasks,
    What.agents: _agents,
    What.models: _models,
    What.environments: _environments,
    What.experiments: _experiments,
    What.clusters: _clusters,
}
