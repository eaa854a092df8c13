"""Run the agent of one attempt, from its start to the seal.

`Watching` decides what ends it, warns and takes submissions in; `Starts` starts and reprompts it; `AttemptEnding` seals the
run or leaves it to the next attempt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.agents import Agent
from autorl_hpc.agents.definition import RESTART
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.queue import append_event, claimed_entries
from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.safe_open import Folder
from autorl_hpc.records import readable_json
from autorl_hpc.records.entries import AttemptEnded
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import EXIT_RESUME, EndedBy, EntryKind, Fault
from autorl_hpc.supervise.agent_keeper import AgentEnd, AgentProcess
from autorl_hpc.supervise.attempt_ledger import LOOP_S, LedgerWriter, Seals, Stops, Superseded
from autorl_hpc.supervise.budget import BudgetClock, BudgetLimits, Waits, last_words
from autorl_hpc.supervise.children import GatewayProcess, RecorderProcess
from autorl_hpc.supervise.contamination import ContaminationWatch
from autorl_hpc.supervise.intake import Intake
from autorl_hpc.supervise.usage_watch import UsageWatch
from autorl_hpc.supervise.workspace import ENDED_EARLY, INTERRUPTED, Prompts

log = logging.getLogger("autorl_hpc.supervisor")

LOOK_S = 0.5
"""How often the ledger and the cancel folder are read."""

TELL_TIME_S = 5.0
STOP_GRACE_S = 5.0
BY_SIGNAL = "signal "


class Watching:
    """Watches the agent of one attempt over all its starts."""

    def __init__(
        self,
        experiment: ExperimentDir,
        record: RunRecord,
        stops: Stops,
        limits: BudgetLimits,
        intake: Intake,
        gateway: GatewayProcess | None,
    ) -> None:
        self.experiment, self.run = experiment, experiment.run(record.run_id)
        self.stops, self.limits, self.intake, self.gateway = stops, limits, intake, gateway
        self.clock = limits.clock
        self._workspace = Folder.open(intake.answers.workspace)
        self._closed = False
        self._waits = Waits(self.clock.budget.give_back_after_s)
        self._next_look = self._next_tell = 0.0
        self._ending = threading.Event()
        self._taker: threading.Thread | None = None

    def start(self) -> None:
        """Start the intake thread for one start of the agent."""
        self._ending.clear()
        self._taker = threading.Thread(target=self._take_in, name="intake", daemon=True)
        self._taker.start()

    def end(self) -> None:
        """End the intake thread and wait for it."""
        self._ending.set()
        if self._taker is not None:
            self._taker.join()

    def until_end(self, process: AgentProcess, usage: UsageWatch) -> EndedBy | None:
        """Wait until something ends this start of the agent. Return None for a signal or a newer attempt."""
        while not self.stops.asked:
            if not process.running():
                return self._why_it_ended()
            self._warn()
            if (over := self.limits.over) is not None:
                return over
            if usage.excess is not None:
                return usage.excess.ended_by
            if time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + LOOK_S
                if self.cancelled_now():
                    return EndedBy.CANCELLED
            if time.monotonic() >= self._next_tell:
                self.tell()
            time.sleep(LOOP_S)
        return None

    def cancelled_now(self) -> bool:
        """Read the ledger now. Return whether the user cancelled the run; a newer attempt sets `stops.superseded`."""
        try:
            view = self.intake.chain.look()
            if view.sealed is not None:
                raise Superseded
            self.intake.answers.update(view)
            if self.limits.out_of is None:
                self._give_back(view)
            return self.stops.cancelled()
        except Superseded:
            self.stops.superseded.set()
        except (OSError, AutorlError) as error:
            log.warning("the experiment's folder can't be read: %s", error)
        return False

    def _why_it_ended(self) -> EndedBy:
        """Return why an agent exited by itself. Many exit as soon as their driver refuses, so the budget is read again."""
        if self.limits.out_of is None:
            if self.gateway is not None:
                self.gateway.hear_out()
            self._warn()
        return self.limits.out_of or EndedBy.AGENT_EXIT

    def _warn(self) -> None:
        """Record new budget warnings, and close the driver when the last grace begins."""
        new = self.limits.look()
        for warning in new:
            append_event(self.run.events, "budget_warning", **warning.model_dump(exclude={"elapsed_s"}))
        if self.limits.out_of is not None and not self._closed:
            self._closed = True
            grace_s = self.limits.grace_left_s
            append_event(self.run.events, "budget_out", out_of=self.limits.out_of, grace_s=round(grace_s, 1))
            if self.gateway is not None:
                self.gateway.close(f"{self.limits.reason}; {last_words(grace_s, driver=False)}")
        if new:
            self.tell()

    def tell(self) -> None:
        """Write what is left of the budget for the agent, to time.json and budget.log."""
        self._next_tell = time.monotonic() + TELL_TIME_S
        self._workspace.write("time.json", readable_json(self.limits.told()))
        if self.gateway is not None:
            self.gateway.tell_again()
        if (text := self.limits.log()) is not None:
            self._workspace.write("budget.log", text.encode("utf-8", "backslashreplace"))

    def _take_in(self) -> None:
        """Run the intake thread. It is a thread because a long copy must not delay the end of the budget."""
        while not self._ending.is_set():
            try:
                if self.intake.poll():
                    continue
            except Superseded:
                self.stops.superseded.set()
                return
            except Exception:  # intake must survive a defect: the next manifest may work
                log.exception("intake failed")
            self._ending.wait(0.2)

    def _give_back(self, view: RunView) -> None:
        pending = {f"f-{self.run.run_id}--{s.submission_id:06d}" for s in view.unscored()}
        claimed = set(claimed_entries(self.experiment.claims)) if pending else set()
        given_s = self.clock.give_back(self._waits.look(pending, claimed))
        if given_s > 0:
            append_event(self.run.events, "given_back", seconds=round(given_s, 3), waiting=len(pending))


@dataclass(frozen=True)
class WorkEnd:
    """How an agent's work in one attempt ended.

    Attributes:
        ended_by: None for a signal or a newer attempt.
        agent: how its last start ended.
        excess: which limit it exceeded at one moment (memory, disk, processes); None if none.
    """

    ended_by: EndedBy | None
    agent: AgentEnd
    excess: str | None = None


@dataclass
class Starts:
    """Starts the agent of one attempt.

    Attributes:
        argv: returns a command as it runs in the sandbox.
        mark: marks the processes of this attempt.
    """

    record: RunRecord
    agent: Agent
    workspace: Path
    argv: Callable[[Sequence[str]], list[str]]
    env: dict[str, str]
    mark: str
    watching: Watching
    seals: Seals
    prompts: Prompts

    def __post_init__(self) -> None:
        self.run, self.clock, self.stops = self.watching.run, self.watching.clock, self.watching.stops

    def work(self) -> WorkEnd:
        """Run the agent from its first start in this attempt to the end of its last process.

        Raises:
            Superseded: a newer attempt began before the first start.
        """
        self.watching.cancelled_now()
        if self.stops.superseded.is_set():  # a newer attempt began while this one was prepared
            raise Superseded
        self.clock.start()
        try:
            end = self._once(INTERRUPTED if self.seals.had_begun(self.clock.attempt) else None)
            while self._goes_on(end):
                self.clock.note(reprompts=self.clock.progress.reprompts + 1)
                append_event(self.run.events, "reprompted", number=self.clock.progress.reprompts)
                self.clock.resume()
                end = self._once(ENDED_EARLY)
            return end
        finally:
            self.clock.stop(persist=not self.stops.superseded.is_set())

    def _goes_on(self, end: WorkEnd) -> bool:
        if end.ended_by is not EndedBy.AGENT_EXIT or not end.agent.started or self.stops.asked:
            return False
        if self.clock.progress.reprompts >= self.record.science.reprompts:
            return False
        # A newer attempt would have ended our agent, so this attempt must not restart it.
        if self.watching.cancelled_now() or self.stops.asked:
            return False
        self.watching.limits.look()
        return self.watching.limits.out_of is None

    def _once(self, again: str | None) -> WorkEnd:
        """Start the agent once and wait for its end. `again` is the reason for a restart; None for the first start."""
        clock, file, events = self.clock, self.agent.file, self.run.events
        clock.note(exit_codes=(*clock.progress.exit_codes, None))
        number = clock.progress.starts
        clock.persist()
        self.watching.tell()
        script = self.agent.script(again=again is not None)
        prompt = None
        if file.prompt:
            goes_on = file.resume != RESTART
            prompt = self.prompts.first() if again is None else self.prompts.again(again, goes_on=goes_on)
        begin = {"attempt": clock.attempt, "elapsed_s": clock.elapsed_s, "start": number, "script": script}
        append_event(events, "agent_started", **begin)
        process = AgentProcess(
            self.argv(["bash", str(self.workspace / ".agent" / self.agent.name / script)]),
            {**self.env, "AUTORL_START": str(number)},
            self.workspace,
            self.run.agent_log,
            self.mark,
            self.seals.elapsed_file(clock.attempt),
            clock.elapsed_s,
            suspension_s=clock.suspension_s,
            prompt=prompt,
        )
        usage = UsageWatch(clock.budget, process.keeper_pid, self.mark, self.workspace, self.run.agent_log)
        usage.start()
        recording = RecorderProcess(self.run, self.workspace, clock, process.keeper_pid, self.mark, file.trace)
        recording.start()
        self.watching.intake.ask_revision = recording.ask
        self.watching.start()
        try:
            ended_by = self.watching.until_end(process, usage)
            process.stop(0.0 if not process.running() else STOP_GRACE_S)
            agent = process.finish()
        finally:
            if process.running():
                process.stop(0.0)
                process.finish(5.0)
            usage.end()
            self.watching.end()  # before the recorder: what is submitted last refers to the code's last revision
            clock.pause()
            recording.end()
        if ended_by is EndedBy.AGENT_EXIT and self.stops.ended_agent(agent.exit_code):
            ended_by = None
        clock.note(exit_codes=(*clock.progress.exit_codes[:-1], agent.exit_code))
        end = {"exit_code": agent.exit_code, "elapsed_s": clock.elapsed_s, "left": agent.left, "start": number}
        append_event(events, "agent_ended", ended_by=ended_by, **end)
        return WorkEnd(ended_by, agent, None if usage.excess is None else usage.excess.reason)


@dataclass
class AttemptEnding:
    """Ends one attempt: takes in the last manifests, then seals the run or leaves it to the next attempt."""

    chain: LedgerWriter
    seals: Seals
    stops: Stops
    contamination: ContaminationWatch

    def finish(
        self,
        ended_by: EndedBy,
        exit_code: int | None,
        clock: BudgetClock,
        intake: Intake,
        excess: str | None = None,
    ) -> int:
        """Take in the last manifests and seal the run. After a signal, the rest is left to the next attempt.

        Args:
            excess: which limit the agent exceeded at one moment; None if none.

        Returns:
            The exit code of the job.
        """
        stops, seals = self.stops, self.seals
        stops.patiently(lambda: intake.poll(patient=False, stop=lambda: stops.signal is not None or stops.cancelled()))
        if stops.signal is not None and intake.left():
            return self.interrupt(clock, f"{BY_SIGNAL}{stops.signal}", ended_by, exit_code)
        self.contamination.finish(stop=lambda: stops.signal is not None)
        accepted = stops.patiently(self.chain.look).accepted()
        fault, reason = (None if excess is None else Fault.AGENT), excess
        if ended_by in (EndedBy.GPU_HOURS, EndedBy.TOKENS, EndedBy.COST):  # no fault, as for wall-clock time
            reason = BudgetLimits(clock).reason
        if exit_code != 0 and ended_by is EndedBy.AGENT_EXIT:  # other endings are caused by our own TERM
            fault, reason = Fault.AGENT, f"the agent exited with code {exit_code}"
            if exit_code is None:
                reason = "the agent's keeper was killed, so the agent was ended; it left no exit code"
        driver = stops.patiently(seals.driver_use)
        stops.patiently(
            lambda: seals.seal(
                ended_by,
                clock.used,
                driver=driver,
                exit_code=exit_code,
                refused_unrecorded=intake.refused_unrecorded,
                fault=None if accepted else fault,
                reason=reason,
            )
        )
        stops.patiently(seals.queue_closing)
        intake.answers.update(self.chain.look())
        return 0

    def interrupt(
        self, clock: BudgetClock, reason: str, agent_ended: EndedBy | None = None, exit_code: int | None = None
    ) -> int:
        """Record that this attempt ended without a seal, so that the next one continues. Return the exit code of the job."""
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
