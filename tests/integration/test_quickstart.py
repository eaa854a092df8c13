"""`autorl-hpc quickstart` as a newcomer runs it: real training by the scripted agents, real scores, a report."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import wait_for
from pages import Person, newcomer
from realdata import REPO

from autorl_hpc.evidence.verify import verify_paths
from autorl_hpc.files.frozen_records import alive_jobs
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.run_view import RunView
from autorl_hpc.launch.cancel import cancel_runs
from autorl_hpc.launch.local import processes
from autorl_hpc.report import report

HANG_S = 1800.0
"""On two cores with nothing else on them it takes about a minute."""


HERE = (
    "git -C {repo} ls-files -z | tar -C {repo} -c --null -T - --ignore-failed-read 2>/dev/null | tar -x -C autorl-hpc"
)
"""In place of `git clone`: the working tree, with what is not committed yet."""

VENV = """set -e; mkdir -p .venv/bin
printf '#!/bin/sh\\nexec {python} "$@"\\n' > .venv/bin/python && chmod +x .venv/bin/python
printf '#!/bin/sh\\nexec {python} -m autorl_hpc "$@"\\n' > .venv/bin/autorl-hpc && chmod +x .venv/bin/autorl-hpc
echo "PATH=$PWD/.venv/bin:\\$PATH" > .venv/bin/activate
cat pyproject.toml constraints.txt | sha256sum | cut -c1-16 > .venv/.autorl-ready-train
"""
"""In place of the installation: this Python, and the mark of bin/setup-env that says that all is installed."""


def view_of(experiment: ExperimentDir, agent: str) -> RunView:
    """What the ledger of one agent's run says."""
    runs: list[str] = json.loads(experiment.resolved.read_text())["runs"]
    (run_id,) = [run_id for run_id in runs if run_id.startswith(f"arithmetic-{agent}-tiny-")]
    return RunView.of(Ledger(experiment.run(run_id)).read())


def report_score(experiment: ExperimentDir, agent: str) -> float:
    """The selected checkpoint's score on the report split."""
    closed = view_of(experiment, agent).closed
    assert closed is not None and closed.report is not None and closed.report.score is not None, (agent, closed)
    return closed.report.score


@pytest.mark.timeout(HANG_S + 60)
@pytest.mark.slow
def test_the_readme_as_typed(tmp_path: Path) -> None:
    """From `git clone` to `export`: README.md up to the cluster, whose commands tests/slurm types."""
    clone = tmp_path / "autorl-hpc"
    root = clone / "autorl-quickstart"
    experiment = ExperimentDir(root / "runs" / "quickstart")

    def install() -> None:
        subprocess.run(["bash", "-c", VENV.format(python=sys.executable)], cwd=clone, check=True)

    person = Person(tmp_path, newcomer(tmp_path / "me"))
    person.env["PYTHONPATH"] = str(clone)
    person.words = {
        "git clone <this repository> autorl-hpc": f"mkdir autorl-hpc && {HERE.format(repo=REPO)}",
        "/RUN": lambda: "/" + next(path.name for path in experiment.path.glob("arithmetic-sft-grpo-*")),
    }
    person.after = {"git clone": install}
    try:
        person.follows("README.md", until="autorl-hpc init")
    finally:
        if experiment.resolved.exists() and (alive_jobs(experiment) or processes(experiment)):
            cancel_runs(experiment, [])
    assert not (tmp_path / "me" / "home" / ".cache").exists()  # nothing is left in the home

    # Nothing to submit: the base model is kept, and its score is the run's.
    null = view_of(experiment, "null").closed
    assert null is not None and null.selected_by == "base_kept" and null.selected is None
    base = report_score(experiment, "null")
    copycat = view_of(experiment, "copycat")
    assert all(submission.is_base for submission in copycat.accepted()) and copycat.accepted()
    assert report_score(experiment, "copycat") == base
    # Training helps, and RL on top of it helps again.
    sft, both = report_score(experiment, "sft"), report_score(experiment, "sft-grpo")
    scores = f"base {base}, sft {sft}, sft-grpo {both}"
    assert base < 25 and sft > 40, scores
    assert both > sft + 10, scores
    assert len(view_of(experiment, "sft-grpo").accepted()) == 2

    for name in ("index.html", "summary.json", "summary.csv", "summary.md"):
        assert (experiment.report / name).stat().st_size > 0, name
    verified = person.does("autorl-hpc verify runs/ --json")
    verdicts = json.loads(verified)
    assert sum(verdict["of"] == "run" for verdict in verdicts) == 4
    assert all(verdict["whole"] for verdict in verdicts)
    (bundle,) = root.glob("*.tar.zst")
    assert bundle.stat().st_size > 0
    assert (root / "runs" / "report" / "compare.html").is_file()
    wait_for(lambda: not alive_jobs(experiment), "the jobs, which see the end within two seconds")
    assert os.listdir(experiment.queue) == [] and os.listdir(experiment.claims) == []
    if os.getuid() == 0:
        the_group_can_read(root / "runs")


def the_group_can_read(runs: Path) -> None:
    """A second user of the group verifies and reports what was launched under umask 027."""
    for path in runs.parents[: len(runs.parents) - 2]:  # pytest's own folders are closed
        path.chmod(path.stat().st_mode | 0o055)
    left, right = multiprocessing.Pipe()

    def look() -> tuple[list[list[str]], int, list[str]]:
        with tempfile.TemporaryDirectory() as out:
            found = report.refresh([runs], Path(out) / "report", report.Options(figures=False))
            return [one.problems for one in verify_paths([runs])], found.index.stat().st_size, list_closed(runs)

    def as_another() -> None:
        look()  # loads modules that the other user may not read
        os.setgroups([])
        os.setuid(65534)
        right.send(look())

    child = multiprocessing.get_context("fork").Process(target=as_another)
    child.start()
    right.close()
    problems, page, closed = left.recv()
    child.join()
    assert not any(problems) and page > 0
    assert all(name.endswith((".key", "driver.jsonl")) for name in closed), closed


def list_closed(folder: Path) -> list[str]:
    """What this user can't read."""
    closed: list[str] = []
    for place, _, names in os.walk(folder, onerror=lambda error: closed.append(str(error.filename))):
        closed.extend(name for name in names if not os.access(os.path.join(place, name), os.R_OK))
    return closed
