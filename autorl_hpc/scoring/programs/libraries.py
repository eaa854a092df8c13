"""Which of this host's files a program may read: the interpreter's standard library, and the libraries of the system."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from typing import NamedTuple

NO_PACKAGES = ("site-packages", "dist-packages")
"""Folders that programs see empty: installed packages may hold a benchmark's answers."""


class Libraries(NamedTuple):
    """The same thing twice, for file systems that are put together and for lists of what is allowed.

    Attributes:
        roots: folders, files and links to show.
        hidden: folders below them that stay empty.
        readable: folders with all that is below them, and files.
        listable: folders whose names alone may be seen.
    """

    roots: list[str]
    hidden: list[str]
    readable: list[str]
    listable: list[str]


@functools.cache
def libraries() -> Libraries:
    """What this interpreter needs. Looked up once in a process."""
    paths = sysconfig.get_paths()
    wanted = [
        paths["stdlib"],
        paths["platstdlib"],
        *(os.path.join(p, "lib") for p in (sys.base_prefix, sys.base_exec_prefix)),
    ]
    wanted += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    wanted += [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if os.path.isabs(part)]
    there = {os.path.abspath(path) for path in wanted if os.path.exists(path)}
    links = sorted(path for path in there if os.path.islink(path))
    roots: list[str] = []
    for path in sorted(there - set(links) | {os.path.realpath(path) for path in links}):
        if not any(path.startswith(f"{root}/") for root in roots):
            roots.append(path)
    hidden: list[str] = []
    readable: list[str] = []
    listable: list[str] = []
    for root in roots:
        _spread(root, hidden, readable, listable)
    return Libraries([*roots, *links], hidden, readable, listable)


def _spread(folder: str, hidden: list[str], readable: list[str], listable: list[str]) -> None:
    """Landlock can't take away below what it gave: a folder that holds packages is given entry by entry."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    pythons = [name for name in names if name.startswith("python") and os.path.isdir(os.path.join(folder, name))]
    if not pythons and not set(names) & set(NO_PACKAGES):
        readable.append(folder)
        return
    listable.append(folder)
    for name in names:
        path = os.path.join(folder, name)
        if name in NO_PACKAGES:
            hidden.append(path)
        elif name in pythons:
            _spread(path, hidden, readable, listable)
        else:
            readable.append(path)
