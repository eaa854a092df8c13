"""Errors for users (what, where, whose fault, what to do next), refusals of submissions, and the exit codes of all commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from autorl_hpc.states import Fault


class Exit(IntEnum):
    """Exit codes of `autorl-hpc`, documented in docs/commands.md."""

    OK = 0
    FAILED = 1  # it ran and the answer is no: verify found damage, a submission was refused, a run failed
    USAGE = 2  # the command line or an input file is wrong
    ENVIRONMENT = 3  # this machine lacks something: disk, permission, a package
    INTERNAL = 4  # a defect of autorl-hpc
    INTERRUPTED = 130  # ctrl-C


def visible(text: str) -> str:
    """Return `text` with all but plain characters, tabs and line breaks escaped: quoted files must not steer the terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


class AutorlError(Exception):
    """An error with a message for people: what went wrong, where, who has to act, what to do next. Terminal escapes are made
    visible. `passes`: a later try may work, so a job that fails
    with it is started again."""

    def __init__(
        self,
        what: str,
        *,
        where: str | os.PathLike[str] | None = None,
        fault: Fault | None = None,
        next_step: str | None = None,
        exit_code: Exit = Exit.USAGE,
        passes: bool = False,
    ) -> None:
        self.passes = passes
        self.what = visible(what)
        super().__init__(self.what)
        self.where = None if where is None else visible(os.fspath(where))
        self.fault = fault
        self.next_step = None if next_step is None else visible(next_step)
        self.exit_code = exit_code

    def of_field(self, field: str, where: str | os.PathLike[str] | None = None) -> AutorlError:
        """Return this error as one of a field of an experiment, at its own place or at `where`."""
        same: dict[str, Any] = {"fault": self.fault, "next_step": self.next_step, "exit_code": self.exit_code}
        return AutorlError(f"field `{field}`: {self.what}", where=where or self.where, **same)

    def __str__(self) -> str:
        more = {"where: ": self.where, "fault: ": self.fault, "next:  ": self.next_step}
        return "\n".join([self.what, *(f"  {name}{text}" for name, text in more.items() if text)])

    def as_json(self) -> dict[str, str | int | None]:
        return {
            "error": self.what,
            "where": self.where,
            "fault": None if self.fault is None else str(self.fault),
            "next": self.next_step,
            "exit_code": int(self.exit_code),
        }


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return `; did you mean ...?` with the nearest known name, or `otherwise`."""
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1)
    return f"; did you mean `{near[0]}`?" if near else otherwise


class Refused(Exception):
    """Refuse a submission. `code`: a stable word for programs, such as `shard_missing`; the agent gets `message`, what is wrong
    with the file and field, and `advice`, what it can do about it."""

    def __init__(self, code: str, message: str, advice: str, fault: Fault = Fault.ARTIFACT) -> None:
        self.code, self.message, self.advice = code, visible(message), visible(advice)
        super().__init__(self.message)
        self.fault = fault


def room_at(where: str | os.PathLike[str]) -> str:
    """Return in words which file system a path is on and how much of it is free; nothing if it can't be asked."""
    place = os.path.abspath(where)
    while not os.path.ismount(place) and place != "/":
        place = os.path.dirname(place)
    try:
        room = os.statvfs(place)
    except OSError:
        return ""
    free, total = (blocks * room.f_frsize / 2**30 for blocks in (room.f_bavail, room.f_blocks))
    return f"; file system {place}: {free:.1f} of {total:.1f} GiB free, {room.f_favail} of {room.f_files} files"


def _denied(where: str | os.PathLike[str]) -> tuple[str, str]:
    """Return in words whose folder or file denies a path, and what to do, with the option or argument that leads there."""
    import pwd
    import stat

    path, how = Path(os.path.abspath(where)), "by --root or $AUTORL_ROOT"
    for place in (path, *path.parents):
        with suppress(OSError):
            info = place.stat()
            break
    try:
        owner = pwd.getpwuid(info.st_uid).pw_name
    except KeyError:
        owner = f"user {info.st_uid}"
    for before, word in pairwise(["", *sys.argv[1:]]):
        option, equals, value = word.partition("=") if word.startswith("--") else (before, before.startswith("-"), word)
        if value and path.is_relative_to(os.path.abspath(value)):
            how = f"by {option}" if equals else f"in place of {word}"
    said = f"; {place} belongs to {owner} ({stat.filemode(info.st_mode)})"
    return said, f"ask {owner} for access, or give another path {how}"


def from_os_error(error: OSError, doing: str, where: str | os.PathLike[str]) -> AutorlError:
    """Return an AutorlError for an OSError, with advice for full disks, quotas and permissions; `doing` names the action."""
    import errno

    more, other = "", "choose a folder that you may write to (--root or $AUTORL_ROOT)"
    if error.errno in (errno.EACCES, errno.EPERM):
        more, other = _denied(where)
    elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        more = room_at(where)
    advice = {
        errno.ENOSPC: "free some space, or point --root at another file system, then run the same command again",
        errno.EDQUOT: "your quota is used up: free some space, then run the same command again",
        **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), other),
        errno.ENOTDIR: "a part of this path is a file: remove it or choose another folder (--root)",
    }.get(error.errno or 0, "see the message; nothing written before is lost")
    what, code = f"{doing} failed: {error.strerror or error}{more}", Exit.ENVIRONMENT
    return AutorlError(what, where=where, fault=Fault.CLUSTER, next_step=advice, exit_code=code)
