"""The figures of one GPU: `benchmarks/bench gpu-...  [gpu-...] [options]`; several share one engine of each side.

gpu-swap      swaps of a warm engine to other checkpoints of the base model, by where they are read from; A, B, A
gpu-load      the engine's reading of a checkpoint against reading and sha256 alone
gpu-gsm8k     gsm8k's report split by a warm engine, by a new engine a submission, by one bare call in a living engine
gpu-alfworld  alfworld's report split, all games at once, its bounds, and the reference's loop on some of them
gpu-queue     submissions of many runs on two tasks through a real grader daemon
gpu-all       all of these
gpu-learners  the experts' own learner beside trl's GRPOTrainer with vLLM, on ALFWorld from one SFT start
gpu-large     a model of random weights in the shape of Qwen2.5-7B or 1.5B: hashing, start, swaps, generation beside a bare call
gpu-before    how many of 48 answers are equal, by what was asked before

What is known is printed at once; `--json FILE` is written anew after each figure. With `--small` the same code runs on the toy
model, on tasks of the package and on the CPU: that shows that it works, and measures nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpubench import games, large, learners, load, questions, queueing, swap
from gpubench.figures import Figures
from gpubench.starting import start
from gpubench.world import Options, World, about

PARTS = ("gpu-swap", "gpu-load", "gpu-gsm8k", "gpu-alfworld", "gpu-queue")
APART = {"gpu-learners": learners.measure, "gpu-large": large.measure, "gpu-before": large.before}
"""With engines of their own, or none; not in gpu-all."""
NAMES = (*PARTS, "gpu-all", *APART)
SMALL = {
    "engine": "transformers",
    "device": "cpu",
    "reference": "transformers",
    "static_task": "arithmetic",
    "game_task": "alfworld-mini",
    "queue_tasks": "arithmetic,humaneval-mini",
    "items": 8,
    "games": 3,
    "steps": 2,
    "rounds": 2,
    "evaluations": 1,
    "reference_games": 1,
    "submissions": 4,
    "runs": 4,
    "shape": "toy",
    "seconds": 1.0,
}
REPEATS = 4
"""Calls of the living engine, the first of which is its warming up."""


def main(arguments: list[str]) -> int:
    """Measures what is asked for; 0 when all of it came to its end, whatever the figures say."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.small:
        parser.set_defaults(**SMALL)
        given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR"), ignore_cleanup_errors=True) as folder:
        options = _options(given, Path(folder))
        figures = Figures(given.json, about(options))
        session = Session(World(options), figures)
        try:
            session.measure(given.what)
        finally:
            print(f"\n{figures.table()}", flush=True)
            figures.write()
    return 1 if session.failed else 0


@dataclass
class Session:
    """One run of a subcommand. A part that fails says so, and the next one is measured all the same: GPU time is dear."""

    world: World
    figures: Figures
    failed: list[str] = field(default_factory=list)
    _warm: questions.Warm | None = None
    _played: games.Played | None = None

    def measure(self, asked: Sequence[str]) -> None:
        """The suite's side of all that is asked with one engine; then, when the GPU is free, the reference's; then the queue."""
        wanted = set(PARTS if "gpu-all" in asked else asked)
        parts = {
            "gpu-swap": lambda: swap.measure(self.world, self.figures),
            "gpu-load": lambda: load.measure(self.world, self.figures),
            "gpu-gsm8k": self._suites_questions,
            "gpu-alfworld": self._suites_games,
        }
        for name, part in parts.items():
            if name in wanted:
                self._guarded(name, part)
        self._guarded(asked[0], self.world.close_engine)
        if self.world.options.reference != "none":
            self._guarded(asked[0], self._reference)
        if "gpu-queue" in wanted:
            self._guarded("gpu-queue", lambda: queueing.measure(self.world, self.figures))
        for name, measured in APART.items():
            if name in wanted:
                self._guarded(name, lambda measured=measured: measured(self.world, self.figures))  # type: ignore[misc]

    def _guarded(self, name: str, part: Callable[[], None]) -> None:
        self.figures.of = name
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            self.failed.append(name)
            self.figures.missing("the rest of it", f"{type(error).__name__}: {error}"[:500])

    def _suites_questions(self) -> None:
        self._warm = questions.suite(self.world, self.figures)

    def _suites_games(self) -> None:
        self._played = games.suite(self.world, self.figures)

    def _reference(self) -> None:
        """One process whose engine stays, which also leaves what vLLM compiles in its cache; then one as the reference starts it
        for a submission, which finds it there."""
        world, figures, warm, played = self.world, self.figures, self._warm, self._played
        jobs = [{**warm.job, "repeat": REPEATS}] if warm is not None else []
        jobs += [played.job] if played is not None else []
        if not jobs:
            return
        told = start(world, figures, "living", jobs)
        if warm is not None:
            figures.of = "gpu-gsm8k"
            questions.living(figures, warm, told.parts, told.told[0])
        if played is not None:
            figures.of = "gpu-alfworld"
            games.reference(figures, played, told.told[-1])
        if warm is not None and world.options.fresh:
            figures.of = "gpu-gsm8k"
            questions.fresh(figures, warm, start(world, figures, "fresh", [warm.job]))


def _options(given: argparse.Namespace, work: Path) -> Options:
    values = {name: value for name, value in vars(given).items() if name not in ("what", "json", "small")}
    if not given.small:
        for name, variable in (("base", "AUTORL_TEST_BASE"), ("data", "AUTORL_TEST_DATA")):
            values[name] = values[name] or _from_environment(variable)
    values["queue_tasks"] = tuple(str(values["queue_tasks"]).split(","))
    return Options(work=work, **values)


def _from_environment(variable: str) -> Path | None:
    return _folder(os.environ[variable]) if os.environ.get(variable) else None


def _folder(text: str) -> Path:
    path = Path(text).absolute()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return path


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", nargs="+", choices=NAMES, metavar="gpu-...", help=", ".join(NAMES))
    add("--json", type=Path, metavar="FILE", help="all figures, with machine and versions")
    add("--small", action="store_true", help="the toy model on the CPU, to try the code")
    add("--base", type=_folder, help="the base model's folder ($AUTORL_TEST_BASE; the toy)")
    add("--data", type=_folder, help="folder with gsm8k/, alfworld/, ... ($AUTORL_TEST_DATA)")
    add("--engine", default="vllm", help="the suite's")
    add("--device", default="auto")
    add("--reference", choices=("vllm", "transformers", "none"), default="vllm")
    add("--static-task", default="gsm8k")
    add("--game-task", default="alfworld")
    add("--queue-tasks", default="gsm8k,humaneval")
    add("--items", type=_count, help="of the static task (all)")
    add("--games", type=_count, help="(all)")
    add("--steps", type=_count, help="of a game (the recipe's)")
    add("--rounds", type=_count, default=10, help="swaps of each kind (%(default)s)")
    add("--evaluations", type=_count, default=3, help="of the static task, after the first (%(default)s)")
    add("--reference-games", type=_count, default=3, help="that the reference's loop plays (%(default)s)")
    add("--reference-limit-s", type=float, default=240, help="of one process of the reference's (%(default)s)")
    add(
        "--skip-fresh",
        dest="fresh",
        action="store_false",
        help="no second process of the reference's: its start is told by the first",
    )
    add("--submissions", type=_count, default=100, help="in the queue (%(default)s)")
    add("--runs", type=_count, default=20, help="that they are of (%(default)s)")
    add("--feedback-items", type=_count, help="that each of them is asked (the whole feedback split)")
    add("--shape", choices=tuple(large.SHAPES), default="7b", help="of gpu-large (%(default)s)")
    add("--seconds", type=float, default=150, help="that each learner begins iterations in (%(default)s)")
    add("--traces", type=_folder, help="demonstrations of collect.py's for gpu-learners (it collects some)")
    add("--limit-s", type=float, default=500, help="of the queue (%(default)s)")
    return parser
