"""Checkpoints as files: safetensors headers read and checked without torch, and the content hash.

Format: https://github.com/huggingface/safetensors#format. The content hash runs over sorted (tensor name, dtype, shape,
sha256 of data), so that resharding a checkpoint doesn't change it and a single changed byte does.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from autorl_hpc.errors import Refused
from autorl_hpc.files.faults import again
from autorl_hpc.records.canonical import canonical_json

MAX_HEADER_BYTES = 100_000_000
"""The limit that the safetensors library itself sets."""

MAX_JSON_BYTES = 16 * 1024 * 1024
"""config.json and the shard index: an index of a million tensors is still smaller."""

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""The dtypes that a submission may be stored in."""

EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "gpt_neox.embed_in.weight",
    "transformer.word_embeddings.weight",
    "model.decoder.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
)
HEAD_NAME = "lm_head.weight"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CHUNK_BYTES = 4 * 1024 * 1024


class TensorSpec(NamedTuple):
    """One tensor of a file: where its bytes lie, from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    file: str


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice")
    return result


def parse_json(data: bytes, file: str) -> Any:
    """JSON of a submission; never raises anything but Refused."""
    try:
        return json.loads(data, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise Refused(
            "not_json", f"{file}: not readable as JSON ({error})"[:300], "save the checkpoint again"
        ) from None


def read_header(fd: int, file: str, max_header_bytes: int = MAX_HEADER_BYTES) -> list[TensorSpec]:
    """The tensors of an open safetensors file, from its header alone.

    Args:
        max_header_bytes: a longer header is not parsed; parsing takes many times its size in memory.

    Raises:
        Refused: the header is not what the format asks for, or the file is shorter or longer than it says.
        OSError: the file system failed.
    """
    size = os.fstat(fd).st_size
    again = "save again with `save_pretrained(..., safe_serialization=True)` and submit after the save has ended"
    if size < 8:
        raise Refused("header_broken", f"{file}: {size} bytes are no safetensors file", again)
    (length,) = struct.unpack("<Q", os.pread(fd, 8, 0))
    if length == 0 or length + 8 > size:
        raise Refused("header_broken", f"{file}: the header says {length} bytes, the file has {size}", again)
    if length > max_header_bytes:
        raise Refused(
            "header_broken",
            f"{file}: a header of {length} bytes; this model's needs less than {max_header_bytes}",
            again,
        )
    header = parse_json(os.pread(fd, length, 8), file)
    if not isinstance(header, dict):
        raise Refused("header_broken", f"{file}: the header is no JSON object", again)
    tensors = [_tensor(name, value, 8 + length, file) for name, value in header.items() if name != "__metadata__"]
    if not tensors:
        raise Refused("no_tensors", f"{file}: holds no tensor", again)
    position = 8 + length
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.end)):
        if tensor.begin != position:
            raise Refused("header_broken", f"{file}: gap or overlap before tensor {tensor.name}", again)
        position = tensor.end
    if position != size:
        raise Refused(
            "shard_truncated" if position > size else "trailing_bytes",
            f"{file}: the header describes {position} bytes, the file has {size}",
            again,
        )
    return tensors


def _tensor(name: str, value: Any, base: int, file: str) -> TensorSpec:
    again = "save the checkpoint again with save_pretrained"
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        numbers_ok = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        raise Refused(
            "header_broken", f"{file}: tensor {name[:100]!r} is not described as the format asks", again
        ) from None
    if not numbers_ok or len(shape) > 8:
        raise Refused("header_broken", f"{file}: tensor {name[:100]!r} has impossible numbers", again)
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise Refused(
            "dtype_unsupported",
            f"{file}: tensor {name[:100]!r} is stored as {str(dtype)[:20]}; accepted are F32, BF16, F16",
            "convert the model first: `model.to(torch.bfloat16).save_pretrained(...)`; quantised weights are not taken",
        )
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise Refused(
            "header_broken", f"{file}: tensor {name[:100]!r} has {end - begin} bytes, its shape needs others", again
        )
    return TensorSpec(name, dtype, shape, base + begin, base + end, file)


def content_hash(parts: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """The content hash over (name, dtype, shape, sha256 of data)."""
    rows = sorted([name, dtype, list(shape), digest] for name, dtype, shape, digest in parts)
    return hashlib.sha256(canonical_json(rows)).hexdigest()


def hash_span(fd: int, begin: int, end: int) -> str:
    """sha256 of the bytes [begin, end) of an open file."""
    digest = hashlib.sha256()
    buffer = bytearray(min(CHUNK_BYTES, max(1, end - begin)))
    view = memoryview(buffer)
    while begin < end:
        got = os.preadv(fd, [view[: min(CHUNK_BYTES, end - begin)]], begin)
        if got <= 0:
            raise OSError(f"file ended at {begin}, expected {end}")
        digest.update(view[:got])
        begin += got
    return digest.hexdigest()


def weight_files(folder: Path) -> list[str]:
    """The safetensors files of a folder of ours (store or artifact), sorted."""
    return sorted(name for name in again(lambda: os.listdir(folder)) if name.endswith(".safetensors"))


def tensors_of(folder: Path) -> list[TensorSpec]:
    """All tensors of a folder of ours, from the headers."""
    return [tensor for name in weight_files(folder) for tensor in again(functools.partial(_tensors_in, folder / name))]


def _tensors_in(path: Path) -> list[TensorSpec]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_header(fd, path.name)
    finally:
        os.close(fd)


def folder_content_hash(folder: Path, drop: frozenset[str] = frozenset()) -> str:
    """The content hash of a model folder of ours, the tensors `drop` left out: reads every tensor once. Of a base model:
    `tying.base_content_hash`."""
    return content_hash(folder_parts(folder, drop))


def folder_parts(folder: Path, drop: frozenset[str] = frozenset()) -> list[tuple[str, str, tuple[int, ...], str]]:
    """What the content hash of a model folder of ours runs over.

    Raises:
        Refused: a file is no safetensors file, or a tensor stands in two.
    """
    parts: list[tuple[str, str, tuple[int, ...], str]] = []
    tensors = tensors_of(folder)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise Refused(
            "tensor_twice", "a tensor stands in two safetensors files", "keep one save, in one file or in shards"
        )
    for name in weight_files(folder):
        kept = [tensor for tensor in tensors if tensor.file == name and tensor.name not in drop]
        parts.extend(again(functools.partial(_hashed, folder / name, kept)))
    return parts


def _hashed(path: Path, tensors: list[TensorSpec]) -> list[tuple[str, str, tuple[int, ...], str]]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [(t.name, t.dtype, t.shape, hash_span(fd, t.begin, t.end)) for t in tensors]
    finally:
        os.close(fd)
