"""Many submissions of many runs, waiting all at once for one real grader daemon."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from autorl_hpc.files import artifacts
from autorl_hpc.files.frozen_records import read_experiment, read_run
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.queue import entry_name, put, waiting
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.entries import Score, Submission, Timings
from autorl_hpc.records.exchange import QueueEntry
from autorl_hpc.states import EntryKind, QueueKind
from autorl_hpc.supervise.attempt_ledger import LedgerWriter
from gpubench.figures import Figures
from gpubench.usage import Usage, wait_until_free
from gpubench.variants import Variant
from gpubench.world import REPO, World

LOOK_S = 0.05
END_S = 60.0
"""How long a grader may take to end after it was asked to."""


@dataclass
class Course:
    """What was seen from outside.

    Attributes:
        began: when the submissions were queued, by the monotonic clock.
        answered: seconds from then until the entry left the queue, by its name.
        problem: why not all came through.
    """

    began: float
    answered: dict[str, float] = field(default_factory=dict)
    problem: str | None = None


def measure(world: World, figures: Figures) -> None:
    """Puts them into the queue together when the base model is measured, and follows the queue until it is empty."""
    options = world.options
    tasks = options.queue_tasks
    experiment = world.experiment("queue", tasks, max(1, options.runs // len(tasks)), options.feedback_items)
    runs = read_experiment(experiment).runs
    entries = _submissions(world, experiment, runs)
    for name in waiting(experiment.queue):
        if name.startswith("b2-"):  # report splits: asked when a run is closed, which is not measured here
            os.unlink(experiment.queue / f"{name}.json")
    figures.say(f"{len(entries)} submissions of {len(runs)} runs on {', '.join(tasks)} are ready; starting a grader")
    log = options.work / "grader.log"
    wait_until_free()
    with Usage() as usage:
        grader = _start(experiment, log)
        try:
            began = time.monotonic()
            problem = _until_measured(experiment, grader, options.limit_s)
            figures.show(
                "start of the grader, and baselines of the feedback splits, twice each", time.monotonic() - began, "s"
            )
            course = Course(time.monotonic(), problem=problem)
            if problem is None:
                _follow(figures, experiment, grader, entries, options.limit_s, course)
        finally:
            _end(grader)
    if course.problem is not None:
        figures.missing("all submissions scored", f"{course.problem}; {_last_words(log)}")
    if course.answered:
        _tell(figures, experiment, runs, entries, course, usage)


def _submissions(world: World, experiment: ExperimentDir, runs: tuple[str, ...]) -> list[QueueEntry]:
    """Artifacts and ledgers as the intake leaves them. All weights but one tensor are the same file by hard links."""
    found: list[QueueEntry] = []
    for number in range(world.options.submissions):
        run = experiment.run(runs[number % len(runs)])
        record, chain = read_run(run), LedgerWriter(run)
        if not chain.look().attempt:
            chain.begin(0.0, str(world.options.work))
        else:
            chain.attempt = chain.look().attempt
        submission_id = number // len(runs) + 1
        variant = world.variants.make(1000 + number)
        _install(experiment, variant, run.run_id)
        chain.write(
            EntryKind.SUBMISSION,
            Submission(
                submission_id=submission_id,
                manifest_id=f"m{number:04d}",
                status="accepted",
                model_path=f"output/v{number}",
                elapsed_s=0.0,
                attempt=chain.attempt,
                content_hash=variant.content_hash,
                size_bytes=variant.size_bytes,
                tensors=len(variant.digests),
            ),
        )
        found.append(
            QueueEntry(
                kind=QueueKind.FEEDBACK,
                run_id=run.run_id,
                submission_id=submission_id,
                task=record.science.task,
                base_model=record.science.base_model,
                recipe_hash=record.recipe_hash,
            )
        )
    return found


def _install(experiment: ExperimentDir, variant: Variant, run_id: str) -> None:
    folder = artifacts.new_folder(experiment.artifacts, run_id, 1)
    for path in variant.folder.iterdir():
        os.link(path, folder / path.name)
    value = {"schema_version": 1, "content_hash": variant.content_hash, "tensors": variant.digests, "not_in_hash": []}
    (folder / artifacts.READY_NAME).write_text(json.dumps(value))
    artifacts.install(experiment.artifacts, folder, variant.content_hash, run_id)
    shutil.rmtree(variant.folder)


def _start(experiment: ExperimentDir, log: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(part for part in (str(REPO), os.environ.get("PYTHONPATH", "")) if part)
    with open(log, "wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "autorl_hpc", "job", "grader", str(experiment.path)],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _until_measured(experiment: ExperimentDir, grader: subprocess.Popen[bytes], limit_s: float) -> str | None:
    """Waits until the baselines are in; in words what went wrong."""
    deadline = time.monotonic() + limit_s
    while waiting(experiment.queue):
        if grader.poll() is not None:
            return f"the grader ended with {grader.returncode} before the base model was measured"
        if time.monotonic() > deadline:
            return f"the base model was not measured within {limit_s:g} s"
        time.sleep(LOOK_S)
    return None


def _follow(
    figures: Figures,
    experiment: ExperimentDir,
    grader: subprocess.Popen[bytes],
    entries: list[QueueEntry],
    limit_s: float,
    course: Course,
) -> None:
    course.began = time.monotonic()
    for entry in entries:
        put(experiment.queue, entry)
    left, told = {entry_name(entry) for entry in entries}, 0
    while left:
        now = time.monotonic() - course.began
        for name in left - set(waiting(experiment.queue)):
            course.answered[name] = now
            left.discard(name)
        if (tenth := 10 * len(course.answered) // len(entries)) > told:
            told = tenth
            figures.say(f"{len(course.answered)} of {len(entries)} scored after {now:.1f} s")
        if left and grader.poll() is not None:
            course.problem = f"the grader ended with {grader.returncode}, {len(left)} were left"
            return
        if left and now > limit_s:
            course.problem = f"{len(left)} were left after {limit_s:g} s"
            return
        time.sleep(LOOK_S)


def _end(grader: subprocess.Popen[bytes]) -> None:
    grader.terminate()
    try:
        grader.wait(END_S)
    except subprocess.TimeoutExpired:
        pass
    try:  # an engine's processes too
        os.killpg(grader.pid, signal.SIGKILL)
    except OSError:
        pass
    grader.wait()


def _tell(
    figures: Figures,
    experiment: ExperimentDir,
    runs: tuple[str, ...],
    entries: list[QueueEntry],
    course: Course,
    usage: Usage,
) -> None:
    scores: list[Score] = []
    for run_id in runs:
        scores += RunView.of(Ledger(experiment.run(run_id)).read()).scores.values()
    numbers = [score for score in scores if score.evaluation.score is not None]
    for score in scores:
        if score.evaluation.score is None:
            figures.say(f"null, fault {score.evaluation.fault}: {score.evaluation.reason}")
    wall = max(course.answered.values())
    what = f"{len(entries)} submissions of {len(runs)} runs"
    items = sorted({score.evaluation.n for score in numbers})
    note = f"{len(scores) - len(numbers)} null; {' or '.join(map(str, items))} items each; the artifacts share all weights but one tensor, by hard links"
    figures.show(f"{what}: scored", 100 * len(numbers) / len(entries), "%", above=100.0, note=note)
    figures.show(f"{what}: from the first to the last", wall, "s")
    figures.show(f"{what}: a minute", 60 * len(course.answered) / wall, "/min")
    busy = usage.share(course.began, course.began + wall)
    if busy is None:
        figures.missing("GPU busy, by NVML", usage.trouble or "no samples")
    else:
        figures.show("GPU busy, by NVML", 100 * busy, "%", above=80)
    timings = [score.evaluation.timings for score in scores]
    generating = sum(timing.generate_s for timing in timings)
    figures.show("the engine's own time of generating over the clock", 100 * generating / wall, "%", above=80)
    for name in Timings.model_fields:
        values = [getattr(timing, name) for timing in timings]
        if any(value is not None for value in values):
            figures.show(f"of each score: {name}", [float(value or 0.0) for value in values], "s")
    waits = list(course.answered.values())
    middle = statistics.median(waits)
    figures.show(
        "from queued to scored", waits, "s", note="all were queued at one moment, so the last waits twice the median"
    )
    figures.show("largest wait over the median", max(waits) / middle, "x", below=3.0)
    of_run: dict[str, list[float]] = {}
    for entry in entries:
        if entry_name(entry) in course.answered:
            of_run.setdefault(entry.run_id or "", []).append(course.answered[entry_name(entry)])
    means = [statistics.fmean(values) for values in of_run.values()]
    figures.show("mean wait of a run, over the runs", means, "s", note="how fair it is between runs")


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:])[:600]
