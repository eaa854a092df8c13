"""Staging of base models: from a folder that a grader can load, or from the Hub (a loopback server); whole or not at all."""

from __future__ import annotations

import shutil
import stat
from collections import Counter
from pathlib import Path

import pytest
import web_server
from web_server import LoopbackServer, put_model, whole

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import store
from autorl_hpc.files.checkpoint import INDEX_NAME, file_sha256
from autorl_hpc.files.layout import Root, share
from autorl_hpc.files.store import verify_model
from autorl_hpc.stage import models
from autorl_hpc.stage.models import stage_model

TINY = share("templates") / "models" / "tiny"
root, server = web_server.root, web_server.server
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "name", ["../../outside/x", "/absolute/model", "a/../b", "a/b/c", "org/", "org/x\n", "org/m@", "org/m@../x"]
)
def test_a_name_that_is_a_path_is_refused(root: Root, name: str) -> None:
    with pytest.raises(AutorlError, match=r"is not a (model name|revision)"):
        stage_model(root, name, TINY)
    assert not any(root.path.iterdir())


BROKEN_MODELS: list[tuple[str, dict[str, bytes | None], str]] = [
    ("no config", {"config.json": None}, "this folder is no model"),
    ("no weights", {"model.safetensors": None}, "this folder is no model"),
    ("config is not JSON", {"config.json": b'{"a"'}, "config.json is not JSON"),
    ("config is a list", {"config.json": b"[]"}, "config.json is not a JSON object"),
    ("config is nested without end", {"config.json": b'{"a":' * 100_000}, "config.json is not JSON"),
    ("config names no architecture", {"config.json": b"{}"}, "field `model_type` of config.json"),
    ("no tokenizer", {"tokenizer.json": None}, "this folder has no tokenizer"),
    ("half a tokenizer", {"tokenizer.json": None, "vocab.json": b"{}"}, "this folder has no tokenizer"),
    ("empty tokenizer", {"tokenizer.json": b""}, "tokenizer.json is not JSON"),
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


# --- the Hub


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


def test_a_large_file_is_hashed_once_while_its_stamp_stays(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    stage_model(root, "tiny", None)
    hashed = Counter[str]()
    monkeypatch.setattr(store, "STAMPED_BYTES", 100_000)
    monkeypatch.setattr(store, "file_sha256", lambda path: (hashed.update([path.name]), file_sha256(path))[1])
    for _ in range(3):
        verify_model(root, "autorl/tiny")
    assert hashed["model.safetensors"] == 1 and hashed["config.json"] == 3
    weights = root.model("autorl/tiny") / "model.safetensors"
    weights.chmod(0o600)
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(AutorlError, match=r"model.safetensors of autorl/tiny has sha256"):
        verify_model(root, "autorl/tiny")
