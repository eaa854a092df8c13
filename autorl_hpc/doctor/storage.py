"""Where a folder lies: kind of file system, memory or disk, space, files left."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.doctor import pair, visibility
from autorl_hpc.doctor.finding import Finding, ask, note, ok, problem, size, unknown, warning

GIB = 1024**3
LOW_BYTES = 50 * GIB
"""Three checkpoints of a 7B model in bf16 are 45 GB."""

FULL_BYTES = 2 * GIB
"""Not even a run of the tiny model with its environment is safe."""

LOW_FILES = 100_000
"""A Python environment for training has 50,000 files; a run makes some thousands."""

MEMORY_KINDS = ("tmpfs", "ramfs")
LOCAL_KINDS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "f2fs", *MEMORY_KINDS)
TOLD_OPTIONS = frozenset(
    [
        "lookupcache",
        "actimeo",
        "acregmin",
        "acregmax",
        "acdirmin",
        "acdirmax",
        "noac",
        "nolock",
        "local_lock",
        "flock",
        "localflock",
        "noflock",
        "noexec",
        "ro",
        "vers",
        "soft",
    ]
)
"""Of a mount: those that change what the suite or an agent can do there."""


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo."""

    point: str
    kind: str
    source: str
    options: tuple[str, ...]

    @property
    def in_memory(self) -> bool:
        return self.kind in MEMORY_KINDS

    @property
    def told(self) -> str:
        """Its kind and what of its options matters here."""
        told = [option for option in self.options if option.partition("=")[0] in TOLD_OPTIONS]
        return f"{self.kind} at {self.point}" + (f" ({', '.join(told)})" if told else "")


def mounts(proc: Path = Path("/proc")) -> list[Mount]:
    """Every mount that this process sees, later ones last.

    Raises:
        OSError: /proc can't be read.
    """
    found = []
    for line in (proc / "self" / "mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        before, dash, after = line.partition(" - ")
        place, what = before.split(" "), after.split(" ")
        if dash and len(place) >= 6 and len(what) >= 2:
            options = dict.fromkeys([*place[5].split(","), *(what[2].split(",") if len(what) > 2 else [])])
            found.append(Mount(_plain(place[4]), what[0], _plain(what[1]), tuple(options)))
    return found


def _plain(text: str) -> str:
    """Mountinfo writes a space as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def mount_of(folder: Path, proc: Path = Path("/proc")) -> Mount | None:
    """The mount a folder lies on; None if it can't be told."""
    try:
        path = os.path.realpath(folder)
        found = None
        for mount in mounts(proc):
            inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
            if inside and (found is None or len(mount.point) >= len(found.point)):
                found = mount
        return found
    except OSError:
        return None


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def kind(folder: Path, proc: Path = Path("/proc")) -> Finding:
    """What file system it is."""
    mount = mount_of(folder, proc)
    if mount is None:
        return unknown("file system", "/proc/self/mountinfo doesn't tell")
    if mount.in_memory:
        return warning(
            "file system",
            f"{mount.told}: in memory",
            "what lies there is gone with the next boot, and counts as memory",
            "give a folder on a disk (--root, or `scratch` in the cluster's profile)",
        )
    if "noexec" in mount.options:
        return warning(
            "file system",
            mount.told,
            "programs can't be started from there, agents' scripts and environments neither",
            "give a folder on another file system",
        )
    if mount.kind in LOCAL_KINDS:
        return note(
            "file system",
            f"{mount.told}: local to this machine, unless it is exported from here",
            "jobs on other nodes may not see it",
            "see the checks by jobs; for a cluster, give a folder that all nodes share",
        )
    if mount.kind.startswith("nfs") and not {"noac", "lookupcache=none", "lookupcache=pos"} & set(mount.options):
        return note(
            "file system",
            mount.told,
            "a name that was missed once may stay missing for 30 s on that node; the suite lists and opens instead",
            "let your own scripts list the folder too",
        )
    return ok("file system", mount.told)


def space(folder: Path) -> list[Finding]:
    """Bytes and files that are left."""
    told = os.statvfs(folder)
    free, total = told.f_bavail * told.f_frsize, told.f_blocks * told.f_frsize
    value = f"{size(free)} free of {size(total)}"
    so_what = "a checkpoint of a 7B model takes 15 GB, and each that is accepted is kept for a while"
    if free < FULL_BYTES:
        found = [problem("space", value, so_what, "free some space, or use another file system (--root)")]
    elif free < LOW_BYTES:
        found = [warning("space", value, so_what, "free some space, or use another file system (--root)")]
    else:
        found = [ok("space", value)]
    if told.f_files == 0:
        return [*found, ok("files left", "no limit is told")]
    value = f"{told.f_favail:,} of {told.f_files:,}"
    if told.f_favail < LOW_FILES:
        so_what = "an environment for training has some 50,000 files"
        return [*found, warning("files left", value, so_what, "remove old environments and caches")]
    return [*found, ok("files left", value)]


def temporary(name: str, folder: str | None, proc: Path = Path("/proc")) -> Finding:
    """$TMPDIR, /tmp or /dev/shm."""
    if not folder:
        return ok(name, "not set: programs use /tmp")
    path = Path(folder)
    if not path.is_dir():
        if name != "$TMPDIR":
            return note(name, "there is none", "programs that count on it fail")
        so_what = "programs that make temporary files fail"
        return warning(name, f"{folder}: no such folder", so_what, "make it, or unset TMPDIR")
    mount = mount_of(path, proc)
    told = os.statvfs(path)
    value = f"{folder}: {mount.kind if mount else 'unknown kind'}, "
    value += f"{size(told.f_bavail * told.f_frsize)} free of {size(told.f_blocks * told.f_frsize)}"
    if mount is None:
        return unknown(name, value)
    if mount.in_memory:
        what = "a RAM disk" if name != "/dev/shm" else "shared memory"
        small = told.f_blocks * told.f_frsize < GIB
        return note(
            name,
            f"{value}; {what}",
            "files there count against the job's memory"
            + ("; NCCL and data loaders need more than that" if small and name == "/dev/shm" else ""),
            "keep checkpoints and caches out of it; agents get a $TMPDIR in their workspace",
        )
    return ok(name, value)


def temporaries(environment: Mapping[str, str], proc: Path = Path("/proc")) -> list[Finding]:
    """All three."""
    given = environment.get("TMPDIR")
    found = [temporary("$TMPDIR", given, proc)]
    if given != "/tmp":
        found.append(temporary("/tmp", "/tmp", proc))
    return [*found, temporary("/dev/shm", "/dev/shm", proc)]


# What the suite does with files, tried in a folder: rename, link, races of two processes, locks, fsync, reflink, clock.

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


# The user's own limits on a file system, as the file system's own program tells them.

NEAR = 0.9
"""Of a limit: less is left than one checkpoint may take."""

QUOTA_TOOLS = {"lustre": "lfs", "beegfs": "beegfs-ctl", "gpfs": "mmlsquota"}
NO_QUOTA = "a quota that is used up looks like a full disk in the middle of a run"
ASK_SITE = "look with your site's own command, often `myquota`, and leave room for your checkpoints"


def quota(folder: Path, proc: Path = Path("/proc")) -> list[Finding]:
    """The user's own limits there, as the file system's own program tells them."""
    mount = mount_of(folder, proc)
    tool = QUOTA_TOOLS.get(mount.kind if mount else "", "quota")
    user = str(os.geteuid())
    point = mount.point if mount else str(folder)
    answer = ask(
        {
            "lfs": ["lfs", "quota", "-q", "-u", user, point],
            "beegfs-ctl": ["beegfs-ctl", "--getquota", "--uid", user, "--csv", f"--mount={point}"],
            "mmlsquota": ["mmlsquota", "-Y"],
        }.get(tool, ["quota", "-w", "-p"])
    )
    if answer is None:
        return [unknown("quota", f"there is no `{tool}` on this host", NO_QUOTA, ASK_SITE)]
    if tool in ("beegfs-ctl", "mmlsquota"):  # shown, not judged: their forms differ by version
        lines = [line for line in answer.out.splitlines() if line.strip()]
        value = lines[-1] if answer.code == 0 and lines else answer.said
        return [note("quota", value, NO_QUOTA, f"read it with `{tool}`, and leave room for your checkpoints")]
    source = mount.source if mount else point
    rows = [row for row in parse_quota(answer.out) if row.place in (source, point)]
    if rows:
        return [judged for row in rows for judged in _judge(row)]
    if answer.code is None:
        return [unknown("quota", f"{tool}: {answer.said}", NO_QUOTA, ASK_SITE)]
    if answer.out.strip() and "none" not in answer.out.lower() and not parse_quota(answer.out):
        return [unknown("quota", f"{tool} says: {answer.said}", NO_QUOTA, ASK_SITE)]
    return [ok("quota", f"none of yours there, says {tool}")]


@dataclass(frozen=True)
class Quota:
    """Use and limits; None: no limit. Bytes and numbers of files."""

    place: str
    used: int
    limit: int | None
    files: int
    files_limit: int | None


_NUMBER = r"\s+(\d+)\*?"
_GRACE = r"(?:\s+(?:-|none|\d+(?:days?|[dhms:])\S*|0(?=\s)|\d{9,}))?"
_ROW = re.compile(rf"(?m)^\s*(\S+){_NUMBER * 3}{_GRACE}{_NUMBER * 3}")


def parse_quota(text: str) -> list[Quota]:
    """The rows of `quota -w` or `lfs quota -q`: place, KiB used, soft and hard limit, grace, and the same for files."""
    found = []
    joined = re.sub(r"(?m)^\s*(\S*/\S+)\s*\n\s+(?=\d)", r"\1 ", text)  # a long name stands on a line of its own
    for match in _ROW.finditer(joined):
        used, soft, hard, files, files_soft, files_hard = (int(number) for number in match.groups()[1:])
        limits = [limit for limit in (soft, hard) if limit]
        file_limits = [limit for limit in (files_soft, files_hard) if limit]
        found.append(
            Quota(
                match[1],
                used * 1024,
                min(limits) * 1024 if limits else None,
                files,
                min(file_limits, default=None),
            )
        )
    return found


def _judge(row: Quota) -> list[Finding]:
    kinds = (
        ("quota", row.used, row.limit, size(row.used), size(row.limit or 0)),
        ("quota, files", row.files, row.files_limit, f"{row.files:,}", f"{row.files_limit or 0:,}"),
    )
    found = []
    for name, used, limit, used_text, limit_text in kinds:
        if limit is None:
            found.append(ok(name, f"{used_text} used, no limit"))
            continue
        value = f"{used_text} used of {limit_text}"
        if used >= limit:
            found.append(problem(name, value, "every write fails, in the middle of runs too", "free some space first"))
        elif used > NEAR * limit or (name == "quota" and limit - used < LOW_BYTES):
            found.append(warning(name, value, NO_QUOTA, "free some space, or use another file system (--root)"))
        else:
            found.append(ok(name, value))
    return found
