"""The few system calls that Python has no function for, by the C library."""

from __future__ import annotations

import ctypes
import os

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_LIBC = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """Calls a function of the C library.

    Raises:
        OSError: it failed, or the library has no such function.
    """
    try:
        function = getattr(_LIBC, name)
    except AttributeError:
        raise OSError(f"the C library has no {name}") from None
    function.restype = ctypes.c_long
    result = int(function(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int) -> None:
    """One option of this process.

    Raises:
        OSError: the kernel refuses.
    """
    zero = ctypes.c_ulong(0)
    call("prctl", ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero)


def drop_capabilities() -> None:
    """Leaves this process no right of root's, whoever it is.

    Raises:
        OSError: the kernel refuses.
    """
    version_3 = 0x20080522
    header = (ctypes.c_uint32 * 2)(version_3, 0)
    call("capset", header, (ctypes.c_uint32 * 6)())
