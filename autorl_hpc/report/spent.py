"""What of its budget a run used, part by part."""

from __future__ import annotations

from autorl_hpc.files.view import RunView

NAMES = {
    "gpu_hours": "GPU-hours",
    "tokens": "driver tokens",
    "cost_usd": "driver cost",
    "max_submissions": "submissions",
}


def used_of(view: RunView) -> dict[str, float]:
    """Of the parts beside time, by the names of the budget's fields; none before the seal."""
    sealed = view.sealed
    if sealed is None:
        return {}
    found: dict[str, float] = {"max_submissions": float(len(view.contents()))}
    if sealed.gpu_hours is not None:
        found["gpu_hours"] = sealed.gpu_hours
    if sealed.driver is not None:
        found["tokens"] = float(sealed.driver.tokens)
        if sealed.driver.cost_usd is not None:
            found["cost_usd"] = sealed.driver.cost_usd
    return found
