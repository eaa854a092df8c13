"""The agent of one attempt: its start, and its further starts where it ends early and the experiment reprompts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.agents import Agent
from autorl_hpc.agents.file import RESTART
from autorl_hpc.files.events import append_event
from autorl_hpc.files.layout import RunDir
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import EndedBy
from autorl_hpc.supervise.agent_process import AgentEnd, AgentProcess
from autorl_hpc.supervise.budget import BudgetClock
from autorl_hpc.supervise.chain import Superseded
from autorl_hpc.supervise.contamination import ContaminationWatch
from autorl_hpc.supervise.prompts import ENDED_EARLY, INTERRUPTED, Prompts
from autorl_hpc.supervise.recording import Recording
from autorl_hpc.supervise.sealing import Seals
from autorl_hpc.supervise.stops import Stops
from autorl_hpc.supervise.usage import UsageWatch
from autorl_hpc.supervise.watching import Watching

log = logging.getLogger("autorl_hpc.supervisor")

STOP_GRACE_S = 5.0


@dataclass(frozen=True)
class WorkEnd:
    """How an agent's work in one attempt ended.

    Attributes:
        ended_by: None: a signal or a newer attempt.
        agent: of its last start.
        excess: what it used too much of at once.
    """

    ended_by: EndedBy | None
    agent: AgentEnd
    excess: str | None = None


@dataclass
class Starts:
    """Starts the agent of one attempt.

    Attributes:
        argv: the command that runs a script of the agent's in its sandbox.
        mark: of this attempt's processes.
    """

    run: RunDir
    record: RunRecord
    agent: Agent
    workspace: Path
    argv: Callable[[Path], list[str]]
    env: dict[str, str]
    mark: str
    clock: BudgetClock
    watching: Watching
    stops: Stops
    seals: Seals
    prompts: Prompts
    contamination: ContaminationWatch

    def work(self) -> WorkEnd:
        """The agent from its first start in this attempt to the end of its last process.

        Raises:
            Superseded: a newer attempt has begun, before the first start.
        """
        self.watching.cancelled_now()
        if self.stops.superseded.is_set():  # while this attempt was prepared
            raise Superseded
        self.clock.start()
        self.contamination.start()
        try:
            again = INTERRUPTED if self.seals.had_begun(self.clock.attempt) else None
            end = self._once(again)
            while self._goes_on(end):
                again = ENDED_EARLY
                self._note(reprompts=self.clock.progress.reprompts + 1)
                append_event(self.run.events, "reprompted", number=self.clock.progress.reprompts)
                self.clock.resume()
                end = self._once(again)
            return end
        finally:
            self.clock.stop(persist=not self.stops.superseded.is_set())

    def _goes_on(self, end: WorkEnd) -> bool:
        """Whether the agent is started again."""
        if end.ended_by is not EndedBy.AGENT_EXIT or not end.agent.started or self.stops.asked:
            return False
        if self.clock.progress.reprompts >= self.record.science.reprompts:
            return False
        # A newer attempt, if there is one, has ended our agent: its work is not ours to go on with.
        if self.watching.cancelled_now() or self.stops.asked:
            return False
        self.watching.limits.look()
        return self.watching.limits.out_of is None

    def _once(self, again: str | None) -> WorkEnd:
        """One start. `again`: why it is not the first."""
        clock, file = self.clock, self.agent.file
        self._note(exit_codes=(*clock.progress.exit_codes, None))
        number = clock.progress.starts
        clock.persist()
        self.watching.tell()
        script = self.agent.script(again=again is not None)
        prompt = None
        if file.prompt:
            goes_on = file.resume != RESTART
            prompt = self.prompts.first() if again is None else self.prompts.again(again, goes_on=goes_on)
        append_event(
            self.run.events,
            "agent_started",
            attempt=clock.attempt,
            elapsed_s=clock.elapsed_s,
            start=number,
            script=script,
        )
        process = AgentProcess(
            self.argv(self.workspace / ".agent" / self.agent.name / script),
            {**self.env, "AUTORL_START": str(number)},
            self.workspace,
            self.run.agent_log,
            self.mark,
            self.seals.elapsed_file(clock.attempt),
            clock.elapsed_s,
            prompt,
        )
        usage = UsageWatch(clock.budget, process.keeper_pid, self.mark, self.workspace, self.run.agent_log)
        usage.start()
        recording = Recording(self.run, self.workspace, clock, process.keeper_pid, self.mark, file.trace)
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
            self.watching.end()  # before the recorder: what lies there at the end is asked for when it has seen the last state
            clock.pause()
            recording.end()
        if ended_by is EndedBy.AGENT_EXIT and self.stops.ended_agent(agent.exit_code):
            ended_by = None
        self._note(exit_codes=(*clock.progress.exit_codes[:-1], agent.exit_code))
        append_event(
            self.run.events,
            "agent_ended",
            ended_by=ended_by,
            exit_code=agent.exit_code,
            elapsed_s=clock.elapsed_s,
            left=agent.left,
            start=number,
        )
        return WorkEnd(ended_by, agent, None if usage.excess is None else usage.excess.reason)

    def _note(self, **update: object) -> None:
        self.clock.progress = self.clock.progress.model_copy(update=update)
