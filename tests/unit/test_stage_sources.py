"""Tasks whose source files are downloaded, and models of the Hub: pinned, checked, resumed; the Hub is a loopback server."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import PATIENCE_S
from web_server import LoopbackServer, clean_environment, code, cut, put_model, served, whole

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.checkpoint import INDEX_NAME
from autorl_hpc.files.layout import Root, share
from autorl_hpc.files.store import verify_model
from autorl_hpc.stage import download, models, tasks
from autorl_hpc.stage.download import NoNetwork, Patience
from autorl_hpc.stage.models import stage_model
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.heldout import verify_staged_task
from autorl_hpc.tasks.loader import Task, load_task

TINY = share("templates") / "models" / "tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
QUICK = Patience(tries=3, timeout_s=PATIENCE_S, first_pause_s=0.01, longest_pause_s=0.02, longest_wait_s=1.0)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackServer]:
    clean_environment(monkeypatch, tmp_path)
    for module in (tasks.fetch_sources, download.fetch_model):
        monkeypatch.setitem(module.__kwdefaults__, "patience", QUICK)
    with served() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url())
        yield running


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(tmp_path / "root")
    made.path.mkdir()
    return made


def nobody(server: LoopbackServer) -> None:
    """No server is there any more."""
    server.shutdown()
    server.server_close()


# --- tasks ---

PREPARE = """
import shutil

def prepare(source, out):
    for name in ("train/train.jsonl", "feedback/items.jsonl", "report/items.jsonl"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name.replace("/", "-"), out / name)
"""
ROW = b'{"id": "%d", "question": "q", "answer": "#### 1"}\n'
FILES = {"train-train.jsonl": ROW % 1, "feedback-items.jsonl": ROW % 2, "report-items.jsonl": ROW % 3}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def task(server: LoopbackServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    """A task with three source files on the server, and an optional one that only a person can get."""
    folder = tmp_path / "tasks" / "far"
    folder.mkdir(parents=True)
    (folder / "prepare.py").write_text(PREPARE)
    (folder / "description.md").write_text("Far away.\n")
    arithmetic = yaml.safe_load((load_task("arithmetic").folder / "task.yaml").read_text())
    sources: list[dict[str, Any]] = [
        {"file": name, "sha256": sha(data), "url": server.url(f"/d/{name}")} for name, data in FILES.items()
    ]
    sources.append(
        {"file": "more.json", "sha256": sha(b"x"), "url": "https://h/x (through a script)", "optional": True}
    )
    sources[0]["url"] = f"hf://datasets/org/far@{COMMIT}/d/train.jsonl"
    value = {
        **arithmetic,
        "name": "far",
        "source": "the page of its authors",
        "sources": sources,
        "train_files": {"train/train.jsonl": sha(FILES["train-train.jsonl"])},
        "splits": {s: {"n": 1, "sha256": sha(FILES[f"{s}-items.jsonl"])} for s in ("feedback", "report")},
    }
    (folder / "task.yaml").write_text(yaml.safe_dump(value))
    for name, data in FILES.items():
        server.answers[f"/d/{name}"] = [whole(data)]
    server.answers[f"/datasets/org/far/resolve/{COMMIT}/d/train.jsonl"] = [whole(FILES["train-train.jsonl"])]
    monkeypatch.setenv("AUTORL_TASKS_PATH", str(folder.parent))
    return load_task("far")


def test_the_files_of_a_task_are_fetched(server: LoopbackServer, root: Root, task: Task) -> None:
    lines: list[str] = []
    stage_task(root, task, None, say=lines.append)
    verify_staged_task(root, task)
    assert f"far: feedback-items.jsonl from {server.url('/d/feedback-items.jsonl')}" in lines
    assert not (root.vault / ".sources" / "far").exists() and not list(root.store.rglob("*items*"))
    seen = len(server.seen)
    stage_task(root, task, None)
    assert len(server.seen) == seen, "it is staged already"


def test_they_can_be_kept_where_no_agent_looks(server: LoopbackServer, root: Root, task: Task) -> None:
    stage_task(root, task, None, keep_sources=True)
    kept = root.vault / ".sources" / "far"
    assert sorted(os.listdir(kept)) == sorted(FILES)
    assert {stat.S_IMODE(p.stat().st_mode) for p in (root.vault, kept.parent, kept)} == {0o700}
    seen = len(server.seen)
    stage_task(root, task, None, again=True, keep_sources=True)
    assert len(server.seen) == seen, "they are there"


def test_a_failed_download_goes_on_with_what_is_there(server: LoopbackServer, root: Root, task: Task) -> None:
    server.answers["/d/report-items.jsonl"] = [cut(FILES["report-items.jsonl"], 5), code(500)]
    with pytest.raises(AutorlError, match=r"report-items\.jsonl could not be downloaded"):
        stage_task(root, task, None)
    assert not (root.task_store("far")).exists() and not root.task_vault("far").exists()
    server.answers["/d/report-items.jsonl"] = [whole(FILES["report-items.jsonl"])]
    server.seen.clear()
    stage_task(root, task, None)
    assert [(path, headers.get("Range")) for path, headers in server.seen] == [("/d/report-items.jsonl", "bytes=5-")]


def test_a_file_of_another_version_is_refused(server: LoopbackServer, root: Root, task: Task) -> None:
    server.answers["/d/report-items.jsonl"] = [whole(ROW % 4)]
    with pytest.raises(AutorlError, match=r"report-items\.jsonl as it was downloaded has sha256") as caught:
        stage_task(root, task, None)
    assert sha(ROW % 4) in caught.value.what and sha(ROW % 3) in caught.value.what
    assert caught.value.exit_code is Exit.FAILED and not root.task_store("far").exists()


def test_without_network_every_file_is_listed(server: LoopbackServer, root: Root, task: Task) -> None:
    nobody(server)
    with pytest.raises(NoNetwork, match=r"this node can't reach 127\.0\.0\.1") as caught:
        stage_task(root, task, None)
    advice = caught.value.next_step or ""
    assert "autorl-hpc stage far --from DIR" in advice and "on the login node" in advice and "--bundle" in advice
    for name, data in FILES.items():
        assert f"{name}  {server.url('')}" in advice and f"sha256 {sha(data)}" in advice
    assert "more.json  https://h/x (through a script)" in advice and "(optional)" in advice


def test_a_file_that_only_a_person_can_get_is_named(server: LoopbackServer, root: Root, task: Task) -> None:
    value = yaml.safe_load((task.folder / "task.yaml").read_text())
    del value["sources"][1]["url"]
    (task.folder / "task.yaml").write_text(yaml.safe_dump(value))
    with pytest.raises(AutorlError, match=r"feedback-items\.jsonl can't be fetched by machine") as caught:
        stage_task(root, load_task("far"), None)
    assert "get feedback-items.jsonl from the page of its authors, train-train.jsonl from" in (
        caught.value.next_step or ""
    )
    assert not server.seen


def test_an_address_that_is_none_is_named_by_field(server: LoopbackServer, root: Root, task: Task) -> None:
    value = yaml.safe_load((task.folder / "task.yaml").read_text())
    value["sources"][1]["url"] = "hf://org/x/y"
    (task.folder / "task.yaml").write_text(yaml.safe_dump(value))
    with pytest.raises(
        AutorlError, match=r"field `sources`, feedback-items\.jsonl: hf://org/x/y is no address"
    ) as caught:
        stage_task(root, load_task("far"), None)
    assert caught.value.where == str(task.folder / "task.yaml")


@pytest.mark.parametrize("name", ["alpacaeval", "gsm8k"])
def test_shipped_tasks_that_are_fetched_name_whole_commits(name: str) -> None:
    for one in tasks.wanted_sources(load_task(name)):
        if one.address is not None:
            assert any(len(part) == 40 for part in one.address.url.split("/")), one.address.url


# --- models ---


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What a repository of the Hub may hold beside a model."""
    folder = tmp_path / "source"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py"))
    for name in (
        "modeling.py",
        "pytorch_model.bin",
        "README.md",
        "consolidated.safetensors",
        "original/model.safetensors",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    return folder


def test_a_model_of_the_hub(server: LoopbackServer, root: Root, source: Path) -> None:
    put_model(server, "org/m", source, COMMIT)
    manifest = stage_model(root, "org/m", None)
    assert manifest.revision == COMMIT and manifest.licence == "mit" and manifest.source == server.url("/org/m")
    assert manifest.content_hash == stage_model(root, "tiny", None).content_hash
    assert {f.path for f in manifest.files} == {p.name for p in TINY.iterdir() if p.suffix != ".py"}
    assert verify_model(root, "org/m") == manifest
    asked = [path for path, _ in server.seen]
    assert not [path for path in asked if path.endswith((".py", ".bin", ".md", "consolidated.safetensors"))]
    assert all(f"/resolve/{COMMIT}/" in path for path in asked[1:]), "the revision is looked up once, and kept"
    assert asked[0] == "/api/models/org/m/revision/main?blobs=true"
    assert not [p for p in (root.store / ".sources").rglob("*") if p.is_file()]
    assert {stat.S_IMODE(p.stat().st_mode) for p in root.model("org/m").iterdir()} == {0o444}


def test_a_pinned_revision(server: LoopbackServer, root: Root, source: Path) -> None:
    put_model(server, "org/m", source, COMMIT)
    assert stage_model(root, f"org/m@{COMMIT}", None, keep_sources=True).revision == COMMIT
    assert server.seen[0][0] == f"/api/models/org/m/revision/{COMMIT}?blobs=true"
    assert (root.store / ".sources" / "models" / f"org/m@{COMMIT}" / "config.json").is_file()
    seen = len(server.seen)
    stage_model(root, f"org/m@{COMMIT}", None)
    assert len(server.seen) == seen, "it is staged already"
    other = "f" * 40
    with pytest.raises(AutorlError, match=f"staged at revision {COMMIT}, asked was for {other}") as caught:
        stage_model(root, f"org/m@{other}", None)
    assert f"org/m@{other} --again" in (caught.value.next_step or "")
    stage_model(root, f"org/m@{COMMIT}", None, again=True)
    assert len(server.seen) == seen + 1, "what was kept is not fetched again"


def in_shards(folder: Path, tmp_path: Path) -> Path:
    from checkpoints import save_shards, tiny_tensors

    made = save_shards(tmp_path / "shards", 2, tiny_tensors())
    for name in ("tokenizer.json", "config.json"):
        shutil.copyfile(folder / name, made / name)
    return made


def test_a_model_in_shards(server: LoopbackServer, root: Root, source: Path, tmp_path: Path) -> None:
    shards = in_shards(source, tmp_path)
    (shards / "extra.safetensors").write_text("x")
    put_model(server, "org/m", shards, COMMIT)
    manifest = stage_model(root, "org/m", None)
    assert manifest.content_hash == models.TINY_CONTENT_HASH
    assert INDEX_NAME in {f.path for f in manifest.files} and "extra.safetensors" not in {
        f.path for f in manifest.files
    }


@pytest.mark.parametrize("named", ["../x.safetensors", "gone.safetensors", "config.json"])
def test_an_index_that_names_something_else(
    server: LoopbackServer, root: Root, source: Path, tmp_path: Path, named: str
) -> None:
    shards = in_shards(source, tmp_path)
    value = json.loads((shards / INDEX_NAME).read_text())
    value["weight_map"]["x"] = named
    (shards / INDEX_NAME).write_text(json.dumps(value))
    put_model(server, "org/m", shards, COMMIT)
    with pytest.raises(AutorlError, match="which is not there"):
        stage_model(root, "org/m", None)
    assert not root.model("org/m").exists()


def test_a_model_of_pickles_is_refused(server: LoopbackServer, root: Root, source: Path) -> None:
    (source / "model.safetensors").unlink()
    put_model(server, "org/m", source, COMMIT)
    with pytest.raises(AutorlError, match=r"has no config\.json with model\.safetensors") as caught:
        stage_model(root, "org/m", None)
    assert "pickles are not taken" in (caught.value.next_step or "")
    assert len(server.seen) == 1


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_hub_that_lies_about_a_hash(server: LoopbackServer, root: Root, source: Path, file: str) -> None:
    put_model(server, "org/m", source, COMMIT)
    data = bytearray((source / file).read_bytes())
    data[-1] ^= 1
    server.answers[f"/org/m/resolve/{COMMIT}/{file}"] = [whole(bytes(data))]
    with pytest.raises(AutorlError, match=f"{file} as it was downloaded has .*, expected is "):
        stage_model(root, "org/m", None)
    assert not root.model("org/m").exists()


ANSWERS: list[tuple[str, dict[str, Any], str]] = [
    ("another revision", {"sha": "f" * 40}, "it speaks of revision"),
    ("no revision", {"sha": None}, "can't be read"),
    ("no files", {"siblings": None}, "can't be read"),
    ("a file without a hash", {"siblings": [{"rfilename": "config.json", "size": 1, "blobId": "x"}]}, "no git hash of config.json"),
    ("a file without a size", {"siblings": [{"rfilename": "config.json", "blobId": COMMIT}]}, "can't be read"),
    ("weights without a hash", {"siblings": [{"rfilename": "model.safetensors", "size": 1, "lfs": {"sha256": "x"}}]}, "no sha256"),
    ("more than the disk", {"siblings": [{"rfilename": n, "size": 10**16, "blobId": COMMIT} for n in ("config.json", "model.safetensors")]}, "are missing"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), [row[1:] for row in ANSWERS], ids=[row[0] for row in ANSWERS])
def test_answers_of_the_hub_that_make_no_sense(
    server: LoopbackServer, root: Root, source: Path, change: dict[str, Any], words: str
) -> None:
    put_model(server, "org/m", source, COMMIT).update(change)
    with pytest.raises(AutorlError, match=words) as caught:
        stage_model(root, f"org/m@{COMMIT}", None)
    assert caught.value.next_step and caught.value.exit_code is Exit.ENVIRONMENT
    assert not root.model("org/m").exists()


def test_an_answer_that_is_no_json(server: LoopbackServer, root: Root) -> None:
    server.answers["/api/models/org/m/revision/main"] = [whole(b"<html>")]
    with pytest.raises(AutorlError, match="the answer of the Hub about org/m can't be read"):
        stage_model(root, "org/m", None)


def test_a_model_that_is_not_there(server: LoopbackServer, root: Root) -> None:
    with pytest.raises(AutorlError, match="answers 404: there is no such file"):
        stage_model(root, "org/m", None)


def test_without_network_the_ways_out_are_said(server: LoopbackServer, root: Root) -> None:
    nobody(server)
    with pytest.raises(NoNetwork) as caught:
        stage_model(root, f"org/m@{COMMIT}", None)
    advice = caught.value.next_step or ""
    assert f"hf download org/m --revision {COMMIT} --local-dir DIR" in advice and "stage org/m --from DIR" in advice


def test_a_broken_download_of_a_model_goes_on(server: LoopbackServer, root: Root, source: Path) -> None:
    put_model(server, "org/m", source, COMMIT)
    path, data = f"/org/m/resolve/{COMMIT}/model.safetensors", (source / "model.safetensors").read_bytes()
    server.answers[path] = [cut(data, 1000), code(503)]
    with pytest.raises(AutorlError, match=r"model\.safetensors could not be downloaded"):
        stage_model(root, "org/m", None)
    server.answers[path] = [whole(data)]
    server.seen.clear()
    assert stage_model(root, "org/m", None).content_hash == models.TINY_CONTENT_HASH
    assert [headers.get("Range") for headers in server.seen_at(path)] == ["bytes=1000-"]
    assert len(server.seen) == 2, "the other files were there"


@pytest.mark.parametrize("name", ["org/m@", "org/m@a/b", "org/m@../x", "org/m@a b"])
def test_revisions_that_are_none(root: Root, name: str) -> None:
    with pytest.raises(AutorlError, match="is no revision"):
        stage_model(root, name, None)


def test_only_the_hub_has_revisions(root: Root) -> None:
    for name, source in (("tiny@v1", None), ("org/m@v1", TINY)):
        with pytest.raises(AutorlError, match="only the Hub has revisions"):
            stage_model(root, name, source)


def test_patience_is_long_by_default() -> None:
    assert download.PATIENCE.longest_wait_s >= 300, "the Hub counts its limits over five minutes"
