"""Cheating agents: what one is, and the world where all of them run through the real loop at one sandbox level.

One experiment for each budget holds the cheats as agents; the first also an honest run, which lives until all cheats are over and
which they may attack. Real supervisors, sandboxes, intake, real graders and the real report: nothing is replaced. A cheat writes
`code/WON` when it got what it was after. What would hurt the machine where it succeeds is bounded by the cheat itself: it goes for the
processes and files of this test alone, by the numbers and paths that it is told.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from helpers import PATIENCE_S, VARIANTS, Cluster, wait_for

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.entries import Sealed, Submission

HERE = Path(__file__).parent
AT_ONCE = 3
"""Most of them wait for most of their time."""
RUN_S = 1800.0
"""Of the longest of them, the flood of manifests, on a machine with ten times as much to do."""

WALL_CLOCK = "3h"
"""Longer than all of them take: the honest run lives until all cheats are over, on however slow a machine."""
SHORT_S = 30
"""Long enough to begin, and to be told what it asks for, on a machine that is busy with other things."""
LOOKS, FOLDER = "looks-around", "tries"
SHORT = {"wall_clock": f"{SHORT_S}s"}
LIMITED = {"disk_gib": 0.15, "memory_gib": 0.35, "processes": 60}
"""Budgets that several cheats share: each one more is one experiment and one grader more."""
SECRET = "autorl-canary-5f0d1c77"
"""Stands in the environment of supervisors and graders, as a token would that their user has."""

START = (
    "#!/usr/bin/env bash\ncd $WORKSPACE\nexport PYTHONDONTWRITEBYTECODE=1\n"
    'ROOT=$(dirname "$(dirname "$(dirname "$WORKSPACE")")")  # how every agent could guess where all the rest lies\n'
    "EXPERIMENT=$ROOT/runs/$(basename $(dirname $WORKSPACE))\nME=$EXPERIMENT/$(basename $WORKSPACE)\n"
    "VAULT=$ROOT/vault\nSTORE=$ROOT/store\n"
    "knows() { until [ -f code/known ]; do sleep 0.05; done; . code/known; }  # what the test tells from outside\n"
    'won() { echo "$*" >> code/WON; }\n'
    "honest() { variants ${1:-0} 1; ./submit output/v${1:-0} --wait > code/answer.json; }  # a checkpoint of its own\n"
    + VARIANTS
)


@dataclass(frozen=True)
class Cheat:
    """One exploit.

    Attributes:
        script: what the agent does, after START.
        check: asserts that the exploit failed, or, at a level where it is not covered, what it got.
        says: what the run's page of the report must hold; none: there is nothing to be said beyond the score.
        uncovered: why it succeeds, by level. There `check` is not asked but `WON` must be there: a hole that has
            closed is to be taken off this list, and off docs/threat-model.md.
        budget: further fields of the run's budget, or another wall_clock than WALL_CLOCK: it then runs in another experiment,
            together with those of the same budget.
        hole: the hole of a level that the run's page must name where the cheat succeeds at it.
        outside: does something from outside once the workspace is there, such as planting what the cheat goes after. It may
            return another supervisor, which takes the first one's place.
        looks: it tries what it tries and changes nothing of its run: one run tries all of these, each in a folder of its own, and
            submits once in the end.
        world: prepares the root before the experiments are made, such as staging another model.
    """

    script: str
    check: Callable[[Seen], None]
    says: str | None = None
    uncovered: Mapping[str, str] = field(default_factory=dict)
    hole: Mapping[str, str] = field(default_factory=dict)
    budget: Mapping[str, Any] = field(default_factory=dict)
    outside: Callable[[Seen], subprocess.Popen[bytes] | None] | None = None
    looks: bool = False
    world: Callable[[Cluster], None] | None = None


@dataclass
class Seen:
    """What came of one cheat, or, while it runs, what there is of it.

    Attributes:
        cluster: that of its experiment.
        pids: of its `supervisor`, and of the `grader` of its experiment.
        honest: the honest run, which belongs to the first experiment.
        place: its folder in the workspace.
    """

    name: str
    level: str
    cluster: Cluster
    run_id: str
    pids: dict[str, int] = field(default_factory=dict)
    honest: Seen | None = None
    place: str = "."

    def tell(self, **known: object) -> None:
        """Lays variables that the agent waits for by `knows`."""
        path = self.workspace / "code" / "known"
        path.with_suffix(".tmp").write_text("".join(f"{name}='{value}'\n" for name, value in known.items()))
        path.with_suffix(".tmp").rename(path)

    @cached_property
    def view(self) -> RunView:
        return self.cluster.view(self.run_id)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The run's summary.json."""
        return dict(json.loads((self.run / "report" / "summary.json").read_text()))

    @cached_property
    def page(self) -> str:
        """The run's page, as text."""
        return (self.run / "report" / "run.md").read_text()

    @property
    def run(self) -> Path:
        return self.cluster.run_dir(self.run_id).path

    @property
    def workspace(self) -> Path:
        return self.cluster.workspace(self.run_id) / self.place

    @property
    def won(self) -> str:
        """What the cheat says it got."""
        path = self.workspace / "code" / "WON"
        return path.read_text(errors="replace") if path.is_file() else ""

    @property
    def log(self) -> str:
        path = self.cluster.run_dir(self.run_id).agent_log
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def sealed(self) -> Sealed:
        assert self.view.sealed is not None, self.log[-2000:]
        return self.view.sealed

    def was_sealed(self) -> bool:
        """Whether the ledger can be read and has its seal."""
        try:
            return self.cluster.view(self.run_id).sealed is not None
        except (AutorlError, ValueError, OSError):
            return False

    def accepted(self) -> list[Submission]:
        return self.view.accepted()

    def codes(self) -> list[str]:
        """Why submissions were refused."""
        return [submission.code or "" for submission in self.view.refused()]

    def gain(self) -> float | None:
        """The improvement on the report split, as the report has it."""
        improvement = self.summary["improvement"]
        return None if improvement is None else float(improvement["difference"])


def exploits() -> dict[str, Cheat]:
    """All cheats by name: one a file, or several that are alike."""
    found: dict[str, Cheat] = {}
    for path in sorted((HERE / "exploits").glob("[!_]*.py")):
        module = _load(path)
        found |= vars(module).get("CHEATS") or {path.stem.replace("_", "-"): module.CHEAT}
    return found


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"exploit_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class World:
    """All cheats at one level, run once."""

    def __init__(self, cluster: Cluster, level: str, cheats: Mapping[str, Cheat]) -> None:
        self.level = level
        self.cheats = cheats
        self.seen: dict[str, Seen] = {}
        cluster.mini_task(items=8, max_new_tokens=16, any_number=True)  # scores that can move
        cluster.agent("honest", START + "honest 1\nuntil [ -f code/over ]; do sleep 0.1; done\n")
        looks = {name: cheat for name, cheat in cheats.items() if cheat.looks}
        tries = [f"(cd {FOLDER}/{name}; honest() {{ :; }}\n{cheat.script})\n" for name, cheat in looks.items()]
        folders = " ".join(f"{FOLDER}/{name}/code" for name in looks)
        cluster.agent(LOOKS, f"{START}mkdir -p {folders}\n{''.join(tries)}honest\n")
        for name, cheat in cheats.items():
            if not cheat.looks:
                cluster.agent(name, START + cheat.script)
            if cheat.world is not None:
                cheat.world(cluster)
        groups: dict[str, list[str]] = {json.dumps({}): ["honest", *([LOOKS] if looks else [])]}
        for name, cheat in cheats.items():
            if not cheat.looks:
                groups.setdefault(json.dumps(dict(cheat.budget), sort_keys=True), []).append(name)
        os.environ["AUTORL_TEST_TOKEN"] = SECRET
        try:
            self._run_all([self._prepare(cluster, *group) for group in enumerate(groups.items())])
        finally:
            del os.environ["AUTORL_TEST_TOKEN"]

    def _prepare(self, cluster: Cluster, place: int, group: tuple[str, list[str]]) -> Cluster:
        """One experiment of one budget, by its own view of the cluster."""
        budget, agents = group
        own = copy.copy(cluster)
        name = "exp" if place == 0 else f"exp-{place}"
        own.experiment = own.root.experiment(name)
        network = {} if self.level == "none" else {"network": "none"}
        run_ids = own.prepare(
            agents,
            name=name,
            matrix={"task": "mini"},
            budget={"wall_clock": WALL_CLOCK, **json.loads(budget)},
            sandbox={"level": self.level, **network},
            grader={
                "idle_exit_s": 3600.0
            },  # one may have nothing to do for long, while other experiments have their turn
            attempts=1,
        )
        for agent in agents:
            run_id = next(run for run in run_ids if run.startswith(f"mini-{agent}-tiny"))
            if agent != LOOKS:
                self.seen[agent] = Seen(agent, self.level, own, run_id)
                continue
            for look in (name for name, cheat in self.cheats.items() if cheat.looks):
                self.seen[look] = Seen(look, self.level, own, run_id, place=f"{FOLDER}/{look}")
        return own

    def _run_all(self, clusters: list[Cluster]) -> None:
        """The experiments one after the other, each with its own grader: two are alive at most, that of the honest run too.

        The first one's, which cheats attack, is started as in a job; the others are forks of a warm process."""
        honest = self.seen["honest"]
        graders = [clusters[0].grader(cold=True)]
        supervisor = honest.cluster.supervisor(honest.run_id)
        honest.pids["supervisor"] = supervisor.pid
        wait_for((honest.workspace / "output" / "v1").is_dir, "the honest run's checkpoint")
        for own in clusters:
            if own is not clusters[0]:
                graders.append(own.grader())
            here = [seen for seen in self.seen.values() if seen.cluster is own]
            for seen in here:
                seen.pids["grader"], seen.honest = graders[-1].pid, honest
            runs = sorted({seen.run_id for seen in here if seen is not honest})
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(self._run, [[seen for seen in here if seen.run_id == run] for run in runs]))
            if own is not clusters[0]:
                self._close(own, graders[-1])
        (honest.workspace / "code" / "over").touch()
        supervisor.wait(RUN_S)
        self._close(clusters[0], graders[0])

    def _run(self, of_run: list[Seen]) -> None:
        supervisor = of_run[0].cluster.supervisor(of_run[0].run_id)
        for seen in of_run:
            seen.pids["supervisor"] = supervisor.pid
            if (outside := self.cheats[seen.name].outside) is not None:
                wait_for((seen.workspace / "code").is_dir, "the workspace")
                supervisor = outside(copy.copy(seen)) or supervisor
        supervisor.wait(RUN_S)

    def _close(self, own: Cluster, grader: subprocess.Popen[bytes]) -> None:
        """Waits for the closings of one experiment and writes its report.

        A run that is not sealed will never be closed. Nor may one whose cheat succeeded at level none: its ledger, or its
        grader, is what the cheat was after.
        """
        here = [seen for seen in self.seen.values() if seen.cluster is own]
        lost = {seen.run_id for seen in here if not seen.was_sealed() or (self.level == "none" and seen.won)}
        due = sorted({seen.run_id for seen in here} - lost)
        wait_for(functools.partial(own.finished, due), f"the closings of {own.experiment.path.name}", patience_s=RUN_S)
        if lost:
            grader.terminate()
        code = grader.wait(PATIENCE_S)
        assert code == 0 or lost, own.logs_of("grader")[-3000:]
        own.run("report", str(own.experiment.path), "--no-figures")
