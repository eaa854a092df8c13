"""Expand an experiment's matrix to runs, with everything that a run depends on looked up, checked and pinned."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from autorl_hpc.agents import Agent, load_agent
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.checkpoint import file_sha256
from autorl_hpc.files.layout import Root
from autorl_hpc.files.reading import read_yaml
from autorl_hpc.files.store import PYTHON_ON_EVERY_NODE, VENV, staged_pin, verify_environment
from autorl_hpc.launch.drivers import driver_sciences, model_hash
from autorl_hpc.records import canonical_json
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.driver import NO_DRIVER
from autorl_hpc.records.experiment import ExperimentSpec, JudgeSpec
from autorl_hpc.records.run import FeedbackPart, RunEnvironment, Science
from autorl_hpc.records.task import Recipe, SplitPin
from autorl_hpc.rollouts.search import backends
from autorl_hpc.scoring.judges import JUDGE_MODEL, JUDGE_REVISION, read_key
from autorl_hpc.states import Fault, Network, Protocol, SandboxLevel, Split
from autorl_hpc.tasks.check import check_task
from autorl_hpc.tasks.folders import with_scorer_hash
from autorl_hpc.tasks.heldout import load_items, pin_part, recipe_files, verify_staged_task, with_pins
from autorl_hpc.tasks.loader import Task, load_task, with_environment_hash

# --- what a run needs: the judge in its recipe, the environment, Python packages

JUDGE_PARAMETERS: Final = "judge_parameters"
"""The recipe option for the judge's request parameters. Address and key are not in the recipe: the same model at another address
counts as the same judge if `judge.revision` is the same, but its answers are cached separately."""

ENDPOINT: Final = "`judge: {url: http://HOST:PORT/v1, model: NAME}`, with `key_file` where the endpoint wants a key"
TOY: Final = f"; to try things out without one: `judge: {{url: {JudgeSpec.BUILTIN}}}`"


def with_judge(recipe: Recipe, task: str, spec: ExperimentSpec, where: Path) -> Recipe:
    """Return the recipe with its judge: the experiment's, else the task's. Raises AutorlError: none, or its key can't be read."""
    judge = spec.judge
    if recipe.judge == "none":
        return recipe
    toy = recipe.options.get(JUDGE_MODEL) == JudgeSpec.BUILTIN if judge is None else judge.url == JudgeSpec.BUILTIN
    if recipe.judge == "json" and toy:
        what = f"field `judge`: {JudgeSpec.BUILTIN} writes no JSON, and task {task} needs a judge that does (recipe {recipe.name})"
        raise AutorlError(what, where=where, next_step=f"name a judge model: {ENDPOINT}")
    if judge is None:
        if JUDGE_MODEL in recipe.options:
            return recipe
        what = f"field `judge` is missing: task {task} asks a judge model (recipe {recipe.name}, {recipe.judge})"
        raise AutorlError(what, where=where, next_step=f"add {ENDPOINT}" + ("" if recipe.judge == "json" else TOY))
    try:
        read_key(judge)
    except AutorlError as error:
        raise AutorlError(f"{error.what} ({error.where})", where=where, next_step=error.next_step) from None
    parameters = canonical_json(judge.parameters).decode() if judge.parameters else None
    own = {JUDGE_MODEL: judge.name, JUDGE_REVISION: judge.revision, JUDGE_PARAMETERS: parameters}
    others = {name: value for name, value in recipe.options.items() if name not in own}
    named = {name: value for name, value in own.items() if value is not None}
    return recipe.model_copy(update={"options": others | named})


# --- environment in which agents train

LOOK = """import importlib.util, json, sys
print(json.dumps([name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]))"""
LOOK_TIMEOUT_S = 120.0  # starting a Python from a cold shared file system takes seconds, not minutes


def run_environment(root: Root, name: str | None, where: Path, level: str = "auto") -> RunEnvironment | None:
    """Return run.json's facts on the environment, whose files are checked; None if none is named. `level`: the
    sandbox's. Raises AutorlError: not staged, changed, or an image where the level isn't apptainer."""
    if name is None:
        return None
    try:
        manifest = verify_environment(root, name)
    except AutorlError as error:
        raise error.of_field("environment") from None
    facts = manifest.environment
    assert facts is not None and manifest.content_hash is not None  # checked by `find_environment`
    if facts.kind == "image" and level not in ("auto", SandboxLevel.APPTAINER):
        what = f"field `sandbox.level`: {name} is an image, which runs at level apptainer and not at {level}"
        advice = "leave `sandbox.level` out, or use an environment made of wheels"
        raise AutorlError(what, where=where, next_step=advice)
    return RunEnvironment(name=name, kind=facts.kind, content_hash=manifest.content_hash)


def _top(needs: Iterable[str]) -> Iterator[str]:
    # Looking for a dotted name would import, and run, its parent.
    return (name.partition(".")[0] or name for name in needs)


def missing_here(needs: Iterable[str]) -> list[str]:
    """Return the modules that are not installed here."""
    return [module for module in _top(needs) if importlib.util.find_spec(module) is None]


def check_needs(agent: Agent, root: Root, environment: RunEnvironment | None) -> None:
    """Check that the Python packages an agent needs are in its environment. Raises AutorlError: one is missing."""
    if environment is None:
        missing = missing_here(agent.file.needs)
        place, advice = "which is not installed here", "pip install 'autorl-hpc[train]'"
    elif environment.kind == "image":
        return  # shows only when the image starts, on a node that can run it
    else:
        missing = _missing_in(
            root.environment(environment.name, environment.content_hash) / VENV, list(_top(agent.file.needs))
        )
        place = f"which environment {environment.name} doesn't have"
        advice = f"add it to the requirements: autorl-hpc stage env:{environment.name} --requirements FILE --again"
    if missing:
        what = f"agent {agent.name} needs the Python package {missing[0]}, {place}"
        where, code = agent.folder / "agent.yaml", Exit.ENVIRONMENT
        raise AutorlError(what, where=where, fault=Fault.CLUSTER, next_step=advice, exit_code=code)


def _missing_in(venv: Path, modules: list[str]) -> list[str]:
    python = venv / "bin" / "python"
    command = [str(python), "-I", "-c", LOOK, *modules]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LOOK_TIMEOUT_S)
        return [str(name) for name in json.loads(done.stdout)]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        what = f"field `environment`: its Python doesn't start: {error}"
        advice, code = PYTHON_ON_EVERY_NODE, Exit.ENVIRONMENT
        raise AutorlError(what, where=python, fault=Fault.CLUSTER, next_step=advice, exit_code=code) from None


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
    try:
        return parse_record(ExperimentSpec, read_yaml(path), path, next_step="see docs/experiments.md for every field")
    except AutorlError as error:
        if "`drivers." in error.what:
            error.next_step = "see docs/drivers.md for every field of a driver"
        raise


def expand(
    spec: ExperimentSpec, root: Root, where: Path, frozen: Path | None = None, *, prompting: bool = True
) -> list[Cell]:
    """Return the runs in the order of the matrix. `frozen`: only with its tasks and agents; `prompting`: run ids hold
    the hash of what decides prompts. Raises AutorlError: something is unknown, not staged, changed or listed twice, or
    no run is left."""
    task_places = None if frozen is None else [frozen / "tasks"]
    agent_places = None if frozen is None else [frozen / "templates" / "agents"]
    tasks = {
        name: _located(partial(load_task, root=root), name, task_places, where, "matrix.task")
        for name in spec.matrix.task
    }
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
        if spec.evaluate_script:
            _check_alone(facts["recipe"], name, where)
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
            evaluate_script=spec.evaluate_script,
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


def _check_alone(recipe: Recipe, name: str, where: Path) -> None:
    """Check that an agent can score by itself. Raises AutorlError: that takes a judge, episodes, worked examples or programs."""
    needs = {"judge": recipe.judge != "none", "episodes": recipe.max_steps, "worked examples": recipe.shots_file}
    needs["a sandbox for programs"] = recipe.scorer.startswith("humaneval")
    if lacks := [what for what, needed in needs.items() if needed]:
        what = f"field `evaluate_script`: recipe {recipe.name} of task {name} needs {lacks[0]}, which agents don't get"
        raise AutorlError(what, where=where, next_step="leave the field out, or choose another recipe")


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
