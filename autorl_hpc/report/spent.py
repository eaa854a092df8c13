"""What of its budget a run used, part by part."""

from __future__ import annotations

from collections.abc import Mapping

from autorl_hpc.files.view import RunView
from autorl_hpc.report import format as fmt

NAMES = {
    "gpu_hours": "GPU-hours",
    "tokens": "driver tokens",
    "cost_usd": "driver cost",
    "max_submissions": "submissions",
}

_LIMITS = {
    "gpu_hours": "GPU-hours",
    "tokens": "tokens",
    "cost_usd": "USD",
    "max_submissions": "submissions",
    "memory_gib": "GiB of memory",
    "disk_gib": "GiB of disk",
    "processes": "processes",
}


def limits_told(limits: Mapping[str, float]) -> str:
    """A budget's limits beside its time: `24 GPU-hours, 20 M tokens, 60 USD`; empty where there is none."""
    told = [f"{_short(name, limits[name])} {words}" for name, words in _LIMITS.items() if name in limits]
    return ", ".join(told)


def _short(name: str, value: float) -> str:
    return fmt.amount("count", value).replace(".0 ", " ") if name == "tokens" else f"{value:,.10g}"


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
