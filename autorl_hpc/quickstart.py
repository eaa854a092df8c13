"""`autorl-hpc quickstart`: stage, launch, follow and report the shipped example experiment."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import Root, share
from autorl_hpc.launch import local, plan
from autorl_hpc.states import Fault


def run_quickstart(place: Path, parallel: int, say: Callable[[str], None]) -> int:
    """Run `jobs/quickstart.yaml` under `place`, print the report and return the exit code. Raises AutorlError if a step fails."""
    from autorl_hpc.report import report, status
    from autorl_hpc.stage.models import stage_model
    from autorl_hpc.stage.tasks import stage_task
    from autorl_hpc.tasks.loader import load_task

    started = time.monotonic()
    root = Root(place)
    say(f"quickstart in {place}: a tiny base model, word problems, scripted agents that really train, one grader")
    place.mkdir(parents=True, exist_ok=True)
    try:
        stage_task(root, load_task("arithmetic"), None, say=say)
        stage_model(root, "tiny", None, say=say)
        planned, record = plan.prepare(_job_file(place, parallel), root)
    except AutorlError as error:
        if root.experiment("quickstart").resolved.exists():  # launch's advice, another name, doesn't apply here
            error.next_step = "this folder may hold another version's quickstart: give another --root, or remove it"
        raise
    experiment = planned.experiment
    local.submit(experiment, record, say)
    shown = f"(status: autorl-hpc status {experiment.path})"
    say(f"{len(planned.cells)} runs started; they go on if you close this terminal {shown}")
    status.watch([experiment.path])
    if not set(record.runs) <= set(reading.list_names(experiment.finished)):
        what, fault = "the jobs ended before every run was closed", Fault.CLUSTER
        advice = "read the *.out files there; the same command goes on where it stopped"
        raise AutorlError(what, where=experiment.jobs, fault=fault, next_step=advice, exit_code=Exit.FAILED)
    report.show(report.bring_up_to_date([experiment.path]))
    say(f'done in {time.monotonic() - started:.0f} s. Next: README.md, section "On your cluster"')
    return int(Exit.OK)


def _job_file(place: Path, parallel: int) -> Path:
    text = (share("jobs") / "quickstart.yaml").read_text(encoding="utf-8")
    path = place / "quickstart.yaml"
    atomic.write_bytes(path, text.replace("parallel: 2", f"parallel: {parallel}").encode())
    return path
