"""The processes of an agent, as /proc shows them: by descent, and by a mark in their environment. Standard library only."""

from __future__ import annotations

import os

MARK_VARIABLE = "AUTORL_RUN_MARK"


def parents() -> dict[int, int]:
    """Parent of every process that can be seen."""
    table: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    rest = file.read().rpartition(b")")[2].split()
                # A process whose first thread has ended is shown as a zombie, though its other threads go on.
                if rest[0] != b"Z" or len(os.listdir(f"/proc/{name}/task")) > 1:
                    table[int(name)] = int(rest[1])
            except (OSError, IndexError, ValueError):
                continue
    return table


def descendants(root: int) -> set[int]:
    """All living descendants of `root`."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    stack = list(children.get(root, []))
    while stack:
        pid = stack.pop()
        if pid not in found:
            found.add(pid)
            stack.extend(children.get(pid, []))
    return found


def marked(mark: str) -> set[int]:
    """Living processes whose first environment has a mark that begins so, this one left out."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found: set[int] = set()
    for pid in parents():
        if pid != os.getpid():
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if any(part.startswith(wanted) for part in file.read().split(b"\0")):
                        found.add(pid)
            except OSError:
                continue
    return found
