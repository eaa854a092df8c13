"""The layout of root, experiment and run folders, the files shipped with the package, and users' agent and task folders.

No other module joins path parts. docs/file-protocol.md says what each file is and who writes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.errors import AutorlError

ROOT_VARIABLE = "AUTORL_ROOT"


def default_root() -> Path:
    """Return `$AUTORL_ROOT` or the current directory: the folder that holds store/, vault/ and runs/."""
    return Path(os.environ.get(ROOT_VARIABLE) or ".").absolute()


@dataclass(frozen=True)
class Root:
    """The folder with store/ (visible to agents), vault/ (hidden from agents) and runs/."""

    path: Path

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def vault(self) -> Path:
        return self.path / "vault"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def judge_cache(self) -> Path:
        """Answers of judges, for all experiments. In the vault, because who can write them decides scores."""
        return self.vault / ".judge-cache"

    def model(self, name: str) -> Path:
        return self.models / name

    @property
    def environments(self) -> Path:
        return self.store / "envs"

    def environment(self, name: str, content_hash: str) -> Path:
        """Return the folder of one version. A venv can't be moved and may be in use, so new content gets a new folder."""
        return self.environments / f"{name}-{content_hash[:12]}"

    def environment_pointer(self, name: str) -> Path:
        return self.environments / f"{name}.json"

    @property
    def models(self) -> Path:
        return self.store / "models"

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

    @property
    def given(self) -> Path:
        return self.path / "experiment.yaml"

    @property
    def resolved(self) -> Path:
        return self.path / "experiment.json"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def queue(self) -> Path:
        return self.path / "queue"

    @property
    def claims(self) -> Path:
        return self.path / "claims"

    @property
    def graders(self) -> Path:
        return self.path / "graders"

    @property
    def drivers(self) -> Path:
        """Endpoints, keys and generations of drivers."""
        return self.path / "drivers"

    def driver_endpoint(self, name: str) -> Path:
        """Return the file that says where a driver of kind `vllm` answers."""
        return self.drivers / f"{name}.json"

    def driver_key(self, name: str) -> Path:
        """Return the file with a driver's key, readable by its owner only."""
        return self.drivers / f"{name}.key"

    def driver_log(self, name: str) -> Path:
        """Return the log of the driver's server."""
        return self.drivers / f"{name}.log"

    @property
    def troubles(self) -> Path:
        """One file per queue entry that failed and waits for a retry."""
        return self.path / "troubles"

    @property
    def artifacts(self) -> Path:
        return self.path / "artifacts"

    @property
    def baselines(self) -> Path:
        return self.path / "baselines"

    @property
    def heads(self) -> Path:
        """The ledger heads when the report job last ran."""
        return self.path / "heads.json"

    @property
    def finished(self) -> Path:
        """One empty file per closed run: one listing shows a grader that the experiment is over."""
        return self.path / "finished"

    @property
    def cancel(self) -> Path:
        """One file per cancelled run, or `all`."""
        return self.path / "cancel"

    @property
    def jobs(self) -> Path:
        """submitit's folder: scripts and logs of the jobs."""
        return self.path / "jobs"

    @property
    def report(self) -> Path:
        return self.path / "report"

    def run(self, run_id: str) -> RunDir:
        return RunDir(self.path / run_id)

    def folders(self) -> list[Path]:
        """Return the folders that launch makes."""
        return [
            self.path,
            self.code,
            self.queue,
            self.claims,
            self.graders,
            self.drivers,
            self.troubles,
            self.artifacts,
            self.baselines,
            self.finished,
            self.cancel,
            self.jobs,
        ]


@dataclass(frozen=True)
class RunDir:
    """`runs/<experiment>/<run_id>/`."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger"

    @property
    def sealed_ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def items(self) -> Path:
        return self.path / "items"

    @property
    def sketches(self) -> Path:
        """Sketches of weights, to compare later submissions with weights that are deleted by then."""
        return self.path / "sketches"

    @property
    def clock(self) -> Path:
        """The supervisor's saved clock."""
        return self.path / "clock.json"

    @property
    def driver_bodies(self) -> Path:
        """Bodies of requests and answers, if the experiment records them."""
        return self.path / "bodies"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def gateway_log(self) -> Path:
        """Output of the gateway's process."""
        return self.logs / "gateway.log"

    @property
    def events(self) -> Path:
        return self.logs / "events.jsonl"

    @property
    def agent_log(self) -> Path:
        return self.logs / "agent.log"

    @property
    def agent_times(self) -> Path:
        """Lines `<byte> <elapsed_s> <at>`: agent.log had been written up to this byte at this time."""
        return self.logs / "agent.times"

    @property
    def driver_log(self) -> Path:
        """One line for each request to the run's driver, written by its gateway."""
        return self.path / "driver.jsonl"

    @property
    def code_git(self) -> Path:
        """A bare git repository with every state of the agent's code."""
        return self.path / "code.git"

    def recorded(self, name: str) -> Path:
        """Return a file of the recorder by its name in `RECORDED`: usage.jsonl beside run.json, the others in logs/."""
        return self.path / "usage.jsonl" if name == "usage" else self.logs / f"{name}.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report"

    @property
    def workspace_link(self) -> Path:
        """A file that names the workspace, which may be in scratch."""
        return self.path / "workspace.json"


# --- files shipped with the package: beside it in a checkout and in frozen code, inside it in an installed wheel

PACKAGE = Path(__file__).resolve().parent.parent


def share(part: str) -> Path:
    """Return the shipped folder `tasks`, `templates`, `jobs` or `docs`."""
    beside = PACKAGE.parent / part
    inside = PACKAGE / "_share" / part
    return inside if inside.is_dir() else beside


# --- users' own agents and tasks: searched before the built-in ones; an environment variable passes them to child processes


def named_by(variable: str) -> list[Path]:
    """Return the folders in an environment variable, in search order."""
    return [Path(part).absolute() for part in os.environ.get(variable, "").split(os.pathsep) if part]


def put_first(variable: str, folders: Sequence[Path], kind: str) -> None:
    """Put folders first in the search path of an environment variable, for this process and its children.

    Args:
        kind: `agent` or `task`, for messages.

    Raises:
        AutorlError: one of them is not a folder.
    """
    for folder in folders:
        if not folder.is_dir():
            raise AutorlError(
                f"--{kind}s names the folder that holds {kind} folders, and this is none",
                where=folder.absolute(),
                next_step=f"correct the path; of a{'n' if kind[0] == 'a' else ''} {kind} in ~/{kind}s/mine/ it is ~/{kind}s",
            )
    given = [str(folder.absolute()) for folder in folders]
    os.environ[variable] = os.pathsep.join([*given, *filter(None, [os.environ.get(variable)])])
