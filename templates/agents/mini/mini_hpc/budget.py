"""What is left of the run's budget, as the supervisor writes it into `time.json` of the workspace."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

LOOK_EVERY_S = 1.0
RESERVE_S, RESERVE_SHARE = 90.0, 0.05
SHOWN = {"gpu_hours": "GPU-hours", "tokens": "tokens", "cost_usd": "USD", "submissions": "submissions"}
WHOLE = ("tokens", "submissions")


class Budget:
    """Reads `time.json`, at most once a second. Every figure may be missing."""

    def __init__(self, workspace: Path) -> None:
        self._path = workspace / "time.json"
        self._read_at = float("-inf")
        self._value: dict[str, Any] = {}
        self._told = 0

    def value(self) -> dict[str, Any]:
        """The file's content; an empty one where there is none."""
        if time.monotonic() - self._read_at >= LOOK_EVERY_S:
            self._read_at = time.monotonic()
            try:
                value = json.loads(self._path.read_text(encoding="utf-8"))
                self._value = value if isinstance(value, dict) else {}
            except (OSError, ValueError):
                pass  # being replaced, or never written: the last state counts
        return self._value

    @property
    def left_s(self) -> float | None:
        """Seconds of wall clock."""
        return _number(self.value().get("left_s"))

    @property
    def reserve_s(self) -> float:
        """So long before the time is over a command is stopped: enough to submit what there is."""
        timeout_s = _number(self.value().get("timeout_s"))
        return RESERVE_S if timeout_s is None else min(RESERVE_S, RESERVE_SHARE * timeout_s)

    def over(self) -> str | None:
        """In words, that a part of the budget is used up; None: none is known to be. Only submissions count then."""
        value = self.value()
        grace = value.get("grace")
        if isinstance(grace, dict):
            return f"the budget is used up: {grace.get('out_of')}"
        return "the time is over" if self.left_s is not None and self.left_s <= 0 else None

    def line(self) -> str:
        """One line for the LLM: what is left of each part that is limited, and warnings that are new."""
        value = self.value()
        parts = [] if self.left_s is None else [duration(self.left_s)]
        told = value.get("budgets")
        budgets = told if isinstance(told, dict) else {}
        for name, word in SHOWN.items():
            part = budgets.get(name)
            left = _number(part.get("left")) if isinstance(part, dict) else None
            if left is not None:
                parts.append(f"{f'{left:,.0f}' if name in WHOLE else f'{left:.2f}'} {word}")
        text = f"[budget left: {', '.join(parts)}]" if parts else ""
        warnings = value.get("warnings")
        if isinstance(warnings, list) and len(warnings) > self._told:
            text += f"\n[warning: {'; '.join(str(each) for each in warnings[self._told :])}]"
            self._told = len(warnings)
        return text.strip()


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def duration(seconds: float) -> str:
    """For people: `2 h 5 min`, `7 min`, `40 s`."""
    whole = int(max(0.0, seconds))
    if whole < 120:
        return f"{whole} s"
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
