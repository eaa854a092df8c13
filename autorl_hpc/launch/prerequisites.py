"""Check what a run needs: write the experiment's judge into the recipe, verify the environment and the agents' packages."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from autorl_hpc.agents import Agent
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import PYTHON_ON_EVERY_NODE, VENV, verify_environment
from autorl_hpc.records import canonical_json
from autorl_hpc.records.experiment import ExperimentSpec, JudgeSpec
from autorl_hpc.records.run import RunEnvironment
from autorl_hpc.records.task import Recipe
from autorl_hpc.scoring.judges import JUDGE_MODEL, JUDGE_REVISION, read_key
from autorl_hpc.states import Fault, SandboxLevel

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
    return (
        name.partition(".")[0] or name for name in needs
    )  # looking for a dotted name would import, and run, its parent


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
