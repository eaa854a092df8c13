"""The end of an attempt: what was dropped before it is taken in, then the run is sealed or left to the next attempt."""

from __future__ import annotations

import logging

from autorl_hpc.errors import AutorlError
from autorl_hpc.records.ledger import AttemptEnded, Sealed
from autorl_hpc.states import EXIT_RESUME, EndedBy, EntryKind, Fault
from autorl_hpc.supervise.budget import BudgetClock
from autorl_hpc.supervise.chain import Chain, Superseded
from autorl_hpc.supervise.contamination import ContaminationWatch
from autorl_hpc.supervise.intake import Intake
from autorl_hpc.supervise.limits import HOUR_S, Limits
from autorl_hpc.supervise.sealing import Seals
from autorl_hpc.supervise.stops import Stops

log = logging.getLogger("autorl_hpc.supervisor")

BY_SIGNAL = "signal "


class Ending:
    """Ends one attempt."""

    def __init__(self, chain: Chain, seals: Seals, stops: Stops, contamination: ContaminationWatch) -> None:
        self.chain = chain
        self.seals = seals
        self.stops = stops
        self.contamination = contamination

    def finish(
        self,
        ended_by: EndedBy,
        exit_code: int | None,
        clock: BudgetClock,
        intake: Intake,
        reason: str | None = None,
    ) -> int:
        """Takes in what was dropped before the end and seals; a signal leaves the rest to the next attempt.

        Args:
            reason: what the agent used too much of at once.
        """
        stops = self.stops
        stops.patiently(lambda: intake.poll(patient=False, stop=lambda: stops.signal is not None or stops.cancelled()))
        if stops.signal is not None and intake.left():
            return self.interrupt(clock, f"{BY_SIGNAL}{stops.signal}", ended_by, exit_code)
        self.contamination.finish(stop=lambda: stops.signal is not None)
        self._seal(ended_by, exit_code, clock, intake, reason)
        intake.answers.update(self.chain.look())
        return 0

    def interrupt(
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

    def _seal(
        self, ended_by: EndedBy, exit_code: int | None, clock: BudgetClock, intake: Intake, reason: str | None
    ) -> None:
        view = self.stops.patiently(self.chain.look)
        fault = Fault.AGENT if reason is not None else None
        if ended_by in (EndedBy.GPU_HOURS, EndedBy.TOKENS, EndedBy.COST):  # no fault: as with time
            reason = Limits(clock).reason
        if exit_code != 0 and ended_by is EndedBy.AGENT_EXIT:  # else it was our own TERM
            fault = Fault.AGENT
            reason = f"the agent exited with code {exit_code}"
            if exit_code is None:
                reason = "the agent's keeper was killed, so the agent was ended; it left no exit code"
        body = Sealed(
            submissions=tuple(s.submission_id for s in view.accepted()),
            ended_by=ended_by,
            exit_code=exit_code,
            elapsed_s=clock.elapsed_s,
            given_back_s=clock.given_back_s,
            gpu_hours=clock.gpu_s / HOUR_S,
            driver=self.stops.patiently(self.seals.driver_use),
            exit_codes=clock.progress.exit_codes,
            reprompts=clock.progress.reprompts,
            refused=len(view.refused()),
            refused_unrecorded=intake.refused_unrecorded,
            fault=None if view.accepted() else fault,
            reason=reason,
        )
        self.stops.patiently(lambda: self.seals.write(body))
        self.stops.patiently(self.seals.queue_closing)
