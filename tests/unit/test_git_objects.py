"""Our git objects against git's own binary, and against damage."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import needs
import pytest

from autorl_hpc.recorder import code
from autorl_hpc.recorder.code import (
    BY_HASH,
    FILE,
    LINK,
    PROGRAM,
    Files,
    GitDamage,
    Pointer,
    Repository,
    Work,
    changes,
    equal_blocks,
    files_at,
    line_diff,
    object_id,
)

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


@needs_git
def test_trees_are_git_s_own(tmp_path: Path) -> None:
    """The same files, added by git itself, give the same tree."""
    ours = Repository.create(tmp_path / "ours")
    work = tmp_path / "work"
    texts = {b"a.py": b"1", b"a/b": b"2", b"a-b": b"3", b"a0": b"4", b"ab/c/d": b"5", b"\xff": b"6"}
    for path, data in texts.items():
        place = os.path.join(os.fsencode(work), path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "wb") as file:
            file.write(data)
    theirs = tmp_path / "theirs"
    subprocess.run(["git", "init", "-q", "--bare", str(theirs)], check=True)
    subprocess.run(["git", "--git-dir", str(theirs), "--work-tree", str(work), "add", "-A"], check=True, cwd=work)
    tree = git(theirs, "write-tree").decode().strip()
    assert ours.write_files({p: (FILE, ours.write("blob", data)) for p, data in texts.items()}) == tree
    assert object_id("tree", b"") == "4b825dc642cb6eb9a060e54bf8d69288fbee4904" == ours.write_files({})


def test_history_and_size_survive_a_new_start(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path / "code.git")
    first = commit(repository, {b"code/a": b"1"})
    second = commit(repository, {b"code/a": b"2"}, first, 9)
    again = Repository.create(tmp_path / "code.git")
    assert again.head() == second and again.size_bytes == repository.size_bytes > 0
    assert [c.revision for c in again.history(second)] == [second, first]
    assert again.commit_of(second).at_s == 9
    before = again.size_bytes
    assert commit(again, {b"code/a": b"1"}) == first  # deterministic, and nothing is written twice
    assert again.size_bytes == before


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
        zlib.compress(b"blob 1000\0" + b"x" * 1000 + b"\0" * (1 << 26)),  # unpacks to 64 MiB
    ]
    for data in damaged:
        path.unlink()
        path.write_bytes(data)
        with pytest.raises(GitDamage):
            repository.read(blob, "blob")
    path.unlink()
    with pytest.raises(GitDamage, match="can't be read"):
        repository.read(blob, "blob")
    os.mkfifo(path)
    with pytest.raises(GitDamage, match="is no file"):
        repository.read(blob, "blob")
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(GitDamage):
        repository.read(blob, "blob")
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
    for _ in range(2000):
        tree = repository.write("tree", b"40000 d\0" + bytes.fromhex(tree))
    with pytest.raises(GitDamage, match="deeply"):
        repository.files(repository.commit(tree, None, "m", 0))


def test_an_empty_object_of_a_lost_node_is_written_again(tmp_path: Path) -> None:
    path = object_path(Repository.create(tmp_path / "code.git"), object_id("blob", b"abc"))
    path.parent.mkdir()
    path.write_bytes(b"")
    repository = Repository.create(tmp_path / "code.git")
    assert repository.read(repository.write("blob", b"abc"), "blob") == b"abc"


def test_a_full_disk_leaves_no_half_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Repository.create(tmp_path / "code.git")

    def full(fd: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(code.os, "write", full)
        with pytest.raises(OSError, match="No space"):
            repository.write("blob", b"abc")
    assert sorted(p.name for p in repository.path.iterdir()) == ["HEAD", "config", "objects", "refs"]
    assert repository.read(repository.write("blob", b"abc"), "blob") == b"abc"


# ---------------------------------------------------------------- files and changes


def test_files_of_a_revision_and_what_changed(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path / "code.git")
    pointer = Pointer("large", 5 << 20, "a" * 64)
    first = commit(repository, {b"code/a.py": b"x = 1\ny = 2\n", b"code/gone": b"1\n2\n", b"code/\xff": b"q"})
    second = commit(
        repository,
        {
            b"code/a.py": b"x = 1\ny = 3\nz = 4",
            b"code/\xff": b"q",
            BY_HASH + b"code/model.bin": pointer.data(),
            b"n.py": b"1\n",
        },
        first,
    )
    assert files_at(repository.path, second) == {
        "code/a.py": b"x = 1\ny = 3\nz = 4",
        "code/model.bin": pointer,
        "code/\udcff": b"q",
        "n.py": b"1\n",
    }
    found = changes(repository.path, first, second)
    assert [(f.path, f.what, f.added_lines, f.removed_lines) for f in found.files] == [
        ("code/a.py", "changed", 2, 1),
        ("code/gone", "removed", 0, 2),
        ("code/model.bin", "added", None, None),
        ("n.py", "added", 1, 0),
    ]
    assert (found.added_lines, found.removed_lines, found.cut) == (3, 3, False)
    assert (
        "--- a/code/a.py\n+++ b/code/a.py\n@@ -1,2 +1,3 @@\n x = 1\n-y = 2\n+y = 3\n+z = 4\n\\ No newline" in found.text
    )
    assert changes(repository, None, first).added_lines == 5 and changes(repository, second, second).files == ()


def test_an_agent_s_file_is_never_taken_for_a_pointer(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path / "code.git")
    text = Pointer("large", 1, "b" * 64).data()
    assert files_at(repository, commit(repository, {b"code/p.json": text})) == {"code/p.json": text}


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"[" * 4000, b"{}", b'{"size_bytes": "x", "why": 3}', b"\xff", b"x" * 5000]
)
def test_bad_pointers_are_unread(tmp_path: Path, data: bytes) -> None:
    repository = Repository.create(tmp_path / "code.git")
    (value,) = files_at(repository, commit(repository, {BY_HASH + b"code/p": data})).values()
    assert isinstance(value, Pointer) and value.why == "unread"


def test_one_missing_blob_hides_no_other(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path / "code.git")
    revision = commit(repository, {b"code/a": b"1", b"code/b": b"2"})
    object_path(repository, object_id("blob", b"1")).unlink()
    value = files_at(repository.path, revision)
    assert isinstance(value["code/a"], Pointer) and value["code/b"] == b"2"
    assert changes(repository.path, None, revision).cut


# ---------------------------------------------------------------- lines


def longest_common(old: list[str], new: list[str]) -> int:
    table = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for i, left in enumerate(old):
        for j, right in enumerate(new):
            table[i + 1][j + 1] = table[i][j] + 1 if left == right else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def test_equal_blocks_are_the_longest_common_lines() -> None:
    chance = random.Random(1)
    for _ in range(1500):
        old, new = ([chance.choice("abcd") for _ in range(chance.randint(0, 14))] for _ in range(2))
        blocks, a, b = equal_blocks(old, new, Work()), 0, 0
        for at_a, at_b, count in blocks:
            assert at_a >= a and at_b >= b and old[at_a : at_a + count] == new[at_b : at_b + count]
            a, b = at_a + count, at_b + count
        assert (a, b) == (len(old), len(new))
        assert sum(count for *_, count in blocks) == longest_common(old, new)


@needs_git
def test_git_applies_our_diffs(tmp_path: Path) -> None:
    chance = random.Random(2)
    for _ in range(150):
        old, new = (
            "".join(chance.choice(["a\n", "b\n", "c\r\n", "d\x0c\n"]) for _ in range(chance.randint(1, 30)))
            for _ in range(2)
        )
        new = new[:-1] if chance.random() < 0.3 else new
        if old == new:
            continue
        (tmp_path / "f").write_bytes(old.encode())
        patch = f"--- a/f\n+++ b/f\n{line_diff(old, new, Work()).text}"
        subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=tmp_path, check=True, capture_output=True)
        assert (tmp_path / "f").read_bytes() == new.encode()


def test_texts_made_to_be_slow_are_given_up_by_steps() -> None:
    bad = [
        ("".join(f"{i}\n" for i in range(20_000)), "".join(f"x{i}\n" for i in range(20_000))),
        ("a\nb\n" * 20_000, "b\na\na\n" * 15_000),
    ]
    for old, new in bad:
        work = Work()
        diff = line_diff(old, new, work)
        assert work.given_up == 1 and work.steps > -200_000
        assert diff.added - diff.removed == new.count("\n") - old.count("\n")
    assert code.MAX_EDITS <= 2000
