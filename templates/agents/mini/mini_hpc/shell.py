"""Runs the LLM's commands: mini-swe-agent's environment, with time limits that leave room to submit."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minisweagent.environments.local import LocalEnvironment, LocalEnvironmentConfig

from mini_hpc.budget import Budget, duration

POLL_S = 0.1
TERM_S = 3.0
MIN_S = 10.0
MAX_OUTPUT_BYTES = 256 * 1024 * 1024
KEPT_BYTES = 200_000
"""Of an output, from its beginning and from its end; the LLM sees less."""

QUIET = {
    "PAGER": "cat",
    "MANPAGER": "cat",
    "LESS": "-R",
    "PIP_PROGRESS_BAR": "off",
    "TQDM_DISABLE": "1",
    "GIT_PAGER": "cat",
}
"""Programs that wait for a key, or draw bars that cost tokens."""

BACKGROUND = (
    "It was stopped with everything that it started in the foreground. Run what takes longer in the background, with its "
    "output in a file: `nohup python3 code/train.py > output/train.log 2>&1 &`; then look now and then: "
    "`sleep 120; tail -n 5 output/train.log`."
)


class ShellConfig(LocalEnvironmentConfig):
    """`timeout`: seconds that a command may take at most."""

    timeout: int = 600


class Shell(LocalEnvironment):
    """A bash of its own for each command, in the workspace.

    Args:
        refuse_end: looked at when the LLM says that it is done; words mean that it should think again.
    """

    def __init__(
        self, workspace: Path, budget: Budget, timeout_s: int, refuse_end: Callable[[], str | None] = lambda: None
    ) -> None:
        super().__init__(config_class=ShellConfig, cwd=str(workspace), env=QUIET, timeout=timeout_s)
        self.budget, self.refuse_end = budget, refuse_end
        self._last: tuple[str, str, int] | None = None
        self._times = 1

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """Nothing of the environment's variables: keys stay out of texts."""
        return {**self.config.model_dump(), **kwargs}

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Runs one command. Raises minisweagent's `Submitted` when it says that the work is done."""
        limit_s = float(timeout or self.config.timeout)
        left_s = self.budget.left_s
        by_budget = left_s is not None and left_s - self.budget.reserve_s < limit_s
        if by_budget and left_s is not None:
            limit_s = max(MIN_S, left_s - self.budget.reserve_s)
        began = time.monotonic()
        output, code, why = self._run(str(action.get("command", "")), cwd or self.config.cwd, limit_s)
        if why == "time":
            why = f"The command did not end within {duration(limit_s)}. " + (
                "It was stopped since the budget is nearly used up: submit the best checkpoint that you have, now."
                if by_budget
                else BACKGROUND
            )
        told = {
            "output": output,
            "returncode": code,
            "exception_info": why,
            "extra": {"duration_s": round(time.monotonic() - began, 3)},
        }
        self._note_repeats(str(action.get("command", "")), told)
        self._check_finished(told)
        return told

    def _check_finished(self, output: dict[str, Any]) -> None:
        said = output["output"].lstrip()
        if said.startswith("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT") and output["returncode"] == 0:
            refusal = self.refuse_end()
            if refusal:
                output["output"] = refusal
                return
        super()._check_finished(output)

    def _note_repeats(self, command: str, told: dict[str, Any]) -> None:
        this = (command, told["output"], told["returncode"])
        self._times = self._times + 1 if this == self._last else 1
        self._last = this
        if self._times > 2:
            told["exception_info"] += f"You ran this {self._times} times with the same outcome. Do something else."

    def _run(self, command: str, cwd: str, limit_s: float) -> tuple[str, int, str]:
        """(output, return code, why it was stopped).

        The command lies in a file: on a command line, a `pkill -f` in it would find its own shell. The output too: with a
        pipe, a program left in the background would keep the shell's end from being seen.
        """
        with tempfile.TemporaryDirectory(prefix="mini-") as folder:
            script, out = Path(folder, "command"), Path(folder, "output")
            script.write_text(command + "\n", encoding="utf-8", errors="surrogateescape")
            with open(out, "wb") as file:
                process = subprocess.Popen(
                    ["bash", str(script)],
                    cwd=cwd,
                    env=os.environ | self.config.env,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            try:
                why = self._wait(process, out, limit_s)
            finally:
                if process.poll() is None:
                    _stop(process)
            return _read(out), process.wait(), why

    def _wait(self, process: subprocess.Popen[bytes], out: Path, limit_s: float) -> str:
        deadline = time.monotonic() + limit_s
        while process.poll() is None:
            why = ""
            if time.monotonic() > deadline:
                why = "time"
            elif out.stat().st_size > MAX_OUTPUT_BYTES:
                why = f"The command printed more than {MAX_OUTPUT_BYTES // 2**20} MiB and was stopped. Print into a file, or less."
            else:
                why = self.budget.over() or ""
            if why:
                return why
            time.sleep(POLL_S)
        return ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the command's whole group: TERM, a moment, KILL. What it sent away by `setsid` or `nohup ... &` in another group goes on."""
    for number, wait_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue
        if number == signal.SIGTERM:
            continue  # the shell is gone, its children may be deaf to TERM
        return


def _read(path: Path) -> str:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(KEPT_BYTES)
        if size <= KEPT_BYTES:
            return head.decode("utf-8", "replace")
        file.seek(max(KEPT_BYTES, size - KEPT_BYTES))
        tail = file.read(KEPT_BYTES)
    left_out = size - len(head) - len(tail)
    gap = f"\n[... {left_out} bytes left out ...]\n" if left_out else ""
    return head.decode("utf-8", "replace") + gap + tail.decode("utf-8", "replace")
