"""Hold the fields of a trace line (`ParsedLine`), and functions that read values from JSON whose content can't be trusted."""

from __future__ import annotations

import gc
import json
import math
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from autorl_hpc.files.redact import masked
from autorl_hpc.records.base import printable
from autorl_hpc.records.recorded import TraceKind

MAX_COUNT = 10**12
"""No session uses this many tokens or calls: a larger number is an error or a forgery, and would hide all others."""

MAX_USD = 10.0**7
MAX_DURATION_S = 10.0**7
MAX_NAME_CHARS = 200
MAX_COMMAND_CHARS = 500
MAX_TEXT_CHARS = 500
LARGE_CHARS = 64 * 1024
"""The garbage collector is off while longer texts are parsed, because it would walk a million new lists again and again."""

MASKED_CHARS = 4096
"""Secrets are masked in this much text before it is cut, so that a secret at the cut is masked too."""


@dataclass(frozen=True)
class ParsedLine:
    """The fields of a TraceEvent that come from the line itself. `wall` is the line's own time in seconds since 1970."""

    kind: TraceKind
    model: str | None = None
    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens_cached: int | None = None
    cost_usd: float | None = None
    is_total: bool = False
    session: str | None = None
    calls: int | None = None
    tool_calls: int | None = None
    tool_failures: int | None = None
    call_id: str | None = None
    tool: str | None = None
    command: str | None = None
    exit_code: int | None = None
    ok: bool | None = None
    text: str | None = None
    duration_s: float | None = None
    chars: int | None = None
    wall: float | None = None

    def has_figures(self) -> bool:
        """Return whether a usage has any value."""
        return not (self.tokens_in is self.tokens_out is self.tokens_cached is self.cost_usd is self.calls is None)


Table = dict[str, Any]

_DECODER = json.JSONDecoder(
    parse_constant=lambda name: None,
    parse_int=lambda digits: int(digits) if len(digits) <= 20 else None,
    parse_float=lambda digits: float(digits) if len(digits) <= 400 else None,
)
"""NaN and infinities become null, and so do integers of more than 20 digits (Python refuses more than 4,300)."""


def parsed(text: str, at: int = 0) -> Any:
    """Parse the JSON value that begins at `at`; what follows is ignored. Return None if it is not JSON, or nested too deeply."""
    collecting = len(text) > LARGE_CHARS and gc.isenabled()
    if collecting:
        gc.disable()
    try:
        return _DECODER.raw_decode(text, at)[0]
    except (ValueError, RecursionError, MemoryError):
        return None
    finally:
        if collecting:
            gc.enable()


def table(value: Any) -> Table:
    """Return an object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def tables(value: Any) -> list[Table]:
    """Return the objects in a list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def count(value: Any) -> int | None:
    """Return a plausible number of tokens or calls: whole, not negative, at most MAX_COUNT; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= MAX_COUNT else None


def total(*values: int | None) -> int | None:
    """Return the sum of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return min(sum(known), MAX_COUNT) if known else None


def real(value: Any, most: float) -> float | None:
    """Return a number from 0 to `most`; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= most and math.isfinite(value) else None


def dollars(value: Any) -> float | None:
    """Return a cost in dollars; None if it is not plausible."""
    return real(value, MAX_USD)


def seconds(value: Any, per: float = 1.0) -> float | None:
    """Return a duration in seconds; the value's unit is 1/`per` s."""
    found = real(value, MAX_DURATION_S * per)
    return None if found is None else found / per


def exit_code(value: Any) -> int | None:
    """Return an exit code, or minus a signal's number; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and -256 <= value <= 2**32 else None


def name(value: Any) -> str | None:
    """Return an id or a name: a short text, or a number; None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18:
        return str(value)
    if not isinstance(value, str) or not value:
        return None
    value = value[:MAX_NAME_CHARS]
    return value if value.isprintable() else printable(value)[:MAX_NAME_CHARS]


def beginning(value: Any, limit: int = MAX_TEXT_CHARS) -> str | None:
    """Return the beginning of a text, without secrets, escaped; None if there is no text."""
    if not isinstance(value, str) or not value.strip():
        return None
    shown = printable(masked(value.strip()[:MASKED_CHARS])[: limit + 1])  # escaping never makes a text shorter
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def length(value: Any) -> int:
    """Return the number of characters of a text; 0 for anything else."""
    return len(value) if isinstance(value, str) else 0


def wall(value: Any) -> float | None:
    """Return a time stamp in seconds since 1970, from ISO 8601 (without a zone: this host's), seconds, or milliseconds."""
    if isinstance(value, str) and len(value) <= 40:
        try:
            return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
        except (ValueError, OverflowError, OSError):
            return None
    found = real(value, 1e14)
    return None if found is None else found / 1000 if found > 1e11 else found


_RUNS = ("command", "cmd", "code", "script", "commands")
_WRITTEN = ("file_path", "filePath", "path", "notebook_path", "absolute_path", "filename")
_WRITES = re.compile(r"write|edit|patch|replace|create|insert|notebook", re.IGNORECASE)


def command(tool: str | None, given: Any) -> str | None:
    """Return the beginning of the command that a tool call runs, or the file that it writes; None if it does neither."""
    for key in _RUNS:
        value = table(given).get(key)
        if isinstance(value, list):
            value = " ".join(part for part in value[:1000] if isinstance(part, str))
        if isinstance(value, str) and value.strip():
            return beginning(value, MAX_COMMAND_CHARS)
    if tool is not None and _WRITES.search(tool):
        return next(
            (beginning(table(given).get(key), MAX_COMMAND_CHARS) for key in _WRITTEN if table(given).get(key)), None
        )
    return None
