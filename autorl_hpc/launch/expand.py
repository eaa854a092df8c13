"""Expand an experiment's matrix to runs, with everything that a run depends on looked up, checked and pinned."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from autorl_hpc.agents import load_agent
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.checkpoint import file_sha256
from autorl_hpc.files.layout import Root
from autorl_hpc.files.reading import read_yaml
from autorl_hpc.files.store import staged_pin
from autorl_hpc.launch.drivers import driver_sciences, model_hash
from autorl_hpc.launch.prerequisites import check_needs, missing_here, run_environment, with_judge
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.driver import NO_DRIVER
from autorl_hpc.records.experiment import ExperimentSpec, JudgeSpec
from autorl_hpc.records.run import FeedbackPart, RunEnvironment, Science
from autorl_hpc.records.task import Recipe, SplitPin
from autorl_hpc.rollouts.search import backends
from autorl_hpc.scoring.judges import JUDGE_MODEL
from autorl_hpc.states import Fault, Network, Protocol, Split
from autorl_hpc.tasks.check import check_task
from autorl_hpc.tasks.folders import with_scorer_hash
from autorl_hpc.tasks.heldout import load_items, pin_part, recipe_files, verify_staged_task, with_pins
from autorl_hpc.tasks.loader import Task, load_task, with_environment_hash

# --- what graders must reach to score the tasks (judge, search engine)


def check_search(recipe: Recipe, task: str, where: Path) -> None:
    """Raise AutorlError if the recipe doesn't name its search engine in full, or its key can't be read. Nothing is connected."""
    kind = recipe.options.get("search")
    try:
        if kind in ("online", "replay"):
            backends.identity_of(recipe.options)
        if kind == "online" and "search_key_file" in recipe.options:
            backends.read_key(Path(str(recipe.options["search_key_file"])).expanduser())
    except (OSError, ValueError) as error:
        what = f"field `matrix.task`: {task}, recipe {recipe.name}: search engine: {error}"
        advice = "correct the option in the recipe, or the file with the key"
        raise AutorlError(what, where=where, next_step=advice) from None


def lines(spec: ExperimentSpec, cells: Sequence[Cell]) -> list[str]:
    """Return a sentence for each thing beyond this package and its staged files that graders of a task need."""
    found = []
    for task, recipe in {cell.science.task: cell.science.recipe for cell in cells}.items():
        judge, kind = str(recipe.options.get(JUDGE_MODEL, "")), recipe.options.get("search")
        date = recipe.options.get("search_date", "no date")
        if recipe.judge != "none" and judge == JudgeSpec.BUILTIN:
            found.append(f"{task}: {judge} is a toy, no judge: these are no real scores")
        elif recipe.judge != "none":
            host = "its endpoint" if spec.judge is None else urlsplit(spec.judge.url).netloc
            found.append(f"{task}: graders ask the judge {judge} at {host}; {UNREACHED}")
        if kind == "online":
            engine = urlsplit(str(recipe.options.get("search_url", ""))).hostname
            words = f"{UNREACHED}; no real score is possible offline"
            found.append(f"{task}: graders ask the search engine at {engine} ({date}); {words}")
        elif kind == "replay":
            found.append(f"{task}: searches are replayed ({date}): what was not recorded gets no score")
    return found


UNREACHED = "where a node can't reach it nothing is scored, and submissions wait"
AXES = ("task", "agent", "base_model", "driver", "mode", "seed")
MAX_RUN_ID_CHARS = 200  # a file name has at most 255 bytes, and queue, claims and temporary names add to the run id
Checked = TypeVar("Checked")


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix: a future run with its hashes."""

    science: Science
    task_hash: str
    agent_hash: str
    environment: RunEnvironment | None = None

    @property
    def run_id(self) -> str:
        return self.science.run_id()


def read_spec(path: Path) -> ExperimentSpec:
    """Read the experiment in `path`. Raises AutorlError: names the file, the field and the next step."""
    return parse_record(ExperimentSpec, read_yaml(path), path, next_step="see docs/experiments.md for every field")


def expand(
    spec: ExperimentSpec, root: Root, where: Path, frozen: Path | None = None, *, prompting: bool = True
) -> list[Cell]:
    """Return the runs in the order of the matrix. `frozen`: only with its tasks and agents; `prompting`: run ids hold
    the hash of what decides prompts. Raises AutorlError: something is unknown, not staged, changed or listed twice, or
    no run is left."""
    task_places = None if frozen is None else [frozen / "tasks"]
    agent_places = None if frozen is None else [frozen / "templates" / "agents"]
    tasks = {name: _located(load_task, name, task_places, where, "matrix.task") for name in spec.matrix.task}
    agents = {name: _located(load_agent, name, agent_places, where, "matrix.agent") for name in spec.matrix.agent}
    environment = run_environment(root, spec.environment, where, spec.sandbox.level)
    for agent in agents.values():
        check_needs(agent, root, environment)
    for task in tasks.values():
        _in_field(partial(check_task, task), "matrix.task")
        _check_task_needs(task)
    for name in (name for name in spec.recipe if name not in tasks):
        what = f"field `recipe.{name}`: the matrix has no task of this name"
        raise AutorlError(what, where=where, next_step="correct the name")
    combinations = _combinations(spec, where)
    for values in combinations:
        use, name = agents[values["agent"]].file.driver, values["agent"]
        if values["driver"] == NO_DRIVER and use is not None and use.required:
            what = f"field `matrix`: agent {name} calls a driver (by {use.dialect}), "
            what += "and the matrix pairs it with `none`"
            advice = f"name a driver in `drivers` and in `matrix.driver`; or `exclude: [{{agent: {name}, "
            advice += "driver: none}]`"
            raise AutorlError(what, where=where, next_step=advice)
    tasks = {name: _in_field(partial(with_pins, root, task), "matrix.task") for name, task in tasks.items()}
    of_task: dict[str, dict[str, Any]] = {}
    for name, task in tasks.items():
        recipe = _in_field(partial(task.recipe, spec.recipe.get(name)), f"recipe.{name}", where)
        recipe = with_environment_hash(with_scorer_hash(with_judge(recipe, name, spec, where), task.folder), task)
        pins = _task_pins(root, task, spec.protocol)
        part = _in_field(partial(_part, root, task, spec), "feedback")
        of_task[name] = {"recipe": recipe, "splits": pins, "feedback_part": part}
    for name, facts in of_task.items():
        _check_recipe_files(root, tasks[name], facts["recipe"])
        check_search(facts["recipe"], name, where)
    models = {name: model_hash(root, name, "matrix.base_model", "base model") for name in spec.matrix.base_model}
    asked = {name: staged_pin(root, name).prompting_hash if prompting else None for name in models}
    drivers = driver_sciences(root, spec)
    task_hashes = {name: task.hash() for name, task in tasks.items()}
    agent_hashes = {name: agent.hash() for name, agent in agents.items()}
    cells: list[Cell] = []
    for values in combinations:
        science = Science(
            **values,
            **of_task[values["task"]],
            budget=spec.budget,
            protocol=spec.protocol,
            base_model_content_hash=models[values["base_model"]],
            base_model_prompting_hash=asked[values["base_model"]],
            environment_hash=environment.content_hash if environment else None,
            network=spec.sandbox.network or (Network.NONE if values["driver"] == NO_DRIVER else Network.DRIVER),
            driver_spec=drivers.get(values["driver"]),
            reprompts=spec.reprompts,
        )
        cell = Cell(science, task_hashes[values["task"]], agent_hashes[values["agent"]], environment)
        if len(cell.run_id) > MAX_RUN_ID_CHARS:
            length = f"{len(cell.run_id)} characters, at most {MAX_RUN_ID_CHARS} fit into file names"
            what = f"field `matrix`: the run id {cell.run_id} has {length}"
            raise AutorlError(what, where=where, next_step="stage the base model under a shorter name")
        cells.append(cell)
    return cells


def _located(
    load: Callable[[str, list[Path] | None], Checked], name: str, places: list[Path] | None, where: Path, field: str
) -> Checked:
    try:
        return load(name, places)
    except AutorlError as error:
        own_file = error.where is not None and Path(error.where).name in ("agent.yaml", "task.yaml")
        raise error.of_field(field, None if own_file else where) from None


def _in_field(check: Callable[[], Checked], field: str, where: Path | None = None) -> Checked:
    try:
        return check()
    except AutorlError as error:
        raise error.of_field(field, where) from None


def _combinations(spec: ExperimentSpec, where: Path) -> list[dict[str, Any]]:
    """Return the value of each axis for each run. Raises AutorlError: a value twice, a wrong rule of `exclude`, or no run."""
    axes: dict[str, Sequence[Any]] = {axis: getattr(spec.matrix, axis) for axis in AXES}
    for axis, values in axes.items():
        if twice := [value for value, count in Counter(values).items() if count > 1]:
            what = f"field `matrix.{axis}`: {twice[0]!r} stands twice: the same run would be made twice"
            raise AutorlError(what, where=where, next_step="remove one")
    cells = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*axes.values())]
    for rule in spec.exclude:
        wrong = [axis for axis in rule if axis not in AXES] or ([] if rule else ["an empty rule"])
        if wrong:
            what = f"field `exclude`: {wrong[0]!r} is no axis of the matrix"
            raise AutorlError(what, where=where, next_step=f"axes are {', '.join(AXES)}")
        given = {axis: values if isinstance(values, list) else [values] for axis, values in rule.items()}
        for axis, value in ((axis, value) for axis, values in given.items() for value in values):
            if value not in axes[axis]:
                what = f"field `exclude`: {value!r} is not a value of matrix.{axis}"
                advice = f"its values are {', '.join(map(str, axes[axis]))}; correct the rule, or remove it"
                raise AutorlError(what, where=where, next_step=advice)
        cells = [cell for cell in cells if not all(cell[axis] in values for axis, values in given.items())]
    if not cells:
        raise AutorlError("field `exclude` leaves no run of the matrix", where=where, next_step="exclude less")
    return cells


def _check_task_needs(task: Task) -> None:
    if missing := missing_here(task.file.needs):
        package = {"sklearn": "scikit-learn"}.get(missing[0], missing[0])
        what = f"field `matrix.task`: graders of task {task.name} need the Python package {package}, which is not installed here"
        where, advice, code = task.folder / "task.yaml", f"pip install {package}", Exit.ENVIRONMENT
        raise AutorlError(what, where=where, fault=Fault.CLUSTER, next_step=advice, exit_code=code)


def _task_pins(root: Root, task: Task, protocol: Protocol) -> dict[str, SplitPin]:
    _in_field(lambda: verify_staged_task(root, task), "matrix.task")
    pins = {str(split): pin for split, pin in task.file.splits.items()}
    if protocol is Protocol.PAPER and task.file.paper is not None:
        pins["report"] = task.file.paper
    return pins


def _part(root: Root, task: Task, spec: ExperimentSpec) -> FeedbackPart | None:
    if spec.feedback.items is None:
        return None
    items = load_items(root, task.name, Split.FEEDBACK, task.file.splits["feedback"])
    return pin_part(items, spec.feedback.items, spec.feedback.seed, task.file)


def _check_recipe_files(root: Root, task: Task, recipe: Recipe) -> None:
    again = f"put it beside the source files and run: autorl-hpc stage {task.name} --from DIR --again"
    for name, digest in recipe_files(recipe).items():
        path = root.task_vault(task.name) / name
        missing = not path.is_file()
        if missing or file_sha256(path) != digest:
            what = f"field `recipe.{task.name}`: recipe {recipe.name} needs {name}, "
            what += "which was not staged" if missing else "and what is staged is not the file that it pins"
            fault, code = (None, Exit.USAGE) if missing else (Fault.CLUSTER, Exit.FAILED)
            raise AutorlError(what, where=path, fault=fault, next_step=again, exit_code=code)
