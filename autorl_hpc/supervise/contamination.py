"""Have the scanner search the workspace for held-out items, after accepted submissions and once after the agent's end. Results go only
into the ledger and never change the run. See docs/threat-model.md."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.processes import OWN, start_own
from autorl_hpc.records.entries import Contamination
from autorl_hpc.states import EntryKind
from autorl_hpc.supervise.attempt_ledger import LedgerWriter, Superseded

log = logging.getLogger("autorl_hpc.supervisor")

POLL_S = 0.5
LOOK_S = 120.0  # limit of one search while the agent works
REST_FACTOR, REST_LEAST_S = 3.0, 2.0  # a search is followed by a rest so many times as long: a quarter of a core
END_S = 10.0  # limit of the last search, from the agent's end to the seal, however much is left to read
SETTLE_S = 2.0  # how long a search that is running at the agent's end may take to report its results
KILL_AFTER_S = 5.0  # a scanner that exceeds its time by this much is stuck in a file and is killed
MAX_ALSO = 1000


class ContaminationWatch:
    """Has the workspace of one run searched. No failure here affects the run."""

    def __init__(
        self, experiment: ExperimentDir, run_id: str, workspace: Callable[[], Path], chain: LedgerWriter
    ) -> None:
        self.experiment, self.run_id, self.workspace, self.chain = experiment, run_id, workspace, chain
        self._scanner: subprocess.Popen[bytes] | None = None
        self._state: object = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="contamination", daemon=True)

    def start(self) -> None:
        """Start searching after accepted submissions."""
        self._thread.start()

    def finish(self, stop: Callable[[], bool]) -> None:
        """Before the seal, search a last time, END_S at most, if a submission was accepted: else no score depends on it. `stop`: asked
        ten times a second; True ends it without an entry, and the next attempt repeats it."""
        self._ending.set()
        if not self.chain.view.accepted():
            return
        begun = time.monotonic()
        if self._thread.ident is not None:
            self._signal(signal.SIGUSR1)
            self._thread.join(SETTLE_S)
            if self._thread.is_alive():
                self._signal(signal.SIGKILL)  # stuck in a file
                self._thread.join(1.0)
        body = self._look(max(1.0, END_S - (time.monotonic() - begun)), beside=False, stop=stop)
        if not stop():
            self._write(body, None, self._due())

    def _watch(self) -> None:
        rest_until = 0.0
        while not self._ending.wait(POLL_S):
            due = self._due() if time.monotonic() >= rest_until else []
            if not due:
                continue
            begun = time.monotonic()
            body = self._look(LOOK_S, beside=True)
            if body.complete or not self._ending.is_set():  # otherwise the last search covers these submissions
                self._write(body, due[-1], due[:-1])
            rest_until = time.monotonic() + max(REST_LEAST_S, REST_FACTOR * (time.monotonic() - begun))

    def _due(self) -> list[int]:
        view = self.chain.view
        seen = {n for c in view.contaminations for n in (c.submission_id, *c.also) if n is not None}
        return [s.submission_id for s in view.accepted() if s.submission_id not in seen]

    def _look(self, seconds: float, *, beside: bool, stop: Callable[[], bool] = lambda: False) -> Contamination:
        places = {"experiment": str(self.experiment.path.absolute()), "workspace": str(self.workspace().absolute())}
        job = {**places, "run": self.run_id, "seconds": seconds, "beside": beside}
        given: bytes | None = b"".join(json.dumps(line).encode() + b"\n" for line in (job, self._state))
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        why = "the scanner was ended from outside, or died of a file"
        deadline = time.monotonic() + seconds + KILL_AFTER_S
        try:
            self._scanner = process = start_own("autorl_hpc.supervise.scanner", env)
            try:
                while True:
                    try:
                        said, _ = process.communicate(given, 0.1)
                        break
                    except subprocess.TimeoutExpired:
                        given = None
                        if stop() or time.monotonic() > deadline:
                            raise
            except subprocess.TimeoutExpired:
                said, why = b"", "the scanner hung and was ended"
            finally:
                _end(process)
            if said:
                answer = json.loads(said)
                self._state = answer["state"]
                return Contamination.model_validate(answer["done"])
        except Exception as error:  # a defect; the next search may work
            log.exception("a look for held-out items failed")
            why = f"{type(error).__name__}: {error}"
        log.warning("no look for held-out items: %s", why)
        return Contamination(complete=False, reason=f"no look: {why}"[:500])

    def _write(self, body: Contamination, submission_id: int | None, also: list[int]) -> None:
        # Only the oldest MAX_ALSO are named. The others remain due, and the last search names as many of them as fit.
        body = body.model_copy(update={"submission_id": submission_id, "also": tuple(also[:MAX_ALSO])})
        try:
            self.chain.write(EntryKind.CONTAMINATION, body)
        except Superseded:
            pass  # the supervisor's main loop also notices the newer attempt
        except (OSError, AutorlError) as error:
            log.warning("a look for held-out items could not be recorded: %s", error)

    def _signal(self, number: signal.Signals) -> None:
        if self._scanner is not None:
            self._scanner.send_signal(number)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    try:
        process.wait(timeout=1.0)  # a process that hangs in the kernel can't be waited for
    except subprocess.TimeoutExpired:
        return
    OWN.discard(process.pid)
