"""Measure by jobs on two nodes: how long they wait, what they see there, and how they see each other's files.

The jobs are found by their names, and always cancelled: also on ctrl-C, a kill, or a closed terminal.
"""

from __future__ import annotations

import os
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
from autorl_hpc.doctor import pair, visibility
from autorl_hpc.doctor.finding import Finding, State, in_group, note, ok, problem, span, unknown, warning
from autorl_hpc.doctor.scheduler import Request, script
from autorl_hpc.files import reading
from autorl_hpc.records.cluster import ClusterProfile, SeenJob
from autorl_hpc.states import JobState, job_state

GONE_S = 15.0  # jobs that are cancelled end within KillWait; the folder is theirs until then
FIRST_WAIT_S = 120.0  # for a job to start: a probe that waits longer tells no more than that the cluster is full
SECOND_WAIT_S = 60.0  # the first job holds its node meanwhile, perhaps with a GPU
HELLO_S = 45.0  # from a job's start to its first message: Python from a cold shared file system
PAIR_S = 100.0
NODE_S = 45.0  # for what a node shows, after the pair is done
LOOK_S = 0.5
PREFIX = "autorl-doctor-"
PASSING = {"Priority", "Resources", "None", "Prolog", "BeginTime", "no reason told"}
"""Reasons to wait that pass by themselves."""

TIME_TO_RUN = "time from submit to run"
FIRST_GROUP, TWO_GROUP = "Jobs", "Two nodes"

Say = Callable[[str], None]


@dataclass
class TrialJob:
    """One job, of side a or b of the pair; `seen` is the scheduler's last answer."""

    side: str
    request: Request
    name: str = field(default_factory=lambda: PREFIX + secrets.token_hex(4))
    seen: SeenJob | None = None

    def look(self) -> JobState:
        """Ask the scheduler once; UNKNOWN where it doesn't answer now, or doesn't know the job yet."""
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
        return (self.seen.reason if self.seen else None) or "no reason told"


@contextmanager
def probe_folder(place: Path) -> Iterator[Path]:
    """Make a hidden folder below `place` with the pair's script; remove it at the end. Raises OSError if it can't be made."""
    folder = place / f".{PREFIX}{secrets.token_hex(4)}"
    try:
        folder.mkdir(mode=0o700)
        shutil.copyfile(pair.__file__, folder / "pair.py")  # it runs without the package
        yield folder
    finally:
        with handling(signal.SIG_IGN, signal.SIGINT):
            for _ in range(30):  # on NFS a file that a job still holds open stays under another name for a while
                shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists():
                    break
                time.sleep(0.1)


@contextmanager
def cancelled_at_end(jobs: list[TrialJob]) -> Iterator[None]:
    """Cancel every job of the list at the end, and wait until none can write any more."""
    try:
        yield
    finally:
        with handling(signal.SIG_IGN, signal.SIGINT):
            for job in jobs:  # by name: also a job whose number sbatch never told
                try:
                    slurm.run(["scancel", f"--name={job.name}", f"--user={os.geteuid()}"])
                except slurm.SchedulerError:
                    continue  # it ends by itself: its time is short
            deadline = time.monotonic() + GONE_S
            while time.monotonic() < deadline and any(not job.look().over and job.seen for job in jobs):
                time.sleep(0.2)


def end(number: int, frame: FrameType | None) -> None:
    """End by an exception, as ctrl-C does, so that jobs are cancelled."""
    raise SystemExit(128 + number)


@contextmanager
def handling(handler: signal._HANDLER, *further: signal.Signals) -> Iterator[None]:
    """Handle a kill, a closed terminal and further signals in this way for a while. For the main thread alone."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGHUP, *further)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def examine_with_jobs(place: Path, profile: ClusterProfile, folders: Sequence[Path], say: Say) -> list[Finding]:
    """Return every finding that needs jobs, and leave no job and no folder.

    Args:
        place: the folder that is measured; exists.
        folders: further folders that jobs must see.
    """
    try:
        with probe_folder(place) as folder:
            trial = TrialRun(folder, profile, folders, say)
            with cancelled_at_end(trial.jobs):
                return trial.run()
    except OSError as error:
        value, so_what = f"no probe folder in {place}: {error.strerror or error}", "jobs write below this folder too"
        return in_group(FIRST_GROUP, unknown(TIME_TO_RUN, value, so_what))


def requests(profile: ClusterProfile) -> list[Request]:
    """Return an agents' job with one GPU at most, then those that may be used for the second node."""
    small = {"cpus": 1, "memory": "1G"}
    agent = profile.agent.model_copy(update={**small, "gpus": min(1, profile.agent.gpus or 0)})
    report = profile.report.model_copy(update={**small, "gpus": 0})
    return [Request(profile, kind) for kind in (agent, report, agent.model_copy(update={"gpus": 0}), agent)]


@dataclass
class TrialRun:
    """One trial, with the jobs that it has submitted."""

    folder: Path
    profile: ClusterProfile
    folders: Sequence[Path]
    say: Say
    jobs: list[TrialJob] = field(default_factory=list)
    ran: list[TrialJob] = field(default_factory=list)

    def run(self) -> list[Finding]:
        first, *others = requests(self.profile)
        job = TrialJob("a", first)
        found, why = self._first(job)
        if why:
            return in_group(FIRST_GROUP, found) + in_group(TWO_GROUP, unknown("the pair", why))
        rounds = pair.ping(pair.Post(self.folder, "login", "a"))
        clocks = visibility.clocks(f"clocks, here to {job.node}", rounds)
        two = self._pair(job, [replace(request, exclude=job.node) for request in others])
        return [*in_group(FIRST_GROUP, found, clocks), *self._nodes(), *in_group(TWO_GROUP, *two)]

    def _first(self, job: TrialJob) -> tuple[Finding, str]:
        """Submit the first job; return what is found, and why there can be no pair."""
        asked = job.request.describe()
        if refused := self._submit(job):
            found = problem(TIME_TO_RUN, f"refused: {refused.what}", "no run starts", refused.next_step or "")
            return found, "no job could be submitted"
        waited = self._starts(job, FIRST_WAIT_S)
        if waited is None:
            value = f"still waiting after {span(FIRST_WAIT_S)}: {job.reason} ({asked}){_expected_start(job.name)}"
            why = "the first job did not start"
            if job.reason in PASSING:
                so_what = "the cluster is full: runs wait too, and longer ones longer. What needs a job is not known"
                return note(TIME_TO_RUN, value, so_what, "the same command again, later"), why
            advice = "look the reason up in `man squeue`; change the cluster's profile"
            return warning(TIME_TO_RUN, value, "this may never start, and no run would", advice), why
        if self._messages("hello", "a", job, HELLO_S):
            return ok(TIME_TO_RUN, f"{span(waited)} ({asked})"), ""
        value = f"started on {job.node} after {span(waited)}, and nothing of it is seen here"
        value += f" ({job.seen.state})" if job.seen else ""
        if said := self._tail("a.out") or self._tail("python-a.log"):
            value += f"; it said: {said}"
        so_what = f"jobs don't see {self.folder.parent}, or don't get to their first line"
        advice = "give a folder that all nodes share (--root); check modules and setup of the cluster's profile"
        return problem("files of a job", value, so_what, advice), "the first job is silent"

    def _submit(self, job: TrialJob) -> slurm.SchedulerError | None:
        self.jobs.append(job)  # before sbatch is called: a reply that is lost leaves a job too
        text = script(self.profile, self.folder, job.side, job.request.kind.gpus or 0, self.folders)
        output = f"{self.folder}/{job.side}.out".replace("%", "%%")
        try:
            slurm.sbatch(text, [f"--job-name={job.name}", f"--output={output}", *job.request.options()])
        except slurm.SchedulerError as error:
            return error
        return None

    def _starts(self, job: TrialJob, limit_s: float) -> float | None:
        """Return the seconds until it ran, or had run; None: it still waits."""
        self.say(f"doctor: {job.name} waits for {job.request.describe()}, {limit_s:.0f} s at most")
        began = time.monotonic()
        while (passed := time.monotonic() - began) < limit_s:
            state = job.look()
            if state is JobState.RUNNING or state.over:
                self.ran.append(job)
                return passed
            time.sleep(LOOK_S)
        return None

    def _tail(self, name: str) -> str:
        return (reading.tail(self.folder / name, 4096) or "").strip().split("\n")[-1].strip()[:200]

    def _pair(self, first: TrialJob, requested: list[Request]) -> list[Finding]:
        words, so_what = "no request", "how nodes see each other's files is not known"
        for request in requested:
            second = TrialJob("b", request)
            if refused := self._submit(second):
                words = refused.what
                continue
            if self._starts(second, SECOND_WAIT_S) is None:
                value = f"no second node within {span(SECOND_WAIT_S)}: {second.reason}"
                return [unknown("the pair", value, so_what, "try again later")]
            self.say(f"doctor: {first.node} and {second.node} compare what they see, {span(PAIR_S)} at most")
            self._messages("result", "ab", second, PAIR_S)
            return visibility.judge(*(reading.read_json_or_none(self.folder / side / "result") for side in "ab"))
        return [unknown("the pair", f"no node besides {first.node}: {words}", so_what, "with one node, none is needed")]

    def _messages(self, name: str, sides: str, job: TrialJob, limit_s: float) -> bool:
        """Wait for a message of each side, 3 s longer than a job that ends before it says hello; tell whether they came."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if all(name in pair.listing(self.folder / side) for side in sides):
                return True
            if "hello" not in pair.listing(self.folder / job.side) and job.look().over:
                deadline = min(deadline, time.monotonic() + 3)
            time.sleep(LOOK_S)
        return False

    def _nodes(self) -> list[Finding]:
        """Return what the jobs' nodes show; of the second what differs from the first."""
        deadline = time.monotonic() + NODE_S
        found: list[Finding] = []
        for job in self.ran:
            while (rows := self._shown(job)) is None and time.monotonic() < deadline:
                time.sleep(LOOK_S)
            fallback = f"fallback-{job.side}" in pair.listing(self.folder)
            known, news = {_gist(finding) for finding in found}, []
            if rows is None or fallback:
                said = self._tail(f"{'python' if fallback else 'node'}-{job.side}.log") or "nothing"
                value, so_what = f"autorl-hpc does not start there: {said}", "jobs end at their first line"
                advice = "set `python` in the cluster's profile to one that nodes see, with autorl-hpc installed"
                news.append(problem("Python of jobs", value, so_what, advice))
            own = ("Python", "packages") if fallback else ()  # of the node's python3, which jobs don't use
            news += [row for row in rows or [] if row.check not in own and _gist(row) not in known]
            found += in_group(f"In a job on {job.node}", *(news or [ok("all of it", f"as on {self.ran[0].node}")]))
        return found

    def _shown(self, job: TrialJob) -> list[Finding] | None:
        rows = reading.read_json_or_none(self.folder / f"node-{job.side}.json")
        return None if rows is None else [Finding(**{**row, "state": State(row["state"])}) for row in rows]


def _gist(finding: Finding) -> tuple[str, str, str]:
    """Return what makes it differ from that of another node: not the milliseconds and bytes."""
    return finding.check, str(finding.state), re.sub(r"[\d.]+ ([KMGT]?i?B|ms|s)\b", "", finding.value)


def _expected_start(name: str) -> str:
    """Return the scheduler's plan; empty where it has none."""
    try:
        text = slurm.run(["squeue", "--noheader", "--start", f"--name={name}", "--format=%S"]).strip()
    except slurm.SchedulerError:
        return ""
    return "" if text in ("", "N/A") else f"; expected start {text.splitlines()[0]}"
