"""Run the agent job: `Supervisor`, the life of a run up to its seal, restarted at any time; `AgentRun`, the agent of one attempt and
what ends it; `seal_orphans`, for runs whose jobs are gone."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from autorl_hpc.agents import Agent, load_agent
from autorl_hpc.agents.definition import RESTART
from autorl_hpc.drivers.client import answers_us, forget_key, lost, wait_key, wait_ready
from autorl_hpc.errors import AutorlError, from_os_error
from autorl_hpc.files import atomic
from autorl_hpc.files.faults import is_cluster_error
from autorl_hpc.files.frozen_records import read_experiment, read_run
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.processes import deny_inspection, end_all
from autorl_hpc.files.queue import append_event, claimed_entries
from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.safe_open import Folder, read_calls
from autorl_hpc.records import readable_json
from autorl_hpc.records.entries import AttemptEnded
from autorl_hpc.records.run import RunRecord
from autorl_hpc.sandbox.sandbox_plan import carried, take_own, with_carried
from autorl_hpc.states import EXIT_RESUME, EndedBy, EntryKind, Fault, Network
from autorl_hpc.supervise import workspace as laying
from autorl_hpc.supervise.agent_keeper import AgentProcess
from autorl_hpc.supervise.attempt_ledger import LOOP_S, LedgerWriter, Seals, Stops, Superseded
from autorl_hpc.supervise.bridge import Bridge
from autorl_hpc.supervise.budget import BudgetClock, BudgetLimits, Waits, gpu_models, gpus_of_job, last_words
from autorl_hpc.supervise.children import GatewayProcess, RecorderProcess
from autorl_hpc.supervise.confine import Confinement, note_torch, note_version
from autorl_hpc.supervise.contamination import ContaminationWatch
from autorl_hpc.supervise.intake import Intake, ResultWriter
from autorl_hpc.supervise.lint import BaseModel, staged_base_model
from autorl_hpc.supervise.usage_watch import UsageWatch
from autorl_hpc.tasks.loader import Task, load_task

log = logging.getLogger("autorl_hpc.supervisor")

LOOK_S = 0.5  # how often the ledger and the cancel folder are read
TELL_TIME_S = 5.0
STOP_GRACE_S = 5.0
BY_SIGNAL = "signal "
LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # after all the time that `Stops.patiently` waits they don't pass
MOST_NOTED = 20  # deaths of an attempt's forwarder that are written as events
START = 's=$AUTORL_SCRIPT; unset AUTORL_SCRIPT; BASH_ARGV0=$s; [ "$0" = "$s" ] || exec bash "$s"; . "$s"'
"""Runs the agent's script with its own path as $0, and a command line without agent, task and path: an agent's `pkill -f sft` or
`-f train` would end its own script. Before bash 5, which can't set $0, the path stands there."""


@dataclass(frozen=True)
class WorkEnd:
    """How an agent's work in one attempt ended."""

    ended_by: EndedBy | None  # None for a signal or a newer attempt
    exit_code: int | None  # of its last start
    started: bool = True
    excess: str | None = None  # which limit it exceeded at one moment (memory, disk, processes); None if none
    trouble: str | None = None  # of workspace, gateway or driver, in which it ended; None if none


@dataclass
class AgentRun:
    """Runs the agent of one attempt over all its starts. `argv`: returns a command as it runs in the sandbox."""

    experiment: ExperimentDir
    record: RunRecord
    agent: Agent
    workspace: Path
    argv: Callable[[Sequence[str]], list[str]]
    env: dict[str, str]
    mark: str  # marks the processes of this attempt
    stops: Stops
    limits: BudgetLimits
    intake: Intake
    gateway: GatewayProcess | None
    seals: Seals
    prompts: laying.Prompts
    last: bool  # no attempt comes after this one
    look_s: float = LOOK_S
    _next_look: float = field(default=0.0, init=False)
    _next_tell: float = field(default=0.0, init=False)
    _closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.run, self.clock = self.experiment.run(self.record.run_id), self.limits.clock
        self._folder = Folder.open(self.workspace)
        self._waits = Waits(self.clock.budget.give_back_after_s)
        self._ending = threading.Event()

    def work(self) -> WorkEnd:
        """Run the agent to the end of its last process. Raises Superseded: a newer attempt began meanwhile."""
        self._cancelled_now()
        if self.stops.superseded.is_set():
            raise Superseded
        self.clock.start()
        try:
            end = self._once(laying.INTERRUPTED if self.seals.had_begun(self.clock.attempt) else None)
            while self._goes_on(end):
                self.clock.note(reprompts=self.clock.progress.reprompts + 1)
                append_event(self.run.events, "reprompted", number=self.clock.progress.reprompts)
                self.clock.resume()
                end = self._once(laying.ENDED_EARLY)
            return end
        finally:
            self.clock.stop(persist=not self.stops.superseded.is_set())

    def _goes_on(self, end: WorkEnd) -> bool:
        if end.ended_by is not EndedBy.AGENT_EXIT or not end.started or end.trouble is not None:
            return False
        if self.clock.progress.reprompts >= self.record.science.reprompts or self._cancelled_now() or self.stops.asked:
            return False  # a newer attempt may have ended our agent
        self.limits.look()
        return self.limits.out_of is None

    def _once(self, again: str | None) -> WorkEnd:
        """Start the agent once and wait for its end. `again`: the reason for a restart; None for the first start."""
        clock, file, events = self.clock, self.agent.file, self.run.events
        clock.note(exit_codes=(*clock.progress.exit_codes, None))
        number = clock.progress.starts
        clock.persist()
        self._tell()
        script = self.agent.script(again=again is not None)
        prompt = None
        if file.prompt:
            goes_on = file.resume != RESTART
            prompt = self.prompts.first() if again is None else self.prompts.again(again, goes_on=goes_on)
        begin = {"attempt": clock.attempt, "elapsed_s": clock.elapsed_s, "start": number, "script": script}
        append_event(events, "agent_started", **begin)
        path = self.workspace / ".agent" / self.agent.name / script
        process = AgentProcess(
            self.argv(["bash", "-c", START]),
            {**self.env, "AUTORL_START": str(number), "AUTORL_SCRIPT": str(path)},
            *(self.workspace, self.run.agent_log, self.mark),
            *(self.seals.elapsed_file(clock.attempt), clock.elapsed_s),
            suspension_s=clock.suspension_s,
            prompt=prompt,
        )
        usage = UsageWatch(clock.budget, process.keeper_pid, self.mark, self.workspace, self.run.agent_log)
        usage.start()
        recording = RecorderProcess(self.run, self.workspace, clock, process.keeper_pid, self.mark, file.trace)
        recording.start()
        self.intake.ask_revision = recording.ask
        self._ending.clear()
        taker = threading.Thread(target=self._take_in, name="intake", daemon=True)
        taker.start()
        try:
            ended_by = self.until_end(process, usage)
            process.stop(0.0 if not process.running() else STOP_GRACE_S)
            agent = process.finish()
        finally:
            if process.running():
                process.stop(0.0)
                process.finish(5.0)
            usage.end()
            self._ending.set()
            taker.join()  # before the recorder: what is submitted last refers to the code's last revision
            clock.pause()
            recording.end()
        if ended_by is EndedBy.AGENT_EXIT and self.stops.ended_agent(agent.exit_code):
            ended_by = None
        clock.note(exit_codes=(*clock.progress.exit_codes[:-1], agent.exit_code))
        end = {"exit_code": agent.exit_code, "elapsed_s": clock.elapsed_s, "left": agent.left, "start": number}
        append_event(events, "agent_ended", ended_by=ended_by, **end)
        excess = None if usage.excess is None else usage.excess.reason
        trouble = self._trouble(agent.exit_code, ended_by)
        return WorkEnd(ended_by, agent.exit_code, agent.started, excess, trouble)

    def _trouble(self, exit_code: int | None, ended_by: EndedBy | None) -> str | None:
        try:
            laying.try_writing(self._folder)
        except OSError as error:  # an agent that ended well with a submission was not in its way
            if is_cluster_error(error) and (exit_code != 0 or not self.intake.chain.view.accepted()):
                return from_os_error(error, "writing into the workspace", self.workspace).what
        if self.gateway is None or self.gateway.deaf:
            return None if self.gateway is None else "the gateway was dead"
        calls, clock, gateway = read_calls(self.run.driver_log), self.clock, self.gateway
        exited, answers = ended_by is EndedBy.AGENT_EXIT, None
        if exited or ended_by in (EndedBy.BUDGET, EndedBy.GPU_HOURS):
            dialect = "any" if self.agent.file.driver is None else self.agent.file.driver.dialect
            answers = functools.partial(answers_us, self.experiment, gateway.driver, gateway.spec, dialect)
        again = exited and not self.last
        return lost(calls, clock.attempt, clock.elapsed_s, exited=exited, answers=answers, again=again)

    def until_end(self, process: AgentProcess, usage: UsageWatch) -> EndedBy | None:
        """Wait until something ends this start of the agent. Return None for a signal or a newer attempt."""
        while not self.stops.asked:
            if not process.running():
                # Many exit as soon as their driver refuses, so the budget is read again.
                if self.limits.out_of is None:
                    if self.gateway is not None:
                        self.gateway.hear_out()
                    self._warn()
                return self.limits.out_of or EndedBy.AGENT_EXIT
            self._warn()
            if (over := self.limits.over) is not None:
                return over
            if usage.excess is not None:
                return usage.excess.ended_by
            if os.fstat(self._folder.fd).st_nlink == 0:
                raise _deleted(self.workspace)
            now = time.monotonic()
            if now >= self._next_look:
                self._next_look = now + self.look_s
                if self._cancelled_now():
                    return EndedBy.CANCELLED
            if now >= self._next_tell:
                self._tell()
            time.sleep(LOOP_S)
        return None

    def _cancelled_now(self) -> bool:
        """Read the ledger now. Return whether the user cancelled the run; a newer attempt sets `stops.superseded`."""
        try:
            view = self.intake.chain.look()
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

    def _give_back(self, view: RunView) -> None:
        pending = {f"f-{self.run.run_id}--{s.submission_id:06d}" for s in view.unscored()}
        claimed = set(claimed_entries(self.experiment.claims)) if pending else set()
        given_s = self.clock.give_back(self._waits.look(pending, claimed))
        if given_s > 0:
            append_event(self.run.events, "given_back", seconds=round(given_s, 3), waiting=len(pending))

    def _warn(self) -> None:
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
            self._tell()

    def _tell(self) -> None:
        self._next_tell = time.monotonic() + TELL_TIME_S
        self._folder.write("time.json", readable_json(self.limits.told()))
        if self.gateway is not None:
            self.gateway.tell_again()
        if (text := self.limits.log()) is not None:
            self._folder.write("budget.log", text.encode("utf-8", "backslashreplace"))

    def _take_in(self) -> None:
        while not self._ending.is_set():
            try:
                if self.intake.poll():
                    continue
            except Superseded:
                self.stops.superseded.set()
                return
            except Exception:  # intake must survive a defect: the next manifest may work
                log.exception("intake failed")
            self._ending.wait(0.2)


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
        crashes = _begun_by_crashes(view)
        if crashes >= self.spec.attempts:
            ended = [e.reason for e in view.ended if e.attempt == view.attempt]
            last = ended[-1] if ended else "killed without a word"
            reason = f"{crashes} attempts ended without a seal; the last one: {last}"
            return self.seals.without_agent(EndedBy.CRASHED, Fault.CLUSTER, reason)
        self.stops.listen()
        # The entry comes before the kill, so that an older supervisor sees that its agent did not end by itself.
        gpus = gpus_of_job()
        models = gpu_models() if gpus else None
        attempt = self.chain.begin(self.seals.used_so_far(view).elapsed_s, str(self.workspace), gpus, models)
        left_over = end_all(os.getpid(), self.seals.marks)
        if left_over:
            log.warning("processes of an earlier attempt could not be ended: %s", sorted(left_over))
        used, budget = self.seals.used_so_far(view), self.record.science.budget
        note = self.seals.elapsed_file(attempt)
        clock = BudgetClock(self.run.clock, budget, attempt, used, gpus=gpus, note=note)
        try:
            return self._attempt(clock)
        except Superseded:
            log.warning("a newer attempt of this run has begun, or it was sealed elsewhere: stepping back")
            return 0
        except (AutorlError, OSError) as error:
            log.error("attempt %d failed: %s", attempt, error)
            if isinstance(error, OSError):
                passes = is_cluster_error(error) and error.errno not in LASTING
                # Names by descriptor are below it.
                where = self.workspace / (error.filename if isinstance(error.filename, str) else "")
                error = from_os_error(error, "this attempt", where)
            else:
                passes = error.passes
            if passes:
                return self._interrupt(clock, error.what[:500])
            reason = f"{error.what} ({error.where}); {error.next_step}"
            return self.seals.without_agent(EndedBy.CRASHED, Fault.CLUSTER, reason[:500])

    def _attempt(self, clock: BudgetClock) -> int:
        if self.chain.look().sealed is not None:  # an older attempt sealed it, but can't queue what comes next
            self.seals.queue_closing()
            raise Superseded
        task, agent = load_task(self.record.science.task), load_agent(self.record.science.agent)
        if (task.hash(), agent.hash()) != (self.record.task_hash, self.record.agent_hash):
            what = "the task or the agent that this job found is not the one that run.json names"
            advice = "launch again: jobs run the frozen code of the experiment"
            raise AutorlError(what, where=agent.folder, fault=Fault.CLUSTER, next_step=advice)
        if self.seals.had_begun(clock.attempt) and not self.workspace.is_dir():
            raise _deleted(self.workspace)
        path, patiently = self.workspace, functools.partial(self.stops.patiently, may_pass=is_cluster_error)
        patiently(lambda: laying.lay_folders(path, self.root, self.record))
        atomic.write_json(self.run.workspace_link, {"schema_version": 1, "workspace": str(path)})
        intake = self.intake(patiently(lambda: staged_base_model(self.root, self.record)), clock)
        for earlier in self.chain.look().ended:
            if earlier.agent_ended is not None:
                return self._finish(WorkEnd(earlier.agent_ended, earlier.exit_code), clock, intake)
        limits = BudgetLimits(clock, self.seals.driver_use)
        if clock.left_s <= 0:
            limits.look()
        if (over := limits.over) is not None:  # the attempt before was cut off in its last grace
            return self._finish(WorkEnd(over, next(reversed(clock.progress.exit_codes), None)), clock, intake)
        name = self.record.science.driver
        driver = None if self.record.science.network is Network.NONE else self.spec.driver(name)
        if driver is not None:  # before the clock starts
            stop = lambda: self.stops.asked or self.stops.cancelled()  # noqa: E731
            if driver.kind == "vllm":
                there = wait_ready(self.experiment, name, driver, stop) is not None
            else:
                dialect = "any" if agent.file.driver is None else agent.file.driver.dialect
                there = wait_key(self.experiment, name, driver, dialect, stop)
            if not there:
                by = self.stops.signal
                return self._interrupt(clock, f"{BY_SIGNAL}{by}" if by else "cancelled while the driver was waited for")
        end = self._run_agent(task, agent, clock, intake)
        if not end.started:
            if not self.workspace.is_dir():
                raise _deleted(self.workspace)
            what = "the agent's process could not be started"
            raise AutorlError(what, where=agent.folder, fault=Fault.CLUSTER, passes=True)
        if self.stops.superseded.is_set():
            raise Superseded
        if end.ended_by is None:
            return self._interrupt(clock, f"{BY_SIGNAL}{self.stops.signal}")
        if end.ended_by is EndedBy.AGENT_EXIT and end.trouble is not None:  # no fault of the agent: it works again
            if driver is not None and driver.kind == "api":
                forget_key(self.experiment, name)
            return self._interrupt(clock, end.trouble)
        return self._finish(end, clock, intake)

    def intake(self, base: BaseModel, clock: BudgetClock) -> Intake:
        """Return the intake of this run, with what a killed attempt left repaired."""
        answers = ResultWriter(self.record, self.experiment.baselines, self.workspace)
        intake = Intake(self.experiment, self.record, base, clock, self.chain, answers)
        intake.recover()
        return intake

    def _run_agent(self, task: Task, agent: Agent, clock: BudgetClock, intake: Intake) -> WorkEnd:
        """Run the agent in its sandbox, with bridge and gateway, to its end in this attempt."""
        record, file, path = self.record, agent.file, self.workspace
        venv, image = laying.environment_of(self.root, record)
        meta = {**laying.run_meta(record), "start_time": int(time.time()), "attempt": clock.attempt}
        with contextlib.ExitStack() as stack:
            sandbox = Confinement(self.root, self.experiment, record, self.spec, path, venv, image)
            stack.callback(sandbox.close)
            limits = BudgetLimits(clock, submissions=lambda: len(self.chain.view.contents()))
            name, gateway, ways = record.science.driver, None, {}
            if (spec := self.spec.driver(name)) is not None and record.science.network is not Network.NONE:
                gateway = GatewayProcess(self.experiment, self.run, name, spec, clock, sandbox.driver_socket)
                stack.callback(gateway.end)
                gateway.start()
                limits.use, limits.exhausted = gateway.use, lambda: gateway.exhausted
                ways = laying.driver_environment(spec, gateway.url, gateway.token)
            noted = iter(range(MOST_NOTED))  # the agent can say it too, as often as it likes

            def died() -> None:
                if (number := next(noted, None)) is not None:
                    append_event(self.run.events, "forwarder_died", attempt=clock.attempt, number=number + 1)

            bridge = Bridge(intake.answers, meta, limits.told, sandbox.socket, died)
            stack.callback(bridge.stop)
            bridge.start()
            # Marked per attempt: an older supervisor that cleans up must not end the newer one's agent.
            mark, readable = f"{self.seals.marks}{clock.attempt}.", self.spec.sandbox.readable
            profile = self.experiment_record.cluster
            site = () if profile is None else profile.agent_variables
            env = laying.agent_environment(record, file, path, bridge.url, mark, clock.attempt, venv, readable, site)
            env.update(ways)
            own = take_own(env, file.env)
            if "PYTHONPATH" in file.env:  # the definition's folders stand behind ours, and begin inside too
                own["PYTHONPATH"] = env.pop("PYTHONPATH")
            plain = {name: value for name, value in env.items() if name not in {*ways, *file.secrets, "PYTHONPATH"}}
            plain |= carried({name: file.env[name] for name in own})
            env |= carried(own)
            driver_port = None if gateway is None else gateway.port
            used = sandbox.choose(bridge.port, env, clock.attempt, driver_port=driver_port)
            self.chain.write(EntryKind.SANDBOX, used)
            prompts = laying.Prompts(record, path, limits, lambda: self.chain.view)
            prompt = prompts.first() if file.prompt else None
            lay = functools.partial(laying.lay, path, self.root, record, task, agent, sandbox.placing, prompt)
            self.stops.patiently(lay, is_cluster_error)
            Folder.open(path).write("run_meta.json", readable_json(meta))

            def inside(command: Sequence[str]) -> list[str]:
                return sandbox.argv(with_carried(command) if own else command)

            asked = (clock.attempt, inside, plain, mark, lambda: self.stops.asked)
            note_version(self.run.events, agent, *asked)
            if why := note_torch(self.run.events, clock.gpus, *asked):
                log.warning("%s", why)
            self.contamination.start()
            last = _begun_by_crashes(self.chain.view) >= self.spec.attempts
            parts = (self.stops, limits, intake, gateway, self.seals, prompts, last)
            return AgentRun(self.experiment, record, agent, path, inside, env, mark, *parts).work()

    def _finish(self, end: WorkEnd, clock: BudgetClock, intake: Intake) -> int:
        """Take in the last manifests and seal the run; after a signal, leave the rest to the next attempt. Return the exit code."""
        stops, seals, ended_by, exit_code = self.stops, self.seals, end.ended_by, end.exit_code
        assert ended_by is not None
        stops.patiently(lambda: intake.poll(patient=False, stop=lambda: stops.signal is not None or stops.cancelled()))
        if stops.signal is not None and intake.left():
            return self._interrupt(clock, f"{BY_SIGNAL}{stops.signal}", ended_by, exit_code)
        self.contamination.finish(stop=lambda: stops.signal is not None)
        accepted = stops.patiently(self.chain.look).accepted()
        fault, reason = (None if end.excess is None else Fault.AGENT), end.excess
        if ended_by in (EndedBy.GPU_HOURS, EndedBy.TOKENS, EndedBy.COST):  # no fault, as for wall-clock time
            reason = BudgetLimits(clock).reason
        if end.trouble is not None and ended_by in (EndedBy.BUDGET, EndedBy.GPU_HOURS):
            fault, reason = Fault.CLUSTER, end.trouble
        if exit_code != 0 and ended_by is EndedBy.AGENT_EXIT:  # other endings are caused by our own TERM
            fault, reason = Fault.AGENT, f"the agent exited with code {exit_code}"
            with contextlib.suppress(TypeError, ValueError):
                name = Signals(exit_code - 128 if exit_code > 128 else -exit_code).name  # type: ignore[operator]
                reason += f": something ended it by {name}, such as its own `kill` or `pkill`"
            if exit_code is None:
                reason = "the agent's keeper was killed, so the agent was ended; it left no exit code"
        told: dict[str, Any] = {"driver": stops.patiently(seals.driver_use), "exit_code": exit_code, "reason": reason}
        told |= {"refused_unrecorded": intake.refused_unrecorded, "fault": None if accepted else fault}
        stops.patiently(lambda: seals.seal(ended_by, clock.used, **told))
        stops.patiently(seals.queue_closing)
        intake.answers.update(self.chain.look())
        return 0

    def _interrupt(
        self, clock: BudgetClock, reason: str, agent_ended: EndedBy | None = None, exit_code: int | None = None
    ) -> int:
        """Record that this attempt ended without a seal, so that the next one continues; return the job's exit code."""
        where = {"attempt": clock.attempt, "elapsed_s": clock.elapsed_s, "reason": reason}
        try:
            ended = AttemptEnded(**where, agent_ended=agent_ended, exit_code=exit_code)
            self.chain.write(EntryKind.ATTEMPT_ENDED, ended)
        except Superseded:
            return 0
        except (AutorlError, OSError) as error:
            log.error("the end of attempt %d could not be recorded: %s", clock.attempt, error)
        return EXIT_RESUME


def _deleted(workspace: Path) -> AutorlError:
    what = "the run's workspace was deleted, with what the agent had made and not submitted"
    advice = "keep scratch until a run is closed: look for a purge of old files there, and name another `scratch` in the cluster's profile; then launch the run as another seed"
    return AutorlError(what, where=workspace, fault=Fault.CLUSTER, next_step=advice)


def run_agent_job(experiment: ExperimentDir, run_id: str) -> int:
    """Run an agent job. Return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    deny_inspection()
    try:
        return Supervisor(experiment, run_id).work()
    except Superseded:  # by an attempt that began at the same moment
        log.warning("a newer attempt of this run has begun: stepping back")
        return 0


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
    view, record = gone.chain.look(), gone.record
    if view.sealed is not None:
        gone.seals.queue_closing()
        return
    gone.chain.attempt = view.attempt
    if view.attempts and gone.workspace.is_dir():
        try:
            clock = BudgetClock(gone.run.clock, record.science.budget, view.attempt, gone.seals.used_so_far(view))
            gone.intake(staged_base_model(gone.root, record), clock).poll(patient=False)
        except (AutorlError, OSError, Superseded) as error:
            log.warning("what %s had dropped last can't be taken in: %s", record.run_id, error)
    if ended_by is EndedBy.CRASHED and gone.stops.cancelled():
        # `cancel` removed its job, so the scheduler did not lose it.
        ended_by, fault, reason = EndedBy.CANCELLED, None, f"cancelled; {reason}"
    gone.seals.without_agent(ended_by, fault, reason)


def _begun_by_crashes(view: RunView) -> int:
    """Return how many attempts began but those that a signal ended: a preemption is no crash, it may happen any number of times, and the
    budget limits the run."""
    return view.attempt - sum(ended.reason.startswith(BY_SIGNAL) for ended in view.ended)
