"""The grader daemon: main loop (list, choose, claim, score, commit), heartbeat, idle exit, artifact cleanup. Any number may
run, and may be killed at any moment: another one takes its claims over, and each score is committed once."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from autorl_hpc.cluster.job_table import JobTable, read_seen, read_submitted
from autorl_hpc.files import artifacts, atomic, reading
from autorl_hpc.files import queue as queues
from autorl_hpc.files.frozen_records import read_experiment
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.processes import deny_inspection, host_name, job_id
from autorl_hpc.files.queue import Claims, HeartbeatWatch, claimed_entries, drop, drop_trouble, write_heartbeat
from autorl_hpc.files.run_view import RunView
from autorl_hpc.grading import background
from autorl_hpc.grading.attempts import Attempts, Baselines, NotReady
from autorl_hpc.grading.background import Background, Stopped, contained, each, overdue_s
from autorl_hpc.grading.engines.worker_process import name_program
from autorl_hpc.grading.evaluate import Bench
from autorl_hpc.grading.feedback import PASSING, Feedback
from autorl_hpc.grading.final_score import FinalScore
from autorl_hpc.grading.fingerprint_queue import FingerprintQueue
from autorl_hpc.grading.lost_runs import STANDS_STILL_S, Watcher
from autorl_hpc.grading.schedule import RETRY_AFTER_TROUBLE_S, Backoff, Order, RunCatalog
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.entries import Evaluation
from autorl_hpc.records.exchange import Heartbeat, QueueEntry
from autorl_hpc.records.run import ExperimentRecord, RunRecord
from autorl_hpc.states import EXIT_TROUBLE, Fault, QueueKind, Split

log = logging.getLogger("autorl_hpc.grader")

# --- heartbeat: a counter in a file, written by its own thread

BEATS_PER_STALENESS = 6  # Beats per staleness period: five beats may be missed before the claims are taken over
MAX_BEAT_S = 5.0  # Each heartbeat is a synced write on a shared file system, so write no more often than needed


class HeartbeatThread(threading.Thread):
    """Writes the heartbeat file. `look` is called with each beat: it lists the queue, so that an entry's wait starts when it
    arrives and not only after a long evaluation."""

    def __init__(
        self, experiment: ExperimentDir, beat: Heartbeat, stale_after_s: float, look: Callable[[], None]
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.experiment, self.beat, self.look = experiment, beat, look
        self.period_s = min(MAX_BEAT_S, stale_after_s / BEATS_PER_STALENESS)
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


class Activity:
    """Watches the supervisors' clocks. Counters are compared over this process's own time, not across hosts."""

    def __init__(self, experiment: ExperimentDir, record: ExperimentRecord) -> None:
        self.experiment, self.record = experiment, record
        self._counters: dict[str, int] = {}
        self._last_look: float | None = None
        self._last_move = 0.0

    def may_leave(self) -> bool:
        """Return whether no agent would be left without a grader. Called after `idle_exit_s` without work."""
        if self.record.cluster is None:
            return True
        if self.agents_work():
            return False
        jobs = read_submitted(self.experiment)
        mine = [] if jobs is None else [job for job in jobs.submitted if job.job_id == os.environ.get("SLURM_JOB_ID")]
        if jobs is None or not mine:  # a grader beside an agent (`placement: step`) is restarted by the agent's job
            return True
        chain = [job for job in jobs.submitted if job.name == mine[0].name and not job.taken_back]
        is_last = all(job.number <= mine[0].number for job in chain)
        return not is_last or not JobTable.of(jobs, read_seen(self.experiment).jobs).alive_runs()

    def agents_work(self) -> bool:
        """Return whether any clock has moved in the last minute."""
        now = time.monotonic()
        if self._last_look is None or now - self._last_look >= LOOK_S:
            before = dict(self._counters)
            for run_id in set(self.record.runs) - set(reading.list_names(self.experiment.finished)):
                clock = reading.read_json_or_none(self.experiment.run(run_id).clock)
                if isinstance(clock, dict) and isinstance(counter := clock.get("counter"), int):
                    self._counters[run_id] = counter
            moved = any(self._counters[run_id] != counter for run_id, counter in before.items())
            if moved or self._last_look is None:  # at the first look assume that a clock has just moved
                self._last_move = now
            self._last_look = now
        return now - self._last_move <= STANDS_STILL_S


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
    """Release artifacts that an open run no longer needs and return how many. References are read before the ledger: one that a
    supervisor renews meanwhile, because the same content was submitted again, differs and is left alone."""
    here = set(reading.list_names(experiment.artifacts))
    seen = {content: artifacts.reference(experiment.artifacts, content, run_id) for content in here}
    view = RunView.of(ledger.read())
    if view.closed is not None:
        return 0
    spare = {s.content_hash for s in view.accepted() if s.content_hash} - kept_while_open(view)
    held = [(content, reference) for content in sorted(spare & here) if (reference := seen[content]) is not None]
    return sum(artifacts.release_if_same(experiment.artifacts, content, run_id, held_as) for content, held_as in held)


POLL_BUSY_S = 0.25  # Poll interval with work: the median wait is an eighth of a second, for one listing each
POLL_IDLE_S = 1.0  # Poll interval when idle, so that 100 idle graders don't load a file server
IDLE_AFTER_S = 60.0
OVER_CHECK_S = 2.0
STOPPED_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""SIGUSR2 is the scheduler's warning before the end of the job."""
FINISH_AT_END_S = 10.0
"""On a stop signal, time to rate and commit answers that exist already. Shorter than any scheduler's grace period."""
MAX_TROUBLES = 5  # Consecutive cluster troubles after which the grader exits so that the next of the chain starts


class Grader:
    """One grader daemon."""

    def __init__(self, experiment: ExperimentDir) -> None:
        self.experiment = experiment
        self.record: ExperimentRecord = read_experiment(experiment)
        spec = self.record.grader
        root = Root(Path(self.record.root))
        self.host = host_name()
        self.id = f"{self.host}-{os.getpid()}-{secrets.token_hex(3)}"
        beat = Heartbeat(grader=self.id, host=self.host, pid=os.getpid(), counter=0, state="starting", job_id=job_id())
        self.heart = HeartbeatThread(
            experiment, beat, spec.stale_after_s, lambda: self.order.look(queues.waiting(experiment.queue))
        )
        self.claims = self._own_claims()
        self.watcher = Watcher(experiment, self._own_claims(), spec.watch_every_s) if self.record.cluster else None
        self.known = RunCatalog(experiment, lambda: self.record.runs)
        self.bench = Bench(root, spec, lambda: self.record.spec.judge)
        self.bench.likely_next = self._likely_next
        self.background = Background()
        self.baselines = Baselines(experiment, self.claims, self.bench, self.id)
        attempts = Attempts(experiment, self.bench)
        self.fingerprints = FingerprintQueue(experiment, root, self.id)
        self.keep_all = self.record.spec.retention.artifacts == "all"
        self.final_score = FinalScore(experiment, self.baselines, attempts, self.fingerprints, self.id, self.keep_all)
        self.feedback = Feedback(
            experiment,
            self.known,
            self.claims,
            self.baselines,
            attempts,
            self.fingerprints,
            self.background,
            self.id,
            make_room=lambda: self._collect(None),
        )
        self.activity = Activity(experiment, self.record)
        self.order = Order(self.known.group, self.id)
        self.backoff = Backoff(experiment.troubles, self.id, most_s=spec.idle_exit_s / 2)
        self.stopped = False
        self._held: tuple[str, int] | None = None
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
            while not self.stopped and not self.must_leave():
                try:
                    worked = self.step()
                except OSError as error:
                    log.error("the experiment's folder can't be used: %s", error)
                    self._troubles, worked = self._troubles + 1, False
                    time.sleep(RETRY_AFTER_TROUBLE_S)
                if worked:
                    last_work = time.monotonic()
                    continue
                now = time.monotonic()
                if now - last_over_check >= OVER_CHECK_S:
                    last_over_check = now
                    if self._is_over():
                        log.info("the experiment is over")
                        return
                idle = now - last_work > self.record.grader.idle_exit_s
                if idle and self.activity.may_leave():
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
                background.give_up_all,
                self.bench.drop_engine,
            )

    def _give_back(self) -> None:
        if self._held is not None:
            self.claims.give_back(*self._held)
        self._held = None

    def _is_over(self) -> bool:
        """Return whether every run is closed, including those of a later launch. If so, entries, claims and trouble notes are
        removed that a grader left behind when it was killed between its work and their removal."""
        left = {*queues.waiting(self.experiment.queue), *claimed_entries(self.experiment.claims)}  # before the check
        if self._open_runs():
            return False
        self.record = read_experiment(self.experiment)
        if self._open_runs():
            return False
        for entry in sorted(left):
            self._remove(entry)
            drop(self.experiment.claims, entry)
            drop_trouble(self.experiment.troubles, entry)  # or `status` would show the trouble for ever
        return True

    def step(self) -> bool:
        """Do one piece of work; return False if there was none."""
        while self._collect():
            pass
        for name, current in self._candidates():
            if self.backoff.waits(name, current.get(name, 0)) or (name[:2] == "p-" and self.background.is_full(name)):
                continue
            generation = self.claims.take(name, current)
            if generation is None:
                if name not in current:  # another grader was faster, so the order may have changed
                    return True
                continue
            done = self._work(name, generation)
            if done is not None:  # else try the next entry
                return done
        if self.background.names:
            self._collect(POLL_BUSY_S)
            return True
        return False

    def _candidates(self) -> list[tuple[str, dict[str, int]]]:
        names, own = queues.waiting(self.experiment.queue), self.background.names
        current = self.claims.current() if names else {}
        ordered = self.backoff.order(self.order.sort(names, current, self.bench.group, own), current)
        return [(name, current) for name in ordered if name not in own]

    def _work(self, name: str, generation: int) -> bool | None:
        """Work on a claimed entry. Return True if done, None if not ready, False on failure (not counted as activity)."""
        self._held, began_s = (name, generation), time.monotonic()
        self.heart.set(state="scoring", working_on=name)
        done: bool | None = False
        try:
            with contained():
                # Graders died on this entry: finish all others first so that the cause is clear.
                if generation > 1:
                    self._collect_all()
                self._do(name, generation)
            done = True
            if name not in self.background.names:
                self._well(name)
                self._remove(name)
        except NotReady:
            done = None
            self.backoff.later(name, 1.0)
        except Exception as error:
            if not isinstance(error, PASSING):
                self.bench.drop_engine()  # the engine is broken or hit a defect; other entries need a new one
            self._failed(name, error, time.monotonic() - began_s)
        if done is not None or not name.startswith("c-"):
            self.order.began(name)
        if name in self.background.names:  # the claim is held until the commit
            self._held = None
        self._give_back()
        self.heart.set(state="idle", working_on=None, engine_hash=self.bench.engine_hash)
        return done

    def _remove(self, name: str) -> None:
        atomic.unlink_quietly(self.experiment.queue / f"{name}{queues.SUFFIX}")

    def _failed(self, name: str, error: Exception, took_s: float = 0.0) -> None:
        fault, problem, least_s = getattr(error, "fault", None) or Fault.CLUSTER, str(error), 0.0
        if limit_s := overdue_s(error):  # spend at most half of the time on what may hang again
            fault, least_s = getattr(error, "fault", None) or Fault.GRADER, max(limit_s, took_s)
        elif not isinstance(error, PASSING):
            log.error("work on %s failed", name, exc_info=error)
            fault, problem = Fault.GRADER, f"{type(error).__name__}: {error}; see the grader's log"
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

    def _collect(self, timeout_s: float | None = 0.0) -> bool:
        """Handle one entry finished in the background; False if there was none within `timeout_s`."""
        found = self.background.collect(timeout_s)
        if found is None:
            return False
        name, error = found.name, found.result
        if not isinstance(error, Exception):
            self._well(name)
            if isinstance(found.result, Evaluation):
                self._scored(name, found.result)
            return True
        self.feedback.failed(found)
        if isinstance(error, NotReady):
            self.backoff.later(name, 1.0)
        elif isinstance(error, PASSING) or name.startswith("p-"):
            self._failed(name, error)
        else:  # scored again at once, from end to end, to find whose fault it is
            log.error("%s could not be finished and is scored anew", name, exc_info=error)
        return True

    def _collect_all(self, timeout_s: float | None = None) -> None:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while self._collect(None if until is None else max(0.0, until - time.monotonic())):
            pass

    def _open_runs(self) -> set[str]:
        return set(self.record.runs) - set(reading.list_names(self.experiment.finished))

    def must_leave(self) -> bool:
        """Return whether the node is at fault and not one matrix cell: cells that worked now fail, or nothing works."""
        if self._troubles < MAX_TROUBLES or (self._working and not self._failing & self._working):
            return False
        return len(self._failing_runs) > 1 or len(self._open_runs()) <= 1  # otherwise one damaged run may be the cause

    def _do(self, name: str, generation: int) -> None:
        path = self.experiment.queue / f"{name}{queues.SUFFIX}"
        try:
            entry = parse_record(QueueEntry, reading.read_json(path), path)
        except FileNotFoundError:
            return  # another grader finished it between our listing and our claim
        if entry.kind is QueueKind.BASELINE:
            self._do_baseline(entry)
            return
        record, number = self.known.record(entry.run_id or ""), entry.submission_id or 0
        if entry.kind is QueueKind.CLOSE:
            self.final_score.close(record, name, generation, self.order.waited_s(name))
            self.known.forget_ledger(record.run_id)
        elif entry.kind is QueueKind.FINGERPRINT:
            self._do_fingerprint(record, number, name, generation)
        else:
            evaluation = self.feedback.score(record, number, name, generation, self.order.waited_s(name))
            if evaluation is not None:
                self._scored(name, evaluation)

    def _do_baseline(self, entry: QueueEntry) -> None:
        for run_id in self.record.runs:
            science = self.known.record(run_id).science
            same = science.task == entry.task and science.base_model == entry.base_model
            if same and science.recipe.hash() == entry.recipe_hash:
                self.baselines.ensure(science, entry.split or Split.FEEDBACK)
                return
        known = self.record.runs
        self.record = read_experiment(self.experiment)
        if self.record.runs != known:  # a later launch added runs
            raise NotReady

    def _scored(self, name: str, evaluation: Evaluation) -> None:
        self.heart.set(scored=self.heart.beat.scored + 1)
        log.info("%s: %s", name, evaluation.reason if evaluation.score is None else evaluation.score)

    def _do_fingerprint(self, record: RunRecord, number: int, name: str, generation: int) -> None:
        """Compute a fingerprint beside the scoring; one at which a grader died is computed with nothing beside it."""
        ledger = self.known.ledger(record.run_id)

        def work() -> None:
            view = self.fingerprints.work(record, ledger, number, name, generation)
            if view is not None and not self.keep_all:
                release_spare(self.experiment, record.run_id, ledger)
            if view is not None and not view.unfingerprinted():
                self.backoff.now(f"c-{record.run_id}")  # its closing waited for this
            self._remove(name)
            self.claims.give_back(name, generation)

        if generation > 1:
            work()
        else:
            self.background.start(name, generation, work)

    def _likely_next(self) -> tuple[Path, str] | None:
        for name, current in self._candidates():
            if not name.startswith("f-") or name in current or self.backoff.waits(name, 0):
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
        if not self.stopped:  # only once: a second signal must not interrupt the cleanup
            self.stopped = True
            raise Stopped


def run_grader(experiment: ExperimentDir) -> int:
    """Run a grader job and return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    deny_inspection()
    grader = Grader(experiment)
    name_program(grader.record.cluster)
    code = 1

    def goes_on() -> bool:
        return bool(grader.background.names) or bool(background.under_way())

    try:
        with suppress(Stopped):
            grader.run()
        # Also holds if a library swallowed the exception:
        code = 130 if grader.stopped else EXIT_TROUBLE if grader.must_leave() else 0
    except Exception:
        if goes_on():  # otherwise the caller reports it
            log.exception("the grader ends by an error")
        raise
    finally:
        if grader.stopped or goes_on():  # Python would wait for abandoned threads, up to an hour
            logging.shutdown()
            sys.stdout.flush()
            os._exit(code)
    return code
