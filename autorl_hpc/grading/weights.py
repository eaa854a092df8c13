"""Weights of ours read piece by piece with numpy alone: no model is ever whole in memory."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autorl_hpc.files.checkpoint import ITEM_BYTES, TensorSpec, tensors_of
from autorl_hpc.files.faults import again

if TYPE_CHECKING:
    from numpy.typing import NDArray

READ_VALUES = 4 * 1024 * 1024
"""Values in one read: 8 to 16 MiB, which shared file systems like."""


class Weights:
    """The tensors of a folder of the store or the artifacts, by name, those in `but` left out.

    Raises:
        Refused: a file is no safetensors file.
        ValueError: a tensor stands in two files.
        OSError: the file system failed.
    """

    def __init__(self, folder: Path, but: frozenset[str] = frozenset()) -> None:
        self.folder = folder
        specs = [spec for spec in tensors_of(folder) if spec.name not in but]
        self.specs = {spec.name: spec for spec in sorted(specs, key=lambda spec: (spec.file, spec.begin))}
        self._files: dict[str, int] = {}
        if len(self.specs) != len(specs):
            raise ValueError(f"{folder.name}: a tensor stands in two files")

    def read(self, spec: TensorSpec, start: int, count: int) -> bytearray:
        """The bytes of `count` values from value `start` of a tensor on."""
        size = ITEM_BYTES[spec.dtype]
        return again(functools.partial(self._read, spec, spec.begin + start * size, count * size))

    def _read(self, spec: TensorSpec, position: int, length: int) -> bytearray:
        if spec.file not in self._files:
            self._files[spec.file] = os.open(self.folder / spec.file, os.O_RDONLY | os.O_CLOEXEC)
        data = bytearray(length)
        view = memoryview(data)
        while view:
            got = os.preadv(self._files[spec.file], [view], position)
            if got <= 0:
                raise ValueError(f"{spec.file} is shorter than its header says")
            view, position = view[got:], position + got
        return data

    def close(self) -> None:
        """Closes the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def values_of(spec: TensorSpec) -> int:
    """How many values a tensor has."""
    return math.prod(spec.shape)


def raw(data: bytearray, dtype: str) -> NDArray[Any]:
    """The bytes as unsigned integers, one a value."""
    import numpy as np

    return np.frombuffer(data, dtype=np.uint32 if dtype == "F32" else np.uint16)


def as_float32(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    """What `raw` gave, as float32: exact for all three types."""
    import numpy as np

    if dtype == "F32":
        return bits.view(np.float32)
    if dtype == "F16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """float32 values as they come back from a file of that type: to nearest, ties to even."""
    import numpy as np

    if dtype == "F32":
        return values
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    bits: NDArray[Any] = values.view(np.uint32)
    kept: NDArray[Any] = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) & np.uint32(0xFFFF0000)
    return kept.view(np.float32)


def precision(bits: NDArray[Any], dtype: str) -> str:
    """The smallest type that holds all these values: fp32 files are often written from bf16 or fp16 weights."""
    import numpy as np

    if dtype != "F32":
        return dtype
    seen = int(np.bitwise_or.reduce(bits)) if len(bits) else 0
    if not seen & 0xFFFF:
        return "BF16"
    if seen & 0x1FFF:
        return "F32"
    values = bits.view(np.float32)
    return "F16" if np.array_equal(rounded(values, "F16"), values) else "F32"
