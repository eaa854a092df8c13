"""What a run's agent had of its driver, by the gateway's own account."""

from __future__ import annotations

from pathlib import Path

from autorl_hpc.files.driver_log import add_up_calls, read_calls
from autorl_hpc.records.ledger import DriverUse


def read_use(path: Path) -> DriverUse:
    """The sums over driver.jsonl, all attempts; zeros where there is none."""
    sums = add_up_calls(read_calls(path))
    return DriverUse(
        tokens_in=sums.tokens_in,
        tokens_out=sums.tokens_out,
        tokens_cached=sums.tokens_cached,
        cost_usd=sums.cost_usd,
        calls=sums.calls,
        refused=sums.refused,
    )
