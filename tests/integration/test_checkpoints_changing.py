"""Checkpoints that are written to while they are copied."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    EMBEDDING,
    SINGLE,
    Desk,
    meanwhile,
    raw_parts,
    save,
    tiny_base,
    write_at,
)
from weights import Tensors

from autorl_hpc.errors import Refused
from autorl_hpc.supervise import intake as intakes
from autorl_hpc.supervise.copy import Copied, copy_checkpoint
from autorl_hpc.supervise.intake import lint_folder
from autorl_hpc.supervise.lint import BaseModel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "copy"


WIDE = BaseModel({"model_type": "llama"}, {EMBEDDING: (8192, 4096), "b": (4096,)}, "0" * 64)
"""128 MiB, so that a copy takes long enough to be disturbed."""


def save_wide(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    tensors: Tensors = {name: ("F32", rng.random(shape, dtype=np.float32)) for name, shape in WIDE.shapes.items()}
    return save(folder, tensors, WIDE.config)


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
    desk = Desk(tmp_path, WIDE)
    save_wide(desk.checkpoint)

    def disturbed(*arguments: Any) -> Copied:
        with meanwhile(lambda: action(desk.checkpoint / SINGLE)):
            return copy_checkpoint(*arguments)

    monkeypatch.setattr(intakes, "copy_checkpoint", disturbed)
    answer = desk.refused()
    assert answer["code"] == "artifact_changed" and SINGLE in answer["error"]
    assert "after the save has ended" in answer["advice"]


def test_a_header_exchanged_after_the_lint_is_refused(folder: Path, target: Path) -> None:
    """Two tensors of equal shape change their names: by the old header the hash would be that of other weights."""
    _, data = raw_parts(save(folder) / SINGLE)
    one, two = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    target.mkdir()
    with ExitStack() as stack:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, fd)
        linted = lint_folder(fd, tiny_base(), stack)
        text = (folder / SINGLE).read_bytes()[: -len(data)]
        swapped = text.replace(one.encode(), b"?").replace(two.encode(), one.encode()).replace(b"?", two.encode())
        assert len(swapped) == len(text) and swapped != text
        write_at(folder / SINGLE, 0, swapped)
        with pytest.raises(Refused) as caught:
            copy_checkpoint(linted, tiny_base(), target, "float32")
    assert caught.value.code == "artifact_changed"


def test_a_file_renamed_over_after_the_lint_changes_nothing(folder: Path, target: Path) -> None:
    """The open file is what was linted and is what is copied."""
    save(folder)
    before = (folder / SINGLE).read_bytes()
    target.mkdir()
    with ExitStack() as stack:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, fd)
        linted = lint_folder(fd, tiny_base(), stack)
        (folder / "other").write_bytes(b"something else")
        os.rename(folder / "other", folder / SINGLE)
        try:
            copy_checkpoint(linted, tiny_base(), target, "float32")
        except Refused as refused:  # the rename took the last name of the open file, which changes its ctime
            assert refused.code == "artifact_changed"
        else:
            assert (target / SINGLE).read_bytes() == before
