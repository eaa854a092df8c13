"""Engine `vllm`: one or more worker processes per share of the grader's GPUs; prompts are spread over the workers.

The daemon keeps the tokenizer, as with every engine; workers hold vLLM and the weights. For a swap, each worker reads, checks
and loads the artifact itself. Also here: which GPUs a grader may use (CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import datetime
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import reading
from autorl_hpc.files.checkpoint import own_tensors
from autorl_hpc.grading.engines import framing, worker_process
from autorl_hpc.grading.engines.framing import Frame, Routes
from autorl_hpc.grading.engines.transformers import BaseTokenizer, cpu_name
from autorl_hpc.grading.engines.weights_cache import default_bytes
from autorl_hpc.grading.engines.worker_process import MODULE, SILENCE_LIMIT_S, START_LIMIT_S, Replica, log_beside_ours
from autorl_hpc.records.exchange import Engine as EngineIdentity
from autorl_hpc.records.experiment import GraderSpec
from autorl_hpc.records.task import USUAL_DATE, Sampling
from autorl_hpc.rollouts.cores import usable_cores
from autorl_hpc.rollouts.engine import (
    CONVERSATION,
    Answer,
    EngineFailed,
    Loaded,
    LogLikelihood,
    Pair,
    WeightsChanged,
    fitted,
)
from autorl_hpc.states import Fault

# --- visible GPUs
# An entry is an index (`0`), a GPU (`GPU-5a1c...`) or a slice (`MIG-9e2f...`). vLLM expects numbers in many places, so whole
# GPUs are passed by index in PCI bus order (CUDA_DEVICE_ORDER), which is also the driver's order. Slices have no index.

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
NOTHING = frozenset({"", "-1", "none", "void", "NoDevFiles"})
"""Values by which schedulers and container tools say that there is no GPU. CUDA itself stops at the first invalid entry."""

_DEVICE = re.compile(r"nvidia\d+")


def is_slice(entry: str) -> bool:
    """Return whether the entry is a slice of a GPU."""
    return entry.startswith("MIG-")


def visible(environ: Mapping[str, str] = os.environ, count: Callable[[], int] | None = None) -> list[str]:
    """Return the entries of the GPUs that this process may use; `count` counts the node's if the variable is not set."""
    given = environ.get(VARIABLE)
    if given is None and count is not None:
        return [str(number) for number in range(count())]
    if given is None:  # by their device files, without loading the driver's library
        return [
            str(number) for number in range(sum(map(bool, map(_DEVICE.fullmatch, reading.list_names(Path("/dev"))))))
        ]
    found: list[str] = []
    for entry in (part.strip() for part in given.split(",")):
        if entry in NOTHING:
            break
        if entry not in found:
            found.append(entry)
    return found


def shares(entries: Sequence[str], each: int) -> list[list[str]]:
    """Split GPUs into groups of `each`, one per replica; a remainder is not used. AutorlError if there are too few GPUs, or slices
    would have to work together."""
    of_slices = each > 1 and any(map(is_slice, entries))
    if len(entries) < each or of_slices:
        raise AutorlError(
            "slices of GPUs (MIG) can't hold one model together: NCCL doesn't reach from one to another"
            if of_slices
            else f"the grader has {len(entries)} GPUs, `tensor_parallel` needs {each}",
            where=f"{VARIABLE}={','.join(entries)}",
            fault=Fault.CLUSTER,
            next_step="ask for more (whole) GPUs in `resources.grader.gpus`, or set `grader.tensor_parallel` lower",
            exit_code=Exit.ENVIRONMENT,
        )
    return [list(entries[at : at + each]) for at in range(0, len(entries) - each + 1, each)]


def environment(share: Sequence[str], index_of: Callable[[str], int | None] | None = None) -> dict[str, str]:
    """Return the environment variables that restrict a process to these GPUs; where `index_of` does not know a UUID, it is used."""
    indices = [(index_of or _index_of)(entry) if entry.startswith("GPU-") else None for entry in share]
    entries = (entry if index is None else str(index) for entry, index in zip(share, indices, strict=True))
    by_bus = any(index is not None for index in indices)
    return {VARIABLE: ",".join(entries), **({ORDER_VARIABLE: "PCI_BUS_ID"} if by_bus else {})}


def _index_of(entry: str) -> int | None:
    """Return a GPU's index by UUID from NVML. Like CUDA, NVML in a job counts only the job's GPUs."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))
                if (uuid if isinstance(uuid, str) else uuid.decode()).startswith(entry):  # CUDA accepts a prefix too
                    return index
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no library, no driver, or an old one: CUDA accepts the UUID itself
        return None
    return None


log = logging.getLogger("autorl_hpc.grader")


@dataclass
class _Part:
    replica: Replica
    ready: Frame | None = None
    loaded: Frame | None = None


class VllmEngine:
    """Implements the Protocol and Streaming."""

    def __init__(
        self,
        base: Path,
        spec: GraderSpec,
        dtype: str,
        *,
        date: datetime.date = USUAL_DATE,
        command: Sequence[str] | None = None,
        log: Path | None = None,
        start_limit_s: float = START_LIMIT_S,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        """Start the workers; EngineFailed or AutorlError if that fails. `command` replaces Python and the worker's module, and `log` is
        the file for the first worker's output; other workers write beside it."""
        self._base, self._dtype = base, dtype
        self.tokenizer = words = BaseTokenizer(base, date)
        self.encode, self.chat = words.encode, words.chat
        self.lock = threading.Condition()
        self._failure: EngineFailed | None = None
        self.open_stream: _VllmStream | None = None
        self._streams = self._loads = 0
        self._closed = False
        self.checked = (0, 0)
        """Tensors of the last swap that were compared on the device with the data read, and all tensors."""
        tensors, self._tied = own_tensors(base)
        self._shapes = {tensor.name: list(tensor.shape) for tensor in tensors}
        self._spec = spec
        self._command = command or [worker_process.interpreter(), "-m", MODULE]
        self._log = log or log_beside_ours()
        self._limits = {"start_limit_s": start_limit_s, "silence_limit_s": silence_limit_s}
        entries = [] if spec.device == "cpu" else visible()
        self._shares = shares(entries, spec.tensor_parallel) if entries or spec.device == "cuda" else [[]]
        self.parts: list[_Part] = []
        self._copies = 1
        try:
            self._start_some()
        except BaseException:
            self.close()
            raise
        self.identity = self._introduced()
        self.context_tokens = min(part.ready.head["context"] for part in self.parts if part.ready is not None) - 1

    def _start_some(self) -> None:
        """Start as many workers as configured. With `auto`, as many as suit the GPU, or one if these don't start; one on slices, whose
        memory is unknown, and on CPUs, which gain nothing."""
        wanted, share = self._spec.workers_per_gpu, self._shares[0]
        if wanted != "auto":
            self._copies = wanted
        elif len(share) == 1 and not is_slice(share[0]):
            self._copies = framing.fitting(self._shapes, usable_cores(), len(self._shares))
        try:
            self._start()
        except EngineFailed as error:
            if wanted != "auto" or self._copies == 1 or self._closed:
                raise
            log.warning("%d workers on one GPU do not start, one is tried: %s", self._copies, error)
            self._end_workers()
            self.parts, self._failure, self._copies = [], None, 1
            self._start()

    def _start(self) -> None:
        spec, cores = self._spec, usable_cores()
        places = [share for share in self._shares for _ in range(self._copies)]
        cache = default_bytes() if spec.cache_gib is None else int(spec.cache_gib * 2**30)
        first = {
            "op": "start",
            "base": str(self._base),
            "dtype": self._dtype,
            "ends": self.tokenizer.ends,
            "shapes": self._shapes,
            "tied": sorted(self._tied),
            "tensor_parallel": spec.tensor_parallel,
            "copies": self._copies,
            "gpu_memory": spec.gpu_memory / self._copies,
            "context": spec.context_tokens,
            "cache_bytes": cache // (len(places) * spec.tensor_parallel),
            "sleep_after_s": spec.sleep_after_s,
        }
        for number, share in enumerate(places):
            env = worker_process.environment(os.environ, environment(share), spec.threads)
            if share:
                env.update(worker_process.beside_gpus(os.environ, cores // len(places)))
            replica = Replica(
                self._command,
                env,
                self._log.with_name(f"{self._log.stem}-{number}{self._log.suffix}") if number else self._log,
                first,
                lambda frame, number=number: self._hear(number, frame),  # type: ignore[misc]
                self._fail,
                **self._limits,
            )
            with self.lock:
                self.parts.append(_Part(replica))
        self._wait(lambda: all(part.ready is not None for part in self.parts))

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [part.replica.pid for part in self.parts if part.replica.pid is not None]

    def prefetch(self, weights: Path, content_hash: str) -> None:
        for part in self.parts:
            with suppress(EngineFailed):  # the next load reports it
                part.replica.send({"op": "prefetch", "folder": str(weights), "hash": content_hash})

    def load(self, weights: Path, content_hash: str) -> Loaded:
        with self.lock:
            if self.open_stream is not None:
                raise EngineFailed("weights can't be swapped while a stream is open")
            self._loads += 1
            number = self._loads
            for part in self.parts:
                part.loaded = None
        for part in self.parts:
            part.replica.send({"op": "load", "id": number, "folder": str(weights), "hash": content_hash})
        started = time.monotonic()
        self._wait(lambda: all(part.loaded is not None for part in self.parts))
        waited_s = time.monotonic() - started
        told = [part.loaded.head for part in self.parts if part.loaded is not None]
        for head in told:
            if "changed" in head:
                raise WeightsChanged(head["changed"])
        for head in told:
            if "misfit" in head:
                raise EngineFailed(f"{weights}: {head['misfit']}")
            if "unread" in head:
                raise OSError(head["errno"] or 0, head["unread"])
        self.checked = (min(head["checked"] for head in told), min(head["tensors"] for head in told))
        swap_s = max(float(head["swap_s"]) for head in told)
        return Loaded(load_s=max(0.0, waited_s - swap_s), swap_s=swap_s)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Answer]:
        answers = self._collect(prompts, sampling, seed)
        return [answer for answer in answers if isinstance(answer, Answer)]

    def loglikelihood(self, pairs: Sequence[Pair]) -> list[LogLikelihood]:
        pairs = fitted(pairs, self.context_tokens)
        rows = [[*context, *continuation] for context, continuation in pairs]
        scores = self._collect(rows, Sampling(max_new_tokens=1), 0, [len(continuation) for _, continuation in pairs])
        return [score for score in scores if isinstance(score, LogLikelihood)]

    def _collect(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, scored: Sequence[int] = ()
    ) -> list[Answer | LogLikelihood]:
        """Return what the workers answer to each prompt, or, with `scored`, how likely so many of its last tokens are."""
        if not prompts:
            return []
        found: queue.SimpleQueue[tuple[int, Answer | LogLikelihood | Exception]] = queue.SimpleQueue()
        stream = self.stream(sampling, seed, lambda key, answer: found.put((key, answer)))
        answers: dict[int, Answer | LogLikelihood] = {}
        try:
            stream.ask([(number * CONVERSATION, prompt) for number, prompt in enumerate(prompts)], scored)
            while len(answers) < len(prompts):
                key, answer = found.get()
                if isinstance(answer, Exception):
                    raise answer
                answers[key // CONVERSATION] = answer
        finally:
            stream.close()
        return [answers[number] for number in range(len(prompts))]

    def stream(self, sampling: Sampling, seed: int, deliver: Callable[[int, Any], None]) -> _VllmStream:
        with self.lock:
            if self.open_stream is not None:
                raise EngineFailed("a stream is open already")
            self.raise_failure()
            self._streams += 1
            self.open_stream = _VllmStream(self, self._streams, sampling, seed, deliver, len(self.parts))
            return self.open_stream

    def close(self) -> None:
        with self.lock:
            self._closed = True
            self.open_stream = None
            self.lock.notify_all()
        self._end_workers()

    def _end_workers(self) -> None:
        closers = [threading.Thread(target=part.replica.close, daemon=True) for part in list(self.parts)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()

    def _introduced(self) -> EngineIdentity:
        """Return the engine's identity, from the first worker. Workers per GPU are part of it: they limit the prompts in a step and so
        decide the kernels of a whole evaluation."""
        spec, heads = self._spec, [part.ready.head for part in self.parts if part.ready is not None]
        versions = dict(heads[0]["ready"])
        if spec.context_tokens is not None:
            versions["context"] = str(heads[0]["context"])
        if self._copies > 1:
            versions["workers_per_gpu"] = str(self._copies)
        device = " + ".join(sorted({head["device"] for head in heads}))
        return EngineIdentity(
            backend="vllm",
            versions=versions,
            device=f"cpu: {cpu_name()}" if device == "cpu" else device,
            dtype=self._dtype,
            parallel=spec.tensor_parallel,
        )

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self.lock:
            self.lock.wait_for(lambda: self._failure is not None or self._closed or condition())
            self.raise_failure()

    def raise_failure(self) -> None:
        """Raise EngineFailed if the engine has failed or is closed."""
        if self._failure is not None:
            raise EngineFailed(str(self._failure))
        if self._closed:
            raise EngineFailed("the engine is closed")

    def _hear(self, number: int, frame: Frame) -> None:
        with self.lock:
            while len(self.parts) <= number:  # it sent a frame before it was added to the list
                self.lock.wait(0.1)
            part, head = self.parts[number], frame.head
            if "ready" in head:
                part.ready = frame
            elif "loaded" in head and head["loaded"] == self._loads:
                part.loaded = frame
            self.lock.notify_all()
            stream = self.open_stream
            if "answers" not in head or stream is None or stream.number != head["answers"]:
                return
            values = head.get("scores") or framing.unpack_tokens(head["lengths"], frame.block)
            found = list(zip(map(int, head["keys"]), values, strict=True))
            for key, _ in found:
                stream.routes.done(number, key)
        stream.hand_over(found, "scores" in head)

    def _fail(self, error: EngineFailed) -> None:
        """Give up the whole engine. Runs in the thread of the replica that ended."""
        with self.lock:
            first, self._failure = self._failure is None, self._failure or error
            stream = self.open_stream
            self.lock.notify_all()
        if first and stream is not None:
            stream.fail(error)


class _VllmStream:
    """The open stream. The workers' threads deliver answers one at a time."""

    def __init__(
        self,
        engine: VllmEngine,
        number: int,
        sampling: Sampling,
        seed: int,
        deliver: Callable[[int, Any], None],
        workers: int,
    ) -> None:
        self.number = number
        self.routes = Routes(workers, sampling.max_new_tokens)
        self._sampling, self._seed, self._engine, self._deliver = sampling, seed, engine, deliver
        self._delivering = threading.RLock()  # a consumer may close the stream while it receives an answer
        self._open = True

    def ask(self, prompts: Sequence[tuple[int, Sequence[int]]], scored: Sequence[int] = ()) -> None:
        """Spread prompts over the workers; `scored`: how many of each prompt's last tokens are scored, instead of an answer."""
        if not prompts:
            return
        engine = self._engine
        with engine.lock:
            engine.raise_failure()
            if engine.open_stream is not self:
                raise EngineFailed("the stream is closed")
            given: list[list[tuple[int, Sequence[int], int]]] = [[] for _ in engine.parts]
            for (key, prompt), count in zip(prompts, scored or [0] * len(prompts), strict=True):
                given[self.routes.give(key, len(prompt))].append((key, prompt, count))
        head = {"op": "ask", "stream": self.number, "seed": self._seed, "sampling": self._sampling.model_dump()}
        for part, rows in zip(engine.parts, given, strict=True):
            if rows:
                keys, asked, counts = zip(*rows, strict=True)
                lengths, block = framing.pack_tokens(asked)
                part.replica.send({**head, "keys": keys, "lengths": lengths, "scored": counts}, block)

    def close(self) -> None:
        engine = self._engine
        with engine.lock:
            is_open, busy = engine.open_stream is self, self.routes.busy()
            if is_open:
                engine.open_stream = None
        for number in busy if is_open else []:
            with suppress(EngineFailed):
                engine.parts[number].replica.send({"op": "drop", "stream": self.number})
        with self._delivering:
            self._open = False

    def hand_over(self, found: Sequence[tuple[int, Sequence[Any]]], scores: bool) -> None:
        """Deliver answers, or scores."""
        for key, value in found:
            answer = LogLikelihood(*value) if scores else self._engine.tokenizer.answer(value, self._sampling)
            with self._delivering:
                if self._open:
                    self._deliver(key, answer)

    def fail(self, error: EngineFailed) -> None:
        """Deliver the error that ends the stream."""
        with self._delivering:
            if self._open:
                self._open = False
                self._deliver(-1, error)
