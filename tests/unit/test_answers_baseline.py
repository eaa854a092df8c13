"""A score whose base model is measured later, by another grader: the answer is told again, once."""

from __future__ import annotations

import json
from pathlib import Path

from treemaker import Tree, outcomes

from autorl_hpc.files.run_view import RunView
from autorl_hpc.states import Split
from autorl_hpc.supervise.intake import ResultWriter


def test_a_baseline_that_comes_after_the_score_is_told(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "x")
    run = tree.run().start()
    run.submit(100.0, outcomes(tree.n_feedback, range(tree.n_feedback // 2)))
    (manifest_id,) = [each.manifest_id for each in RunView.of(run.ledger.read()).submissions.values()]
    baselines, later = tree.experiment.baselines, tmp_path / "later"
    (tmp_path / "workspace" / "results").mkdir(parents=True)
    answers = ResultWriter(run.record, baselines, tmp_path / "workspace")
    told = tmp_path / "workspace" / "results" / f"{manifest_id}.json"

    def update() -> dict[str, object]:
        answers.update(RunView.of(run.ledger.read()))
        found: dict[str, object] = json.loads(told.read_text())
        return found

    tree.baseline(run.science, Split.FEEDBACK)
    baselines.rename(later)
    baselines.mkdir()
    first = update()
    assert (first["status"], first["score"], first["baseline_score"]) == ("scored", 50.0, None)
    assert update() == first
    baselines.rmdir()
    later.rename(baselines)
    second = update()
    assert second["baseline_score"] == 25.0 and second["improvement"] == 25.0
    before = told.stat()
    assert update() == second and told.stat().st_mtime_ns == before.st_mtime_ns, "nothing more is known"
