"""`logs`: print the log of a run's agent, gateway, supervisor or grader, without terminal escapes and secrets; `--follow` goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from autorl_hpc.cluster.job_table import read_submitted
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import jobs_of
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.redact import masked
from autorl_hpc.files.safe_open import open_plain
from autorl_hpc.report.find import nothing_in, runs_of
from autorl_hpc.report.format import clean_code

LogOf = Literal["agent", "gateway", "supervisor", "grader"]
MAX_LINE_CHARS = 4000
CHUNK_BYTES = 1 << 20
PAUSE_S = 1.0


def logs_of(run: RunDir, of: LogOf) -> list[Path]:
    """Return the logs that exist. Supervisors and graders write to the logs of their jobs: the ledger and slurm.json name the jobs."""
    if of in ("agent", "gateway"):
        return [path for path in (run.agent_log if of == "agent" else run.gateway_log,) if path.is_file()]
    experiment, role = ExperimentDir(run.path.parent), "agents" if of == "supervisor" else "grader"
    ids: list[str | None] = []
    with suppress(AutorlError, OSError):
        ids += [one.entry.writer.job_id for one in Ledger(run).read() if one.entry.writer.role == of]
    with suppress(AutorlError, OSError):
        submitted = read_submitted(experiment)
        for job in submitted.submitted if submitted else ():
            if job.role.startswith(role):
                ids.append(f"{job.job_id}_{job.runs.index(run.run_id)}" if run.run_id in job.runs else job.job_id)
    ids += [str(job.pid) for job in jobs_of(experiment) if job.role.startswith(role)]
    paths = [experiment.jobs / f"{job_id}_0_log.out" for job_id in dict.fromkeys(ids) if job_id]
    return sorted((path for path in paths if path.is_file()), key=lambda path: path.stat().st_mtime)


def print_logs(run: RunDir, of: LogOf, follow: bool, say: Callable[[str], None]) -> None:
    """Print the logs of a run, one after the other; with `follow`, what is added until the run is over.

    Raises AutorlError: there is no such run, or no such log of it.
    """
    if not run.record.is_file():
        raise nothing_in(run.path)
    experiment = ExperimentDir(run.path.parent)
    others = [name for name in runs_of(experiment)[0] if name != run.run_id] if of in ("supervisor", "grader") else []
    at: dict[Path, int] = {}
    while True:
        over = run.run_id in reading.list_names(experiment.finished)
        paths = logs_of(run, of)
        for path in paths:
            if path not in at and len(paths) > 1:
                say(f"--- {path}")
            for line in _lines(path, at, last=over or not follow):
                if run.run_id in line or not any(name in line for name in others):
                    say(line)
        if not at and (over or not follow):
            where = run.logs if of in ("agent", "gateway") else experiment.jobs
            raise AutorlError(
                f"this run has no log of its {of}", where=where, next_step="see `autorl-hpc status` on it"
            )
        if over or not follow:
            return
        time.sleep(PAUSE_S)


def _lines(path: Path, at: dict[Path, int], last: bool) -> Iterator[str]:
    """Yield what was added to a log since the last call in whole lines, cleaned and masked; the unfinished line if `last`."""
    begin = at.setdefault(path, 0)
    descriptor = open_plain(path)
    if descriptor is None:
        return
    with os.fdopen(descriptor, "rb") as file:
        file.seek(begin)
        while data := file.read(CHUNK_BYTES):
            end = data.rfind(b"\n") + 1
            if not end and not last and len(data) < CHUNK_BYTES:
                return
            taken = data[: end or len(data)]
            at[path] += len(taken)
            file.seek(at[path])
            for line in masked(taken.decode("utf-8", "replace")).removesuffix("\n").split("\n"):
                yield clean_code(
                    line.rstrip("\r").rsplit("\r", 1)[-1], MAX_LINE_CHARS
                )  # of a progress bar the last state
