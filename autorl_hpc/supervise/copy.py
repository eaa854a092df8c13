"""Copy a linted checkpoint while hashing and scanning it: each byte is read once, and what was hashed is what is stored. An adapter is
added to the base model's files on the way. Each tensor has its own hash, so threads share the work."""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.errors import Refused
from autorl_hpc.files.checkpoint import HEAD_NAME, ITEM_BYTES, TensorSpec, content_hash, read_header
from autorl_hpc.states import Fault
from autorl_hpc.supervise.adapters import ADAPTER_WEIGHTS, LintedAdapter, Merge, one_threaded_numpy
from autorl_hpc.supervise.lint import BaseModel, Linted, read_exactly

CHUNK_BYTES = 4 * 1024 * 1024  # small enough for the CPU caches, large enough for a shared file system
# Bit patterns from which on a value is Inf or NaN, without the sign bit. The largest pattern read as a signed number finds the positive
# ones, the largest read as unsigned finds the negative ones.
FIRST_NOT_FINITE = {"F32": ("<u4", "<i4", 0x7F800000), "BF16": ("<u2", "<i2", 0x7F80), "F16": ("<u2", "<i2", 0x7C00)}
# Those from which on a finite value becomes Inf when rounded to nearest even in the recipe's dtype: half a step above its largest number.
FIRST_OVERFLOWING = {("F32", "bfloat16"): 0x7F7F8000, ("F32", "float16"): 0x477FF000, ("BF16", "float16"): 0x4780}


@dataclass(frozen=True)
class Copied:
    """The result of a copy: the content hash, and each tensor's digest."""

    content_hash: str
    digests: dict[str, str]
    size_bytes: int
    not_in_hash: tuple[str, ...] = ()


def copy_checkpoint(linted: Linted, base: BaseModel, target: Path, dtype: str) -> Copied:
    """Copy the weight files into `target`. `dtype`: the recipe's (`float32`, `bfloat16`, `float16`). Raises Refused: a tensor holds NaN or
    Inf, or would in that dtype; a head is zero or constant; a tied head differs; a file changed meanwhile; OSError."""
    one_threaded_numpy()
    given = {ADAPTER_WEIGHTS: linted.fd} if isinstance(linted, LintedAdapter) else linted.files
    before = {name: _signature(fd) for name, fd in given.items()}
    outputs: dict[str, int] = {}
    stop = threading.Event()
    # In file order, because shared file systems are fast for large sequential reads and writes.
    ordered = sorted(linted.tensors, key=lambda tensor: (tensor.file, tensor.begin))
    try:
        for name, fd in linted.files.items():
            outputs[name] = os.open(target / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
            header = memoryview(bytearray(min(tensor.begin for tensor in ordered if tensor.file == name)))
            read_exactly(fd, header, 0, name)
            _write(outputs[name], header, 0)
        with ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0))), thread_name_prefix="copy") as pool:
            futures = [pool.submit(_copy_tensor, each, linted, outputs[each.file], stop, dtype) for each in ordered]
            try:
                digests = {tensor.name: future.result() for tensor, future in zip(ordered, futures, strict=True)}
            except BaseException:
                stop.set()
                raise
        changed = [name for name, fd in given.items() if _signature(fd) != before[name]]
        changed += [name for name in linted.files if not _same_header(outputs[name], name, linted)]
        if changed:
            advice = "submit after the save has ended, and don't write to the folder until you are told `accepted`"
            raise Refused("artifact_changed", f"{changed[0]} changed while it was copied", advice)
        for tensor in ordered:
            if tensor.name in {HEAD_NAME, base.embedding} and not (tensor.name == HEAD_NAME and linted.extra_head):
                _refuse_head(tensor, outputs[tensor.file])
        for fd in outputs.values():
            os.fsync(fd)
        size_bytes = sum(os.fstat(fd).st_size for fd in outputs.values())
    finally:
        for fd in outputs.values():
            os.close(fd)
    return _judge(linted, base, digests, size_bytes)


def _judge(linted: Linted, base: BaseModel, found: dict[str, tuple[str, str]], size_bytes: int) -> Copied:
    kept = [tensor for tensor in linted.tensors if not (linted.extra_head and tensor.name == HEAD_NAME)]
    digests = {name: digest for name, (digest, _) in found.items()}
    before = content_hash((t.name, t.dtype, t.shape, found[t.name][1]) for t in kept)
    if isinstance(linted, LintedAdapter) and before != base.content_hash:
        what = "the staged base model is not the one that the run was launched with: nothing is added to it"
        raise Refused("base_changed", what, "not your fault; tell whoever launched the run", Fault.CLUSTER)
    if linted.extra_head:
        embedding, kinds = base.embedding, {tensor.name: tensor.dtype for tensor in linted.tensors}
        if embedding is None or any(of[HEAD_NAME] != of[embedding] for of in (digests, kinds)):
            what = f"{HEAD_NAME} differs from {embedding}, but the base model ties them"
            raise Refused(
                "untied_head", what, f"keep tie_word_embeddings, and save without {HEAD_NAME}, as save_pretrained"
            )
    return Copied(
        content_hash=content_hash((t.name, t.dtype, t.shape, digests[t.name]) for t in kept),
        digests=digests,
        size_bytes=size_bytes,
        not_in_hash=(HEAD_NAME,) if linted.extra_head else (),
    )


def _same_header(copy: int, name: str, linted: Linted) -> bool:
    """Return whether the copy's header equals the linted one, which the hash used; the engine reads the copied one."""
    tensors = sorted(t for t in linted.tensors if t.file == name)
    try:
        return sorted(read_header(copy, name, min(t.begin for t in tensors))) == tensors
    except Refused:
        return False


def _copy_tensor(tensor: TensorSpec, linted: Linted, target: int, stop: threading.Event, dtype: str) -> tuple[str, str]:
    """Copy one tensor. Return its sha256, and that of the base model's bytes before an adapter was added."""
    merge = None
    if isinstance(linted, LintedAdapter) and tensor.name in linted.deltas:
        merge = Merge(linted, tensor)
    digest, base_digest = hashlib.sha256(), hashlib.sha256()
    row_bytes, step = _row_bytes(tensor), CHUNK_BYTES
    if merge is not None:  # whole rows
        step = max(1, CHUNK_BYTES // row_bytes) * row_bytes
    view = memoryview(bytearray(min(step, tensor.end - tensor.begin)))
    for position in range(tensor.begin, tensor.end, step):
        if stop.is_set():
            break
        chunk = view[: min(step, tensor.end - position)]
        read_exactly(linted.files[tensor.file], chunk, position, tensor.file)
        if merge is not None:
            base_digest.update(chunk)
            merge.add_to(chunk, (position - tensor.begin) // row_bytes)
        digest.update(chunk)
        _refuse_not_finite(chunk, tensor, merge is not None, dtype)
        _write(target, chunk, position)
    return digest.hexdigest(), (digest if merge is None else base_digest).hexdigest()


def _row_bytes(tensor: TensorSpec) -> int:
    return max(1, math.prod(tensor.shape[1:])) * ITEM_BYTES[tensor.dtype]


def _write(target: int, data: memoryview, position: int) -> None:
    sent = 0
    while sent < len(data):
        sent += os.pwrite(target, data[sent:], position + sent)


def _refuse_not_finite(chunk: memoryview, tensor: TensorSpec, merged: bool, dtype: str) -> None:
    import numpy as np

    unsigned, signed, not_finite = FIRST_NOT_FINITE[tensor.dtype]
    limit = FIRST_OVERFLOWING.get((tensor.dtype, dtype), not_finite)
    sign = 1 << (8 * ITEM_BYTES[tensor.dtype] - 1)
    values = np.frombuffer(chunk, dtype=unsigned)
    positive, negative = int(values.view(signed).max()), int(values.max()) - sign
    if max(positive, negative) < limit:
        return
    where = f"with {ADAPTER_WEIGHTS} added" if merged else f"of {tensor.file}"
    if max(positive, negative) >= not_finite:
        what, advice = "NaN or Inf", "the training diverged: submit an earlier checkpoint"
    else:
        what = f"values that become Inf in {dtype}, which this task is scored in"
        advice = f"submit an earlier checkpoint, or one that was trained in {dtype}"
    raise Refused("not_finite", f"tensor {tensor.name} {where} holds {what}", advice)


def _refuse_head(tensor: TensorSpec, copy: int) -> None:
    """Refuse a head or embedding that is all zero or whose rows are equal. A usual one is told by its first rows."""
    advice = "this model can't answer anything: check how it was saved"
    if not any(bool((rows << 1).any()) for rows in _blocks(tensor, copy)):  # without the sign: -0.0 is zero too
        raise Refused("zero_head", f"every value of {tensor.name} is zero", advice)
    first = next(_blocks(tensor, copy))[0]
    if tensor.shape[0] > 1 and all(bool((rows == first).all()) for rows in _blocks(tensor, copy)):
        what = f"all rows of {tensor.name} are equal: every token is the same to this model"
        raise Refused("constant_head", what, advice)


def _blocks(tensor: TensorSpec, copy: int) -> Iterator[Any]:
    """Yield the rows of a copied tensor as bit patterns, (rows, columns) a block."""
    import numpy as np

    row = _row_bytes(tensor)
    step = max(1, CHUNK_BYTES // row) * row
    for position in range(tensor.begin, tensor.end, step):
        data = os.pread(copy, min(step, tensor.end - position), position)
        yield np.frombuffer(data, dtype=FIRST_NOT_FINITE[tensor.dtype][0]).reshape(-1, row // ITEM_BYTES[tensor.dtype])


def _signature(fd: int) -> tuple[int, int, int, int]:
    info = os.fstat(fd)
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
