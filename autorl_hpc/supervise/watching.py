"""Watching an agent at work: what ends it, what is told to it meanwhile, and the intake of what it submits."""

from __future__ import annotations

import logging
import threading
import time

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.claims import claimed_entries
from autorl_hpc.files.events import append_event
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.view import RunView
from autorl_hpc.states import EndedBy
from autorl_hpc.supervise.agent_process import AgentProcess
from autorl_hpc.supervise.budget import BudgetClock, Waits
from autorl_hpc.supervise.chain import Chain, Superseded
from autorl_hpc.supervise.gateway import Gateway
from autorl_hpc.supervise.intake import Intake
from autorl_hpc.supervise.limits import Limits, last_words
from autorl_hpc.supervise.stops import LOOP_S, Stops
from autorl_hpc.supervise.usage import UsageWatch
from autorl_hpc.supervise.workspace import Workspace

log = logging.getLogger("autorl_hpc.supervisor")

LOOK_S = 0.5
"""How often the ledger and the cancel folder are listed."""

TELL_TIME_S = 5.0


class Watching:
    """Watches the agent of one attempt, over all its starts."""

    def __init__(
        self,
        experiment: ExperimentDir,
        run: RunDir,
        chain: Chain,
        stops: Stops,
        clock: BudgetClock,
        limits: Limits,
        workspace: Workspace,
        intake: Intake,
        gateway: Gateway | None,
    ) -> None:
        self.experiment, self.run, self.chain, self.stops = experiment, run, chain, stops
        self.clock, self.limits = clock, limits
        self.workspace, self.intake, self.gateway = workspace, intake, gateway
        self._closed = False
        self._waits = Waits(clock.budget.give_back_after_s)
        self._next_look = self._next_tell = 0.0
        self._ending = threading.Event()
        self._taker: threading.Thread | None = None

    def start(self) -> None:
        """Starts the intake, for one start of the agent."""
        self._ending.clear()
        self._taker = threading.Thread(target=self._take_in, name="intake", daemon=True)
        self._taker.start()

    def end(self) -> None:
        """Ends the intake and waits for it."""
        self._ending.set()
        if self._taker is not None:
            self._taker.join()

    def until_end(self, process: AgentProcess, usage: UsageWatch) -> EndedBy | None:
        """Waits for what ends this start of the agent; None for a signal or a newer attempt."""
        while True:
            if self.stops.asked:
                return None
            if not process.running():
                return self._why_it_ended()
            self._warn()
            if (over := self.limits.over) is not None:
                return over
            if usage.excess is not None:
                return usage.excess.ended_by
            if time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + LOOK_S
                if self._look():
                    return EndedBy.CANCELLED
            if time.monotonic() >= self._next_tell:
                self.tell()
            time.sleep(LOOP_S)

    def cancelled_now(self) -> bool:
        """Looks at the ledger at once, for what may have come since the last look: a newer attempt, which is noted among the stops,
        or the user's cancel."""
        return self._look()

    def _why_it_ended(self) -> EndedBy:
        """Of an agent that ended by itself. Many do when their driver refuses, faster than we look: so we look once more."""
        if self.limits.out_of is None:
            if self.gateway is not None:
                self.gateway.hear_out()
            self._warn()
        return self.limits.out_of or EndedBy.AGENT_EXIT

    def _look(self) -> bool:
        """Looks at the ledger; True: the run was cancelled."""
        try:
            view = self.chain.look()
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

    def _warn(self) -> None:
        """Tells what is newly used up, and closes the driver when the run has come to its last grace."""
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
        """Tells the agent what is left, in time.json and budget.log."""
        self._next_tell = time.monotonic() + TELL_TIME_S
        self.workspace.write(None, "time.json", self.limits.told())
        if self.gateway is not None:
            self.gateway.tell_again()
        if (text := self.limits.log()) is not None:
            self.workspace.write_text("budget.log", text)

    def _take_in(self) -> None:
        """The intake thread: a long copy must not keep the budget from ending."""
        while not self._ending.is_set():
            try:
                if self.intake.poll():
                    continue
            except Superseded:
                self.stops.superseded.set()
                return
            except Exception:  # the next manifest, or the next look, may go well: intake must outlive a defect
                log.exception("intake failed")
            self._ending.wait(0.2)

    def _give_back(self, view: RunView) -> None:
        pending = {f"f-{self.run.run_id}--{s.submission_id:06d}" for s in view.unscored()}
        claimed = set(claimed_entries(self.experiment.claims)) if pending else set()
        given_s = self.clock.give_back(self._waits.look(pending, claimed))
        if given_s > 0:
            append_event(self.run.events, "given_back", seconds=round(given_s, 3), waiting=len(pending))
