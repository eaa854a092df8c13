"""The layout of root, experiment and run folders (docs/file-protocol.md), shipped files, and users' agent and task folders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError

ROOT_VARIABLE = "AUTORL_ROOT"


def default_root() -> Path:
    """Return `$AUTORL_ROOT` or the current directory: the folder that holds store/, vault/ and runs/."""
    return Path(os.environ.get(ROOT_VARIABLE) or ".").absolute()


class Below:
    """Give the path with these parts below the `path` of the object that it is an attribute of, or below another attribute."""

    def __init__(self, *parts: str, of: str = "path") -> None:
        self._parts, self._of = parts, of

    def __get__(self, folder: Any, kind: type | None = None) -> Path:
        found: Path = getattr(folder, self._of).joinpath(*self._parts)
        return found


@dataclass(frozen=True)
class Root:
    """The folder with store/ (visible to agents), vault/ (hidden from agents) and runs/."""

    path: Path
    runs = Below("runs")
    store = Below("store")
    vault = Below("vault")
    models = Below("models", of="store")
    environments = Below("envs", of="store")
    judge_cache = Below(
        ".judge-cache", of="vault"
    )  # in the vault, because who can write judges' answers decides scores

    def model(self, name: str) -> Path:
        return self.models / name

    def environment(self, name: str, content_hash: str) -> Path:
        """Return the folder of one content: a venv can't be moved and may be in use."""
        return self.environments / f"{name}-{content_hash[:12]}"

    def environment_pointer(self, name: str) -> Path:
        return self.environments / f"{name}.json"

    def task_store(self, task: str) -> Path:
        return self.store / "tasks" / task

    def task_train(self, task: str) -> Path:
        return self.task_store(task) / "train"

    def task_vault(self, task: str) -> Path:
        return self.vault / task

    def experiment(self, name: str) -> ExperimentDir:
        return ExperimentDir(self.runs / name)


@dataclass(frozen=True)
class ExperimentDir:
    """`runs/<experiment>/`."""

    path: Path
    given = Below("experiment.yaml")
    resolved = Below("experiment.json")
    code = Below("code")
    queue = Below("queue")
    claims = Below("claims")
    graders = Below("graders")
    drivers = Below("drivers")  # endpoints, keys and generations of drivers
    troubles = Below("troubles")  # one file per queue entry that failed and waits for a retry
    artifacts = Below("artifacts")
    baselines = Below("baselines")
    heads = Below("heads.json")  # the ledger heads when the report job last ran
    finished = Below("finished")  # one empty file per closed run: one listing shows that the experiment is over
    cancel = Below("cancel")  # one file per cancelled run, or `all`
    jobs = Below("jobs")  # submitit's folder: scripts and logs of the jobs
    report = Below("report")
    sandbox = Below("sandbox.json")  # the level that the first attempt proved, where the experiment says `auto`

    def driver_endpoint(self, name: str) -> Path:
        return self.drivers / f"{name}.json"

    def driver_key(self, name: str) -> Path:
        return self.drivers / f"{name}.key"

    def driver_log(self, name: str) -> Path:
        return self.drivers / f"{name}.log"

    def run(self, run_id: str) -> RunDir:
        return RunDir(self.path / run_id)

    def folders(self) -> list[Path]:
        """Return the folders that launch makes."""
        for_graders = [self.queue, self.claims, self.graders, self.drivers, self.troubles, self.finished]
        return [self.path, self.code, *for_graders, self.artifacts, self.baselines, self.cancel, self.jobs]


@dataclass(frozen=True)
class RunDir:
    """`runs/<experiment>/<run_id>/`."""

    path: Path
    record = Below("run.json")
    ledger = Below("ledger")
    sealed_ledger = Below("ledger.jsonl")
    items = Below("items")
    sketches = Below("sketches")  # of weights, to compare later submissions with weights that are deleted by then
    clock = Below("clock.json")  # the supervisor's saved clock
    driver_log = Below("driver.jsonl")  # one line for each request to the run's driver, written by its gateway
    driver_bodies = Below("bodies")  # of requests and answers, if the experiment records them
    logs = Below("logs")
    gateway_log = Below("logs", "gateway.log")  # output of the gateway's process
    events = Below("logs", "events.jsonl")
    agent_log = Below("logs", "agent.log")
    agent_times = Below("logs", "agent.times")  # lines `<byte> <elapsed_s> <at>`: how far agent.log had been written
    code_git = Below("code.git")  # a bare git repository with every state of the agent's code
    report = Below("report")
    workspace_link = Below("workspace.json")  # names the workspace, which may be in scratch

    @property
    def run_id(self) -> str:
        return self.path.name

    def recorded(self, name: str) -> Path:
        """Return a file of the recorder by its name in `RECORDED`: usage.jsonl beside run.json, the others in logs/."""
        return self.path / "usage.jsonl" if name == "usage" else self.logs / f"{name}.jsonl"


# --- files shipped with the package: beside it in a checkout and in frozen code, inside it in an installed wheel

PACKAGE = Path(__file__).resolve().parent.parent


def share(part: str) -> Path:
    """Return the shipped folder `tasks`, `templates`, `jobs` or `docs`."""
    inside = PACKAGE / "_share" / part
    return inside if inside.is_dir() else PACKAGE.parent / part


# --- users' own agents and tasks: searched before the built-in ones; an environment variable passes them to child processes


def named_by(variable: str) -> list[Path]:
    """Return the folders in an environment variable, in search order."""
    return [Path(part).absolute() for part in os.environ.get(variable, "").split(os.pathsep) if part]


def put_first(variable: str, folders: Sequence[Path], kind: str) -> None:
    """Put folders first in the search path of an environment variable, for this process and its children. `kind`: `agent`
    or `task`, for messages. Raises AutorlError: one of them is not a folder."""
    for folder in folders:
        if not folder.is_dir():
            what = f"--{kind}s names the folder that holds {kind} folders, and this is none"
            advice = f"correct the path; of a{'n' if kind[0] == 'a' else ''} {kind} in ~/{kind}s/mine/ it is ~/{kind}s"
            raise AutorlError(what, where=folder.absolute(), next_step=advice)
    given = [str(folder.absolute()) for folder in folders]
    os.environ[variable] = os.pathsep.join([*given, *filter(None, [os.environ.get(variable)])])
