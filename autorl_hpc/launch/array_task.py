"""One task of a Slurm array of agents: restarts its run's supervisor after a crash; in `placement: step` also a grader.
USR2 or TERM stops the agent: at the time limit the task ends with success, for the next link to start; before a
preemption it waits to be killed, since only a killed job is requeued."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from dataclasses import dataclass

from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.job_table import read_submitted
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import queue as queues
from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import read_experiment
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.run_view import RunView
from autorl_hpc.launch.jobs import EARLY_S
from autorl_hpc.launch.local import BEAT_LOOK_S, GraderKeeper, Stopping
from autorl_hpc.records.cluster import ClusterProfile, Submitted
from autorl_hpc.records.run import ExperimentRecord
from autorl_hpc.states import EXIT_RESUME, Fault, JobState, job_state

log = logging.getLogger("autorl_hpc.jobs")

CRASH_PAUSE_S = 2.0
MAX_CRASH_PAUSE_S = 60.0
CRASHES_BEFORE_LEAVING = 6  # supervisors in one job that may fail before they begin an attempt, which `attempts` counts
KILL_WAIT_S = 300.0  # how long a task waits to be killed after a warning: sites grant a few minutes at most
LOOK_S = 30.0
FINISH_S = 60.0
POLL_S = 0.2


@dataclass
class ArrayTask:
    """One task of an array."""

    experiment: ExperimentDir
    record: ExperimentRecord
    profile: ClusterProfile
    submitted: Submitted
    run_id: str
    stopping: Stopping
    _grader: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self._keeper = GraderKeeper(self.experiment, self.stopping)

    def work(self) -> int:
        """Work until the run no longer needs this job or the job ends; return the exit code."""
        crashes = 0
        while not self._served():
            self._keep_grader()
            child = self.stopping.start("agent", str(self.experiment.path), self.run_id, env=self._gpus()[0])
            code = self._wait(child)
            if code == 0 and not self.stopping.asked:
                self._wait_for_closing()
            if self.stopping.asked:
                if self._served():
                    break
                if self._is_over():
                    # 0 if a later link does the rest, because only then it starts at once
                    return self._end(EXIT_RESUME if self.submitted.last_link else 0)
                self.stopping.asked = 0
                continue
            if code == 0:  # sealed, or a newer attempt has taken over
                break
            crashes = crashes + 1 if code != EXIT_RESUME else 0
            if crashes >= CRASHES_BEFORE_LEAVING:
                log.error("%d supervisors failed in a row, the last with %s: leaving this job", crashes, code)
                return self._end(code if 0 < code < 128 else int(Exit.FAILED))
            self.stopping.sleep(min(MAX_CRASH_PAUSE_S, CRASH_PAUSE_S * 2 ** max(0, crashes - 1)))
        return self._end(0)

    def _served(self) -> bool:
        """Return whether this task has nothing left to do: the run is sealed, or closed if a grader is in this job."""
        if self.run_id in reading.list_names(self.experiment.finished):
            return True
        if self._step:
            return False
        try:
            return RunView.of(Ledger(self.experiment.run(self.run_id)).read()).sealed is not None
        except (AutorlError, OSError):
            return False  # the supervisor reports what is wrong

    @property
    def _step(self) -> bool:
        return self.record.grader.placement == "step"

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        while True:
            try:
                code = child.wait(timeout=BEAT_LOOK_S)
            except subprocess.TimeoutExpired:
                self._keep_grader()
                continue
            self.stopping.children.remove(child)
            return code

    def _wait_for_closing(self) -> None:
        """In `placement: step`, wait until the sealed run is closed, by this grader or another one."""
        while self._step and not self.stopping.asked and not self._served():
            self._keep_grader()
            self.stopping.sleep(CRASH_PAUSE_S)

    def _keep_grader(self) -> None:
        """In `placement: step`, start the grader, or restart it if it ended or hangs."""
        if not self._step or self.stopping.asked:
            return
        if self._grader is not None:
            if self._grader.poll() is None and not self._keeper.end_if_hung(self._grader):
                return
            self._grader.wait()
            self.stopping.children.remove(self._grader)
        self._grader = self.stopping.start("grader", str(self.experiment.path), "step", env=self._gpus()[1])

    def _end(self, code: int) -> int:
        """End the grader and return the code; after success it clears the queue first."""
        deadline = time.monotonic() + FINISH_S
        while code == 0 and self._grader is not None and self._grader.poll() is None and not self.stopping.asked:
            over = set(self.record.runs) <= set(reading.list_names(self.experiment.finished))
            mine = any(queues.run_of(name) == self.run_id for name in queues.waiting(self.experiment.queue))
            if time.monotonic() > deadline or not (over or mine):
                break
            time.sleep(POLL_S)
        self._end_grader()
        return code

    def _end_grader(self) -> None:
        if self._grader is not None:
            self._grader.send_signal(signal.SIGTERM)
            self._grader.wait()

    def _is_over(self) -> bool:
        """Return whether this job ends after a signal. Waits for a preemption's kill; False if none comes."""
        self._end_grader()
        deadline = time.monotonic() + KILL_WAIT_S
        while time.monotonic() < deadline:
            own = slurm.own_job()
            if own is not None:
                state, left_s = own
                near_end_s = self.profile.signal_before_end_s + EARLY_S + LOOK_S
                ours = job_state(state)
                if ours.over or ours is JobState.WAITING or "COMPLETING" in state:
                    return True
                if left_s is not None and left_s <= near_end_s:
                    log.info("the time limit is near: ending, another link goes on")
                    return True
            log.info("told to stop with time left (job is %s): waiting to be put back in line", own)
            time.sleep(LOOK_S)
        log.warning("told to stop, and nothing came of it in %.0f s: going on", KILL_WAIT_S)
        return False

    def _gpus(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return environments with the agent's and the grader's share of this job's GPUs, as the scheduler named them."""
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        mine = self.profile.agent.resources(self.record.spec.resources.agent).gpus or 0
        if not self._step or len(visible) <= mine:
            return {}, {}
        agent, grader = ({"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in (visible[:mine], visible[mine:]))
        return agent, grader


def run_task(experiment: ExperimentDir, number: int) -> int:
    """Work on this array task's run and return the exit code. Raises AutorlError: this is no job of that array."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stopping = Stopping(usr2=True)
    record = read_experiment(experiment)
    jobs = read_submitted(experiment)
    submitted = next((s for s in jobs.submitted if s.number == number), None) if jobs is not None else None
    index = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    if submitted is None or record.cluster is None or not index.isdigit() or int(index) >= len(submitted.runs):
        what = f"no run belongs to task {index or '(none)'} of call {number}"
        advice, code = "this is what `autorl-hpc launch` submits; it is not started by hand", Exit.ENVIRONMENT
        raise AutorlError(what, where=experiment.jobs, fault=Fault.CLUSTER, next_step=advice, exit_code=code)
    if submitted.asked_back:
        log.info("the launch that submitted this job failed and is taking it back: nothing to do")
        return 0
    return ArrayTask(experiment, record, record.cluster, submitted, submitted.runs[int(index)], stopping).work()
