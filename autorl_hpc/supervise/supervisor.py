"""The agent job: `python -m autorl_hpc job agent EXPERIMENT RUN_ID`. Idempotent and restartable.

Read `run_agent_job` top to bottom: it is the life of a run up to its sealing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from autorl_hpc.agents import load_agent
from autorl_hpc.drivers.waiting import wait_ready
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.claims import claimed_entries
from autorl_hpc.files.events import append_event
from autorl_hpc.files.faults import is_cluster_error
from autorl_hpc.files.host import deny_inspection
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.records import read_experiment, read_run
from autorl_hpc.files.view import RunView
from autorl_hpc.records.driver import DriverSpec
from autorl_hpc.records.ledger import AttemptEnded, Sealed
from autorl_hpc.records.run import ExperimentRecord, RunRecord
from autorl_hpc.states import EXIT_RESUME, EndedBy, EntryKind, Fault
from autorl_hpc.supervise import laying
from autorl_hpc.supervise import workspace as workspaces
from autorl_hpc.supervise.agent_process import AgentEnd, AgentProcess
from autorl_hpc.supervise.answers import Answers
from autorl_hpc.supervise.basemodel import staged_base_model
from autorl_hpc.supervise.bridge import Bridge
from autorl_hpc.supervise.budget import BudgetClock, Waits
from autorl_hpc.supervise.chain import Chain, Superseded
from autorl_hpc.supervise.confining import Confinement
from autorl_hpc.supervise.contamination import ContaminationWatch
from autorl_hpc.supervise.environment import agent_environment, environment_image, environment_venv
from autorl_hpc.supervise.intake import Intake
from autorl_hpc.supervise.processes import end_all
from autorl_hpc.supervise.recording import Recording
from autorl_hpc.supervise.sealing import Seals
from autorl_hpc.supervise.usage import UsageWatch

log = logging.getLogger("autorl_hpc.supervisor")

T = TypeVar("T")

LOOP_S = 0.1
LOOK_S = 0.5
"""How often the ledger and the cancel folder are listed."""

TELL_TIME_S = 5.0
STOP_GRACE_S = 5.0
SIGNAL_LAG_S = 2.0
"""A scheduler signals all processes of a job at once: an agent that died of it may be seen before our own signal."""

END_PATIENCE_S = 600.0
"""How long the end of an agent is tried to be written while the file system fails: it can't be done over."""

END_RETRY_S = 2.0
BY_SIGNAL = "signal "


class Supervisor:
    """One attempt at one run."""

    def __init__(self, experiment: ExperimentDir, run_id: str) -> None:
        self.experiment = experiment
        self.run = experiment.run(run_id)
        self.record: RunRecord = read_run(self.run)
        self.experiment_record: ExperimentRecord = read_experiment(experiment)
        self.root = Root(Path(self.experiment_record.root))
        self.chain = Chain(self.run)
        self.seals = Seals(experiment, self.record, self.chain)
        self.marks = self.seals.marks
        self.contamination = ContaminationWatch(experiment, run_id, lambda: self.workspace_path, self.chain)
        self._signal: int | None = None
        self._superseded = threading.Event()
        self._intake_stop = threading.Event()
        self._excess: str | None = None
        self._waits = Waits(self.record.science.budget.give_back_after_s)

    @property
    def workspace_path(self) -> Path:
        """Where the workspace lies: outside the experiment's folder, where the first attempt laid it."""
        earlier = self.chain.view.attempts
        if earlier:  # whatever scratch a later launch names: the agent's work is there
            return Path(earlier[0].workspace)
        scratch = self.experiment_record.scratch
        folder = Path(scratch) if scratch else self.root.path / "scratch"
        return folder / self.experiment.path.name / self.run.run_id

    def work(self) -> int:
        """Runs the attempt; 0 when the run is sealed, EXIT_RESUME when another attempt must go on."""
        view = self.chain.look()
        if view.sealed is not None:
            self.seals.queue_closing()
            return 0
        if self._cancelled():
            when = "before it started" if view.attempt == 0 else f"after attempt {view.attempt} had ended"
            return self.seals.without_agent(EndedBy.CANCELLED, None, f"cancelled {when}")
        # A preemption is no crash: it may come as often as the scheduler likes, and the budget bounds the run.
        crashes = view.attempt - sum(e.reason.startswith(BY_SIGNAL) for e in view.ended)
        if crashes >= self.experiment_record.spec.attempts:
            last = (
                view.ended[-1].reason if any(e.attempt == view.attempt for e in view.ended) else "killed without a word"
            )
            reason = f"{crashes} attempts ended without a seal; the last one: {last}"
            return self.seals.without_agent(EndedBy.CRASHED, Fault.CLUSTER, reason)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._on_signal)
        # First the entry, then the killing: an older supervisor whose agent we end must know that it was not the end.
        attempt = self.chain.begin(self.seals.used_so_far(view)[0], str(self.workspace_path))
        left_over = end_all(os.getpid(), self.marks)
        if left_over:
            log.warning("processes of an earlier attempt could not be ended: %s", sorted(left_over))
        elapsed_s, given_back_s, suspended_s = self.seals.used_so_far(view)
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
            log.warning("a newer attempt of this run has begun, or it was sealed elsewhere: stepping back")
            return 0
        except (AutorlError, OSError) as error:
            log.error("attempt %d failed: %s", attempt, error)
            what = error.what if isinstance(error, AutorlError) else str(error)
            return self._end_attempt(clock, what[:500])

    def _attempt(self, clock: BudgetClock) -> int:
        if self.chain.look().sealed is not None:  # while this attempt began: the older one can't queue what comes next
            self.seals.queue_closing()
            raise Superseded
        task, agent = self._load_parts()
        self._patiently(lambda: laying.lay_folders(self.workspace_path, self.root, self.record), is_cluster_error)
        atomic.write_json(self.run.workspace_link, {"schema_version": 1, "workspace": str(self.workspace_path)})
        base = self._patiently(lambda: staged_base_model(self.root, self.record), is_cluster_error)
        workspace = workspaces.Workspace(self.workspace_path)
        answers = Answers(self.record, self.experiment.baselines, workspace)
        meta = {**laying.run_meta(self.record), "start_time": int(time.time()), "attempt": clock.attempt}
        intake = Intake(self.experiment, self.record, workspace, base, clock, self.chain, answers)
        intake.recover()
        for earlier in self.chain.look().ended:
            if earlier.agent_ended is not None:
                return self._take_the_rest(earlier.agent_ended, earlier.exit_code, clock, intake)
        driver = self.experiment_record.spec.driver(self.record.science.driver)
        if driver is not None and driver.kind == "vllm" and not self._driver_answers(driver):
            cancelled = "cancelled while the driver was waited for"
            return self._end_attempt(clock, cancelled if self._signal is None else f"{BY_SIGNAL}{self._signal}")
        venv = environment_venv(self.root, self.record)
        with contextlib.ExitStack() as stack:
            image = environment_image(self.root, self.record)
            spec = self.experiment_record.spec
            sandbox = Confinement(self.root, self.experiment, self.record, spec, self.workspace_path, venv, image)
            stack.callback(sandbox.close)
            bridge = Bridge(workspace, answers, lambda: meta, lambda: clock.left_s, sandbox.socket)
            stack.callback(bridge.stop)
            bridge.start()
            # Of this attempt: an older supervisor that cleans up must not end the newer one's agent.
            mark = f"{self.marks}{clock.attempt}."
            env = agent_environment(
                self.record, self.workspace_path, bridge.url, mark, clock.attempt, venv=venv, secrets=agent.file.secrets
            )
            used = sandbox.choose(bridge.port, env, clock.attempt)
            self.chain.write(EntryKind.SANDBOX, used)
            lay = functools.partial(
                laying.lay, self.workspace_path, self.root, self.record, task, agent, sandbox.placing
            )
            self._patiently(lay, is_cluster_error)
            workspace.write(None, "run_meta.json", meta)
            start = (
                self.workspace_path / ".agent" / agent.name / agent.script(again=self.seals.had_begun(clock.attempt))
            )
            argv = sandbox.argv(["bash", str(start)])
            ended_by, end = self._run_agent(argv, env, mark, workspace, clock, intake, agent.file.trace)
        if not end.started:
            raise AutorlError("the agent's process could not be started", where=start, fault=Fault.CLUSTER)
        if ended_by is EndedBy.AGENT_EXIT and self._signal_ended_it(end.exit_code):
            ended_by = None
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
            return self._end_attempt(clock, f"{BY_SIGNAL}{self._signal}")
        return self._take_the_rest(ended_by, end.exit_code, clock, intake)

    def _driver_answers(self, driver: DriverSpec) -> bool:
        """Waits for a driver that is served here, before the clock starts; False if this attempt is to end meanwhile."""
        ready = wait_ready(
            self.experiment,
            self.record.science.driver,
            driver,
            stop=lambda: self._signal is not None or self._cancelled(),
        )
        return ready is not None

    def _run_agent(
        self,
        argv: list[str],
        env: dict[str, str],
        mark: str,
        workspace: workspaces.Workspace,
        clock: BudgetClock,
        intake: Intake,
        trace_format: str | None,
    ) -> tuple[EndedBy | None, AgentEnd]:
        """The agent from its start to the end of its last process."""
        clock.start()
        self.run.logs.mkdir(exist_ok=True)
        append_event(self.run.events, "agent_started", attempt=clock.attempt, elapsed_s=clock.elapsed_s)
        process = AgentProcess(
            argv,
            env,
            self.workspace_path,
            self.run.agent_log,
            mark,
            self.seals.elapsed_file(clock.attempt),
            clock.elapsed_s,
        )
        usage = UsageWatch(clock.budget, process.keeper_pid, mark, self.workspace_path, self.run.agent_log)
        usage.start()
        recording = Recording(self.run, self.workspace_path, clock, process.keeper_pid, mark, trace_format)
        recording.start()
        intake.ask_revision = recording.ask
        taker = threading.Thread(target=self._take_in, args=(intake,), name="intake", daemon=True)
        taker.start()
        self.contamination.start()
        try:
            ended_by = self._watch(process, workspace, clock, intake.answers, usage)
            process.stop(0.0 if ended_by is EndedBy.AGENT_EXIT else STOP_GRACE_S)
            end = process.finish()
        finally:
            if process.running():
                process.stop(0.0)
                process.finish(5.0)
            usage.end()
            self._intake_stop.set()
            taker.join()
            clock.stop(persist=not self._superseded.is_set())
            recording.end()
        return ended_by, end

    def _take_the_rest(self, ended_by: EndedBy, exit_code: int | None, clock: BudgetClock, intake: Intake) -> int:
        """Takes in what was dropped before the end and seals; a signal leaves the rest to the next attempt."""
        self._patiently(lambda: intake.poll(patient=False, stop=lambda: self._signal is not None or self._cancelled()))
        if self._signal is not None and intake.left():
            return self._end_attempt(clock, f"{BY_SIGNAL}{self._signal}", ended_by, exit_code)
        self.contamination.finish(stop=lambda: self._signal is not None)
        self._seal(ended_by, exit_code, clock, intake)
        intake.answers.update(self.chain.look())
        return 0

    def _watch(
        self,
        process: AgentProcess,
        workspace: workspaces.Workspace,
        clock: BudgetClock,
        answers: Answers,
        usage: UsageWatch,
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
            if usage.excess is not None:
                self._excess = usage.excess.reason
                return usage.excess.ended_by
            now = time.monotonic()
            if now >= next_look:
                next_look = now + LOOK_S
                try:
                    view = self.chain.look()
                    if view.sealed is not None:
                        raise Superseded
                    answers.update(view)
                    self._give_back(view, clock)
                    if self._cancelled():
                        return EndedBy.CANCELLED
                except Superseded:
                    self._superseded.set()
                except (OSError, AutorlError) as error:
                    log.warning("the experiment's folder can't be read: %s", error)
            if now >= next_tell:
                next_tell = now + TELL_TIME_S
                workspace.write(
                    None,
                    "time.json",
                    {
                        "left_s": round(clock.left_s, 1),
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
        claimed = set(claimed_entries(self.experiment.claims)) if pending else set()
        given_s = clock.give_back(self._waits.look(pending, claimed))
        if given_s > 0:
            append_event(self.run.events, "given_back", seconds=round(given_s, 3), waiting=len(pending))

    def _load_parts(self) -> tuple[Any, Any]:
        from autorl_hpc.tasks.loader import load_task

        task, agent = load_task(self.record.science.task), load_agent(self.record.science.agent)
        if (task.hash(), agent.hash()) != (self.record.task_hash, self.record.agent_hash):
            raise AutorlError(
                "the task or the agent that this job found is not the one that run.json names",
                where=agent.folder,
                fault=Fault.CLUSTER,
                next_step="launch again: jobs run the frozen code of the experiment",
            )
        return task, agent

    def _seal(self, ended_by: EndedBy, exit_code: int | None, clock: BudgetClock, intake: Intake) -> None:
        view = self._patiently(self.chain.look)
        bad_end = exit_code != 0 and ended_by is EndedBy.AGENT_EXIT
        reason = f"the agent exited with code {exit_code}" if bad_end else self._excess  # else it was our own TERM
        if bad_end and exit_code is None:
            reason = "the agent's keeper was killed, so the agent was ended; it left no exit code"
        body = Sealed(
            submissions=tuple(s.submission_id for s in view.accepted()),
            ended_by=ended_by,
            exit_code=exit_code,
            elapsed_s=clock.elapsed_s,
            given_back_s=clock.given_back_s,
            refused=len(view.refused()),
            refused_unrecorded=intake.refused_unrecorded,
            fault=Fault.AGENT if reason is not None and not view.accepted() else None,
            reason=reason,
        )
        self._patiently(lambda: self.seals.write(body))
        self._patiently(self.seals.queue_closing)

    def _end_attempt(
        self, clock: BudgetClock, reason: str, agent_ended: EndedBy | None = None, exit_code: int | None = None
    ) -> int:
        """Records that this attempt ended without a seal; the next one goes on."""
        body = AttemptEnded(
            attempt=clock.attempt,
            elapsed_s=clock.elapsed_s,
            reason=reason,
            agent_ended=agent_ended,
            exit_code=exit_code,
        )
        try:
            self.chain.write(EntryKind.ATTEMPT_ENDED, body)
        except Superseded:
            return 0
        except (AutorlError, OSError) as error:
            log.error("the end of attempt %d could not be recorded: %s", clock.attempt, error)
        return EXIT_RESUME

    def _patiently(self, write: Callable[[], T], may_pass: Callable[[OSError], bool] = lambda error: True) -> T:
        """Does `write` again while the file system fails, for as long as no signal asks to stop. No budget passes here."""
        deadline = time.monotonic() + END_PATIENCE_S
        while True:
            try:
                return write()
            except OSError as error:
                if self._signal is not None or time.monotonic() > deadline or not may_pass(error):
                    raise
                log.warning("the file system fails; trying again: %s", error)
                time.sleep(END_RETRY_S)

    def _signal_ended_it(self, exit_code: int | None) -> bool:
        """Whether an agent's death by a signal is part of what stops this whole job."""
        if exit_code is None or not (exit_code < 0 or 128 < exit_code <= 128 + signal.NSIG):
            return False
        deadline = time.monotonic() + SIGNAL_LAG_S
        while self._signal is None and time.monotonic() < deadline:
            time.sleep(LOOP_S)
        return self._signal is not None

    def _cancelled(self) -> bool:
        return bool({"all", self.run.run_id} & set(reading.list_names(self.experiment.cancel)))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


def run_agent_job(experiment: ExperimentDir, run_id: str) -> int:
    """The payload of an agent job."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    deny_inspection()
    return Supervisor(experiment, run_id).work()
