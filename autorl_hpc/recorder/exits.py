"""How a process ended, learned by one who isn't its parent: from a pidfd, which Linux 6.15 and later tell it."""

from __future__ import annotations

import fcntl
import os
import struct

PIDFD_GET_INFO = 0xC040FF0B
"""_IOWR(0xFF, 11, struct pidfd_info) with the 64 bytes of its first version; include/uapi/linux/pidfd.h."""

PIDFD_INFO_EXIT = 1 << 3
_INFO = struct.Struct("=QQ11Ii")
"""mask, cgroup, eleven ids (pid, tgid, ppid, real, effective, saved and file system user and group), wait status."""


def open_process(pid: int) -> int | None:
    """A descriptor of a living process; None where the kernel or the limit of descriptors has none for us."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def exit_status(pidfd: int) -> int | None:
    """The wait status of a process that has ended and been collected; None where the kernel doesn't tell."""
    buffer = bytearray(_INFO.pack(PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    fields = _INFO.unpack(buffer)
    return fields[-1] if fields[0] & PIDFD_INFO_EXIT else None


def exit_code(status: int | None) -> int | None:
    """A wait status as Python tells it: negative is the signal's number."""
    if status is None:
        return None
    try:
        return os.waitstatus_to_exitcode(status)
    except ValueError:
        return None
