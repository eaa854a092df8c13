"""The environment that an experiment's agents train in, and whether it has what they need."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

from autorl_hpc.agents import Agent
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.environments import VENV, verify_environment
from autorl_hpc.files.layout import Root
from autorl_hpc.records.run import RunEnvironment
from autorl_hpc.states import Fault, SandboxLevel

LOOK = """import importlib.util, json, sys
print(json.dumps([name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]))"""
LOOK_TIMEOUT_S = 120.0
"""A Python on a shared file system that has not been read yet starts in seconds, not in minutes."""


def run_environment(root: Root, name: str | None, where: Path, level: str = "auto") -> RunEnvironment | None:
    """What run.json says of the experiment's environment, after every file of it was checked; None: it names none.

    Args:
        level: the sandbox's, as the experiment demands it.

    Raises:
        AutorlError: it is not staged, was changed, or is an image where another level than apptainer is demanded.
    """
    if name is None:
        return None
    try:
        manifest = verify_environment(root, name)
    except AutorlError as error:
        raise AutorlError(
            f"field `environment`: {error.what}",
            where=error.where,
            fault=error.fault,
            next_step=error.next_step,
            exit_code=error.exit_code,
        ) from None
    facts = manifest.environment
    assert facts is not None and manifest.content_hash is not None  # `find_environment` looked
    if facts.kind == "image" and level not in ("auto", SandboxLevel.APPTAINER):
        raise AutorlError(
            f"field `sandbox.level`: {name} is an image, which runs at level apptainer and not at {level}",
            where=where,
            next_step="leave `sandbox.level` out, or use an environment made of wheels",
        )
    return RunEnvironment(name=name, kind=facts.kind, content_hash=manifest.content_hash)


def check_needs(agent: Agent, root: Root, environment: RunEnvironment | None) -> None:
    """The Python packages that an agent needs are in the environment that it will run in.

    Raises:
        AutorlError: one is not.
    """
    needs = list(agent.file.needs)
    if environment is None:
        missing = [module for module in needs if importlib.util.find_spec(module) is None]
        place, advice = "which is not installed here", "pip install 'autorl-hpc[train]'"
    elif environment.kind == "image":
        return  # what is in an image shows when it is started, on a node that can
    else:
        missing = _missing_in(root.environment(environment.name, environment.content_hash) / VENV, needs)
        place = f"which environment {environment.name} doesn't have"
        advice = f"add it to the requirements: autorl-hpc stage env:{environment.name} --requirements FILE --again"
    if missing:
        raise AutorlError(
            f"agent {agent.name} needs the Python package {missing[0]}, {place}",
            where=agent.folder / "agent.yaml",
            fault=Fault.CLUSTER,
            next_step=advice,
            exit_code=Exit.ENVIRONMENT,
        )


def _missing_in(venv: Path, modules: list[str]) -> list[str]:
    """Those that the venv's own Python doesn't find."""
    python = venv / "bin" / "python"
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", LOOK, *modules],
            capture_output=True,
            text=True,
            check=True,
            timeout=LOOK_TIMEOUT_S,
        )
        return [str(name) for name in json.loads(done.stdout)]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise AutorlError(
            f"field `environment`: its Python doesn't start: {error}",
            where=python,
            fault=Fault.CLUSTER,
            next_step="it is a link to the Python that made it, which must be on every node: stage the environment anew with a "
            "Python on the shared file system",
            exit_code=Exit.ENVIRONMENT,
        ) from None
