"""One start of a driver's server: a process group of its own, asked over HTTP whether it answers."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
LOG_TAIL_BYTES = 4096
MAX_LOG_BYTES = 64 * 1024 * 1024
"""Of a server's output; what is older is dropped at its next start."""

ASK_TIMEOUT_S = 10.0
STOP_WAIT_S = 15.0
POLL_S = 0.1

_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    """In the child: a job that is killed without a word leaves no server behind that holds the GPU."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


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
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - the job has no threads
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

    def last_words(self) -> str:
        """The last line that this start printed and that says something, most often its error."""
        try:
            with open(self._log, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(self._log_from, size - LOG_TAIL_BYTES))
                text = file.read().decode("utf-8", errors="replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or [""])[-1].replace(self._key, "***")[:300]
