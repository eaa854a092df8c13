"""A run is exported, and scored again in another root that has the task and the base model: nothing else is shared."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers import Cluster, wait_for

from autorl_hpc.files.layout import Root


@pytest.fixture
def closed(cluster: Cluster) -> tuple[Cluster, str]:
    """A closed run of one checkpoint."""
    cluster.mini_task(12, max_new_tokens=8)
    run_id = cluster.sealed_run(matrix={"task": "mini"})
    grader = cluster.grader()
    wait_for(lambda: cluster.finished([run_id]), 120, "the closing")
    grader.wait(30)
    assert cluster.view(run_id).closed is not None, cluster.logs()
    return cluster, run_id


def elsewhere(cluster: Cluster, tmp_path: Path) -> Root:
    """Another root with the same things staged, and no run."""
    root = Root(tmp_path / "elsewhere")
    for part in ("store", "vault"):
        shutil.copytree(cluster.root.path / part, root.path / part)
    return root


def rescore(cluster: Cluster, root: Root, bundle: Path, *more: str, code: int = 0) -> dict[str, Any]:
    done = cluster.run("rescore", str(bundle), "--root", str(root.path), "--device", "cpu", "--json", *more, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_there_and_back(closed: tuple[Cluster, str], tmp_path: Path) -> None:
    cluster, run_id = closed
    bundle = tmp_path / "run.tar.zst"
    run = str(cluster.run_dir(run_id).path)
    told = json.loads(cluster.run("export", run, "--out", str(bundle), "--json").stdout)
    again = json.loads(cluster.run("export", run, "--out", str(tmp_path / "again.tar.zst"), "--json").stdout)
    assert again["sha256"] == told["sha256"] and told["weights"]
    root = elsewhere(cluster, tmp_path)
    before = sorted(os.listdir(root.path))
    found = rescore(cluster, root, bundle, "--expect", told["head"])
    print(json.dumps(found, indent=1))
    assert found["holds"] and found["anchored"] and found["head"] == told["head"]
