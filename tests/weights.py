"""Writes safetensors files without torch: for tests and benchmarks that need many or odd checkpoints."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Tensors = dict[str, tuple[str, npt.NDArray[Any]]]


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """One file; `tensors` maps a name to its safetensors dtype and an array with the raw values."""
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, values) in tensors.items():
        end = position + values.nbytes
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [position, end]}
        position = end
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        for _, values in tensors.values():
            file.write(np.ascontiguousarray(values).tobytes())


def read_safetensors(path: Path) -> Tensors:
    """The tensors of an fp32, bf16 (as uint16) or fp16 file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    kinds = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16}
    found: Tensors = {}
    for name, spec in header.items():
        if name != "__metadata__":
            begin, end = spec["data_offsets"]
            raw = np.frombuffer(data[8 + length + begin : 8 + length + end], dtype=kinds[spec["dtype"]])
            found[name] = (spec["dtype"], raw.reshape(spec["shape"]).copy())
    return found


def noisy_tiny(tiny: Path, target: Path, *, seed: int, scale: float = 1e-3) -> None:
    """A checkpoint like the tiny model with a little noise on every weight: distinct content, much the same answers."""
    target.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = read_safetensors(tiny / "model.safetensors")
    noisy = {
        name: (dtype, (values + scale * rng.standard_normal(values.shape)).astype(values.dtype))
        for name, (dtype, values) in tensors.items()
    }
    write_safetensors(target / "model.safetensors", noisy)
    shutil.copyfile(tiny / "config.json", target / "config.json")
