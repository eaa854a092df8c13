"""Folders that are refused before a byte is copied, and how fast a lint is."""

from __future__ import annotations

import json
import math
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needs
import pytest
from checkpoints import (
    EMBEDDING,
    SINGLE,
    TINY,
    Desk,
    lint_only,
    save,
    write_raw,
)

from autorl_hpc.files.checkpoint import INDEX_NAME
from autorl_hpc.supervise import intake as intakes
from autorl_hpc.supervise.copy import Copied
from autorl_hpc.supervise.lint import BaseModel

QUICK_S = 2.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "copy"


def fifo(folder: Path) -> str:
    os.mkfifo(folder / "weights")
    return "special_file"


def fifo_as_weights(folder: Path) -> str:
    (folder / SINGLE).unlink()
    os.mkfifo(folder / SINGLE)
    return "special_file"


def fifo_as_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    return "special_file"


def unix_socket(folder: Path) -> str:
    here = os.getcwd()
    os.chdir(folder)  # the path of a socket may have 107 bytes only
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind("s")
    finally:
        os.chdir(here)
    return "special_file"


def device(folder: Path) -> str:
    try:
        os.mknod(folder / "zero", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        needs.skip("root", "making a device node is not permitted here")
    return "special_file"


def symlink_out(folder: Path) -> str:
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to(TINY / SINGLE)
    return "symlink"


def symlink_inside(folder: Path) -> str:
    (folder / "link").symlink_to(SINGLE)
    return "symlink"


def symlink_to_nothing(folder: Path) -> str:
    (folder / "link").symlink_to("nothing")
    return "symlink"


def hard_link(folder: Path) -> str:
    os.link(folder / SINGLE, folder.parent / "other-name")
    return "hard_link"


def one_terabyte(folder: Path) -> str:
    with open(folder / "optimizer.pt", "wb") as file:
        file.truncate(1 << 40)
    return "file_too_large"


def one_terabyte_of_weights(folder: Path) -> str:
    os.truncate(folder / SINGLE, 1 << 40)
    return "file_too_large"


def a_hundred_thousand_files(folder: Path) -> str:
    for number in range(100_000):
        os.close(os.open(folder / f"{number:06d}", os.O_CREAT | os.O_WRONLY))
    return "too_many_files"


TRAPS = [fifo, fifo_as_weights, fifo_as_config, unix_socket, device, symlink_out, symlink_inside, symlink_to_nothing, hard_link,
         one_terabyte, one_terabyte_of_weights, a_hundred_thousand_files]  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS, ids=lambda t: t.__name__)
def test_traps_are_refused_before_a_byte_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: Callable[[Path], str]
) -> None:
    def must_not(*arguments: object) -> Copied:
        raise AssertionError("a copy was begun")

    monkeypatch.setattr(intakes, "copy_checkpoint", must_not)
    desk = Desk(tmp_path)
    expected = trap(save(desk.checkpoint))
    answer = desk.refused()
    assert answer["code"] == expected and answer["advice"]


def large_base(layers: int) -> BaseModel:
    """A base model of about 3 GB in fp32, by its headers alone."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (32000, 1024), "model.norm.weight": (1024,)}
    for layer in range(layers):
        for name, shape in (("q", (1024, 1024)), ("k", (1024, 1024)), ("v", (1024, 1024)), ("o", (1024, 1024)), ("up", (4096, 1024)),
                            ("gate", (4096, 1024)), ("down", (1024, 4096)), ("norm1", (1024,)), ("norm2", (1024,))):  # fmt: skip
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return BaseModel({"model_type": "llama"}, shapes, "0" * 64)


def save_holes(folder: Path, base: BaseModel, shards: int = 1) -> int:
    """A checkpoint of that base in which only the headers take space; its size in bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(base.config))
    names = [SINGLE] if shards == 1 else [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    index = {name: names[number * shards // len(base.shapes)] for number, name in enumerate(base.shapes)}
    size = 0
    for shard in names:
        header: dict[str, Any] = {}
        position = 0
        for name in (name for name in base.shapes if index[name] == shard):
            end = position + 4 * math.prod(base.shapes[name])
            header[name] = {"dtype": "F32", "shape": list(base.shapes[name]), "data_offsets": [position, end]}
            position = end
        write_raw(folder / shard, header)
        size += (folder / shard).stat().st_size + position
        os.truncate(folder / shard, (folder / shard).stat().st_size + position)
    if shards > 1:
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return size


@pytest.mark.parametrize(
    ("layers", "shards", "tensors", "gigabytes"), [(32, 1, 290, 2.2), (43, 1, 389, 3.0), (111, 8, 1001, 7.5)]
)
def test_the_lint_reads_the_headers_alone(
    folder: Path, layers: int, shards: int, tensors: int, gigabytes: float
) -> None:
    """In under 50 ms, whatever the weights' size."""
    base = large_base(layers)
    assert len(base.shapes) == tensors
    assert save_holes(folder, base, shards) > gigabytes * 1e9
    times = []
    for _ in range(7):
        started = time.monotonic()
        lint_only(folder, base)
        times.append(time.monotonic() - started)
    print(
        f"lint of {tensors} tensors in {shards} files: {1000 * min(times):.1f} ms, median {1000 * sorted(times)[3]:.1f}"
    )
    assert min(times) < 0.5, times
