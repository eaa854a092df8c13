"""Set up the sandbox of one attempt: which paths the agent may reach, the level, its sockets; ask in it for the agent's version."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autorl_hpc.agents import Agent
from autorl_hpc.agents.program_check import TORCH_LIMIT_S, TORCH_SAYS, VERSION, unseen_gpus
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.processes import become_subreaper, end_all
from autorl_hpc.files.queue import append_event
from autorl_hpc.records import readable_json
from autorl_hpc.records.entries import SandboxUsed
from autorl_hpc.records.experiment import ExperimentSpec
from autorl_hpc.records.run import RunRecord
from autorl_hpc.sandbox.prove import AUTO, ChosenLevel, choose
from autorl_hpc.sandbox.sandbox_plan import (
    DRIVER_SOCKET_NAME,
    SHORT,
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

MAX_TMP_BYTES = 60  # of $TMPDIR: Python's own sockets add 31 bytes to it, other programs' more, and 107 is the limit


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
        self.record, self.spec, self._first = record, spec, experiment.sandbox
        self.socket_folder = tempfile.mkdtemp(prefix="autorl-", dir=SHORT)
        lay_way_out(self.socket_folder)
        tmp = str(workspace / ".tmp")
        if len(os.fsencode(tmp)) > MAX_TMP_BYTES:  # levels that can't mount give it to the agent under this path
            os.symlink(tmp, f"{self.socket_folder}/tmp")
            tmp = f"{self.socket_folder}/tmp"
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
            tmp=tmp,
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
        # On which bridge and gateway listen besides their ports.
        folder = Path(self.socket_folder)
        self.socket, self.driver_socket = folder / SOCKET_NAME, folder / DRIVER_SOCKET_NAME
        self._chosen: ChosenLevel | None = None

    def choose(self, port: int, env: Mapping[str, str], attempt: int, *, driver_port: int | None = None) -> SandboxUsed:
        """Choose the sandbox level by trying the levels on this node. `port`: the bridge's, the same inside; `driver_port`: the
        gateway's; None without one. Raises AutorlError: this node can't provide what the experiment demands."""
        driver = () if driver_port is None else ((driver_port, DRIVER_SOCKET_NAME),)
        plan = dataclasses.replace(self._plan, ways=((port, SOCKET_NAME), *driver))
        if self.spec.sandbox.level != AUTO or plan.image is not None:
            self._chosen = self._prove(plan, env, self.spec.sandbox.level)
        else:  # the level that the experiment's first attempt proved, so that its runs can be compared
            if (fixed := self._proven_first()) is None:
                self._chosen = self._prove(plan, env, AUTO)
                first = {"schema_version": 1, "level": self._chosen.level.name, "run_id": self.record.run_id}
                atomic.publish_bytes(self._first, readable_json(first))
                fixed = self._proven_first()
            if self._chosen is None or fixed != self._chosen.level.name:
                self._chosen = self._prove(plan, env, fixed or AUTO)
        return self._chosen.record.model_copy(update={"attempt": attempt})

    def _proven_first(self) -> str | None:
        names = reading.list_names(self._first.parent)  # a name that was missing may stay missing in a client's cache
        return None if self._first.name not in names else str(reading.read_json(self._first)["level"])

    def _prove(self, plan: SandboxPlan, env: Mapping[str, str], level: str) -> ChosenLevel:
        spec = self.spec.sandbox.model_copy(update={"level": level})
        wanted = self.record.science.network
        try:
            return choose(spec, plan, env, wanted=wanted, secret=self._secret, programs=self.programs)
        except AutorlError as error:
            if level == self.spec.sandbox.level:
                raise
            error.what += f". The first attempt of this experiment ran at level {level}, and `auto` means one level for all its runs"
            error.where = str(self._first)
            error.next_step = "give these jobs nodes like the first one's (`constraint` in the profile), or launch anew"
            raise

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
    return {str(folder) for folder in folders} | {os.path.realpath(folder) for folder in folders}


def _prefixes(venv: Path | None) -> list[str]:
    found = [sys.prefix, sys.base_prefix]
    if venv is not None:
        real = Path(os.path.realpath(venv / "bin" / "python")).parent.parent
        found += [str(venv), *([str(real)] if str(real) != "/" else [])]
    return found


def _named(readable: Sequence[str], private: set[str]) -> list[str]:
    for path in readable:
        real = os.path.realpath(path)
        if any(below(real, folder) or below(folder, real) for folder in private):
            what = f"field `sandbox.readable`: {path} is inside a folder that agents must not see, or contains one"
            advice = "name a folder outside store, vault, runs and scratch, and none above them"
            raise AutorlError(what, where=path, fault=Fault.CLUSTER, next_step=advice)
    return list(readable)


# --- asked before the budget's clock starts, for the record only: no answer, or one that is too late, is null, and the run goes on

VERSION_LIMIT_S = 60.0  # openhands needs 9 s of CPU, and a file server reads large programs for the first time
MOST_BYTES = 4096  # far less than a pipe holds, so that the program never blocks while it runs
Argv = Callable[[Sequence[str]], list[str]]

ASK = f"""set -o pipefail
home=$(mktemp -d) || exit 1
trap 'rm -rf "$home"' EXIT
HOME=$home "$@" 2>&1 </dev/null | head -c {MOST_BYTES}"""  # with an empty home: files of an earlier attempt have no effect


def note_version(
    events: Path, agent: Agent, attempt: int, argv: Argv, env: Mapping[str, str], mark: str, stop: Callable[[], bool]
) -> None:
    """Write the version of the agent's program, if it has one, into the run's events. `argv`: returns a command as it runs in the
    sandbox; `env`: without secrets, with the definition's PYTHONPATH alone, as nothing that the agent can write may be imported;
    `stop`: ends it."""
    program = agent.file.program
    if program:
        found = VERSION.search(_ask(argv(["bash", "-c", ASK, "version", *program]), env, mark, stop, VERSION_LIMIT_S))
        version = found.group()[:80] if found else None
        append_event(events, "agent_version", attempt=attempt, agent=agent.name, program=program[0], version=version)


def note_torch(
    events: Path, granted: int, attempt: int, argv: Argv, env: Mapping[str, str], mark: str, stop: Callable[[], bool]
) -> str | None:
    """Ask the agent's torch whether it sees the GPUs granted; return why not, and write it into the run's events."""
    said = _ask(argv(["python3", "-s", "-c", TORCH_SAYS]), env, mark, stop, TORCH_LIMIT_S) if granted else ""
    why = unseen_gpus(said, granted)
    if why:
        append_event(events, "gpus_unseen", attempt=attempt, granted=granted, why=why)
    return why


def _ask(command: list[str], env: Mapping[str, str], mark: str, stop: Callable[[], bool], limit_s: float) -> str:
    """Return the program's output if it ends well and in time, else an empty text. Ends all its processes."""
    become_subreaper()
    silent: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        process = subprocess.Popen(command, env=dict(env), cwd="/", start_new_session=True, **silent)
    except OSError:
        return ""
    deadline = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < deadline and not stop():
        time.sleep(0.05)
    code = process.poll()
    end_all(os.getpid(), mark)
    with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
        said, _ = process.communicate(timeout=5)
        return said.decode(errors="replace") if code == 0 else ""
    return ""
