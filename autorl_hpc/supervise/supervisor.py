"""The agent job: `python -m autorl_hpc job agent EXPERIMENT RUN_ID`. Idempotent and restartable.

Read `run_agent_job` top to bottom: it is the life of a run up to its sealing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from autorl_hpc.agents import load_agent
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.claims import claimed_entries
from autorl_hpc.files.events import append_event
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.queue import put
from autorl_hpc.files.records import read_experiment, read_run
from autorl_hpc.files.store import verify_model
from autorl_hpc.files.view import RunView
from autorl_hpc.records.exchange import QueueEntry
from autorl_hpc.records.ledger import AttemptEnded, Sealed
from autorl_hpc.records.run import ExperimentRecord, RunRecord
from autorl_hpc.states import EndedBy, EntryKind, Fault, QueueKind
from autorl_hpc.supervise import workspace as workspaces
from autorl_hpc.supervise.agent_process import AgentProcess
from autorl_hpc.supervise.answers import Answers
from autorl_hpc.supervise.basemodel import BaseModel
from autorl_hpc.supervise.bridge import Bridge
from autorl_hpc.supervise.budget import BudgetClock, read_clock
from autorl_hpc.supervise.chain import Chain, Superseded
from autorl_hpc.supervise.environment import agent_environment
from autorl_hpc.supervise.intake import Intake
from autorl_hpc.supervise.processes import end_all

log = logging.getLogger("autorl_hpc.supervisor")

LOOP_S = 0.1
LOOK_S = 0.5
"""How often the ledger and the cancel folder are listed."""

TELL_TIME_S = 5.0
STOP_GRACE_S = 5.0
EXIT_RESUME = 75
"""EX_TEMPFAIL: this attempt stopped without sealing, start another one."""


@dataclass
class Waits:
    """Time that submissions wait for a grader, by this process's own clock."""

    since: dict[str, float] = field(default_factory=dict)

    def look(self, pending: set[str], claimed: set[str]) -> list[float]:
        """Waits of the entries that have been claimed since the last look, in seconds."""
        now = time.monotonic()
        for name in pending:
            self.since.setdefault(name, now)
        done = [name for name in self.since if name in claimed or name not in pending]
        return [now - self.since.pop(name) for name in done]


class Supervisor:
    """One attempt at one run."""

    def __init__(self, experiment: ExperimentDir, run_id: str) -> None:
        self.experiment = experiment
        self.run = experiment.run(run_id)
        self.record: RunRecord = read_run(self.run)
        self.experiment_record: ExperimentRecord = read_experiment(experiment)
        self.root = Root(Path(self.experiment_record.root))
        self.chain = Chain(self.run)
        self.mark = hashlib.sha256(str(self.run.path.resolve()).encode()).hexdigest()[:32]
        self._signal: int | None = None
        self._superseded = threading.Event()
        self._intake_stop = threading.Event()
        self._waits = Waits()

    @property
    def workspace_path(self) -> Path:
        """Where the workspace lies: in scratch, outside the experiment's folder."""
        return self.root.path / "scratch" / self.experiment.path.name / self.run.run_id

    def work(self) -> int:
        """Runs the attempt; 0 when the run is sealed, EXIT_RESUME when another attempt must go on."""
        view = self.chain.look()
        if view.sealed is not None:
            self._queue_closing()
            return 0
        if self._cancelled():
            return self._seal_without_agent(EndedBy.CANCELLED, None, "cancelled before it started")
        if view.attempt >= self.experiment_record.spec.attempts:
            last = view.ended[-1].reason if view.ended else "killed without a word"
            reason = f"{view.attempt} attempts ended without a seal; the last one: {last}"
            return self._seal_without_agent(EndedBy.CRASHED, Fault.CLUSTER, reason)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._on_signal)
        left_over = end_all(os.getpid(), self.mark)
        if left_over:
            log.warning("processes of an earlier attempt could not be ended: %s", sorted(left_over))
        elapsed_s, given_back_s, suspended_s = self._used_so_far(view)
        attempt = self.chain.begin(elapsed_s, str(self.workspace_path))
        clock = BudgetClock(
            self.run.clock,
            self.record.science.budget,
            attempt,
            elapsed_s=elapsed_s,
            given_back_s=given_back_s,
            suspended_s=suspended_s,
        )
        try:
            return self._attempt(clock)
        except Superseded:
            log.warning("a newer attempt of this run has begun: stepping back")
            return 0
        except (AutorlError, OSError) as error:
            log.error("attempt %d failed: %s", attempt, error)
            what = error.what if isinstance(error, AutorlError) else str(error)
            self.chain.write(
                EntryKind.ATTEMPT_ENDED, AttemptEnded(attempt=attempt, elapsed_s=clock.elapsed_s, reason=what[:500])
            )
            return EXIT_RESUME

    def _attempt(self, clock: BudgetClock) -> int:
        task, agent = self._load_parts()
        workspaces.lay(self.workspace_path, self.root, self.record, task, agent)
        atomic.write_json(self.run.workspace_link, {"schema_version": 1, "workspace": str(self.workspace_path)})
        manifest = verify_model(self.root, self.record.science.base_model)
        base = BaseModel.read(self.root.model(self.record.science.base_model), manifest.content_hash or "")
        workspace = workspaces.Workspace(self.workspace_path)
        answers = Answers(self.record, self.experiment.baselines, workspace)
        meta = {**workspaces.run_meta(self.record), "start_time": int(time.time()), "attempt": clock.attempt}
        bridge = Bridge(workspace, answers, lambda: meta, lambda: clock.left_s)
        intake = Intake(self.experiment, self.record, workspace, base, clock, self.chain, answers)
        intake.recover()
        workspace.write(None, "run_meta.json", meta)
        env = agent_environment(self.record, self.workspace_path, bridge.url, self.mark, clock.attempt)
        bridge.start()
        clock.start()
        start = self.workspace_path / ".agent" / agent.name / agent.file.start
        self.run.logs.mkdir(exist_ok=True)
        append_event(self.run.events, "agent_started", attempt=clock.attempt, elapsed_s=clock.elapsed_s)
        process = AgentProcess(
            ["bash", str(start)],
            env,
            self.workspace_path,
            self.run.agent_log,
            self.mark,
            self._elapsed_file(clock.attempt),
            clock.elapsed_s,
        )
        taker = threading.Thread(target=self._take_in, args=(intake,), name="intake", daemon=True)
        taker.start()
        try:
            ended_by = self._watch(process, workspace, clock, answers)
            process.stop(0.0 if ended_by is EndedBy.AGENT_EXIT else STOP_GRACE_S)
            end = process.finish()
        finally:
            if process.running():
                process.stop(0.0)
                process.finish(5.0)
            self._intake_stop.set()
            taker.join()
            clock.stop()
            bridge.stop()
        append_event(
            self.run.events,
            "agent_ended",
            ended_by=ended_by,
            exit_code=end.exit_code,
            elapsed_s=clock.elapsed_s,
            left=end.left,
        )
        if self._superseded.is_set():
            raise Superseded
        if ended_by is None:
            self.chain.write(
                EntryKind.ATTEMPT_ENDED,
                AttemptEnded(attempt=clock.attempt, elapsed_s=clock.elapsed_s, reason=f"signal {self._signal}"),
            )
            return EXIT_RESUME
        intake.poll(patient=False)  # what was dropped before the end
        self._seal(ended_by, end.exit_code, clock, intake)
        answers.update(self.chain.look())
        workspace.close()
        return 0

    def _watch(
        self, process: AgentProcess, workspace: workspaces.Workspace, clock: BudgetClock, answers: Answers
    ) -> EndedBy | None:
        """Waits for what ends the attempt; None for a signal or a newer attempt."""
        next_look = next_tell = 0.0
        while True:
            if self._signal is not None or self._superseded.is_set():
                return None
            if not process.running():
                return EndedBy.AGENT_EXIT
            if clock.left_s <= 0:
                return EndedBy.BUDGET
            now = time.monotonic()
            if now >= next_look:
                next_look = now + LOOK_S
                try:
                    view = self.chain.look()
                except Superseded:
                    self._superseded.set()
                    continue
                except (OSError, AutorlError) as error:
                    log.warning("the ledger can't be read: %s", error)
                    continue
                answers.update(view)
                self._give_back(view, clock)
                if self._cancelled():
                    return EndedBy.CANCELLED
            if now >= next_tell:
                next_tell = now + TELL_TIME_S
                workspace.write(
                    None,
                    "time.json",
                    {
                        "remaining_s": round(clock.left_s, 1),
                        "elapsed_s": round(clock.elapsed_s, 1),
                        "given_back_s": round(clock.given_back_s, 1),
                        "timeout_s": clock.budget.wall_clock_s,
                    },
                )
            time.sleep(LOOP_S)

    def _take_in(self, intake: Intake) -> None:
        """The intake thread: a long copy must not keep the budget from ending."""
        while not self._intake_stop.is_set():
            try:
                if intake.poll():
                    continue
            except Superseded:
                self._superseded.set()
                return
            except Exception:  # the next manifest, or the next look, may go well: intake must outlive a defect
                log.exception("intake failed")
            self._intake_stop.wait(0.2)

    def _give_back(self, view: RunView, clock: BudgetClock) -> None:
        pending = {f"f-{self.run.run_id}--{s.submission_id:06d}" for s in view.unscored()}
        if not pending and not self._waits.since:
            return
        for waited_s in self._waits.look(pending, set(claimed_entries(self.experiment.claims))):
            given = clock.give_back(waited_s)
            append_event(self.run.events, "claimed", waited_s=round(waited_s, 3), given_back_s=round(given, 3))

    def _load_parts(self) -> tuple[Any, Any]:
        from autorl_hpc.tasks.loader import load_task

        return load_task(self.record.science.task), load_agent(self.record.science.agent)

    def _used_so_far(self, view: RunView) -> tuple[float, float, float]:
        """Elapsed, given back and suspended seconds of all earlier attempts, from whoever knew last."""
        clock = read_clock(self.run.clock)
        elapsed_s = max([0.0, *(a.elapsed_s for a in view.attempts), *(e.elapsed_s for e in view.ended)])
        if clock is not None:
            elapsed_s = max(elapsed_s, clock.elapsed_s)
        for number in range(1, view.attempt + 1):
            left = reading.read_json_or_none(self._elapsed_file(number))
            if isinstance(left, dict) and isinstance(left.get("elapsed_s"), (int, float)):
                elapsed_s = max(elapsed_s, float(left["elapsed_s"]))
        return elapsed_s, clock.given_back_s if clock else 0.0, clock.suspended_s if clock else 0.0

    def _elapsed_file(self, attempt: int) -> Path:
        return self.run.path / f"elapsed-{attempt}.json"

    def _seal(self, ended_by: EndedBy, exit_code: int | None, clock: BudgetClock, intake: Intake) -> None:
        view = self.chain.look()
        body = Sealed(
            submissions=tuple(s.submission_id for s in view.accepted()),
            ended_by=ended_by,
            exit_code=exit_code,
            elapsed_s=clock.elapsed_s,
            given_back_s=clock.given_back_s,
            refused=len(view.refused()),
            refused_unrecorded=intake.refused_unrecorded,
            fault=Fault.AGENT
            if exit_code not in (0, None) and ended_by is EndedBy.AGENT_EXIT and not view.accepted()
            else None,
            reason=f"the agent exited with code {exit_code}" if exit_code not in (0, None) else None,
        )
        self.chain.write(EntryKind.SEALED, body)
        self._queue_closing()

    def _seal_without_agent(self, ended_by: EndedBy, fault: Fault | None, reason: str) -> int:
        view = self.chain.look()
        elapsed_s, given_back_s, _ = self._used_so_far(view)
        self.chain.attempt = view.attempt
        body = Sealed(
            submissions=tuple(s.submission_id for s in view.accepted()),
            ended_by=ended_by,
            exit_code=None,
            elapsed_s=elapsed_s,
            given_back_s=given_back_s,
            refused=len(view.refused()),
            fault=fault,
            reason=reason,
        )
        self.chain.write(EntryKind.SEALED, body)
        self._queue_closing()
        return 0

    def _queue_closing(self) -> None:
        science = self.record.science
        put(
            self.experiment.queue,
            QueueEntry(
                kind=QueueKind.CLOSE,
                run_id=self.run.run_id,
                task=science.task,
                base_model=science.base_model,
                recipe_hash=self.record.recipe_hash,
            ),
        )

    def _cancelled(self) -> bool:
        return bool({"all", self.run.run_id} & set(reading.list_names(self.experiment.cancel)))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


def run_agent_job(experiment: ExperimentDir, run_id: str) -> int:
    """The payload of an agent job."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    return Supervisor(experiment, run_id).work()
