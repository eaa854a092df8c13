"""Checkpoints that must be refused: builders that take a folder and make one there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import EMBEDDING, HEAD, SINGLE, TINY, changed, raw_parts, save, save_shards, tiny_tensors, write_raw
from weights import Tensors, write_safetensors

from autorl_hpc.files.checkpoint import INDEX_NAME

Build = Callable[[Path], object]


def write_config(folder: Path, text: str | bytes) -> None:
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def index_names(name: str) -> Build:
    def build(folder: Path) -> None:
        save_shards(folder, 2)
        outside = folder.parent / "x"
        outside.mkdir()
        shutil.copyfile(TINY / SINGLE, outside / SINGLE)
        path = folder / INDEX_NAME
        edit(path, weight_map=dict.fromkeys(json.loads(path.read_text())["weight_map"], name))

    return build


def index_is(value: Any) -> Build:
    def build(folder: Path) -> None:
        save_shards(folder, 2)
        (folder / INDEX_NAME).write_text(value if isinstance(value, str) else json.dumps(value))

    return build


def shard_gone(folder: Path) -> None:
    save_shards(folder, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()


def shard_cut(folder: Path) -> None:
    path = save_shards(folder, 2) / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def shard_longer(folder: Path) -> None:
    with open(save(folder) / SINGLE, "ab") as file:
        file.write(b"hidden")


def stray_shard(folder: Path) -> None:
    save_shards(folder, 2)
    shutil.copyfile(TINY / SINGLE, folder / "extra.safetensors")


def two_saves(folder: Path) -> None:
    save_shards(folder, 2)
    save(folder)


def two_files_without_index(folder: Path) -> None:
    (save_shards(folder, 2) / INDEX_NAME).unlink()


def tensor_in_two_shards(folder: Path) -> None:
    save_shards(folder, 2)
    tensors = changed(tiny_tensors())
    index = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    second = "model-00002-of-00002.safetensors"
    held = {name: tensors[name] for name in tensors if index[name] == second or name == EMBEDDING}
    write_safetensors(folder / second, held)


def index_of_others(folder: Path) -> None:
    path = save_shards(folder, 2) / INDEX_NAME
    index = json.loads(path.read_text())["weight_map"]
    first, second = sorted(set(index.values()))
    edit(path, weight_map={name: second if shard == first else first for name, shard in index.items()})


def with_header(change: Callable[[dict[str, Any]], object]) -> Build:
    """The tiny model with a header that is not quite right."""

    def build(folder: Path) -> None:
        header, data = raw_parts(save(folder) / SINGLE)
        made = change(header)
        write_raw(folder / SINGLE, header if made is None else made, data)

    return build


def set_field(field: str, value: Any) -> Build:
    def change(header: dict[str, Any]) -> None:
        header[EMBEDDING][field] = value

    return with_header(change)


def file_of(data: bytes) -> Build:
    def build(folder: Path) -> None:
        (save(folder) / SINGLE).write_bytes(data)

    return build


def twice_in_the_header(header: dict[str, Any]) -> bytes:
    text = json.dumps(header)
    return (text[:-1] + ", " + json.dumps(EMBEDDING) + ": " + json.dumps(header[EMBEDDING]) + "}").encode()


def overlapping(header: dict[str, Any]) -> None:
    first, second = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    header[first]["data_offsets"] = header[second]["data_offsets"]


def weights(change: Callable[[Tensors], Tensors]) -> Build:
    def build(folder: Path) -> None:
        save(folder, change(changed(tiny_tensors())))

    return build


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: value for name, value in tensors.items() if name not in names}


def one_value(name: str, value: float, kind: str = "F32") -> Build:
    """One bad value, the last of a tensor."""

    def change(tensors: Tensors) -> Tensors:
        values = tensors[name][1].copy()
        values.reshape(-1)[-1] = value
        if kind == "BF16":
            return {**tensors, name: ("BF16", (values.view(np.uint32) >> 16).astype(np.uint16))}
        with np.errstate(over="ignore"):
            return {**tensors, name: (kind, values.astype(np.float16 if kind == "F16" else np.float32))}

    return weights(change)


def all_of(name: str, value: float) -> Build:
    return weights(lambda tensors: {**tensors, name: ("F32", np.full_like(tensors[name][1], value))})


def other_head(tensors: Tensors) -> Tensors:
    values = tensors[EMBEDDING][1].copy()
    values[3, 3] += 1
    return {**tensors, HEAD: ("F32", values)}


def stored_as(dtype: str, width: int) -> Build:
    def change(tensors: Tensors) -> Tensors:
        return {**tensors, EMBEDDING: (dtype, np.zeros((*tensors[EMBEDDING][1].shape, width), np.uint8))}

    def build(folder: Path) -> None:
        save(folder, change(changed(tiny_tensors())))
        header, data = raw_parts(folder / SINGLE)
        header[EMBEDDING]["shape"] = header[EMBEDDING]["shape"][:2]
        write_raw(folder / SINGLE, header, data)

    return build


def code(file: str, value: dict[str, Any]) -> Build:
    def build(folder: Path) -> None:
        save(folder)
        (folder / "modeling_evil.py").write_text("raise SystemExit")
        old = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps({**old, **value}))

    return build


class Evil:
    """A pickle that runs code when it is read."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch PICKLE-WAS-RUN",)


def pickle_only(name: str) -> Build:
    def build(folder: Path) -> None:
        import pickle

        (save(folder) / SINGLE).unlink()
        (folder / name).write_bytes(pickle.dumps(Evil()))

    return build


def nothing_there(folder: Path) -> None:
    folder.mkdir()


def only_config(folder: Path) -> None:
    (save(folder) / SINGLE).unlink()


def config_is(text: str | bytes) -> Build:
    def build(folder: Path) -> None:
        write_config(save(folder), text)

    return build
