"""Jobs on this machine as files: who was started, and whether that very process still lives."""

from __future__ import annotations

from dataclasses import dataclass

from autorl_hpc.files import reading
from autorl_hpc.files.host import boot_id
from autorl_hpc.files.layout import ExperimentDir

JOBS_NAME = "local.json"


@dataclass(frozen=True)
class LocalJob:
    """A job on this machine: the controller's pid with its start time, so that a re-used pid is not taken for it."""

    role: str
    pid: int
    started: str

    def alive(self) -> bool:
        """Whether that very process is still there."""
        return process_start(self.pid) == self.started


def process_start(pid: int) -> str | None:
    """Boot id and start time (clock ticks since boot) of a living process, None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else f"{boot_id()}:{fields[19].decode()}"


def jobs_of(experiment: ExperimentDir) -> list[LocalJob]:
    """The jobs that were last submitted here."""
    value = reading.read_json_or_none(experiment.jobs / JOBS_NAME)
    rows = value.get("jobs", []) if isinstance(value, dict) else []
    return [LocalJob(str(row["role"]), int(row["pid"]), str(row["started"])) for row in rows]


def alive_jobs(experiment: ExperimentDir) -> list[LocalJob]:
    """Those that are still running."""
    return [job for job in jobs_of(experiment) if job.alive()]
