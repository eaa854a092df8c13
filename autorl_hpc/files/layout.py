"""Where everything lies. Nothing else in the suite puts two path parts together.

See docs/file-protocol.md for what each file is and who writes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.errors import AutorlError

ROOT_VARIABLE = "AUTORL_ROOT"


def default_root() -> Path:
    """`$AUTORL_ROOT`, else the current directory: the folder that holds store/, vault/ and runs/."""
    return Path(os.environ.get(ROOT_VARIABLE) or ".").absolute()


@dataclass(frozen=True)
class Root:
    """The folder with store/ (what agents may see), vault/ (what they may not) and runs/."""

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
        """Judges' answers, of all experiments. In the vault: who may write them decides scores."""
        return self.vault / ".judge-cache"

    def model(self, name: str) -> Path:
        return self.models / name

    @property
    def environments(self) -> Path:
        return self.store / "envs"

    def environment(self, name: str, content_hash: str) -> Path:
        """A venv can't be moved, and agents may run in it: other content has a folder of its own."""
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
        """Where a driver of kind `vllm` answers."""
        return self.drivers / f"{name}.json"

    def driver_key(self, name: str) -> Path:
        """A driver's key, for its owner alone."""
        return self.drivers / f"{name}.key"

    def driver_log(self, name: str) -> Path:
        """What the driver's server printed."""
        return self.drivers / f"{name}.log"

    @property
    def troubles(self) -> Path:
        """One file per entry of the queue that failed and waits."""
        return self.path / "troubles"

    @property
    def artifacts(self) -> Path:
        return self.path / "artifacts"

    @property
    def baselines(self) -> Path:
        return self.path / "baselines"

    @property
    def heads(self) -> Path:
        """Where the chains stood when the report job looked last."""
        return self.path / "heads.json"

    @property
    def finished(self) -> Path:
        """One empty file per closed run: how a grader sees, by one listing, that the experiment is over."""
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
        """The folders that launch makes."""
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
        """What later submissions' weights are compared with, when the weights themselves are gone."""
        return self.path / "sketches"

    @property
    def clock(self) -> Path:
        """The supervisor's persisted clock."""
        return self.path / "clock.json"

    @property
    def driver_bodies(self) -> Path:
        """Requests and answers themselves, where the experiment asks for them."""
        return self.path / "bodies"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def gateway_log(self) -> Path:
        """What the gateway's process printed."""
        return self.logs / "gateway.log"

    @property
    def events(self) -> Path:
        return self.logs / "events.jsonl"

    @property
    def agent_log(self) -> Path:
        return self.logs / "agent.log"

    @property
    def agent_times(self) -> Path:
        """Lines `<byte> <elapsed_s> <at>`: up to this byte, agent.log had been written by then."""
        return self.logs / "agent.times"

    @property
    def driver_log(self) -> Path:
        """A line for each request to the run's driver, by its gateway."""
        return self.path / "driver.jsonl"

    @property
    def code_git(self) -> Path:
        """A bare git repository: every state of the agent's code."""
        return self.path / "code.git"

    def recorded(self, name: str) -> Path:
        """What the recorder wrote, by a name of `records.recorded.RECORDED`: usage.jsonl beside run.json, the others in logs/."""
        return self.path / "usage.jsonl" if name == "usage" else self.logs / f"{name}.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report"

    @property
    def workspace_link(self) -> Path:
        """A file that names the workspace, which may lie in scratch."""
        return self.path / "workspace.json"


# Where the files that ship with the package lie: tasks/, templates/, jobs/, and of docs/ what a command reads.
#
# In a checkout and in an experiment's frozen code they stand beside the package, in an installed wheel inside it.

PACKAGE = Path(__file__).resolve().parent.parent


def share(part: str) -> Path:
    """The folder `tasks`, `templates`, `jobs` or `docs`."""
    beside = PACKAGE.parent / part
    inside = PACKAGE / "_share" / part
    return inside if inside.is_dir() else beside


# Folders of users' own agents and tasks, which are looked into before the built-in ones. A variable names them, so that child processes know them too.


def named_by(variable: str) -> list[Path]:
    """The folders that a variable names, first the one that is looked into first."""
    return [Path(part).absolute() for part in os.environ.get(variable, "").split(os.pathsep) if part]


def put_first(variable: str, folders: Sequence[Path], kind: str) -> None:
    """Puts folders before those that the variable names, for this process and those that it starts.

    Args:
        kind: what lies in folders of its own there: `agent`, `task`.

    Raises:
        AutorlError: one is no folder.
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
