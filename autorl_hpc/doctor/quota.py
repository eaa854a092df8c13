"""The user's own limits on a file system, as the file system's own program tells them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.doctor.finding import Finding, note, ok, problem, unknown, warning
from autorl_hpc.doctor.storage import LOW_BYTES, mount_of
from autorl_hpc.doctor.tools import ask, size

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
