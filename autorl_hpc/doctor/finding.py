"""Findings of the doctor, and how checks are run: no check raises or hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

from autorl_hpc.cluster import vllm_program
from autorl_hpc.cluster.vllm_program import ProgramAnswer
from autorl_hpc.states import StrEnum

CHECK_LIMIT_S = 30.0
TOOL_LIMIT_S = 10.0  # `quota` asks every file server; one that is down keeps it waiting
MAX_CHARS = 600


class State(StrEnum):
    """What a finding means for runs."""

    OK = "ok"
    NOTE = "note"  # worth knowing; nothing will fail because of it
    WARNING = "warning"  # something may fail, or is slower or less than expected
    PROBLEM = "problem"  # something the suite needs doesn't work
    UNKNOWN = "unknown"  # it could not be found out


@dataclass(frozen=True)
class Finding:
    """One line of the page: what was looked at, what was found, what follows for runs, what helps."""

    check: str
    state: State
    value: str
    so_what: str = ""
    do_this: str = ""
    group: str = ""

    def __post_init__(self) -> None:
        for name in ("check", "value", "so_what", "do_this", "group"):  # words of programs must not steer the terminal
            line = "".join(char if char.isprintable() else " " for char in getattr(self, name))
            object.__setattr__(self, name, " ".join(line.split())[:MAX_CHARS])

    def as_json(self) -> dict[str, str]:
        return {**asdict(self), "state": str(self.state)}


def ok(check: str, value: str) -> Finding:
    return Finding(check, State.OK, value)


def note(check: str, value: str, so_what: str, do_this: str = "") -> Finding:
    return Finding(check, State.NOTE, value, so_what, do_this or "nothing: this is for your information")


def warning(check: str, value: str, so_what: str, do_this: str) -> Finding:
    return Finding(check, State.WARNING, value, so_what, do_this)


def problem(check: str, value: str, so_what: str, do_this: str) -> Finding:
    return Finding(check, State.PROBLEM, value, so_what, do_this)


def unknown(check: str, value: str, so_what: str = "", do_this: str = "") -> Finding:
    so_what = so_what or "what follows from it can't be said beforehand"
    return Finding(check, State.UNKNOWN, value, so_what, do_this or "run the doctor again, or try a small launch")


def in_group(group: str, *found: Finding) -> list[Finding]:
    return [replace(finding, group=group) for finding in found]


@dataclass(frozen=True)
class Check:
    """One thing to look at. `look` may give several findings, raise, or hang."""

    name: str
    look: Callable[[], Finding | Iterable[Finding]]
    limit_s: float = CHECK_LIMIT_S


def examine(group: str, *checks: Check) -> list[Finding]:
    """Run the checks one after the other, each within its time limit."""
    return in_group(group, *(found for check in checks for found in _run(check)))


def _run(check: Check) -> list[Finding]:
    """Run a check in its own thread: a call that the kernel doesn't answer can't be ended, only left behind."""
    so_what, advice = "what hangs here will hang in a job too", "try the same by hand; tell the site if it hangs"
    found = [unknown(check.name, f"no answer within {check.limit_s:.0f} s", so_what, advice)]

    def look() -> None:
        nonlocal found
        try:
            seen = check.look()
            found = [seen] if isinstance(seen, Finding) else list(seen)
        except Exception as error:
            found = [unknown(check.name, f"the check failed: {type(error).__name__}: {error}")]

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(check.limit_s)
    return found


def ask(*argv: str, limit_s: float = TOOL_LIMIT_S) -> ProgramAnswer:
    """Run another program within a time limit, with its messages in English."""
    return vllm_program.ask(argv, env={**os.environ, "LC_ALL": "C"}, limit_s=limit_s)


def said(answer: ProgramAnswer) -> str:
    return answer.last_words(200) or "nothing"


def span(seconds: float) -> str:
    """Format a time: 12 ms, 1.4 s, 90 s, 12 min, 8 h, 3 days."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
