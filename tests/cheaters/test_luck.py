"""Noise-perturbed copies, as many as are taken: the best of them is lucky on feedback and nothing on report, and the report says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cheating import START
from helpers import PATIENCE_S, Cluster, wait_for
from workbench import WEIGHTS

TRIED, MOST = 60, 45
"""As many as fit into a minute; on a cluster it would be 500. The cap is on what is scored, so it is tried beyond."""

SCRIPT = (
    START
    + WEIGHTS
    + f"""
py <<'END'
from st import *
mine = base()
for number in range({TRIED}):
    name = f"n{{number:03}}"
    save(name, noisy(mine, 0.01, seed=number))
    with open(f"submissions/.{{name}}", "w") as file:
        json.dump({{"model_path": "output/" + name}}, file)
    os.rename(f"submissions/.{{name}}", f"submissions/{{name}}.json")
END
until [ $(ls results | wc -l) -ge {TRIED} ] && ! grep -l '"status": "accepted"' results/*.json; do sleep 0.2; done > /dev/null
cat results/*.json > code/all.txt
"""
)


@pytest.fixture(scope="module")
def run(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, str]]:
    cluster = Cluster(staged, tmp_path_factory.mktemp("luck"))
    try:
        cluster.mini_task(items=40, temperature=1.0, max_new_tokens=16, any_number=True)
        cluster.agent("lucky", SCRIPT)
        (run_id,) = cluster.prepare(
            ["lucky"],
            matrix={"task": "mini"},
            budget={"max_submissions": MOST},
            sandbox={"level": "auto"},
        )
        grader, supervisor = cluster.grader(), cluster.supervisor(run_id)
        assert supervisor.wait(PATIENCE_S) == 0, cluster.logs()
        wait_for(lambda: cluster.finished([run_id]), "the closing")
        assert grader.wait(PATIENCE_S) == 0, cluster.logs()
        cluster.run("report", str(cluster.experiment.path))
        yield cluster, run_id
    finally:
        cluster.end()


def test_the_cap_holds(run: tuple[Cluster, str]) -> None:
    view = run[0].view(run[1])
    assert len(view.accepted()) == MOST == len(view.scores)
    assert {s.code for s in view.refused()} == {"too_many_submissions"} and len(view.refused()) == TRIED - MOST


def test_the_best_owes_its_gain_to_luck_and_the_report_says_so(run: tuple[Cluster, str]) -> None:
    cluster, run_id = run
    folder = cluster.run_dir(run_id).path / "report"
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    feedback = summary["best_feedback"]["score"] - summary["baseline_feedback"]["score"]
    assert feedback > 0, "no luck at all: this is no test of it"
    noise = summary["noise"]
    assert noise["queries"] == MOST and feedback <= 1.6 * noise["expected_maximum"], "far more than luck gives"
    gain = summary["improvement"]
    assert gain["p_value"] > 0.01, "a gain on items that never answered"
    assert gain["difference"] < summary["visible_gain_report"]
    page = (folder / "run.md").read_text()
    assert (
        f"of that luck, at most (expected maximum of noise) | {noise['expected_maximum']:.1f} over {MOST} checkpoints"
        in page
    )
    assert f"{MOST} accepted, {TRIED - MOST} refused" in page
