"""`verify` on experiment.json, which no chain covers: held against experiment.yaml and the runs."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from treemaker import Tree

from autorl_hpc.evidence.verify import SHARED, VerifyResult, verify_paths
from autorl_hpc.records import readable_json
from autorl_hpc.records.experiment import Budget

YAML = """name: exp
matrix: {task: arithmetic, agent: sft, base_model: org/tiny}
budget: {wall_clock: 20m}
sandbox: {network: open}
"""


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """An experiment as launch leaves it, but for its code."""
    tree = Tree(tmp_path / "exp")
    tree.experiment.code.rmdir()
    tree.finished(seed=0, solved=30)
    give(tree, YAML)
    assert shared(tree).problems == [] and len(shared(tree).notes) == 1  # code/ is not here
    return tree


def give(tree: Tree, text: str) -> None:
    tree.experiment.given.write_text(text)
    edit(tree, spec_sha256=hashlib.sha256(text.encode()).hexdigest())


def edit(tree: Tree, **fields: Any) -> None:
    path = tree.experiment.resolved
    value = json.loads(path.read_text())
    spec = value["spec"] | fields.pop("spec", {})
    path.write_bytes(readable_json(value | {"spec": spec} | fields))


def shared(tree: Tree) -> VerifyResult:
    return next(verdict for verdict in verify_paths([tree.path]) if verdict.run_id == SHARED)


def test_another_yaml(tree: Tree) -> None:
    tree.experiment.given.write_text(YAML.replace("20m", "2h"))
    assert "experiment.yaml has not the hash that experiment.json names" in shared(tree).problems[0]
    tree.experiment.given.unlink()
    verdict = shared(tree)
    assert verdict.problems == [] and any("experiment.yaml is not here" in note for note in verdict.notes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("budget", {"wall_clock_s": 7200.0}),
        ("attempts", 9),
        ("sandbox", {"level": "none"}),
        ("protocol", "paper"),
        ("retention", {"artifacts": "all"}),
    ],
)
def test_a_spec_that_is_not_that_of_the_yaml(tree: Tree, name: str, value: object) -> None:
    edit(tree, spec={name: value})
    assert f"experiment.json was altered: its `{name}` is not that of experiment.yaml" in shared(tree).problems


def test_a_grader_of_ones_own(tree: Tree) -> None:
    edit(tree, grader={"batch_tokens": 256})
    assert shared(tree).problems == ["experiment.json was altered: its `grader` is not that of its `spec`"]


@pytest.mark.parametrize("change", [("20m", "2h"), ("network: open", "network: none")])
def test_both_written_anew_don_t_fit_the_runs(tree: Tree, change: tuple[str, str]) -> None:
    give(tree, YAML.replace(*change))
    spec = {"budget": {"wall_clock_s": 7200.0}} if change[0] == "20m" else {"sandbox": {"network": "none"}}
    edit(tree, spec=spec)
    assert shared(tree).problems == ["experiment.json was altered: no run has its budget, protocol and network"]


def test_a_second_launch_with_another_budget_is_a_note(tree: Tree) -> None:
    tree.run(seed=1, budget=Budget(wall_clock_s=2400))
    give(tree, YAML)
    verdict = shared(tree)
    assert verdict.problems == [] and any(
        "of an earlier launch, or experiment.json was altered" in n for n in verdict.notes
    )


def test_another_level_of_the_sandbox_is_a_note(tree: Tree) -> None:
    give(tree, YAML.replace("{network: open}", "{level: bwrap, network: open}"))
    edit(tree, spec={"sandbox": {"level": "bwrap", "network": "open"}})
    verdict = shared(tree)
    assert verdict.problems == []
    assert any("asks for sandbox auto, experiment.json for bwrap" in note for note in verdict.notes)
