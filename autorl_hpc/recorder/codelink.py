"""Where a link in place of `code/` leads to, as long as that lies in the workspace."""

from __future__ import annotations

import os

MAX_LINKS = 8
MAX_PARTS = 64


def inside(root_fd: int, name: str) -> tuple[str, ...] | None:
    """The parts of the path below the workspace that `name`, at its top, stands for; None: it is the top, or lies outside.

    Only names are followed here, nothing is opened: whoever opens the parts must follow no link, since they may have changed.
    """
    todo, done, links = [name], list[str](), 0
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if not done:
                return None
            done.pop()
            continue
        try:
            target = os.readlink("/".join((*done, part)), dir_fd=root_fd)
        except OSError:  # no link, or nothing at all
            done.append(part)
            continue
        links += 1
        if target.startswith("/"):
            top = os.readlink(f"/proc/self/fd/{root_fd}").rstrip("/") + "/"
            if not target.startswith(top):
                return None
            target, done = target[len(top) :], []
        todo += reversed(target.split("/"))
        if links > MAX_LINKS or len(todo) > MAX_PARTS:
            return None
    return tuple(done) or None
