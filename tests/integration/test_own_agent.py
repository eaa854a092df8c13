"""docs/adding-an-agent.md as written: its two files, its variable, a launch."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from helpers import Cluster

DOC = Path(__file__).resolve().parents[2] / "docs" / "adding-an-agent.md"


def test_the_agent_of_the_docs_runs(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = dict(re.findall(r"`([a-z.]+)`\n\n```[a-z]+\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL))
    folder = tmp_path / "agents" / "mine"
    folder.mkdir(parents=True)
    for name in ("agent.yaml", "start.sh"):
        (folder / name).write_text(blocks[name])
    monkeypatch.setenv("AUTORL_AGENTS_PATH", str(folder.parent))
    job = cluster.spec(["mine"])
    cluster.run("launch", str(job), "--root", str(cluster.root.path), "--dry-run")
    cluster.run("launch", str(job), "--root", str(cluster.root.path))
    shutil.rmtree(folder)  # frozen: the jobs don't need it any more
    cluster.run("status", str(cluster.experiment.path), "--watch")
    (run_id,) = [name.name for name in cluster.experiment.path.iterdir() if name.name.startswith("arithmetic-mine")]
    view = cluster.view(run_id)
    assert view.closed is not None and view.closed.selected == 1
    assert view.submissions[1].is_base
    assert "whole" in cluster.run("verify", str(cluster.experiment.path)).stdout


def test_an_agent_that_is_nowhere_is_named_with_the_way_out(cluster: Cluster) -> None:
    done = cluster.run("launch", str(cluster.spec(["mine"])), "--root", str(cluster.root.path), check=False)
    assert done.returncode == 2
    assert "no agent `mine`" in done.stderr and "AUTORL_AGENTS_PATH" in done.stderr
