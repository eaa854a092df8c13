"""An experiment's matrix, expanded to runs, with everything that a run depends on looked up and pinned."""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.agents import Agent, load_agent
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import verify_model
from autorl_hpc.files.yaml import read_yaml
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.experiment import ExperimentSpec
from autorl_hpc.records.run import Science
from autorl_hpc.records.task import SplitPin
from autorl_hpc.states import Fault
from autorl_hpc.tasks.loader import Task, load_task
from autorl_hpc.tasks.staged import verify_staged_task

AXES = ("task", "agent", "base_model", "driver", "mode", "seed")


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix: a run to be, with its hashes."""

    science: Science
    task_hash: str
    agent_hash: str

    @property
    def run_id(self) -> str:
        return self.science.run_id()


def read_spec(path: Path) -> ExperimentSpec:
    """The experiment in `path`.

    Raises:
        AutorlError: naming the file, the field and the next step.
    """
    value = read_yaml(path)
    if not isinstance(value, dict):
        raise AutorlError(
            "an experiment is a table of fields", where=path, next_step="see jobs/quickstart.yaml for an example"
        )
    _refuse_empty_axes(value, path)
    return parse_record(ExperimentSpec, value, path, next_step="see docs/experiments.md for every field")


def _refuse_empty_axes(value: dict[str, Any], path: Path) -> None:
    matrix = value.get("matrix")
    if isinstance(matrix, dict):
        for axis, entries in matrix.items():
            if entries is None or entries == []:
                raise AutorlError(
                    f"field `matrix.{axis}` is empty: there is nothing to run",
                    where=path,
                    next_step="give at least one value",
                )


def expand(spec: ExperimentSpec, root: Root, where: Path) -> list[Cell]:
    """The runs of an experiment, in the order of the matrix.

    Raises:
        AutorlError: an unknown task or agent, a model or task that is not staged or was changed, runs that stand twice,
            or nothing left to run.
    """
    tasks = {name: _located(load_task, name, where, "matrix.task") for name in spec.matrix.task}
    agents = {name: _located(load_agent, name, where, "matrix.agent") for name in spec.matrix.agent}
    for agent in agents.values():
        _check_needs(agent)
    for name in spec.recipe:
        if name not in tasks:
            raise AutorlError(
                f"field `recipe.{name}`: the matrix has no task of this name", where=where, next_step="correct the name"
            )
    pins = {name: _task_pins(root, task) for name, task in tasks.items()}
    models = {name: _model_hash(root, name) for name in spec.matrix.base_model}
    hashes = {name: task.hash() for name, task in tasks.items()} | {
        f"agent:{name}": agent.hash() for name, agent in agents.items()
    }
    cells: list[Cell] = []
    for values in _combinations(spec, where):
        recipe = tasks[values["task"]].recipe(spec.recipe.get(values["task"]))
        _check_recipe(root, tasks[values["task"]], recipe.shots_file, where)
        science = Science(
            **values,
            budget=spec.budget,
            protocol=spec.protocol,
            recipe=recipe,
            splits=pins[values["task"]],
            base_model_content_hash=models[values["base_model"]],
        )
        cells.append(Cell(science, hashes[values["task"]], hashes[f"agent:{values['agent']}"]))
    return cells


def _located(load: Any, name: str, where: Path, field: str) -> Any:
    try:
        return load(name)
    except AutorlError as error:
        raise AutorlError(
            f"field `{field}`: {error.what}", where=where, next_step=error.next_step, exit_code=error.exit_code
        ) from None


def _combinations(spec: ExperimentSpec, where: Path) -> list[dict[str, Any]]:
    axes: list[Sequence[Any]] = [getattr(spec.matrix, axis) for axis in AXES]
    for axis, values in zip(AXES, axes, strict=True):
        twice = [value for value, count in Counter(values).items() if count > 1]
        if twice:
            raise AutorlError(
                f"field `matrix.{axis}`: {twice[0]!r} stands twice: the same run would be made twice",
                where=where,
                next_step="remove one",
            )
    for rule in spec.exclude:
        unknown = set(rule) - set(AXES)
        if unknown or not rule:
            raise AutorlError(
                f"field `exclude`: {sorted(unknown)[0] if unknown else 'an empty rule'!r} is no axis of the matrix",
                where=where,
                next_step=f"axes are {', '.join(AXES)}",
            )
    kept = []
    for values in itertools.product(*axes):
        cell = dict(zip(AXES, values, strict=True))
        if not any(
            all(cell[key] == value or (isinstance(value, list) and cell[key] in value) for key, value in rule.items())
            for rule in spec.exclude
        ):
            kept.append(cell)
    if not kept:
        raise AutorlError("field `exclude` leaves no run of the matrix", where=where, next_step="exclude less")
    return kept


def _check_needs(agent: Agent) -> None:
    missing = [module for module in agent.file.needs if importlib.util.find_spec(module) is None]
    if missing:
        raise AutorlError(
            f"agent {agent.name} needs the Python package {missing[0]}, which is not installed here",
            where=agent.folder / "agent.yaml",
            fault=Fault.CLUSTER,
            next_step="pip install 'autorl-hpc[train]'",
            exit_code=Exit.ENVIRONMENT,
        )


def _task_pins(root: Root, task: Task) -> dict[str, SplitPin]:
    verify_staged_task(root, task)
    return {str(split): pin for split, pin in task.file.splits.items()}


def _model_hash(root: Root, name: str) -> str:
    manifest = verify_model(root, name)
    if manifest.content_hash is None:
        raise AutorlError(
            f"base model {name} was staged without a content hash",
            where=root.model(name),
            next_step=f"run: autorl-hpc stage {name} --again",
        )
    return manifest.content_hash


def _check_recipe(root: Root, task: Task, shots_file: str | None, where: Path) -> None:
    if shots_file and not (root.task_vault(task.name) / shots_file).is_file():
        raise AutorlError(
            f"the recipe needs {shots_file}, which was not staged with task {task.name}",
            where=root.task_vault(task.name),
            next_step=f"put it beside the source files and run: autorl-hpc stage {task.name} --from DIR --again",
        )
