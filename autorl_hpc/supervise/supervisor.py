"""Run the agent job: `python -m autorl_hpc job agent EXPERIMENT RUN_ID`.

`Supervisor.work` shows the life of a run up to its seal; it can be restarted at any time. attempt.py holds what happens while
the agent works. Also here: the agent's version, the job's number of GPUs, and `seal_orphans` for runs whose jobs are gone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
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
from autorl_hpc.files.safe_open import Folder
from autorl_hpc.records import readable_json
from autorl_hpc.states import EndedBy, EntryKind, Fault, Network
from autorl_hpc.supervise import workspace as laying
from autorl_hpc.supervise.attempt import BY_SIGNAL, AttemptEnding, Starts, Watching, WorkEnd
from autorl_hpc.supervise.attempt_ledger import LedgerWriter, Seals, Stops, Superseded
from autorl_hpc.supervise.bridge import Bridge
from autorl_hpc.supervise.budget import BudgetClock, BudgetLimits
from autorl_hpc.supervise.children import GatewayProcess
from autorl_hpc.supervise.confine import Confinement
from autorl_hpc.supervise.contamination import ContaminationWatch
from autorl_hpc.supervise.intake import Intake, ResultWriter
from autorl_hpc.supervise.lint import staged_base_model
from autorl_hpc.tasks.loader import Task, load_task

log = logging.getLogger("autorl_hpc.supervisor")

# --- the version of the agent's program, asked in its sandbox at the start of an attempt, before the budget's clock starts.
# It is for the record only: if a program answers nothing or too late, the version is null and the run goes on.

VERSION_LIMIT_S = 60.0
"""openhands needs 9 s of CPU for it, and large programs are read from a file server here for the first time."""

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
    limit_s: float = VERSION_LIMIT_S,
) -> None:
    """Write the version of the agent's program into the run's events; nothing for an agent without a program.

    Args:
        argv: returns a command as it runs in the sandbox.
        env: with the agent's mark; without secrets, and without PYTHONPATH, since what the agent can write must not be imported.
        stop: returns whether the attempt is to end.
    """
    program = agent.file.program
    if program:
        found = VERSION.search(_ask(argv(["bash", "-c", ASK, "version", *program]), env, mark, stop, limit_s))
        version = found.group()[:80] if found else None
        append_event(events, "agent_version", attempt=attempt, agent=agent.name, program=program[0], version=version)


def _ask(command: list[str], env: Mapping[str, str], mark: str, stop: Callable[[], bool], limit_s: float) -> str:
    """Return the program's output if it ends well and in time, else an empty text. Ends all its processes."""
    become_subreaper()
    silent: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        process = subprocess.Popen(command, env=dict(env), cwd="/", start_new_session=True, **silent)
    except OSError:
        return ""
    deadline = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < deadline and not stop():
        time.sleep(0.05)
    code = process.poll()
    end_all(os.getpid(), mark)
    with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
        said, _ = process.communicate(timeout=5)
        return said.decode(errors="replace") if code == 0 else ""
    return ""


# --- the GPUs of this job, which GPU-hours count whether used or not

NAMED_BY = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""A step's variables come first: with `placement: step` the grader has one of the job's GPUs."""
NO_DEVICE = frozenset({"", "-1", "none", "void", "NoDevFiles"})


def gpus_of_job(outer: Mapping[str, str] = os.environ, devices: str = "/dev") -> int:
    """Return the number of GPUs by the first variable that is set; without a scheduler, by the node's devices."""
    named = next((outer[name] for name in NAMED_BY if name in outer), None)
    if named is None:
        return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir(devices))
    count = 0
    for part in {part.strip() for part in named.split(",")}:
        span = re.fullmatch(r"(\d+)-(\d+)", part)
        count += part not in NO_DEVICE if span is None else int(span[2]) - int(span[1]) + 1
    return count


# --- one attempt


class Supervisor:
    """Runs one attempt at one run."""

    def __init__(self, experiment: ExperimentDir, run_id: str) -> None:
        self.experiment, self.run = experiment, experiment.run(run_id)
        self.record, self.experiment_record = read_run(self.run), read_experiment(experiment)
        self.spec, self.root = self.experiment_record.spec, Root(Path(self.experiment_record.root))
        self.chain = LedgerWriter(self.run)
        self.seals = Seals(experiment, self.record, self.chain)
        self.contamination = ContaminationWatch(experiment, run_id, lambda: self.workspace, self.chain)
        self.stops = Stops(experiment, run_id)
        self.ending = AttemptEnding(self.chain, self.seals, self.stops, self.contamination)

    @property
    def workspace(self) -> Path:
        """Return the workspace's path: outside the experiment's folder, where the first attempt created it."""
        earlier = self.chain.view.attempts
        if earlier:  # the agent's work is there, even if a later launch names another scratch
            return Path(earlier[0].workspace)
        scratch = self.experiment_record.scratch
        return (Path(scratch) if scratch else self.root.path / "scratch") / self.experiment.path.name / self.run.run_id

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
        if crashes >= self.spec.attempts:
            ended = [e.reason for e in view.ended if e.attempt == view.attempt]
            last = ended[-1] if ended else "killed without a word"
            reason = f"{crashes} attempts ended without a seal; the last one: {last}"
            return self.seals.without_agent(EndedBy.CRASHED, Fault.CLUSTER, reason)
        self.stops.listen()
        # The entry comes before the kill, so that an older supervisor sees that its agent did not end by itself.
        attempt = self.chain.begin(self.seals.used_so_far(view).elapsed_s, str(self.workspace))
        left_over = end_all(os.getpid(), self.seals.marks)
        if left_over:
            log.warning("processes of an earlier attempt could not be ended: %s", sorted(left_over))
        used, budget = self.seals.used_so_far(view), self.record.science.budget
        clock = BudgetClock(self.run.clock, budget, attempt, used, gpus=gpus_of_job())
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
        path, patiently = self.workspace, functools.partial(self.stops.patiently, may_pass=is_cluster_error)
        patiently(lambda: laying.lay_folders(path, self.root, self.record))
        atomic.write_json(self.run.workspace_link, {"schema_version": 1, "workspace": str(path)})
        base = patiently(lambda: staged_base_model(self.root, self.record))
        answers = ResultWriter(self.record, self.experiment.baselines, path)
        intake = Intake(self.experiment, self.record, base, clock, self.chain, answers)
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
        end = self._work(task, agent, clock, path, intake)
        if not end.agent.started:
            raise AutorlError("the agent's process could not be started", where=agent.folder, fault=Fault.CLUSTER)
        if self.stops.superseded.is_set():
            raise Superseded
        if end.ended_by is None:
            return self.ending.interrupt(clock, f"{BY_SIGNAL}{self.stops.signal}")
        return self.ending.finish(end.ended_by, end.agent.exit_code, clock, intake, end.excess)

    def _work(self, task: Task, agent: Agent, clock: BudgetClock, path: Path, intake: Intake) -> WorkEnd:
        """Run the agent in its sandbox, with bridge and gateway, to its end in this attempt."""
        record, file = self.record, agent.file
        venv, image = laying.environment_of(self.root, record)
        meta = {**laying.run_meta(record), "start_time": int(time.time()), "attempt": clock.attempt}
        with contextlib.ExitStack() as stack:
            sandbox = Confinement(self.root, self.experiment, record, self.spec, path, venv, image)
            stack.callback(sandbox.close)
            gateway = self._open_gateway(sandbox, clock, stack)
            limits = BudgetLimits(clock, submissions=lambda: len(self.chain.view.contents()))
            if gateway is not None:
                limits.use, limits.exhausted = gateway.use, lambda: gateway.exhausted
            bridge = Bridge(intake.answers, meta, limits.told, sandbox.socket)
            stack.callback(bridge.stop)
            bridge.start()
            # Marked per attempt: an older supervisor that cleans up must not end the newer one's agent.
            mark, readable = f"{self.seals.marks}{clock.attempt}.", self.spec.sandbox.readable
            env = laying.agent_environment(record, file, path, bridge.url, mark, clock.attempt, venv, readable)
            ways = {} if gateway is None else laying.driver_environment(gateway.spec, gateway.url, gateway.token)
            env.update(ways)
            own = laying.take_own(env, file.env)
            plain = {name: value for name, value in env.items() if name not in {*ways, *file.secrets, "PYTHONPATH"}}
            plain |= laying.carried({name: value for name, value in own.items() if name != "PYTHONPATH"})
            env |= laying.carried(own)
            driver_port = None if gateway is None else gateway.port
            used = sandbox.choose(bridge.port, env, clock.attempt, driver_port=driver_port)
            self.chain.write(EntryKind.SANDBOX, used)
            prompts = laying.Prompts(record, path, limits, lambda: self.chain.view)
            prompt = prompts.first() if file.prompt else None
            lay = functools.partial(laying.lay, path, self.root, record, task, agent, sandbox.placing, prompt)
            self.stops.patiently(lay, is_cluster_error)
            Folder.open(path).write("run_meta.json", readable_json(meta))

            def inside(command: Sequence[str]) -> list[str]:
                return sandbox.argv(laying.with_carried(command) if own else command)

            note_version(self.run.events, agent, clock.attempt, inside, plain, mark, lambda: self.stops.asked)
            watching = Watching(self.experiment, record, self.stops, limits, intake, gateway)
            starts = Starts(record, agent, path, inside, env, mark, watching, self.seals, prompts)
            self.contamination.start()
            return starts.work()

    def _driver_answers(self) -> bool:
        """Wait for a driver that runs on this cluster, before the clock starts. Return False if the attempt is to end."""
        name = self.record.science.driver
        spec = self.spec.driver(name)
        if spec is None or spec.kind != "vllm":
            return True
        stop = lambda: self.stops.asked or self.stops.cancelled()  # noqa: E731
        return wait_ready(self.experiment, name, spec, stop) is not None

    def _open_gateway(
        self, sandbox: Confinement, clock: BudgetClock, stack: contextlib.ExitStack
    ) -> GatewayProcess | None:
        """Start the gateway to the driver. Return None if the run has no driver, or its agent may not reach it."""
        name = self.record.science.driver
        spec = self.spec.driver(name)
        if spec is None or self.record.science.network is Network.NONE:
            return None
        gateway = GatewayProcess(self.experiment, self.run, name, spec, clock, sandbox.driver_socket)
        stack.callback(gateway.end)
        gateway.start()
        return gateway

    def _load_parts(self) -> tuple[Task, Agent]:
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
    try:
        return Supervisor(experiment, run_id).work()
    except Superseded:  # by an attempt that began at the same moment
        log.warning("a newer attempt of this run has begun: stepping back")
        return 0


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
            _seal_orphan(Supervisor(experiment, row["run_id"]), EndedBy(row["ended_by"]), fault, row["reason"])
        except (AutorlError, OSError) as error:
            log.error("%s could not be sealed: %s", row["run_id"], error)
            failed += 1
    return failed


def _seal_orphan(gone: Supervisor, ended_by: EndedBy, fault: Fault | None, reason: str) -> None:
    """Seal one run. If its supervisor is alive after all, it finds the seal and stops."""
    view, record = gone.chain.look(), gone.record
    if view.sealed is not None:
        gone.seals.queue_closing()
        return
    gone.chain.attempt = view.attempt
    if view.attempts and gone.workspace.is_dir():
        try:
            used, base = gone.seals.used_so_far(view), staged_base_model(gone.root, record)
            clock = BudgetClock(gone.run.clock, record.science.budget, view.attempt, used)
            answers = ResultWriter(record, gone.experiment.baselines, gone.workspace)
            intake = Intake(gone.experiment, record, base, clock, gone.chain, answers)
            intake.recover()
            intake.poll(patient=False)
        except (AutorlError, OSError, Superseded) as error:
            log.warning("what %s had dropped last can't be taken in: %s", record.run_id, error)
    if ended_by is EndedBy.CRASHED and gone.stops.cancelled():
        # `cancel` removed its job, so the scheduler did not lose it.
        ended_by, fault, reason = EndedBy.CANCELLED, None, f"cancelled; {reason}"
    gone.seals.without_agent(ended_by, fault, reason)
