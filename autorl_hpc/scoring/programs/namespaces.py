"""Confines a process by namespaces of its own: users, mounts, processes, network, IPC (user_namespaces(7)).

Works for ordinary users where the site allows user namespaces. Inside there is a small file system of nothing but the
interpreter's libraries, read-only, and one folder in memory; no network device that is up; no other process.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

from autorl_hpc.scoring.programs.linux import PR_SET_PDEATHSIG, call, prctl

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
EVERYTHING = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET

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
"""Flags that a read-only remount must repeat, or the kernel refuses; `statvfs` gives them with the same numbers but the last."""
ST_RELATIME = 1 << 12
MNT_DETACH = 2
SIGKILL = 9

NOBODY = 65534
PRIVATE = "/private"


def enter(folder: str, roots: Sequence[str], hidden: Sequence[str], folder_bytes: int, files: int) -> str:
    """Goes on in a child of this process that lives in namespaces of its own, and returns its private folder.

    The process that calls this waits for the child and ends as it did; it never returns.

    Args:
        folder: an empty folder outside, that the new file system is mounted on.
        roots: folders and files that stay, read-only, under their names.
        hidden: folders below them that look empty.
        folder_bytes, files: bounds of the private folder.

    Raises:
        OSError: the kernel or the site refuses. In the calling process or in the child.
    """
    user, group = os.geteuid(), os.getegid()
    call("unshare", EVERYTHING)
    prctl(PR_SET_PDEATHSIG, SIGKILL)  # it may have been cleared with the change of rights
    # Under a number of no rights inside, so that nothing is regained there.
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
    """Puts a folder, a file, a device or a link under `target`, with all that is mounted below it.

    What is not there outside is left out. Read-only applies to every mount below, too.

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
    """mount(2).

    Raises:
        OSError: the kernel refuses; says what was mounted.
    """
    words = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    try:
        call("mount", words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    except OSError as error:
        raise OSError(error.errno or errno.EIO, f"mounting {source}: {error.strerror}") from None
