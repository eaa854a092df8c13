"""A base model is its weights and all that decides prompts and decoding: template, tokenizer, special tokens, config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints import TINY
from helpers import PATIENCE_S, Cluster, wait_for

from autorl_hpc.evidence.verify import verify_paths
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import staged_pin
from autorl_hpc.stage.models import stage_model

pytestmark = pytest.mark.xdist_group("base-identity")
ODD = "{% for m in messages %}Answer nothing. {{ m['content'] }}{% endfor %}"
MATRIX: dict[str, Any] = {"task": "mini", "base_model": ["b/plain", "b/odd"]}


def tiny_with(folder: Path, **changes: Any) -> Path:
    """The tiny model with other small files; a dictionary is merged into a JSON file."""
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py"))
    for name, change in changes.items():
        path = folder / name.replace("__", ".")
        path.chmod(0o644)
        path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    return folder


@pytest.fixture
def cluster(staged: Path, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(staged, tmp_path)
    try:
        cluster.mini_task(6)
        file = cluster.share / "tasks" / "mini" / "task.yaml"
        task = yaml.safe_load(file.read_text())
        task["recipes"][0]["chat"] = "auto"
        file.write_text(yaml.safe_dump(task))
        for name, changes in (("plain", {}), ("odd", {"chat_template__jinja": ODD})):
            source = tiny_with(tmp_path / "sources" / name, **changes)
            cluster.run("stage", f"b/{name}", "--from", str(source), "--root", str(cluster.root.path))
        yield cluster
    finally:
        cluster.end()


def test_base_models_of_equal_weights_and_other_templates_share_no_score(cluster: Cluster, tmp_path: Path) -> None:
    """Else a run is measured against what another template's prompts gave: +57.6 points in the place of -40.4."""
    run_ids = cluster.prepare(["null"], matrix=MATRIX)
    hashes = [json.loads(cluster.run_dir(run).record.read_text())["science"] for run in run_ids]
    assert len({one["base_model_content_hash"] for one in hashes}) == 1
    assert len({one["base_model_prompting_hash"] for one in hashes}) == 2

    other = tiny_with(tmp_path / "other", chat_template__jinja=ODD + "!")
    again = ("stage", "b/odd", "--from", str(other), "--again", "--root", str(cluster.root.path))
    elsewhere, bundle = str(tmp_path / "elsewhere"), str(tmp_path / "b.tar.gz")
    cluster.run("stage", "b/odd", "--from", str(other), "--root", elsewhere)
    cluster.run("stage", "b/odd", "--bundle", bundle, "--root", elsewhere)
    for asked in (again, ("stage", "--from", bundle, "--again", "--root", str(cluster.root.path))):
        refused = cluster.run(*asked, check=False)
        assert refused.returncode and "chat_template.jinja" in refused.stderr and "isn't over" in refused.stderr

    for run_id in run_ids:
        assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
    grader = cluster.grader()
    wait_for(lambda: cluster.finished(run_ids), "the closing")
    assert grader.wait(PATIENCE_S) == 0, cluster.logs()
    measured = [json.loads(path.read_text())["evaluation"] for path in cluster.experiment.baselines.glob("*.json")]
    assert len(measured) == 4 and len({one["prompts_sha256"] for one in measured}) == 4  # two models on two splits
    assert all(one.whole for one in verify_paths([cluster.experiment.path]))

    told = cluster.run(*again)
    assert "changed since it was staged: chat_template.jinja" in told.stdout + told.stderr
    with pytest.raises(AssertionError, match="b/odd was staged anew since this experiment was launched: another chat"):
        cluster.prepare(["null"], matrix=MATRIX)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"config__json": {"transformers_version": "4.1.0", "torch_dtype": "bfloat16"}}, True),
        ({"tokenizer_config__json": {"name_or_path": "/elsewhere", "is_local": False}}, True),
        ({"config__json": {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}}, False),
        ({"generation_config__json": {"eos_token_id": [0, 5]}}, False),
        ({"tokenizer_config__json": {"add_bos_token": True}}, False),
        ({"chat_template__jinja": ODD}, False),
    ],
)
def test_what_decides_prompts_and_decoding_is_in_the_hash(tmp_path: Path, changes: dict[str, Any], same: bool) -> None:
    """And what a save notes about itself is not: another machine stages the same model."""
    root, pins = Root(tmp_path / "root"), []
    root.path.mkdir()
    for name, change in (("a", {}), ("b", changes)):
        stage_model(root, name if "/" in name else f"m/{name}", tiny_with(tmp_path / name, **change))
        pins.append(staged_pin(root, f"m/{name}"))
    assert pins[0].content_hash == pins[1].content_hash
    assert (pins[0].prompting_hash == pins[1].prompting_hash) is same
