"""The grader's main loop: look, choose, claim, score, commit. Any number of these may run.

`python -m autorl_hpc job grader EXPERIMENT` runs one. It ends when the experiment is over or when it has been idle for
`idle_exit_s`; it may be killed at any moment: what it held is taken over, and a score is committed once.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic, reading
from autorl_hpc.files import queue as queues
from autorl_hpc.files.claims import Claims, HeartbeatWatch, write_heartbeat
from autorl_hpc.files.host import deny_inspection, host_name, job_id
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.records import read_experiment, read_run
from autorl_hpc.files.view import RunView
from autorl_hpc.grading.activity import Activity
from autorl_hpc.grading.attempts import Attempts, ClusterTrouble, NotReady
from autorl_hpc.grading.backoff import RETRY_AFTER_TROUBLE_S, Backoff
from autorl_hpc.grading.baselines import Baselines
from autorl_hpc.grading.closing import Closing
from autorl_hpc.grading.engines.interpreter import name_program
from autorl_hpc.grading.evaluate import Bench
from autorl_hpc.grading.keeping import release_spare
from autorl_hpc.grading.tracing import Tracing
from autorl_hpc.grading.watcher import Watcher
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.exchange import Heartbeat, QueueEntry
from autorl_hpc.records.ledger import Score
from autorl_hpc.records.run import ExperimentRecord, RunRecord
from autorl_hpc.states import EXIT_TROUBLE, EntryKind, Fault, Protocol, QueueKind, Split

log = logging.getLogger("autorl_hpc.grader")

POLL_BUSY_S = 0.25
"""4 Hz while there is work: a median wait of an eighth of a second costs one listing."""

POLL_IDLE_S = 1.0
"""After a minute without work: the median wait is half a second, and a hundred idle graders don't trouble a file server."""

IDLE_AFTER_S = 60.0
BEATS_PER_STALENESS = 6
"""A heartbeat may be late five times before its claims are taken over."""

MAX_BEAT_S = 5.0
"""Each heartbeat is a synced write on a shared file system: no more of them than staleness needs."""

OVER_CHECK_S = 2.0
STOPPED_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""USR2: the scheduler's warning before the end of the job."""

MAX_TROUBLES = 5
"""Cluster troubles in a row after which a grader gives its place to the next of the chain."""


class Stopped(BaseException):
    """A signal asks the grader to stop. Not KeyboardInterrupt: raised inside an import of torch, that one makes Python
    kill itself at its end though it was caught."""


class Heart(threading.Thread):
    """Writes the heartbeat; says whether it could."""

    def __init__(self, experiment: ExperimentDir, beat: Heartbeat, period_s: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.experiment = experiment
        self.beat = beat
        self.period_s = period_s
        self._ending = threading.Event()  # not `_stop`: that is a method of Thread before Python 3.13
        self._lock = threading.Lock()

    def set(self, **changes: object) -> None:
        """Changes fields of the next beat."""
        with self._lock:
            self.beat = self.beat.model_copy(update=changes)

    def write(self) -> None:
        """One beat now."""
        with self._lock:
            self.beat = self.beat.model_copy(update={"counter": self.beat.counter + 1})
            try:
                write_heartbeat(self.experiment.graders, self.beat)
            except OSError as error:
                log.warning("heartbeat not written: %s", error)

    def run(self) -> None:
        while not self._ending.wait(self.period_s):
            self.write()

    def end(self) -> None:
        """The last beat."""
        self._ending.set()
        self.set(state="ended", working_on=None)
        self.write()


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
        self.heart = Heart(experiment, beat, min(MAX_BEAT_S, spec.stale_after_s / BEATS_PER_STALENESS))
        self.claims = self._own_claims()
        self.watcher = Watcher(experiment, self._own_claims(), spec.watch_every_s) if self.record.cluster else None
        self.bench = Bench(self.root, spec, lambda: self.record.spec.judge)
        self.baselines = Baselines(experiment, self.claims, self.bench, self.id)
        self.attempts = Attempts(experiment, self.bench)
        self.tracing = Tracing(experiment, self.root, self.id, self._is_waited_for)
        self.keep_all = self.record.spec.retention.artifacts == "all"
        self.closing = Closing(experiment, self.baselines, self.attempts, self.tracing, self.id, self.keep_all)
        self.activity = Activity(experiment, self.record)
        self.order = queues.Order()
        self._runs: dict[str, RunRecord] = {}
        self._ledgers: dict[str, Ledger] = {}
        self.backoff = Backoff(experiment.troubles, self.id)
        self._stop = False
        self._held: tuple[str, int] | None = None
        self._troubles = 0  # in a row
        self._failing: set[str] = set()  # cells, since the last success
        self._failing_runs: set[str] = set()
        self._working: set[str] = set()  # cells that were scored here

    def _own_claims(self) -> Claims:
        """Of one thread: what it remembers of others' heartbeats is its own."""
        watch = HeartbeatWatch(self.experiment.graders, self.record.grader.stale_after_s)
        return Claims(self.experiment.claims, self.id, self.host, watch)

    def run(self) -> None:
        """Works until the experiment is over, there has been nothing to do for `idle_exit_s`, or a signal comes."""
        for name in STOPPED_BY:
            signal.signal(name, self._on_signal)
        if self.is_over():
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
                    if self.is_over():
                        log.info("the experiment is over")
                        return
                if now - last_work > self.record.grader.idle_exit_s and self._may_leave():
                    log.info("idle for %.0f s: ending", now - last_work)
                    return
                time.sleep(POLL_BUSY_S if now - last_work < IDLE_AFTER_S else POLL_IDLE_S)
        finally:
            for name in STOPPED_BY:  # a second one must not keep the claim from being given back
                signal.signal(name, signal.SIG_IGN)
            if self.watcher is not None:
                self.watcher.end()
            self._give_back()
            self.claims.drop_own()
            self.heart.end()
            self.bench.drop_engine()
            self.tracing.drop()

    def _give_back(self) -> None:
        """Drops the claim that is held, unless another grader has taken it over."""
        if self._held is not None and self.claims.holds(*self._held):
            self.claims.drop(self._held[0])
        self._held = None

    def _step_or_trouble(self) -> bool:
        try:
            return self.step()
        except OSError as error:  # a folder can't be listed, or a claim not be written: a full disk
            log.error("the experiment's folder can't be used: %s", error)
            self._troubles += 1
            time.sleep(RETRY_AFTER_TROUBLE_S)
            return False

    def is_over(self) -> bool:
        """Whether every run has been closed, those of a later launch too."""
        finished = set(reading.list_names(self.experiment.finished))
        if not set(self.record.runs) <= finished:
            return False
        self.record = read_experiment(self.experiment)
        return set(self.record.runs) <= finished

    def step(self) -> bool:
        """Does one piece of work; False if there was none to get."""
        names = queues.waiting(self.experiment.queue)
        if not names:
            return False
        current = self.claims.current()
        for name in self.backoff.order(self.order.sort(names), current):
            if self.backoff.waits(name, current.get(name, 0)):
                continue
            generation = self.claims.take(name, current)
            if generation is None:
                continue
            done = self._work(name, generation)
            if done is not None:  # else what it waits for may be the next in line
                return done
        return False

    def _is_waited_for(self) -> bool:
        """Whether there is work for this grader that an agent waits for."""
        names = [name for name in queues.waiting(self.experiment.queue) if queues.is_waited_for(name)]
        current = self.claims.current() if names else {}
        return any(name not in current and not self.backoff.waits(name, 0) for name in names)

    def _work(self, name: str, generation: int) -> bool | None:
        """Works on an entry that is claimed; False if nothing came of it, so that failing work doesn't keep a grader; None
        if it is not ready."""
        self._held = (name, generation)
        self.heart.set(state="scoring", working_on=name)
        done: bool | None = False
        try:
            done = self._do(name, generation)
            self._well(name)
        except NotReady:
            done = None
            self.backoff.tried(name)
            self.backoff.later(name, 1.0)
        except (ClusterTrouble, AutorlError) as error:
            self._trouble(name, str(error), error.fault or Fault.CLUSTER)
        except OSError as error:
            self._trouble(name, str(error))
        except Exception as error:  # an engine that broke on the base model, or a defect: others' entries go on
            log.exception("work on %s failed", name)
            self.bench.drop_engine()
            self._trouble(name, f"{type(error).__name__}: {error}; see the grader's log", Fault.GRADER)
        if done:
            atomic.unlink_quietly(self.experiment.queue / f"{name}{queues.SUFFIX}")
        self._give_back()
        self.heart.set(
            state="idle",
            working_on=None,
            engine_hash=None if self.bench.identity is None else self.bench.identity.digest(),
        )
        return done

    def _may_leave(self) -> bool:
        """Whether this grader may end idle: nobody is left in the lurch, and no wait would begin anew with the next one."""
        return not self.backoff.owes(queues.waiting(self.experiment.queue)) and self.activity.may_leave()

    def _trouble(self, name: str, problem: str, fault: Fault = Fault.CLUSTER) -> None:
        pause_s = self.backoff.failed(name, problem, fault)
        log.error("%s goes back to the queue for %.0f s: %s", name, pause_s, problem)
        self._troubles += 1
        self._failing.add(self._cell(name))
        self._failing_runs.add(queues.run_of(name))

    def _well(self, name: str) -> None:
        self._troubles = 0
        self._failing.clear()
        self._failing_runs.clear()
        self.backoff.well(name)
        self._working.add(self._cell(name))

    def _must_leave(self) -> bool:
        """Whether this node, and not one cell of the matrix, is in trouble: what worked before fails, or nothing works."""
        if self._troubles < MAX_TROUBLES or (self._working and not self._failing & self._working):
            return False
        open_runs = set(self.record.runs) - set(reading.list_names(self.experiment.finished))
        return len(self._failing_runs) > 1 or len(open_runs) <= 1  # else it may be that one run's own damage

    def _cell(self, name: str) -> str:
        """Task and base model of an entry, as baselines are named by them."""
        if name.startswith("b"):
            return name.split("-", 1)[1]
        try:
            science = self._run(queues.run_of(name)).science
        except (AutorlError, OSError):
            return name
        return f"{science.task}-{science.base_model.replace('/', '+')}-{science.recipe.hash()[:8]}"

    def _do(self, name: str, generation: int) -> bool:
        path = self.experiment.queue / f"{name}{queues.SUFFIX}"
        try:
            entry = parse_record(QueueEntry, reading.read_json(path), path)
        except FileNotFoundError:
            return True  # another grader finished it between our listing and our claim
        if entry.kind is QueueKind.BASELINE:
            return self._do_baseline(entry)
        record = self._run(entry.run_id or "")
        if entry.kind is QueueKind.CLOSE:
            self.closing.close(record, name, generation)
            self._ledgers.pop(record.run_id, None)
            return True
        if entry.kind is QueueKind.FINGERPRINT:
            return self._do_fingerprint(record, entry, name, generation)
        return self._do_feedback(record, entry, name, generation)

    def _do_baseline(self, entry: QueueEntry) -> bool:
        for run_id in self.record.runs:
            science = self._run(run_id).science
            same = science.task == entry.task and science.base_model == entry.base_model
            if same and science.recipe.hash() == entry.recipe_hash:
                return self.baselines.ensure(science, entry.split or Split.FEEDBACK) is not None
        known = self.record.runs
        self.record = read_experiment(self.experiment)
        if self.record.runs != known:  # a later launch added runs
            raise NotReady
        return True  # no run asks for it

    def _do_feedback(self, record: RunRecord, entry: QueueEntry, name: str, generation: int) -> bool:
        run = self.experiment.run(record.run_id)
        ledger = self._ledgers.setdefault(record.run_id, Ledger(run))
        view = RunView.of(ledger.read())
        number = entry.submission_id or 0
        submission = view.submissions.get(number)
        if submission is None and view.sealed is None:
            raise NotReady  # the queue's listing may be newer than the ledger's: another node wrote both
        if submission is None or submission.status != "accepted" or number in view.scores or view.closed:
            self.tracing.enqueue(record, view)  # who committed the score may have died before this
            return True
        science = record.science
        split = Split.REPORT if science.protocol is Protocol.PAPER else Split.FEEDBACK
        assert submission.content_hash is not None
        if submission.is_base:
            baseline = self.baselines.ensure(science, split)
            if baseline is None:
                raise NotReady
            evaluation = baseline.evaluation
        else:
            items = run.items / f"{number:06d}.{split}.jsonl.gz"
            evaluation = self.attempts.evaluate(science, submission.content_hash, split, items, name, generation)
        score = Score(submission_id=number, evaluation=evaluation, grader=self.id, generation=generation)
        ledger.append(
            EntryKind.SCORE, score, role="grader", unless=lambda entries: number in RunView.of(entries).scores
        )
        self.order.count(name)
        self.heart.set(scored=self.heart.beat.scored + 1)
        log.info(
            "%s submission %d: %s",
            record.run_id,
            number,
            evaluation.score if evaluation.score is not None else evaluation.reason,
        )
        self.baselines.ensure(science, split)  # another engine than the one that measured it when the queue began
        self.tracing.enqueue(record, RunView.of(ledger.read()))
        return True

    def _do_fingerprint(self, record: RunRecord, entry: QueueEntry, name: str, generation: int) -> bool:
        ledger = self._ledgers.setdefault(record.run_id, Ledger(self.experiment.run(record.run_id)))
        done = self.tracing.work(record, ledger, entry.submission_id or 0, name, generation)
        if done is not None and not self.keep_all:
            release_spare(self.experiment, record.run_id, ledger)
        if done is not None and not done.unfingerprinted():
            self.backoff.now(f"c-{record.run_id}")  # its closing waited for this
        return True

    def _run(self, run_id: str) -> RunRecord:
        if run_id not in self._runs:
            self._runs[run_id] = read_run(self.experiment.run(run_id))
        return self._runs[run_id]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """A stop that was asked for: the claim is given back at once, so that the next grader need not wait."""
        if not self._stop:  # once: a second one must not break into the cleaning up
            self._stop = True
            raise Stopped


def run_grader(experiment: ExperimentDir) -> int:
    """The payload of a grader job; 0 when it ended as it should."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    deny_inspection()
    grader = Grader(experiment)
    name_program(grader.record.cluster)
    try:
        grader.run()
    except Stopped:
        pass
    if grader._stop:  # also when a library swallowed the exception
        return 130
    return EXIT_TROUBLE if grader._must_leave() else 0
