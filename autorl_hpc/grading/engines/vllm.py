"""The engine `vllm`: workers of their own, one or more for each share of the grader's GPUs, between which prompts are spread.

The daemon keeps the tokenizer and makes texts of token ids, as every engine does; workers hold vLLM and the weights. Weights are
swapped in the living workers: each reads, checks and loads the artifact itself.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.files.tying import own_tensors
from autorl_hpc.grading.engines import copies, devices, framing, interpreter
from autorl_hpc.grading.engines.config import ComputedBy
from autorl_hpc.grading.engines.framing import Frame
from autorl_hpc.grading.engines.replica import MODULE, SILENCE_LIMIT_S, START_LIMIT_S, Replica, log_beside_ours
from autorl_hpc.grading.engines.routing import Routes
from autorl_hpc.grading.engines.shelf import default_bytes
from autorl_hpc.grading.engines.text import Words
from autorl_hpc.records.exchange import Engine as EngineIdentity
from autorl_hpc.records.experiment import GraderSpec
from autorl_hpc.records.task import Sampling
from autorl_hpc.rollouts.cores import usable_cores
from autorl_hpc.rollouts.engine import CONVERSATION, Answer, EngineFailed, Loaded, Stream, WeightsChanged

log = logging.getLogger("autorl_hpc.grader")


@dataclass
class _Part:
    """A worker and what it is at."""

    replica: Replica
    ready: Frame | None = None
    loaded: Frame | None = None


class VllmEngine:
    """See the Protocol, and Streaming."""

    def __init__(
        self,
        base: Path,
        spec: GraderSpec,
        dtype: str,
        *,
        command: Sequence[str] | None = None,
        log: Path | None = None,
        start_limit_s: float = START_LIMIT_S,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        """
        Args:
            command: in the place of Python and the worker's module.
            log: where the first worker's output goes; the others' lie beside it.

        Raises:
            EngineFailed, AutorlError: it does not start, or there is nothing to start it with.
        """
        self._base = base
        self._dtype = dtype
        self._words = Words(base)
        self._lock = threading.Condition()
        self._failure: EngineFailed | None = None
        self._stream: _VllmStream | None = None
        self._streams = self._loads = 0
        self._closed = False
        self._checked = (0, 0)
        self._config = ComputedBy(base)
        tensors, self._tied = own_tensors(base)
        self._shapes = {tensor.name: list(tensor.shape) for tensor in tensors}
        self._spec = spec
        self._command = command or [interpreter.interpreter(), "-m", MODULE]
        self._log = log or log_beside_ours()
        self._limits = {"start_limit_s": start_limit_s, "silence_limit_s": silence_limit_s}
        entries = [] if spec.device == "cpu" else devices.visible()
        self._shares = devices.shares(entries, spec.tensor_parallel) if entries or spec.device == "cuda" else [[]]
        self._parts: list[_Part] = []
        self._copies = 1
        try:
            self._start_some()
        except BaseException:
            self.close()
            raise
        self._identity = self._introduced()

    def _start_some(self) -> None:
        """Starts as many workers as are wanted; where several on a GPU were only thought to suit and don't start, one."""
        wanted = self._spec.workers_per_gpu
        self._copies = self._suitable_copies() if wanted == "auto" else wanted
        try:
            self._start()
        except EngineFailed as error:
            if wanted != "auto" or self._copies == 1 or self._closed:
                raise
            log.warning("%d workers on one GPU do not start, one is tried: %s", self._copies, error)
            self._end_workers()
            self._parts, self._failure, self._copies = [], None, 1
            self._start()

    def _suitable_copies(self) -> int:
        """Workers on each GPU. Of a slice's memory nothing is known here, and a CPU gains nothing."""
        share = self._shares[0]
        if len(share) != 1 or devices.is_slice(share[0]):
            return 1
        return copies.fitting(self._shapes, usable_cores(), len(self._shares))

    def _start(self) -> None:
        """Starts the workers and waits until all are ready."""
        spec, cores = self._spec, usable_cores()
        places = [share for share in self._shares for _ in range(self._copies)]
        cache = default_bytes() if spec.cache_gib is None else int(spec.cache_gib * 2**30)
        first = {
            "op": "start",
            "base": str(self._base),
            "dtype": self._dtype,
            "ends": self._words.ends,
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
            env = interpreter.environment(os.environ, devices.environment(share), spec.threads)
            if share:
                env.update(interpreter.beside_gpus(os.environ, cores // len(places)))
            replica = Replica(
                self._command,
                env,
                self._log.with_name(f"{self._log.stem}-{number}{self._log.suffix}") if number else self._log,
                first,
                lambda frame, number=number: self._hear(number, frame),  # type: ignore[misc]
                self._fail,
                **self._limits,
            )
            with self._lock:
                self._parts.append(_Part(replica))
        self._wait(lambda: all(part.ready is not None for part in self._parts))

    @property
    def identity(self) -> EngineIdentity:
        return self._identity

    @property
    def checked(self) -> tuple[int, int]:
        """Of the last swap: tensors that were compared on the device with what was read, and all tensors."""
        return self._checked

    @property
    def logs(self) -> list[Path]:
        """Of the workers."""
        return [part.replica.log for part in self._parts]

    @property
    def pids(self) -> list[int]:
        """Of the workers."""
        return [part.replica.pid for part in self._parts if part.replica.pid is not None]

    def encode(self, text: str) -> list[int]:
        return self._words.encode(text)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        return self._words.chat(messages)

    def prefetch(self, weights: Path, content_hash: str) -> None:
        for part in self._parts:
            try:
                part.replica.send({"op": "prefetch", "folder": str(weights), "hash": content_hash})
            except EngineFailed:
                return  # the next load says so

    def load(self, weights: Path, content_hash: str) -> Loaded:
        self._config.refuse_others(weights)
        with self._lock:
            if self._stream is not None:
                raise EngineFailed("weights can't be swapped while a stream is open")
            self._loads += 1
            number = self._loads
            for part in self._parts:
                part.loaded = None
        for part in self._parts:
            part.replica.send({"op": "load", "id": number, "folder": str(weights), "hash": content_hash})
        started = time.monotonic()
        self._wait(lambda: all(part.loaded is not None for part in self._parts))
        waited_s = time.monotonic() - started
        told = [part.loaded.head for part in self._parts if part.loaded is not None]
        for head in told:
            if "changed" in head:
                raise WeightsChanged(head["changed"])
        for head in told:
            if "misfit" in head:
                raise EngineFailed(f"{weights}: {head['misfit']}")
            if "unread" in head:
                raise OSError(head["errno"] or 0, head["unread"])
        self._checked = (min(head["checked"] for head in told), min(head["tensors"] for head in told))
        swap_s = max(float(head["swap_s"]) for head in told)
        return Loaded(load_s=max(0.0, waited_s - swap_s), swap_s=swap_s)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Answer]:
        answers: dict[int, Answer] = {}
        problem: list[Exception] = []
        done = threading.Event()

        def deliver(key: int, answer: Answer | Exception) -> None:
            if isinstance(answer, Exception):
                problem.append(answer)
            else:
                answers[key // CONVERSATION] = answer
            if problem or len(answers) == len(prompts):
                done.set()

        if not prompts:
            return []
        stream = self.stream(sampling, seed, deliver)
        try:
            stream.ask([(key * CONVERSATION, prompt) for key, prompt in enumerate(prompts)])
            done.wait()
        finally:
            stream.close()
        if problem:
            raise problem[0]
        return [answers[key] for key in range(len(prompts))]

    def stream(self, sampling: Sampling, seed: int, deliver: Callable[[int, Answer | Exception], None]) -> Stream:
        with self._lock:
            if self._stream is not None:
                raise EngineFailed("a stream is open already")
            self._raise_failure()
            self._streams += 1
            self._stream = _VllmStream(self, self._streams, sampling, seed, deliver, len(self._parts))
            return self._stream

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._stream = None
            self._lock.notify_all()
        self._end_workers()

    def _end_workers(self) -> None:
        with self._lock:
            parts = list(self._parts)
        closers = [threading.Thread(target=part.replica.close, daemon=True) for part in parts]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()

    def _introduced(self) -> EngineIdentity:
        """The first worker speaks for all: they are the same program on the GPUs of one job.

        How many share a GPU is part of it: that sets how many prompts a step has at most, and with it the kernels of a whole evaluation.
        """
        spec = self._spec
        frames = [part.ready for part in self._parts if part.ready is not None]
        kinds = sorted({frame.head["device"] for frame in frames})
        versions = dict(frames[0].head["ready"])
        if spec.context_tokens is not None:
            versions["context"] = str(frames[0].head["context"])
        if self._copies > 1:
            versions["workers_per_gpu"] = str(self._copies)
        device = " + ".join(kinds)
        if device == "cpu":
            from autorl_hpc.grading.engines.transformers import cpu_name

            device = f"cpu: {cpu_name()}"
        return EngineIdentity(
            backend="vllm", versions=versions, device=device, dtype=self._dtype, parallel=spec.tensor_parallel
        )

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._failure is not None or self._closed or condition())
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise EngineFailed(str(self._failure))
        if self._closed:
            raise EngineFailed("the engine is closed")

    def _hear(self, number: int, frame: Frame) -> None:
        """By the replica's thread."""
        with self._lock:
            while len(self._parts) <= number:  # it spoke before it was noted down
                self._lock.wait(0.1)
            part = self._parts[number]
            if "ready" in frame.head:
                part.ready = frame
            elif "loaded" in frame.head and frame.head["loaded"] == self._loads:
                part.loaded = frame
            elif "answers" in frame.head:
                stream = self._stream
                if stream is not None and stream.number == frame.head["answers"]:
                    tokens = framing.unpack_tokens(frame.head["lengths"], frame.block)
                    keys = [int(key) for key in frame.head["keys"]]
                    for key in keys:
                        stream.routes.done(number, key)
                    found = list(zip(keys, tokens, strict=True))
                else:
                    return
            self._lock.notify_all()
        if "answers" in frame.head and stream is not None:
            stream.hand_over(found)

    def _fail(self, error: EngineFailed) -> None:
        """By the thread of the replica that ended: the engine is given up as a whole."""
        with self._lock:
            first, self._failure = self._failure is None, self._failure or error
            stream = self._stream
            self._lock.notify_all()
        if first and stream is not None:
            stream.fail(error)

    def ask(self, stream: _VllmStream, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Of a stream alone: spreads prompts over the workers."""
        if not prompts:
            return
        with self._lock:
            self._raise_failure()
            if stream is not self._stream:
                raise EngineFailed("the stream is closed")
            given: list[list[tuple[int, Sequence[int]]]] = [[] for _ in self._parts]
            for key, prompt in prompts:
                given[stream.routes.give(key, len(prompt))].append((key, prompt))
        head = {"op": "ask", "stream": stream.number, "seed": stream.seed, "sampling": stream.sampling.model_dump()}
        for part, rows in zip(self._parts, given, strict=True):
            if rows:
                lengths, block = framing.pack_tokens(prompt for _, prompt in rows)
                part.replica.send({**head, "keys": [key for key, _ in rows], "lengths": lengths}, block)

    def drop(self, stream: _VllmStream) -> None:
        """Of a stream alone: its end."""
        with self._lock:
            if self._stream is not stream:
                return
            self._stream = None
            parts = [self._parts[number] for number in stream.routes.busy()]
        for part in parts:
            try:
                part.replica.send({"op": "drop", "stream": stream.number})
            except EngineFailed:
                continue

    def words(self, tokens: Sequence[int], sampling: Sampling) -> Answer:
        """Of a stream alone: the text of an answer."""
        return self._words.answer(tokens, sampling)


class _VllmStream:
    """The open stream. Deliveries are made one at a time, by the threads of the workers."""

    def __init__(
        self,
        engine: VllmEngine,
        number: int,
        sampling: Sampling,
        seed: int,
        deliver: Callable[[int, Answer | Exception], None],
        workers: int,
    ) -> None:
        self.number = number
        self.routes = Routes(workers, sampling.max_new_tokens)
        self.sampling = sampling
        self.seed = seed
        self._engine = engine
        self._deliver = deliver
        self._delivering = threading.RLock()  # a consumer may close the stream while it is handed an answer
        self._open = True

    def ask(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._engine.ask(self, prompts)

    def close(self) -> None:
        self._engine.drop(self)
        with self._delivering:
            self._open = False

    def hand_over(self, found: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Delivers answers."""
        for key, tokens in found:
            answer = self._engine.words(tokens, self.sampling)
            with self._delivering:
                if self._open:
                    self._deliver(key, answer)

    def fail(self, error: EngineFailed) -> None:
        """Delivers the end."""
        with self._delivering:
            if self._open:
                self._open = False
                self._deliver(-1, error)
