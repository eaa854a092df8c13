"""What is left of the run's budget, as the supervisor writes it into `time.json` of the workspace."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

LOOK_EVERY_S = 1.0
STALE_S = 60.0
"""A `time.json` that has not changed for so long says nothing any more about whether the time is over."""


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

    def over(self) -> str | None:
        """In words, which budget is used up; None: none is known to be."""
        value = self.value()
        ended = value.get("ended_by") or value.get("exhausted")
        if ended:
            return f"the budget is used up: {ended}"
        return "the time is over" if self.left_s is not None and self.left_s <= 0 else None

    def line(self) -> str:
        """One line for the LLM: what is left, and warnings that are new."""
        value = self.value()
        parts = []
        if self.left_s is not None:
            parts.append(duration(self.left_s))
        told = value.get("left")
        left: dict[str, Any] = told if isinstance(told, dict) else {}
        for key, word in (
            ("gpu_hours", "GPU-hours"),
            ("tokens", "tokens"),
            ("cost_usd", "USD"),
            ("submissions", "submissions"),
        ):
            number = _number(left.get(key))
            if number is not None:
                shown = f"{number:,.0f}" if key in ("tokens", "submissions") else f"{number:.2f}"
                parts.append(f"{shown} {word}")
        text = f"[budget left: {', '.join(parts)}]" if parts else ""
        warnings = value.get("warnings")
        if isinstance(warnings, list) and len(warnings) > self._told:
            new = [_words(warning) for warning in warnings[self._told :]]
            self._told = len(warnings)
            text += f"\n[warning: {'; '.join(new)}]"
        return text.strip()


def _words(warning: Any) -> str:
    if isinstance(warning, dict):
        text = warning.get("text") or warning.get("message")
        return str(text) if text else ", ".join(f"{key} {value}" for key, value in warning.items())
    return str(warning)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def duration(seconds: float) -> str:
    """For people: `2 h 5 min`, `7 min`, `40 s`."""
    whole = int(max(0.0, seconds))
    if whole < 120:
        return f"{whole} s"
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
