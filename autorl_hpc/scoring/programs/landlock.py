"""Confines the file system by Landlock (Linux 5.13): reads by a list, writes in one folder, TCP from 6.7 on.

The numbers are those of linux/landlock.h. Landlock hides no names: `stat` of a file that can't be read still answers.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from autorl_hpc.scoring.programs.linux import call

# The same numbers on every architecture.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG = 1
PATH_BENEATH, NET_PORT = 1, 2

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8
TRUNCATE, IOCTL = 1 << 14, 1 << 15
EVERYTHING = (1 << 16) - 1
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL
"""What the kernel takes in a rule for a file that is no folder."""
READ = READ_FILE | READ_DIR
FS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many kinds of access each version knows; later ones know those of 5."""
NET_TCP = 0b11
SCOPES = 0b11
"""From version 6 on: no abstract sockets of others, no signals to others."""


class _Ruleset(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _Port(ctypes.Structure):
    _fields_ = [("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def version() -> int:
    """Of this kernel's Landlock.

    Raises:
        OSError: there is none, or it is off.
    """
    return _syscall(CREATE_RULESET, None, 0, VERSION_FLAG)


def restrict(readable: Sequence[str], listable: Sequence[str], private: str) -> None:
    """From now on this process reads `readable`, lists `listable`, and writes plain files below `private`.

    Raises:
        OSError: the kernel refuses.
    """
    write = WRITE_FILE | REMOVE_FILE | MAKE_REG | TRUNCATE
    rules = [(path, READ if os.path.isdir(path) else READ_FILE) for path in readable]
    apply([*rules, *((path, READ_DIR) for path in listable), (private, READ | write)], ports=())


def apply(rules: Sequence[tuple[str, int]], ports: Sequence[int] | None) -> None:
    """From now on this process and its children do with files only what `rules` allow: (folder or file, kinds of access).

    Kinds that this kernel's version doesn't know are left out. From version 6 on, no signals and abstract sockets reach out.

    Args:
        ports: the only ones that TCP may connect to or listen at (version 4 on); None: any.

    Raises:
        OSError: the kernel refuses.
    """
    abi = version()
    known = (1 << FS_BITS.get(abi, 16)) - 1
    wanted = _Ruleset(fs=known, net=NET_TCP if abi >= 4 and ports is not None else 0, scoped=SCOPES)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = _syscall(CREATE_RULESET, ctypes.byref(wanted), size, 0)
    try:
        for path, access in rules:
            _allow(ruleset, path, access & known)
        for port in (ports or ()) if abi >= 4 else ():
            _syscall(ADD_RULE, ruleset, NET_PORT, ctypes.byref(_Port(NET_TCP, port)), 0)
        _syscall(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rule = _Beneath(access, folder)
        _syscall(ADD_RULE, ruleset, PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(folder)


def _syscall(number: int, *arguments: object) -> int:
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return call("syscall", ctypes.c_long(number), *words)
