"""`autorl-hpc list WHAT`: tasks, agents, models, environments, experiments and clusters that can be named here."""

from __future__ import annotations

import json
from collections.abc import Callable
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
    for name in rows[0] if rows else ():
        table.add_column(name.replace("_", " "), no_wrap=name == "name", overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(str(value))) for value in row.values()))
    Console().print(table if rows else f"no {what.value} below {place.path}")


def _tasks(place: Any) -> list[Row]:
    from autorl_hpc.tasks.loader import load_task, task_names

    rows = []
    staged = {path.parent.name for path in place.store.glob("tasks/*/*/task.yaml")}  # tasks of other libraries
    for name in sorted({*task_names(), *staged}):
        try:
            task = load_task(name, root=place)
            rows.append({"name": name, "title": task.file.title, "staged": _staged(place.task_vault(name))})
        except AutorlError as error:
            rows.append({"name": name, "title": f"cannot be loaded: {error.what}", "staged": "no"})
    return rows


def _agents(_: Any) -> list[Row]:
    from autorl_hpc.agents.definition import agent_names, load_agent

    rows = []
    for name in agent_names():
        try:
            file = load_agent(name).file
            rows.append({"name": name, "calls": "a driver" if file.driver else "none", "description": file.description})
        except AutorlError as error:
            rows.append({"name": name, "calls": "?", "description": f"cannot be loaded: {error.what}"})
    return rows


def _models(place: Any) -> list[Row]:
    found = sorted(path.parent for path in place.models.glob("*/*/MANIFEST.json"))
    return [{"name": str(path.relative_to(place.models)), "MB": round(_bytes(path) / 1e6, 1)} for path in found]


def _environments(place: Any) -> list[Row]:
    return [
        {"name": path.stem, "MB": round(_bytes(path.parent) / 1e6, 1)}
        for path in sorted(place.environments.glob("*.json"))
    ]


def _experiments(place: Any) -> list[Row]:
    rows = []
    for path in sorted((place.path / "runs").glob("*/experiment.json")):
        runs = list(path.parent.glob("*/run.json"))
        finished = len(list((path.parent / "finished").glob("*")))
        rows.append({"name": path.parent.name, "runs": len(runs), "finished": finished})
    return rows


def _clusters(_: Any) -> list[Row]:
    from autorl_hpc.cluster.profile import load_profile, profile_names

    rows = []
    for name in profile_names():
        try:
            rows.append({"name": name, "description": load_profile(name).description})
        except AutorlError as error:
            rows.append({"name": name, "description": f"cannot be loaded: {error.what}"})
    return rows


def _staged(vault: Path) -> str:
    return "yes" if (vault / "MANIFEST.json").is_file() or any(vault.glob("*/items.jsonl")) else "no"


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


ROWS: dict[What, Callable[[Any], list[Row]]] = {
    What.tasks: _tasks,
    What.agents: _agents,
    What.models: _models,
    What.environments: _environments,
    What.experiments: _experiments,
    What.clusters: _clusters,
}
