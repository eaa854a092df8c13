"""Checkpoint files: safetensors headers without torch (https://github.com/huggingface/safetensors#format), content hash, tied
heads, hashes of files and folders.

The content hash covers the sorted (tensor name, dtype, shape, sha256 of data): resharding does not change it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from autorl_hpc.errors import Refused
from autorl_hpc.files import reading
from autorl_hpc.files.faults import again
from autorl_hpc.files.progress import bar
from autorl_hpc.records import canonical_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MAX_JSON_BYTES = 16 * 1024 * 1024  # limit for config.json and the shard index; an index of a million tensors is smaller

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}  # bytes per item of the dtypes that a submission may use

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
MAX_THREADS = 8  # of hashing, which runs at 1 to 2 GB/s a core and frees the interpreter meanwhile

Given = TypeVar("Given")
Made = TypeVar("Made")


class TensorSpec(NamedTuple):
    """Describe one tensor of a file; `begin` and `end` are byte offsets from the file's start."""

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
    """Parse JSON from a submission. Raises Refused, and nothing else, if it is not JSON or repeats a key."""
    try:
        return json.loads(data, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        what = f"{file}: not readable as JSON ({error})"[:300]
        raise Refused("not_json", what, "save the checkpoint again") from None


_AGAIN = "save again with `save_pretrained(..., safe_serialization=True)` and submit after the save has ended"


def _broken(code: str, file: str, what: str) -> Refused:
    return Refused(code, f"{file}: {what}", _AGAIN)


def read_header(fd: int, file: str, max_header_bytes: int = MAX_HEADER_BYTES) -> list[TensorSpec]:
    """Return the tensors of an open safetensors file, read from its header alone. Raises Refused: the header violates the format,
    is longer than `max_header_bytes` (parsing takes many times its size), or does not fit the file; OSError."""
    size = os.fstat(fd).st_size
    if size < 8:
        raise _broken("header_broken", file, f"{size} bytes are no safetensors file")
    (length,) = struct.unpack("<Q", os.pread(fd, 8, 0))
    if length == 0 or length + 8 > size:
        raise _broken("header_broken", file, f"the header says {length} bytes, the file has {size}")
    if length > max_header_bytes:
        what = f"a header of {length} bytes; this model's needs less than {max_header_bytes}"
        raise _broken("header_broken", file, what)
    header = parse_json(os.pread(fd, length, 8), file)
    if not isinstance(header, dict):
        raise _broken("header_broken", file, "the header is not a JSON object")
    tensors = [_tensor(name, value, 8 + length, file) for name, value in header.items() if name != "__metadata__"]
    if not tensors:
        raise _broken("no_tensors", file, "holds no tensor")
    position = 8 + length
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.end)):
        if tensor.begin != position:
            raise _broken("header_broken", file, f"gap or overlap before tensor {tensor.name}")
        position = tensor.end
    if position != size:
        what = f"the header describes {position} bytes, the file has {size}"
        raise _broken("shard_truncated" if position > size else "trailing_bytes", file, what)
    return tensors


def _tensor(name: str, value: Any, base: int, file: str) -> TensorSpec:
    named = f"tensor {name[:100]!r}"
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        numbers_ok = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        raise _broken("header_broken", file, f"{named} is not described as the format asks") from None
    if not numbers_ok or len(shape) > 8:
        raise _broken("header_broken", file, f"{named} has impossible numbers")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        what = f"{file}: {named} is stored as {str(dtype)[:20]}; accepted are F32, BF16, F16"
        convert = "convert the model first: `model.to(torch.bfloat16).save_pretrained(...)`"
        raise Refused("dtype_unsupported", what, f"{convert}; quantised weights are not taken")
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise _broken("header_broken", file, f"{named} has {end - begin} bytes, its shape needs others")
    return TensorSpec(name, dtype, shape, base + begin, base + end, file)


Part = tuple[str, str, tuple[int, ...], str]
"""What the content hash covers of a tensor: name, dtype, shape, sha256 of its data."""


def content_hash(parts: Iterable[Part]) -> str:
    rows = sorted([name, dtype, list(shape), digest] for name, dtype, shape, digest in parts)
    return hashlib.sha256(canonical_json(rows)).hexdigest()


def hash_span(fd: int, begin: int, end: int, advance: Callable[[float], None] = lambda amount: None) -> str:
    """Return the sha256 (hex) of the bytes [begin, end) of an open file. `advance`: takes note of the bytes read."""
    digest = hashlib.sha256()
    view = memoryview(bytearray(min(CHUNK_BYTES, max(1, end - begin))))
    while begin < end:
        got = os.preadv(fd, [view[: min(CHUNK_BYTES, end - begin)]], begin)
        if got <= 0:
            raise OSError(f"file ended at {begin}, expected {end}")
        digest.update(view[:got])
        begin += got
        advance(got)
    return digest.hexdigest()


def in_threads(work: Callable[[Given], Made], given: Sequence[Given]) -> list[Made]:
    """Return the results in order, each worked out in one of as many threads as there are cores, up to MAX_THREADS. Raises
    what the first of them to fail, in order, raised."""
    with ThreadPoolExecutor(max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)), len(given)))) as threads:
        return list(threads.map(work, given))


def weight_files(folder: Path) -> list[str]:
    """Return the sorted names of the safetensors files in a store or artifact folder."""
    return sorted(name for name in again(lambda: os.listdir(folder)) if name.endswith(".safetensors"))


def tensors_of(folder: Path) -> list[TensorSpec]:
    """Return all tensors of a store or artifact folder, read from the headers."""

    def read(name: str) -> list[TensorSpec]:
        with open(folder / name, "rb") as file:
            return read_header(file.fileno(), name)

    return [tensor for name in weight_files(folder) for tensor in again(functools.partial(read, name))]


def folder_content_hash(folder: Path, drop: frozenset[str] = frozenset()) -> str:
    """Return the content hash of a model folder, without the tensors in `drop`. For a base model use `base_content_hash`."""
    return content_hash(_folder_parts(folder, drop))


def _folder_parts(folder: Path, drop: frozenset[str] = frozenset()) -> list[Part]:
    """Read every tensor once. Raises Refused: a file is not a safetensors file, or two files hold the same tensor."""
    tensors = tensors_of(folder)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise Refused("tensor_twice", "a tensor is in two safetensors files", "keep one save, in one file or in shards")
    return in_threads(
        lambda tensor: again(functools.partial(_hashed, folder, tensor)), [t for t in tensors if t.name not in drop]
    )


def _hashed(folder: Path, tensor: TensorSpec) -> Part:
    with open(folder / tensor.file, "rb") as file:
        return tensor.name, tensor.dtype, tensor.shape, hash_span(file.fileno(), tensor.begin, tensor.end)


# --- tied embeddings: decided here for the content hash, the intake and every engine
#
# A head is tied if the config says so, or if the file has no head. A tied head that is in a file anyway must equal the embedding;
# the content hash does not cover it and no engine uses it.

_TIED = """
biogpt bloom cohere cohere2 cohere2_moe cpmant ctrl ernie4_5 ernie4_5_moe falcon falcon_mamba gemma gemma2 gemma3 gemma3_text
gemma3n gemma3n_text gemma4 gemma4_text gpt-sw3 gpt2 gpt_bigcode gpt_neo granite_swa jetmoe lfm2 lfm2_moe mamba minicpm3
modernbert-decoder mpt opt recurrent_gemma smollm3 starcoder2 vaultgemma xglm youtu zamba zamba2 zaya
"""
TIED_BY_DEFAULT = frozenset(_TIED.split())
"""Values of `model_type` that transformers (5.24) ties by default; it ties no other causal model without a config entry."""


def config_ties(config: Mapping[str, Any]) -> bool:
    """Return `tie_word_embeddings` as transformers resolves it."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        if isinstance(part.get("tie_word_embeddings"), bool):
            return bool(part["tie_word_embeddings"])
    return config.get("model_type") in TIED_BY_DEFAULT


def own_tensors(base: Path) -> tuple[list[TensorSpec], frozenset[str]]:
    """Return the tensors of a staged base model that its checkpoints must have, and the tensor names to ignore (a tied head)."""
    tensors = tensors_of(base)
    own = [tensor for tensor in tensors if tensor.name != HEAD_NAME]
    if len(own) < len(tensors) and not config_ties(json.loads(reading.read_bytes(base / "config.json"))):
        return tensors, frozenset()
    return own, frozenset({HEAD_NAME})


def base_content_hash(folder: Path) -> str:
    """Return the content hash of a base model; reads every tensor once. Raises Refused: it can't be one; `untied_head`: the config
    ties head and embedding, but the file holds two that differ: transformers would load both, other engines only one."""
    parts = _folder_parts(folder)
    _, tied = own_tensors(folder)
    found = {name: tuple(rest) for name, *rest in parts}
    if HEAD_NAME in tied & found.keys():
        embedding = next((name for name in EMBEDDING_NAMES if name in found), None)
        if embedding is None or found[HEAD_NAME] != found[embedding]:
            other = embedding or "an embedding that is known"
            what = f"config.json ties the embeddings (tie_word_embeddings), and {HEAD_NAME} is not {other}"
            advice = f"write `tie_word_embeddings: false` into config.json if the head counts, else save it without {HEAD_NAME}"
            raise Refused("untied_head", what, advice)
    return content_hash(part for part in parts if part[0] not in tied)


# --- hashes of files and folders

SKIPPED = ("__pycache__", ".git", ".mypy_cache", ".ruff_cache", ".pytest_cache")  # no part of the code


def file_sha256(path: Path) -> str:
    def once() -> str:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            with bar(f"hashing {path.name}", size) as advance:
                return hash_span(file.fileno(), 0, size, advance)

    return again(once)


def walk_files(folder: Path) -> list[str]:
    """Return the sorted relative paths of the regular files below `folder`, without caches; links are not followed."""
    found: list[str] = []
    for parent, folders, names in os.walk(folder, followlinks=False):
        folders[:] = [name for name in folders if name not in SKIPPED]
        paths = [Path(parent) / name for name in names if not name.endswith(".pyc")]
        found += [path.relative_to(folder).as_posix() for path in paths if path.is_file() and not path.is_symlink()]
    return sorted(found)


def tree_sha256(folder: Path, files: Iterable[str] | None = None) -> str:
    """Return a hash (hex) over (relative path, sha256) of the files below `folder`, or of `files` in it."""
    names = walk_files(folder) if files is None else sorted(files)
    return hashlib.sha256(canonical_json([[name, file_sha256(folder / name)] for name in names])).hexdigest()


# --- values of a file as numpy arrays

STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def widen(stored: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return values of a safetensors dtype (F32, F16; BF16 as uint16) as new fp32 values, exactly."""
    import numpy as np

    if dtype != "BF16":
        found: NDArray[Any] = stored.astype(np.float32)
        return found
    bits = stored.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def narrow(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return finite fp32 values in a safetensors dtype (BF16 as uint16), rounded to nearest even, Inf if too large."""
    import numpy as np

    if dtype != "BF16":
        with np.errstate(over="ignore"):
            return values.astype(STORED[dtype])
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
