"""Cheating agents: what one is, and the world where all of them run through the real loop at one sandbox level.

One experiment holds all cheats as agents, and an honest run that they may attack. Real supervisors, sandboxes, intake, a real
grader and the real report: nothing is replaced. A cheat writes `code/WON` when it got what it was after.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from helpers import VARIANTS, Cluster, wait_for

from autorl_hpc.files.view import RunView
from autorl_hpc.records.ledger import Sealed, Submission

HERE = Path(__file__).parent
AT_ONCE = 3
RUN_S = 240.0

START = (
    "#!/usr/bin/env bash\ncd $WORKSPACE\nexport PYTHONDONTWRITEBYTECODE=1\n"
    'ROOT=$(dirname "$(dirname "$(dirname "$WORKSPACE")")")  # how every agent could guess where all the rest lies\n'
    "EXPERIMENT=$ROOT/runs/exp\nME=$EXPERIMENT/$(basename $WORKSPACE)\nVAULT=$ROOT/vault\nSTORE=$ROOT/store\n"
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
        budget: further fields of the run's budget; wall_clock is 60 s.
        outside: does something from outside once the agent runs, such as planting what the cheat goes after.
        world: prepares the root before the experiment is made, such as staging another model.
    """

    script: str
    check: Callable[[Seen], None]
    says: str | None = None
    uncovered: Mapping[str, str] = field(default_factory=dict)
    budget: Mapping[str, Any] = field(default_factory=dict)
    outside: Callable[[Seen], None] | None = None
    world: Callable[[Cluster], None] | None = None


@dataclass
class Seen:
    """What came of one cheat."""

    name: str
    level: str
    cluster: Cluster
    run_id: str

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
        return self.cluster.workspace(self.run_id)

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
    """All cheats by name, one a file."""
    return {path.stem.replace("_", "-"): _load(path).CHEAT for path in sorted((HERE / "exploits").glob("[!_]*.py"))}


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"exploit_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class World:
    """All cheats at one level, run once."""

    def __init__(self, cluster: Cluster, level: str, cheats: Mapping[str, Cheat]) -> None:
        self.cluster = cluster
        self.level = level
        cluster.mini_task(items=8, max_new_tokens=16, any_number=True)  # scores that can move
        cluster.agent("honest", START + "honest 1\nsleep 20\n")
        for name, cheat in cheats.items():
            cluster.agent(name, START + cheat.script)
            if cheat.world is not None:
                cheat.world(cluster)
        budgets = {"wall_clock": "60s"}
        network = {} if level == "none" else {"network": "none"}
        run_ids = cluster.prepare(
            ["honest", *cheats],
            matrix={"task": "mini"},
            budget=budgets,
            sandbox={"level": level, **network},
            attempts=1,
        )
        self.seen = {
            name: Seen(name, level, cluster, next(run for run in run_ids if run.startswith(f"mini-{name}-tiny")))
            for name in ["honest", *cheats]
        }
        grader = cluster.grader()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(self._run, [("honest", None), *cheats.items()]))
        wait_for(lambda: cluster.finished(run_ids), RUN_S, "the closings")
        assert grader.wait(60) == 0, cluster.logs_of("grader")[-3000:]
        cluster.run("report", str(cluster.experiment.path))

    def _run(self, named: tuple[str, Cheat | None]) -> None:
        name, cheat = named
        seen = self.seen[name]
        supervisor = self.cluster.supervisor(seen.run_id)
        if cheat is not None and cheat.outside is not None:
            wait_for((seen.workspace / "code").is_dir, 30, "the workspace")
            cheat.outside(Seen(name, self.level, self.cluster, seen.run_id))
        supervisor.wait(RUN_S)
