"""What a check found, and how checks are run: none raises, none hangs."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autorl_hpc.cluster import vllm_program
from autorl_hpc.states import StrEnum

CHECK_LIMIT_S = 30.0
"""A file system that hangs, hangs for ever; one that is slow has answered within seconds."""

MAX_VALUE_CHARS = 600


class State(StrEnum):
    """How a finding stands."""

    OK = "ok"
    NOTE = "note"  # worth knowing; nothing will fail because of it
    WARNING = "warning"  # something may fail, or is slower or less than one would think
    PROBLEM = "problem"  # something the suite needs doesn't work
    UNKNOWN = "unknown"  # it could not be found out


@dataclass(frozen=True)
class Finding:
    """One line of the page.

    Attributes:
        check: what was looked at; with the group, its name for programs.
        value: what was found.
        so_what: what follows for runs.
        do_this: what helps.
        group: the part of the page; set by `examine`.
    """

    check: str
    state: State
    value: str
    so_what: str = ""
    do_this: str = ""
    group: str = ""

    def as_json(self) -> dict[str, str]:
        """The same for programs."""
        return {
            "group": self.group,
            "check": self.check,
            "state": str(self.state),
            "value": self.value,
            "so_what": self.so_what,
            "do_this": self.do_this,
        }


def from_json(value: Any) -> Finding | None:
    """A finding that another process wrote; None if it is none."""
    try:
        fields = {name: clean(str(value[name])) for name in ("check", "value", "so_what", "do_this", "group")}
        return Finding(state=State(value["state"]), **fields)
    except (TypeError, KeyError, ValueError):
        return None


NOTHING_TO_DO = "nothing: it is told so that you know"
ASK_AGAIN = "run the doctor again; if it stays so, ask the site, or try a small launch"
NOT_KNOWN = "what follows from it can't be said beforehand"


def ok(check: str, value: str) -> Finding:
    """Nothing to do."""
    return Finding(check, State.OK, clean(value))


def note(check: str, value: str, so_what: str, do_this: str = "") -> Finding:
    """Worth knowing."""
    return Finding(check, State.NOTE, clean(value), so_what, do_this or NOTHING_TO_DO)


def warning(check: str, value: str, so_what: str, do_this: str) -> Finding:
    """May fail."""
    return Finding(check, State.WARNING, clean(value), so_what, do_this)


def problem(check: str, value: str, so_what: str, do_this: str) -> Finding:
    """Doesn't work."""
    return Finding(check, State.PROBLEM, clean(value), so_what, do_this)


def unknown(check: str, value: str, so_what: str = "", do_this: str = "") -> Finding:
    """Could not be found out; `value` says why."""
    return Finding(check, State.UNKNOWN, clean(value), so_what or NOT_KNOWN, do_this or ASK_AGAIN)


def clean(text: str) -> str:
    """One line without control characters: what other programs say must not steer the terminal."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= MAX_VALUE_CHARS else line[: MAX_VALUE_CHARS - 3] + "..."


@dataclass(frozen=True)
class Check:
    """One thing to look at. `look` may give several findings, may raise, may hang."""

    name: str
    look: Callable[[], Finding | Iterable[Finding]]
    limit_s: float = CHECK_LIMIT_S


def examine(group: str, checks: Iterable[Check]) -> list[Finding]:
    """Runs the checks one after the other, each within its time limit."""
    return [replace(found, group=group) for check in checks for found in _run(check)]


def _run(check: Check) -> list[Finding]:
    """In a thread of its own: a call that the kernel doesn't answer can't be ended, only left behind."""
    done: list[list[Finding]] = []

    def look() -> None:
        try:
            seen = check.look()
            done.append([seen] if isinstance(seen, Finding) else list(seen))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            done.append([unknown(check.name, f"the check failed: {reason}")])

    thread = threading.Thread(target=look, daemon=True, name=f"doctor {check.name}")
    thread.start()
    thread.join(check.limit_s)
    if done:
        return done[0]
    return [
        unknown(
            check.name,
            f"no answer within {check.limit_s:.0f} s",
            "what hangs here will hang in a job too",
            "try the same by hand; tell the site's people if it hangs",
        )
    ]


# Other programs, asked so that they can't hang a check; Slurm's clients are `cluster.commands`.

TOOL_LIMIT_S = 10.0
"""quota asks every file server; one that is down keeps it waiting."""

MOST_WORDS = 200


class ToolAnswer(vllm_program.ProgramAnswer):
    """What a program said."""

    @property
    def said(self) -> str:
        """Its last words."""
        return self.last_words(MOST_WORDS) or "nothing"


def ask(argv: Sequence[str], *, limit_s: float = TOOL_LIMIT_S) -> ToolAnswer | None:
    """What a program prints; None: it is not here."""
    if shutil.which(argv[0]) is None:
        return None
    answer = vllm_program.ask(argv, env={**os.environ, "LC_ALL": "C"}, limit_s=limit_s)
    return ToolAnswer(answer.code, answer.out, answer.err)


def span(seconds: float) -> str:
    """Such as 12 ms, 1.4 s, 90 s, 12 min, 8 h, 3 days."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    for unit, size, above in (("days", 86400, 2 * 86400), ("h", 3600, 2 * 3600), ("min", 60, 120)):
        if seconds >= above:
            return f"{seconds / size:.3g} {unit}" if seconds % size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
