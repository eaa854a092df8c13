"""The queue folder: names carry what a grader needs to choose, so choosing opens no file.

Names: `b1-...` a baseline on the feedback split, `f-<run>--<n>` a submission, `c-<run>` a closing, `b2-...` a baseline
on the report split, `p-<run>--<n>` the fingerprint of a scored submission.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from autorl_hpc.files import atomic, reading
from autorl_hpc.records.exchange import QueueEntry
from autorl_hpc.states import QueueKind, Split

SUFFIX = ".json"


def entry_name(entry: QueueEntry) -> str:
    """The file name of an entry, without suffix."""
    if entry.kind is QueueKind.BASELINE:
        number = 1 if entry.split is Split.FEEDBACK else 2
        return f"b{number}-{entry.task}-{entry.base_model.replace('/', '+')}-{entry.recipe_hash[:8]}"
    if entry.kind is QueueKind.FEEDBACK:
        return f"f-{entry.run_id}--{entry.submission_id:06d}"
    if entry.kind is QueueKind.FINGERPRINT:
        return f"p-{entry.run_id}--{entry.submission_id:06d}"
    return f"c-{entry.run_id}"


def put(queue: Path, entry: QueueEntry) -> None:
    """Puts an entry into the queue; one that stands already is the same work."""
    atomic.publish_bytes(queue / f"{entry_name(entry)}{SUFFIX}", entry.canonical() + b"\n")


def waiting(queue: Path) -> list[str]:
    """Names of the waiting entries, without suffix, from one listing."""
    return [name[: -len(SUFFIX)] for name in reading.list_names(queue) if name.endswith(SUFFIX)]


@dataclass
class Order:
    """Chooses what comes next: feedback baselines, then submissions fair between runs, closings, report baselines,
    fingerprints."""

    served: dict[str, int] = field(default_factory=dict)
    first_seen: dict[str, int] = field(default_factory=dict)
    _counter: int = 0

    def sort(self, names: list[str]) -> list[str]:
        """The names in the order they should be tried."""
        for name in names:
            if name not in self.first_seen:
                self._counter += 1
                self.first_seen[name] = self._counter
        for name in set(self.first_seen) - set(names):
            del self.first_seen[name]
        return sorted(names, key=self._rank)

    def count(self, name: str) -> None:
        """Notes that a submission of this run has been served."""
        self.served[run_of(name)] = self.served.get(run_of(name), 0) + 1

    def _rank(self, name: str) -> tuple[int, int, int]:
        kind = {"b1": 0, "f": 1, "c": 2, "b2": 3, "p": 4}.get(name.split("-", 1)[0], 5)
        served = self.served.get(run_of(name), 0) if kind == 1 else 0
        return kind, served, self.first_seen[name]


def is_waited_for(name: str) -> bool:
    """Whether an agent that is at work waits for it: nothing else may stand in its way."""
    return name.startswith(("b1-", "f-"))


def run_of(name: str) -> str:
    """The run_id in an entry's name."""
    return name.partition("-")[2].partition("--")[0]
