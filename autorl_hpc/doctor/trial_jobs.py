"""Measure by jobs on two nodes: how long they wait, what they see there, and how they see each other's files. The jobs are found by
their names, and always cancelled: also on ctrl-C, a kill, or a closed terminal."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from autorl_hpc.cluster import slurm
from autorl_hpc.doctor import pair
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
    ran: bool = False
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
    """For a while; for the main thread alone."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGHUP, *further)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def examine_with_jobs(place: Path, profile: ClusterProfile, folders: Sequence[Path], say: Say) -> list[Finding]:
    """Return every finding that needs jobs below the folder `place`, and leave no job and no folder. Jobs must see `folders` too."""
    try:
        with probe_folder(place) as folder:
            trial = TrialRun(folder, profile, folders, say)
            with cancelled_at_end(trial.jobs):
                return trial.run()
    except OSError as error:
        value, so_what = f"no probe folder in {place}: {error.strerror or error}", "jobs write below this folder too"
        return in_group(FIRST_GROUP, unknown(TIME_TO_RUN, value, so_what))


def requests(profile: ClusterProfile) -> list[Request]:
    """Return an agents' job with one GPU at most, then those for the second node."""
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

    def run(self) -> list[Finding]:
        first, *others = requests(self.profile)
        job = TrialJob("a", first)
        found = in_group(FIRST_GROUP, self._first(job))
        nodes = self._node(job)
        if found[0].state is not State.OK or nodes[0].state is State.PROBLEM:
            return [*found, *nodes, *in_group(TWO_GROUP, unknown("the pair", "the first job did not come so far"))]
        two = in_group(TWO_GROUP, *self._pair(job, [replace(request, exclude=job.node) for request in others]))
        second = self._node(self.jobs[-1], nodes) if self.jobs[-1].ran else []
        return [*found, *nodes, *second, *two]

    def _first(self, job: TrialJob) -> Finding:
        asked = job.request.describe()
        if refused := self._submit(job):
            return problem(TIME_TO_RUN, f"refused: {refused.what}", "no run starts", refused.next_step or "")
        waited = self._starts(job, FIRST_WAIT_S)
        if waited is None:
            value = f"still waiting after {span(FIRST_WAIT_S)}: {job.reason} ({asked})"
            if job.reason in PASSING:
                so_what = "the cluster is full: runs wait too, and longer ones longer. What needs a job is not known"
                return note(TIME_TO_RUN, value, so_what, "the same command again, later")
            advice = "look the reason up in `man squeue`; change the cluster's profile"
            return warning(TIME_TO_RUN, value, "this may never start, and no run would", advice)
        job.ran = True
        if self._until(lambda: "started-a" in pair.listing(self.folder), job, HELLO_S):
            return ok(TIME_TO_RUN, f"{span(waited)} ({asked})")
        value = f"started on {job.node} after {span(waited)}, and nothing of it is seen here"
        value += f" ({job.seen.state})" if job.seen else ""
        if said := self._tail("a.out"):
            value += f"; it said: {said}"
        so_what = f"jobs don't see {self.folder.parent}, or don't get to their first line"
        advice = "give a folder that all nodes share (--root); check modules and setup of the cluster's profile"
        return problem("files of a job", value, so_what, advice)

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
        """Return the seconds until it ran; None: it still waits."""
        self.say(f"doctor: {job.name} waits for {job.request.describe()}, {limit_s:.0f} s at most")
        began = time.monotonic()
        while (passed := time.monotonic() - began) < limit_s:
            state = job.look()
            if state is JobState.RUNNING or state.over:
                return passed
            time.sleep(LOOK_S)
        return None

    def _until(self, there: Callable[[], bool], job: TrialJob, limit_s: float) -> bool:
        """Wait for what a job leaves in the folder; tell whether it came. Not much longer than the job lasts."""
        deadline = time.monotonic() + limit_s
        while not (found := there()) and time.monotonic() < deadline:
            if job.look().over:
                deadline = min(deadline, time.monotonic() + 3)
            time.sleep(LOOK_S)
        return found

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
            second.ran = True
            self.say(f"doctor: {first.node} and {second.node} compare what they see, {span(PAIR_S)} at most")
            self._until(lambda: all("result" in pair.listing(self.folder / side) for side in "ab"), second, PAIR_S)
            return judge_pair(*(reading.read_json_or_none(self.folder / side / "result") for side in "ab"))
        return [unknown("the pair", f"no node besides {first.node}: {words}", so_what, "with one node, none is needed")]

    def _node(self, job: TrialJob, known: Sequence[Finding] = ()) -> list[Finding]:
        """Return what a job's node shows, but for what another one shows too."""
        group = f"In a job on {job.node}"
        if not job.ran:
            return in_group(group, unknown("the node", "no job ran"))
        path = self.folder / f"node-{job.side}.json"
        self._until(lambda: path.name in pair.listing(self.folder), job, NODE_S)
        if (rows := reading.read_json_or_none(path)) is None:
            value = f"autorl-hpc does not start there: {self._tail(f'node-{job.side}.log') or 'nothing is said'}"
            advice = "set `python` in the cluster's profile to one that nodes see, with autorl-hpc installed"
            return in_group(group, problem("Python of jobs", value, "jobs end at their first line", advice))
        seen = {(one.check, one.state) for one in known}
        found = [Finding(**{**row, "state": State(row["state"])}) for row in rows]
        new = [one for one in found if (one.check, one.state) not in seen]
        return in_group(group, *(new or [ok("all of it", "as on the other node")]))


# --- what a pair saw of each other, from its raw results

Raw = Mapping[str, Any]

NOT_SO_FAR = "the pair did not come so far"
SHARED = "use a file system that all nodes share (--root)"
WAYS = {"listed": ("new file, by listing", 10.0), "renamed_over": ("renamed over, by open()", 15.0)}
"""Name, and slowest time of a change and the answer to it without a warning: a submission waits for some four listings; heartbeats are
judged after a minute."""


def judge_pair(a: Raw | None, b: Raw | None) -> list[Finding]:
    """Return every finding of a pair of nodes, as far as it came; `a` and `b` are the messages `result` of the sides, or None."""
    if a is None or b is None:
        return [unknown("the pair", f"side {'a' if a is None else 'b'} left no result")]
    nodes = f"{a['node']} and {b['node']}"
    found = [ok("the two nodes", nodes)]
    if a["boot"] == b["boot"]:
        so_what = "they share one cache: what is measured between them says nothing of two machines"
        advice = "name a partition with several machines in the cluster's profile, if there is one"
        found = [note("the two nodes", f"{nodes} are one machine (same boot id)", so_what, advice)]
    if stopped := a["stopped"] or b["stopped"]:
        so_what = "files that one side made did not reach the other, or hang: nothing will be scored"
        found.append(problem("the pair", f"it stopped: {stopped}", so_what, SHARED))
    for way, (name, slow_s) in WAYS.items():
        lag = (a.get("lags") or {}).get(way)
        value = "" if lag is None else f"seen and answered after {span(lag)}"
        so_what = "the suite's processes wait for each other this way: scores come late, living graders may look dead"
        advice = "mount with a shorter actimeo, or use another file system (--root)"
        judged = ok(name, value) if lag is None or lag <= slow_s else warning(name, value, so_what, advice)
        found.append(unknown(name, NOT_SO_FAR) if lag is None else judged)
    return [*found, _race(a, b), _lock(a, b)]


def _race(a: Raw, b: Raw) -> Finding:
    name, mine, theirs = "link, raced", a.get("race"), b.get("race")
    if mine is None or theirs is None:
        return unknown(name, NOT_SO_FAR)
    outcomes = list(zip(mine, theirs, strict=False))
    errors = sorted({word for both in outcomes for word in both} - {"won", "lost"})
    double, nobody = outcomes.count(("won", "won")), sum("won" not in both for both in outcomes)
    value = f"{len(outcomes)} names, {mine.count('won')} to one side, {theirs.count('won')} to the other"
    if double or errors or not outcomes:
        value += f"; refused: {', '.join(errors)}" if errors else ""
        value += f"; {double} won by both" if double else ""
        so_what = "a ledger's entry and a claim are made this way: they would be lost or made twice"
        return problem(name, value, so_what, "use another file system (--root)")
    if nobody:
        so_what = "refused to both, or a reply was lost: no harm, the suite counts links and tries again"
        return note(name, f"{value}; {nobody} to nobody", so_what)
    return ok(name, value)


def _lock(a: Raw, b: Raw) -> Finding:
    held, tried, again = a.get("held"), b.get("tried"), b.get("again")
    if held is None or tried is None:
        return unknown("flock", NOT_SO_FAR)
    if (held, tried, again) == ("granted", "refused", "granted"):
        return ok("flock", "excludes between nodes")
    value = f"first {held}, then {tried}, then {again}"
    so_what = "the suite doesn't use it; pip, conda and Hugging Face's cache do, and may damage their caches"
    return note("flock", value, so_what, "give each job its own caches, or ask for locks (lustre: -o flock)")
