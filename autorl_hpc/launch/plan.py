"""`launch`: freeze the code, check agents and engine, make or resume an experiment's folder, queue baselines; the lock of launches."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import platform
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc import __version__
from autorl_hpc.agents import load_agent
from autorl_hpc.agents.program_check import Looked, look, look_at_torch, where_agents_run
from autorl_hpc.cluster.profile import load_profile, profile_path, scratch_folder
from autorl_hpc.cluster.vllm_program import VllmOnHost, look_for_engine
from autorl_hpc.errors import AutorlError, Exit, from_os_error
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.checkpoint import walk_files
from autorl_hpc.files.frozen_records import read_experiment
from autorl_hpc.files.layout import PACKAGE, ExperimentDir, Root, share
from autorl_hpc.files.ledger import now_text, sha256_hex
from autorl_hpc.files.processes import host_name
from autorl_hpc.files.queue import Claims, HeartbeatWatch, put, write_heartbeat
from autorl_hpc.files.store import OTHER_PROMPTING, VENV, Parts, code_hash, frozen_is_whole
from autorl_hpc.launch.drivers import check_agents_secrets, check_drivers, lay_keys
from autorl_hpc.launch.expand import Cell, expand, read_spec
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.records.driver import NO_DRIVER
from autorl_hpc.records.exchange import Heartbeat, QueueEntry
from autorl_hpc.records.experiment import ExperimentSpec
from autorl_hpc.records.run import BaseModelPin, ExperimentRecord, RunRecord
from autorl_hpc.records.task import HARNESSES
from autorl_hpc.scoring.harness import library
from autorl_hpc.states import Fault, Protocol, QueueKind, Split
from autorl_hpc.tasks.folders import code_files
from autorl_hpc.tasks.loader import load_task

# --- frozen code: package, tasks and templates, under the hash of their content

SHARED_PARTS = ("tasks", "templates")
NOT_FROZEN = ("_share/", "models/")
"""Base models are in the store; the shipped copies of shared parts are frozen beside the package."""


def parts(own: Mapping[str, Path]) -> Parts:
    """Return what to freeze: package, tasks, templates. `own`: the user's folders by frozen place, such as `templates/agents/mine`."""
    found = {"autorl_hpc": PACKAGE, **{name: share(name) for name in SHARED_PARTS}}
    replaced = tuple(f"{place}/" for place in own)
    frozen: Parts = {}
    for name, folder in found.items():
        files = (file for file in walk_files(folder) if not file.startswith(NOT_FROZEN))
        frozen[name] = (folder, [file for file in files if not f"{name}/{file}".startswith(replaced)])
    return {**frozen, **{place: (folder, code_files(folder)) for place, folder in own.items()}}


def freeze(experiment: ExperimentDir, frozen: Parts) -> str:
    """Copy the code to `code/<hash>/` and return the hash. An existing folder is complete, because it was renamed into place."""
    wanted = code_hash(frozen)
    target = experiment.code / wanted
    if target.is_dir():
        return wanted
    work = experiment.code / f".tmp-{wanted[:16]}-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    for name, (folder, files) in frozen.items():
        for file in files:
            (work / name / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / file, work / name / file)  # keeps the execute bit
    try:
        os.rename(work, target)
    except OSError:
        shutil.rmtree(work, ignore_errors=True)
        if not target.is_dir():
            raise
    return wanted


def git_revision() -> str | None:
    """Return the git revision of the package's checkout, with `+` if it has local changes; None outside a checkout."""
    checkout = PACKAGE.parent
    if not (checkout / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        argv = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


# --- before anything is queued: drivers and programs of agents, the engine of graders


def look_at_agents(
    root: Root, spec: ExperimentSpec, cells: Sequence[Cell], profile: ClusterProfile | None
) -> list[Looked]:
    """Return findings on the experiment's agents; runs their programs in a sandbox to learn versions. Raises nothing."""
    environment = cells[0].environment  # the same for all
    image = environment is not None and environment.kind == "image"
    venv = None if environment is None or image else root.environment(environment.name, environment.content_hash) / VENV
    where = where_agents_run(profile, spec.sandbox.readable, level=spec.sandbox.level, image=image, venv=venv)
    gpus = 0 if profile is None else profile.agent.resources(spec.resources.agent).gpus or 0
    found = []
    for agent, driver in sorted({(cell.science.agent, cell.science.driver) for cell in cells}):
        if driver != NO_DRIVER and load_agent(agent).file.driver is None:
            words = f"it calls no driver, so its runs with {driver} differ from those with none in name only"
            found.append(Looked(agent, "note", words, f"exclude: [{{agent: {agent}, driver: {driver}}}]"))
    agents = [load_agent(name) for name in spec.matrix.agent]
    for one in agents:
        found += look(one, where, hidden=(root.path,))
    return found + look_at_torch(agents, where, gpus, (root.path,))


def look_at_engine(spec: ExperimentSpec, profile: ClusterProfile | None) -> VllmOnHost | None:
    """Look for vLLM; None if graders need only this package's own environment."""
    if spec.grader.engine != "vllm":
        return None
    where = where_agents_run(profile)
    return look_for_engine(profile, where.environ, where.doubt)


def refuse_problems(agents: Sequence[Looked], engine: VllmOnHost | None, where: Path) -> None:
    """Raise AutorlError for the first problem among the findings."""
    for name, seen in _named(agents, engine):
        if seen.state == "problem":
            advice = f"{seen.do_this}; or add --unchecked, if it is on the nodes and not here"
            place, what = where, f"field `grader.engine`: `vllm` can't start: {seen.value}"
            if isinstance(seen, Looked):
                place, what = load_agent(seen.agent).folder, f"{name} can't run: {seen.value}"
            raise AutorlError(what, where=place, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT)


def finding_lines(agents: Sequence[Looked], engine: VllmOnHost | None) -> list[str]:
    """Return the findings as lines for people."""
    return [
        f"{name}: {'PROBLEM' if seen.state == 'problem' else seen.state}: {seen.value}"
        + (f" ({seen.do_this})" if seen.do_this else "")
        for name, seen in _named(agents, engine)
    ]


def _named(agents: Sequence[Looked], engine: VllmOnHost | None) -> list[tuple[str, Looked | VllmOnHost]]:
    of_engine = [] if engine is None else [("engine vllm", engine)]
    return [*((f"agent {looked.agent}", looked) for looked in agents), *of_engine]


@dataclass(frozen=True)
class Plan:
    """What a launch would do."""

    spec: ExperimentSpec
    cells: list[Cell]
    experiment: ExperimentDir
    new: list[Cell]
    finished: list[str]
    cluster: ClusterProfile | None = None  # None for this machine
    scratch: Path | None = None  # the folder for workspaces; None for scratch/ in the root

    @property
    def root(self) -> Root:
        return Root(self.experiment.path.parent.parent)


def plan(path: Path, root: Root, *, keep_frozen: bool = False, cluster: str | None = None) -> Plan:
    """Read and check everything; write nothing. `cluster`: a profile in place of the experiment's; `keep_frozen`: go on
    with its frozen tasks and agents. Raises AutorlError: anything that would make a job fail later."""
    spec = read_spec(path)
    profile, scratch = _cluster(spec, path, cluster)
    experiment = root.experiment(spec.name)
    before = read_experiment(experiment) if experiment.resolved.exists() else None
    frozen = experiment.code / before.code_hash if before is not None and keep_frozen else None
    check_drivers(spec, experiment, profile, path)
    cells = expand(spec, root, path, frozen, prompting=before is None or bool(before.base_models))
    _refuse_restaged(root, before, cells)
    _refuse_own_folders(root, spec)
    check_agents_secrets(spec, frozen, path)
    done, known = (set(reading.list_names(folder)) for folder in (experiment.finished, experiment.path))
    new = [cell for cell in cells if cell.run_id not in known]
    finished = [cell.run_id for cell in cells if cell.run_id in done]
    return Plan(spec, cells, experiment, new, finished, profile, scratch)


def _refuse_restaged(root: Root, before: ExperimentRecord | None, cells: Sequence[Cell]) -> None:
    known = {} if before is None else before.base_models
    for name, pin in _pins(cells).items():
        if known.get(name, pin) != pin:
            what = f"base model {name} was staged anew since this experiment was launched: "
            what += "other weights" if known[name].content_hash != pin.content_hash else OTHER_PROMPTING
            advice = "stage what it was launched with, or give the experiment another name"
            raise AutorlError(what, where=root.model(name), fault=Fault.CLUSTER, next_step=advice)


def _pins(cells: Sequence[Cell]) -> dict[str, BaseModelPin]:
    return {
        science.base_model: BaseModelPin(
            content_hash=science.base_model_content_hash, prompting_hash=science.base_model_prompting_hash
        )
        for science in (cell.science for cell in cells)
        if science.base_model_prompting_hash is not None
    }


def _cluster(spec: ExperimentSpec, path: Path, name: str | None) -> tuple[ClusterProfile | None, Path | None]:
    """Return the cluster's profile (None for this machine) and the folder for workspaces."""
    try:
        profile = load_profile(name or spec.cluster)
    except AutorlError as error:
        if name is not None or error.what.startswith("field"):
            raise
        raise error.of_field("cluster", path) from None
    if profile.scheduler == "local" and spec.grader.placement == "step":
        what = "field `grader.placement`: `step` is for jobs on a cluster; here all share one machine"
        raise AutorlError(what, where=path, next_step="use `job`, or a Slurm cluster")
    scratch = scratch_folder(profile, profile_path(name or spec.cluster))
    return (None if profile.scheduler == "local" else profile), scratch


def _refuse_own_folders(root: Root, spec: ExperimentSpec) -> None:
    ours = [place.resolve() for place in (root.vault, root.store, root.runs, root.path / "scratch")]
    for agent in map(load_agent, spec.matrix.agent):
        for folder in agent.folders():
            real = folder.resolve()
            if any(real.is_relative_to(place) or place.is_relative_to(real) for place in ours):
                what = f"agent {agent.name} brings {folder.name}/ along, which holds the vault, or other files of the suite"
                raise AutorlError(what, where=folder, next_step="keep agents' folders and --root apart")


def prepare(
    path: Path, root: Root, *, keep_frozen: bool = False, cluster: str | None = None, checked: bool = True
) -> tuple[Plan, ExperimentRecord]:
    """Make or complete the experiment's folder; return plan and record. `checked`: look for agents' programs and vLLM
    first. Raises AutorlError: see `plan`; one of them is missing, the code changed, or the folder can't be written."""
    planned = plan(path, root, keep_frozen=keep_frozen, cluster=cluster)
    if checked:
        agents = look_at_agents(root, planned.spec, planned.cells, planned.cluster)
        refuse_problems(agents, look_at_engine(planned.spec, planned.cluster), path)
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
        for cell in (cell for cell in planned.cells if cell.run_id not in planned.finished):
            known = cell.science.model_dump(include={"task", "base_model"})
            known["recipe_hash"] = cell.science.recipe.hash()
            for split in (Split.REPORT,) if planned.spec.protocol is Protocol.PAPER else (Split.FEEDBACK, Split.REPORT):
                put(experiment.queue, QueueEntry(kind=QueueKind.BASELINE, split=split, **known))
    except OSError as error:
        raise from_os_error(error, "preparing the experiment", error.filename or experiment.path) from error
    return planned, record


def would_be(planned: Plan, path: Path) -> ExperimentRecord:
    """Return the record that `prepare` would write, for a dry run."""
    experiment = planned.experiment
    before = read_experiment(experiment) if experiment.resolved.exists() else None
    frozen = before.code_hash if before else code_hash(parts(_own_folders(planned)))
    return _experiment_record(planned, planned.root, before, frozen, path)


def _own_folders(planned: Plan) -> dict[str, Path]:
    """Return the user's own task and agent folders that the experiment uses, by their place in the frozen code."""
    matrix = planned.spec.matrix
    tasks = [load_task(name, root=planned.root) for name in matrix.task]
    found = {f"tasks/{task.name}": task.folder for task in tasks}
    for name in matrix.agent:
        found |= {f"templates/agents/{folder.name}": folder for folder in load_agent(name).folders()}
    for kind in {recipe.scorer for task in tasks for recipe in task.file.recipes} & set(HARNESSES):
        code = Path(inspect.getfile(type(library(kind)))).parent  # decides scores, and is no part of the package
        found[code.name] = code
    built_in = (share("tasks"), share("templates"))
    return {place: folder for place, folder in found.items() if not any(folder.is_relative_to(b) for b in built_in)}


def _frozen_code(experiment: ExperimentDir, before: ExperimentRecord | None, planned: Plan, keep_frozen: bool) -> str:
    now = parts(_own_folders(planned))
    if before is None:
        return freeze(experiment, now)
    if not frozen_is_whole(experiment, before.code_hash):
        what, where = (
            "the frozen code of this experiment was changed or is incomplete",
            experiment.code / before.code_hash,
        )
        advice = "launch under another name: its scores would not be those of the code that is named"
        raise AutorlError(what, where=where, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.FAILED)
    if not keep_frozen and before.code_hash != code_hash(now):
        what = "the package, a task or a template changed since this experiment was launched"
        advice = "add --keep-frozen to go on with the code as it was launched, or give the experiment another name"
        raise AutorlError(what, where=experiment.resolved, next_step=advice)
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
        base_models={**(before.base_models if before else {}), **_pins(planned.cells)},
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
        with suppress(PackageNotFoundError):
            found[name] = version(name)
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


# --- lock: one launch or cancel at a time, across login nodes, because two would each submit all jobs

log = logging.getLogger("autorl_hpc.launch")

LOCK = "launching"
STALE_S, BEAT_S = 30.0, 3.0  # a lock owner without a sign of life for ten beats counts as dead
WAIT_S, SAY_AFTER_S = 1200.0, 2.0


@contextmanager
def only_one(experiment: ExperimentDir, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock during the block: a claim in jobs/, as on a queue's entry. Raises AutorlError: another lives after WAIT_S."""
    folder = experiment.jobs
    folder.mkdir(exist_ok=True)
    me = f"{LOCK}-{host_name()}-{os.getpid()}-{secrets.token_hex(3)}"
    claims = Claims(folder, me, host_name(), HeartbeatWatch(folder, STALE_S))
    ending = threading.Event()

    def beat() -> None:
        for counter in itertools.count(1):
            try:
                own = Heartbeat(grader=me, host=host_name(), pid=os.getpid(), counter=counter, state="starting")
                write_heartbeat(folder, own)
            except OSError as error:
                log.warning("sign of life not written: %s", error)
            if ending.wait(BEAT_S):
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    started, said = time.monotonic(), False
    try:
        while claims.take(LOCK, claims.current()) is None:
            waited_s = time.monotonic() - started
            if waited_s > SAY_AFTER_S and not said:
                say("waiting for another launch or cancel of this experiment (half a minute, if it was killed)")
                said = True
            if waited_s > WAIT_S:
                what, advice = "another launch of this experiment still submits its jobs", "wait, then launch again"
                raise AutorlError(what, where=experiment.path, next_step=advice, exit_code=Exit.ENVIRONMENT)
            time.sleep(0.3)
        yield
    finally:
        ending.set()
        thread.join()
        claims.drop_own()
        atomic.unlink_quietly(folder / f"{me}.json")
