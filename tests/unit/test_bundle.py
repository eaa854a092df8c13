"""Bundles: there and back; killed in the middle; on a full disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needs
import packing
import pytest
from packing import NAMES, files, refused, stage

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import archive
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import verify_model
from autorl_hpc.stage import bundle as unbundle
from autorl_hpc.stage.stage import is_bundle
from autorl_hpc.tasks.heldout import verify_staged_task
from autorl_hpc.tasks.loader import load_task

root, bundles = packing.root, packing.bundles


@pytest.mark.parametrize("suffix", archive.SUFFIXES)
def test_there_and_back(root: Root, staged: Path, bundles: dict[str, Path], suffix: str) -> None:
    stage(root, [], source=bundles[suffix])
    assert verify_model(root, "autorl/tiny") == verify_model(Root(staged), "autorl/tiny")
    assert verify_staged_task(root, load_task("arithmetic")) == verify_staged_task(
        Root(staged), load_task("arithmetic")
    )
    assert files(root) == files(Root(staged))
    for path in root.path.rglob("*"):
        other = staged / path.relative_to(root.path)
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode), path
    assert stat.S_IMODE(root.vault.stat().st_mode) == 0o700


def test_a_bundle_is_for_its_owner_alone(bundles: dict[str, Path]) -> None:
    assert {stat.S_IMODE(path.stat().st_mode) for path in bundles.values()} == {0o600}
    with tarfile.open(bundles[".tar"]) as opened:
        modes = {row.name: row.mode for row in opened}
    assert {mode for name, mode in modes.items() if name.startswith("vault/")} == {0o400}


@pytest.mark.parametrize("suffix", archive.SUFFIXES)
def test_the_same_files_give_the_same_bytes(
    staged: Path, bundles: dict[str, Path], tmp_path: Path, suffix: str
) -> None:
    copy = Root(tmp_path / "copy")
    shutil.copytree(staged, copy.path)
    for path in copy.path.rglob("*"):
        os.utime(path, (1, 1))
    again = tmp_path / f"other-name{suffix}"
    stage(copy, [*reversed(NAMES), "tiny"], bundle=again)
    assert again.read_bytes() == bundles[suffix].read_bytes()


def test_what_is_said_and_printed(staged: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    out = tmp_path / "b.tar.gz"
    *_, last = stage(Root(staged), NAMES, bundle=out, say=lines.append)
    digest = hashlib.sha256(out.read_bytes()).hexdigest()
    assert last == {"kind": "bundle", "path": str(out), "sha256": digest, "size_bytes": out.stat().st_size}
    assert any("holds held-out items" in line for line in lines) and digest in lines[-1]
    lines.clear()
    stage(Root(staged), ["tiny"], bundle=out, say=lines.append)
    assert not any("held-out" in line for line in lines)


def test_a_part_of_a_bundle(root: Root, bundles: dict[str, Path]) -> None:
    stage(root, ["tiny"], source=bundles[".tar.zst"])
    assert not (root.store / "tasks").exists() and not list(root.vault.iterdir())
    with pytest.raises(AutorlError, match="holds no gsm8k") as caught:
        stage(root, ["gsm8k"], source=bundles[".tar.zst"])
    assert "arithmetic, autorl/tiny" in (caught.value.next_step or "")


def test_the_name_of_a_bundle_does_not_matter(root: Root, bundles: dict[str, Path], tmp_path: Path) -> None:
    for suffix in (".tar.zst", ".tar.gz", ".tar"):
        renamed = tmp_path / f"from{suffix.replace('.', '-')}"
        shutil.copyfile(bundles[suffix], renamed)
        assert is_bundle(renamed)
        stage(root, ["tiny"], source=renamed)
    wrong = tmp_path / "wrong.tar.gz"
    shutil.copyfile(bundles[".tar.zst"], wrong)
    stage(root, ["tiny"], source=wrong)


def test_a_second_unpacking_verifies_and_does_not_replace(root: Root, bundles: dict[str, Path]) -> None:
    stage(root, [], source=bundles[".tar"])
    before = {p: p.stat().st_ino for p in root.path.rglob("*") if p.is_file()}
    lines: list[str] = []
    stage(root, [], source=bundles[".tar"], say=lines.append)
    assert {p: p.stat().st_ino for p in root.path.rglob("*") if p.is_file()} == before
    assert "arithmetic: staged already; verifying" in lines
    path = root.model("autorl/tiny") / "config.json"
    os.chmod(path, 0o600)
    path.write_text("{}")
    with pytest.raises(AutorlError, match=r"config\.json of autorl/tiny has"):
        stage(root, [], source=bundles[".tar"])
    stage(root, [], source=bundles[".tar"], again=True)
    verify_model(root, "autorl/tiny")


def test_other_content_is_replaced_only_if_asked(root: Root, bundles: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(Path(__file__).resolve().parents[2] / "templates" / "models" / "tiny", source)
    (source / "generation_config.json").write_text('{"a": 1}')
    stage(root, ["autorl/tiny"], source=source)
    with pytest.raises(AutorlError, match="staged already, with other content") as caught:
        stage(root, ["tiny"], source=bundles[".tar"])
    assert "--again" in (caught.value.next_step or "")
    stage(root, ["tiny"], source=bundles[".tar"], again=True)
    assert "package" in verify_model(root, "autorl/tiny").source


@pytest.mark.parametrize("name", ["b.zip", "b", "b.tar.xz", "b.zst"])
def test_an_unknown_packing_is_refused_before_anything_is_staged(root: Root, tmp_path: Path, name: str) -> None:
    with pytest.raises(AutorlError, match="a bundle's name says how it is packed"):
        stage(root, ["tiny"], bundle=tmp_path / name)
    with pytest.raises(AutorlError, match="no such folder"):
        stage(root, ["tiny"], bundle=tmp_path / "none" / "b.tar")
    assert files(root) == []


def test_a_file_that_changes_while_it_is_packed(root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autorl_hpc.stage import bundle

    stage(root, ["tiny"])
    path = root.model("autorl/tiny") / "model.safetensors"
    real = bundle.check_space

    def changes(*arguments: Any) -> None:
        os.chmod(path, 0o600)
        with open(path, "r+b") as file:
            file.seek(1000)
            file.write(b"x")
        real(*arguments)

    monkeypatch.setattr(bundle, "check_space", changes)
    with pytest.raises(AutorlError, match="was changed while it was packed"):
        stage(root, ["tiny"], bundle=tmp_path / "b.tar")
    assert [p.name for p in tmp_path.iterdir()] == ["root"]


# --- interrupted ---


def killed_in(root: Root, bundle: Path, step: str, time: int) -> None:
    real: Callable[..., object] = getattr(unbundle, step)
    calls = 0

    def kills(*arguments: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls == time:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    child = os.fork()
    if child == 0:
        try:
            setattr(unbundle, step, kills)
            stage(root, [], source=bundle)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"{step} was not reached"


KILLS = [
    ("_write", 1),
    ("_write", 5),
    ("_check", 1),
    ("replace_folder", 1),
    ("replace_folder", 2),
    ("replace_folder", 3),
]


@pytest.mark.parametrize(("step", "time"), KILLS)
def test_a_killed_unpacking_is_run_again(root: Root, bundles: dict[str, Path], step: str, time: int) -> None:
    killed_in(root, bundles[".tar.zst"], step, time)
    if (step, time) in KILLS[:4]:
        assert not root.model("autorl/tiny").exists() and not root.task_store("arithmetic").exists()
    for path in root.path.rglob("items.jsonl"):
        assert root.vault in path.parents and stat.S_IMODE(root.vault.stat().st_mode) == 0o700
    stage(root, [], source=bundles[".tar.zst"])
    verify_model(root, "autorl/tiny")
    verify_staged_task(root, load_task("arithmetic"))
    assert not list(root.path.rglob(".tmp-*")), "what the killed one left was not removed"


def test_a_full_disk_leaves_nothing(bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Root(tmp_path / "root")
    small.path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(small.path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        needs.skip("mount", "needs a tmpfs of its own: mount is not allowed here")
    try:
        refused(small, bundles[".tar.zst"], "are missing", Exit.ENVIRONMENT)
        monkeypatch.setattr(unbundle, "check_space", lambda *_: None)  # as a quota is not seen by it
        refused(small, bundles[".tar.zst"], "No space left on device", Exit.ENVIRONMENT)
    finally:
        subprocess.run(["umount", "-l", str(small.path)], check=True)


def test_without_zstandard_the_way_out_is_said(
    root: Root, bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    for action in ({"bundle": tmp_path / "b.tar.zst"}, {"source": bundles[".tar.zst"]}):
        with pytest.raises(AutorlError, match="need the Python package zstandard") as caught:
            stage(root, ["tiny"], **action)
        assert "pip install zstandard" in (caught.value.next_step or "")
