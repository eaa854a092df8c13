"""The engine `vllm`: workers of their own, one for each share of the grader's GPUs, between which prompts are spread.

The daemon keeps the tokenizer and makes texts of token ids, as every engine does; workers hold vLLM and the weights. Weights are
swapped in the living workers: each reads, checks and loads the artifact itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autorl_hpc.files.tying import own_tensors
from autorl_hpc.grading.engines import devices, framing, interpreter
from autorl_hpc.grading.engines.framing import Frame
from autorl_hpc.grading.engines.replica import MODULE, SILENCE_LIMIT_S, START_LIMIT_S, Replica
from autorl_hpc.grading.engines.shelf import default_bytes
from autorl_hpc.grading.engines.text import Words
from autorl_hpc.records.exchange import Engine as EngineIdentity
from autorl_hpc.records.experiment import GraderSpec
from autorl_hpc.records.task import Sampling
from autorl_hpc.rollouts.engine import Answer, EngineFailed, Loaded, Stream, WeightsChanged

CONFIG = "config.json"
COMPUTED_BY = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
"""Files of a folder of weights that would have to be the base model's own; artifacts hold none of them."""


@dataclass
class _Part:
    """A worker and what it is at."""

    replica: Replica
    ready: Frame | None = None
    asked: dict[int, int] = field(default_factory=dict)  # of the open stream: key and tokens of the prompt
    loaded: Frame | None = None

    @property
    def load(self) -> int:
        return sum(self.asked.values())


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
        self._same = {name: digest for name in COMPUTED_BY if (digest := _digest(base / name)) is not None}
        tensors, tied = own_tensors(base)
        entries = [] if spec.device == "cpu" else devices.visible()
        shares = devices.shares(entries, spec.tensor_parallel) if entries or spec.device == "cuda" else [[]]
        cache = default_bytes() if spec.cache_gib is None else int(spec.cache_gib * 2**30)
        first = {
            "op": "start",
            "base": str(base),
            "dtype": dtype,
            "ends": self._words.ends,
            "shapes": {tensor.name: list(tensor.shape) for tensor in tensors},
            "tied": sorted(tied),
            "tensor_parallel": spec.tensor_parallel,
            "gpu_memory": spec.gpu_memory,
            "context": spec.context_tokens,
            "cache_bytes": cache // (len(shares) * spec.tensor_parallel),
            "sleep_after_s": spec.sleep_after_s,
        }
        started = command or [interpreter.interpreter(), "-m", MODULE]
        logs = log or _log_beside_ours()
        self._parts: list[_Part] = []
        try:
            for number, share in enumerate(shares):
                replica = Replica(
                    started,
                    interpreter.environment(os.environ, devices.environment(share), spec.threads),
                    logs.with_name(f"{logs.stem}-{number}{logs.suffix}") if number else logs,
                    first,
                    lambda frame, number=number: self._hear(number, frame),  # type: ignore[misc]
                    self._fail,
                    start_limit_s=start_limit_s,
                    silence_limit_s=silence_limit_s,
                )
                with self._lock:
                    self._parts.append(_Part(replica))
            self._wait(lambda: all(part.ready is not None for part in self._parts))
        except BaseException:
            self.close()
            raise
        self._identity = self._introduced(spec)

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
        self._refuse_other_config(weights)
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
                answers[key] = answer
            if problem or len(answers) == len(prompts):
                done.set()

        if not prompts:
            return []
        stream = self.stream(sampling, seed, deliver)
        try:
            stream.ask(list(enumerate(prompts)))
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
            self._stream = _VllmStream(self, self._streams, sampling, seed, deliver)
            return self._stream

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._stream = None
            parts = list(self._parts)
            self._lock.notify_all()
        closers = [threading.Thread(target=part.replica.close, daemon=True) for part in parts]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()

    def _introduced(self, spec: GraderSpec) -> EngineIdentity:
        """The first worker speaks for all: they are the same program on the GPUs of one job."""
        frames = [part.ready for part in self._parts if part.ready is not None]
        kinds = sorted({frame.head["device"] for frame in frames})
        versions = dict(frames[0].head["ready"])
        if spec.context_tokens is not None:
            versions["context"] = str(frames[0].head["context"])
        device = " + ".join(kinds)
        if device == "cpu":
            from autorl_hpc.grading.engines.transformers import cpu_name

            device = f"cpu: {cpu_name()}"
        return EngineIdentity(
            backend="vllm", versions=versions, device=device, dtype=self._dtype, parallel=spec.tensor_parallel
        )

    def _refuse_other_config(self, weights: Path) -> None:
        """Artifacts are weights alone. Were there a config beside them, it would have to be the one that this engine computes by."""
        for name, wanted in self._same.items():
            found = _digest(weights / name)
            if found is not None and found != wanted:
                raise EngineFailed(
                    f"{weights} has a {name} that is not the base model's: its weights are not put into this engine"
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
                        part.asked.pop(key, None)
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
        """Of a stream alone: spreads prompts over the workers, each to the one that has the fewest tokens to do."""
        if not prompts:
            return
        with self._lock:
            self._raise_failure()
            if stream is not self._stream:
                raise EngineFailed("the stream is closed")
            given: list[list[tuple[int, Sequence[int]]]] = [[] for _ in self._parts]
            loads = [part.load for part in self._parts]
            for key, prompt in prompts:
                number = loads.index(min(loads))
                cost = len(prompt) + stream.sampling.max_new_tokens
                loads[number] += cost
                self._parts[number].asked[key] = cost
                given[number].append((key, prompt))
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
            parts = [part for part in self._parts if part.asked]
            for part in parts:
                part.asked.clear()
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
    ) -> None:
        self.number = number
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


def _digest(path: Path) -> str | None:
    """sha256 of a small file; None where there is none. A JSON's is that of its content, however it is laid out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        data = json.dumps(json.loads(data), sort_keys=True).encode()
    except ValueError:
        pass
    return hashlib.sha256(data).hexdigest()


def _log_beside_ours(environ: Mapping[str, str] = os.environ) -> Path:
    """`<the grader's log>.vllm.log`, where our own messages go to a file; else a file in a private folder."""
    try:
        ours = Path(os.readlink("/proc/self/fd/2"))
        if ours.is_absolute() and ours.is_file():
            return ours.with_name(f"{ours.stem}.vllm-{os.getpid()}.log")
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="autorl-engine-", dir=environ.get("TMPDIR"))) / "vllm.log"
