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
PATH_BENEATH = 1

WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8
TRUNCATE = 1 << 14
READ = READ_FILE | READ_DIR
FS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many kinds of access each version knows; later ones know those of 5."""
NET_TCP = 0b11
SCOPES = 0b11
"""From version 6 on: no abstract sockets of others, no signals to others."""


class _Ruleset(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


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
    abi = version()
    rules = _Ruleset(fs=(1 << FS_BITS.get(abi, 16)) - 1, net=NET_TCP if abi >= 4 else 0, scoped=SCOPES)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = _syscall(CREATE_RULESET, ctypes.byref(rules), size, 0)
    try:
        for path in readable:
            _allow(ruleset, path, READ if os.path.isdir(path) else READ_FILE)
        for path in listable:
            _allow(ruleset, path, READ_DIR)
        write = WRITE_FILE | REMOVE_FILE | MAKE_REG | (TRUNCATE if abi >= 3 else 0)
        _allow(ruleset, private, READ | write)
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
