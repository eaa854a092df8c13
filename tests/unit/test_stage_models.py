"""Staging of base models: from a folder that a grader can load, whole or not at all."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.checkpoint import INDEX_NAME
from autorl_hpc.files.layout import Root, share
from autorl_hpc.files.store import verify_model
from autorl_hpc.stage import models
from autorl_hpc.stage.models import stage_model

TINY = share("templates") / "models" / "tiny"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(tmp_path / "root")
    made.path.mkdir()
    return made


def test_a_staged_model_has_no_code_and_no_pickles(root: Root, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    for name in ("modeling.py", "pytorch_model.bin", "README.md"):
        (source / name).write_text("x")
    manifest = stage_model(root, "org/copy", source)
    assert {file.path for file in manifest.files} == {p.name for p in TINY.iterdir() if p.suffix != ".py"}
    assert manifest.content_hash == stage_model(root, "tiny", None).content_hash
    assert verify_model(root, "org/copy") == manifest


def test_a_model_in_shards_keeps_its_index(root: Root, tmp_path: Path) -> None:
    from checkpoints import save_shards, tiny_tensors

    source = save_shards(tmp_path / "shards", 2, tiny_tensors())
    shutil.copyfile(TINY / "tokenizer.json", source / "tokenizer.json")
    manifest = stage_model(root, "org/shards", source)
    assert INDEX_NAME in {file.path for file in manifest.files}
    assert manifest.content_hash == stage_model(root, "tiny", None).content_hash


def test_a_model_with_two_saves_in_one_folder_is_refused(root: Root, tmp_path: Path) -> None:
    from checkpoints import save, save_shards

    save(save_shards(tmp_path / "both", 2))
    shutil.copyfile(TINY / "tokenizer.json", tmp_path / "both" / "tokenizer.json")
    with pytest.raises(AutorlError, match="can't serve as a base model: a tensor stands in two"):
        stage_model(root, "org/both", tmp_path / "both")
    assert not [p for p in root.path.rglob("*") if p.is_file()]


@pytest.mark.parametrize(
    "name", ["../../outside/x", "/absolute/model", "a/../b", "a//b", "a/b/c", "org/", "o rg/x", "org/x\n"]
)
def test_a_name_that_is_a_path_is_refused(root: Root, name: str) -> None:
    with pytest.raises(AutorlError, match="is no model name"):
        stage_model(root, name, TINY)
    assert not any(root.path.iterdir())


def test_a_folder_is_never_staged_over_itself(root: Root, tmp_path: Path) -> None:
    """`stage /path/of/model --from /path/of/model` must not replace the user's own folder."""
    source = tmp_path / "mine"
    shutil.copytree(TINY, source)
    (source / "notes.txt").write_text("mine")
    with pytest.raises(AutorlError):
        stage_model(root, str(source), source)
    assert (source / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_model_is_named(root: Root, tmp_path: Path, missing: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    (source / missing).unlink()
    with pytest.raises(AutorlError, match="this folder is no model") as caught:
        stage_model(root, "org/x", source)
    assert caught.value.where == str(source)


BROKEN_MODELS: list[tuple[str, dict[str, bytes | None], str]] = [
    ("config is no JSON", {"config.json": b'{"a"'}, "config.json is no JSON"),
    ("config is not UTF-8", {"config.json": b'{"model_type": "\xe9"}'}, "config.json is no JSON"),
    ("config is a list", {"config.json": b"[]"}, "config.json is no JSON object"),
    ("config is nested without end", {"config.json": b'{"a":' * 100_000}, "config.json is no JSON"),
    ("config names no architecture", {"config.json": b"{}"}, "field `model_type` of config.json"),
    ("architecture is a number", {"config.json": b'{"model_type": 1}'}, "field `model_type` of config.json"),
    ("no tokenizer", {"tokenizer.json": None}, "this folder has no tokenizer"),
    ("nothing of a tokenizer", {"tokenizer.json": None, "tokenizer_config.json": None, "chat_template.jinja": None}, "no tokenizer"),
    ("half a tokenizer", {"tokenizer.json": None, "vocab.json": b"{}"}, "this folder has no tokenizer"),
    ("empty tokenizer", {"tokenizer.json": b""}, "tokenizer.json is no JSON"),
    ("cut weights", {"model.safetensors": b"\0" * 20}, "can't serve as a base model"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "words"), [row[1:] for row in BROKEN_MODELS], ids=[row[0] for row in BROKEN_MODELS])
def test_a_model_that_no_grader_can_load_is_refused(
    root: Root, tmp_path: Path, files: dict[str, bytes | None], words: str
) -> None:
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    for name, content in files.items():
        (source / name).unlink(missing_ok=True)
        if content is not None:
            (source / name).write_bytes(content)
    with pytest.raises(AutorlError) as caught:
        stage_model(root, "org/x", source)
    assert words in caught.value.what and caught.value.next_step
    where = Path(caught.value.where or "")
    assert where.is_relative_to(source) and where.exists(), "names a place where the user can't look"
    assert not [p for p in root.path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("files", [["tokenizer.model"], ["vocab.json", "merges.txt"]])
def test_other_tokenizers_are_taken(root: Root, tmp_path: Path, files: list[str]) -> None:
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    (source / "tokenizer.json").unlink()
    for name in files:
        (source / name).write_text("{}")
    assert set(files) < {file.path for file in stage_model(root, "org/x", source).files}


def test_a_source_that_can_not_be_read_is_named(root: Root, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    (source / "other.safetensors").mkdir()
    with pytest.raises(AutorlError, match="staging org/x failed: Is a directory") as caught:
        stage_model(root, "org/x", source)
    assert caught.value.where == str(source / "other.safetensors")


def test_a_killed_staging_of_a_model_leaves_nothing_that_looks_staged(root: Root) -> None:
    child = os.fork()
    if child == 0:
        try:
            setattr(models, "replace_folder", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010
            stage_model(root, "tiny", None)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    with pytest.raises(AutorlError, match="not staged"):
        verify_model(root, "autorl/tiny")
    stage_model(root, "tiny", None)
    verify_model(root, "autorl/tiny")


def test_a_model_that_can_not_be_fetched_says_how_to_stage_it(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(AutorlError, match=r"this node can't reach 127\.0\.0\.1") as caught:
        stage_model(root, "org/x", None)
    assert "--from DIR" in (caught.value.next_step or "")
