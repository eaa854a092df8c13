"""Folders that are refused before a byte is copied, and checkpoints that are written to while they are copied."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from checkpoints import EMBEDDING, SINGLE, TINY, Desk, meanwhile, raw_parts, save, tiny_base, write_at
from weights import Tensors

from autorl_hpc.errors import Refused
from autorl_hpc.supervise import intake as intakes
from autorl_hpc.supervise.copy import Copied, copy_checkpoint
from autorl_hpc.supervise.intake import lint_folder
from autorl_hpc.supervise.lint import BaseModel


def in_place_of(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def trap(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return trap


def unix_socket(folder: Path) -> None:
    here = os.getcwd()
    os.chdir(folder)  # the path of a socket may have 107 bytes only
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind("s")
    finally:
        os.chdir(here)


def device(folder: Path) -> None:
    try:
        os.mknod(folder / "zero", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        needs.skip("root", "making a device node is not permitted here")


def one_terabyte(folder: Path) -> None:
    with open(folder / "optimizer.pt", "wb") as file:
        file.truncate(1 << 40)


def many_files(folder: Path) -> None:
    for number in range(5000):
        (folder / f"{number:06d}").touch()


TRAPS: list[tuple[str, Callable[[Path], object], str]] = [
    ("fifo", lambda folder: os.mkfifo(folder / "weights"), "special_file"),
    ("fifo as weights", in_place_of(SINGLE, os.mkfifo), "special_file"),
    ("fifo as config", in_place_of("config.json", os.mkfifo), "special_file"),
    ("socket", unix_socket, "special_file"),
    ("device", device, "special_file"),
    ("link out", in_place_of(SINGLE, lambda path: path.symlink_to(TINY / SINGLE)), "symlink"),
    ("link inside", lambda folder: (folder / "link").symlink_to(SINGLE), "symlink"),
    ("link to nothing", lambda folder: (folder / "link").symlink_to("nothing"), "symlink"),
    ("hard link", lambda folder: os.link(folder / SINGLE, folder.parent / "other-name"), "hard_link"),
    ("a terabyte", one_terabyte, "file_too_large"),
    ("a terabyte of weights", lambda folder: os.truncate(folder / SINGLE, 1 << 40), "file_too_large"),
    ("many files", many_files, "too_many_files"),
]


@pytest.mark.parametrize(("trap", "code"), [row[1:] for row in TRAPS], ids=[row[0] for row in TRAPS])
def test_traps_are_refused_before_a_byte_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: Callable[[Path], object], code: str
) -> None:
    def must_not(*arguments: object) -> Copied:
        raise AssertionError("a copy was begun")

    monkeypatch.setattr(intakes, "copy_checkpoint", must_not)
    desk = Desk(tmp_path)
    trap(save(desk.checkpoint))
    answer = desk.refused()
    assert answer["code"] == code and answer["advice"]


WIDE = BaseModel({"model_type": "llama"}, {EMBEDDING: (8192, 4096), "b": (4096,)}, "0" * 64)
"""128 MiB, so that a copy takes long enough to be disturbed."""


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\0\0\0\0")


def rewrite(path: Path) -> None:
    """In place, the size stays, and the old time is put back."""
    info = path.stat()
    write_at(path, info.st_size - 4, os.urandom(3) + b"\0")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 8)


@pytest.mark.parametrize("action", [append, rewrite, cut], ids=lambda a: a.__name__)
def test_a_file_that_changes_during_the_copy_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: Callable[[Path], None]
) -> None:
    desk, rng = Desk(tmp_path, WIDE), np.random.default_rng(0)
    tensors: Tensors = {name: ("F32", rng.random(shape, dtype=np.float32)) for name, shape in WIDE.shapes.items()}
    save(desk.checkpoint, tensors, WIDE.config)

    def disturbed(*arguments: Any) -> Copied:
        with meanwhile(lambda: action(desk.checkpoint / SINGLE)):
            return copy_checkpoint(*arguments)

    monkeypatch.setattr(intakes, "copy_checkpoint", disturbed)
    answer = desk.refused()
    assert answer["code"] == "artifact_changed" and SINGLE in answer["error"]
    assert "after the save has ended" in answer["advice"]


@pytest.mark.parametrize("how", ["header exchanged", "renamed over"])
def test_what_was_linted_is_what_is_copied(tmp_path: Path, how: str) -> None:
    """Exchanged: two tensors of equal shape change their names; by the old header the hash would be that of other weights."""
    folder, target = save(tmp_path / "checkpoint"), tmp_path / "copy"
    target.mkdir()
    _, data = raw_parts(folder / SINGLE)
    before = (folder / SINGLE).read_bytes()
    with ExitStack() as stack:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, fd)
        linted = lint_folder(fd, tiny_base(), stack)
        if how == "header exchanged":
            one, two = (f"model.layers.{layer}.mlp.up_proj.weight".encode() for layer in (0, 1))
            swapped = before[: -len(data)].replace(one, b"?").replace(two, one).replace(b"?", two)
            write_at(folder / SINGLE, 0, swapped)
        else:
            (folder / "other").write_bytes(b"something else")
            os.rename(folder / "other", folder / SINGLE)
        try:
            copy_checkpoint(linted, tiny_base(), target, "float32")
        except Refused as refused:  # the rename took the last name of the open file, which changes its ctime
            assert refused.code == "artifact_changed"
        else:
            assert how == "renamed over" and (target / SINGLE).read_bytes() == before
