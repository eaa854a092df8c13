"""The agent job: `python -m autorl_hpc job agent EXPERIMENT RUN_ID`. Idempotent and restartable.

Read `run_agent_job` top to bottom: it is the life of a run up to its sealing. What is watched meanwhile is in watching.py,
how an attempt ends in ending.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autorl_hpc.agents import Agent, load_agent
from autorl_hpc.drivers.waiting import wait_ready
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic
from autorl_hpc.files.faults import is_cluster_error
from autorl_hpc.files.host import deny_inspection
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.records import read_experiment, read_run
from autorl_hpc.records.run import ExperimentRecord, RunRecord
from autorl_hpc.states import EndedBy, EntryKind, Fault, Network
from autorl_hpc.supervise import laying
from autorl_hpc.supervise import workspace as workspaces
from autorl_hpc.supervise.answers import Answers
from autorl_hpc.supervise.basemodel import staged_base_model
from autorl_hpc.supervise.bridge import Bridge
from autorl_hpc.supervise.budget import BudgetClock
from autorl_hpc.supervise.chain import Chain, Superseded
from autorl_hpc.supervise.confining import Confinement
from autorl_hpc.supervise.contamination import ContaminationWatch
from autorl_hpc.supervise.ending import BY_SIGNAL, Ending
from autorl_hpc.supervise.environment import (
    agent_environment,
    carried,
    driver_environment,
    environment_image,
    environment_venv,
    take_own,
    with_carried,
)
from autorl_hpc.supervise.gateway import Gateway
from autorl_hpc.supervise.gpus import gpus_of_job
from autorl_hpc.supervise.intake import Intake
from autorl_hpc.supervise.limits import Limits
from autorl_hpc.supervise.processes import end_all
from autorl_hpc.supervise.program import note_version
from autorl_hpc.supervise.prompts import Prompts
from autorl_hpc.supervise.sealing import Seals
from autorl_hpc.supervise.starts import Starts, WorkEnd
from autorl_hpc.supervise.stops import Stops
from autorl_hpc.supervise.watching import Watching
from autorl_hpc.tasks.loader import Task

log = logging.getLogger("autorl_hpc.supervisor")


class Supervisor:
    """One attempt at one run."""

    def __init__(self, experiment: ExperimentDir, run_id: str) -> None:
        self.experiment = experiment
        self.run = experiment.run(run_id)
        self.record: RunRecord = read_run(self.run)
        self.experiment_record: ExperimentRecord = read_experiment(experiment)
        self.root = Root(Path(self.experiment_record.root))
        self.chain = Chain(self.run)
        self.seals = Seals(experiment, self.record, self.chain)
        self.marks = self.seals.marks
        self.contamination = ContaminationWatch(experiment, run_id, lambda: self.workspace_path, self.chain)
        self.stops = Stops(experiment, run_id)
        self.ending = Ending(self.chain, self.seals, self.stops, self.contamination)

    @property
    def workspace_path(self) -> Path:
        """Where the workspace lies: outside the experiment's folder, where the first attempt laid it."""
        earlier = self.chain.view.attempts
        if earlier:  # whatever scratch a later launch names: the agent's work is there
            return Path(earlier[0].workspace)
        scratch = self.experiment_record.scratch
        folder = Path(scratch) if scratch else self.root.path / "scratch"
        return folder / self.experiment.path.name / self.run.run_id

    def work(self) -> int:
        """Runs the attempt; 0 when the run is sealed, EXIT_RESUME when another attempt must go on."""
        view = self.chain.look()
        if view.sealed is not None:
            self.seals.queue_closing()
            return 0
        if self.stops.cancelled():
            when = "before it started" if view.attempt == 0 else f"after attempt {view.attempt} had ended"
            return self.seals.without_agent(EndedBy.CANCELLED, None, f"cancelled {when}")
        # A preemption is no crash: it may come as often as the scheduler likes, and the budget bounds the run.
        crashes = view.attempt - sum(e.reason.startswith(BY_SIGNAL) for e in view.ended)
        if crashes >= self.experiment_record.spec.attempts:
            last = (
                view.ended[-1].reason if any(e.attempt == view.attempt for e in view.ended) else "killed without a word"
            )
            reason = f"{crashes} attempts ended without a seal; the last one: {last}"
            return self.seals.without_agent(EndedBy.CRASHED, Fault.CLUSTER, reason)
        self.stops.listen()
        # First the entry, then the killing: an older supervisor whose agent we end must know that it was not the end.
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
        if self.chain.look().sealed is not None:  # while this attempt began: the older one can't queue what comes next
            self.seals.queue_closing()
            raise Superseded
        task, agent = self._load_parts()
        self.stops.patiently(lambda: laying.lay_folders(self.workspace_path, self.root, self.record), is_cluster_error)
        atomic.write_json(self.run.workspace_link, {"schema_version": 1, "workspace": str(self.workspace_path)})
        base = self.stops.patiently(lambda: staged_base_model(self.root, self.record), is_cluster_error)
        workspace = workspaces.Workspace(self.workspace_path)
        answers = Answers(self.record, self.experiment.baselines, workspace)
        meta = {**laying.run_meta(self.record), "start_time": int(time.time()), "attempt": clock.attempt}
        intake = Intake(self.experiment, self.record, workspace, base, clock, self.chain, answers)
        intake.recover()
        for earlier in self.chain.look().ended:
            if earlier.agent_ended is not None:
                return self.ending.finish(earlier.agent_ended, earlier.exit_code, clock, intake)
        limits = Limits(clock, self.seals.driver_use)
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
        """The agent in its sandbox, with bridge and gateway, to its end in this attempt."""
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
            # Of this attempt: an older supervisor that cleans up must not end the newer one's agent.
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
        """Waits for a driver that is served here, before the clock starts; False if this attempt is to end meanwhile."""
        name = self.record.science.driver
        spec = self.experiment_record.spec.driver(name)
        if spec is None or spec.kind != "vllm":
            return True
        stop = lambda: self.stops.asked or self.stops.cancelled()  # noqa: E731
        return wait_ready(self.experiment, name, spec, stop) is not None

    def _open_gateway(self, sandbox: Confinement, clock: BudgetClock, stack: contextlib.ExitStack) -> Gateway | None:
        """The way to the driver; None: the run has none, or its agent may not reach it."""
        name = self.record.science.driver
        spec = self.experiment_record.spec.driver(name)
        if spec is None or self.record.science.network is Network.NONE:
            return None
        gateway = Gateway(self.experiment, self.run, name, spec, clock, sandbox.driver_socket)
        stack.callback(gateway.end)
        gateway.start()
        return gateway

    def _limits(self, clock: BudgetClock, gateway: Gateway | None) -> Limits:
        submissions = lambda: len(self.chain.view.contents())  # noqa: E731
        if gateway is None:
            return Limits(clock, submissions=submissions)
        return Limits(clock, gateway.use, lambda: gateway.exhausted, submissions)

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
    """The payload of an agent job."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    deny_inspection()
    return Supervisor(experiment, run_id).work()
