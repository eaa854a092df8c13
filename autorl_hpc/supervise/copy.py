"""Copy a linted checkpoint while hashing and scanning it: each byte is read once, and what was hashed is what is stored.

For an adapter, the base model's files are copied with the adapter added to their rows on the way, and the sum is hashed.
Each tensor has its own hash, so several threads work on different tensors; hashlib, reads and writes release the GIL.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.errors import Refused
from autorl_hpc.files.checkpoint import HEAD_NAME, ITEM_BYTES, TensorSpec, content_hash, read_header
from autorl_hpc.states import Fault
from autorl_hpc.supervise.adapters import ADAPTER_WEIGHTS, Merge
from autorl_hpc.supervise.checkpoint_folder import BaseModel
from autorl_hpc.supervise.lint import Linted

CHUNK_BYTES = 4 * 1024 * 1024
"""Small enough that hash and scan read it from the CPU caches, large enough for a shared file system."""

WRITEBACK_BYTES = 16 * 1024 * 1024
"""Write-back starts in steps of this size during the copy, so that the final fsync has little left to do."""

FIRST_NOT_FINITE = {"F32": ("<u4", "<i4", 0x7F800000), "BF16": ("<u2", "<i2", 0x7F80), "F16": ("<u2", "<i2", 0x7C00)}
"""Bit patterns from which on a value is Inf or NaN, with or without the sign bit. The largest pattern read as a signed number
finds the positive ones, the largest read as unsigned finds the negative ones."""

FIRST_OVERFLOWING = {
    ("F32", "bfloat16"): 0x7F7F8000,
    ("F32", "float16"): 0x477FF000,
    ("BF16", "float16"): 0x4780,
}
"""Bit patterns from which on a finite value becomes Inf when rounded to nearest even in the recipe's dtype: half a step above
the largest number of that dtype (65,520 for fp16)."""


@dataclass(frozen=True)
class Copied:
    """The result of a copy: the content hash, and each tensor's digest."""

    content_hash: str
    digests: dict[str, str]
    size_bytes: int
    not_in_hash: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Scan:
    """What one pass over a tensor found. `base_digest` is the hash of the base model's bytes before an adapter was added."""

    digest: str
    base_digest: str
    all_zero: bool
    rows_equal: bool


def workers() -> int:
    """Return the number of threads for one copy; more than four are faster than the disk."""
    return max(1, min(4, len(os.sched_getaffinity(0))))


def copy_checkpoint(linted: Linted, base: BaseModel, target: Path, dtype: str) -> Copied:
    """Copy the weight files into `target`.

    Args:
        dtype: the recipe's dtype, in which the grader loads the weights: `float32`, `bfloat16` or `float16`.

    Raises:
        Refused: a tensor holds NaN or Inf, or would in that dtype; a head is all zero or constant; a tied head differs; or
            a file changed during the copy.
        OSError: reading or writing failed (`errno` shows whose fault it is).
    """
    given = linted.files if linted.adapter is None else {ADAPTER_WEIGHTS: linted.adapter.fd}
    before = {name: _signature(fd) for name, fd in given.items()}
    outputs: dict[str, int] = {}
    stop = threading.Event()
    try:
        for name in linted.files:
            outputs[name] = os.open(target / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
        flusher = _Flusher(list(outputs.values()))
        for name, fd in linted.files.items():
            _copy_header(fd, outputs[name], min(t.begin for t in linted.tensors if t.file == name))
        heads = {HEAD_NAME, base.embedding}
        with ThreadPoolExecutor(workers(), thread_name_prefix="copy") as pool:

            def work(tensor: TensorSpec) -> _Scan:
                merge = None
                if linted.adapter is not None and tensor.name in linted.adapter.deltas:
                    merge = Merge(linted.adapter, tensor)
                source, copy = linted.files[tensor.file], outputs[tensor.file]
                return _copy_tensor(tensor, source, copy, stop, flusher, tensor.name in heads, merge, dtype)

            # In file order, because shared file systems are fast for large sequential reads and writes.
            ordered = sorted(linted.tensors, key=lambda t: (t.file, t.begin))
            futures = [pool.submit(work, tensor) for tensor in ordered]
            try:
                scans = {tensor.name: future.result() for tensor, future in zip(ordered, futures, strict=True)}
            except BaseException:
                stop.set()
                raise
        changed = [name for name, fd in given.items() if _signature(fd) != before[name]]
        changed += [name for name in linted.files if not _same_header(outputs[name], name, linted)]
        if changed:
            raise Refused(
                "artifact_changed",
                f"{changed[0]} changed while it was copied",
                "submit after the save has ended, and don't write to the folder until you are told `accepted`",
            )
        for fd in outputs.values():
            os.fsync(fd)
    finally:
        stop.set()
        for fd in outputs.values():
            os.close(fd)
    return _judge(linted, base, scans)


def _judge(linted: Linted, base: BaseModel, scans: dict[str, _Scan]) -> Copied:
    kept = [tensor for tensor in linted.tensors if not (linted.extra_head and tensor.name == HEAD_NAME)]
    if linted.adapter is not None:
        was = content_hash((t.name, t.dtype, t.shape, scans[t.name].base_digest) for t in kept)
        if was != base.content_hash:
            what = "the staged base model is not the one that the run was launched with: nothing is added to it"
            raise Refused("base_changed", what, "not your fault; tell whoever launched the run", Fault.CLUSTER)
    for name in (HEAD_NAME, base.embedding):
        if name in scans and not (name == HEAD_NAME and linted.extra_head):
            _refuse_head(name, scans[name])
    digests = {name: scan.digest for name, scan in scans.items()}
    left_out: tuple[str, ...] = ()
    if linted.extra_head:
        embedding, kinds = base.embedding, {tensor.name: tensor.dtype for tensor in linted.tensors}
        if embedding is None or any(of[HEAD_NAME] != of[embedding] for of in (digests, kinds)):
            raise Refused(
                "untied_head",
                f"{HEAD_NAME} differs from {embedding}, but the base model ties them",
                f"keep tie_word_embeddings as in the base model, and save without {HEAD_NAME}, as save_pretrained does",
            )
        left_out = (HEAD_NAME,)
    return Copied(
        content_hash=content_hash((t.name, t.dtype, t.shape, digests[t.name]) for t in kept),
        digests=digests,
        size_bytes=linted.size_bytes,
        not_in_hash=left_out,
    )


def _refuse_head(name: str, scan: _Scan) -> None:
    advice = "this model can't answer anything: check how it was saved"
    if scan.all_zero:
        raise Refused("zero_head", f"every value of {name} is zero", advice)
    if scan.rows_equal:
        raise Refused("constant_head", f"all rows of {name} are equal: every token is the same to this model", advice)


def _same_header(copy: int, name: str, linted: Linted) -> bool:
    """Return whether the copy's header equals the linted one, which the hash used; the engine reads the copied one."""
    tensors = sorted(t for t in linted.tensors if t.file == name)
    try:
        return sorted(read_header(copy, name, min(t.begin for t in tensors))) == tensors
    except Refused:
        return False


def _copy_header(source: int, target: int, length: int) -> None:
    data = os.pread(source, length, 0)
    if len(data) != length:
        raise Refused(
            "artifact_changed", "a file became shorter while it was copied", "submit after the save has ended"
        )
    view, position = memoryview(data), 0
    while position < length:
        position += os.pwrite(target, view[position:], position)


def _copy_tensor(
    tensor: TensorSpec,
    source: int,
    target: int,
    stop: threading.Event,
    flusher: _Flusher,
    is_head: bool,
    merge: Merge | None,
    dtype: str,
) -> _Scan:
    digest, base_digest = hashlib.sha256(), hashlib.sha256()
    head = _HeadScan(tensor) if is_head else None
    row_bytes = math.prod(tensor.shape[1:]) * ITEM_BYTES[tensor.dtype]
    step = max(1, CHUNK_BYTES // max(1, row_bytes)) * row_bytes  # whole rows, which heads and adapters need
    if head is None and merge is None:
        step = CHUNK_BYTES
    view = memoryview(bytearray(min(step, tensor.end - tensor.begin)))
    position = tensor.begin
    while position < tensor.end and not stop.is_set():
        chunk = view[: min(step, tensor.end - position)]
        _read(source, chunk, position, tensor.file)
        if merge is not None:
            base_digest.update(chunk)
            merge.add_to(chunk, (position - tensor.begin) // row_bytes)
        digest.update(chunk)
        _refuse_not_finite(chunk, tensor, merge is not None, dtype)
        if head is not None:
            head.look(chunk)
        sent = 0
        while sent < len(chunk):
            sent += os.pwrite(target, chunk[sent:], position + sent)
        flusher.wrote(target, len(chunk))
        position += len(chunk)
    kept = digest.hexdigest()
    return _Scan(
        digest=kept,
        base_digest=kept if merge is None else base_digest.hexdigest(),
        all_zero=head is not None and head.all_zero,
        rows_equal=head is not None and head.rows_equal,
    )


def _read(source: int, chunk: memoryview, position: int, file: str) -> None:
    got = 0
    while got < len(chunk):
        part = os.preadv(source, [chunk[got:]], position + got)
        if part <= 0:
            raise Refused(
                "artifact_changed", f"{file} became shorter while it was copied", "submit after the save has ended"
            )
        got += part


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


class _HeadScan:
    """Checks whether a head or embedding is all zero, or has equal rows, so that all tokens would be the same to the model."""

    def __init__(self, tensor: TensorSpec) -> None:
        self._unsigned, self._columns = FIRST_NOT_FINITE[tensor.dtype][0], math.prod(tensor.shape[1:])
        self._first: bytes | None = None
        self.all_zero = True
        self.rows_equal = tensor.shape[0] > 1

    def look(self, rows: memoryview) -> None:
        """Check the bytes of further whole rows."""
        import numpy as np

        values = np.frombuffer(rows, dtype=self._unsigned).reshape(-1, self._columns)
        if self._first is None:
            self._first = values[0].tobytes()
        if self.all_zero:
            self.all_zero = not bool((values << 1).any())  # shift the sign out: -0.0 is zero too
        if self.rows_equal:
            self.rows_equal = bool((values == np.frombuffer(self._first, dtype=self._unsigned)).all())


class _Flusher:
    """Starts write-back after every WRITEBACK_BYTES, without waiting for it if the system supports that."""

    def __init__(self, targets: list[int]) -> None:
        self._written = dict.fromkeys(targets, 0)
        self._lock = threading.Lock()
        self._start = _writeback_function()

    def wrote(self, target: int, count: int) -> None:
        with self._lock:
            before = self._written[target]
            self._written[target] = before + count
            due = before // WRITEBACK_BYTES != (before + count) // WRITEBACK_BYTES
        if due and self._start is not None:
            self._start(target)


def _writeback_function() -> Callable[[int], object] | None:
    """Return sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE), which starts write-back; None without Linux and glibc."""
    import ctypes

    try:
        function = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return lambda fd: function(fd, 0, 0, 2)


def _signature(fd: int) -> tuple[int, int, int, int]:
    info = os.fstat(fd)
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
