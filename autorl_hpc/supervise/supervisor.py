"""Run the agent job: `python -m autorl_hpc job agent EXPERIMENT RUN_ID`.

`run_agent_job` shows the life of a run up to its seal; it can be restarted at any time. attempt.py holds what happens while
the agent works. Also here: the agent's version, the job's number of GPUs, and `seal_orphans` for runs whose jobs are gone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autorl_hpc.agents import Agent, load_agent
from autorl_hpc.agents.program_check import VERSION
from autorl_hpc.drivers.client import wait_ready
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic
from autorl_hpc.files.faults import is_cluster_error
from autorl_hpc.files.frozen_records import read_experiment, read_run
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.processes import become_subreaper, deny_inspection, end_all
from autorl_hpc.files.queue import append_event
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.run import ExperimentRecord, RunRecord
from autorl_hpc.states import EndedBy, EntryKind, Fault, Network
from autorl_hpc.supervise import workspace as laying
from autorl_hpc.supervise import workspace as workspaces
from autorl_hpc.supervise.attempt import BY_SIGNAL, AttemptEnding, Starts, Watching, WorkEnd
from autorl_hpc.supervise.bridge import Bridge
from autorl_hpc.supervise.budget import BudgetClock, BudgetLimits
from autorl_hpc.supervise.checkpoint_folder import staged_base_model
from autorl_hpc.supervise.children import GatewayProcess
from autorl_hpc.supervise.confine import Confinement
from autorl_hpc.supervise.contamination import ContaminationWatch
from autorl_hpc.supervise.intake import Intake, ResultWriter
from autorl_hpc.supervise.ledger_writer import LedgerWriter, Seals, Stops, Superseded, is_cancelled
from autorl_hpc.supervise.workspace import (
    Prompts,
    Workspace,
    agent_environment,
    carried,
    driver_environment,
    environment_image,
    environment_venv,
    take_own,
    with_carried,
)
from autorl_hpc.tasks.loader import Task

# --- the version of the agent's program, asked in its sandbox at the start of an attempt, before the budget's clock starts.
# It is for the record only: if a program answers nothing or too late, the version is null and the run goes on.

EVENT = "agent_version"

LIMIT_S = 60.0
"""openhands needs 9 s of CPU for it, and large programs are read from a file server here for the first time."""

LOOK_S = 0.05
MOST_BYTES = 4096
"""Far less than a pipe holds, so that the program never blocks while it runs."""

ASK = f"""set -o pipefail
home=$(mktemp -d) || exit 1
trap 'rm -rf "$home"' EXIT
HOME=$home "$@" 2>&1 </dev/null | head -c {MOST_BYTES}"""
"""With an empty home, so that files of an earlier attempt have no effect."""


def note_version(
    events: Path,
    agent: Agent,
    attempt: int,
    argv: Callable[[Sequence[str]], list[str]],
    env: Mapping[str, str],
    mark: str,
    stop: Callable[[], bool],
) -> None:
    """Write the version of the agent's program into the run's events; nothing for an agent without a program.

    Args:
        argv: returns a command as it runs in the sandbox.
        env: the agent's environment, with its mark, without secrets.
        stop: returns whether the attempt is to end.
    """
    program = agent.file.program
    if not program:
        return
    # PYTHONPATH leads into the workspace, and what the agent can write must not be imported.
    bare = {name: value for name, value in env.items() if name != "PYTHONPATH" and name not in agent.file.secrets}
    said = _ask(argv(["bash", "-c", ASK, "version", *program]), bare, mark, stop)
    found = VERSION.search(said)
    version = found.group()[:80] if found else None
    append_event(events, EVENT, attempt=attempt, agent=agent.name, program=program[0], version=version)


def _ask(command: Sequence[str], env: Mapping[str, str], mark: str, stop: Callable[[], bool]) -> str:
    """Return the program's output if it ends well and in time, else an empty text. Ends all its processes."""
    become_subreaper()
    try:
        process = subprocess.Popen(
            command,
            env=dict(env),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return ""
    assert process.stdout is not None
    with process.stdout as out:
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < deadline and not stop():
            time.sleep(LOOK_S)
        code = process.poll()
        if code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        end_all(os.getpid(), mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        if code != 0:
            return ""
        os.set_blocking(out.fileno(), False)
        try:
            return (os.read(out.fileno(), MOST_BYTES)).decode(errors="replace")
        except BlockingIOError:
            return ""


# --- the GPUs of this job, which GPU-hours count whether used or not

NAMED_BY = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""A step's variables come first: with `placement: step` the grader has one of the job's GPUs."""
NONE = frozenset({"", "-1", "none", "void", "NoDevFiles"})
_SPAN = re.compile(r"(\d+)-(\d+)")
_DEVICE = re.compile(r"nvidia\d+")


def _count(part: str) -> int:
    span = _SPAN.fullmatch(part)
    return int(part not in NONE) if span is None else int(span[2]) - int(span[1]) + 1


def gpus_of_job(outer: Mapping[str, str] = os.environ, devices: str = "/dev") -> int:
    """Return the number of GPUs by the first variable that is set; without a scheduler, by the node's devices."""
    for name in NAMED_BY:
        if name in outer:
            return sum(_count(part.strip()) for part in set(outer[name].split(",")))
    try:
        return sum(1 for name in os.listdir(devices) if _DEVICE.fullmatch(name))
    except OSError:
        return 0


log = logging.getLogger("autorl_hpc.supervisor")


class Supervisor:
    """Runs one attempt at one run."""

    def __init__(self, experiment: ExperimentDir, run_id: str) -> None:
        self.experiment = experiment
        self.run = experiment.run(run_id)
        self.record: RunRecord = read_run(self.run)
        self.experiment_record: ExperimentRecord = read_experiment(experiment)
        self.root = Root(Path(self.experiment_record.root))
        self.chain = LedgerWriter(self.run)
        self.seals = Seals(experiment, self.record, self.chain)
        self.marks = self.seals.marks
        self.contamination = ContaminationWatch(experiment, run_id, lambda: self.workspace_path, self.chain)
        self.stops = Stops(experiment, run_id)
        self.ending = AttemptEnding(self.chain, self.seals, self.stops, self.contamination)

    @property
    def workspace_path(self) -> Path:
        """Return the workspace's path: outside the experiment's folder, where the first attempt created it."""
        earlier = self.chain.view.attempts
        if earlier:  # the agent's work is there, even if a later launch names another scratch
            return Path(earlier[0].workspace)
        scratch = self.experiment_record.scratch
        folder = Path(scratch) if scratch else self.root.path / "scratch"
        return folder / self.experiment.path.name / self.run.run_id

    def work(self) -> int:
        """Run the attempt. Return 0 if the run is sealed, EXIT_RESUME if another attempt must continue."""
        view = self.chain.look()
        if view.sealed is not None:
            self.seals.queue_closing()
            return 0
        if self.stops.cancelled():
            when = "before it started" if view.attempt == 0 else f"after attempt {view.attempt} had ended"
            return self.seals.without_agent(EndedBy.CANCELLED, None, f"cancelled {when}")
        # A preemption doesn't count as a crash: it may happen any number of times, and the budget limits the run.
        crashes = view.attempt - sum(e.reason.startswith(BY_SIGNAL) for e in view.ended)
        if crashes >= self.experiment_record.spec.attempts:
            last = (
                view.ended[-1].reason if any(e.attempt == view.attempt for e in view.ended) else "killed without a word"
            )
            reason = f"{crashes} attempts ended without a seal; the last one: {last}"
            return self.seals.without_agent(EndedBy.CRASHED, Fault.CLUSTER, reason)
        self.stops.listen()
        # The entry comes before the kill, so that an older supervisor sees that its agent did not end by itself.
        attempt = self.chain.begin(self.seals.used_so_far(view).elapsed_s, str(self.workspace_path))
        left_over = end_all(os.getpid(), self.marks)
        if left_over:
            log.warning("processes of an earlier attempt could not be ended: %s", sorted(left_over))
        used = self.seals.used_so_far(view)
        clock = BudgetClock.after(used, self.run.clock, self.record.science.budget, attempt, gpus_of_job())
        try:
            return self._attempt(clock)
        except Superseded:
            log.warning("a newer attempt of this run has begun, or it was sealed elsewhere: stepping back")
            return 0
        except (AutorlError, OSError) as error:
            log.error("attempt %d failed: %s", attempt, error)
            what = error.what if isinstance(error, AutorlError) else str(error)
            return self.ending.interrupt(clock, what[:500])

    def _attempt(self, clock: BudgetClock) -> int:
        if self.chain.look().sealed is not None:  # an older attempt sealed it, but can't queue what comes next
            self.seals.queue_closing()
            raise Superseded
        task, agent = self._load_parts()
        self.stops.patiently(lambda: laying.lay_folders(self.workspace_path, self.root, self.record), is_cluster_error)
        atomic.write_json(self.run.workspace_link, {"schema_version": 1, "workspace": str(self.workspace_path)})
        base = self.stops.patiently(lambda: staged_base_model(self.root, self.record), is_cluster_error)
        workspace = workspaces.Workspace(self.workspace_path)
        answers = ResultWriter(self.record, self.experiment.baselines, workspace)
        meta = {**laying.run_meta(self.record), "start_time": int(time.time()), "attempt": clock.attempt}
        intake = Intake(self.experiment, self.record, workspace, base, clock, self.chain, answers)
        intake.recover()
        for earlier in self.chain.look().ended:
            if earlier.agent_ended is not None:
                return self.ending.finish(earlier.agent_ended, earlier.exit_code, clock, intake)
        limits = BudgetLimits(clock, self.seals.driver_use)
        if clock.left_s <= 0:
            limits.look()
        if (over := limits.over) is not None:  # the attempt before was cut off in its last grace
            codes = clock.progress.exit_codes
            return self.ending.finish(over, codes[-1] if codes else None, clock, intake)
        if not self._driver_answers():
            stopped = self.stops.signal
            why = "cancelled while the driver was waited for" if stopped is None else f"{BY_SIGNAL}{stopped}"
            return self.ending.interrupt(clock, why)
        end = self._work(task, agent, clock, workspace, intake, meta)
        if not end.agent.started:
            raise AutorlError("the agent's process could not be started", where=agent.folder, fault=Fault.CLUSTER)
        if self.stops.superseded.is_set():
            raise Superseded
        if end.ended_by is None:
            return self.ending.interrupt(clock, f"{BY_SIGNAL}{self.stops.signal}")
        return self.ending.finish(end.ended_by, end.agent.exit_code, clock, intake, end.excess)

    def _work(
        self,
        task: Task,
        agent: Agent,
        clock: BudgetClock,
        workspace: workspaces.Workspace,
        intake: Intake,
        meta: dict[str, Any],
    ) -> WorkEnd:
        """Run the agent in its sandbox, with bridge and gateway, to its end in this attempt."""
        record, spec, path = self.record, self.experiment_record.spec, self.workspace_path
        venv, image = environment_venv(self.root, record), environment_image(self.root, record)
        with contextlib.ExitStack() as stack:
            sandbox = Confinement(self.root, self.experiment, record, spec, path, venv, image)
            stack.callback(sandbox.close)
            gateway = self._open_gateway(sandbox, clock, stack)
            limits = self._limits(clock, gateway)
            bridge = Bridge(workspace, intake.answers, lambda: meta, limits.told, sandbox.socket)
            stack.callback(bridge.stop)
            bridge.start()
            # Marked per attempt: an older supervisor that cleans up must not end the newer one's agent.
            mark = f"{self.marks}{clock.attempt}."
            file = agent.file
            env = agent_environment(
                record,
                path,
                bridge.url,
                mark,
                clock.attempt,
                venv=venv,
                secrets=file.secrets,
                own=file.env,
                readable=self.experiment_record.spec.sandbox.readable,
            )
            plain = dict(env)
            if gateway is not None:
                env.update(driver_environment(gateway.spec, gateway.url, gateway.token))
            own = take_own(env, file.env)
            env.update(carried(own))
            asked = {name: value for name, value in own.items() if name != "PYTHONPATH"}  # see note_version
            plain = {**{name: value for name, value in plain.items() if name not in own}, **carried(asked)}
            driver_port = None if gateway is None else gateway.port
            used = sandbox.choose(bridge.port, env, clock.attempt, driver_port=driver_port)
            self.chain.write(EntryKind.SANDBOX, used)
            prompts = Prompts(record, path, limits, lambda: self.chain.view)
            prompt = prompts.first() if file.prompt else None
            lay = functools.partial(laying.lay, path, self.root, record, task, agent, sandbox.placing, prompt)
            self.stops.patiently(lay, is_cluster_error)
            workspace.write(None, "run_meta.json", meta)

            def inside(command: Sequence[str]) -> list[str]:
                return sandbox.argv(with_carried(command) if own else command)

            note_version(self.run.events, agent, clock.attempt, inside, plain, mark, lambda: self.stops.asked)
            watching = Watching(
                self.experiment, self.run, self.chain, self.stops, clock, limits, workspace, intake, gateway
            )
            starts = Starts(
                run=self.run,
                record=record,
                agent=agent,
                workspace=path,
                argv=lambda script: inside(["bash", str(script)]),
                env=env,
                mark=mark,
                clock=clock,
                watching=watching,
                stops=self.stops,
                seals=self.seals,
                prompts=prompts,
                contamination=self.contamination,
            )
            return starts.work()

    def _driver_answers(self) -> bool:
        """Wait for a driver that runs on this cluster, before the clock starts. Return False if the attempt is to end."""
        name = self.record.science.driver
        spec = self.experiment_record.spec.driver(name)
        if spec is None or spec.kind != "vllm":
            return True
        stop = lambda: self.stops.asked or self.stops.cancelled()  # noqa: E731
        return wait_ready(self.experiment, name, spec, stop) is not None

    def _open_gateway(
        self, sandbox: Confinement, clock: BudgetClock, stack: contextlib.ExitStack
    ) -> GatewayProcess | None:
        """Start the gateway to the driver. Return None if the run has no driver, or its agent may not reach it."""
        name = self.record.science.driver
        spec = self.experiment_record.spec.driver(name)
        if spec is None or self.record.science.network is Network.NONE:
            return None
        gateway = GatewayProcess(self.experiment, self.run, name, spec, clock, sandbox.driver_socket)
        stack.callback(gateway.end)
        gateway.start()
        return gateway

    def _limits(self, clock: BudgetClock, gateway: GatewayProcess | None) -> BudgetLimits:
        submissions = lambda: len(self.chain.view.contents())  # noqa: E731
        if gateway is None:
            return BudgetLimits(clock, submissions=submissions)
        return BudgetLimits(clock, gateway.use, lambda: gateway.exhausted, submissions)

    def _load_parts(self) -> tuple[Task, Agent]:
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


def run_agent_job(experiment: ExperimentDir, run_id: str) -> int:
    """Run an agent job. Return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    deny_inspection()
    return Supervisor(experiment, run_id).work()


# --- seals for runs whose jobs are gone for good, in place of their supervisor


def seal_orphans(experiment: ExperimentDir, text: str) -> int:
    """Seal each run of a JSON list of `run_id, ended_by, fault, reason`, after a last intake. Return how many failed."""
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
    """Seal one run. If its supervisor is alive after all, it finds the seal and stops."""
    run = experiment.run(run_id)
    record, chain = read_run(run), LedgerWriter(run)
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
        # `cancel` removed its job, so the scheduler did not lose it.
        ended_by, fault, reason = EndedBy.CANCELLED, None, f"cancelled; {reason}"
    seals.without_agent(ended_by, fault, reason)


def _intake(
    experiment: ExperimentDir, record: RunRecord, chain: LedgerWriter, seals: Seals, view: RunView, place: Path
) -> Intake:
    path = experiment.run(record.run_id).clock
    clock = BudgetClock.after(seals.used_so_far(view), path, record.science.budget, view.attempt)
    base = staged_base_model(Root(Path(read_experiment(experiment).root)), record)
    workspace = Workspace(place)
    answers = ResultWriter(record, experiment.baselines, workspace)
    intake = Intake(experiment, record, workspace, base, clock, chain, answers)
    intake.recover()
    return intake
