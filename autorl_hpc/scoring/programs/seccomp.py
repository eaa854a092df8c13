"""Confines the system calls by seccomp: a list of what one Python process with one thread needs, and nothing else.

No new process or thread, no exec, no socket, no signal to anybody, no change of modes, owners or times, no limit of another
process. Works for ordinary users on every kernel with filters, inside most containers too. The list is known for x86-64 and
64-bit ARM; elsewhere this layer is not there.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

from autorl_hpc.scoring.programs.linux import PR_SET_SECCOMP, call

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

OPEN = "openat 257 56 2, open 2 - 1"
"""The last number: which argument holds the flags."""
IN_A_FOLDER = "unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, fallocate 285 47"
"""Only where another layer keeps writes to one folder."""
FCNTL, FCNTL_COMMANDS = "fcntl 72 25", (0, 1, 2, 3, 4, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC: F_SETOWN and F_SETSIG could send signals to others."""
PRLIMIT = "prlimit64 302 261"
"""Of this process alone: those of others could be lowered."""

ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
"""Of struct seccomp_data; the low word of argument n lies at ARGUMENTS_AT + 8 n (both are little-endian)."""
X32_BIT = 0x40000000
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

Instruction = tuple[int, int, int, int]


class _Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filters", ctypes.POINTER(_Filter))]


def instructions(machine: str, *, may_write: bool) -> list[Instruction]:
    """The filter for one architecture: (code, jump if so, jump if not, value).

    Raises:
        OSError: the architecture is not one of those whose numbers are known.
    """
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    audit, column = ARCHITECTURES[machine]
    made: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, audit),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, 0, 1, X32_BIT),
        (RETURN, 0, 0, KILL),
    ]
    plain = _numbers(ALWAYS, column) + (_numbers(IN_A_FOLDER, column) if may_write else [])
    for number, *_ in plain:
        made += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for number, argument in _numbers(OPEN, column):
        made += (
            [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
            if may_write
            else _looked_at(number, argument, [(ANY_BIT, 0, 1, WRITING), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)])
        )
    for number, *_ in _numbers(FCNTL, column):
        tests = [step for value in FCNTL_COMMANDS for step in ((EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW))]
        made += _looked_at(number, 1, [*tests, (RETURN, 0, 0, REFUSE)])
    for number, *_ in _numbers(PRLIMIT, column):
        made += _looked_at(number, 0, [(EQUAL, 0, 1, 0), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)])
    return [*made, (RETURN, 0, 0, REFUSE)]


def restrict(*, may_write: bool) -> None:
    """From now on this process makes only the calls of the list. It must have set PR_SET_NO_NEW_PRIVS.

    Args:
        may_write: files may be opened for writing, since another layer says where.

    Raises:
        OSError: the kernel refuses, or the architecture is not known.
    """
    load(instructions(os.uname().machine, may_write=may_write))


def load(made: Sequence[Instruction]) -> None:
    """Puts a filter on this process. It must have set PR_SET_NO_NEW_PRIVS.

    Raises:
        OSError: the kernel refuses.
    """
    filters = (_Filter * len(made))(*(_Filter(*step) for step in made))
    program = _Program(len(made), filters)
    filter_mode = ctypes.c_ulong(2)
    call("prctl", ctypes.c_int(PR_SET_SECCOMP), filter_mode, ctypes.byref(program))


def _looked_at(number: int, argument: int, steps: list[Instruction]) -> list[Instruction]:
    """For one call: load the low word of an argument and decide by it. Every path through `steps` must return."""
    return [(EQUAL, 0, len(steps) + 1, number), (LOAD, 0, 0, ARGUMENTS_AT + 8 * argument), *steps]


def _numbers(table: str, column: int) -> list[list[int]]:
    """Of each call in a list that the architecture has: its number, and what stands behind the two numbers."""
    rows = [row.split() for row in table.split(",")]
    return [[int(row[1 + column]), *map(int, row[3:])] for row in rows if row[1 + column] != "-"]
