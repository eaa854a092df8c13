"""Our git objects against damage; test_revisions.py has git's own binary read them."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
from codehistory import Pointer, files_at

from autorl_hpc.recorder.code import FILE, Files, GitDamage, Repository


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
    files: Files = {b"code/p.json": (FILE, repository.write("blob", text))}
    revision = repository.commit(repository.write_files(files), None, "1.0 s, attempt 1", 1)
    assert files_at(repository.path, revision) == {"code/p.json": text}
