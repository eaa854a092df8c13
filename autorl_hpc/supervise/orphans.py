"""Seals runs whose jobs are gone for good, in the place of the supervisor that can't do it any more."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.host import deny_inspection
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.records import read_experiment, read_run
from autorl_hpc.files.view import RunView
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import EndedBy, Fault
from autorl_hpc.supervise.answers import Answers
from autorl_hpc.supervise.basemodel import staged_base_model
from autorl_hpc.supervise.budget import BudgetClock
from autorl_hpc.supervise.chain import Chain, Superseded
from autorl_hpc.supervise.intake import Intake
from autorl_hpc.supervise.sealing import Seals
from autorl_hpc.supervise.stops import is_cancelled
from autorl_hpc.supervise.workspace import Workspace

log = logging.getLogger("autorl_hpc.supervisor")


def seal_orphans(experiment: ExperimentDir, text: str) -> int:
    """Seals each run of a JSON list of `run_id, ended_by, fault, reason`; how many could not be sealed.

    What the agent had dropped before its job ended is taken in first.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    deny_inspection()
    rows: list[dict[str, Any]] = json.loads(text)
    failed = 0
    for row in rows:
        try:
            fault = None if row["fault"] is None else Fault(row["fault"])
            seal_orphan(experiment, row["run_id"], EndedBy(row["ended_by"]), fault, row["reason"])
        except (AutorlError, OSError) as error:
            log.error("%s could not be sealed: %s", row["run_id"], error)
            failed += 1
    return failed


def seal_orphan(experiment: ExperimentDir, run_id: str, ended_by: EndedBy, fault: Fault | None, reason: str) -> None:
    """Seals one run. Should its supervisor live after all, it meets the seal and steps back."""
    run = experiment.run(run_id)
    record, chain = read_run(run), Chain(run)
    seals = Seals(experiment, record, chain)
    view = chain.look()
    if view.sealed is not None:
        seals.queue_closing()
        return
    chain.attempt = view.attempt
    workspace = Path(view.attempts[0].workspace) if view.attempts else None
    if workspace is not None and workspace.is_dir():
        try:
            _intake(experiment, record, chain, seals, view, workspace).poll(patient=False)
        except (AutorlError, OSError, Superseded) as error:
            log.warning("what %s had dropped last can't be taken in: %s", run_id, error)
    if ended_by is EndedBy.CRASHED and is_cancelled(experiment, run_id):
        # `cancel` took its job away: a scheduler that has forgotten the job by now lost nothing.
        ended_by, fault, reason = EndedBy.CANCELLED, None, f"cancelled; {reason}"
    seals.without_agent(ended_by, fault, reason)


def _intake(
    experiment: ExperimentDir, record: RunRecord, chain: Chain, seals: Seals, view: RunView, place: Path
) -> Intake:
    path = experiment.run(record.run_id).clock
    clock = BudgetClock.after(seals.used_so_far(view), path, record.science.budget, view.attempt)
    base = staged_base_model(Root(Path(read_experiment(experiment).root)), record)
    workspace = Workspace(place)
    answers = Answers(record, experiment.baselines, workspace)
    intake = Intake(experiment, record, workspace, base, clock, chain, answers)
    intake.recover()
    return intake
