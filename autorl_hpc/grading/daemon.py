"""The grader daemon: main loop (list, choose, claim, score, commit), heartbeat, idle exit, artifact cleanup.

`python -m autorl_hpc job grader EXPERIMENT` runs one; any number may run. A grader ends when the experiment is over or after
`idle_exit_s` without work. It may be killed at any moment: another grader takes its claims over, and each score is
committed once.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from autorl_hpc.cluster.job_table import JobTable, read_seen, read_submitted
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import artifacts, atomic, reading
from autorl_hpc.files import queue as queues
from autorl_hpc.files.frozen_records import read_experiment
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.processes import deny_inspection, host_name, job_id
from autorl_hpc.files.queue import Claims, HeartbeatWatch, claimed_entries, drop, drop_trouble, write_heartbeat
from autorl_hpc.files.run_view import RunView
from autorl_hpc.grading import timeouts
from autorl_hpc.grading.attempts import Attempts, Baselines, ClusterTrouble, NotReady
from autorl_hpc.grading.closing import Closing
from autorl_hpc.grading.engines.worker_process import name_program
from autorl_hpc.grading.evaluate import Bench
from autorl_hpc.grading.feedback import PASSING, Feedback
from autorl_hpc.grading.fingerprint_work import Tracing
from autorl_hpc.grading.schedule import FINGERPRINT_TURN_S, RETRY_AFTER_TROUBLE_S, Backoff, Order, RunCatalog
from autorl_hpc.grading.timeouts import Stopped, contained, each, overdue_s
from autorl_hpc.grading.watcher import Watcher
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.entries import Evaluation
from autorl_hpc.records.exchange import Heartbeat, QueueEntry
from autorl_hpc.records.run import ExperimentRecord, RunRecord
from autorl_hpc.states import EXIT_TROUBLE, Fault, QueueKind, Split

# --- heartbeat: a counter in a file, written by its own thread

log = logging.getLogger("autorl_hpc.grader")

BEATS_PER_STALENESS = 6
"""Beats per staleness period: five beats may be missed before the claims are taken over."""

MAX_BEAT_S = 5.0
"""Each heartbeat is a synced write on a shared file system, so write no more often than needed."""


class Heart(threading.Thread):
    """Writes the heartbeat file in a thread.

    Args:
        look: called with each beat. It lists the queue, so that an entry's wait starts when it arrives and not only after a
            long evaluation.
    """

    def __init__(
        self, experiment: ExperimentDir, beat: Heartbeat, stale_after_s: float, look: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.experiment = experiment
        self.beat = beat
        self.period_s = min(MAX_BEAT_S, stale_after_s / BEATS_PER_STALENESS)
        self.look = look
        self._ending = threading.Event()  # not `_stop`: that is a method of Thread before Python 3.13
        self._lock = threading.Lock()

    def set(self, **changes: object) -> None:
        """Change fields of the next beat."""
        with self._lock:
            self.beat = self.beat.model_copy(update=changes)

    def write(self) -> None:
        """Write one beat now."""
        with self._lock:
            self.beat = self.beat.model_copy(update={"counter": self.beat.counter + 1})
            try:
                write_heartbeat(self.experiment.graders, self.beat)
            except OSError as error:
                log.warning("heartbeat not written: %s", error)

    def run(self) -> None:
        while not self._ending.wait(self.period_s):
            self.write()
            try:
                self.look()
            except Exception as error:  # the heartbeat must go on even if the queue can't be listed
                log.warning("the queue can't be looked at: %s", error)

    def end(self) -> None:
        """Write the last beat."""
        self._ending.set()
        self.set(state="ended", working_on=None)
        self.write()


# --- idle exit
# On a cluster a grader stays while agents work. The last link of a chain also stays while an agent's job waits, because no
# other grader would follow. This uses the watcher's last notes, so any grader can decide it.

LOOK_S = 15.0
STANDS_STILL_S = 60.0
"""A clock that has not moved for this long has stopped; a supervisor writes its clock every 10 s."""


class Activity:
    """Watches the supervisors' clocks. Counters are compared over this process's own time, not across hosts."""

    def __init__(self, experiment: ExperimentDir, record: ExperimentRecord) -> None:
        self.experiment = experiment
        self.record = record
        self._counters: dict[str, int] = {}
        self._last_look: float | None = None
        self._last_move = 0.0

    def may_leave(self) -> bool:
        """Return whether no agent would be left without a grader. Called after `idle_exit_s` without work."""
        return not self.agents_work() and not (
            self.record.cluster is not None and self._is_last() and self._agents_wait()
        )

    def _is_last(self) -> bool:
        """Return whether no later link of this grader's chain is queued."""
        try:
            jobs = read_submitted(self.experiment)
        except (AutorlError, OSError):
            return True
        if jobs is None:
            return True
        me = os.environ.get("SLURM_JOB_ID")
        mine = next((job for job in jobs.submitted if job.job_id == me), None)
        if mine is None:  # a grader beside an agent (`placement: step`) is restarted by the agent's job
            return False
        return not any(
            job.name == mine.name and job.number > mine.number and not job.taken_back for job in jobs.submitted
        )

    def _agents_wait(self) -> bool:
        try:
            jobs = read_submitted(self.experiment)
        except (AutorlError, OSError):
            return True
        return jobs is not None and bool(JobTable.of(jobs, read_seen(self.experiment).jobs).alive_runs())

    def agents_work(self) -> bool:
        """Return whether any clock has moved in the last minute. Always False on a single machine."""
        if self.record.cluster is None:
            return False
        now = time.monotonic()
        if self._last_look is None:  # first look: assume that a clock has just moved
            self._last_move = now
        if self._last_look is None or now - self._last_look >= LOOK_S:
            self._last_look = now
            if self._moved():
                self._last_move = now
        return now - self._last_move <= STANDS_STILL_S

    def _moved(self) -> bool:
        moved = False
        finished = set(reading.list_names(self.experiment.finished))
        for run_id in self.record.runs:
            if run_id in finished:
                continue
            clock = reading.read_json_or_none(self.experiment.run(run_id).clock)
            counter = clock.get("counter") if isinstance(clock, dict) else None
            if isinstance(counter, int) and self._counters.get(run_id, counter) != counter:
                moved = True
            if isinstance(counter, int):
                self._counters[run_id] = counter
        return moved


# --- artifacts of open runs


def kept_while_open(view: RunView) -> set[str]:
    """Return content hashes that an open run needs: best, last, marked final, or waiting for a score or fingerprint."""
    accepted = view.accepted()
    named = [view.best(), view.final(), *accepted[-1:], *view.unscored(), *view.unfingerprinted()]
    # A failed evaluation has no fingerprint, but people may need its artifact to find the cause.
    failed = [s for s in accepted if (score := view.score_of(s)) is not None and score.evaluation.score is None]
    # An unscored submission that is marked final may become the selected one.
    unscored_finals = [s for s in accepted if s.final and view.score_of(s) is None]
    return {s.content_hash for s in (*named, *failed, *unscored_finals) if s is not None and s.content_hash}


def release_spare(experiment: ExperimentDir, run_id: str, ledger: Ledger) -> int:
    """Release artifacts that an open run no longer needs and return how many.

    References are read before the ledger. A reference that a supervisor renews meanwhile, because the same content was
    submitted again, differs from the one read and is left alone.
    """
    here = set(reading.list_names(experiment.artifacts))
    seen = {content: artifacts.reference(experiment.artifacts, content, run_id) for content in here}
    view = RunView.of(ledger.read())
    if view.closed is not None:
        return 0
    spare = {s.content_hash for s in view.accepted() if s.content_hash} - kept_while_open(view)
    released = 0
    for content in sorted(spare & here):
        reference = seen[content]
        if reference is not None:
            released += artifacts.release_if_same(experiment.artifacts, content, run_id, reference)
    return released


# --- leftover queue entries: a grader killed between its work and the removal of the entry leaves it behind


def left_over(experiment: ExperimentDir) -> set[str]:
    """Return entries that wait or are claimed. Call this before checking whether the experiment is over."""
    return {*queues.waiting(experiment.queue), *claimed_entries(experiment.claims)}


def sweep(experiment: ExperimentDir, entries: set[str]) -> None:
    """Remove entries, claims and trouble notes of an experiment whose runs are all closed."""
    for entry in sorted(entries):
        atomic.unlink_quietly(experiment.queue / f"{entry}{queues.SUFFIX}")
        drop(experiment.claims, entry)
        drop_trouble(experiment.troubles, entry)  # or `status` would show the trouble for ever


POLL_BUSY_S = 0.25
"""Poll interval with work: the median wait is an eighth of a second, for one listing each."""

POLL_IDLE_S = 1.0
"""Poll interval after a minute without work: the median wait is half a second, and 100 idle graders don't load a file server."""

IDLE_AFTER_S = 60.0
OVER_CHECK_S = 2.0
STOPPED_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""SIGUSR2 is the scheduler's warning before the end of the job."""

FINISH_AT_END_S = 10.0
"""On a stop signal, time to rate and commit answers that exist already. Shorter than any scheduler's grace period."""

MAX_TROUBLES = 5
"""Consecutive cluster troubles after which the grader exits so that the next of the chain starts."""


class Grader:
    """One grader daemon."""

    def __init__(self, experiment: ExperimentDir) -> None:
        self.experiment = experiment
        self.record: ExperimentRecord = read_experiment(experiment)
        spec = self.record.grader
        self.root = Root(Path(self.record.root))
        self.host = host_name()
        self.id = f"{self.host}-{os.getpid()}-{secrets.token_hex(3)}"
        beat = Heartbeat(grader=self.id, host=self.host, pid=os.getpid(), counter=0, state="starting", job_id=job_id())
        self.heart = Heart(experiment, beat, spec.stale_after_s, self._look)
        self.claims = self._own_claims()
        self.watcher = Watcher(experiment, self._own_claims(), spec.watch_every_s) if self.record.cluster else None
        self.known = RunCatalog(experiment, lambda: self.record.runs)
        self.bench = Bench(self.root, spec, lambda: self.record.spec.judge)
        self.baselines = Baselines(experiment, self.claims, self.bench, self.id)
        self.attempts = Attempts(experiment, self.bench)
        self.tracing = Tracing(experiment, self.root, self.id, self._is_waited_for)
        self.keep_all = self.record.spec.retention.artifacts == "all"
        self.closing = Closing(experiment, self.baselines, self.attempts, self.tracing, self.id, self.keep_all)
        self.activity = Activity(experiment, self.record)
        self.order = Order(self.known.group, self.known.served, self.id)
        self.feedback = Feedback(
            experiment,
            self.known,
            self.claims,
            self.baselines,
            self.attempts,
            self.tracing,
            self.id,
            self._scored,
            lambda: self._collect(None),
        )
        self.bench.likely_next = self._likely_next
        self.backoff = Backoff(experiment.troubles, self.id)
        self._stop = False
        self._held: tuple[str, int] | None = None
        self._held_since_s = 0.0
        self._troubles = 0  # in a row
        self._failing: set[str] = set()  # cells, since the last success
        self._failing_runs: set[str] = set()
        self._working: set[str] = set()  # cells that were scored here

    def _own_claims(self) -> Claims:
        """Return a new Claims instance. Each thread needs its own, because an instance remembers others' heartbeats."""
        watch = HeartbeatWatch(self.experiment.graders, self.record.grader.stale_after_s)
        return Claims(self.experiment.claims, self.id, self.host, watch)

    def run(self) -> None:
        """Work until the experiment is over, nothing was found for `idle_exit_s`, or a signal arrives."""
        for name in STOPPED_BY:
            signal.signal(name, self._on_signal)
        if self._is_over():
            log.info("the experiment is over: nothing to do")
            return
        self.heart.write()
        self.heart.start()
        if self.watcher is not None:
            self.watcher.start()
        last_work = last_over_check = time.monotonic()
        try:
            while not self._stop and not self._must_leave():
                if self._step_or_trouble():
                    last_work = time.monotonic()
                    continue
                now = time.monotonic()
                if now - last_over_check >= OVER_CHECK_S:
                    last_over_check = now
                    if self._is_over():
                        log.info("the experiment is over")
                        return
                if now - last_work > self.record.grader.idle_exit_s and self._may_leave():
                    log.info("idle for %.0f s: ending", now - last_work)
                    return
                time.sleep(POLL_BUSY_S if now - last_work < IDLE_AFTER_S else POLL_IDLE_S)
        finally:
            for name in STOPPED_BY:  # a second signal must not interrupt giving the claim back
                signal.signal(name, signal.SIG_IGN)
            each(
                self.watcher.end if self.watcher is not None else lambda: None,
                lambda: self._collect_all(FINISH_AT_END_S),
                self._give_back,
                self.claims.drop_own,
                self.heart.end,
                timeouts.give_up_all,
                self.bench.drop_engine,
                self.tracing.drop,
            )

    def _give_back(self) -> None:
        """Drop the claim in hand, unless another grader has taken it over."""
        if self._held is not None:
            self.claims.give_back(*self._held)
        self._held = None

    def _step_or_trouble(self) -> bool:
        try:
            return self.step()
        except OSError as error:  # a folder can't be listed, or the disk is full
            log.error("the experiment's folder can't be used: %s", error)
            self._troubles += 1
            time.sleep(RETRY_AFTER_TROUBLE_S)
            return False

    def _is_over(self) -> bool:
        """Return whether every run is closed, including those of a later launch, and sweep the queue if so."""
        entries, finished = left_over(self.experiment), set(reading.list_names(self.experiment.finished))
        if not set(self.record.runs) <= finished:
            return False
        self.record = read_experiment(self.experiment)
        if not set(self.record.runs) <= finished:
            return False
        sweep(self.experiment, entries)
        return True

    def step(self) -> bool:
        """Do one piece of work; return False if there was none."""
        while self._collect():
            pass
        names, under_way = queues.waiting(self.experiment.queue), self.feedback.under_way
        current = self.claims.current() if names else {}
        for name in self.backoff.order(self.order.sort(names, current, self.bench.group, under_way), current):
            if name in under_way or self.backoff.waits(name, current.get(name, 0)):
                continue
            generation = self.claims.take(name, current)
            if generation is None:
                if name not in current:  # another grader was faster, so the order may have changed
                    return True
                continue
            done = self._work(name, generation)
            if done is not None:  # else try the next entry
                return done
        if self.feedback.under_way:
            self._collect(POLL_BUSY_S)
            return True
        return False

    def _look(self) -> None:
        self.order.look(queues.waiting(self.experiment.queue))

    def _is_waited_for(self) -> bool:
        """Return whether an entry for this grader is more urgent than the fingerprint that it computes."""
        listed = queues.waiting(self.experiment.queue)
        current = self.claims.current() if listed else {}
        names = [
            name
            for name in listed
            if queues.is_waited_for(name) and name not in current and not self.backoff.waits(name, 0)
        ]
        if names and self._held is not None and f"c-{queues.run_of(self._held[0])}" in listed:
            return time.monotonic() - self._held_since_s > FINGERPRINT_TURN_S and self.order.presses(names)
        return bool(names)

    def _work(self, name: str, generation: int) -> bool | None:
        """Work on a claimed entry. Return True if done, None if not ready, False on failure (not counted as activity)."""
        self._held, self._held_since_s = (name, generation), time.monotonic()
        self.heart.set(state="scoring", working_on=name)
        done: bool | None = False
        try:
            with contained():
                # Graders died on this entry: finish all others first so that the cause is clear.
                if generation > 1:
                    self._collect_all()
                done = self._do(name, generation)
            # the score is committed in the background, and the claim is held until then
            if name in self.feedback.under_way:
                self._held = None
                return True
            self._well(name)
        except NotReady:
            done = None
            self.backoff.tried(name)
            self.backoff.later(name, 1.0)
        except Exception as error:
            if not isinstance(error, PASSING):
                self.bench.drop_engine()  # the engine is broken or hit a defect; other entries need a new one
            self._failed(name, error, time.monotonic() - self._held_since_s)
            if name in self.feedback.under_way:
                self._held = None
        finally:
            if done is not None or not name.startswith("c-"):
                self.order.began(name)
        if done:
            atomic.unlink_quietly(self.experiment.queue / f"{name}{queues.SUFFIX}")
        self._give_back()
        self.heart.set(
            state="idle",
            working_on=None,
            engine_hash=None if self.bench.identity is None else self.bench.identity.digest(),
        )
        return done

    def _failed(self, name: str, error: Exception, took_s: float = 0.0) -> None:
        if limit_s := overdue_s(error):  # spend at most half of the time on what may hang again
            fault = getattr(error, "fault", None) or Fault.GRADER
            self._trouble(name, str(error), fault, max(limit_s, took_s))
        elif isinstance(error, (ClusterTrouble, AutorlError)):
            self._trouble(name, str(error), error.fault or Fault.CLUSTER)
        elif isinstance(error, OSError):
            self._trouble(name, str(error))
        else:
            log.error("work on %s failed", name, exc_info=error)
            self._trouble(name, f"{type(error).__name__}: {error}; see the grader's log", Fault.GRADER)

    def _collect(self, timeout_s: float | None = 0.0) -> bool:
        """Handle one submission finished in the background; False if there was none within `timeout_s`."""
        found = self.feedback.collect(timeout_s)
        if found is None:
            return False
        if isinstance(found.result, Evaluation):
            self._well(found.name)
        elif isinstance(found.result, PASSING):
            self._failed(found.name, found.result)
        else:  # scored again at once, from end to end, to find whose fault it is
            log.error("%s could not be finished and is scored anew", found.name, exc_info=found.result)
        return True

    def _collect_all(self, timeout_s: float | None = None) -> None:
        """Handle all submissions in the background, or those that finish within `timeout_s`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while self._collect(None if until is None else max(0.0, until - time.monotonic())):
            pass

    def _may_leave(self) -> bool:
        """Return whether an idle exit harms nobody: no agent loses its grader, and no retry wait would start again."""
        return not self.backoff.owes(queues.waiting(self.experiment.queue)) and self.activity.may_leave()

    def _trouble(self, name: str, problem: str, fault: Fault = Fault.CLUSTER, least_s: float = 0.0) -> None:
        pause_s = self.backoff.failed(name, problem, fault, least_s)
        log.error("%s goes back to the queue for %.0f s: %s", name, pause_s, problem)
        self._troubles += 1
        self._failing.add(self.known.cell(name))
        self._failing_runs.add(queues.run_of(name))

    def _well(self, name: str) -> None:
        self._troubles = 0
        self._failing.clear()
        self._failing_runs.clear()
        self.backoff.well(name)
        self._working.add(self.known.cell(name))

    def _must_leave(self) -> bool:
        """Return whether the node is at fault and not one matrix cell: cells that worked now fail, or nothing works."""
        if self._troubles < MAX_TROUBLES or (self._working and not self._failing & self._working):
            return False
        open_runs = set(self.record.runs) - set(reading.list_names(self.experiment.finished))
        return len(self._failing_runs) > 1 or len(open_runs) <= 1  # otherwise one damaged run may be the cause

    def _do(self, name: str, generation: int) -> bool:
        path = self.experiment.queue / f"{name}{queues.SUFFIX}"
        try:
            entry = parse_record(QueueEntry, reading.read_json(path), path)
        except FileNotFoundError:
            return True  # another grader finished it between our listing and our claim
        if entry.kind is QueueKind.BASELINE:
            return self._do_baseline(entry)
        record = self.known.record(entry.run_id or "")
        if entry.kind is QueueKind.CLOSE:
            self.closing.close(record, name, generation, self.order.waited_s(name))
            self.known.forget_ledger(record.run_id)
            return True
        if entry.kind is QueueKind.FINGERPRINT:
            return self._do_fingerprint(record, entry, name, generation)
        self.feedback.score(record, entry.submission_id or 0, name, generation, self.order.waited_s(name))
        return True

    def _do_baseline(self, entry: QueueEntry) -> bool:
        for run_id in self.record.runs:
            science = self.known.record(run_id).science
            same = science.task == entry.task and science.base_model == entry.base_model
            if same and science.recipe.hash() == entry.recipe_hash:
                return self.baselines.ensure(science, entry.split or Split.FEEDBACK) is not None
        known = self.record.runs
        self.record = read_experiment(self.experiment)
        if self.record.runs != known:  # a later launch added runs
            raise NotReady
        return True  # no run needs it

    def _scored(self, name: str, evaluation: Evaluation) -> None:
        self.heart.set(scored=self.heart.beat.scored + 1)
        said = evaluation.score if evaluation.score is not None else evaluation.reason
        log.info("%s submission %d: %s", queues.run_of(name), queues.number_of(name), said)

    def _do_fingerprint(self, record: RunRecord, entry: QueueEntry, name: str, generation: int) -> bool:
        ledger = self.known.ledger(record.run_id)
        done = self.tracing.work(record, ledger, entry.submission_id or 0, name, generation)
        if done is not None and not self.keep_all:
            release_spare(self.experiment, record.run_id, ledger)
        if done is not None and not done.unfingerprinted():
            self.backoff.now(f"c-{record.run_id}")  # its closing waited for this
        return True

    def _likely_next(self) -> tuple[Path, str] | None:
        """Return artifact and content hash of the next submission that the running engine can score, or None."""
        names, under_way = queues.waiting(self.experiment.queue), self.feedback.under_way
        current = self.claims.current() if names else {}
        for name in self.order.sort(names, current, self.bench.group, under_way):
            if name in under_way or not name.startswith("f-") or name in current or self.backoff.waits(name, 0):
                continue
            if self.known.group(name) != self.bench.group:
                return None
            view = RunView.of(self.known.ledger(queues.run_of(name)).read())
            submission = view.submissions.get(queues.number_of(name))
            content = None if submission is None or submission.is_base else submission.content_hash
            return None if content is None else (self.experiment.artifacts / content, content)
        return None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Stop on a signal and give the claim back at once, so that the next grader need not wait."""
        if not self._stop:  # only once: a second signal must not interrupt the cleanup
            self._stop = True
            raise Stopped


def run_grader(experiment: ExperimentDir) -> int:
    """Run a grader job and return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    deny_inspection()
    grader = Grader(experiment)
    name_program(grader.record.cluster)
    code = 1
    try:
        try:
            grader.run()
        except Stopped:
            pass
        # Also holds if a library swallowed the exception:
        code = 130 if grader._stop else EXIT_TROUBLE if grader._must_leave() else 0
    except Exception:
        if _goes_on(grader):  # otherwise the caller reports it
            log.exception("the grader ends by an error")
        raise
    finally:
        if grader._stop or _goes_on(grader):
            _leave(code, grader.feedback.under_way)
    return code


def _goes_on(grader: Grader) -> bool:
    """Return whether any rating thread is still running, even if its result is no longer wanted."""
    return bool(grader.feedback.under_way) or bool(timeouts.under_way())


def _leave(code: int, under_way: Sequence[str]) -> None:
    """End the process at once; Python would wait for abandoned rating threads, up to an hour."""
    for name in under_way:
        log.warning("%s is still being rated: its claim is given back, the next grader scores it", name)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
