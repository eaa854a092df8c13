"""The suite's processes on two nodes with a hostile file system, started over as a scheduler does, and what must hold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers import PATIENCE_S, PYTHON, VARIANTS, Cluster
from nodes import Node, ahead

from autorl_hpc.files import reading
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.states import EntryKind

START_OVER_S = 0.5
MAX_STARTS = 40
BUDGET_LATE_S = 30.0
"""How late a busy machine may end a budget: the grace of 5 s, and what the processes wait for a core."""

BUDGET_EARLY_S = 2.0

AGAIN = 'cd "$WORKSPACE"\n' + VARIANTS + 'again() { until "$@"; do sleep 0.3; done; }\n'
"""An agent on such a file system tries again, as a person would."""

TAKES_NOTE = """
submit() {  # submit N: keeps the answer once it is `accepted`
  until ./submit output/v$1 --note "$1" --timeout 30 > output/answer.$AUTORL_ATTEMPT; do sleep 0.3; done
  mv output/answer.$AUTORL_ATTEMPT output/answer-$1.$AUTORL_ATTEMPT.json
}
"""

THREE = f"""#!/usr/bin/env bash
{AGAIN}{TAKES_NOTE}
again variants 0 3
for n in 0 1 2; do submit $n; done
until [ "$(./scores | grep -c '"status": "scored"')" -ge 3 ]; do sleep 0.2; done  # more: a submit that failed after all was done is done again
"""
"""Submits three checkpoints, waits until it has been told their scores, and ends."""

SITS = f"""#!/usr/bin/env bash
{AGAIN}{TAKES_NOTE}
[ -e output/made ] || again variants 0 10
touch output/made  # another attempt must not change what this one has submitted
( while sleep 0.1; do read -r up _ < /proc/uptime; echo "$up"; done ) &
for n in 0 1 2 3 4 5 6 7 8 9; do [ -e code/over ] || submit $n; done
until [ -e code/over ]; do sleep 0.2; done
kill $!
"""
"""Submits ten, the first three of them as others do, and goes on until the test says `over`, or its budget ends it; says the time
to its log."""


class World(Cluster):
    """A root that two nodes see, each through a mount of its own."""

    def __init__(self, staged: Cluster, tmp: Path, new_node: Callable[..., Node]) -> None:
        super().__init__(staged.root.path, tmp)
        assert staged.code is not None
        self.code = Path(shutil.copytree(staged.code, self.share))
        self.nodes = {name: new_node(name, self.root.path, skew_s=skew) for name, skew in (("a", 0.0), ("b", 90.0))}

    def faulty(self, *rules: dict[str, Any]) -> None:
        """The same faults on both nodes."""
        for node in self.nodes.values():
            node.faulty(*rules)

    def injected(self) -> Counter[str]:
        """How many faults of each kind there were: `ERRNO op`."""
        lines = [line for node in self.nodes.values() for line in node.injected()]
        return Counter(line.rsplit(" ", 1)[0] for line in lines)

    def on(self, node: str, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """A command on a node, to its end."""
        command = self.nodes[node].command(self.root.path, *argv)
        return subprocess.run(
            command, env=self._env(node), capture_output=True, text=True, timeout=PATIENCE_S, check=False, **options
        )

    def prepare(self, agents: list[str], **changes: Any) -> list[str]:
        """`launch` on node A, up to the submission of jobs."""
        script = (
            "import sys; from pathlib import Path; from autorl_hpc.files.layout import Root;"
            "from autorl_hpc.launch.plan import prepare; _, r = prepare(Path(sys.argv[1]), Root(Path(sys.argv[2])));"
            "print('\\n'.join(r.runs))"
        )
        done = self.on("a", sys.executable, "-c", script, str(self.spec(agents, **changes)), str(self.root.path))
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    def start_on(self, node: str, *arguments: str, ahead_s: float = 0.0) -> subprocess.Popen[bytes]:
        """Starts a job on a node; killing it is the loss of its node."""
        with open(self.root.path / f"log-{len(self.processes)}-{arguments[1]}.txt", "wb") as log:
            process = subprocess.Popen(
                self.nodes[node].command(self.root.path, *PYTHON, *arguments),
                env=self._env(node, ahead_s),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def _env(self, node: str, ahead_s: float = 0.0) -> dict[str, str]:
        env = {**self.env, "SLURMD_NODENAME": f"node-{node}", "PYTHONDONTWRITEBYTECODE": "1"}
        if ahead_s:
            more = ahead(ahead_s)
            more["PYTHONPATH"] += os.pathsep + env["PYTHONPATH"]
            env |= more
        return env


@dataclass
class Jobs:
    """Supervisors and graders, each started over when it ends other than well."""

    world: World
    jobs: list[dict[str, Any]] = field(default_factory=list)

    def agent(self, node: str, run_id: str) -> dict[str, Any]:
        return self._add(node, "agent", str(self.world.experiment.path), run_id)

    def grader(self, node: str, ahead_s: float = 0.0) -> dict[str, Any]:
        return self._add(node, "grader", str(self.world.experiment.path), ahead_s=ahead_s)

    def _add(self, node: str, *arguments: str, ahead_s: float = 0.0) -> dict[str, Any]:
        job = {"node": node, "arguments": ("job", *arguments), "ahead_s": ahead_s, "starts": 0, "at": 0.0, "codes": []}
        self.jobs.append(job)
        self._start(job)
        return job

    def _start(self, job: dict[str, Any]) -> None:
        job["process"] = self.world.start_on(job["node"], *job["arguments"], ahead_s=job["ahead_s"])
        job["starts"] += 1
        job["at"] = None

    def until(self, condition: Callable[[], bool]) -> None:
        """Keeps the jobs going until `condition` holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s\n{self.world.logs()}"
            for job in self.jobs:
                code = job["process"].poll()
                if code in (None, 0):
                    continue
                if job["at"] is None:
                    job["codes"].append(code)
                    job["at"] = time.monotonic() + START_OVER_S
                    assert job["starts"] < MAX_STARTS, f"{job}\n{self.world.logs()}"
                elif time.monotonic() > job["at"]:
                    self._start(job)
            time.sleep(0.1)

    def to_the_end(self, run_ids: Sequence[str]) -> None:
        """Until every run is finished and every job has ended by itself."""
        self.until(lambda: self.world.finished(list(run_ids)))
        self.until(lambda: all(job["process"].poll() == 0 for job in self.jobs))


def assert_all_once(world: World, run_ids: Sequence[str], *, attempts: int | None = 1) -> None:
    """Nothing lost, nothing twice: see each line."""
    for run_id in run_ids:
        entries = Ledger(world.run_dir(run_id)).read()
        kinds = Counter(linked.kind for linked in entries)
        view = world.view(run_id)
        assert kinds[EntryKind.SEALED] == kinds[EntryKind.CLOSED] == 1, kinds
        submissions = [linked.body for linked in entries if linked.kind is EntryKind.SUBMISSION]
        assert [s.submission_id for s in submissions] == list(range(1, len(submissions) + 1))
        assert len({s.manifest_id for s in submissions}) == len(submissions)
        assert all(s.status == "accepted" for s in submissions), submissions
        scored = Counter(linked.body.submission_id for linked in entries if linked.kind is EntryKind.SCORE)
        assert scored == Counter(s.submission_id for s in submissions if s.same_as is None)
        assert all(score.evaluation.score is not None for score in view.scores.values()), view.scores
        assert view.sealed is not None and view.closed is not None
        assert view.sealed.submissions == tuple(s.submission_id for s in view.accepted())
        assert view.closed.report is not None and view.closed.report.score is not None and view.closed.fault is None
        if attempts is not None:
            assert kinds[EntryKind.ATTEMPT_STARTED] == attempts
        for answer in answers_kept(world, run_id):
            submission = view.submissions[answer["submission_id"]]
            assert (submission.manifest_id, submission.content_hash) == (answer["manifest_id"], answer["content_hash"])
            assert submission.status == "accepted"
        limit_s = budget_s(world) + view.sealed.given_back_s
        if attempts != 2:  # two at once: the older one's time until it stepped back is not known to the newer one
            assert agent_ran_s(world, run_id) < limit_s + BUDGET_LATE_S
        assert view.sealed.elapsed_s < limit_s + BUDGET_LATE_S
        if view.sealed.ended_by == "budget":
            assert view.sealed.elapsed_s > limit_s - BUDGET_EARLY_S
    for folder in (world.experiment.queue, world.experiment.claims):
        assert reading.list_names(folder) == []
    assert world.finished(list(run_ids))
    done = world.on("b", *PYTHON, "verify", str(world.experiment.path))
    assert done.returncode == 0 and f"{len(run_ids)} runs, 0 damaged" in done.stdout, done.stdout + done.stderr
    done = world.on("b", *PYTHON, "report", str(world.experiment.path), "--json", "--no-figures")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(node.complaints() == "" for node in world.nodes.values())


def answers_kept(world: World, run_id: str) -> list[dict[str, Any]]:
    """The answers `accepted` that the agent got."""
    paths = sorted((world.workspace(run_id) / "output").glob("answer-*.json"))
    return [json.loads(path.read_text()) for path in paths]


def agent_ran_s(world: World, run_id: str) -> float:
    """The time between the first and the last line that the agent's clock left in its log; 0 without one."""
    lines = world.run_dir(run_id).agent_log.read_text().splitlines()
    times = [float(line) for line in lines if line.replace(".", "", 1).isdigit()]
    return times[-1] - times[0] if times else 0.0


def budget_s(world: World) -> float:
    """The budget of the experiment's runs."""
    return float(json.loads(world.experiment.resolved.read_bytes())["spec"]["budget"]["wall_clock_s"])
