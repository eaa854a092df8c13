"""docs/adding-a-task.md as written: its commands, in its order, on a copy of docs/examples; ends in scored runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from helpers import PATIENCE_S
from realdata import REPO

from autorl_hpc.files.layout import Root
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.run_view import RunView

PAGE = REPO / "docs" / "adding-a-task.md"
PART = re.compile(r"(?:^`([\w./-]+)`\n\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""A block of the page, with the name of the file where one stands before it."""


def commands(folder: Path) -> dict[str, str]:
    """An environment in which `autorl-hpc` is this package, and `bin/` the checkout's."""
    tools = folder / ".tools"
    tools.mkdir()
    for name, arguments in (("autorl-hpc", "-m autorl_hpc"), ("python3", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        (tools / name).chmod(0o755)
    (folder / "bin").symlink_to(REPO / "bin")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AUTORL_")}
    return {**kept, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(REPO)}


def run_of(root: Root, experiment: str) -> RunView:
    """The one run of an experiment."""
    record = json.loads(root.experiment(experiment).resolved.read_text())
    (run_id,) = record["runs"]
    return RunView.of(Ledger(root.experiment(experiment).run(run_id)).read())


def test_the_page_builds_its_tasks_and_ends_in_scored_runs(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    shutil.copytree(REPO / "docs" / "examples", tmp_path, dirs_exist_ok=True)
    env, said = commands(tmp_path), ""
    for name, language, text in PART.findall(page):
        if name:
            assert (tmp_path / name).read_text(encoding="utf-8") == text, f"the page shows another {name}"
        elif language == "bash":
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            said += done.stdout
    assert "halves: recipe default, report split: perfect answers score 100, empty ones 0" in said

    for task in ("halves", "guess"):
        pins = subprocess.run(
            ["bash", "-c", f"bin/pin-task tasks/{task}"],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert len(pins.splitlines()) == 3
        written = (tmp_path / "tasks" / task / "task.yaml").read_text(encoding="utf-8")
        for line in pins.splitlines():
            assert line.split()[-1] in written, f"task.yaml has another pin: {line}"

    root = Root(tmp_path)
    halves, guess = run_of(root, "mine"), run_of(root, "guess")
    for view, n in ((halves, 10), (guess, 2)):
        assert view.closed is not None and view.closed.selected == 1
        score = view.scores[1].evaluation
        assert score.score is not None and score.n == n
        assert view.closed.report is not None and view.closed.report.score is not None and view.closed.report.n == n
    assert (tmp_path / "runs" / "mine" / "report" / "index.html").is_file()
