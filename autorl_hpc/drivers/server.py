"""One start of a driver's server: a process group of its own, asked over HTTP whether it answers."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from autorl_hpc.files.host import die_with_parent

LOG_TAIL_BYTES = 64 * 1024
"""In which the error is looked for: the stacks of three processes may follow it."""

MAX_LOG_BYTES = 64 * 1024 * 1024
"""Of a server's output; what is older is dropped at its next start."""

ASK_TIMEOUT_S = 10.0
STOP_WAIT_S = 15.0
STACKS_WAIT_S = 3.0
POLL_S = 0.1
MAX_WORDS = 300

FOLLOWS = ("Engine core initialization failed", "See root cause above", "WorkerProc initialization failed")
"""Errors of vLLM that only say that another process had one."""


def _in_the_child() -> None:
    """A job that is killed without a word leaves no server behind that holds the GPU; one that is aborted, no image of its memory."""
    die_with_parent(signal.SIGTERM)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Server:
    """A started server."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], log: Path, port: int, model: str, key: str, folder: Path
    ) -> None:
        """
        Args:
            log: gets what it prints.
            folder: where it runs.
        """
        self.model = model
        self._key = key
        self._base = f"http://127.0.0.1:{port}"
        self._log = log
        # Without the job's proxy: this is loopback.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        fresh = not log.exists() or log.stat().st_size > MAX_LOG_BYTES
        with open(log, "wb" if fresh else "ab") as output:
            self._log_from = output.tell()
            self.process = subprocess.Popen(
                argv,
                env=dict(env),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_in_the_child,  # noqa: PLW1509 - the job has no threads
            )

    @property
    def died(self) -> bool:
        return self.process.poll() is not None

    def healthy(self) -> bool:
        """Whether /health says so now."""
        return self._ask("/health") is not None

    def serves(self) -> bool:
        """Whether /v1/models, asked with the key, names the model."""
        answer = self._ask("/v1/models", {"Authorization": f"Bearer {self._key}"})
        try:
            rows = json.loads(answer or b"null")["data"]
            return any(row.get("id") == self.model for row in rows)
        except (ValueError, TypeError, KeyError, AttributeError):
            return False

    def _ask(self, path: str, headers: Mapping[str, str] | None = None) -> bytes | None:
        request = urllib.request.Request(self._base + path, headers=dict(headers or {}))
        try:
            with self._opener.open(request, timeout=ASK_TIMEOUT_S) as answer:
                return bytes(answer.read(1 << 20))
        except (OSError, ValueError, http.client.HTTPException):  # whatever a broken server sends is no answer
            return None

    def stop(self) -> None:
        """Ends it and every process it started: an engine left behind would hold the GPU."""
        if not self.died:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_WAIT_S
            while not self.died and time.monotonic() < deadline:
                time.sleep(POLL_S)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def show_stacks(self) -> None:
        """Lets every Python process of it write into the log where it stands, by faulthandler. It ends by that."""
        self._signal(signal.SIGABRT)
        deadline = time.monotonic() + STACKS_WAIT_S
        while not self.died and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def last_words(self) -> str:
        """The last line of this start that tells an error which does not only follow another one; without any, the last line."""
        lines = self._lines()
        errors = [line for line in lines if "Error" in line]
        causes = [line for line in errors if not any(words in line for words in FOLLOWS)]
        return (causes or errors or lines or [""])[-1]

    def last_line(self) -> str:
        """What this start printed last."""
        return (self._lines() or [""])[-1]

    def _lines(self) -> list[str]:
        """The last lines of this start that hold anything, without the key."""
        try:
            with open(self._log, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(self._log_from, size - LOG_TAIL_BYTES))
                text = file.read().decode("utf-8", errors="replace")
        except OSError:
            return []
        return [line.strip().replace(self._key, "***")[:MAX_WORDS] for line in text.splitlines() if line.strip()]
