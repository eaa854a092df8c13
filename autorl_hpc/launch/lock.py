"""One launch or cancel of an experiment at a time, on whatever login nodes: two would see no job and submit all twice."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import atomic
from autorl_hpc.files.claims import Claims, HeartbeatWatch, write_heartbeat
from autorl_hpc.files.host import host_name
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.records.exchange import Heartbeat

log = logging.getLogger("autorl_hpc.launch")

LOCK = "launching"
STALE_S = 30.0
BEAT_S = 3.0
"""A holder that gave no sign of life for ten beats is dead."""

WAIT_S = 1200.0
SAY_AFTER_S = 2.0


@contextmanager
def only_one(experiment: ExperimentDir, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock: a claim in jobs/ with a heartbeat, as graders hold their entries.

    Raises:
        AutorlError: another holder lives on and on.
    """
    folder = experiment.jobs
    folder.mkdir(exist_ok=True)
    me = f"{LOCK}-{host_name()}-{os.getpid()}-{secrets.token_hex(3)}"
    claims = Claims(folder, me, host_name(), HeartbeatWatch(folder, STALE_S))
    ending = threading.Event()
    thread = threading.Thread(target=_beat, args=(experiment, me, ending), name="lock", daemon=True)
    thread.start()
    try:
        _take(claims, experiment, say)
        yield
    finally:
        ending.set()
        thread.join()
        claims.drop_own()
        atomic.unlink_quietly(folder / f"{me}.json")


def _take(claims: Claims, experiment: ExperimentDir, say: Callable[[str], None]) -> None:
    started = time.monotonic()
    said = False
    while claims.take(LOCK, claims.current()) is None:
        waited_s = time.monotonic() - started
        if waited_s > SAY_AFTER_S and not said:
            say("waiting for another launch or cancel of this experiment (half a minute, if it was killed)")
            said = True
        if waited_s > WAIT_S:
            raise AutorlError(
                "another launch of this experiment is still submitting its jobs",
                where=experiment.path,
                next_step="wait for it, then launch again",
                exit_code=Exit.ENVIRONMENT,
            )
        time.sleep(0.3)


def _beat(experiment: ExperimentDir, me: str, ending: threading.Event) -> None:
    beat = Heartbeat(grader=me, host=host_name(), pid=os.getpid(), counter=0, state="starting")
    while True:
        beat = beat.model_copy(update={"counter": beat.counter + 1})
        try:
            write_heartbeat(experiment.jobs, beat)
        except OSError as error:
            log.warning("sign of life not written: %s", error)
        if ending.wait(BEAT_S):
            return
