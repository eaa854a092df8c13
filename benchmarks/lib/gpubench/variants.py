"""Distinct checkpoints of a base model that cost no room: all tensors but one stand in a shard that they share by hard links.

The one that differs is the last norm's, some hundred values. Each has a content hash of its own, so an engine that keeps
checkpoints by hash reads every one of them; but all of them read the same file for the most part, so only the first reading
after `cold.forget` comes from the disk.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.files.checkpoint import INDEX_NAME, ITEM_BYTES, TensorSpec, content_hash, hash_span, tensors_of

SHARED, OWN = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SUBTLE = {"F32": 1 << 16, "BF16": 1, "F16": 1 << 3}
"""A bit of a value by dtype that changes it by less than 0.8 %: the model answers as before, for the most part."""

STRONG = {"F32": 1 << 22, "BF16": 1 << 6, "F16": 1 << 9}
"""The first bit behind the point: a quarter to a half of the value. The model answers otherwise."""

COPY_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Variant:
    """A checkpoint: its folder, content hash and bytes of weights."""

    folder: Path
    content_hash: str
    size_bytes: int
    digests: dict[str, str]


class Variants:
    """Makes variants of the model in `base` below `folder`, which must be one file system."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.base, self.folder = base, folder
        folder.mkdir(parents=True, exist_ok=True)
        specs = sorted(tensors_of(base), key=lambda spec: (spec.file, spec.begin))
        vectors = [spec for spec in specs if len(spec.shape) == 1] or specs
        named = [spec for spec in vectors if spec.name in ("model.norm.weight", "transformer.ln_f.weight")]
        self._own = (named or vectors)[-1]
        self._shared = [spec for spec in specs if spec is not self._own]
        self._original = _bytes_of(base, self._own)
        self._parts = {spec.name: _digest(base, spec) for spec in self._shared}
        self._shard = folder / SHARED
        _write(self._shard, base, self._shared)

    def make(self, number: int, *, strong: bool = False) -> Variant:
        """Variant `number`: the same number is the same content.

        Args:
            strong: one that answers otherwise than the base model.
        """
        place = self.folder / f"{'strong' if strong else 'v'}{number:04d}"
        if place.exists():
            shutil.rmtree(place)
        place.mkdir()
        os.link(self._shard, place / SHARED)
        _write(place / OWN, self.base, [self._own], self._changed(number, strong))
        index = {spec.name: SHARED for spec in self._shared} | {self._own.name: OWN}
        (place / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": index}))
        shutil.copyfile(self.base / "config.json", place / "config.json")
        (own,) = [spec for spec in tensors_of(place) if spec.name == self._own.name]
        digests = {**self._parts, self._own.name: _digest(place, own)}
        specs = [*self._shared, self._own]
        return Variant(
            place,
            content_hash((spec.name, spec.dtype, spec.shape, digests[spec.name]) for spec in specs),
            sum(spec.end - spec.begin for spec in specs),
            digests,
        )

    def _changed(self, number: int, strong: bool) -> bytes:
        dtype = self._own.dtype
        size, bit = ITEM_BYTES[dtype], (STRONG if strong else SUBTLE)[dtype]
        data, rng = bytearray(self._original), random.Random(number)
        for position in range(0, len(data), size):
            if position == 0 or rng.random() < 0.5:
                value = int.from_bytes(data[position : position + size], "little") ^ bit
                data[position : position + size] = value.to_bytes(size, "little")
        return bytes(data)


def _write(path: Path, source: Path, specs: list[TensorSpec], data: bytes | None = None) -> None:
    """A safetensors file of these tensors, on the disk when it returns; `data` in the place of what the source holds."""
    header, position = {}, 0
    for spec in specs:
        end = position + spec.end - spec.begin
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if data is not None:
            file.write(data)
        for spec in specs if data is None else []:
            with open(source / spec.file, "rb") as origin:
                origin.seek(spec.begin)
                left = spec.end - spec.begin
                while left:
                    piece = origin.read(min(COPY_BYTES, left))
                    if not piece:
                        raise OSError(f"{source / spec.file} is shorter than its header says")
                    file.write(piece)
                    left -= len(piece)
        file.flush()
        os.fsync(file.fileno())


def _bytes_of(folder: Path, spec: TensorSpec) -> bytes:
    with open(folder / spec.file, "rb") as file:
        file.seek(spec.begin)
        return file.read(spec.end - spec.begin)


def _digest(folder: Path, spec: TensorSpec) -> str:
    fd = os.open(folder / spec.file, os.O_RDONLY)
    try:
        return hash_span(fd, spec.begin, spec.end)
    finally:
        os.close(fd)
