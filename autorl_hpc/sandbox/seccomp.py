"""Filters of system calls (seccomp): for programs of a model (`restrict_calls`), for agents at every level (`guard_job`), and for
agents at level `landlock` (`only_tcp`)."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Sequence
from typing import Any

from autorl_hpc.sandbox.linux import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, call, prctl

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN, AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
"""Offset in struct seccomp_data; the low word of argument n is at ARGUMENTS_AT + 8 n (both architectures are little-endian)."""
X32_BIT = 0x40000000

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value
ALLOW: Instruction = (RETURN, 0, 0, 0x7FFF0000)
REFUSE: Instruction = (RETURN, 0, 0, 0x00050000 | errno.EPERM)
KILL: Instruction = (RETURN, 0, 0, 0x80000000)
UNKNOWN: Instruction = (RETURN, 0, 0, 0x00050000 | errno.ENOSYS)


class _Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filters", ctypes.POINTER(_Filter))]


def load(made: Sequence[Instruction]) -> None:
    """Install a filter on this process and its children. It must have set PR_SET_NO_NEW_PRIVS. Raises OSError: the kernel
    refuses."""
    filters = (_Filter * len(made))(*(_Filter(*step) for step in made))
    filter_mode = ctypes.c_ulong(2)
    call("prctl", ctypes.c_int(PR_SET_SECCOMP), filter_mode, ctypes.byref(_Program(len(made), filters)))


def _preamble(machine: str, other: Instruction = KILL) -> list[Instruction]:
    """Kill callers of another architecture, whose numbers mean other calls (or answer `other`); load the number of the call."""
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    return [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, ARCHITECTURES[machine][0]),
        other,
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, 0, 1, X32_BIT),
        other,
    ]


def _by_argument(number: int, argument: int, steps: list[Instruction]) -> list[Instruction]:
    """Load the low word of one call's argument and decide by it. Every path through `steps` must return."""
    return [(EQUAL, 0, len(steps) + 1, number), (LOAD, 0, 0, ARGUMENTS_AT + 8 * argument), *steps]


# --- seccomp: allow only the calls that one Python process with one thread needs
# No new process or thread, exec, socket, signal to others, change of modes, owners or times, or limit of another process. Works
# for ordinary users on every kernel with filters, also in most containers. Known for x86-64 and 64-bit ARM only.

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""AUDIT_ARCH_* of linux/audit.h and the column in the lists below."""

ALWAYS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, lseek 8 62, close 3 57, fstat 5 80,
newfstatat 262 79, stat 4 -, lstat 6 -, statx 332 291, mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, madvise 28 233,
brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, sigaltstack 131 132, ioctl 16 29, dup 32 23,
dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, select 23 -, pselect6 270 72, poll 7 -, ppoll 271 73, epoll_create1 291 20,
epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113,
clock_getres 229 114, gettimeofday 96 169, time 201 -, times 100 153, getrusage 98 165, getpid 39 172, getppid 110 173,
gettid 186 178, getpgrp 111 -, getpgid 121 155, getsid 124 156, getuid 102 174, geteuid 107 175, getgid 104 176,
getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, getrandom 318 278, futex 202 98, getcwd 79 17,
chdir 80 49, fchdir 81 50, getdents64 217 61, readlink 89 -, readlinkat 267 78, access 21 -, faccessat 269 48,
faccessat2 439 439, statfs 137 43, fstatfs 138 44, uname 63 160, sysinfo 99 179, sched_yield 24 124, sched_getaffinity 204 123,
getrlimit 97 163, setrlimit 160 164, getpriority 140 141, rseq 334 293, set_robust_list 273 99, set_tid_address 218 96,
membarrier 324 283, arch_prctl 158 -, restart_syscall 219 128, umask 95 166, exit 60 93, exit_group 231 94, getcpu 309 168,
setitimer 38 103, getitimer 36 102, alarm 37 -, pause 34 -, fsync 74 82, fdatasync 75 83, ftruncate 77 46, sendfile 40 71,
copy_file_range 326 285, fadvise64 221 223
"""
"""Name, number on x86-64, number on 64-bit ARM (asm/unistd_64.h, asm-generic/unistd.h)."""

OPEN = "openat 257 56 2, open 2 - 1"  # the last number is the argument with the flags
IN_A_FOLDER = "unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, fallocate 285 47"
"""Allowed only if another layer limits writes to one folder."""
FCNTL, FCNTL_COMMANDS = "fcntl 72 25", (0, 1, 2, 3, 4, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC. Not F_SETOWN and F_SETSIG, which can send signals to others."""
PRLIMIT = "prlimit64 302 261"  # only for this process, because limits of others could be lowered
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def instructions(machine: str, *, may_write: bool) -> list[Instruction]:
    """Return the filter for programs of a model. Raises OSError: the architecture's system call numbers are unknown."""
    made = _preamble(machine)
    column = ARCHITECTURES[machine][1]
    for number, *_ in _numbers(ALWAYS, column) + (_numbers(IN_A_FOLDER, column) if may_write else []):
        made += [(EQUAL, 0, 1, number), ALLOW]
    for number, argument in _numbers(OPEN, column):
        refused = [] if may_write else [(ANY_BIT, 0, 1, WRITING), REFUSE]
        made += _by_argument(number, argument, [*refused, ALLOW])
    for number, *_ in _numbers(FCNTL, column):
        tests = [step for value in FCNTL_COMMANDS for step in ((EQUAL, 0, 1, value), ALLOW)]
        made += _by_argument(number, 1, [*tests, REFUSE])
    for number, *_ in _numbers(PRLIMIT, column):
        made += _by_argument(number, 0, [(EQUAL, 0, 1, 0), ALLOW, REFUSE])
    return [*made, REFUSE]


def _numbers(table: str, column: int) -> list[list[int]]:
    """Return for each listed call of the architecture its number and the values after the two numbers."""
    rows = [row.split() for row in table.split(",")]
    return [[int(row[1 + column]), *map(int, row[3:])] for row in rows if row[1 + column] != "-"]


def restrict_calls(*, may_write: bool) -> None:
    """Limit this process to the listed calls. It must have set PR_SET_NO_NEW_PRIVS. `may_write`: allow opening files for
    writing, because another layer restricts where. Raises OSError: the kernel refuses, or the architecture is unknown."""
    load(instructions(os.uname().machine, may_write=may_write))


# --- what namespaces leave open to an agent, and level `none`: kernel keyrings and file leases
# Keyrings belong to the user and the session, so all runs of a session would share them. A lease holds up whoever opens the file,
# for 45 seconds each time: the suite's own processes too.

KEY_CALLS = "keyctl 250 219, add_key 248 217, request_key 249 218"
IPC_CALLS = """shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192, msgget 68 186,
msgsnd 69 189, msgrcv 70 188, msgctl 71 187, mq_open 240 180, mq_unlink 241 181"""
"""System V IPC and POSIX message queues, which level `landlock` shares with the node: segments are numbers, and anybody guesses them."""
F_SETLEASE, F_SETDELEG = 1024, 1040


def key_calls() -> list[int]:
    """Return the numbers of keyctl, add_key and request_key; none if this architecture's numbers are unknown."""
    _, column = ARCHITECTURES.get(os.uname().machine, (0, None))
    return [] if column is None else [row[0] for row in _numbers(KEY_CALLS, column)]


def guard_job(*, shares_ipc: bool = False) -> dict[str, Any] | None:
    """Return what inside.py needs for `guard`: the number of keyctl and the filter's instructions; None if this architecture's
    numbers are unknown."""
    machine, calls = os.uname().machine, key_calls()
    if not calls:
        return None
    made, column = _preamble(machine, UNKNOWN), ARCHITECTURES[machine][1]
    for number, *_ in _numbers(f"{KEY_CALLS}, {IPC_CALLS}" if shares_ipc else KEY_CALLS, column):
        made += [(EQUAL, 0, 1, number), REFUSE]
    for number, *_ in _numbers(FCNTL, column):
        made += _by_argument(number, 1, [(EQUAL, 1, 0, F_SETLEASE), (EQUAL, 0, 1, F_SETDELEG), REFUSE, ALLOW])
    return {"keyctl": calls[0], "steps": [*made, ALLOW]}


# --- what Landlock leaves open to an agent: network and process limits
# Landlock controls TCP only. Refused: internet sockets other than plain TCP (UDP, SCTP, MPTCP, raw), sockets to virtual machines,
# TCP fast open (sends without connect), and io_uring (not visible to filters). Unix sockets stay, because programs need them.
# Also refused: limits of other processes; without CPU time or files the user's supervisor would end or stop writing its clock.

SOCKET_CALLS = {"x86_64": (41, 44, 46, 307, 425, 302), "aarch64": (198, 206, 211, 269, 425, 261)}
"""socket, sendto, sendmsg, sendmmsg, io_uring_setup, prlimit64: asm/unistd_64.h, asm-generic/unistd.h."""

AF_INET6 = 10  # also where Python lacks it
VSOCK, SMC = 40, 43
TYPE_MASK = 0xF
FAST_OPEN = 0x20000000


def socket_instructions(machine: str) -> list[Instruction]:
    """Return the filter for agents at level `landlock`. Raises OSError: the architecture's system call numbers are
    unknown."""
    made = _preamble(machine)
    create, sendto, sendmsg, sendmmsg, uring, prlimit = SOCKET_CALLS[machine]
    family = [  # jump targets: 10 refuses, 11 allows
        (EQUAL, 9, 0, VSOCK),
        (EQUAL, 8, 0, SMC),
        (EQUAL, 1, 0, int(socket.AF_INET)),
        (EQUAL, 0, 7, AF_INET6),
        (LOAD, 0, 0, ARGUMENTS_AT + 8),
        (AND, 0, 0, TYPE_MASK),
        (EQUAL, 0, 3, int(socket.SOCK_STREAM)),
        (LOAD, 0, 0, ARGUMENTS_AT + 16),
        (EQUAL, 2, 0, 0),
        (EQUAL, 1, 0, socket.IPPROTO_TCP),
        REFUSE,
        ALLOW,
    ]
    made += [(EQUAL, 0, 1, uring), REFUSE, *_by_argument(create, 0, family)]
    for number, argument in ((sendto, 3), (sendmsg, 2), (sendmmsg, 3)):
        made += _by_argument(number, argument, [(ANY_BIT, 0, 1, FAST_OPEN), REFUSE, ALLOW])
    limits = [  # prlimit(pid, which, new, old): pid 0 is the caller; without `new` nothing is set
        (EQUAL, 5, 0, 0),
        (LOAD, 0, 0, ARGUMENTS_AT + 16),
        (EQUAL, 0, 2, 0),
        (LOAD, 0, 0, ARGUMENTS_AT + 20),
        (EQUAL, 1, 0, 0),
        REFUSE,
        ALLOW,
    ]
    return [*made, *_by_argument(prlimit, 0, limits), ALLOW]


def only_tcp() -> None:
    """Limit this process and its children to TCP sockets and to setting their own limits. Sets PR_SET_NO_NEW_PRIVS first.
    Raises OSError: the kernel refuses, or the architecture is unknown."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    load(socket_instructions(os.uname().machine))
