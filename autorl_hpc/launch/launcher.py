"""`launch`: makes or resumes an experiment's folder, queues what graders can do at once, and submits the jobs."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc import __version__
from autorl_hpc.agents import load_agent
from autorl_hpc.cluster.profile import load_profile, profile_path, scratch_folder
from autorl_hpc.errors import AutorlError, Exit, from_os_error
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.frozen import code_hash, frozen_is_whole
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.ledger import now_text, sha256_hex
from autorl_hpc.files.queue import put
from autorl_hpc.files.records import read_experiment
from autorl_hpc.files.share import share
from autorl_hpc.launch.agents import look_at_agents, refuse_problems
from autorl_hpc.launch.drivers import check_agents_secrets, check_drivers, lay_keys
from autorl_hpc.launch.engine import look_at_engine, refuse_without_engine
from autorl_hpc.launch.expand import Cell, expand, read_spec
from autorl_hpc.launch.freeze import freeze, git_revision, parts
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.records.exchange import QueueEntry
from autorl_hpc.records.experiment import ExperimentSpec
from autorl_hpc.records.run import ExperimentRecord, RunRecord
from autorl_hpc.states import Fault, Protocol, QueueKind, Split
from autorl_hpc.tasks.loader import load_task


@dataclass(frozen=True)
class Plan:
    """What a launch would do.

    Attributes:
        cluster: None: this machine.
        scratch: the folder of the workspaces; None: scratch/ of the root.
    """

    spec: ExperimentSpec
    cells: list[Cell]
    experiment: ExperimentDir
    new: list[Cell]
    finished: list[str]
    cluster: ClusterProfile | None = None
    scratch: Path | None = None


def plan(path: Path, root: Root, *, keep_frozen: bool = False, cluster: str | None = None) -> Plan:
    """Reads and checks everything; writes nothing.

    Args:
        cluster: a profile in the place of the one that the experiment names.
        keep_frozen: an experiment that stands goes on with its frozen tasks and agents, whatever they are by now.

    Raises:
        AutorlError: anything that would make a job fail later.
    """
    spec = read_spec(path)
    profile, scratch = _cluster(spec, path, cluster)
    experiment = root.experiment(spec.name)
    frozen = None
    if keep_frozen and experiment.resolved.exists():
        frozen = experiment.code / read_experiment(experiment).code_hash
    check_drivers(spec, experiment, profile, path)
    cells = expand(spec, root, path, frozen)
    check_agents_secrets(spec, frozen, path)
    done = set(reading.list_names(experiment.finished))
    known = set(reading.list_names(experiment.path))
    return Plan(
        spec,
        cells,
        experiment,
        [cell for cell in cells if cell.run_id not in known],
        [cell.run_id for cell in cells if cell.run_id in done],
        profile,
        scratch,
    )


def _cluster(spec: ExperimentSpec, path: Path, name: str | None) -> tuple[ClusterProfile | None, Path | None]:
    """The cluster's profile (None: this machine), and the folder of the workspaces."""
    try:
        profile = load_profile(name or spec.cluster)
    except AutorlError as error:
        if name is not None or error.what.startswith("field"):
            raise
        raise AutorlError(f"field `cluster`: {error.what}", where=path, next_step=error.next_step) from None
    if profile.scheduler == "local" and spec.grader.placement == "step":
        raise AutorlError(
            "field `grader.placement`: `step` is for jobs on a cluster; here all share one machine",
            where=path,
            next_step="use `job`, or a Slurm cluster",
        )
    scratch = scratch_folder(profile, profile_path(name or spec.cluster))
    return (None if profile.scheduler == "local" else profile), scratch


def prepare(
    path: Path, root: Root, *, keep_frozen: bool = False, cluster: str | None = None, checked: bool = True
) -> tuple[Plan, ExperimentRecord]:
    """Makes the experiment's folder, or completes the one that stands.

    Args:
        checked: the programs of its agents, and vLLM where graders need it, are looked for here first.

    Raises:
        AutorlError: see `plan`; or the program of an agent, or vLLM, is not here; or the code or a task changed since the first launch; or the folder can't be written.
    """
    planned = plan(path, root, keep_frozen=keep_frozen, cluster=cluster)
    if checked:
        refuse_problems(look_at_agents(root, planned.spec, planned.cells, planned.cluster))
        refuse_without_engine(look_at_engine(planned.spec, planned.cluster), path)
    experiment = planned.experiment
    try:
        for folder in experiment.folders():
            folder.mkdir(parents=True, exist_ok=True)
        before = read_experiment(experiment) if experiment.resolved.exists() else None
        frozen = _frozen_code(experiment, before, planned, keep_frozen)
        atomic.write_bytes(experiment.given, reading.read_bytes(path))
        lay_keys(planned.spec, experiment, path)
        record = _experiment_record(planned, root, before, frozen, path)
        for cell in planned.cells:
            _write_run(experiment, record, cell, frozen)
        atomic.write_json(experiment.resolved, record.model_dump(mode="json"))
        for cell in planned.cells:
            _queue_baselines(experiment, cell)
    except OSError as error:
        raise from_os_error(error, "preparing the experiment", error.filename or experiment.path) from error
    return planned, record


def would_be(planned: Plan, path: Path) -> ExperimentRecord:
    """The record that `prepare` would write, for a dry run."""
    experiment = planned.experiment
    before = read_experiment(experiment) if experiment.resolved.exists() else None
    frozen = before.code_hash if before else code_hash(parts(_own_folders(planned)))
    return _experiment_record(planned, Root(experiment.path.parent.parent), before, frozen, path)


def _own_folders(planned: Plan) -> dict[str, Path]:
    """Task and agent folders of the user's own that the experiment uses, by their place in the frozen code."""
    matrix = planned.spec.matrix
    found = {f"tasks/{name}": load_task(name).folder for name in matrix.task}
    for name in matrix.agent:
        found |= {f"templates/agents/{folder.name}": folder for folder in load_agent(name).folders()}
    built_in = (share("tasks"), share("templates"))
    return {place: folder for place, folder in found.items() if not any(folder.is_relative_to(b) for b in built_in)}


def _frozen_code(experiment: ExperimentDir, before: ExperimentRecord | None, planned: Plan, keep_frozen: bool) -> str:
    if before is None:
        return freeze(experiment, parts(_own_folders(planned)))
    if not frozen_is_whole(experiment, before.code_hash):
        raise AutorlError(
            "the frozen code of this experiment was changed or is incomplete",
            where=experiment.code / before.code_hash,
            fault=Fault.CLUSTER,
            next_step="launch under another name: its scores would not be those of the code that is named",
            exit_code=Exit.FAILED,
        )
    if not keep_frozen and before.code_hash != code_hash(parts(_own_folders(planned))):
        raise AutorlError(
            "the package, a task or a template changed since this experiment was launched",
            where=experiment.resolved,
            next_step="add --keep-frozen to go on with the code as it was launched, or give the experiment another name",
        )
    return before.code_hash


def _experiment_record(
    planned: Plan, root: Root, before: ExperimentRecord | None, frozen: str, path: Path
) -> ExperimentRecord:
    runs = list(before.runs) if before else []
    runs += [cell.run_id for cell in planned.cells if cell.run_id not in runs]
    return ExperimentRecord(
        spec=planned.spec,
        spec_sha256=sha256_hex(reading.read_bytes(path)),
        root=str(root.path.resolve()),
        code_hash=frozen,
        git_revision=before.git_revision if before else git_revision(),
        created_at=before.created_at if before else now_text(),
        runs=tuple(runs),
        grader=planned.spec.grader,
        cluster=planned.cluster,
        scratch=None if planned.scratch is None else str(planned.scratch),
        versions=_versions() | ({"autorl-hpc": before.versions["autorl-hpc"]} if before else {}),
        host={"name": platform.node(), "system": platform.platform()},
    )


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"autorl-hpc": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "trl", "accelerate", "pydantic", "submitit", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _write_run(experiment: ExperimentDir, record: ExperimentRecord, cell: Cell, frozen: str) -> None:
    run = experiment.run(cell.run_id)
    if run.record.exists():
        return
    for folder in (run.path, run.ledger, run.items, run.logs):
        folder.mkdir(exist_ok=True)
    body = RunRecord(
        run_id=cell.run_id,
        experiment=experiment.path.name,
        index=record.runs.index(cell.run_id),
        science=cell.science,
        recipe_hash=cell.science.recipe.hash(),
        task_hash=cell.task_hash,
        agent_hash=cell.agent_hash,
        environment=cell.environment,
        code_hash=frozen,
        created_at=now_text(),
        sandbox=record.spec.sandbox.level,
        versions=record.versions,
    )
    atomic.write_json(run.record, body.model_dump(mode="json"))


def _queue_baselines(experiment: ExperimentDir, cell: Cell) -> None:
    science = cell.science
    done = set(reading.list_names(experiment.finished))
    if cell.run_id in done:
        return
    for split in (Split.REPORT,) if science.protocol is Protocol.PAPER else (Split.FEEDBACK, Split.REPORT):
        put(
            experiment.queue,
            QueueEntry(
                kind=QueueKind.BASELINE,
                task=science.task,
                base_model=science.base_model,
                recipe_hash=science.recipe.hash(),
                split=split,
            ),
        )
