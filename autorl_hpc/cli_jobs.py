"""What queued jobs run: `autorl-hpc job ...`. Not for people; each command is restartable at any moment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from autorl_hpc.errors import Exit
from autorl_hpc.files.layout import ExperimentDir, RunDir

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
job_app = typer.Typer(name="job", hidden=True, help="What queued jobs run. Not for people.", rich_markup_mode=None)


def print_json(value: Any) -> None:
    """For programs."""
    print(json.dumps(value, indent=2, sort_keys=True, default=str))


def _print_head(run: RunDir) -> None:
    """Into the job's log: whoever keeps that elsewhere can tell later whether the chain is still the same."""
    from autorl_hpc.errors import AutorlError
    from autorl_hpc.files.heads import in_words, run_head

    try:
        print(in_words(run_head(run)), flush=True)
    except (AutorlError, OSError) as error:
        print(f"head of {run.run_id}: unknown: {error}", flush=True)


def _report(experiment: ExperimentDir) -> None:
    """What the report job does when its experiment is over: the report, and where the chains stand then."""
    from autorl_hpc.report import api

    try:
        api.bring_up_to_date([experiment.path])
    finally:  # whatever befalls a page or a picture, where the chains stand is said
        print("\n".join(api.keep_heads(experiment)), flush=True)


def _drop_keys(experiment: ExperimentDir) -> None:
    """No key outlives its experiment."""
    from autorl_hpc.launch.drivers import drop_keys

    drop_keys(experiment)


Pids = Annotated[list[int] | None, typer.Option()]


@job_app.command("agent")
def _job_agent(experiment: Path, run_id: str) -> None:
    from autorl_hpc.supervise.supervisor import run_agent_job

    code = run_agent_job(ExperimentDir(experiment), run_id)
    _print_head(ExperimentDir(experiment).run(run_id))
    raise typer.Exit(code)


@job_app.command("grader")
def _job_grader(experiment: Path) -> None:
    from autorl_hpc.grading.daemon import run_grader

    raise typer.Exit(run_grader(ExperimentDir(experiment)))


@job_app.command("driver")
def _job_driver(experiment: Path, name: str) -> None:
    from autorl_hpc.drivers.job import run_driver

    raise typer.Exit(run_driver(ExperimentDir(experiment), name))


@job_app.command("drive")
def _job_drive(name: str, experiment: Path, while_alive: Pids = None) -> None:
    from autorl_hpc.launch.payload import keep_driver

    raise typer.Exit(keep_driver(ExperimentDir(experiment), name, while_alive or []))


@job_app.command("array")
def _job_array(experiment: Path) -> None:
    from autorl_hpc.launch.payload import run_array

    raise typer.Exit(run_array(ExperimentDir(experiment)))


@job_app.command("chain")
def _job_chain(experiment: Path, while_alive: Pids = None) -> None:
    from autorl_hpc.launch.payload import run_chain

    raise typer.Exit(run_chain(ExperimentDir(experiment), while_alive or []))


@job_app.command("report")
def _job_report(experiment: Path, after: Pids = None) -> None:
    from autorl_hpc.launch.payload import wait_for_end

    wait_for_end(ExperimentDir(experiment), after or [])
    _drop_keys(ExperimentDir(experiment))
    _report(ExperimentDir(experiment))


@job_app.command("task")
def _job_task(experiment: Path, number: int) -> None:
    from autorl_hpc.launch.task import run_task

    raise typer.Exit(run_task(ExperimentDir(experiment), number))


@job_app.command("finish")
def _job_finish(experiment: Path) -> None:
    from autorl_hpc.grading.watcher import seal_what_is_lost

    seal_what_is_lost(ExperimentDir(experiment))
    _drop_keys(ExperimentDir(experiment))
    _report(ExperimentDir(experiment))


@job_app.command("seal")
def _job_seal(experiment: Path) -> None:
    from autorl_hpc.supervise.orphans import seal_orphans

    raise typer.Exit(Exit.FAILED if seal_orphans(ExperimentDir(experiment), sys.stdin.read()) else Exit.OK)


@job_app.command("submit-slurm")
def _job_submit_slurm(experiment: Path, as_json: JsonOption = False) -> None:
    from autorl_hpc.files.records import read_experiment
    from autorl_hpc.launch.slurm import submit_here

    place = ExperimentDir(experiment)
    done = submit_here(place, read_experiment(place))
    print_json({"submitted": [submitted.model_dump(mode="json") for submitted in done]})


@job_app.command("submit-local")
def _job_submit_local(experiment: Path) -> None:
    from autorl_hpc.files.records import read_experiment
    from autorl_hpc.launch.local import submit_here

    submit_here(ExperimentDir(experiment), read_experiment(ExperimentDir(experiment)))
