"""Check a folder's file system: kind, space, quota, and by doing what the suite does with files."""

from __future__ import annotations

import os
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.doctor.finding import Finding, ask, note, ok, problem, said, unknown, warning
from autorl_hpc.files import atomic

GIB = 1024**3
LOW_BYTES = 50 * GIB  # three checkpoints of a 7B model in bf16 are 45 GB
FULL_BYTES = 2 * GIB  # not even a run of the tiny model with its environment is safe
LOW_FILES = 100_000  # a Python environment for training has 50,000 files; a run makes some thousands
MEMORY_KINDS = ("tmpfs", "ramfs")
LOCAL_KINDS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "f2fs")
TOLD_OPTIONS = {"lookupcache", "actimeo", "acregmax", "acdirmax", "noac", "local_lock"}
TOLD_OPTIONS |= {"nolock", "flock", "localflock", "noflock", "noexec", "ro", "vers", "soft"}
"""Options of a mount that change what the suite or an agent can do there."""

OTHER = "use another file system (--root, or `scratch` in the cluster's profile)"
FREE_SOME = "free some space, or use another file system (--root)"
PROC = Path("/proc")
MOUNT = re.compile(r"(?m)^\S+ \S+ \S+ \S+ (\S+) (\S+) .*?- (\S+) (\S+) ?(\S*)$")


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo."""

    point: str
    kind: str
    source: str
    options: tuple[str, ...]

    @property
    def told(self) -> str:
        """Its kind, and those of its options that matter here."""
        told = [option for option in self.options if option.partition("=")[0] in TOLD_OPTIONS]
        return f"{self.kind} at {self.point}" + (f" ({', '.join(told)})" if told else "")


def mount_of(folder: Path, proc: Path = PROC) -> Mount | None:
    """Return the mount that holds a folder; None if it can't be told."""
    path, over = f"{os.path.realpath(folder)}/", []
    try:
        text = (proc / "self" / "mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for row in MOUNT.findall(text):
        point, options, kind, source, more = (
            re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), part) for part in row
        )
        if path.startswith(point.rstrip("/") + "/"):
            over.append(Mount(point, kind, source, tuple(dict.fromkeys(f"{options},{more}".strip(",").split(",")))))
    return max(reversed(over), key=lambda mount: len(mount.point), default=None)


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def kind(folder: Path, proc: Path = PROC) -> Finding:
    name, mount = "file system", mount_of(folder, proc)
    if mount is None:
        return unknown(name, "/proc/self/mountinfo doesn't tell")
    if mount.kind in MEMORY_KINDS:
        so_what = "files there are gone after the next boot, and count as memory"
        return warning(name, f"{mount.told}: in memory", so_what, OTHER)
    if "noexec" in mount.options:
        so_what = "programs can't be started from there, agents' scripts and environments neither"
        return warning(name, mount.told, so_what, OTHER)
    if mount.kind in LOCAL_KINDS:
        value = f"{mount.told}: local to this machine, unless it is exported from here"
        advice = "see the checks by jobs; for a cluster, give a folder that all nodes share"
        return note(name, value, "jobs on other nodes may not see it", advice)
    if mount.kind.startswith("nfs") and not {"noac", "lookupcache=none", "lookupcache=pos"} & set(mount.options):
        so_what = "a name that was missed once may stay missing for 30 s on that node; the suite lists instead"
        return note(name, mount.told, so_what, "let your own scripts list the folder too")
    return ok(name, mount.told)


def space(folder: Path) -> list[Finding]:
    told = os.statvfs(folder)
    free = told.f_bavail * told.f_frsize
    value = f"{free / GIB:.1f} GiB free of {told.f_blocks * told.f_frsize / GIB:.0f}"
    judged = problem if free < FULL_BYTES else warning
    so_what = "a checkpoint of a 7B model takes 15 GB, and each that is accepted is kept for a while"
    found = [judged("space", value, so_what, FREE_SOME) if free < LOW_BYTES else ok("space", value)]
    if told.f_files and told.f_favail < LOW_FILES:
        so_what, advice = "an environment for training has some 50,000 files", "remove old environments and caches"
        found.append(warning("files left", f"{told.f_favail:,} of {told.f_files:,}", so_what, advice))
    return found


# What the suite does with files, tried in a folder

SLOW_WRITE_S = 0.1  # a run writes a record every few seconds, a submission some ten


def writable(folder: Path) -> Finding:
    path, name = folder / f".autorl-doctor-{os.getpid()}-{os.urandom(4).hex()}", "write access"
    try:
        path.write_bytes(b"x")
        path.unlink()
    except OSError as error:
        so_what = "nothing can be staged or launched there"
        return problem(name, f"no: {error.strerror}", so_what, "choose a folder that you may write to (--root)")
    return ok(name, "yes")


def probes(folder: Path) -> list[Finding]:
    """Try everything that one process can, in an empty folder."""
    found = []
    for name, probe in (("rename over", rename_over), ("hard link", hard_link), ("permissions", modes)):
        try:
            found.append(probe(name, folder))
        except OSError as error:
            value = f"failed: {error.strerror or error}"
            found.append(problem(name, value, "the suite works with files this way", OTHER))
    return found


def rename_over(name: str, folder: Path) -> Finding:
    """Replace a record as the suite does, and measure how long it takes."""
    times = []
    for number in range(5):
        began = time.monotonic()
        atomic.write_bytes(folder / "record", b"%d" % number)
        times.append(time.monotonic() - began)
        if (folder / "record").read_bytes() != b"%d" % number:
            return problem(name, "the old content was still there", "records would be lost", OTHER)
    value = f"replaces; a record takes {1000 * statistics.median(times):.1f} ms"
    if statistics.median(times) > SLOW_WRITE_S:
        return warning(name, value, "every record takes that long; runs are slower to score", OTHER)
    return ok(name, value)


def hard_link(name: str, folder: Path) -> Finding:
    """Link a file, as entries of a ledger are committed."""
    source, target = folder / "linked-from", folder / "linked-to"
    source.write_bytes(b"x")
    try:
        os.link(source, target)
    except OSError as error:
        return problem(name, f"refused: {error.strerror}", "ledger entries are committed by links", OTHER)
    if (count := os.stat(target).st_nlink) != 2:
        so_what = "a link whose reply is lost on the network can't be told from a lost race"
        return warning(name, f"made, but counted as {count}", so_what, OTHER)
    try:
        os.link(source, target)
    except FileExistsError:
        return ok(name, "allowed, and exclusive")
    return problem(name, "made over a name that was taken", "ledger entries would be overwritten", OTHER)


def modes(name: str, folder: Path) -> Finding:
    script = folder / "program"
    script.write_text("#!/bin/sh\nexit 7\n")
    script.chmod(0o700)
    if os.stat(script).st_mode & 0o777 != 0o700:
        so_what = "the held-out items are kept from other users by permissions alone"
        return warning(name, "chmod changes nothing", so_what, OTHER)
    answer = ask(str(script))
    if answer.code != 7:
        return warning(name, f"hold, but no program starts: {said(answer)}", "agents' scripts can't run", OTHER)
    return ok(name, "hold, and programs start")


# The user's own limits on a file system, as the file system's own program tells them

NEAR = 0.9  # of a limit: less is left than one checkpoint may take
NO_QUOTA = "a quota that is used up looks like a full disk in the middle of a run"
ASK_SITE = "look with your site's own command, often `myquota`, and leave room for your checkpoints"


@dataclass(frozen=True)
class Quota:
    """Use and limits in bytes and numbers of files; None: no limit."""

    place: str
    used: int
    limit: int | None
    files: int
    files_limit: int | None


_NUMBER = r"\s+(\d+)\*?"
_GRACE = r"(?:\s+(?:-|none|\d+(?:days?|[dhms:])\S*|0(?=\s)|\d{9,}))?"
_ROW = re.compile(rf"(?m)^\s*(\S+){_NUMBER * 3}{_GRACE}{_NUMBER * 3}")


def parse_quota(text: str) -> list[Quota]:
    """Parse `quota -w` or `lfs quota -q`: place, KiB used, soft and hard limit, grace, and the same for files."""
    found = []
    joined = re.sub(r"(?m)^\s*(\S*/\S+)\s*\n\s+(?=\d)", r"\1 ", text)  # a long name is on a line of its own
    for match in _ROW.finditer(joined):
        used, soft, hard, files, files_soft, files_hard = (int(number) for number in match.groups()[1:])
        limit = min((limit * 1024 for limit in (soft, hard) if limit), default=None)
        files_limit = min((limit for limit in (files_soft, files_hard) if limit), default=None)
        found.append(Quota(match[1], used * 1024, limit, files, files_limit))
    return found


def quota(folder: Path) -> list[Finding]:
    """Judge the user's own limits there, as `quota` or `lfs quota` tells them."""
    mount = mount_of(folder) or Mount(str(folder), "", str(folder), ())
    lustre = ("lfs", "quota", "-q", "-u", str(os.geteuid()), mount.point)
    tool, *options = lustre if mount.kind == "lustre" else ("quota", "-w", "-p")
    answer = ask(tool, *options)
    if answer.missing and mount.kind in (*LOCAL_KINDS, *MEMORY_KINDS):
        return [ok("quota", f"no `{tool}` on this host, and the file system is local")]
    if answer.code is None or (answer.code and not parse_quota(answer.out)):
        return [unknown("quota", f"`{tool}` on this host: {said(answer)}", NO_QUOTA, ASK_SITE)]
    found = []
    for row in (row for row in parse_quota(answer.out) if row.place in (mount.source, mount.point)):
        kinds = (
            ("quota, GiB", row.used / GIB, row.limit and row.limit / GIB),
            ("quota, files", row.files, row.files_limit),
        )
        for name, used, limit in kinds:
            value = f"{used:,.0f} used" + (f" of {limit:,.0f}" if limit else ", no limit")
            if limit and used >= limit:
                so_what = "every write fails, in the middle of runs too"
                found.append(problem(name, value, so_what, "free some space first"))
            elif limit and (used > NEAR * limit or (name == "quota, GiB" and limit - used < LOW_BYTES / GIB)):
                found.append(warning(name, value, NO_QUOTA, FREE_SOME))
            else:
                found.append(ok(name, value))
    return found or [ok("quota", f"none of yours there, says {tool}")]
