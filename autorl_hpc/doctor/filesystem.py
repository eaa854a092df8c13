"""What the suite does with files, tried in a folder: rename, link, races of two processes, locks, fsync, reflink, clock."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autorl_hpc.doctor import pair, visibility
from autorl_hpc.doctor.finding import Finding, note, ok, problem, unknown, warning

FICLONE = 0x40049409
"""linux/fs.h"""

OTHER = "use another file system (--root, or `scratch` in the cluster's profile)"
SLOW_WRITE_S = 0.1
"""A run writes a record every few seconds, a submission some ten."""

SKEW_S = 2.0
PAIR_LIMIT_S = 40.0

Probe = Callable[[Path], Finding]


def probes(folder: Path) -> list[Finding]:
    """Every probe by this process alone, in an empty folder."""
    return [_tried(name, probe, folder) for name, probe in PROBES.items()]


def _tried(name: str, probe: Probe, folder: Path) -> Finding:
    try:
        return probe(folder)
    except OSError as error:
        return problem(name, f"failed: {error.strerror or error}", "the suite works with files this way", OTHER)


def rename_over(folder: Path) -> Finding:
    """Also how long it takes to write a record: write, fsync, rename, fsync of the folder."""
    path, times = folder / "record", []
    for number in range(5):
        began = time.monotonic()
        temporary = folder / f"record.{number}"
        with open(temporary, "wb") as file:
            file.write(b"%d" % number)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _fsync_folder(folder)
        times.append(time.monotonic() - began)
        if path.read_bytes() != b"%d" % number:
            return problem("rename over", "the old content was still there", "records would be lost", OTHER)
    value = f"replaces; a record takes {1000 * statistics.median(times):.1f} ms"
    if statistics.median(times) > SLOW_WRITE_S:
        return warning("rename over", value, "every record takes that long; runs are slower to score", OTHER)
    return ok("rename over", value)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_folder(folder: Path) -> Finding:
    """Some file systems refuse it; the suite goes on without."""
    try:
        _fsync_folder(folder)
    except OSError as error:
        so_what = "a rename may be forgotten if the file server loses power; nothing else is lost"
        return note("fsync of a folder", f"refused: {error.strerror}", so_what)
    return ok("fsync of a folder", "works")


def hard_link(folder: Path) -> Finding:
    """How entries of a ledger are committed."""
    source, name = folder / "linked-from", folder / "linked-to"
    source.write_bytes(b"x")
    try:
        os.link(source, name)
    except OSError as error:
        return problem("hard link", f"refused: {error.strerror}", "ledger entries are committed by links", OTHER)
    if os.stat(name).st_nlink != 2:
        so_what = "a link whose reply is lost on the network can't be told from a lost race"
        return warning("hard link", f"made, but counted as {os.stat(name).st_nlink}", so_what, OTHER)
    try:
        os.link(source, name)
    except FileExistsError:
        return ok("hard link", "allowed, and exclusive")
    return problem("hard link", "made over a name that was taken", "ledger entries would be overwritten", OTHER)


def create_exclusive(folder: Path) -> Finding:
    """O_EXCL."""
    path = folder / "exclusive"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return ok("O_EXCL", "refuses a name that is taken")
    return problem("O_EXCL", "a name that was taken was given again", "unfinished writes may mix", OTHER)


def reflink(folder: Path) -> Finding:
    """Whether a copy shares its blocks with the original."""
    source, copy = folder / "cloned-from", folder / "cloned-to"
    source.write_bytes(b"x" * 65536)
    with open(source, "rb") as original, open(copy, "wb") as new:
        try:
            fcntl.ioctl(new.fileno(), FICLONE, original.fileno())
        except OSError as error:
            known = error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS)
            why = "" if known else f" ({error.strerror})"
            return note("reflink", f"not here{why}", "an accepted checkpoint is copied byte by byte and takes its size")
    return ok("reflink", "a copy takes no space and no time")


def case(folder: Path) -> Finding:
    """Names that differ in case only."""
    (folder / "Case").write_bytes(b"")
    if (folder / "cASE").exists():
        return warning("upper and lower case", "are one", "files of some models overwrite each other", OTHER)
    return ok("upper and lower case", "differ")


def modes(folder: Path) -> Finding:
    """Whether permissions hold, and programs start."""
    script = folder / "program"
    script.write_text("#!/bin/sh\nexit 7\n")
    script.chmod(0o700)
    if os.stat(script).st_mode & 0o777 != 0o700:
        so_what = "the held-out items are kept from other users by permissions alone"
        return warning("permissions", "chmod changes nothing", so_what, OTHER)
    try:
        code = subprocess.run([str(script)], check=False, timeout=10, stdin=subprocess.DEVNULL).returncode
    except PermissionError:
        return warning("permissions", "hold, but no program starts (noexec)", "agents' scripts can't run", OTHER)
    except subprocess.TimeoutExpired:
        code = -1
    if code != 7:
        return warning("permissions", "hold, but a program did not start", "agents' scripts can't run", OTHER)
    return ok("permissions", "hold, and programs start")


def mtime(folder: Path) -> Finding:
    """The file server's clock against this host's."""
    path = folder / "dated"
    before = time.time()
    with open(path, "wb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    after = time.time()
    seen = os.stat(path).st_mtime
    skew = min(0.0, seen - before) + max(0.0, seen - after)
    if abs(skew) > SKEW_S:
        so_what = "the suite doesn't judge by file times; rsync, make and clean-up scripts do"
        return note("time of files", f"{skew:+.1f} s against this host's clock", so_what, "tell the site's people")
    return ok("time of files", "agrees with this host's clock")


PROBES: dict[str, Probe] = {
    "rename over": rename_over,
    "fsync of a folder": fsync_folder,
    "hard link": hard_link,
    "O_EXCL": create_exclusive,
    "reflink": reflink,
    "upper and lower case": case,
    "permissions": modes,
    "time of files": mtime,
}


def pair_here(folder: Path) -> list[Finding]:
    """Two processes of this host race for names and locks."""
    place = folder / "pair"
    place.mkdir()
    copy_pair(place)
    argv = [sys.executable, str(place / "pair.py"), str(place)]
    sides = [
        subprocess.Popen(
            [*argv, side], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/"
        )
        for side in "ab"
    ]
    deadline = time.monotonic() + PAIR_LIMIT_S
    try:
        for side in sides:
            side.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return [unknown("two processes", f"they were not done within {PAIR_LIMIT_S:.0f} s", "calls hang here", OTHER)]
    finally:
        for side in sides:
            if side.poll() is None:
                side.kill()
    return visibility.judge(result(place, "a"), result(place, "b"), two_nodes=False)


def copy_pair(place: Path) -> None:
    """The scripts of a pair, to run without the package."""
    for name in ("pair.py", "post.py"):
        shutil.copyfile(Path(pair.__file__).with_name(name), place / name)


def result(place: Path, side: str) -> Any:
    """A side's raw result; None if it left none."""
    try:
        return json.loads((place / side / "result").read_bytes())
    except (OSError, ValueError):
        return None
