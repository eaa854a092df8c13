"""The agent's process as the supervisor sees it, behind the keeper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.files.host import become_subreaper
from autorl_hpc.files.share import PACKAGE
from autorl_hpc.supervise import budget
from autorl_hpc.supervise.environment import ALLOWED
from autorl_hpc.supervise.processes import end_all

KEEPER_END_S = 30.0


@dataclass(frozen=True)
class AgentEnd:
    """How an agent ended.

    Attributes:
        exit_code: None when it could not be learned: the keeper was killed.
        left: processes that would not die.
        started: whether there was an agent at all.
    """

    exit_code: int | None
    left: tuple[int, ...]
    started: bool


class AgentProcess:
    """One started agent."""

    def __init__(
        self,
        argv: list[str],
        env: dict[str, str],
        cwd: Path,
        log: Path,
        mark: str,
        elapsed_file: Path,
        elapsed_s: float,
        prompt: str | None = None,
    ) -> None:
        become_subreaper()
        self.mark = mark
        # No secrets: the agent can read the environment of its parent. But what Python needs to start on this host.
        keeper_env = {name: os.environ[name] for name in ALLOWED if name in os.environ}
        keeper_env["PYTHONPATH"] = str(PACKAGE.parent)
        keeper_env["PYTHONDONTWRITEBYTECODE"] = "1"  # as all jobs: no compiled code into the frozen folder
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "autorl_hpc.supervise.keeper"],
            env=keeper_env,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        job = {
            "argv": argv,
            "env": env,
            "cwd": str(cwd),
            "log": str(log),
            "mark": mark,
            "elapsed_file": str(elapsed_file),
            "elapsed_s": elapsed_s,
            "suspension_s": budget.SUSPENSION_S,
            "prompt": prompt,
        }
        self._keeper.stdin.write(json.dumps(job).encode() + b"\n")
        self._keeper.stdin.flush()
        self._last: dict[str, Any] = {}
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read, name="keeper", daemon=True)
        self._reader.start()

    @property
    def keeper_pid(self) -> int:
        """The keeper's process id."""
        return self._keeper.pid

    def running(self) -> bool:
        """Whether the agent, or anything that it started, may still be alive."""
        return not self._ended.is_set()

    def stop(self, grace_s: float) -> None:
        """Asks the keeper to end everything: TERM, `grace_s` seconds, KILL."""
        try:
            assert self._keeper.stdin is not None
            self._keeper.stdin.write(f"stop {grace_s}\n".encode())
            self._keeper.stdin.flush()
        except (OSError, ValueError):
            pass  # the keeper is gone: finish() does its work

    def finish(self, timeout_s: float = KEEPER_END_S) -> AgentEnd:
        """Waits for the keeper's end and makes sure, from here too, that nothing of the agent is left."""
        self._ended.wait(timeout_s)
        left = end_all(os.getpid(), self.mark)
        try:
            self._keeper.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
        code = self._last.get("exit_code")
        return AgentEnd(
            code if isinstance(code, int) else None,
            tuple(sorted(left)),
            "begun" in self._last and "error" not in self._last,
        )

    def _read(self) -> None:
        assert self._keeper.stdout is not None
        for line in self._keeper.stdout:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                self._last.update(value)
        self._ended.set()
