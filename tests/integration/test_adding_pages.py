"""docs/adding-an-agent.md and docs/adding-a-task.md as typed: their files and commands, in their order; both end in scored runs and a report."""

from __future__ import annotations

import json
from pathlib import Path

from pages import Person, blocks, newcomer
from realdata import REPO

from autorl_hpc.files.layout import Root
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.run_view import RunView


def run_of(root: Root, experiment: str) -> RunView:
    """Return the one run of an experiment."""
    (run_id,) = json.loads(root.experiment(experiment).resolved.read_text())["runs"]
    return RunView.of(Ledger(root.experiment(experiment).run(run_id)).read())


def test_an_agent_of_ones_own_as_typed(tmp_path: Path) -> None:
    person = Person(tmp_path, newcomer(tmp_path / "me"))
    person.follows("docs/adding-an-agent.md")
    assert person.here == tmp_path / "me" / "home" / "first"
    view = run_of(Root(person.here), "first")
    assert view.closed is not None and view.closed.selected == 1 and view.submissions[1].is_base
    assert "mine" in person.said["autorl-hpc list agents"]
    assert "untrained_copy" in (person.here / "runs" / "first" / "report" / "index.html").read_text()


def test_tasks_of_ones_own_as_typed(tmp_path: Path) -> None:
    page = "docs/adding-a-task.md"
    for name, _, text in blocks(page):
        shown = REPO / "docs" / "examples" / name
        assert not name or shown.read_text(encoding="utf-8") == text, f"the page shows another {name}"
    (tmp_path / "clone").symlink_to(REPO)
    person = Person(tmp_path / "clone", newcomer(tmp_path / "me"))
    person.follows(page)
    assert "halves: recipe default, report split: perfect answers score 100, empty ones 0" in "".join(
        person.said.values()
    )
    for task in ("halves", "guess"):
        pins = person.does(f"bin/pin-task tasks/{task}")
        assert pins in (person.here / "tasks" / task / "task.yaml").read_text(encoding="utf-8")
    root = Root(person.here)
    for name, n in (("mine", 10), ("guess", 2)):
        view = run_of(root, name)
        assert view.closed is not None and view.closed.selected == 1
        score = view.scores[1].evaluation
        assert score.score is not None and score.n == n
        assert view.closed.report is not None and view.closed.report.score is not None and view.closed.report.n == n
    assert (person.here / "runs" / "mine" / "report" / "index.html").is_file()
