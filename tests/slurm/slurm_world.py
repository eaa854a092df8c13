"""An experiment on a real Slurm: a root folder, a profile of the test's own, the suite's commands, and what must hold at the end."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from helpers import SLURM_PATIENCE_S, Cluster, alive, wait_for

from autorl_hpc.cluster.job_table import read_seen, read_submitted
from autorl_hpc.evidence.verify import verify_paths
from autorl_hpc.files import reading
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.queue import claimed_entries, waiting
from autorl_hpc.records.cluster import SlurmJobs
from autorl_hpc.records.entries import AttemptEnded, SandboxUsed, Sealed
from autorl_hpc.states import EndedBy

if TYPE_CHECKING:
    from conftest import Sandbox

PROFILE: dict[str, Any] = {
    "name": "test",
    "partition": "gpu",
    "signal_before_end": "10s",
    "agent": {"gpus": 1, "cpus": 1, "memory": "1G"},
    "grader": {"gpus": 1, "cpus": 1, "memory": "2G"},
    "report": {"partition": "cpu", "cpus": 1, "memory": "512M"},
}

BEATS = r"""#!/usr/bin/env bash
cd "$WORKSPACE"
echo "attempt $AUTORL_ATTEMPT" >> output/attempts
exec python3 -c '
import os, time
with open("output/beats-" + os.environ["AUTORL_ATTEMPT"], "a", buffering=1) as file:
    while not os.path.exists("code/over"):
        file.write(f"{time.time()}\n")
        time.sleep(0.1)
'
"""
"""An agent that works until its budget or the test ends it (`over`) and leaves a mark ten times a second: how long it really ran."""

LONG = "1h"
"""The budget where its end is not what is tried: a slow machine or a slow Slurm must not use it up."""

SLACK_S = 6.0
"""Between an agent's last mark and the last that was noted of its time, where everything was killed; and with the marks."""

LATE_S = 30.0
"""How late a busy machine may end a budget."""

LAST_BREATH_S = 30.0
"""What was killed needs a moment on a core before it is gone. No agent of these tests ends by itself so soon."""

END_S = 90.0
"""For cancelled jobs to be gone from the queue: later tests want it empty."""

SLEEPS = '#!/usr/bin/env bash\ncd "$WORKSPACE"\necho "attempt $AUTORL_ATTEMPT" >> output/attempts\nexec sleep 600\n'
"""An agent that works for ever, and notes each of its starts."""


class World(Cluster):
    """One root and one experiment `exp` on one sandbox."""

    scheduled = True

    def __init__(self, staged: Path, tmp: Path, sandbox: Sandbox, **profile: Any) -> None:
        self.more_env: dict[str, str] = {}
        super().__init__(staged, tmp)
        self.sandbox = sandbox
        self.given = {"parallel": 2, "matrix": {"task": "mini"}}
        self.profile(**profile)
        self.mini_task()

    def profile(self, **changes: Any) -> None:
        """Writes the profile `test`; tables are merged."""
        value = {key: dict(v) if isinstance(v, dict) else v for key, v in PROFILE.items()}
        for key, change in changes.items():
            value[key] = {**value.get(key, {}), **change} if isinstance(change, dict) else change
        folder = self.root.path / "jobs" / "clusters"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "test.yaml").write_text(yaml.safe_dump(value))

    @property
    def env(self) -> dict[str, str]:  # type: ignore[override]
        return {**super().env, "SLURM_CONF": self.sandbox.env["SLURM_CONF"], **self.more_env}

    def launch(
        self,
        agents: list[str] | None = None,
        *options: str,
        check: bool = True,
        **changes: Any,
    ) -> subprocess.CompletedProcess[str]:
        """`autorl-hpc launch` of the experiment; without agents, of the file as it stands."""
        path = self.root.path / "exp.yaml"
        if agents is not None:
            grader = {
                "watch_every_s": 1,
                "stale_after_s": 3,
                "idle_exit_s": 30,
                "device": "cpu",
                **changes.pop("grader", {}),
            }
            matrix = {"task": "mini", **changes.pop("matrix", {})}
            path = self.spec(agents, matrix=matrix, grader=grader, cluster="test", **{"parallel": 2, **changes})
        return self.run("launch", str(path), *options, check=check)

    def launch_facts(self, agents: list[str] | None = None, **changes: Any) -> dict[str, Any]:
        """The same, its facts."""
        value: dict[str, Any] = json.loads(self.launch(agents, "--json", **changes).stdout)
        return value

    @property
    def runs(self) -> list[str]:
        return list(json.loads((self.experiment.path / "experiment.json").read_text())["runs"])

    @property
    def submitted(self) -> SlurmJobs:
        jobs = read_submitted(self.experiment)
        assert jobs is not None
        return jobs

    def names(self) -> str:
        return ",".join(sorted({job.name for job in self.submitted.submitted}))

    def queue(self, states: str = "all") -> dict[str, str]:
        """State by job id of the experiment's jobs."""
        argv = ("squeue", "-r", "-h", f"--states={states}", f"--name={self.names()}", "-o", "%i|%T")
        return dict(line.split("|") for line in self.sandbox.client(*argv).stdout.split())

    def alive_jobs(self) -> list[str]:
        return [f"{job} {state}" for job, state in self.queue("PD,R,CG,S,CF").items()]

    def job_of(self, role: str, index: int | None = None, link: int = 1) -> str:
        """The number of the last job of a role, as people write it."""
        of_role = [job for job in self.submitted.submitted if job.role == role and job.link == link]
        assert of_role and of_role[-1].job_id is not None
        return of_role[-1].job_id if index is None else f"{of_role[-1].job_id}_{index}"

    def wait_over(self, patience_s: float = SLURM_PATIENCE_S) -> None:
        """Until every run is closed and no job is left."""
        self.until(lambda: self.finished(self.runs), "all runs to be closed", patience_s=patience_s)
        self.until(lambda: not self.alive_jobs(), "no job to be left")

    def wait_agent(self, run_id: str, attempt: int = 1) -> None:
        """Until the agent of an attempt has begun."""
        path = self.workspace(run_id) / "output" / "attempts"
        self.until(
            lambda: path.exists() and f"attempt {attempt}\n" in path.read_text(),
            f"attempt {attempt} of {run_id}",
        )

    @contextmanager
    def recovery(self, fault: str) -> Iterator[None]:
        """How long the suite took to get over a fault; $AUTORL_FAULT_TIMES names a file that collects it."""
        started = time.monotonic()
        yield
        if path := os.environ.get("AUTORL_FAULT_TIMES"):
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{fault}\t{time.monotonic() - started:.1f}\n")

    def seen(self, role: str) -> list[str]:
        """States of a role's jobs as the watcher noted them."""
        return [job.state for job in read_seen(self.experiment).jobs if f".{role}" in job.name]

    def elapsed_s(self, run_id: str) -> float:
        """The budget that the clock shows."""
        clock = reading.read_json_or_none(self.run_dir(run_id).clock)
        return float(clock["elapsed_s"]) if clock else 0.0

    def over(self, run_id: str) -> None:
        """Tells the agent BEATS to end."""
        (self.workspace(run_id) / "code" / "over").touch()

    def _beats(self, run_id: str) -> dict[int, list[float]]:
        """The marks of BEATS by attempt; one that is being written is left out."""
        paths = (self.workspace(run_id) / "output").glob("beats-*")
        lines = {int(path.name.partition("-")[2]): path.read_text().rpartition("\n")[0] for path in paths}
        return {attempt: [float(line) for line in text.split()] for attempt, text in lines.items()}

    def really_ran_s(self, run_id: str) -> float:
        """How long the agents of BEATS ran, over all attempts."""
        return sum(times[-1] - times[0] for times in self._beats(run_id).values() if times)

    def _could_be_charged_s(self, run_id: str) -> float:
        """The most that the agents of BEATS may have cost, over all attempts: each from the entry right before its clock began to
        the entry of its end, or to its last mark where it left none. However slow the machine, no time between two attempts is in it.
        """
        began: dict[int, float] = {}
        ended: dict[int, float] = {}
        for linked in Ledger(self.run_dir(run_id)).read():
            at = dt.datetime.fromisoformat(linked.entry.at).timestamp()
            if isinstance(linked.body, SandboxUsed):
                began[linked.body.attempt] = at
            elif isinstance(linked.body, AttemptEnded):
                ended[linked.body.attempt] = at
            elif isinstance(linked.body, Sealed) and linked.body.ended_by in (EndedBy.BUDGET, EndedBy.AGENT_EXIT):
                ended.setdefault(max(began), at)  # by the attempt's own supervisor
        last = {attempt: times[-1] for attempt, times in self._beats(run_id).items() if times} | ended
        return sum(last.get(attempt, at) - at for attempt, at in began.items())

    def assert_budget(self, run_id: str) -> None:
        """What was charged is what the agent really ran. A second attempt that began at nothing is less, a queue that was charged
        is more."""
        sealed = self.view(run_id).sealed
        assert sealed is not None
        ran_s, most_s = self.really_ran_s(run_id), self._could_be_charged_s(run_id)
        told = f"charged {sealed.elapsed_s}, ran {ran_s}, {most_s} at most\n{self.story()}"
        assert ran_s - SLACK_S < sealed.elapsed_s < most_s + SLACK_S, told

    def assert_used_up(self, run_id: str, budget_s: float) -> None:
        """The agent had its whole budget, over all attempts, and not another one."""
        sealed = self.view(run_id).sealed
        assert sealed is not None and sealed.ended_by is EndedBy.BUDGET, sealed
        assert budget_s <= sealed.elapsed_s < budget_s + LATE_S, sealed
        self.assert_budget(run_id)

    def assert_no_process(self) -> None:
        """Nothing that works on this root is left."""
        self.until(lambda: not self.processes_here(), "the last process to be gone", patience_s=LAST_BREATH_S)

    def assert_whole(self, *, closed: bool = True, graders_work: bool = False) -> None:
        """Ledgers whole, nothing lost, nothing twice, nothing left behind."""
        for result in verify_paths([self.experiment.path]):
            assert result.whole, (result.as_dict(), self.story())
        for run_id in self.runs:
            view = self.view(run_id)
            kinds = [json.loads(path.read_text()) for path in sorted(self.run_dir(run_id).ledger.glob("0*.json"))]
            scored = [entry["body"]["submission_id"] for entry in kinds if entry["kind"] == "score"]
            assert len(scored) == len(set(scored)), f"{run_id} has a score twice"
            assert sum(entry["kind"] == "sealed" for entry in kinds) <= 1
            assert sum(entry["kind"] == "closed" for entry in kinds) <= 1
            if closed:
                assert view.closed is not None, (run_id, self.story())
                assert not view.unscored(), run_id
        if not graders_work:
            assert waiting(self.experiment.queue) == [], self.story()
            assert claimed_entries(self.experiment.claims) == {}

    def until(self, look: Callable[[], Any], what: str, *, patience_s: float = SLURM_PATIENCE_S) -> Any:
        """`wait_for` with the world's story when it fails."""
        try:
            return wait_for(look, what, patience_s=patience_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def story(self) -> str:
        """What failing tests show: the queue, the logs of the jobs."""
        logs = sorted(self.experiment.jobs.glob("*_log.out"), key=lambda path: path.stat().st_mtime)[-6:]
        text = [f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in logs]
        try:
            argv = ("squeue", "-r", "-h", "--states=all", f"--name={self.names()}", "-o", "%i %T %r %E %S")
            text.append(self.sandbox.client(*argv).stdout)
        except (AssertionError, subprocess.SubprocessError) as error:
            text.append(f"no queue: {error}")
        return "\n".join(text)

    def end(self) -> None:
        """Cancels what is left, then kills what works on this root."""
        try:
            if self.experiment.jobs.is_dir() and read_submitted(self.experiment) is not None:
                self.sandbox.client("scancel", f"--name={self.names()}", check=False)
                deadline = time.monotonic() + END_S
                while self.alive_jobs() and time.monotonic() < deadline:
                    time.sleep(0.2)
        except (AssertionError, subprocess.SubprocessError, OSError):
            pass  # a test may leave its controller dead
        super().end()


def kill(*pids: int) -> None:
    """kill -9 of all at once: none of them sees another one's end. They are gone when it returns."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    wait_for(lambda: not any(alive(pid) for pid in pids), "what was killed to be gone")


def saved_jobs(sandbox: Sandbox) -> bytes:
    """What Slurm has saved of its jobs; for a moment of each save the file has no name."""
    with suppress(FileNotFoundError):
        return (sandbox.dir / "state" / "job_state").read_bytes()
    return b""
