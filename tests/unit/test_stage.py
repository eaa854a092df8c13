"""Staging: whole or not at all, verified against pins, held-out items for their owner alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import Root
from autorl_hpc.stage import tasks as staging
from autorl_hpc.stage.models import stage_model
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.states import Fault
from autorl_hpc.tasks.heldout import verify_staged_task
from autorl_hpc.tasks.loader import Task, load_task

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(tmp_path / "root")
    made.path.mkdir()
    return made


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


@pytest.mark.slow
def test_training_files_and_held_out_items_part(root: Root, arithmetic: Task) -> None:
    stage_task(root, arithmetic, None)
    assert sorted(p.name for p in root.task_train("arithmetic").iterdir()) == ["demonstrations.jsonl", "train.jsonl"]
    assert sorted(os.listdir(root.task_vault("arithmetic"))) == ["MANIFEST.json", "feedback", "report"]
    assert not list(root.store.rglob("items.jsonl")), "held-out items lie in the store"
    assert not list(root.path.rglob(".tmp-*"))


def test_the_vault_is_for_its_owner_alone_and_the_store_is_read_only(root: Root, arithmetic: Task) -> None:
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


@pytest.mark.slow
def test_an_open_vault_is_closed(root: Root, arithmetic: Task) -> None:
    root.vault.mkdir(mode=0o755)
    stage_task(root, arithmetic, None)
    assert stat.S_IMODE(root.vault.stat().st_mode) == 0o700


def killed_in(root: Root, step: str, time: int, *, before: bool, again: bool = False) -> None:
    """Stages arithmetic in a child that is killed before or after the given call of a step."""
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
            stage_task(root, load_task("arithmetic"), None, again=again)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"{step} was not reached"


KILLS = [("_prepare", 1), ("_check_pins", 1), ("write_manifest", 1), ("replace_folder", 1), ("write_manifest", 2), ("replace_folder", 2)]  # fmt: skip


@pytest.mark.parametrize(("step", "time", "before"), [*((*kill, True) for kill in KILLS), ("replace_folder", 2, False)])
@pytest.mark.slow
def test_a_killed_staging_leaves_nothing_that_looks_staged(
    root: Root, arithmetic: Task, step: str, time: int, before: bool
) -> None:
    killed_in(root, step, time, before=before)
    whole = (step, time, before) == ("replace_folder", 2, False)
    if whole:
        verify_staged_task(root, arithmetic)
    else:
        with pytest.raises(AutorlError, match="not staged") as caught:
            verify_staged_task(root, arithmetic)
        assert "autorl-hpc stage arithmetic" in (caught.value.next_step or "")
    for path in root.store.rglob("*") if root.store.exists() else []:
        assert "feedback" not in path.parts and "report" not in path.parts, "held-out items are left in the store"
    for path in root.path.rglob("items.jsonl"):
        assert stat.S_IMODE(root.vault.stat().st_mode) == 0o700 and root.vault in path.parents
    assert ("staged already" in said(root, arithmetic)) == whole
    verify_staged_task(root, arithmetic)


@pytest.mark.parametrize(("step", "time"), KILLS)
@pytest.mark.slow
def test_a_killed_second_staging_leaves_the_first_or_says_so(
    root: Root, arithmetic: Task, step: str, time: int
) -> None:
    stage_task(root, arithmetic, None)
    killed_in(root, step, time, before=True, again=True)
    verify_staged_task(root, arithmetic)


@pytest.mark.slow
def test_the_second_staging_verifies(root: Root, arithmetic: Task) -> None:
    stage_task(root, arithmetic, None)
    assert "staged already; verifying" in said(root, arithmetic)
    path = root.task_vault("arithmetic") / "report" / "items.jsonl"
    os.chmod(path, 0o600)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AutorlError, match=r"report/items\.jsonl of arithmetic has") as caught:
        stage_task(root, arithmetic, None)
    assert caught.value.where == str(path) and caught.value.fault is Fault.CLUSTER
    assert "--again" in (caught.value.next_step or "")
    assert "preparing" in said(root, arithmetic, again=True)
    verify_staged_task(root, arithmetic)
    assert not list(root.path.rglob(".tmp-*")), "the old one was not removed"


def other_task(tmp_path: Path, prepare: str) -> Task:
    """A copy of arithmetic with another prepare.py."""
    folder = tmp_path / "tasks" / "arithmetic"
    shutil.copytree(load_task("arithmetic").folder, folder)
    (folder / "prepare.py").write_text(prepare)
    return Task(folder, load_task("arithmetic").file)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        ("def prepare(source, out): pass", "another train/"),
        ("def prepare(source, out): return {}['x']", "prepare.py of task arithmetic failed: KeyError"),
        (
            "def prepare(source, out): out.joinpath('train').mkdir(); out.joinpath('train/train.jsonl').touch()",
            "another train/",
        ),
    ],
)
def test_a_prepare_that_makes_something_else_is_named(root: Root, tmp_path: Path, prepare: str, words: str) -> None:
    task = other_task(tmp_path, prepare)
    with pytest.raises(AutorlError) as caught:
        stage_task(root, task, None)
    assert words in caught.value.what and (caught.value.where or "").startswith(str(task.folder / "prepare.py"))
    assert caught.value.exit_code is Exit.FAILED and caught.value.next_step
    assert not [p for p in root.path.rglob("*") if p.is_file()]


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


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lose_last_line(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def with_crlf(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def with_mark(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


def as_utf16(path: Path) -> None:
    path.write_bytes(path.read_text(encoding="utf-8").encode("utf-16"))


def one_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(bytes(data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, lose_last_line, with_crlf, with_mark, as_utf16, one_byte, empty])
@pytest.mark.parametrize("name", ["train.jsonl", "test.jsonl", "opencompass_4shot.json"])
def test_a_damaged_official_file_is_refused_by_name(
    root: Root, gsm8k: Task, official: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(official / name)
    with pytest.raises(AutorlError, match=f"{name} has sha256 .*: truncated, re-encoded or altered") as caught:
        stage_task(root, gsm8k, official)
    assert caught.value.where == str(official / name) and "get the original from" in (caught.value.next_step or "")
    assert not any(root.path.iterdir()), "something was made"


@pytest.mark.parametrize("name", ["train.jsonl", "test.jsonl"])
def test_a_missing_official_file_is_named(root: Root, gsm8k: Task, official: Path, name: str) -> None:
    (official / name).unlink()
    with pytest.raises(AutorlError, match=f"{name} is missing") as caught:
        stage_task(root, gsm8k, official)
    assert caught.value.where == str(official / name) and "https://" in (caught.value.next_step or "")


def test_gsm8k_without_its_optional_file_is_staged(root: Root, gsm8k: Task, official: Path) -> None:
    (official / "opencompass_4shot.json").unlink()
    assert "the recipe that needs it can't be used" in said(root, gsm8k, official)
    assert not (root.task_vault("gsm8k") / "opencompass_4shot.json").exists()
    verify_staged_task(root, gsm8k)


def test_gsm8k_without_its_files_or_network_says_where_they_are(
    root: Root, gsm8k: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(AutorlError, match=r"can't reach raw\.githubusercontent\.com") as caught:
        stage_task(root, gsm8k, None)
    advice = caught.value.next_step or ""
    assert "--from DIR" in advice and "login node" in advice
    for line in ("train.jsonl  https://raw.githubusercontent.com/openai/", "test.jsonl  https://raw."):
        assert line in advice
    assert re.search(
        r"opencompass_4shot\.json  https://github\.com/open-compass/.*bin/make-opencompass-4shot.*optional", advice
    )


# --- a task of one's own: see also tests/integration/test_adding_a_task_page.py ---


def test_a_task_without_prepare_points_to_a_page_that_is_there(root: Root, tmp_path: Path) -> None:
    task = other_task(tmp_path, "")
    (task.folder / "prepare.py").unlink()
    with pytest.raises(AutorlError, match=r"has no prepare\.py") as caught:
        stage_task(root, task, None)
    (page,) = re.findall(r"docs/\S+\.md", caught.value.next_step or "")
    assert (REPO / page).is_file()
