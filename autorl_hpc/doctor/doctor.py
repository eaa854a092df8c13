"""All checks in the order of the page, and the exit code they come to."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from autorl_hpc.cluster import profile as site
from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.profile import load_profile, scratch_folder
from autorl_hpc.doctor import host, scheduler, storage, trial_jobs
from autorl_hpc.doctor.finding import Check, Finding, State, examine, note, ok, problem
from autorl_hpc.doctor.trial_jobs import endings, probe_folder
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.records.cluster import ClusterProfile

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

SCHEMA_VERSION = 1
Say = Callable[[str], None]


def diagnose(root: Path, cluster: str | None, *, jobs: bool, say: Say) -> list[Finding]:
    """Every finding.

    Args:
        root: absolute; need not exist.
        cluster: a profile's name or file.
        jobs: whether jobs may be submitted.
        say: takes a line about what is waited for.

    Raises:
        AutorlError: there is no such profile, or it is wrong.
    """
    profile = load_profile(cluster) if cluster else None
    with endings():
        return _everything(root, profile, jobs=jobs, say=say)


def _everything(root: Path, profile: ClusterProfile | None, *, jobs: bool, say: Say) -> list[Finding]:
    scratch, wrong = _scratch(profile)
    place = storage.existing(root)
    found, speaks = _slurm(profile)
    if speaks and not jobs:
        found.append(ok("time from submit to run", "not measured: --no-jobs"))
        found[-1] = replace(found[-1], state=State.UNKNOWN, group=trial_jobs.FIRST_GROUP)
    elif speaks:
        say("doctor: submitting a small job, and a second one to another node")
        found += trial_jobs.examine_with_jobs(place, profile, [scratch] if scratch and scratch.is_dir() else [], say)
    found += _files("Files of the root", root)
    if scratch is not None:
        found += _files("Files of the scratch folder", scratch, like=place)
    found += wrong
    return found + _home(place) + host.check_agents(profile) + host.check_engine(profile) + _here()


def _scratch(profile: ClusterProfile | None) -> tuple[Path | None, list[Finding]]:
    if profile is None:
        return None, []
    try:
        return scratch_folder(profile, profile.name), []
    except AutorlError as error:
        found = problem("scratch", error.what, "workspaces have no place", error.next_step or "")
        return None, [replace(found, group="Files of the scratch folder")]


def _slurm(profile: ClusterProfile | None) -> tuple[list[Finding], bool]:
    """What Slurm says, and whether it speaks at all."""
    group = "Slurm"
    if profile is not None and profile.scheduler == "local":
        found = note(
            "Slurm", f"not looked at: the profile `{profile.name}` is of this machine alone", "no job is queued"
        )
        return [replace(found, group=group)], False
    there = scheduler.clients()
    if there.state is State.NOTE:
        return [replace(there, group=group)], False
    began = time.monotonic()
    try:
        config = site.config()
    except slurm.SchedulerError as error:
        return [replace(there, group=group), replace(scheduler.silent(error), group=group)], False
    first = [replace(f, group=group) for f in (there, scheduler.answered(config, time.monotonic() - began))]
    if profile is None:
        words = note("profile", "none named", "the default partition is looked at, without GPUs", "--cluster NAME")
        first.append(replace(words, group=group))
    first += examine(group, [Check("Slurm", lambda: scheduler.check_configuration(config, profile), 60.0)])
    first += examine("Limits", [Check("limits of accounts", lambda: scheduler.check_limits(config, profile), 60.0)])
    first += examine("Partitions", [Check("partitions", lambda: scheduler.check_partitions(config, profile), 240.0)])
    return first, there.state is State.OK


def _files(group: str, folder: Path, like: Path | None = None) -> list[Finding]:
    """A folder's file system, by doing; one that shares it with `like` is not measured twice."""
    place = storage.existing(folder)
    checks = [Check("folder", lambda: _folder(folder, place)), Check("write access", lambda: host.writable(place))]
    if like is not None and _same(place, like):
        return examine(group, [*checks, Check("file system", lambda: ok("file system", "the root's"))])
    checks += [
        Check("file system", lambda: storage.kind(place)),
        Check("space", lambda: storage.space(place)),
        Check("quota", lambda: storage.quota(place), 25.0),
    ]
    found = examine(group, checks)
    if not any(finding.check == "write access" and finding.state is State.OK for finding in found):
        return found  # nothing can be tried, or it would hang
    with probe_folder(place) as tried:  # by this thread: it is the one that a ctrl-C reaches
        return found + examine(
            group,
            [
                Check("tried by doing", lambda: storage.probes(tried), 60.0),
                Check("two processes", lambda: storage.pair_here(tried), 60.0),
            ],
        )


def _folder(folder: Path, place: Path) -> Finding:
    if place != folder:
        return note("folder", f"{folder} is not there yet", f"looked at {place} in its place")
    return ok("folder", str(folder))


def _home(like: Path) -> list[Finding]:
    """Caches and environments of a user's own lie there, often below a small quota."""
    home = storage.existing(Path.home())
    if _same(home, like):
        return examine("Home", [Check("file system", lambda: ok("file system", "the root's"))])
    checks = [
        Check("file system", lambda: storage.kind(home)),
        Check("space", lambda: storage.space(home)),
        Check("quota", lambda: storage.quota(home), 25.0),
    ]
    return examine("Home", checks)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.stat().st_dev == other.stat().st_dev
    except OSError:
        return False


def _here() -> list[Finding]:
    env = os.environ
    found = examine("Temporary folders", [Check("temporary folders", lambda: storage.temporaries(env))])
    found += examine("GPUs of this host", [Check("GPUs", lambda: host.check_gpus(env), 40.0)])
    found += examine("Sandbox, on this host", [Check("sandbox", host.check_sandbox, 60.0)])
    found += examine("Offline", [Check("offline variables", lambda: host.offline(env))])
    return found + examine(
        "This host",
        [
            Check("Python", host.python),
            Check("packages", host.imports, 60.0),
            Check("memory and CPUs", host.memory),
            Check("open files", host.open_files),
            Check("processes of yours", host.processes_allowed),
            Check("processes of others", host.others),
            Check("control groups", host.control_groups),
        ],
    )


def exit_code(findings: Sequence[Finding]) -> Exit:
    """3 where nothing could be examined, 1 where there is a problem, else 0."""
    if all(finding.state is State.UNKNOWN for finding in findings):
        return Exit.ENVIRONMENT
    return Exit.FAILED if any(finding.state is State.PROBLEM for finding in findings) else Exit.OK


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "schema_version": SCHEMA_VERSION,
        "findings": [finding.as_json() for finding in findings],
        "problems": sum(finding.state is State.PROBLEM for finding in findings),
    }


# The page on a terminal: one line a finding, and what follows from those that are not ok. Made for 80 columns and more.

STYLES = {
    State.OK: "green",
    State.NOTE: "cyan",
    State.WARNING: "yellow",
    State.PROBLEM: "bold red",
    State.UNKNOWN: "magenta",
}
STATE_WIDTH = 8
CHECK_WIDTH = 26
LEAST_WIDTH = 60


def show(findings: Sequence[Finding], console: Console) -> None:
    """Prints the groups in their order, and a count at the end."""
    from rich.text import Text

    group = None
    for finding in findings:
        if finding.group != group:
            console.print(Text(finding.group if group is None else f"\n{finding.group}", style="bold"), soft_wrap=True)
            group = finding.group
        for line in _lines(finding, max(console.width, LEAST_WIDTH)):
            console.print(line, soft_wrap=True)
    console.print(Text(f"\n{count(findings)}", style="bold"), soft_wrap=True)


def _lines(finding: Finding, width: int) -> list[Text]:
    from rich.text import Text

    state = (f"{finding.state:<{STATE_WIDTH}}", STYLES[finding.state])
    first = f"{finding.check:<{CHECK_WIDTH}}"
    if not first.endswith(" "):
        first += " "  # a long name pushes its value to the right
    wrapped = _wrapped(first + finding.value, width - STATE_WIDTH, CHECK_WIDTH)
    lines = [Text.assemble(state, wrapped[0]), *(Text(" " * STATE_WIDTH + line) for line in wrapped[1:])]
    if finding.state is not State.OK:
        for label, words in (("so what: ", finding.so_what), ("do this: ", finding.do_this)):
            rows = _wrapped(words, width - STATE_WIDTH - len(label), 0) if words else []
            for number, row in enumerate(rows):
                head = " " * STATE_WIDTH + (label if number == 0 else " " * len(label))
                lines.append(Text.assemble((head, "dim"), row))
    return lines


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    """Spaces stand as they are: the first ones make a column."""
    rows = wrap(text, width, subsequent_indent=" " * indent, drop_whitespace=True, break_on_hyphens=False)
    return [row.rstrip() for row in rows] or [""]


def count(findings: Sequence[Finding]) -> str:
    """Such as `31 ok, 4 notes, 1 warning, 0 problems, 2 unknown`."""
    numbers = Counter(finding.state for finding in findings)
    plural = {State.NOTE, State.WARNING, State.PROBLEM}
    return ", ".join(
        f"{numbers[state]} {state}{'s' if state in plural and numbers[state] != 1 else ''}" for state in State
    )
