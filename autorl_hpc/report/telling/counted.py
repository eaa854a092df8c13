"""What the gateway counted takes the place of what an agent's trace tells: it is measured where the requests pass."""

from __future__ import annotations

from dataclasses import replace

from autorl_hpc.files.driver_log import DriverTotals
from autorl_hpc.files.spans import joined
from autorl_hpc.files.trace_totals import TraceTotals


def with_counted(told: TraceTotals, counted: DriverTotals | None) -> TraceTotals:
    """The trace's totals with the gateway's tokens and calls, and its cost where the experiment names prices. Tools, errors and the
    spans of sessions stay the trace's."""
    if counted is None:
        return told
    points = counted.points
    cost_usd = counted.cost_usd
    if cost_usd is None and told.cost_usd is not None:
        cost_usd = told.cost_usd
        points = tuple((at, tokens, told.cost_at(at) or 0.0) for at, tokens, _ in points)
    last_s = points[-1][0] if points else None
    return replace(
        told,
        tokens_in=counted.tokens_in,
        tokens_out=counted.tokens_out,
        tokens_cached=counted.tokens_cached,
        driver_calls=counted.calls,
        cost_usd=cost_usd,
        points=points,
        driver_spans=told.driver_spans if told.sessions else joined(counted.spans),
        last_driver_s=told.last_driver_s if told.sessions else last_s,
    )
