"""Set up the sandbox of one attempt: which paths the agent may reach, the level that enforces it, and its sockets."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.records.entries import SandboxUsed
from autorl_hpc.records.experiment import ExperimentSpec
from autorl_hpc.records.run import RunRecord
from autorl_hpc.sandbox.prove import ChosenLevel, choose
from autorl_hpc.sandbox.sandbox_plan import (
    DRIVER_SOCKET_NAME,
    SOCKET_NAME,
    SandboxPlan,
    below,
    devices,
    lay_way_out,
    outermost,
    slurm_programs,
    software,
)
from autorl_hpc.states import Fault, SandboxLevel
from autorl_hpc.supervise.workspace import Placing, placed

SHORT = "/tmp"
"""Folder for the sockets: a Unix socket's path is limited to 107 bytes, and scratch paths may be longer."""


class Confinement:
    """The sandbox of one attempt."""

    def __init__(
        self,
        root: Root,
        experiment: ExperimentDir,
        record: RunRecord,
        spec: ExperimentSpec,
        workspace: Path,
        venv: Path | None,
        image: Path | None = None,
    ) -> None:
        self.record, self.spec = record, spec
        self.socket_folder = tempfile.mkdtemp(prefix="autorl-", dir=SHORT)
        lay_way_out(self.socket_folder)
        outer = dict(os.environ)
        self.programs = slurm_programs(outer)
        scratch = workspace.parent.parent
        private = _real(root.vault, root.store, root.runs, experiment.path, scratch)
        hidden = outermost(sorted(private | _real(root.path, Path.home())))
        prefixes = _prefixes(venv)
        keys = [each.key_file for each in (spec.judge, *spec.drivers.values()) if each is not None and each.key_file]
        vault = root.task_vault(record.science.task)
        self._secret = [str(experiment.run(record.run_id).record), *map(str, sorted(vault.rglob("items.jsonl"))[:2])]
        self._plan = SandboxPlan(
            workspace=str(workspace),
            tmp=str(workspace / ".tmp"),
            readable=tuple(
                path
                for path in (*software(prefixes, outer), *_named(spec.sandbox.readable, private))
                if not any(below(os.path.realpath(path), folder) for folder in private)
                or any(below(path, prefix) for prefix in prefixes)
            ),
            hidden=tuple(hidden),
            placed=tuple((os.path.realpath(source), str(workspace / where)) for source, where in placed(root, record)),
            devices=tuple(devices()),
            masked=(*self.programs, *(os.path.realpath(os.path.expanduser(key)) for key in keys)),
            socket_folder=self.socket_folder,
            image=None if image is None else str(image),
        )
        self._chosen: ChosenLevel | None = None

    @property
    def socket(self) -> Path:
        """Return the Unix socket on which the bridge listens besides its port."""
        return Path(self.socket_folder) / SOCKET_NAME

    @property
    def driver_socket(self) -> Path:
        """Return the Unix socket on which the gateway listens besides its port."""
        return Path(self.socket_folder) / DRIVER_SOCKET_NAME

    def choose(self, port: int, env: Mapping[str, str], attempt: int, *, driver_port: int | None = None) -> SandboxUsed:
        """Choose the sandbox level by trying the levels on this node.

        Args:
            port: the bridge's port, which is the same inside the sandbox.
            driver_port: the gateway's port; None if there is no gateway.

        Raises:
            AutorlError: this node can't provide what the experiment demands.
        """
        driver = () if driver_port is None else ((driver_port, DRIVER_SOCKET_NAME),)
        plan = dataclasses.replace(self._plan, ways=((port, SOCKET_NAME), *driver))
        self._chosen = choose(
            self.spec.sandbox,
            plan,
            env,
            wanted=self.record.science.network,
            secret=self._secret,
            programs=self.programs,
        )
        return self._chosen.record.model_copy(update={"attempt": attempt})

    @property
    def placing(self) -> Placing:
        """Return how base model and data come into the workspace at the chosen level."""
        assert self._chosen is not None
        return {SandboxLevel.NONE: "copied", SandboxLevel.LANDLOCK: "linked"}.get(self._chosen.level.name, "mounted")  # type: ignore[return-value]

    def argv(self, command: Sequence[str]) -> list[str]:
        """Return `command` as it runs inside the sandbox."""
        assert self._chosen is not None
        return self._chosen.level.argv(self._chosen.plan, command)

    def close(self) -> None:
        """Remove the folder with the sockets."""
        shutil.rmtree(self.socket_folder, ignore_errors=True)


def _real(*folders: Path) -> set[str]:
    """Return the folders as named and with links resolved."""
    return {str(folder) for folder in folders} | {os.path.realpath(folder) for folder in folders}


def _prefixes(venv: Path | None) -> list[str]:
    """Return the folders of the Pythons that agents run: the suite's own, and the one that the environment's venv links to."""
    found = [sys.prefix, sys.base_prefix]
    if venv is not None:
        real = Path(os.path.realpath(venv / "bin" / "python")).parent.parent
        found += [str(venv), *([str(real)] if str(real) != "/" else [])]
    return found


def _named(readable: Sequence[str], private: set[str]) -> list[str]:
    """Return the folders that the experiment names in `sandbox.readable`, after checking them against the private folders."""
    for path in readable:
        real = os.path.realpath(path)
        if any(below(real, folder) or below(folder, real) for folder in private):
            raise AutorlError(
                f"field `sandbox.readable`: {path} lies in what agents must not see, or holds it",
                where=path,
                fault=Fault.CLUSTER,
                next_step="name a folder outside store, vault, runs and scratch, and none above them",
            )
    return list(readable)
