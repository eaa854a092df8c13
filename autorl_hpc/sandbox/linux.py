"""Linux system calls without a Python function, by the C library: Landlock, namespaces and mounts, prctl."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38

_LIBC = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """Call a function of the C library. Raises OSError: it failed, or the library has no such function."""
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
    """Set one option of this process. Raises OSError: the kernel refuses."""
    zero = ctypes.c_ulong(0)
    call("prctl", ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero)


def drop_capabilities() -> None:
    """Drop all capabilities of this process. Raises OSError: the kernel refuses."""
    version_3 = 0x20080522
    header = (ctypes.c_uint32 * 2)(version_3, 0)
    call("capset", header, (ctypes.c_uint32 * 6)())


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
"""Rights that a rule for a plain file may have."""
READ = READ_FILE | READ_DIR
FS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of access rights that each version knows; later versions know those of 5."""
NET_TCP = 0b11
SCOPES = 0b11  # from version 6 on: no abstract sockets of others, no signals to others


class _Ruleset(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _Port(ctypes.Structure):
    _fields_ = [("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def version() -> int:
    """Return the version of this kernel's Landlock. Raises OSError: there is none, or it is disabled."""
    return _syscall(CREATE_RULESET, None, 0, VERSION_FLAG)


def restrict_paths(readable: Sequence[str], listable: Sequence[str], private: str) -> None:
    """Limit this process to reading `readable`, listing `listable`, and writing plain files below `private`. Raises
    OSError: the kernel refuses."""
    write = WRITE_FILE | REMOVE_FILE | MAKE_REG | TRUNCATE
    rules = [(path, READ if os.path.isdir(path) else READ_FILE) for path in readable]
    apply([*rules, *((path, READ_DIR) for path in listable), (private, READ | write)], ports=())


def apply(rules: Sequence[tuple[str, int]], ports: Sequence[int] | None) -> None:
    """Limit file access of this process and its children to `rules`: (folder or file, rights; those that this kernel's version doesn't know
    are left out), and TCP to `ports` (from version 4 on; None: all). From 6 on signals and abstract sockets can't reach out. Raises OSError:
    the kernel refuses."""
    abi = version()
    known = (1 << FS_BITS.get(abi, 16)) - 1
    wanted = _Ruleset(fs=known, net=NET_TCP if abi >= 4 and ports is not None else 0, scoped=SCOPES)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = _syscall(CREATE_RULESET, ctypes.byref(wanted), size, 0)
    try:
        for path, access in rules:
            with suppress(FileNotFoundError):
                folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    _syscall(ADD_RULE, ruleset, PATH_BENEATH, ctypes.byref(_Beneath(access & known, folder)), 0)
                finally:
                    os.close(folder)
        for port in (ports or ()) if abi >= 4 else ():
            _syscall(ADD_RULE, ruleset, NET_PORT, ctypes.byref(_Port(NET_TCP, port)), 0)
        _syscall(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _syscall(number: int, *arguments: object) -> int:
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return call("syscall", ctypes.c_long(number), *words)


# --- namespaces: users, mounts, processes, network, IPC (user_namespaces(7))

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC = 1 << 10, 1 << 11, 1 << 12, 1 << 14
MS_PRIVATE, MS_RELATIME = 1 << 18, 1 << 21
QUIET = MS_NOSUID | MS_NODEV
KEPT_FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME | MS_RELATIME
"""Flags that a read-only remount must repeat. `statvfs` uses the same numbers, except for the last."""
ST_RELATIME = 1 << 12
MNT_DETACH = 2
SIGKILL = 9


def unshare(user: int, group: int, *, network: bool) -> None:
    """Give this process namespaces of its own, as this user and group inside; its children get process numbers of their
    own. `network`: also one without any network device that is up. Raises OSError: the kernel or the site refuses."""
    outer_user, outer_group = os.geteuid(), os.getegid()
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    call("unshare", flags | (CLONE_NEWNET if network else 0))
    prctl(PR_SET_PDEATHSIG, SIGKILL)  # the change of credentials may have cleared it
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {outer_user} 1"),
        ("gid_map", f"{group} {outer_group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    mount("none", "/", None, MS_REC | MS_PRIVATE, None)


def enter_root(root: str) -> None:
    """Make the file system mounted at `root` this process's own, read-only at its top."""
    mount("none", root, None, MS_REMOUNT | MS_BIND | MS_RDONLY | QUIET, None)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)


def bind(source: str, target: str, *, read_only: bool = True) -> None:
    """Bind a folder, file, device or link at `target` with everything mounted below it; a missing source is skipped. Raises OSError: the
    kernel refuses."""
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
    if not read_only:
        return
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split(" ")[4] for line in file]
    names = [point.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\") for point in points]
    for below in (name for name in names if name == target or name.startswith(f"{target}/")):
        flags = os.statvfs(below).f_flag
        kept = flags & KEPT_FLAGS | (MS_RELATIME if flags & ST_RELATIME else 0)
        mount("none", below, None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept, None)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    """Call mount(2). Raises OSError: the kernel refuses; the message says what was mounted."""
    words = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    try:
        call("mount", words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    except OSError as error:
        raise OSError(error.errno or errno.EIO, f"mounting {source}: {error.strerror}") from None
