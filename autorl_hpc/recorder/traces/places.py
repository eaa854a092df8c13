"""Where programs leave trajectories in a workspace. It belongs to the agent: no link is followed, the search is bounded."""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from pathlib import Path

MAX_ENTRIES = 5_000
MAX_DEPTH = 3
MAX_FOUND = 64
LEFT_OUT = frozenset(
    {"models", "data", "output", "results", "submissions", "environment", "node_modules", "__pycache__"}
)
"""Folders of the workspace, and of programs, in which no trajectory lies but much else."""

_HOME = ".home"
_HIDDEN = ((_HOME, ".config", "mini-swe-agent"), (_HOME, ".openhands"), (".openhands",), (_HOME, "trajectories"))
"""Hidden folders in which programs keep them by default; others that begin with a dot are not looked into."""

_NAMES = re.compile(r".{0,200}\.traj\.json|base_state\.json|trajectory[^/]{0,100}\.json|.{0,200}\.trajectory\.json")
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

Parts = tuple[str, ...]


def trajectories(workspace: Path) -> list[Parts]:
    """Regular files that are called like trajectories, sorted; the workspace first to a depth of 3, then the known places."""
    found: set[Parts] = set()
    left = MAX_ENTRIES
    for start in ((), *_HIDDEN):
        left = _search(workspace, start, found, left)
    return sorted(found)[:MAX_FOUND]


def _search(workspace: Path, start: Parts, found: set[Parts], left: int) -> int:
    """Adds what lies below `start`; returns how many entries may still be looked at."""
    waiting: deque[Parts] = deque([start])
    while waiting and left > 0:
        parts = waiting.popleft()
        fd = opened(workspace, parts, _DIR_FLAGS)
        if fd is None:
            continue
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    left -= 1
                    if left <= 0:
                        break
                    here = (*parts, entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        hidden = entry.name.startswith(".") or entry.name in LEFT_OUT
                        if not hidden and len(here) - len(start) < MAX_DEPTH:
                            waiting.append(here)
                    elif entry.is_file(follow_symlinks=False) and _NAMES.fullmatch(entry.name):
                        found.add(here)
        except OSError:
            pass  # it changes under our eyes: the next search sees the rest
        finally:
            os.close(fd)
    return left


def opened(workspace: Path, parts: Parts, flags: int = _FILE_FLAGS) -> int | None:
    """A descriptor of a file or folder, opened part by part; None if it is not there, or a link is on the way."""
    try:
        fd = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    for number, part in enumerate(parts):
        try:
            following = os.open(part, flags if number == len(parts) - 1 else _DIR_FLAGS, dir_fd=fd)
        except OSError:
            return None
        finally:
            os.close(fd)
        fd = following
    return fd


def read_whole(
    workspace: Path, parts: Parts, known: tuple[int, ...] | None, max_bytes: int
) -> tuple[tuple[int, ...], bytes | None] | None:
    """What tells one state of a file from the next, and its content; no content if it is too large.

    None if it is as `known`, or can't be read as a regular file.
    """
    fd = opened(workspace, parts)
    if fd is None:
        return None
    try:
        status = os.fstat(fd)
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
        if not stat.S_ISREG(status.st_mode) or state == known:
            return None
        if status.st_size > max_bytes:
            return state, None
        data = bytearray()
        while len(data) <= max_bytes and (chunk := os.read(fd, 1024 * 1024)):
            data += chunk
        return (state, bytes(data)) if len(data) <= max_bytes else (state, None)
    except OSError:
        return None
    finally:
        os.close(fd)
