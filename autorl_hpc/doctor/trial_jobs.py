"""Jobs of the doctor's own: seen by their names, and always taken back, also on ctrl-C, a kill, or a closed terminal."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from autorl_hpc.cluster import slurm
from autorl_hpc.doctor import visibility
from autorl_hpc.doctor.finding import Finding, from_json, note, ok, problem, span, unknown, warning
from autorl_hpc.doctor.post import Post, listing, ping
from autorl_hpc.doctor.scheduler import Request, cancel, sbatch, script
from autorl_hpc.doctor.storage import copy_pair, result
from autorl_hpc.records.cluster import ClusterProfile, JobKind, SeenJob
from autorl_hpc.states import JobState, job_state

GONE_S = 15.0
"""Jobs that are cancelled end within KillWait; the folder is theirs until then."""

PREFIX = "autorl-doctor-"
HIDDEN = f".{PREFIX}"


def _new_name() -> str:
    return PREFIX + secrets.token_hex(4)


@dataclass
class TrialJob:
    """One job.

    Attributes:
        side: a or b, of the pair.
        seen: as the scheduler last told it.
    """

    side: str
    request: Request
    name: str = field(default_factory=_new_name)
    seen: SeenJob | None = None

    def look(self) -> JobState:
        """Asks the scheduler once; UNKNOWN where it doesn't answer now, or doesn't know the job yet."""
        try:
            found = slurm.jobs([self.name])
        except slurm.SchedulerError:
            return JobState.UNKNOWN
        if not found:
            return JobState.GONE if self.seen else JobState.UNKNOWN
        self.seen = found[-1]
        return job_state(self.seen.state)

    @property
    def node(self) -> str:
        return (self.seen.nodes if self.seen else None) or "its node"

    @property
    def reason(self) -> str:
        """Why it waits."""
        return (self.seen.reason if self.seen else None) or "no reason told"

    @property
    def end(self) -> str:
        """How it ended."""
        if self.seen is None:
            return "unknown to the scheduler"
        told = slurm.with_exit_codes([self.seen], self.seen.job_id)[0]
        return f"{told.state}, exit code {told.exit_code or 'not told'}"


@contextmanager
def probe_folder(place: Path) -> Iterator[Path]:
    """A hidden folder below `place` with the pair's scripts; it goes at the end.

    Raises:
        OSError: it can't be made.
    """
    folder = place / (HIDDEN + secrets.token_hex(4))
    try:
        folder.mkdir(mode=0o700)
        copy_pair(folder)
        yield folder
    finally:
        with _undisturbed():
            remove(folder)


def remove(folder: Path) -> None:
    """Removes a folder, patiently: on NFS a file that a job still holds open stays under another name for a while."""
    for _ in range(30):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


@contextmanager
def taken_back(jobs: list[TrialJob]) -> Iterator[None]:
    """Cancels every job of the list at the end, and waits until none can write any more."""
    try:
        yield
    finally:
        with _undisturbed():
            for job in jobs:
                try:
                    cancel(job.name)
                except slurm.SchedulerError:
                    continue  # it ends by itself: its time is short
            deadline = time.monotonic() + GONE_S
            while time.monotonic() < deadline and any(_may_write(job) for job in jobs):
                time.sleep(0.2)


def _may_write(job: TrialJob) -> bool:
    state = job.look()
    return job.seen is not None and not state.over


@contextmanager
def endings() -> Iterator[None]:
    """A closed terminal or a kill ends this process as ctrl-C does: by an exception, so that jobs are taken back."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled((signal.SIGTERM, signal.SIGHUP), end):
        yield


@contextmanager
def _undisturbed() -> Iterator[None]:
    """While jobs are taken back, a second ctrl-C has to wait for some seconds."""
    with _handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN):
        yield


@contextmanager
def _handled(numbers: tuple[signal.Signals, ...], handler: signal._HANDLER) -> Iterator[None]:
    before = {}
    for number in numbers:
        try:
            before[number] = signal.signal(number, handler)
        except ValueError:  # not the main thread: nothing to be done
            continue
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


# Jobs on two nodes: how long they wait, what they see there, and how they see each other's files.

FIRST_WAIT_S = 120.0
"""For a job to start: a probe that waits longer tells no more than that the cluster is full."""

SECOND_WAIT_S = 60.0
"""The first job holds its node meanwhile, perhaps with a GPU."""

HELLO_S = 45.0
"""From a job's start to its first message: Python from a cold shared file system."""

PAIR_S = 100.0
NODE_S = 45.0
"""For what a node shows, after the pair is done."""

LOOK_S = 0.3
LOOKS_S = 2.0
"""Between questions to the scheduler: at first, and after ten seconds."""

LONG_WAIT_S = 600.0
PASSING = {"Priority", "Resources", "None", "Prolog", "BeginTime", "no reason told"}
"""Reasons to wait that pass by themselves."""

TIME_TO_RUN = "time from submit to run"
FIRST_GROUP, TWO_GROUP = "Jobs", "Two nodes"

Say = Callable[[str], None]


def examine_with_jobs(place: Path, profile: ClusterProfile | None, folders: Sequence[Path], say: Say) -> list[Finding]:
    """Every finding that needs jobs. Nothing is left behind: no job and no folder, also on ctrl-C.

    Args:
        place: the folder that is measured; exists.
        folders: further folders that jobs must see.
    """
    try:
        with probe_folder(place) as folder:
            course = Course(folder, profile, list(folders), say)
            with taken_back(course.jobs):
                return course.run()
    except OSError as error:
        so_what = "jobs write below this folder too"
        found = [unknown(TIME_TO_RUN, f"no probe folder in {place}: {error.strerror or error}", so_what)]
        return _in(FIRST_GROUP, found)


def requests(profile: ClusterProfile | None) -> list[Request]:
    """The first is an agents' job with one GPU at most; then those that may stand for the second node."""
    if profile is None:
        return [Request(None, JobKind(gpus=0, cpus=1))] * 2
    small = {"cpus": 1, "memory": "1G"}
    agent = profile.agent.model_copy(update={**small, "gpus": min(1, profile.agent.gpus or 0)})
    report = profile.report.model_copy(update={**small, "gpus": 0})
    kinds = [agent, report, agent.model_copy(update={"gpus": 0}), agent]
    return [Request(profile, kind) for kind in kinds]


class Course:
    """One course of the probe, with what it has submitted."""

    def __init__(self, folder: Path, profile: ClusterProfile | None, folders: list[Path], say: Say) -> None:
        self.folder = folder
        self.profile = profile
        self.folders = folders
        self.say = say
        self.jobs: list[TrialJob] = []
        self.ran: list[TrialJob] = []

    def run(self) -> list[Finding]:
        """From the first submission to the last finding."""
        first, *others = requests(self.profile)
        job = TrialJob("a", first)
        refused = self._submit(job)
        if refused is not None:
            words = problem(TIME_TO_RUN, f"refused: {refused.what}", "no run starts", refused.next_step or "")
            return _in(FIRST_GROUP, [words]) + _in(TWO_GROUP, [unknown("the pair", "no job could be submitted")])
        waited = self._starts(job, FIRST_WAIT_S)
        found = _in(FIRST_GROUP, [self._time_to_run(job, waited)])
        if waited is None:
            return found + _in(TWO_GROUP, [unknown("the pair", "the first job did not start")])
        silent = self._hears(job)
        if silent is not None:
            return found + _in(FIRST_GROUP, [silent]) + _in(TWO_GROUP, [unknown("the pair", "the first job is silent")])
        rounds = ping(Post(str(self.folder), "login", "a"), "login")
        found += _in(FIRST_GROUP, [visibility.login_clock(rounds, job.node)])
        pair = self._pair(job, [replace(request, exclude=job.node) for request in others])
        return found + self._nodes() + _in(TWO_GROUP, pair)

    def _submit(self, job: TrialJob) -> slurm.SchedulerError | None:
        """None: it was taken."""
        self.jobs.append(job)  # before sbatch is called: a reply that is lost leaves a job too
        text = script(self.profile, self.folder, job.side, job.request.kind.gpus or 0, self.folders)
        output = f"{self.folder}/{job.side}.out".replace("%", "%%")
        options = [f"--job-name={job.name}", f"--output={output}", *job.request.options()]
        try:
            sbatch(text, options)
        except slurm.SchedulerError as error:
            return error
        return None

    def _starts(self, job: TrialJob, limit_s: float) -> float | None:
        """Seconds until it ran, or had run; None: it still waits."""
        began = time.monotonic()
        told = False
        while (passed := time.monotonic() - began) < limit_s:
            state = job.look()
            if state is JobState.RUNNING or state.over:
                self.ran.append(job)
                return passed
            if not told and passed > 3:
                self.say(
                    f"doctor: {job.name} waits for {job.request.describe()} ({job.reason}), {limit_s:.0f} s at most"
                )
                told = True
            time.sleep(LOOK_S if passed < 10 else LOOKS_S)
        return None

    def _time_to_run(self, job: TrialJob, waited: float | None) -> Finding:
        asked = job.request.describe()
        if waited is not None:
            return ok(TIME_TO_RUN, f"{span(waited)} ({asked})")
        start = _expected_start(job.name)
        value = f"still waiting after {span(FIRST_WAIT_S)}: {job.reason} ({asked})" + (
            f"; expected start {start}" if start else ""
        )
        if job.reason in PASSING:
            so_what = "the cluster is full: runs wait too, and longer ones longer. What needs a job is not known"
            return note(TIME_TO_RUN, value, so_what, "the same command again, later")
        so_what = "this may never start, and no run would"
        return warning(TIME_TO_RUN, value, so_what, "look the reason up in `man squeue`; change the cluster's profile")

    def _hears(self, job: TrialJob) -> Finding | None:
        """None: the job has said hello in the folder."""
        began = time.monotonic()
        over_at: float | None = None
        while time.monotonic() - began < HELLO_S:
            if "hello" in listing(str(self.folder / job.side)):
                return None
            if over_at is None and job.look().over:
                over_at = time.monotonic()
            if over_at is not None and time.monotonic() - over_at > 3:
                break
            time.sleep(LOOK_S)
        value = f"started on {job.node}, and nothing of it is seen here ({job.end})"
        said = self._tail(f"{job.side}.out") or self._tail(f"python-{job.side}.log")
        return problem(
            "files of a job",
            value + (f"; it said: {said}" if said else ""),
            f"jobs don't see {self.folder.parent}, or don't get to their first line",
            "give a folder that all nodes share (--root); check modules and setup of the cluster's profile",
        )

    def _tail(self, name: str) -> str:
        try:
            lines = (self.folder / name).read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")

    def _pair(self, first: TrialJob, requested: list[Request]) -> list[Finding]:
        """The second job, and what both found."""
        words = "no request"
        for number, request in enumerate(requested):
            if request.options() in [earlier.options() for earlier in requested[:number]]:
                continue
            second = TrialJob("b", request)
            refused = self._submit(second)
            if refused is not None:
                words = refused.what
                continue
            if self._starts(second, SECOND_WAIT_S) is None:
                value = f"no second node within {span(SECOND_WAIT_S)}: {second.reason}"
                return [unknown("the pair", value, "how nodes see each other's files is not known", "try again later")]
            self.say(f"doctor: {first.node} and {second.node} compare what they see, {span(PAIR_S)} at most")
            self._wait_for_results(second)
            return visibility.judge(result(self.folder, "a"), result(self.folder, "b"), two_nodes=True)
        so_what = "how nodes see each other's files is not known"
        return [unknown("the pair", f"no node besides {first.node}: {words}", so_what, "with one node, none is needed")]

    def _wait_for_results(self, second: TrialJob) -> None:
        deadline = time.monotonic() + PAIR_S
        while time.monotonic() < deadline:
            if all("result" in listing(str(self.folder / side)) for side in "ab"):
                return
            if "hello" not in listing(str(self.folder / "b")) and second.look().over:
                deadline = min(deadline, time.monotonic() + 3)
            time.sleep(LOOK_S)

    def _nodes(self) -> list[Finding]:
        """What the jobs' nodes show; of the second what differs from the first."""
        deadline = time.monotonic() + NODE_S
        found: list[Finding] = []
        for job in self.ran:
            group = f"In a job on {job.node}"
            while (rows := self._shown(job)) is None and time.monotonic() < deadline:
                time.sleep(LOOK_S)
            fallback = f"fallback-{job.side}" in listing(str(self.folder))
            if rows is None or fallback:
                said = self._tail(f"{'python' if fallback else 'node'}-{job.side}.log") or "nothing"
                so_what = "jobs end at their first line"
                advice = "set `python` in the cluster's profile to one that nodes see, with autorl-hpc installed"
                found += _in(
                    group, [problem("Python of jobs", f"autorl-hpc does not start there: {said}", so_what, advice)]
                )
            if fallback:  # what python3 of the node has installed is nobody's business
                rows = [row for row in rows or [] if row.check not in ("Python", "packages")]
            known = {_gist(finding) for finding in found}
            news = [row for row in rows or [] if _gist(row) not in known]
            if rows and not news and not fallback:
                news = [ok("all of it", f"as on {self.ran[0].node}")]
            found += _in(group, news)
        return found

    def _shown(self, job: TrialJob) -> list[Finding] | None:
        try:
            rows = json.loads((self.folder / f"node-{job.side}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return [finding for row in rows if (finding := from_json(row)) is not None]


def _gist(finding: Finding) -> tuple[str, str, str]:
    """What makes it differ from that of another node: not the milliseconds and bytes."""
    return finding.check, str(finding.state), re.sub(r"[\d.]+ ([KMGT]?i?B|ms|s)\b", "", finding.value)


def _expected_start(name: str) -> str:
    """As the scheduler plans now; empty where it has no plan."""
    try:
        text = slurm.run(["squeue", "--noheader", "--start", f"--name={name}", "--format=%S"]).strip()
    except slurm.SchedulerError:
        return ""
    return "" if text in ("", "N/A") else text.split("\n")[0]


def _in(group: str, found: list[Finding]) -> list[Finding]:
    return [replace(finding, group=group) for finding in found]
