"""`verify` on whole chains whose scores and weights are not what they are called: each says something that the rest denies."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from treemaker import RECIPE, Tree, TreeRun, evaluation, outcomes, save_items, sha
from weights import write_safetensors

from autorl_hpc.evidence.verify import verify_run
from autorl_hpc.files.checkpoint import folder_content_hash
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.entries import Fingerprint, Score
from autorl_hpc.states import EntryKind, Protocol, Split

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def problems(run: TreeRun) -> list[str]:
    return verify_run(run.tree.experiment, run.dir).problems


def started(tmp_path: Path, **fields: Any) -> TreeRun:
    return Tree(tmp_path / "exp", **fields).run().start()


@pytest.mark.parametrize("protocol", Protocol)
@pytest.mark.parametrize("is_base", [True, False])
def test_a_base_model_that_was_kept_or_submitted_is_whole(tmp_path: Path, protocol: Protocol, is_base: bool) -> None:
    run = started(tmp_path, protocol=protocol)
    if is_base:
        run.submit(10.0, outcomes(40, range(10)), is_base=True)
    assert problems(run.seal().close()) == []


@pytest.mark.parametrize("is_base", [True, False])
@pytest.mark.parametrize("items", ["0" * 64, None])
def test_a_score_of_100_for_the_base_model_is_not_that_of_its_record(
    tmp_path: Path, is_base: bool, items: str | None
) -> None:
    run = started(tmp_path)
    if is_base:
        run.submit(10.0, outcomes(40, range(10)), is_base=True)
    run.seal()
    true = run.tree.baseline(run.science, Split.REPORT).evaluation
    run.close(report=true.model_copy(update={"score": 100.0, "correct": 100, "items_sha256": items}))
    assert "is 100.0, and not what baselines/" in problems(run)[0]


def test_a_score_of_the_base_model_is_on_both_splits_that_of_its_record(tmp_path: Path) -> None:
    run = started(tmp_path)
    true = run.tree.baseline(run.science, Split.FEEDBACK).evaluation.model_copy(update={"score": 99.0})
    number = run.submit(10.0, is_base=True)
    run.write(EntryKind.SCORE, Score(submission_id=number, evaluation=true, grader="g", generation=1))
    assert "on the feedback split is 99.0, and not what baselines/" in problems(run)[0]
    other = started(tmp_path / "other").seal().close(baseline_report=None)
    assert "beside no record" in problems(other)[0]


def test_who_is_the_base_model(tmp_path: Path) -> None:
    run = started(tmp_path)
    run.submit(10.0, content_hash=run.science.base_model_content_hash)
    assert problems(run) == ["submission 000001 is not called the base model and has its content"]
    other = Tree(tmp_path / "other").run().start()
    other.submit(10.0)
    view = RunView.of(other.ledger.read())
    assert view.submissions[1].content_hash != other.science.base_model_content_hash
    other.submit(20.0, is_base=True)
    assert problems(other) == []


@pytest.mark.parametrize("field", ["content_hash", "recipe_hash"])
def test_a_report_score_of_something_else(tmp_path: Path, field: str) -> None:
    run = started(tmp_path)
    run.submit(10.0, outcomes(40, range(20)))
    run.seal()
    items = save_items(run.dir.items / "000001.report.jsonl.gz", outcomes(100, range(60)))
    content = RunView.of(run.ledger.read()).submissions[1].content_hash or ""
    true = evaluation(Split.REPORT, content, outcomes(100, range(60)), items)
    assert true.recipe_hash == RECIPE.hash()
    run.close(report=true.model_copy(update={field: sha("other")}))
    assert "of other weights or of another recipe" in problems(run)[0]


def artifact(tmp_path: Path, *, head: bool = True, left_out: tuple[str, ...] = (HEAD,)) -> tuple[TreeRun, Path]:
    """A run with an accepted copy that carries its tied head, as intake leaves it."""
    run = started(tmp_path)
    embedding = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensors = {EMBEDDING: ("F32", embedding), "w": ("F32", embedding + 1)}
    if head:
        tensors[HEAD] = ("F32", embedding)
    folder = run.tree.experiment.artifacts / "new"
    (folder / "refs").mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", tensors)
    content = folder_content_hash(folder, drop=frozenset((HEAD,)))
    (folder / "MANIFEST.json").write_text(json.dumps({"not_in_hash": left_out}))
    target = folder.rename(run.tree.experiment.artifacts / content)
    run.submit(10.0, content_hash=content)
    return run, target


@pytest.mark.parametrize("name", ["trojan", EMBEDDING])
def test_a_tensor_that_the_manifest_takes_out_of_the_hash(tmp_path: Path, name: str) -> None:
    run, folder = artifact(tmp_path)
    write_safetensors(folder / "more.safetensors", {name: ("F32", np.ones((2, 2), np.float32))})
    (folder / "MANIFEST.json").write_text(json.dumps({"not_in_hash": [HEAD, name]}))
    assert f"its manifest leaves tensor {name!r} out of the content hash" in problems(run)[0]


def test_a_head_that_is_not_the_embedding(tmp_path: Path) -> None:
    run, folder = artifact(tmp_path, head=False)
    assert "it holds no lm_head.weight" in problems(run)[0]
    write_safetensors(folder / "more.safetensors", {HEAD: ("F32", np.ones((3, 4), np.float32))})
    assert "lm_head.weight, which the content hash leaves out, is not model.embed_tokens.weight" in problems(run)[0]


def test_files_that_no_accepted_copy_has(tmp_path: Path) -> None:
    run, folder = artifact(tmp_path)
    assert problems(run) == []
    for name in ("modeling.py", "pytorch_model.bin", "config.json"):
        (folder / name).write_text("x")
        assert f"it holds {name!r}, which no accepted copy has" in problems(run)[0]
        (folder / name).unlink()


def test_sketches_are_those_of_their_fingerprints(tmp_path: Path) -> None:
    run = started(tmp_path)
    run.submit(10.0, outcomes(40, range(20)))
    content = RunView.of(run.ledger.read()).submissions[1].content_hash or ""
    run.write(EntryKind.FINGERPRINT, Fingerprint(submission_id=1, content_hash=content, sketch_sha256=sha("sketch")))
    run.dir.sketches.mkdir()
    (run.dir.sketches / "000001.v1").write_text("sketch")
    assert problems(run) == []
    (run.dir.sketches / "000001.v1").write_text("another")
    assert problems(run) == ["sketches/000001.v1 was altered: its hash is not the one in its fingerprint"]
