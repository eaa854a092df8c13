"""What asks an attempt to stop: a signal to this job, a newer attempt, the user's `cancel`."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from autorl_hpc.files import reading
from autorl_hpc.files.layout import ExperimentDir

log = logging.getLogger("autorl_hpc.supervisor")

T = TypeVar("T")

LOOP_S = 0.1
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
SIGNAL_LAG_S = 5.0
"""A scheduler signals all processes of a job at once: an agent that died of it may be seen before our own signal."""

END_PATIENCE_S = 600.0
"""How long the end of an agent is tried to be written while the file system fails: it can't be done over."""

END_RETRY_S = 2.0


class Stops:
    """Whether one attempt has to stop, and why."""

    def __init__(self, experiment: ExperimentDir, run_id: str) -> None:
        self.experiment = experiment
        self.run_id = run_id
        self.signal: int | None = None
        self.superseded = threading.Event()

    def listen(self) -> None:
        """Takes the scheduler's signals from now on."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    @property
    def asked(self) -> bool:
        """Whether a signal or a newer attempt asks this one to step back."""
        return self.signal is not None or self.superseded.is_set()

    def cancelled(self) -> bool:
        """Whether the user cancelled the run."""
        return is_cancelled(self.experiment, self.run_id)

    def ended_agent(self, exit_code: int | None) -> bool:
        """Whether an agent's death by a signal is part of what stops this whole job."""
        if exit_code is None or not (exit_code < 0 or 128 < exit_code <= 128 + signal.NSIG):
            return False
        deadline = time.monotonic() + SIGNAL_LAG_S
        while self.signal is None and time.monotonic() < deadline:
            time.sleep(LOOP_S)
        return self.signal is not None

    def patiently(self, write: Callable[[], T], may_pass: Callable[[OSError], bool] = lambda error: True) -> T:
        """Does `write` again while the file system fails, for as long as no signal asks to stop. No budget passes here."""
        deadline = time.monotonic() + END_PATIENCE_S
        while True:
            try:
                return write()
            except OSError as error:
                if self.signal is not None or time.monotonic() > deadline or not may_pass(error):
                    raise
                log.warning("the file system fails; trying again: %s", error)
                time.sleep(END_RETRY_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number


def is_cancelled(experiment: ExperimentDir, run_id: str) -> bool:
    """Whether the user cancelled a run."""
    return bool({"all", run_id} & set(reading.list_names(experiment.cancel)))
