"""What `status` says of queue entries that fail and wait: of a run beside the run, of base models above the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autorl_hpc.files.queue import run_of
from autorl_hpc.records.exchange import Trouble

BASELINE = "b"
"""First letter of the names of base models' entries."""


def with_trouble(row: dict[str, Any], troubles: Sequence[Trouble]) -> dict[str, Any]:
    """A run's row with fault and reason of its entry that failed most often, unless the run's own ending has some."""
    own = [each for each in troubles if not each.entry.startswith(BASELINE) and run_of(each.entry) == row["run_id"]]
    if not own or row["fault"] is not None:
        return row
    worst = max(own, key=lambda each: each.failures)
    return {
        **row,
        "fault": str(worst.fault),
        "reason": f"{_times(worst.failures)}, tried again: {_first(worst.problem)}",
    }


def of_no_run(troubles: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each base model that can't be scored."""
    for each in troubles:
        if each["entry"].startswith(BASELINE):
            yield f"{each['entry']}: {each['fault']}: {_times(each['failures'])}, tried again: {_first(each['problem'])}"


def _times(failures: int) -> str:
    return "failed once" if failures == 1 else f"failed {failures} times"


def _first(problem: str) -> str:
    return problem.split("\n", 1)[0]
