"""What a revision keeps of awkward and hostile trees, and what it leaves out and says."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
from pathlib import Path

import codeworld
import pytest
from codehistory import Pointer
from codeworld import NOW, World

from autorl_hpc.recorder import code
from autorl_hpc.recorder.code import Repository

world = codeworld.world

ASIDE = ("__pycache__", "node_modules", ".venv", "myenv")
"""Folders left out by name, of names that git allows."""


def test_what_is_kept_and_what_is_not(world: World, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not the agent's")
    texts = {"code/a.py": b"1", "code/sub/deep/b.txt": b"2", "code/noext": b"", "top.py": b"3", "Makefile": b"all:\n"}
    for path, data in texts.items():
        (world.workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (world.workspace / path).write_bytes(data)
    (world.code / "run.sh").write_text("#!/bin/sh\n")
    (world.code / "run.sh").chmod(0o755)
    (world.code / "link").symlink_to(secret)
    (world.code / "folder-link").symlink_to(tmp_path)
    (world.workspace / "top-link.py").symlink_to(secret)
    os.mkfifo(world.code / "fifo.py")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(world.code / "sock"))
    (world.code / "binary").write_bytes(b"\x7fELF\0\1")
    (world.code / "large.txt").write_bytes(b"y" * ((1 << 20) + 1))
    for name in (".git", "__pycache__", "node_modules", ".venv", "myenv", ".GIT", "sub/.git\u200c"):
        (world.code / name).mkdir(parents=True)
        (world.code / name / "x.py").write_text("kept, where git allows the name")
        (world.code / name / "deep").mkdir()
        (world.code / name / "deep" / "y.py").write_text("left out")
    environment(world.code / "myenv")
    (world.code / ".env").write_text("KEY=sk-1")
    (world.code / ".gitmodules").write_text('[submodule "x"]\n\turl = -bad\n')
    for name in ("instructions.md", "submit", "run_meta.json", ".hidden.py", "weights.bin"):
        (world.workspace / name).write_text("laid, hidden or no source")
    (world.workspace / "output").mkdir()
    (world.workspace / "output" / "z.py").write_text("elsewhere")
    found = world.files()
    large = hashlib.sha256(b"y" * ((1 << 20) + 1)).hexdigest()
    assert found == {
        **texts,
        "code/run.sh": b"#!/bin/sh\n",
        **{f"code/{name}/x.py": b"kept, where git allows the name" for name in ASIDE},
        "code/myenv/pyvenv.cfg": b"",
        "code/link": Pointer("link", target=str(secret)),
        "code/folder-link": Pointer("link", target=str(tmp_path)),
        "code/binary": Pointer("binary", 6, hashlib.sha256(b"\x7fELF\0\1").hexdigest()),
        "code/large.txt": Pointer("large", (1 << 20) + 1, large),
    }
    line = world.lines()[-1]
    assert (line.files, line.by_hash, line.by_name, line.left_out) == (15, 2, 9, 0)
    assert line.reason is not None and "left out by name: code/.GIT, code/.git, code/.venv and 4 more" in line.reason
    mode = {path: mode for path, (mode, _) in Repository(world.run.code_git).files(line.revision).items()}
    assert mode[b"code/run.sh"] == code.PROGRAM and mode[b"code/link"] == code.LINK
    world.fsck()


def test_names_that_are_no_text_survive(world: World) -> None:
    names = [b"\xff\xfe.py", b"new\nline.py", b"\x1b[2J", b"a" * 255, "é漢\u202e".encode(), b" ", b"-rf", b"tab\t\"'\\"]
    for name in names:
        with open(os.path.join(os.fsencode(world.code), name), "wb") as file:
            file.write(name)
    found = world.files()
    assert {name.encode("utf-8", "surrogateescape"): data for name, data in found.items()} == {
        b"code/" + name: name for name in names
    }
    world.fsck()


def environment(folder: Path) -> None:
    """Makes what `python -m venv` makes."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "lib").mkdir()
    (folder / "bin" / "python").symlink_to("/usr/bin/python3")
    (folder / "pyvenv.cfg").write_text("")


def test_a_folder_that_only_says_it_is_an_environment_is_kept(world: World) -> None:
    (world.code / "real" / "sub").mkdir(parents=True)
    (world.code / "real" / "pyvenv.cfg").write_text("")
    (world.code / "real" / "sub" / "train.py").write_text("GRPOTrainer().train()")
    assert world.files()["code/real/sub/train.py"] == b"GRPOTrainer().train()"
    assert (world.lines()[-1].by_name, world.lines()[-1].reason) == (0, None)


def test_what_lies_hidden_in_a_folder_left_out_by_name_is_said(world: World) -> None:
    (world.code / "__pycache__").mkdir()
    (world.code / "__pycache__" / "a.pyc").write_bytes(b"\0")
    (world.code / "a.py").write_text("1")
    world.watch.look(NOW)
    assert (world.lines()[-1].by_name, world.lines()[-1].reason) == (1, None)
    (world.code / ".cache" / "deep").mkdir(parents=True)
    world.watch.look(NOW)
    shutil.rmtree(world.code / ".cache")
    world.watch.look(NOW)  # nothing that is kept has changed: no commit
    assert len(world.lines()) == 1
    world.watch.close(NOW)
    assert world.lines()[-1].reason == "left out by name: code/.cache" and world.lines()[-1].changed == 0


@pytest.mark.parametrize("target", ["src", "{workspace}/src", "./other/../two-links"])
def test_a_link_to_a_folder_of_the_workspace_is_walked_as_the_code(world: World, target: str) -> None:
    (world.code / "sub").mkdir()
    (world.code / "sub" / "train.py").write_text("1")
    (world.workspace / "other").mkdir()
    (world.workspace / "two-links").symlink_to("src")
    world.code.rename(world.workspace / "src")
    world.code.symlink_to(target.format(workspace=world.workspace))
    assert world.files() == {"code/sub/train.py": b"1"}
    assert world.lines()[-1].reason == "code is a link: what lies in src is kept as code"
    (world.workspace / "src" / "sub" / "train.py").write_text("22")
    assert world.files() == {"code/sub/train.py": b"22"}


@pytest.mark.parametrize("target", [".", "..", "../elsewhere", "/", "other/../../elsewhere", "file.bin", "via", "code"])
def test_a_link_out_of_the_workspace_is_told_and_not_followed(world: World, tmp_path: Path, target: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.py").write_text("not the agent's")
    (world.workspace / "other").mkdir()
    (world.workspace / "file.bin").write_text("")
    (world.workspace / "via").symlink_to(tmp_path / "elsewhere")
    world.code.rmdir()
    world.code.symlink_to(target)
    assert world.files() == {"code": Pointer("link", target=target)}
    assert "no folder of the workspace" in str(world.lines()[-1].reason)


@pytest.mark.parametrize("kind", ["link", "file", "fifo", "gone", "link to itself"])
def test_code_may_be_replaced_by_anything(world: World, tmp_path: Path, kind: str) -> None:
    (world.code / "a.py").write_text("1")
    world.watch.look(NOW)
    shutil.rmtree(world.code)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "b.py").write_text("not the agent's")
    if kind == "link":
        world.code.symlink_to(outside)
    elif kind == "link to itself":
        world.code.symlink_to("code")
    elif kind == "file":
        world.code.write_text("a file now")
    elif kind == "fifo":
        os.mkfifo(world.code)
    found = world.files()
    expected: dict[str, dict[str, bytes | Pointer]] = {
        "link": {"code": Pointer("link", target=str(outside))},
        "link to itself": {"code": Pointer("link", target="code")},
        "file": {"code": b"a file now"},
    }
    assert found == expected.get(kind, {})
    if world.code.is_symlink() or world.code.exists():
        world.code.unlink()
    world.code.mkdir()
    (world.code / "a.py").write_text("back")
    assert world.files() == {"code/a.py": b"back"}
    world.fsck()


def test_a_workspace_that_is_gone_is_an_error_and_then_seen_again(world: World) -> None:
    world.workspace.rename(world.workspace.with_name("moved"))
    with pytest.raises(OSError):
        world.watch.look(NOW)
    world.workspace.with_name("moved").rename(world.workspace)
    assert world.files() == {}


def test_limits_of_files_folders_depth_and_names(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MAX_FILES", 30)
    monkeypatch.setattr(code, "MAX_OTHERS", 10)
    monkeypatch.setattr(code, "MAX_DEPTH", 4)
    for number in range(50):
        (world.code / f"{number:02d}.dat").write_text(str(number))
    (world.code / "zz.py").write_text("source first")
    deep = world.code / "1" / "2" / "3" / "4" / "5"
    deep.mkdir(parents=True)
    (deep / "too-deep.py").write_text("")
    (deep.parents[1] / "deep-enough.py").write_text("")
    found = world.files()
    assert "code/zz.py" in found and "code/1/2/3/deep-enough.py" in found
    assert not any("too-deep" in path for path in found)
    assert sum(path.endswith(".dat") for path in found) == 10
    line = world.lines()[-1]
    assert line.left_out == 40 and line.reason is not None and "folders beyond the limits" in line.reason


def test_a_file_that_was_kept_is_found_again_in_a_folder_too_large_to_list(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world.code / "train.py").write_text("1")
    assert world.files() == {"code/train.py": b"1"}
    monkeypatch.setattr(code, "MAX_LISTED_IN_ONE", 1)
    for number in range(200):
        (world.code / f"n{number}").write_text("")
    (world.code / "train.py").write_text("2")
    assert world.files()["code/train.py"] == b"2"
    reason = world.lines()[-1].reason
    assert reason is not None and "too many files to list" in reason


def test_texts_together_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MAX_TEXTS_BYTES", 1000)
    for number in range(20):
        (world.code / f"{number:02d}.py").write_bytes(b"z" * 100)
    assert len(world.files()) == 10 and world.lines()[-1].left_out == 10
