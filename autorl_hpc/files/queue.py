"""The queue folder: names carry what a grader needs to choose, so choosing opens no file.

Names: `b1-...` a baseline on the feedback split, `f-<run>--<n>` a submission, `c-<run>` a closing, `b2-...` a baseline
on the report split, `p-<run>--<n>` the fingerprint of a scored submission. `grading/order.py` says in which order.
"""

from __future__ import annotations

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


def is_waited_for(name: str) -> bool:
    """Whether an agent that is at work waits for it: nothing else may stand in its way."""
    return name.startswith(("b1-", "f-"))


def run_of(name: str) -> str:
    """The run_id in an entry's name."""
    return name.partition("-")[2].partition("--")[0]


def number_of(name: str) -> int:
    """The submission's number in an entry's name, 0 where there is none."""
    number = name.rpartition("--")[2]
    return int(number) if number.isascii() and number.isdecimal() else 0
