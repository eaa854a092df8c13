"""Seccomp filter for level `landlock`: closes network and process limits, which Landlock leaves open.

Landlock controls TCP only. Refused: internet sockets other than plain TCP (UDP, SCTP, MPTCP, raw), sockets to virtual machines,
TCP fast open (sends without connect), and io_uring (not visible to filters). Unix sockets stay, because programs need them.
Also refused: limits of other processes; without CPU time or files the user's supervisor would end or stop writing its clock.
"""

from __future__ import annotations

import errno
import os
import socket

from autorl_hpc.sandbox import linux

CALLS = {"x86_64": (41, 44, 46, 307, 425, 302), "aarch64": (198, 206, 211, 269, 425, 261)}
"""socket, sendto, sendmsg, sendmmsg, io_uring_setup, prlimit64: asm/unistd_64.h, asm-generic/unistd.h."""

INTERNET = (socket.AF_INET, 10)  # AF_INET6 is 10 on Linux, also where Python lacks it
VSOCK, SMC = 40, 43
TYPE_MASK = 0xF
FAST_OPEN = 0x20000000
AND = 0x54
"""BPF_ALU | BPF_AND | BPF_K."""


def instructions(machine: str) -> list[linux.Instruction]:
    """Return the filter.

    Raises:
        OSError: the architecture's system call numbers are unknown.
    """
    if machine not in CALLS:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    audit, _ = linux.ARCHITECTURES[machine]
    create, sendto, sendmsg, sendmmsg, uring, prlimit = CALLS[machine]
    load, equal, ret = linux.LOAD, linux.EQUAL, linux.RETURN
    at = linux.ARGUMENTS_AT
    refuse, allow = (ret, 0, 0, linux.REFUSE), (ret, 0, 0, linux.ALLOW)
    family = [  # jump targets: 11 refuses, 12 allows
        (load, 0, 0, at),
        (equal, 9, 0, VSOCK),
        (equal, 8, 0, SMC),
        (equal, 1, 0, INTERNET[0]),
        (equal, 0, 7, INTERNET[1]),
        (load, 0, 0, at + 8),
        (AND, 0, 0, TYPE_MASK),
        (equal, 0, 3, int(socket.SOCK_STREAM)),
        (load, 0, 0, at + 16),
        (equal, 2, 0, 0),
        (equal, 1, 0, socket.IPPROTO_TCP),
        refuse,
        allow,
    ]
    made = [
        (load, 0, 0, linux.ARCHITECTURE_AT),
        (equal, 1, 0, audit),
        (ret, 0, 0, linux.KILL),
        (load, 0, 0, linux.NUMBER_AT),
        (linux.AT_LEAST, 0, 1, linux.X32_BIT),
        (ret, 0, 0, linux.KILL),
        (equal, 0, 1, uring),
        refuse,
        (equal, 0, len(family), create),
        *family,
    ]
    for number, argument in ((sendto, 3), (sendmsg, 2), (sendmmsg, 3)):
        made += [
            (equal, 0, 4, number),
            (load, 0, 0, at + 8 * argument),
            (linux.ANY_BIT, 0, 1, FAST_OPEN),
            refuse,
            allow,
        ]
    limits = [  # prlimit(pid, which, new, old): pid 0 is the caller; without `new` nothing is set
        (load, 0, 0, at),
        (equal, 5, 0, 0),
        (load, 0, 0, at + 16),
        (equal, 0, 2, 0),
        (load, 0, 0, at + 20),
        (equal, 1, 0, 0),
        refuse,
        allow,
    ]
    return [*made, (equal, 0, len(limits), prlimit), *limits, allow]


def only_tcp() -> None:
    """Limit this process and its children to TCP sockets and to setting their own limits. Sets PR_SET_NO_NEW_PRIVS first.

    Raises:
        OSError: the kernel refuses, or the architecture is unknown.
    """
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.load(instructions(os.uname().machine))
