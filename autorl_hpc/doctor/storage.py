"""Where a folder lies: kind of file system, memory or disk, space, files left."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.doctor.finding import Finding, note, ok, problem, unknown, warning
from autorl_hpc.doctor.tools import size

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
