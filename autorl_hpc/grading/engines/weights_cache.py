"""Cache of checkpoints in host memory, read ahead in a thread and verified by content hash; and the process's memory limit.

The hashed bytes stay in private memory, so nobody can change them between check and use. Standard library only: the vLLM
worker's interpreter may lack other packages.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from autorl_hpc.errors import Refused
from autorl_hpc.files.checkpoint import TensorSpec, content_hash, in_threads, tensors_of, weight_files
from autorl_hpc.files.faults import again
from autorl_hpc.rollouts.cores import CGROUPS, own_folders
from autorl_hpc.rollouts.engine import WeightsChanged

OWN = Path("/proc/self/cgroup")
LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")  # Limit files of cgroup v2 and v1


def usable_bytes() -> int:
    """Return the smallest of the machine's memory, the limits of this process's cgroups, and the job's memory on this node."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in own_folders("memory", CGROUPS, OWN):
        for name in LIMITS:
            try:
                found.append(int((folder / name).read_text(encoding="ascii")))
            except (OSError, ValueError):  # missing, or `max`
                continue
    each_cpu, cpus = _number("SLURM_MEM_PER_CPU"), _number("SLURM_CPUS_ON_NODE")
    found += [mib * 2**20 for mib in (_number("SLURM_MEM_PER_NODE"), each_cpu * cpus)]
    return min(size for size in found if size > 0)


def _number(name: str) -> int:
    """Return a variable as a number; 0 if unset or invalid (Slurm's own 0 means the whole node)."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0


# --- checkpoint cache

READ_BYTES = 8 * 1024 * 1024
"""Bytes per read: large enough for shared file systems, and still in the processor's cache when hashed."""

MEMORY_SHARE = 8  # The default cache size is the usable memory divided by this

TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class LoadedTensor(NamedTuple):
    """One tensor of a checkpoint with its bytes. `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytearray | mmap.mmap
    sha256: str

    def as_torch(self) -> Any:
        """Return it as a tensor of torch, which shares the bytes."""
        import torch

        return torch.frombuffer(self.data, dtype=getattr(torch, TORCH_NAMES[self.dtype])).reshape(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """A whole, verified checkpoint."""

    content_hash: str
    tensors: tuple[LoadedTensor, ...]
    size: int  # bytes


def default_bytes() -> int:
    """Return the default size limit in bytes: an eighth of the usable memory."""
    return usable_bytes() // MEMORY_SHARE


def read_checkpoint(folder: Path, wanted: str, tied: frozenset[str]) -> Checkpoint:
    """Read a folder of safetensors files; WeightsChanged if the content hash is not the `wanted` one. `tied` tensors share
    another's storage: as in intake, a copy equal to another tensor is not hashed."""
    try:
        specs = sorted(tensors_of(folder), key=lambda spec: (spec.file, spec.begin))
        tensors = in_threads(lambda spec: again(functools.partial(_read_tensor, folder / spec.file, spec)), specs)
    except Refused as error:
        raise WeightsChanged(f"{folder} can't be read as it could when it was accepted: {error}") from error
    others = {tensor.sha256 for tensor in tensors if tensor.name not in tied}
    parts = [(t.name, t.dtype, t.shape, t.sha256) for t in tensors if t.name not in tied or t.sha256 not in others]
    if content_hash(parts) != wanted:
        raise WeightsChanged(f"{folder} no longer has the content {wanted}")
    return Checkpoint(wanted, tuple(tensors), sum(len(tensor.data) for tensor in tensors))


def _read_tensor(path: Path, spec: TensorSpec) -> LoadedTensor:
    data = _memory(spec.end - spec.begin)
    view, digest, position = memoryview(data), hashlib.sha256(), 0
    with open(path, "rb") as file:
        while position < len(data):
            got = os.preadv(file.fileno(), [view[position : position + READ_BYTES]], spec.begin + position)
            if got <= 0:
                raise WeightsChanged(f"{path} is shorter than its header says")
            digest.update(view[position : position + got])
            position += got
    return LoadedTensor(spec.name, spec.dtype, spec.shape, data, digest.hexdigest())


def _memory(size: int) -> bytearray | mmap.mmap:
    """Return memory for a tensor. `bytearray` fills it with zeros, one thread at a time, which for a large model takes longer than
    hashing it by several threads; huge pages save most of the page faults."""
    if size < READ_BYTES:
        return bytearray(size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _Read(NamedTuple):
    """A read that is under way or done. `asked`: a caller waits for it, otherwise it was only started ahead."""

    future: Future[Checkpoint]
    asked: bool


class WeightsCache:
    """Keeps the most recent checkpoints. One thread reads them, one after the other."""

    def __init__(self, limit_bytes: int, tied: frozenset[str] = frozenset()) -> None:
        self._limit = limit_bytes
        self._tied = tied
        self._lock = threading.Lock()
        self._reads: OrderedDict[str, _Read] = OrderedDict()  # least recently used first
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weights")

    def prefetch(self, folder: Path, wanted: str) -> None:
        """Start reading unless it is cached or larger than the limit. Returns at once; a failed read is repeated by `take`."""
        self._begin(folder, wanted, asked=False)

    def take(self, folder: Path, wanted: str, wait_s: float | None = None) -> Checkpoint | None:
        """Return the checkpoint; None if it is not read within `wait_s` seconds (reading continues).

        Raises:
            WeightsChanged, OSError: see `read_checkpoint`.
        """
        while True:
            read = self._begin(folder, wanted, asked=True)
            if not wait([read.future], wait_s).done:
                return None
            try:
                found = read.future.result()
            except Exception:
                with self._lock:
                    self._reads.pop(wanted, None)
                if read.asked:
                    raise
                continue  # it was read ahead too early
            with self._lock:
                if wanted in self._reads:
                    self._reads.move_to_end(wanted)
            self._make_room(0)
            return found

    def close(self) -> None:
        """Free the memory; a read in progress is discarded when it ends."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._reads.clear()

    def _begin(self, folder: Path, wanted: str, asked: bool) -> _Read:
        with self._lock:

            def read() -> Checkpoint:
                size = sum(again(functools.partial(os.stat, folder / name)).st_size for name in weight_files(folder))
                if size > self._limit and not asked:
                    raise OSError(f"{folder} is larger than the cache")
                self._make_room(size)
                return read_checkpoint(folder, wanted, self._tied)

            if wanted not in self._reads:
                self._reads[wanted] = _Read(self._reader.submit(read), asked)
            return self._reads[wanted]

    def _make_room(self, size: int) -> None:
        with self._lock:
            done = {name: read.future for name, read in self._reads.items() if read.future.done()}
            sizes = {name: future.result().size for name, future in done.items() if not future.exception()}
            for name in list(sizes):
                if sum(sizes.values()) + size <= self._limit:
                    return
                del sizes[name], self._reads[name]
