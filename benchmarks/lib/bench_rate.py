"""`benchmarks/bench rate`: how many submissions a minute one real grader scores, and where the time between them goes.

BENCH_RUNS runs (20) submit BENCH_EACH checkpoints (5) each, taken in beforehand and queued all at once, on the tasks BENCH_TASKS
(arithmetic), with the tiny model. The grader is up, its baselines are measured. From the first queued to the last committed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from autorl_hpc.files.frozen_records import read_experiment
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.entries import Timings

RUNS = int(os.environ.get("BENCH_RUNS", "20"))
EACH = int(os.environ.get("BENCH_EACH", "5"))
TASKS = os.environ.get("BENCH_TASKS", "arithmetic").split(",")

Row = tuple[str, str]


def measure(
    make: Callable[..., ExperimentDir],
    take_in: Callable[..., list[str]],
    start: Callable[[ExperimentDir], subprocess.Popen[bytes]],
    cpu_s: Callable[[int], float],
) -> Iterator[Row]:
    """Rows of the table.

    Args:
        make: prepares the experiment in a root.
        take_in: has a run's checkpoints accepted and held back from the queue; the names of its entries.
        start: a grader whose baselines are measured.
        cpu_s: CPU time of a process so far.
    """
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        root = Root(Path(folder))
        seeds = -(-RUNS // len(TASKS))
        experiment = make(root, ["null"], seeds, TASKS)
        runs = read_experiment(experiment).runs[:RUNS]
        names = [name for index in range(len(runs)) for name in take_in(experiment, root, EACH, index)]
        grader = start(experiment)
        try:
            began, used_s = time.monotonic(), cpu_s(grader.pid)
            for name in names:
                os.rename(root.path / "held" / name, experiment.queue / name)
            while any(name.startswith("f-") for name in os.listdir(experiment.queue)):
                time.sleep(0.05)
            took_s, used_s = time.monotonic() - began, cpu_s(grader.pid) - used_s
        finally:
            grader.terminate()
            grader.wait()
        views = [RunView.of(Ledger(experiment.run(run)).read()) for run in runs]
        yield from _rows(
            took_s, used_s, len(names), [s.evaluation.timings for view in views for s in view.scores.values()]
        )


def _rows(took_s: float, used_s: float, queued: int, timings: list[Timings]) -> Iterator[Row]:
    label = f"{RUNS} runs x {EACH} submissions"
    yield f"{label}: committed", f"{len(timings)} of {queued} in {took_s:.1f} s"
    yield f"{label}: a minute", f"{60 * len(timings) / took_s:.0f}"
    generating_s = sum(one.generate_s for one in timings)
    parts = ", ".join(
        f"{name.removesuffix('_s')} {1000 * sum(getattr(one, name) for one in timings) / len(timings):.1f}"
        for name in ("generate_s", "load_s", "swap_s", "score_s", "commit_s")
    )
    yield f"{label}: share of generation", f"{100 * generating_s / took_s:.0f} %"
    yield f"{label}: ms each", f"{parts}, all {1000 * took_s / len(timings):.1f}"
    yield f"{label}: CPU of the grader, ms each", f"{1000 * used_s / len(timings):.1f}"
    waits = [wait for one in timings if (wait := getattr(one, "waiting_s", None)) is not None]
    if waits:
        median = statistics.median(waits)
        yield f"{label}: waiting", f"median {median:.1f} s, largest {max(waits):.1f} s, {max(waits) / median:.2f} times"
