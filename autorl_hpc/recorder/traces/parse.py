"""Make events from JSON whose content can't be trusted: `event` keeps the plausible values of an event, escaped and masked.

An event also holds what was said, in full and as it was (`FULL`): the recorder drops it, a report shows it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from autorl_hpc.files.redact import masked
from autorl_hpc.records.base import printable
from autorl_hpc.records.recorded import TraceKind

# No session uses this many tokens or calls: a larger number is an error or a forgery, and would hide all others.
MAX_COUNT = 10**12
MAX_USD = 10.0**7
MAX_DURATION_S = 10.0**7
MAX_NAME_CHARS = 200
MAX_TEXT_CHARS = 500
MASKED_CHARS = 4096  # secrets are masked in this much text before it is cut, so that a secret at the cut is masked too
Table = dict[str, Any]
Event = dict[str, Any]  # fields of a TraceEvent, `wall` (the line's own time in seconds since 1970), and those of FULL
# Unchecked content: who speaks in a message, the text of a message, error or end, and a tool's input and output.
FULL = ("role", "said", "input", "output")
# naN and infinities become null, and so do integers of more than 20 digits (Python refuses more than 4,300)
_DECODER = json.JSONDecoder(
    parse_constant=lambda name: None,
    parse_int=lambda digits: int(digits) if len(digits) <= 20 else None,
    parse_float=lambda digits: float(digits) if len(digits) <= 400 else None,
)


def parsed(text: str, at: int = 0) -> Any:
    """Parse the JSON value that begins at `at`; what follows is ignored. Return None if it is not JSON, or nested too deeply."""
    try:
        return _DECODER.raw_decode(text, at)[0]
    except (ValueError, RecursionError, MemoryError):
        return None


def within(value: Any, *keys: str) -> Any:
    """Return the value below these keys of nested objects; None if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def table(value: Any) -> Table:
    """Return an object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def tables(value: Any) -> list[Table]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def count(value: Any) -> int | None:
    """Return a plausible number of tokens or calls: whole, not negative, at most MAX_COUNT; None for anything else."""
    found = real(value, MAX_COUNT)
    return int(found) if found is not None and found.is_integer() else None


def total(*values: Any) -> int | None:
    known = [number for value in values if (number := count(value)) is not None]
    return min(sum(known), MAX_COUNT) if known else None


def real(value: Any, most: float) -> float | None:
    """Return a number from 0 to `most`; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= most and math.isfinite(value) else None


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


def beginning(value: Any) -> str | None:
    """Return the beginning of a text, without secrets, escaped; None if there is no text."""
    if not isinstance(value, str) or not value.strip():
        return None
    shown = printable(masked(value.strip()[:MASKED_CHARS])[: MAX_TEXT_CHARS + 1])  # escaping never makes a text shorter
    return shown if len(shown) <= MAX_TEXT_CHARS else shown[: MAX_TEXT_CHARS - 1] + "…"


def wall(value: Any) -> float | None:
    """Return a time stamp in seconds since 1970, from ISO 8601 (without a zone: this host's), seconds, or milliseconds."""
    if isinstance(value, str) and len(value) <= 40:
        try:
            return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
        except (ValueError, OverflowError, OSError):
            return None
    found = real(value, 1e14)
    return None if found is None else found / 1000 if found > 1e11 else found


_FIGURES = frozenset({"tokens_in", "tokens_out", "tokens_cached", "cost_usd", "calls"})
# what makes a field out of what a trace says; None if it is not plausible
_CLEAN: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("tokens_in", "tokens_out", "tokens_cached", "calls", "tool_calls", "tool_failures"), count),
    **dict.fromkeys(("session", "model", "call_id", "tool"), name),
    **dict.fromkeys(("command", "text"), beginning),
    **dict.fromkeys(("ok", "is_total"), bool),
    "cost_usd": lambda value: real(value, MAX_USD),
    "duration_s": lambda value: real(value, MAX_DURATION_S),
    "exit_code": exit_code,
    "wall": wall,
}


def _cleaned(raw: Table) -> Event:
    values = ((field, _CLEAN[field](value)) for field, value in raw.items() if value is not None)
    return {field: value for field, value in values if value is not None}


def event(kind: TraceKind, **raw: Any) -> Event:
    """Return an event with the plausible values among the fields given, and `text` as it was."""
    return {"kind": kind, **_cleaned(raw), "said": raw.get("text")}


def message(text: Any, role: str = "assistant") -> Event:
    """Return words of the driver (`assistant`, `thought`), or to it (`user`, `system`)."""
    return {"kind": "message", "chars": len(text) if isinstance(text, str) else 0, "role": role, "said": text}


def counted(events: list[Event]) -> list[Event]:
    """Return what the recorder keeps of the events of a line: no content, and no words to the driver."""
    kept = (each for each in events if each.get("role") not in ("user", "system"))
    return [{name: value for name, value in each.items() if name not in FULL} for each in kept]


def text_of(content: Any) -> str | None:
    """Return the text of a message or result: a text, or the texts of a list of blocks."""
    if isinstance(content, str):
        return content
    texts = [each["text"] for each in tables(content) if isinstance(each.get("text"), str)]
    return "\n".join(texts) if texts else None


def usage(**raw: Any) -> list[Event]:
    """Return an event of the kind `usage`; none if no figure is plausible."""
    found = event("usage", **raw)
    return [found] if found.keys() & _FIGURES else []


def result(failed: bool, said: Any, **raw: Any) -> Event:
    """Return a tool's result; the beginning of what it said is counted as its text if it failed."""
    return {**event("tool_result", ok=not failed, text=said if failed else None, **raw), "output": said}


def with_fields(events: list[Event], **raw: Any) -> list[Event]:
    """Add fields to the events that lack them."""
    fields = _cleaned(raw)
    return [{**fields, **each} for each in events]


RUNS = ("command", "cmd", "code", "script", "commands")
_WRITTEN = ("file_path", "filePath", "path", "notebook_path", "absolute_path", "filename")
_WRITES = re.compile(r"write|edit|patch|replace|create|insert|notebook", re.IGNORECASE)


def command(tool: Any, given: Any) -> str | None:
    """Return the command that a tool call runs, or the file that it writes; None if it does neither."""
    for key in RUNS:
        value = within(given, key)
        if isinstance(value, list):
            value = " ".join(part for part in value[:1000] if isinstance(part, str))
        if isinstance(value, str) and value.strip():
            return value
    if isinstance(tool, str) and _WRITES.search(tool[:MAX_NAME_CHARS]):
        return next((path for key in _WRITTEN if (path := within(given, key))), None)
    return None


def call(tool: Any, given: Any, **raw: Any) -> Event:
    """Return a tool call, with the command that it runs or the file that it writes."""
    return {**event("tool_call", tool=tool, command=command(tool, given), **raw), "input": given}
