"""A file system as bad as a cluster's, for tests: a FUSE pass-through in which each mount is one node.

    python lagging_fs.py BACKING MOUNTPOINT [--cache-s 3] [--skew-s 0] [--faults FILE]

Mounted twice over one folder it shows two nodes what NFS and Lustre show theirs:

* each mount believes for `--cache-s` what it last saw of names (absent ones too) and of sizes;
* inotify tells a mount of its own changes only;
* flock and fcntl locks are granted to everybody who asks, on one mount and across;
* a file that another node removed or replaced is stale (ESTALE) for who has it open; one that this node removed while
  it was open stays as `.fuse_hidden...`, as NFS leaves `.nfs...`;
* appends of two nodes may overwrite each other;
* `--skew-s`: every time that it shows is that of a server whose clock is ahead.

Creation with O_EXCL, link, mkdir and rename are exact, as they are on a server. fsync reaches no disk: nothing here has to
outlive a power cut. faults.py says what FILE may hold. Needs mfusepy and libfuse3; ends when it is unmounted.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from faults import Faults

T = TypeVar("T")

NOT_PASSED = os.O_APPEND | os.O_DIRECT | os.O_NOFOLLOW
"""The kernel has followed links and has computed where an append goes, from what this mount believes of the size."""

UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
SHOWN = ("st_mode", "st_ino", "st_dev", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_rdev")
TIMES = ("st_atime", "st_mtime", "st_ctime")
CANNOT_MOUNT = 2


def quietly_close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass


def operations(backing: str, skew_ns: int, faults: Faults) -> Any:
    """The operations object; a function, so that this file can be imported without libfuse."""
    import mfusepy

    def passed(op: str, act: Callable[..., object]) -> Callable[..., int]:
        def operation(self: Any, path: str, *given: Any) -> int:
            self._do(op, path, lambda real: act(real, *given))
            return 0

        return operation

    class Lagging(mfusepy.Operations):  # type: ignore[misc]
        """Passes everything on to `backing`."""

        use_ns = True

        def _do(self, op: str, path: str, act: Callable[[str], T], undo: Callable[[T], object] | None = None) -> T:
            """Does one operation under the faults that are on: instead of it, or after it, an error."""
            rule = faults.hit(op, path)
            if rule is None or rule.after:
                result = act(backing + path)
            if rule is None:
                return result
            if rule.after and undo is not None:
                undo(result)
            raise OSError(rule.number, os.strerror(rule.number))

        # ---- what a node sees

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            def look(real: str) -> dict[str, Any]:
                info = os.lstat(real) if fh is None else os.fstat(fh)
                times = {name: getattr(info, f"{name}_ns") + skew_ns for name in TIMES}
                return {name: getattr(info, name) for name in SHOWN} | times

            return self._do("getattr", path, look)

        def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
            def names(real: str) -> list[tuple[str, dict[str, int], int]]:
                with os.scandir(real) as entries:
                    found = [(entry.name, entry.inode(), _kind(entry)) for entry in entries]
                dots = [(name, os.lstat(real).st_ino, stat.S_IFDIR) for name in (".", "..")]
                return [(name, {"st_ino": inode, "st_mode": kind}, 0) for name, inode, kind in dots + found]

            return self._do("readdir", path, names)

        def readlink(self, path: str) -> str:
            return self._do("readlink", path, os.readlink)

        def access(self, path: str, amode: int) -> int:
            if not os.access(backing + path, amode, follow_symlinks=False):
                os.lstat(backing + path)
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            info = os.statvfs(backing + path)
            return {name: getattr(info, name) for name in dir(info) if name.startswith("f_")}

        # ---- files

        def open(self, path: str, flags: int) -> int:
            return self._do("open", path, lambda real: os.open(real, flags & ~NOT_PASSED), quietly_close)

        def create(self, path: str, mode: int, flags: int = os.O_WRONLY) -> int:
            wanted = flags & ~NOT_PASSED | os.O_CREAT
            return self._do("create", path, lambda real: os.open(real, wanted, mode), quietly_close)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            if os.fstat(fh).st_nlink == 0:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return self._do("read", path, lambda _: os.pread(fh, size, offset))

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            return self._do("write", path, lambda _: os.pwrite(fh, data, offset))

        def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
            if mode:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            self._do("write", path, lambda _: os.posix_fallocate(fh, offset, size))
            return 0

        truncate = passed("truncate", lambda real, length, fh=None: os.truncate(real if fh is None else fh, length))
        flush = passed("flush", lambda real, fh: None)
        fsync = passed("fsync", lambda real, datasync, fh: None)
        fsyncdir = passed("fsyncdir", lambda real, datasync, fh: None)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        # ---- names

        def rename(self, old: str, new: str) -> int:
            self._do("rename", new, lambda real: os.rename(backing + old, real))
            return 0

        link = passed("link", lambda real, source: os.link(backing + source, real, follow_symlinks=False))
        symlink = passed("symlink", lambda real, source: os.symlink(source, real))
        unlink = passed("unlink", os.unlink)
        mkdir = passed("mkdir", os.mkdir)
        mknod = passed("create", os.mknod)
        rmdir = passed("rmdir", os.rmdir)

        # ---- attributes

        chmod = passed("setattr", os.chmod)
        chown = passed("setattr", lambda real, uid, gid: os.chown(real, uid, gid, follow_symlinks=False))

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            def set_times(real: str) -> None:
                info = os.lstat(real)
                asked = times or (UTIME_NOW, UTIME_NOW)
                kept = (info.st_atime_ns, info.st_mtime_ns)
                atime, mtime = (_time(ns, was, skew_ns) for ns, was in zip(asked, kept, strict=True))
                os.utime(real, ns=(atime, mtime), follow_symlinks=False)

            self._do("setattr", path, set_times)
            return 0

        # ---- locks: who asks gets it

        def flock(self, path: str, fh: int, op: int) -> int:
            return 0

        def lock(self, path: str, fh: int, cmd: int, lock: Any) -> int:
            if cmd == fcntl.F_GETLK:
                lock.contents.l_type = fcntl.F_UNLCK
            return 0

    return Lagging()


def _kind(entry: os.DirEntry[str]) -> int:
    if entry.is_symlink():
        return stat.S_IFLNK
    return stat.S_IFDIR if entry.is_dir() else stat.S_IFREG if entry.is_file() else 0


def _time(asked_ns: int, kept_ns: int, skew_ns: int) -> int:
    """What to store: the kernel says `now` and `as it is` by two numbers that are no times."""
    if asked_ns == UTIME_OMIT:
        return kept_ns
    return time.time_ns() if asked_ns == UTIME_NOW else asked_ns - skew_ns


def main() -> int:
    """Mounts and serves until it is unmounted."""
    parser = argparse.ArgumentParser(description="A file system as bad as a cluster's, for tests.")
    parser.add_argument("backing", type=Path)
    parser.add_argument("mountpoint", type=Path)
    parser.add_argument("--cache-s", type=float, default=3.0, help="how long names and sizes are believed")
    parser.add_argument("--skew-s", type=float, default=0.0, help="how far the times that are shown are ahead")
    parser.add_argument("--faults", type=Path, help="control file of the injected errors")
    args = parser.parse_args()
    backing, mountpoint = args.backing.resolve(), args.mountpoint.resolve()
    for folder in (backing, mountpoint):
        if not folder.is_dir():
            print(f"lagging_fs: {folder} is not a folder", file=sys.stderr)
            return CANNOT_MOUNT
    if mountpoint == backing or mountpoint in backing.parents:
        print("lagging_fs: it would serve itself: the backing folder lies in the mount point", file=sys.stderr)
        return CANNOT_MOUNT
    os.umask(0)  # the caller's has been applied already
    try:
        import mfusepy

        mfusepy.FUSE(
            operations(str(backing), int(args.skew_s * 1e9), Faults(args.faults)),
            str(mountpoint),
            foreground=True,
            nothreads=True,  # so that faults come in the order of the calls
            use_ino=True,
            fsname="lagging",
            attr_timeout=args.cache_s,
            entry_timeout=args.cache_s,
            negative_timeout=args.cache_s,
        )
    except (ImportError, OSError, RuntimeError) as error:
        print(f"lagging_fs: {mountpoint} can't be mounted: {error!r}", file=sys.stderr)
        return CANNOT_MOUNT
    return 0


if __name__ == "__main__":
    sys.exit(main())
