"""Our git objects against git's own binary, and against damage."""

from __future__ import annotations

import os
import shutil
import subprocess
import zlib
from pathlib import Path

import needs
import pytest
from codehistory import Pointer, files_at

from autorl_hpc.recorder.code import FILE, LINK, PROGRAM, Files, GitDamage, Repository

needs_git = needs.needs("git", shutil.which("git") is not None, "git is not installed")

NAMES = [
    b"a",
    b"a.py",
    b"a-b",
    b"a0",
    b"a/b",
    b"a/b.py",
    b"ab/x",
    b"\xff\xfe.py",
    b"new\nline",
    b"tab\t",
    b"\x1b[2J",
    "é漢".encode(),
]
"""Names that sort otherwise as files than as folders, and awkward ones."""


def git(repository: Path, *arguments: str, check: bool = True) -> bytes:
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "--git-dir", str(repository), *arguments], capture_output=True, check=False
    )
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout


def commit(repository: Repository, texts: dict[bytes, bytes], parent: str | None = None, at_s: int = 1) -> str:
    files: Files = {path: (FILE, repository.write("blob", data)) for path, data in texts.items()}
    revision = repository.commit(repository.write_files(files), parent, "1.0 s, attempt 1", at_s)
    repository.set_ref("attempt-1", revision)
    repository.set_head("attempt-1")
    return revision


@needs_git
def test_git_reads_what_was_written(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path / "code.git")
    names = [name for name in NAMES if name not in (b"a", b"a/b")]
    first = commit(repository, {b"code/" + name: name * 3 for name in names})
    assert Repository.create(repository.path).size_bytes == repository.size_bytes > 0, "a new start goes on"
    files = repository.files(first)
    files[b"code/run.sh"] = (PROGRAM, repository.write("blob", b"#!/bin/sh\n"))
    files[b"code/link"] = (LINK, repository.write("blob", b"/etc/passwd"))
    second = repository.commit(repository.write_files(files), first, "2.5 s, attempt 1, submission 7", 1_700_000_000)
    repository.set_ref("attempt-1", second)
    assert git(repository.path, "fsck", "--full", "--strict") == b""
    assert git(repository.path, "rev-parse", "HEAD").decode().strip() == second
    log = git(repository.path, "log", "--format=%H|%an|%at|%s").decode().splitlines()
    assert log[0] == f"{second}|autorl-hpc recorder|1700000000|2.5 s, attempt 1, submission 7"
    assert log[1].startswith(first)
    listed = git(repository.path, "ls-tree", "-r", "-z", "HEAD").split(b"\0")[:-1]
    seen = {}
    for line in listed:
        head, _, path = line.partition(b"\t")
        mode, _, entry = head.decode().split()
        seen[path] = (int(mode, 8), entry)
    assert seen == files == repository.files(second)
    assert git(repository.path, "cat-file", "blob", f"HEAD:{os.fsdecode(b'code/a.py')}") == b"a.pya.pya.py"
    assert b"+#!/bin/sh" in git(repository.path, "diff", first, second)


def object_path(repository: Repository, name: str) -> Path:
    return repository.path / "objects" / name[:2] / name[2:]


def test_damage_is_named_and_never_believed(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path / "code.git")
    blob = repository.write("blob", b"x" * 1000)
    path = object_path(repository, blob)
    good = path.read_bytes()
    damaged: list[bytes] = [
        b"",
        good[:-3],
        b"no zlib",
        zlib.compress(b"blob 1000\0" + b"y" * 1000),
        zlib.compress(b"blob 999\0" + b"x" * 1000),
        zlib.compress(b"blob 1000\0" + b"x" * 1000 + b"\0" * (1 << 24)),  # unpacks to 16 MiB
    ]
    for data in damaged:
        path.unlink()
        path.write_bytes(data)
        with pytest.raises(GitDamage):
            repository.read(blob, "blob")
    for put in (lambda: None, lambda: os.mkfifo(path), lambda: path.symlink_to("/etc/passwd")):
        path.unlink(missing_ok=True)
        put()
        with pytest.raises(GitDamage, match="can't be read"):
            repository.read(blob, "blob")
    path.unlink()
    path.write_bytes(b"")  # of a lost node: written again by the next start
    assert Repository.create(repository.path).write("blob", b"x" * 1000) == blob
    assert repository.read(blob, "blob") == b"x" * 1000
    for name in ("", "../../etc/passwd", "g" * 40, "a" * 39):
        with pytest.raises(GitDamage):
            repository.read(name, "blob")
    with pytest.raises(GitDamage):
        repository.read(repository.write("blob", b"abc"), "blob", max_bytes=2)


@pytest.mark.parametrize(
    "data", [b"100644 a", b"100644\0" + b"x" * 20, b"xyz a\0" + b"x" * 20, b"100644 ../x\0" + b"x" * 20, b"40000 a\0x"]
)
def test_trees_that_no_git_writes_are_damage(tmp_path: Path, data: bytes) -> None:
    repository = Repository.create(tmp_path / "code.git")
    revision = repository.commit(repository.write("tree", data), None, "m", 0)
    with pytest.raises(GitDamage):
        repository.files(revision)


def test_deep_trees_end_in_damage_and_not_in_recursion(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path / "code.git")
    tree = repository.write("tree", b"")
    for _ in range(100):
        tree = repository.write("tree", b"40000 d\0" + bytes.fromhex(tree))
    with pytest.raises(GitDamage, match="deeply"):
        repository.files(repository.commit(tree, None, "m", 0))


def test_an_agent_s_file_is_never_taken_for_a_pointer(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path / "code.git")
    text = Pointer("large", 1, "b" * 64).data()
    assert files_at(repository.path, commit(repository, {b"code/p.json": text})) == {"code/p.json": text}
