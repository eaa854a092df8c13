"""Staging of tasks: whole or not at all, verified against pins, held-out items for their owner alone; sources from a server."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import web_server
import yaml
from web_server import LoopbackServer, code, cut, whole

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import Root
from autorl_hpc.stage import tasks as staging
from autorl_hpc.stage.download import NoNetwork
from autorl_hpc.stage.models import stage_model
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.states import Fault
from autorl_hpc.tasks.heldout import verify_staged_task
from autorl_hpc.tasks.loader import Task, load_task

root, server = web_server.root, web_server.server
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def arithmetic() -> Task:
    return load_task("arithmetic")


def modes(folder: Path) -> dict[str, int]:
    """Permission bits of everything below a folder, itself included."""
    found = {".": stat.S_IMODE(folder.stat().st_mode)}
    for path in folder.rglob("*"):
        found[path.relative_to(folder).as_posix()] = stat.S_IMODE(path.stat().st_mode)
    return found


def said(root: Root, task: Task, source: Path | None = None, *, again: bool = False) -> str:
    """What a staging says."""
    lines: list[str] = []
    stage_task(root, task, source, again=again, say=lines.append)
    return "\n".join(lines)


def test_the_vault_is_for_its_owner_alone_and_the_store_is_read_only(root: Root, arithmetic: Task) -> None:
    root.vault.mkdir(mode=0o755)  # an open one is closed
    before = os.umask(0)
    try:
        stage_task(root, arithmetic, None)
        stage_model(root, "tiny", None)
    finally:
        os.umask(before)
    vault = modes(root.vault)
    assert {mode & 0o077 for mode in vault.values()} == {0}
    assert vault["."] == vault["arithmetic"] == vault["arithmetic/feedback"] == 0o700
    assert vault["arithmetic/feedback/items.jsonl"] == 0o400
    files = [mode for name, mode in modes(root.store).items() if name.endswith((".jsonl", ".json", ".safetensors"))]
    assert files and set(files) == {0o444}
    assert sorted(p.name for p in root.task_train("arithmetic").iterdir()) == ["demonstrations.jsonl", "train.jsonl"]
    assert sorted(os.listdir(root.task_vault("arithmetic"))) == ["MANIFEST.json", "feedback", "report"]
    assert not list(root.store.rglob("items.jsonl")), "held-out items lie in the store"
    assert not list(root.path.rglob(".tmp-*"))


# --- gsm8k, from the official files ---


@pytest.fixture
def gsm8k() -> Task:
    return load_task("gsm8k")


@pytest.fixture
def official(data: Path, tmp_path: Path) -> Path:
    """A copy of the official files that may be damaged."""
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    for name in ("train.jsonl", "test.jsonl", "opencompass_4shot.json"):
        shutil.copyfile(data / "gsm8k" / name, folder / name)
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    # Not `splitlines`: a question of gsm8k holds U+2028, which that takes for the end of a line.
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def test_gsm8k_s_splits(root: Root, gsm8k: Task, official: Path) -> None:
    stage_task(root, gsm8k, official)
    train = rows(root.task_train("gsm8k") / "train.jsonl")
    feedback, report = (rows(root.task_vault("gsm8k") / split / "items.jsonl") for split in ("feedback", "report"))
    assert (len(train), len(feedback), len(report)) == (6969, 500, 1319)
    ids = [row["id"] for row in (*train, *feedback, *report)]
    assert len(set(ids)) == len(ids)
    questions = [{row["question"] for row in part} for part in (train, feedback, report)]
    assert not questions[0] & questions[1] and not questions[0] & questions[2] and not questions[1] & questions[2]
    shots = json.loads((root.task_vault("gsm8k") / "opencompass_4shot.json").read_text())["messages"]
    asked = [m["content"].split("Question: ")[-1].split("\n")[0].strip() for m in shots if m["role"] == "user"]
    asked = [text for text in asked if "{question}" not in text]
    assert len(asked) == 4
    known = {row["question"].strip() for row in rows(official / "train.jsonl")}
    assert any(text in known for text in asked), "the worked examples are compared with the wrong text"
    kept = {question.strip() for part in questions for question in part}
    assert not kept & set(asked), "a worked example can be trained on, or is asked"


def test_a_damaged_official_file_is_refused_by_name(root: Root, gsm8k: Task, official: Path) -> None:
    for name in ("train.jsonl", "test.jsonl", "opencompass_4shot.json"):
        data = (official / name).read_bytes()
        for damaged in (
            data[: len(data) // 2],
            data.replace(b"\n", b"\r\n"),
            data[:99] + bytes([data[99] ^ 1]) + data[100:],
        ):
            (official / name).write_bytes(damaged)
            with pytest.raises(AutorlError, match=f"{name} has sha256 .*: truncated, re-encoded or altered") as caught:
                stage_task(root, gsm8k, official)
            assert caught.value.where == str(official / name)
            assert "get the original from" in (caught.value.next_step or "")
            assert not any(root.path.iterdir()), "something was made"
        (official / name).write_bytes(data)


# --- source files that are downloaded


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


def test_without_network_every_file_is_listed(server: LoopbackServer, root: Root, task: Task) -> None:
    server.shutdown()
    server.server_close()
    with pytest.raises(NoNetwork, match=r"this node can't reach 127\.0\.0\.1") as caught:
        stage_task(root, task, None)
    advice = caught.value.next_step or ""
    assert "autorl-hpc stage far --from DIR" in advice and "on the login node" in advice and "--bundle" in advice
    for name, data in FILES.items():
        assert f"{name}  {server.url('')}" in advice and f"sha256 {sha(data)}" in advice
    assert "more.json  https://h/x (through a script)" in advice and "(optional)" in advice


def killed_in(root: Root, task: Task, step: str, time: int, *, before: bool, again: bool = False) -> None:
    """Stage the task in a child that is killed before or after the given call of a step."""
    real: Callable[..., object] = getattr(staging, step)
    calls = 0

    def kills(*arguments: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if before and calls == time:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **named)
        if calls == time:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    child = os.fork()
    if child == 0:
        try:
            setattr(staging, step, kills)
            stage_task(root, task, None, again=again)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"{step} was not reached"


@pytest.mark.parametrize(
    ("step", "time", "before"), [("replace_folder", 1, True), ("write_manifest", 2, True), ("replace_folder", 2, False)]
)
def test_a_killed_staging_leaves_nothing_that_looks_staged(
    root: Root, task: Task, step: str, time: int, before: bool
) -> None:
    killed_in(root, task, step, time, before=before)
    if before:
        with pytest.raises(AutorlError, match="not staged") as caught:
            verify_staged_task(root, task)
        assert "autorl-hpc stage far" in (caught.value.next_step or "")
    for path in root.store.rglob("*") if root.store.exists() else []:
        assert "feedback" not in path.parts and "report" not in path.parts, "held-out items are left in the store"
    for path in root.path.rglob("items.jsonl"):
        assert stat.S_IMODE(root.vault.stat().st_mode) == 0o700 and root.vault in path.parents
    assert ("staged already" in said(root, task)) == (not before)
    killed_in(root, task, step, time, before=before, again=True)
    verify_staged_task(root, task)


def test_the_second_staging_verifies(root: Root, task: Task) -> None:
    stage_task(root, task, None)
    assert "staged already; verifying" in said(root, task)
    path = root.task_vault("far") / "report" / "items.jsonl"
    os.chmod(path, 0o600)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AutorlError, match=r"report/items\.jsonl of far has") as caught:
        stage_task(root, task, None)
    assert caught.value.where == str(path) and caught.value.fault is Fault.CLUSTER
    assert "--again" in (caught.value.next_step or "")
    assert "preparing" in said(root, task, again=True)
    verify_staged_task(root, task)
    assert not list(root.path.rglob(".tmp-*")), "the old one was not removed"


# --- a source file that is made of one that is served, and one folder with the files of several tasks

RAW = [{"instruction": f"Say {n} \u2028 \u00e9 {'x' * n}", "input": "", "output": str(n)} for n in range(40)]
TEXT = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in RAW[:5]).encode()
FILE = "rows.jsonl.gz"
ITEM = b'{"id": "a", "question": "q", "answer": "#### 1"}\n'
MADE = """
import gzip

def prepare(source, out):
    for split in ("feedback", "report"):
        (out / split).mkdir()
        (out / split / "items.jsonl").write_bytes(%r)
    (out / "train").mkdir()
    (out / "train" / "train.jsonl").write_bytes(gzip.decompress((source / "rows.jsonl.gz").read_bytes()))
"""


def make_task(folder: Path, name: str, url: str, **changes: Any) -> None:
    place = folder / name
    place.mkdir(parents=True)
    (place / "prepare.py").write_text(MADE % ITEM)
    (place / "description.md").write_text("x\n")
    derived = {"url": url, "make": "first_rows_jsonl_gz", "n": 5, "sha256": sha(TEXT), **changes}
    value = yaml.safe_load((load_task("arithmetic").folder / "task.yaml").read_text())
    value |= {
        "name": name,
        "sources": [{"file": FILE, "sha256": "0" * 64, "derived": derived}],
        "train_files": {"train/train.jsonl": sha(TEXT)},
        "splits": {split: {"n": 1, "sha256": sha(ITEM)} for split in ("feedback", "report")},
    }
    (place / "task.yaml").write_text(yaml.safe_dump(value))


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTORL_TASKS_PATH", str(tmp_path / "tasks"))
    return tmp_path / "tasks"


@pytest.mark.slow
def test_it_is_made_of_what_is_served_and_pinned_by_its_text(server: LoopbackServer, root: Root, tasks: Path) -> None:
    data = json.dumps(RAW, indent=4).encode()
    server.answers["/raw.json"] = [cut(data, 100), code(503), whole(data)]
    make_task(tasks, "made", server.url("/raw.json"))
    said: list[str] = []
    stage_task(root, load_task("made"), None, keep_sources=True, say=said.append)
    assert (root.task_train("made") / "train.jsonl").read_bytes() == TEXT
    kept = root.vault / ".sources" / "made"
    assert [path.name for path in kept.iterdir()] == [FILE] and gzip.decompress((kept / FILE).read_bytes()) == TEXT
    asked = len(server.seen)
    stage_task(root, load_task("made"), None, again=True)
    assert len(server.seen) == asked, "what was made is taken"
