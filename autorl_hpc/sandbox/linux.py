"""Linux system calls without a Python function, by the C library: seccomp, Landlock, namespaces and mounts, prctl."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_LIBC = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """Call a function of the C library.

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
    """Set one option of this process.

    Raises:
        OSError: the kernel refuses.
    """
    zero = ctypes.c_ulong(0)
    call("prctl", ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero)


def drop_capabilities() -> None:
    """Drop all capabilities of this process.

    Raises:
        OSError: the kernel refuses.
    """
    version_3 = 0x20080522
    header = (ctypes.c_uint32 * 2)(version_3, 0)
    call("capset", header, (ctypes.c_uint32 * 6)())


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

OPEN = "openat 257 56 2, open 2 - 1"
"""The last number is the argument with the flags."""
IN_A_FOLDER = "unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, fallocate 285 47"
"""Allowed only if another layer limits writes to one folder."""
FCNTL, FCNTL_COMMANDS = "fcntl 72 25", (0, 1, 2, 3, 4, 1030)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC. Not F_SETOWN and F_SETSIG, which can send signals to others."""
PRLIMIT = "prlimit64 302 261"
"""Only for this process, because limits of others could be lowered."""

ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
"""Offset in struct seccomp_data; the low word of argument n is at ARGUMENTS_AT + 8 n (both architectures are little-endian)."""
X32_BIT = 0x40000000
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

Instruction = tuple[int, int, int, int]


class _Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filters", ctypes.POINTER(_Filter))]


def instructions(machine: str, *, may_write: bool) -> list[Instruction]:
    """Return the filter for one architecture: (code, jump if true, jump if false, value).

    Raises:
        OSError: the architecture's system call numbers are unknown.
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


def restrict_calls(*, may_write: bool) -> None:
    """Limit this process to the listed calls. It must have set PR_SET_NO_NEW_PRIVS.

    Args:
        may_write: allow opening files for writing, because another layer restricts where.

    Raises:
        OSError: the kernel refuses, or the architecture is unknown.
    """
    load(instructions(os.uname().machine, may_write=may_write))


def load(made: Sequence[Instruction]) -> None:
    """Install a filter on this process. It must have set PR_SET_NO_NEW_PRIVS.

    Raises:
        OSError: the kernel refuses.
    """
    filters = (_Filter * len(made))(*(_Filter(*step) for step in made))
    program = _Program(len(made), filters)
    filter_mode = ctypes.c_ulong(2)
    call("prctl", ctypes.c_int(PR_SET_SECCOMP), filter_mode, ctypes.byref(program))


def _looked_at(number: int, argument: int, steps: list[Instruction]) -> list[Instruction]:
    """Load the low word of one call's argument and decide by it. Every path through `steps` must return."""
    return [(EQUAL, 0, len(steps) + 1, number), (LOAD, 0, 0, ARGUMENTS_AT + 8 * argument), *steps]


def _numbers(table: str, column: int) -> list[list[int]]:
    """Return for each listed call of the architecture its number and the values after the two numbers."""
    rows = [row.split() for row in table.split(",")]
    return [[int(row[1 + column]), *map(int, row[3:])] for row in rows if row[1 + column] != "-"]


# --- Landlock (Linux 5.13): read a list of paths, write in one folder, TCP from 6.7 on
# Numbers from linux/landlock.h. Landlock hides no names: `stat` of an unreadable file still works.

# The same on every architecture.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG = 1
PATH_BENEATH, NET_PORT = 1, 2

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8
TRUNCATE, IOCTL = 1 << 14, 1 << 15
ALL_ACCESS = (1 << 16) - 1
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL
"""Access rights that the kernel accepts in a rule for a plain file."""
READ = READ_FILE | READ_DIR
FS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of access rights that each version knows; later versions know those of 5."""
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
    """Return the version of this kernel's Landlock.

    Raises:
        OSError: there is none, or it is disabled.
    """
    return _syscall(CREATE_RULESET, None, 0, VERSION_FLAG)


def restrict_paths(readable: Sequence[str], listable: Sequence[str], private: str) -> None:
    """Limit this process to reading `readable`, listing `listable`, and writing plain files below `private`.

    Raises:
        OSError: the kernel refuses.
    """
    write = WRITE_FILE | REMOVE_FILE | MAKE_REG | TRUNCATE
    rules = [(path, READ if os.path.isdir(path) else READ_FILE) for path in readable]
    apply([*rules, *((path, READ_DIR) for path in listable), (private, READ | write)], ports=())


def apply(rules: Sequence[tuple[str, int]], ports: Sequence[int] | None) -> None:
    """Limit file access of this process and its children to `rules`: (folder or file, access rights).

    Rights unknown to this kernel's version are left out. From version 6 on, signals and abstract sockets can't reach out.

    Args:
        ports: the only ports for TCP connect and listen (from version 4 on); None allows all.

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


# --- namespaces: users, mounts, processes, network, IPC (user_namespaces(7))
# Works for ordinary users where the site allows user namespaces. Inside are only a small read-only file system with the
# interpreter's libraries and one folder in memory; no network device that is up, and no other process.

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ALL_NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = (
    1 << 10,
    1 << 11,
    1 << 12,
    1 << 14,
    1 << 18,
    1 << 21,
)
KEPT_FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME | MS_RELATIME
"""Flags that a read-only remount must repeat. `statvfs` uses the same numbers, except for the last."""
ST_RELATIME = 1 << 12
MNT_DETACH = 2
SIGKILL = 9

NOBODY = 65534
PRIVATE = "/private"


def enter(folder: str, roots: Sequence[str], hidden: Sequence[str], folder_bytes: int, files: int) -> str:
    """Continue in a child process in its own namespaces and return its private folder.

    The calling process waits for the child and exits as it did; it never returns.

    Args:
        folder: empty folder outside on which the new file system is mounted.
        roots: folders and files that stay, read-only, under their names.
        hidden: folders below them that appear empty.
        folder_bytes, files: limits of the private folder.

    Raises:
        OSError: the kernel or the site refuses. In the calling process or in the child.
    """
    user, group = os.geteuid(), os.getegid()
    call("unshare", ALL_NAMESPACES)
    prctl(PR_SET_PDEATHSIG, SIGKILL)  # the change of credentials may have cleared it
    # Use an unprivileged id inside, so that no rights can be regained there.
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{NOBODY} {user} 1")
    _write("/proc/self/gid_map", f"{NOBODY} {group} 1")
    child = os.fork()
    if child:
        os.closerange(0, 1024)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    _file_system(folder, roots, hidden, folder_bytes, files)
    os.chdir(PRIVATE)
    return PRIVATE


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _file_system(folder: str, roots: Sequence[str], hidden: Sequence[str], folder_bytes: int, files: int) -> None:
    mount("none", "/", None, MS_REC | MS_PRIVATE, None)
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=1024,mode=755")
    for root in roots:
        bind(root, folder + root)
    for path in hidden:
        if os.path.isdir(folder + path):
            mount("tmpfs", folder + path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=4k,mode=755")
    os.mkdir(folder + PRIVATE)
    mount("tmpfs", folder + PRIVATE, "tmpfs", MS_NOSUID | MS_NODEV, f"size={folder_bytes},nr_inodes={files},mode=700")
    mount("none", folder, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, None)
    os.chdir(folder)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)


def bind(source: str, target: str, *, read_only: bool = True) -> None:
    """Bind a folder, file, device or link at `target`, with everything mounted below it.

    A missing source is skipped. Read-only applies to every mount below too.

    Raises:
        OSError: the kernel refuses.
    """
    if os.path.islink(source) and read_only:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif os.path.exists(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    else:
        return
    mount(source, target, None, MS_BIND | MS_REC, None)
    for below in _mounts_below(target) if read_only else ():
        flags = os.statvfs(below).f_flag
        kept = flags & KEPT_FLAGS | (MS_RELATIME if flags & ST_RELATIME else 0)
        mount("none", below, None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept, None)


def _mounts_below(target: str) -> list[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split(" ")[4] for line in file]
    names = [point.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\") for point in points]
    return [name for name in names if name == target or name.startswith(f"{target}/")]


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    """Call mount(2).

    Raises:
        OSError: the kernel refuses; the message says what was mounted.
    """
    words = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    try:
        call("mount", words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    except OSError as error:
        raise OSError(error.errno or errno.EIO, f"mounting {source}: {error.strerror}") from None
