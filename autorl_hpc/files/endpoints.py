"""Where the drivers answer that jobs of ours serve: `drivers/<name>.json`, written by the driver's job, read by gateways.

A job makes a generation its own by link; the highest one holds the driver, and an older job that sees a newer one steps back
(Slurm may run two attempts of one job at once). A reader judges the heartbeat by its own monotonic clock.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from pydantic import ValidationError

from autorl_hpc.files import atomic, reading
from autorl_hpc.records.driver import DriverEndpoint

_GENERATION = re.compile(r"^(?P<name>.+)\.g(?P<generation>\d{4,})$")

STALE_AFTER_S = 60.0
"""Without a new counter for so long, a driver's job is taken for dead. It writes every few seconds."""


def read_endpoint(path: Path) -> DriverEndpoint | None:
    """The endpoint in the file; None where there is none, or none that can be read now."""
    value = reading.read_json_or_none(path)
    try:
        return None if value is None else DriverEndpoint.model_validate(value)
    except ValidationError:
        return None


def write_endpoint(path: Path, endpoint: DriverEndpoint) -> None:
    """Replaces the file, whole or not at all."""
    atomic.write_bytes(path, endpoint.canonical() + b"\n")


def take_generation(folder: Path, name: str) -> int:
    """The next generation of a driver, which is then the caller's alone."""
    while True:
        wanted = newest_generation(folder, name) + 1
        if atomic.publish_bytes(folder / f"{name}.g{wanted:04d}", b""):
            return wanted


def newest_generation(folder: Path, name: str) -> int:
    """The highest generation that a job has taken; 0: none."""
    found = [match for entry in reading.list_names(folder) if (match := _GENERATION.match(entry))]
    return max((int(match["generation"]) for match in found if match["name"] == name), default=0)


class EndpointWatch:
    """One driver's endpoint file, as one reader sees it over time."""

    def __init__(self, path: Path, stale_after_s: float = STALE_AFTER_S) -> None:
        self.path = path
        self.stale_after_s = stale_after_s
        self.last: DriverEndpoint | None = None
        self._changed_at: float | None = None
        self._seen_twice = False

    def look(self) -> DriverEndpoint | None:
        """What the file says now; None if nothing. Call it every few seconds."""
        now = time.monotonic()
        found = read_endpoint(self.path)
        if found is None:  # no sign of life, and none of death: time goes on from the last one
            return self.last
        if self.last is None or (found.generation, found.counter) != (self.last.generation, self.last.counter):
            self._seen_twice = self.last is not None
            self._changed_at = now
        self.last = found
        return found

    @property
    def is_stale(self) -> bool:
        """Whether the counter has not changed for `stale_after_s` of this reader's time."""
        return self._changed_at is not None and time.monotonic() - self._changed_at > self.stale_after_s

    @property
    def is_alive(self) -> bool:
        """Whether the counter was seen to change: a file alone may be left over from a dead job."""
        return self._seen_twice and not self.is_stale

    def ready(self) -> DriverEndpoint | None:
        """The endpoint, where the driver says that it answers and its job lives."""
        found = self.look()
        return found if found is not None and found.ready and found.url and self.is_alive else None
