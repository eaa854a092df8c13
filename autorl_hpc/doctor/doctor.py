"""Run all checks in the order of the page, print the page, and choose the exit code."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from autorl_hpc.cluster import profile as site
from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.profile import load_profile, scratch_folder
from autorl_hpc.doctor import host, scheduler, storage, trial_jobs
from autorl_hpc.doctor.finding import Check, Finding, State, examine, in_group, note, ok, problem, unknown
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.records.cluster import ClusterProfile

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
SCRATCH_GROUP = "Files of the scratch folder"
Say = Callable[[str], None]


def diagnose(root: Path, cluster: str | None, *, jobs: bool, say: Say) -> list[Finding]:
    """Return every finding of an absolute `root`, which need not exist, and a profile's name or file. Raises AutorlError if there is no
    such profile, or it is wrong. `jobs`: they may be submitted; `say`: takes a line about what is waited for."""
    profile = load_profile(cluster) if cluster else scheduler.UNNAMED
    with trial_jobs.handling(trial_jobs.end):
        place, scratch, wrong = storage.existing(root), None, list[Finding]()
        try:
            scratch = scratch_folder(profile, profile.name)
        except AutorlError as error:
            wrong = [problem("scratch", error.what, "workspaces have no place", error.next_step or "")]
        found, answers = _slurm(profile)
        if answers and not jobs:
            found += in_group(trial_jobs.FIRST_GROUP, unknown(trial_jobs.TIME_TO_RUN, "not measured: --no-jobs"))
        elif answers:
            say("doctor: submitting a small job, and a second one to another node")
            more = [scratch] if scratch and scratch.is_dir() else []
            found += trial_jobs.examine_with_jobs(place, profile, more, say)
        found += _files("Files of the root", root)
        if scratch is not None:
            found += _files(SCRATCH_GROUP, scratch, like=place)
        found += in_group(SCRATCH_GROUP, *wrong)
        found += examine("Home", Check("quota", lambda: storage.quota(Path.home()), 25.0))
        found += host.check_agents(profile, root) + host.check_engine(profile)
        return found + [each for group, checks in host.checks().items() for each in examine(group, *checks)]


def _slurm(profile: ClusterProfile) -> tuple[list[Finding], bool]:
    there = scheduler.clients()
    if profile.scheduler == "local":
        value = f"not looked at: the profile `{profile.name}` is of this machine alone"
        there = note("Slurm", value, "no job is queued")
    if there.state is State.NOTE:
        return in_group("Slurm", there), False
    began = time.monotonic()
    try:
        config = site.config()
    except slurm.SchedulerError as error:
        so_what = "nothing can be submitted or looked up now"
        silent = problem("controller", error.what, so_what, error.next_step or "try again later")
        return in_group("Slurm", there, silent), False
    found = in_group("Slurm", there, scheduler.answered(config, time.monotonic() - began))
    if profile is scheduler.UNNAMED:
        so_what = "the default partition is looked at, without GPUs"
        found += in_group("Slurm", note("profile", "none named", so_what, "--cluster NAME"))
    for group, look, limit_s in (
        ("Slurm", scheduler.check_configuration, 60.0),
        ("Limits", scheduler.check_limits, 60.0),
        ("Partitions", scheduler.check_partitions, 240.0),
    ):
        found += examine(group, Check(group, partial(look, config, profile), limit_s))
    return found, there.state is State.OK


def _files(group: str, folder: Path, like: Path | None = None) -> list[Finding]:
    """Examine a folder's file system; nothing but write access where it is that of `like`."""
    place, there = storage.existing(folder), ok("folder", str(folder))
    if place != folder:
        there = note("folder", f"{folder} is not there yet", f"looked at {place} in its place")
    access = storage.writable(place)
    found = in_group(group, there, access)
    if like is not None and place.stat().st_dev == like.stat().st_dev:
        return [*found, *in_group(group, ok("file system", "the root's"))]
    found += examine(
        group,
        Check("file system", lambda: storage.kind(place)),
        Check("space", lambda: storage.space(place)),
        Check("quota", lambda: storage.quota(place)),
    )
    if access.state is not State.OK:
        return found
    with trial_jobs.probe_folder(place) as tried:  # by this thread: ctrl-C reaches it
        return found + examine(group, Check("tried by doing", lambda: storage.probes(tried), 60.0))


def exit_code(findings: Sequence[Finding]) -> Exit:
    """Return 3 where nothing could be examined, 1 where there is a problem, else 0."""
    if all(finding.state is State.UNKNOWN for finding in findings):
        return Exit.ENVIRONMENT
    return Exit.FAILED if any(finding.state is State.PROBLEM for finding in findings) else Exit.OK


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    problems = sum(finding.state is State.PROBLEM for finding in findings)
    return {"schema_version": SCHEMA_VERSION, "findings": [each.as_json() for each in findings], "problems": problems}


# The page on a terminal: what to do, the worst first; then, if asked for, every finding by group

STYLES = dict(zip(State, ("green", "cyan", "yellow", "bold red", "magenta"), strict=True))
TO_DO = (State.PROBLEM, State.WARNING, State.UNKNOWN)
STATE_WIDTH, CHECK_WIDTH, LEAST_WIDTH = 8, 25, 60


def show(findings: Sequence[Finding], console: Console, *, every: bool = False) -> None:
    """Print what to do, a count, and with `every` all findings in their groups."""
    from rich.text import Text

    def head(text: str) -> None:
        console.print(Text(text, style="bold"), soft_wrap=True)

    def show_one(finding: Finding, first: str, *, in_words: bool) -> None:
        told = [("so what", finding.so_what), ("do this", finding.do_this)] if in_words else []
        rows = [(f"{finding.state:<{STATE_WIDTH}}{first} {finding.value}", CHECK_WIDTH + 1 if every else 0)]
        for text, indent in [*rows, *((f"{'':{STATE_WIDTH}}{label}: {words}", 9) for label, words in told if words)]:
            hanging = " " * (STATE_WIDTH + indent)
            lines = fill(text, max(console.width, LEAST_WIDTH), subsequent_indent=hanging, break_on_hyphens=False)
            shown = Text(lines)
            shown.stylize(STYLES[finding.state], 0, STATE_WIDTH)
            console.print(shown, soft_wrap=True)

    numbers = Counter(finding.state for finding in findings)
    to_do = sorted((each for each in findings if each.state in TO_DO), key=lambda each: TO_DO.index(each.state))
    head("What to do" if to_do else "Nothing to do")
    for finding in to_do:
        show_one(finding, f"{finding.group}, {finding.check}:", in_words=True)
    for group, found in groupby(findings if every else (), lambda finding: finding.group):
        head(f"\n{group}")
        for finding in found:
            show_one(finding, f"{finding.check:<{CHECK_WIDTH}}", in_words=finding.state is State.NOTE)
    counts = [
        f"{numbers[each]} {each}{'' if numbers[each] == 1 or each in (State.OK, State.UNKNOWN) else 's'}"
        for each in State
    ]
    head(f"\n{', '.join(counts)}{'' if every else '; all of them: --all'}")
